//! Operands of a norm's backward pass.

use candle_core::Tensor;

/// Results of forward that backward needs, per row: `[rows]` each, in f32 (f64 for f64 inputs).
#[derive(Clone, Debug)]
pub struct NormStats {
    /// The mean; RMSNorm has none.
    pub mean: Option<Tensor>,
    /// 1 / √(variance + eps); for RMSNorm, 1 / √(mean square + eps).
    pub rstd: Tensor,
}

/// Tensors that backward reads and adds to.
pub(crate) struct Backward<'a> {
    pub dy: &'a Tensor,
    pub x: &'a Tensor,
    pub stats: &'a NormStats,
    pub weight: &'a Tensor,
    pub dweight: &'a Tensor,
    pub dbias: Option<&'a Tensor>,
    /// Added to the gradient of `x`.
    pub residual: Option<&'a Tensor>,
}
