//! Dropout (Srivastava et al. 2014) whose mask is a function of the place in the global problem,
//! fused with bias and residual.

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
/// If shapes contradict each other, dtypes differ or are no floats, an operand is not contiguous,
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

/// The gradient of what was dropped: the mask of forward and 1/(1−p) again. `dy` is `[s, b, h]`.
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
