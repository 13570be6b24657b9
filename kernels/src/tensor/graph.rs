//! Work of a GPU that is recorded once and queued again by one call, which costs the host a few
//! microseconds instead of one launch a kernel.

use candle_core::Device;

use crate::{Error, Result};

/// What a GPU has recorded.
pub struct Graph(
    #[cfg(feature = "cuda")] crate::tensor::gpu::graph::Graph,
    #[cfg(not(feature = "cuda"))] std::convert::Infallible,
);

/// Whether `device` records what is queued on it.
pub fn can_record(device: &Device) -> bool {
    cfg!(feature = "cuda") && device.is_cuda()
}

/// Records what `f` queues on `device`, which is not computed now but each time that the result is
/// launched.
///
/// A kernel is recorded with its arguments: numbers, and addresses of tensors. So `f` may read and
/// write tensors from outside of it, which the caller keeps as long as the result, and makes what
/// it needs besides; all of the latter is dropped when it returns, and lies at each launch where it
/// lay at the first. It waits for nothing and copies nothing from or to the host, which is an
/// error: a launch would copy again from where the host has something else by then. What is chosen
/// by measuring (`gpu::product`) has to be chosen before, by an ordinary run of `f`. Waits for the
/// device.
///
/// # Errors
/// If `device` is no GPU, those of `f`, or what the driver says.
pub fn record<E: From<Error>>(
    device: &Device,
    f: impl FnOnce() -> std::result::Result<(), E>,
) -> std::result::Result<Graph, E> {
    #[cfg(feature = "cuda")]
    return crate::tensor::gpu::graph::record(device, f).map(Graph);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = f;
        Err(Error::Device { op: "recording a graph", device: format!("{:?}", device.location()) }
            .into())
    }
}

impl Graph {
    /// Queues what was recorded, behind what is queued on its device. Nobody waits.
    ///
    /// # Errors
    /// What the driver says.
    pub fn launch(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        return self.0.launch();
        #[cfg(not(feature = "cuda"))]
        match self.0 {}
    }

    /// How many operations it has: kernels, and others.
    pub fn num_operations(&self) -> usize {
        #[cfg(feature = "cuda")]
        return self.0.num_operations();
        #[cfg(not(feature = "cuda"))]
        match self.0 {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_records_nothing_and_says_so() {
        assert!(!can_record(&Device::Cpu));
        let error = record(&Device::Cpu, || Ok::<(), Error>(())).err().unwrap().to_string();
        assert!(error.contains("recording a graph is not implemented on Cpu"), "{error}");
    }
}
