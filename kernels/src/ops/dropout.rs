//! Dropout (Srivastava et al. 2014), fused with bias and residual. The mask is a function of the
//! element's place in the global problem.

use candle_core::Tensor;

use crate::tensor::arguments::dropout::Mask;
pub use crate::tensor::arguments::dropout::{Dropout, DropoutKey, Tokens, step_and_samples};
use crate::tensor::element::by_elem;
use crate::tensor::trace;
use crate::tensor::view::{expect_shape, rows_of};
use crate::{Result, cpu, on_gpu};

/// `y = residual + dropout(x + bias)`, with `x` and `residual` `[s, b, h]` and `bias` `[h]`; the
/// mask is the same for every dtype.
///
/// # Errors
/// If shapes contradict each other, dtypes differ or are not floats, an operand is not contiguous,
/// or p is not in [0, 1).
pub fn bias_dropout_add(
    x: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    dropout: Option<&Dropout>,
) -> Result<Tensor> {
    let _span = trace::moves("bias_dropout_add", &[x, residual.unwrap_or(x), x]);
    const OP: &str = "bias_dropout_add";
    let (_, h) = rows_of(x, OP)?;
    if let Some(bias) = bias {
        expect_shape(OP, "bias", bias, &[h])?;
    }
    if let Some(residual) = residual {
        expect_shape(OP, "residual", residual, x.dims())?;
    }
    let mask = dropout.map(|d| Mask::new(d, x, OP)).transpose()?;
    on_gpu!(x, dropout::apply(x, bias, residual, mask.as_ref(), OP));
    by_elem!(x, OP, E => cpu::dropout::apply::<E>(OP, x, bias, residual, mask.as_ref()))
}

/// The gradient with respect to the input of dropout: applies the forward pass's mask and 1/(1−p)
/// to `dy [s, b, h]`.
///
/// # Errors
/// As [`bias_dropout_add`].
pub fn dropout_backward(dy: &Tensor, dropout: &Dropout) -> Result<Tensor> {
    let _span = trace::moves("dropout_backward", &[dy, dy]);
    const OP: &str = "dropout_backward";
    let mask = Mask::new(dropout, dy, OP)?;
    on_gpu!(dy, dropout::apply(dy, None, None, Some(&mask), OP));
    by_elem!(dy, OP, E => cpu::dropout::apply::<E>(OP, dy, None, None, Some(&mask)))
}
