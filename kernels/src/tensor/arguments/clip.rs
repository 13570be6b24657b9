//! What a step makes of its gradients.

use candle_core::Tensor;

use crate::tensor::device::to_host;
use crate::{Error, Result};

/// What a step makes of its gradients. On their device.
#[derive(Clone, Debug)]
pub struct Verdict(pub(crate) Tensor);

/// A verdict's numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decided {
    /// Norm of the gradient before clipping, without the loss scale.
    pub norm: f32,
    /// Factor on the gradient: clips it and takes the loss scale away.
    pub factor: f32,
    /// Whether parameters change: the norm is finite.
    pub applied: bool,
}

impl Verdict {
    /// f32 `[3]` on the device: what [`Verdict::read`] reads.
    pub fn values(&self) -> &Tensor {
        &self.0
    }

    /// The numbers, of [`Verdict::values`] on the host.
    ///
    /// # Errors
    /// If these are other values.
    pub fn read(values: &Tensor) -> Result<Decided> {
        match *values.to_vec1::<f32>()? {
            [norm, factor, applied] => Ok(Decided { norm, factor, applied: applied != 0.0 }),
            _ => Err(Error::shape(
                "verdict",
                format!("{} values are no verdict", values.elem_count()),
            )),
        }
    }

    /// The numbers where nobody has to wait for them: on the CPU.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn known(&self) -> Result<Option<Decided>> {
        #[cfg(gpu)]
        if crate::tensor::gpu::computes(self.0.device()) {
            return Ok(None);
        }
        self.decided().map(Some)
    }

    /// The numbers. Waits for the device.
    ///
    /// # Errors
    /// What the device says.
    pub fn decided(&self) -> Result<Decided> {
        Self::read(&to_host(&self.0)?)
    }
}
