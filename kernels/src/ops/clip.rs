//! Clips by the norm of the whole gradient, and skips a step if the norm is not finite. The
//! decision is made on the device that holds the gradients.
//!
//! On a GPU the norm, the factor and the decision stay in device memory for the optimizer's
//! kernels. The host reads them at the end of the step, together with the loss.

use candle_core::{DType, Tensor};

pub use crate::tensor::arguments::clip::{Decided, Verdict};
use crate::tensor::trace;
use crate::tensor::view::expect_dtype;
use crate::{Result, cpu};

impl Verdict {
    /// Decides on gradients that are `loss_scale` times those of the loss. `shares`, f64 `[n]`, are
    /// parts of the squared norm, which are added in order. With a positive `max_norm` the factor
    /// is Megatron's: max_norm / (norm + 1e-6), if that is less than one.
    ///
    /// # Errors
    /// If `shares` is not contiguous or not f64.
    pub fn of(shares: &Tensor, max_norm: f64, loss_scale: f64) -> Result<Self> {
        const OP: &str = "verdict";
        let _span = trace::moves(OP, &[shares]);
        expect_dtype(OP, shares, DType::F64)?;
        #[cfg(gpu)]
        if crate::tensor::gpu::computes(shares.device()) {
            return crate::cuda::reduce::judge(shares, max_norm as f32, loss_scale, OP).map(Self);
        }
        cpu::clip::judge(shares, max_norm as f32, loss_scale, OP).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn decided(shares: &[f64], max_norm: f64, loss_scale: f64) -> Decided {
        let shares = Tensor::new(shares, &Device::Cpu).unwrap();
        Verdict::of(&shares, max_norm, loss_scale).unwrap().decided().unwrap()
    }

    #[test]
    fn a_norm_beyond_the_largest_is_clipped_as_megatron_does() {
        let clip = 1.0f32 / (5.0f32 + 1e-6);
        assert_eq!(
            decided(&[9.0, 16.0], 1.0, 1.0),
            Decided { norm: 5.0, factor: clip, applied: true }
        );
        assert_eq!(
            decided(&[9.0, 16.0], 6.0, 1.0),
            Decided { norm: 5.0, factor: 1.0, applied: true }
        );
        assert_eq!(
            decided(&[9.0, 16.0], 0.0, 1.0),
            Decided { norm: 5.0, factor: 1.0, applied: true }
        );
    }

    #[test]
    fn the_loss_scale_is_taken_from_norm_and_gradients() {
        assert_eq!(
            decided(&[9.0, 16.0], 6.0, 4.0),
            Decided { norm: 1.25, factor: 0.25, applied: true }
        );
        let clip = f64::from(1.0f32 / (1.25f32 + 1e-6));
        assert_eq!(decided(&[25.0], 1.0, 4.0).factor, (clip / 4.0) as f32);
    }

    #[test]
    fn a_norm_that_is_not_finite_is_against_the_step() {
        for (share, norm) in
            [(f64::NAN, f32::NAN), (f64::INFINITY, f32::INFINITY), (1e80, f32::INFINITY)]
        {
            let decided = decided(&[1.0, share], 1.0, 1.0);
            assert!(
                !decided.applied
                    && (decided.norm == norm || norm.is_nan() && decided.norm.is_nan()),
                "{decided:?}"
            );
        }
    }

    #[test]
    fn shares_of_another_dtype_are_refused() {
        Verdict::of(&Tensor::new(&[1f32], &Device::Cpu).unwrap(), 1.0, 1.0).unwrap_err();
    }
}
