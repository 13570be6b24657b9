//! GELU (Hendrycks & Gimpel 2016, tanh approximation), ReLU, squared ReLU (So et al. 2021) and
//! SwiGLU (Shazeer 2020).
//!
//! Matrix products read the results. On a CPU the rows of a result are therefore padded by a cache
//! line where they would otherwise conflict in its caches.

use candle_core::Tensor;

use crate::cpu::activation::{Activation, Gelu, Relu, SquaredRelu};
use crate::tensor::element::by_elem;
use crate::tensor::trace;
use crate::tensor::view::{expect_shape, rows_of, with_last};
use crate::{Error, Result, cpu, on_gpu};

fn value<A: Activation>(x: &Tensor, op: &'static str) -> Result<Tensor> {
    let _span = trace::moves(op, &[x, x]);
    on_gpu!(x, activation::forward(A::NAME, x, op));
    by_elem!(x, op, E => cpu::activation::forward::<E, A>(x, op))
}

fn gradient<A: Activation>(dy: &Tensor, x: &Tensor, op: &'static str) -> Result<Tensor> {
    let _span = trace::moves(op, &[dy, x, x]);
    expect_shape(op, "dy", dy, x.dims())?;
    on_gpu!(x, activation::backward(A::NAME, dy, x, op));
    by_elem!(x, op, E => cpu::activation::backward::<E, A>(dy, x, op))
}

fn gradient_and_value<A: Activation>(
    dy: &Tensor,
    x: &Tensor,
    op: &'static str,
) -> Result<[Tensor; 2]> {
    expect_shape(op, "dy", dy, x.dims())?;
    let _span = trace::moves(op, &[dy, x, x, x]);
    on_gpu!(x, activation::backward_recompute(A::NAME, dy, x, op));
    let (_, width) = rows_of(x, op)?;
    by_elem!(x, op, E => cpu::activation::backward_recompute::<E, A>(dy, x, width, op))
}

/// `y = x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³)))`, elementwise.
///
/// # Errors
/// If `x` is not contiguous or its dtype is not a float.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    value::<Gelu>(x, "gelu")
}

/// The gradient of [`gelu`] with respect to `x`.
///
/// # Errors
/// As [`gelu`], or if the shapes or dtypes differ.
pub fn gelu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    gradient::<Gelu>(dy, x, "gelu_backward")
}

/// The gradient of [`gelu`] with respect to `x`, and `gelu(x)` recomputed, bit for bit: for a
/// backward pass if forward did not keep `gelu(x)`.
///
/// # Errors
/// As [`gelu_backward`].
pub fn gelu_backward_recompute(dy: &Tensor, x: &Tensor) -> Result<[Tensor; 2]> {
    gradient_and_value::<Gelu>(dy, x, "gelu_backward_recompute")
}

/// `y = max(x, 0)`, elementwise. NaN stays NaN.
///
/// # Errors
/// If `x` is not contiguous or its dtype is not a float.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    value::<Relu>(x, "relu")
}

/// The gradient of [`relu`] with respect to `x`.
///
/// # Errors
/// As [`relu`], or if the shapes or dtypes differ.
pub fn relu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    gradient::<Relu>(dy, x, "relu_backward")
}

/// The gradient of [`relu`] with respect to `x`, and `relu(x)` recomputed, bit for bit: for a
/// backward pass if forward did not keep `relu(x)`.
///
/// # Errors
/// As [`relu_backward`].
pub fn relu_backward_recompute(dy: &Tensor, x: &Tensor) -> Result<[Tensor; 2]> {
    gradient_and_value::<Relu>(dy, x, "relu_backward_recompute")
}

/// `y = max(x, 0)²`, elementwise. NaN stays NaN.
///
/// # Errors
/// If `x` is not contiguous or its dtype is not a float.
pub fn squared_relu(x: &Tensor) -> Result<Tensor> {
    value::<SquaredRelu>(x, "squared_relu")
}

/// The gradient of [`squared_relu`] with respect to `x`.
///
/// # Errors
/// As [`squared_relu`], or if the shapes or dtypes differ.
pub fn squared_relu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    gradient::<SquaredRelu>(dy, x, "squared_relu_backward")
}

/// The gradient of [`squared_relu`] with respect to `x`, and `squared_relu(x)` recomputed, bit for
/// bit: for a backward pass if forward did not keep `squared_relu(x)`.
///
/// # Errors
/// As [`squared_relu_backward`].
pub fn squared_relu_backward_recompute(dy: &Tensor, x: &Tensor) -> Result<[Tensor; 2]> {
    gradient_and_value::<SquaredRelu>(dy, x, "squared_relu_backward_recompute")
}

fn gate_width(x: &Tensor, op: &'static str) -> Result<usize> {
    let (_, width) = rows_of(x, op)?;
    if !width.is_multiple_of(2) {
        return Err(Error::shape(
            op,
            format!("x has shape {:?}; its last dimension (gate | up) must be even", x.dims()),
        ));
    }
    Ok(width / 2)
}

/// `y [.., f] = silu(gate) · up` of `x [.., 2f]` = gate | up.
///
/// # Errors
/// If the last dimension is odd, `x` is not contiguous, or its dtype is not a float.
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    let _span = trace::kernel("swiglu", 0, trace::bytes(&[x]) / 2 * 3);
    const OP: &str = "swiglu";
    let f = gate_width(x, OP)?;
    on_gpu!(x, activation::swiglu(x, f, OP));
    by_elem!(x, OP, E => cpu::activation::swiglu::<E>(x, f, OP))
}

/// The gradient `[.., 2f]` of [`swiglu`] with respect to `x`.
///
/// # Errors
/// As [`swiglu`], or if `dy` is not `[.., f]` of the same dtype.
pub fn swiglu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    let _span = trace::moves("swiglu_backward", &[dy, x, x]);
    const OP: &str = "swiglu_backward";
    let f = gate_width(x, OP)?;
    expect_shape(OP, "dy", dy, &with_last(x, f))?;
    on_gpu!(x, activation::swiglu_backward(dy, x, f, OP));
    by_elem!(x, OP, E => cpu::activation::swiglu_backward::<E>(dy, x, f, OP))
}

/// The gradient of [`swiglu`] with respect to `x`, and `swiglu(x)` recomputed, bit for bit: for a
/// backward pass if forward did not keep `swiglu(x)`.
///
/// # Errors
/// As [`swiglu_backward`].
pub fn swiglu_backward_recompute(dy: &Tensor, x: &Tensor) -> Result<[Tensor; 2]> {
    const OP: &str = "swiglu_backward_recompute";
    let _span = trace::moves(OP, &[dy, x, x, dy]);
    let f = gate_width(x, OP)?;
    expect_shape(OP, "dy", dy, &with_last(x, f))?;
    on_gpu!(x, activation::swiglu_backward_recompute(dy, x, f, OP));
    by_elem!(x, OP, E => cpu::activation::swiglu_backward_recompute::<E>(dy, x, f, OP))
}
