//! Computes a [`Verdict`](crate::ops::clip::Verdict) on the CPU.

use candle_core::{DType, Tensor};

use crate::Result;
use crate::tensor::device::empty;
use crate::tensor::host::with_slice_mut;
use crate::tensor::view::View;

/// Norm, factor, and whether the step is applied: f32 `[3]`, from parts of the squared norm.
pub fn judge(shares: &Tensor, max_norm: f32, loss_scale: f64, op: &'static str) -> Result<Tensor> {
    let total: f64 =
        View::<f64>::new(shares, op, "shares")?.iter().fold(0.0, |sum, share| sum + share);
    let norm = (total.sqrt() / loss_scale) as f32;
    let ratio = max_norm / (norm + 1e-6);
    let clip = if max_norm > 0.0 && ratio < 1.0 { ratio } else { 1.0 };
    let factor = (f64::from(clip) / loss_scale) as f32;
    let values = empty(3, DType::F32, shares.device())?;
    with_slice_mut::<f32, _>(&values, op, |to| {
        to.copy_from_slice(&[norm, factor, f32::from(u8::from(norm.is_finite()))]);
        Ok(())
    })?;
    Ok(values)
}
