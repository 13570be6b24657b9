//! Records GPU work once and queues it again by one call. This costs the host a few microseconds
//! instead of one launch per kernel.

use candle_core::Device;

use crate::{Error, Result};

/// Recorded GPU work.
pub struct Graph(
    #[cfg(feature = "cuda")] crate::tensor::gpu::graph::Graph,
    #[cfg(not(feature = "cuda"))] std::convert::Infallible,
);

/// Whether `device` can record the work queued on it.
pub fn can_record(device: &Device) -> bool {
    cfg!(feature = "cuda") && device.is_cuda()
}

/// Records the work that `f` queues on `device`. It is not computed now, but each time that the
/// result is launched. Waits for the device.
///
/// - A kernel is recorded with its arguments: numbers, and addresses of tensors. The caller keeps
///   every outside tensor that `f` reads or writes for as long as the result.
/// - Tensors that `f` makes are dropped when it returns. They have the same addresses at each
///   launch.
/// - `f` must neither wait nor copy from or to the host; both are errors. A launch would copy again
///   from host memory that holds something else by then.
/// - Choices by measurement (`cuda::product`) have to be made before, by an ordinary run of `f`.
///
/// # Errors
/// If `device` is not a GPU, those of `f`, or those of the driver.
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
    /// Queues the recorded work after other work on its device. Does not wait.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn launch(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        return self.0.launch();
        #[cfg(not(feature = "cuda"))]
        match self.0 {}
    }

    /// Number of recorded operations: kernels and others.
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
