//! LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019) over the last dimension.

use candle_core::Tensor;

use crate::tensor::arguments::norm::Backward;
pub use crate::tensor::arguments::norm::NormStats;
use crate::tensor::element::by_elem;
use crate::tensor::trace;
use crate::tensor::view::{expect_elements, expect_shape, rows_of};
use crate::{Error, Result, cpu, on_gpu};

/// `y = (x − mean) / √(var + eps) · weight + bias`, with `weight` and `bias` `[h]`.
///
/// # Errors
/// If shapes contradict each other, dtypes differ or are not floats, or an operand is not
/// contiguous.
pub fn layer_norm(
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    eps: f64,
) -> Result<(Tensor, NormStats)> {
    let _span = trace::moves("layer_norm", &[x, x]);
    const OP: &str = "layer_norm";
    expect_parameters(OP, x, [Some(weight), Some(bias)])?;
    on_gpu!(x, norm::forward(x, weight, Some(bias), eps, OP));
    by_elem!(x, OP, T => cpu::norm::forward::<T>(OP, x, weight, Some(bias), eps))
}

/// The gradient of `x`, plus `residual` if given (the gradient that reaches `x` through the
/// residual connection). Adds the gradients of weight and bias to `dweight` and `dbias`, `[h]` each
/// and in the dtype of the statistics.
///
/// # Errors
/// As [`layer_norm`].
pub fn layer_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    stats: &NormStats,
    weight: &Tensor,
    dweight: &Tensor,
    dbias: &Tensor,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let _span = moves_of_backward("layer_norm_backward", dy, x, residual);
    const OP: &str = "layer_norm_backward";
    if stats.mean.is_none() {
        return Err(Error::shape(OP, "the statistics hold no mean; they are those of rms_norm"));
    }
    let of = Backward { dy, x, stats, weight, dweight, dbias: Some(dbias), residual };
    of.check(OP)?;
    on_gpu!(x, norm::backward(&of, OP));
    by_elem!(x, OP, T => cpu::norm::backward::<T>(OP, &of))
}

/// `y = x / √(mean(x²) + eps) · weight`, with `weight` `[h]`.
///
/// # Errors
/// As [`layer_norm`].
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, NormStats)> {
    let _span = trace::moves("rms_norm", &[x, x]);
    const OP: &str = "rms_norm";
    expect_parameters(OP, x, [Some(weight), None])?;
    on_gpu!(x, norm::forward(x, weight, None, eps, OP));
    by_elem!(x, OP, T => cpu::norm::forward::<T>(OP, x, weight, None, eps))
}

/// The gradient of `x`, plus `residual` if given; adds the gradient of weight to `dweight`, `[h]`
/// in the dtype of the statistics.
///
/// # Errors
/// As [`layer_norm`].
pub fn rms_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    stats: &NormStats,
    weight: &Tensor,
    dweight: &Tensor,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let _span = moves_of_backward("rms_norm_backward", dy, x, residual);
    const OP: &str = "rms_norm_backward";
    if stats.mean.is_some() {
        return Err(Error::shape(OP, "the statistics hold a mean; they are those of layer_norm"));
    }
    let of = Backward { dy, x, stats, weight, dweight, dbias: None, residual };
    of.check(OP)?;
    on_gpu!(x, norm::backward(&of, OP));
    by_elem!(x, OP, T => cpu::norm::backward::<T>(OP, &of))
}

fn moves_of_backward(
    name: &'static str,
    dy: &Tensor,
    x: &Tensor,
    residual: Option<&Tensor>,
) -> trace::Span {
    match residual {
        Some(residual) => trace::moves(name, &[dy, x, x, residual]),
        None => trace::moves(name, &[dy, x, x]),
    }
}

/// # Errors
/// If weight or bias is not `[h]`, with the width of `x`.
fn expect_parameters(op: &'static str, x: &Tensor, parameters: [Option<&Tensor>; 2]) -> Result<()> {
    let (_, h) = rows_of(x, op)?;
    for (what, t) in ["weight", "bias"].into_iter().zip(parameters) {
        t.map_or(Ok(()), |t| expect_shape(op, what, t, &[h]))?;
    }
    Ok(())
}

impl Backward<'_> {
    /// # Errors
    /// If shapes do not fit.
    fn check(&self, op: &'static str) -> Result<()> {
        let (rows, h) = rows_of(self.x, op)?;
        expect_parameters(op, self.x, [Some(self.weight), None])?;
        for (what, t) in [("dy", Some(self.dy)), ("residual", self.residual)] {
            t.map_or(Ok(()), |t| expect_shape(op, what, t, self.x.dims()))?;
        }
        for (what, t) in [("rstd", Some(&self.stats.rstd)), ("mean", self.stats.mean.as_ref())] {
            t.map_or(Ok(()), |t| expect_elements(op, what, t, rows))?;
        }
        for grad in [Some(self.dweight), self.dbias].into_iter().flatten() {
            expect_shape(op, "the parameter's gradient", grad, &[h])?;
        }
        Ok(())
    }
}
