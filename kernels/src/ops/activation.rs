//! GELU (Hendrycks & Gimpel 2016, tanh approximation), ReLU, squared ReLU (So et al. 2021) and
//! SwiGLU (Shazeer 2020).
//!
//! Products read the results: on a CPU their rows lie a line further apart where they would crowd
//! its caches.

use candle_core::Tensor;

use crate::cpu::activation::{Gelu, Relu, SquaredRelu};
use crate::tensor::element::by_elem;
use crate::tensor::trace;
use crate::tensor::view::{expect_shape, rows_of, with_last};
use crate::{Error, Result, cpu, on_gpu};

/// `y = x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³)))`, elementwise.
///
/// # Errors
/// If `x` is not contiguous or no float.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    let _span = trace::moves("gelu", &[x, x]);
    const OP: &str = "gelu";
    on_gpu!(x, activation::forward("gelu", x, OP));
    by_elem!(x, OP, E => cpu::activation::forward::<E, Gelu>(x, OP))
}

/// The gradient of `x` of [`gelu`].
///
/// # Errors
/// As [`gelu`], or if the shapes or dtypes differ.
pub fn gelu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    let _span = trace::moves("gelu_backward", &[dy, x, x]);
    const OP: &str = "gelu_backward";
    expect_shape(OP, "dy", dy, x.dims())?;
    on_gpu!(x, activation::backward("gelu", dy, x, OP));
    by_elem!(x, OP, E => cpu::activation::backward::<E, Gelu>(dy, x, OP))
}

/// The gradient of `x` of [`gelu`], and `gelu(x)` again, bit for bit: for a backward whose forward
/// did not keep it.
///
/// # Errors
/// As [`gelu_backward`].
pub fn gelu_backward_recompute(dy: &Tensor, x: &Tensor) -> Result<[Tensor; 2]> {
    const OP: &str = "gelu_backward_recompute";
    expect_shape(OP, "dy", dy, x.dims())?;
    let _span = trace::moves(OP, &[dy, x, x, x]);
    // A kernel each: neither is bound by arithmetic.
    on_gpu!(x, activation::backward_recompute("gelu", dy, x, OP));
    let (_, width) = rows_of(x, OP)?;
    by_elem!(x, OP, E => cpu::activation::backward_recompute::<E, Gelu>(dy, x, width, OP))
}

/// `y = max(x, 0)`, elementwise. NaN stays NaN.
///
/// # Errors
/// If `x` is not contiguous or no float.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    let _span = trace::moves("relu", &[x, x]);
    const OP: &str = "relu";
    on_gpu!(x, activation::forward("relu", x, OP));
    by_elem!(x, OP, E => cpu::activation::forward::<E, Relu>(x, OP))
}

/// The gradient of `x` of [`relu`].
///
/// # Errors
/// As [`relu`], or if the shapes or dtypes differ.
pub fn relu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    let _span = trace::moves("relu_backward", &[dy, x, x]);
    const OP: &str = "relu_backward";
    expect_shape(OP, "dy", dy, x.dims())?;
    on_gpu!(x, activation::backward("relu", dy, x, OP));
    by_elem!(x, OP, E => cpu::activation::backward::<E, Relu>(dy, x, OP))
}

/// The gradient of `x` of [`relu`], and `relu(x)` again, bit for bit: for a backward whose forward
/// did not keep it.
///
/// # Errors
/// As [`relu_backward`].
pub fn relu_backward_recompute(dy: &Tensor, x: &Tensor) -> Result<[Tensor; 2]> {
    const OP: &str = "relu_backward_recompute";
    expect_shape(OP, "dy", dy, x.dims())?;
    let _span = trace::moves(OP, &[dy, x, x, x]);
    // A kernel each: neither is bound by arithmetic.
    on_gpu!(x, activation::backward_recompute("relu", dy, x, OP));
    let (_, width) = rows_of(x, OP)?;
    by_elem!(x, OP, E => cpu::activation::backward_recompute::<E, Relu>(dy, x, width, OP))
}

/// `y = max(x, 0)²`, elementwise. NaN stays NaN.
///
/// # Errors
/// If `x` is not contiguous or no float.
pub fn squared_relu(x: &Tensor) -> Result<Tensor> {
    let _span = trace::moves("squared_relu", &[x, x]);
    const OP: &str = "squared_relu";
    on_gpu!(x, activation::forward("squared_relu", x, OP));
    by_elem!(x, OP, E => cpu::activation::forward::<E, SquaredRelu>(x, OP))
}

/// The gradient of `x` of [`squared_relu`].
///
/// # Errors
/// As [`squared_relu`], or if the shapes or dtypes differ.
pub fn squared_relu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    let _span = trace::moves("squared_relu_backward", &[dy, x, x]);
    const OP: &str = "squared_relu_backward";
    expect_shape(OP, "dy", dy, x.dims())?;
    on_gpu!(x, activation::backward("squared_relu", dy, x, OP));
    by_elem!(x, OP, E => cpu::activation::backward::<E, SquaredRelu>(dy, x, OP))
}

/// The gradient of `x` of [`squared_relu`], and `squared_relu(x)` again, bit for bit: for a
/// backward whose forward did not keep it.
///
/// # Errors
/// As [`squared_relu_backward`].
pub fn squared_relu_backward_recompute(dy: &Tensor, x: &Tensor) -> Result<[Tensor; 2]> {
    const OP: &str = "squared_relu_backward_recompute";
    expect_shape(OP, "dy", dy, x.dims())?;
    let _span = trace::moves(OP, &[dy, x, x, x]);
    // A kernel each: neither is bound by arithmetic.
    on_gpu!(x, activation::backward_recompute("squared_relu", dy, x, OP));
    let (_, width) = rows_of(x, OP)?;
    by_elem!(x, OP, E => cpu::activation::backward_recompute::<E, SquaredRelu>(dy, x, width, OP))
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
/// If the last dimension is odd, or `x` is not contiguous or no float.
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    let _span = trace::kernel("swiglu", 0, trace::bytes(&[x]) / 2 * 3);
    const OP: &str = "swiglu";
    let f = gate_width(x, OP)?;
    on_gpu!(x, activation::swiglu(x, f, OP));
    by_elem!(x, OP, E => cpu::activation::swiglu::<E>(x, f, OP))
}

/// The gradient of `x` of [`swiglu`], `[.., 2f]`.
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

/// The gradient of `x` of [`swiglu`], and `swiglu(x)` again, bit for bit: for a backward whose
/// forward did not keep it.
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
