//! The decision on a step's gradients: norm, factor, and whether the step is applied.

use candle_core::Tensor;

use crate::tensor::device::to_host;
use crate::{Error, Result};

/// The decision on a step's gradients, kept on their device.
#[derive(Clone, Debug)]
pub struct Verdict(pub(crate) Tensor);

/// A verdict's numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decided {
    /// Norm of the gradient before clipping, without the loss scale.
    pub norm: f32,
    /// Factor for the gradient: clips it and divides by the loss scale.
    pub factor: f32,
    /// Whether parameters change, which is so if the norm is finite.
    pub applied: bool,
}

impl Verdict {
    /// f32 `[3]` on the device, for [`Verdict::read`].
    pub fn values(&self) -> &Tensor {
        &self.0
    }

    /// The numbers, from [`Verdict::values`] on the host.
    ///
    /// # Errors
    /// If `values` are not those of a verdict.
    pub fn read(values: &Tensor) -> Result<Decided> {
        match *values.to_vec1::<f32>()? {
            [norm, factor, applied] => Ok(Decided { norm, factor, applied: applied != 0.0 }),
            _ => Err(Error::shape(
                "verdict",
                format!("{} values are no verdict", values.elem_count()),
            )),
        }
    }

    /// The numbers if reading them needs no wait, that is, on the CPU; none on a GPU.
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
    /// Those of the device.
    pub fn decided(&self) -> Result<Decided> {
        Self::read(&to_host(&self.0)?)
    }
}
