//! Linear layers: forward, gradient of the input, and gradients of weight and bias that accumulate
//! in place.

use candle_core::Tensor;

use super::activation::{gelu, gelu_backward, gelu_backward_recompute};
#[cfg(feature = "cuda")]
pub use crate::cuda::product::set_tuning;
use crate::tensor::element::by_elem;
use crate::tensor::trace;
use crate::tensor::view::{
    expect_apart, expect_dtype, expect_elements, expect_shape, rows_of, with_last,
};
use crate::{Error, Result, cpu, on_cuda, on_gpu};

fn weight_dims(w: &Tensor, op: &'static str) -> Result<(usize, usize)> {
    match w.dims() {
        &[n, k] if n > 0 => Ok((n, k)),
        dims => Err(Error::shape(op, format!("weight has shape {dims:?} where [n, k] is needed"))),
    }
}

fn expect_forward(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    op: &'static str,
) -> Result<[usize; 3]> {
    let (rows, k) = rows_of(x, op)?;
    let (n, wk) = weight_dims(w, op)?;
    if k != wk {
        let message = format!(
            "x has shape {:?} and weight {:?}; their last dimensions must agree",
            x.dims(),
            w.dims()
        );
        return Err(Error::shape(op, message));
    }
    if let Some(bias) = bias {
        expect_shape(op, "bias", bias, &[n])?;
    }
    Ok([rows, k, n])
}

/// `y [.., n] = x [.., k] · wᵀ + bias` with `w [n, k]`, `bias [n]`; all of one dtype, with sums in
/// f32 (f64 for f64). On a CPU the rows of `x` may be strided.
///
/// # Errors
/// If shapes contradict each other, dtypes differ or are not floats, or an operand is not
/// contiguous.
pub fn linear(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let _span = trace::product("linear", x, w);
    const OP: &str = "linear";
    let dims = expect_forward(x, w, bias, OP)?;
    on_cuda!(x, linear::forward(x, w, bias, dims, x.dtype(), None, OP));
    by_elem!(x, OP, E => cpu::linear::linear::<E>(x, w, bias, dims, OP))
}

/// `y [.., n] = x [.., k] · wᵀ + bias + residual`, written to `y`, which has the result's number of
/// elements and dtype. One pass does all and rounds once. On a GPU this is so only where it is
/// faster than the product followed by a separate pass.
///
/// # Errors
/// As [`linear`], or if `residual` or `y` has another shape or dtype.
pub fn linear_add_into(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    residual: &Tensor,
    y: &Tensor,
) -> Result<()> {
    let _span = trace::product("linear", x, w);
    const OP: &str = "linear_add_into";
    let dims = expect_forward(x, w, bias, OP)?;
    for (what, t) in [("residual", residual), ("y", y)] {
        expect_shape(OP, what, t, &with_last(x, dims[2]))?;
        expect_dtype(OP, t, x.dtype())?;
    }
    expect_apart(OP, "y", y, &[x, w, residual])?;
    on_cuda!(x, linear::forward_add(x, w, bias, residual, dims, y, OP));
    by_elem!(x, OP, E => cpu::linear::add_into::<E>(x, w, bias, residual, dims, y, OP))
}

/// `h = x · wᵀ + bias` as [`linear`], and [`gelu`] of `h`. Returns both; backward needs `h`.
///
/// On a GPU one kernel may compute both, where that is faster. It applies GELU to the sums in f32,
/// before they are rounded to `h`.
///
/// # Errors
/// As [`linear`].
pub fn linear_gelu(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
    on_cuda!(
        x,
        linear::forward_gelu(x, w, bias, expect_forward(x, w, bias, "linear_gelu")?, "linear_gelu")
    );
    let h = linear(x, w, bias)?;
    let y = gelu(&h)?;
    Ok((h, y))
}

/// As [`linear`], with a result in f32 (f64 for f64). The sums of 16-bit operands are not rounded,
/// as logits need it.
///
/// # Errors
/// As [`linear`].
pub fn linear_to_f32(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let _span = trace::product("linear", x, w);
    const OP: &str = "linear_to_f32";
    let dims = expect_forward(x, w, bias, OP)?;
    on_cuda!(x, linear::forward(x, w, bias, dims, candle_core::DType::F32, None, OP));
    by_elem!(x, OP, E => cpu::linear::to_f32::<E>(x, w, bias, dims, OP))
}

/// As [`linear`] or [`linear_to_f32`], depending on the dtype of `y`, but writes the result to `y`:
/// a tensor or view with the result's number of elements. On a CPU the rows of `y` may be strided,
/// if they are the rows of the result.
///
/// # Errors
/// As [`linear`], or if `y` has another number of elements or a dtype that is not one of the two.
pub fn linear_into(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, y: &Tensor) -> Result<()> {
    let _span = trace::product("linear", x, w);
    const OP: &str = "linear_into";
    let dims = expect_forward(x, w, bias, OP)?;
    expect_elements(OP, "y", y, dims[0] * dims[2])?;
    on_cuda!(x, linear::forward_into(x, w, bias, dims, y, OP));
    expect_apart(OP, "y", y, &[x, w])?;
    if !y.is_contiguous() && rows_of(y, OP)? != (dims[0], dims[2]) {
        let message = format!(
            "y has shape {:?} and rows that lie apart; they must be those of the result",
            y.dims()
        );
        return Err(Error::shape(OP, message));
    }
    by_elem!(x, OP, E => cpu::linear::into::<E>(x, w, bias, dims, y, OP))
}

fn expect_dgrad(dy: &Tensor, w: &Tensor, op: &'static str) -> Result<[usize; 3]> {
    let (rows, n) = rows_of(dy, op)?;
    let (wn, k) = weight_dims(w, op)?;
    if n != wn {
        let message = format!(
            "dy has shape {:?} and weight {:?}; last must equal first",
            dy.dims(),
            w.dims()
        );
        return Err(Error::shape(op, message));
    }
    Ok([rows, k, n])
}

/// The gradient of `x`: `dx [.., k] = dy [.., n] · w`. On a CPU the rows of `dy` may be strided.
///
/// # Errors
/// As [`linear`].
pub fn linear_dgrad(dy: &Tensor, w: &Tensor) -> Result<Tensor> {
    let _span = trace::product("linear_dgrad", dy, w);
    const OP: &str = "linear_dgrad";
    let dims = expect_dgrad(dy, w, OP)?;
    on_cuda!(dy, linear::dgrad(dy, w, dims, None, OP));
    by_elem!(dy, OP, E => cpu::linear::dgrad::<E>(dy, w, dims, OP))
}

/// As [`linear_dgrad`], but writes the result to `dx`: a tensor or view with the result's number of
/// elements and dtype.
///
/// # Errors
/// As [`linear`], or if `dx` has another number of elements or another dtype.
pub fn linear_dgrad_into(dy: &Tensor, w: &Tensor, dx: &Tensor) -> Result<()> {
    let _span = trace::product("linear_dgrad", dy, w);
    const OP: &str = "linear_dgrad_into";
    let dims = expect_dgrad(dy, w, OP)?;
    let [rows, k, _] = dims;
    expect_elements(OP, "dx", dx, rows * k)?;
    expect_dtype(OP, dx, dy.dtype())?;
    on_cuda!(dy, linear::dgrad(dy, w, dims, Some(dx), OP).map(|_| ()));
    expect_apart(OP, "dx", dx, &[dy, w])?;
    by_elem!(dy, OP, E => cpu::linear::dgrad_into::<E>(dy, w, dims, dx, OP))
}

/// The gradient of `h [.., k]`, given that the gradient of `gelu(h)` is [`linear_dgrad`]`(dy, w)`:
/// the backward pass from the layer after [`linear_gelu`] to its `h`.
///
/// # Errors
/// As [`linear`], or if `h` has another shape or dtype.
pub fn linear_dgrad_gelu(dy: &Tensor, w: &Tensor, h: &Tensor) -> Result<Tensor> {
    const OP: &str = "linear_dgrad_gelu";
    let dims = expect_dgrad(dy, w, OP)?;
    expect_shape(OP, "h", h, &with_last(dy, dims[1]))?;
    expect_dtype(OP, h, dy.dtype())?;
    on_cuda!(dy, linear::dgrad_gelu(dy, w, h, dims, OP));
    gelu_backward(&linear_dgrad(dy, w)?, h)
}

/// As [`linear_dgrad_gelu`], and `gelu(h)` recomputed, bit for bit: for a backward pass if forward
/// did not keep `gelu(h)`.
///
/// # Errors
/// As [`linear_dgrad_gelu`].
pub fn linear_dgrad_gelu_recompute(dy: &Tensor, w: &Tensor, h: &Tensor) -> Result<[Tensor; 2]> {
    gelu_backward_recompute(&linear_dgrad(dy, w)?, h)
}

/// Adds the gradient of the weight: `dw [n, k] += dyᵀ · x`. `dw` may be a view of a flat buffer,
/// and is f32 for 16-bit operands. On a CPU the rows of `dy` and of `x` may be strided.
///
/// # Errors
/// As [`linear`].
pub fn linear_wgrad(dy: &Tensor, x: &Tensor, dw: &Tensor) -> Result<()> {
    wgrad(dy, x, dw, true, "linear_wgrad")
}

/// As [`linear_wgrad`], but overwrites `dw`.
///
/// # Errors
/// As [`linear`].
pub fn linear_wgrad_into(dy: &Tensor, x: &Tensor, dw: &Tensor) -> Result<()> {
    wgrad(dy, x, dw, false, "linear_wgrad_into")
}

fn wgrad(dy: &Tensor, x: &Tensor, dw: &Tensor, add: bool, op: &'static str) -> Result<()> {
    let _span = trace::product("linear_wgrad", dy, dw);
    let ((rows, n), (x_rows, k)) = (rows_of(dy, op)?, rows_of(x, op)?);
    if rows != x_rows {
        let message = format!(
            "dy has shape {:?} and x {:?}; they must have as many rows",
            dy.dims(),
            x.dims()
        );
        return Err(Error::shape(op, message));
    }
    expect_shape(op, "dw", dw, &[n, k])?;
    on_cuda!(dy, linear::wgrad(dy, x, dw, [rows, k, n], add, op));
    expect_apart(op, "dw", dw, &[dy, x])?;
    by_elem!(dy, op, E => cpu::linear::wgrad::<E>(dy, x, dw, add, op))
}

/// Adds the gradient of the bias: `db [n] += Σ_rows dy [.., n]`; `db` is f32 for 16-bit `dy`. On a
/// CPU the rows of `dy` may be strided.
///
/// # Errors
/// As [`linear`].
pub fn bias_grad(dy: &Tensor, db: &Tensor) -> Result<()> {
    let _span = trace::moves("bias_grad", &[dy]);
    const OP: &str = "bias_grad";
    let (_, n) = rows_of(dy, OP)?;
    expect_shape(OP, "db", db, &[n])?;
    on_gpu!(dy, columns::bias_grad(dy, db, OP));
    by_elem!(dy, OP, E => cpu::columns::bias_grad::<E>(dy, db, OP))
}
