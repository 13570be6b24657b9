//! GELU (Hendrycks & Gimpel 2016, tanh approximation) and SwiGLU (Shazeer 2020).
//!
//! Products read the results: on a CPU their rows lie a line further apart where they would crowd its caches.

use candle_core::Tensor;

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
    on_gpu!(x, activation::gelu(x, OP));
    by_elem!(x, OP, E => cpu::activation::gelu::<E>(x, OP))
}

/// The gradient of `x` of [`gelu`].
///
/// # Errors
/// As [`gelu`], or if the shapes or dtypes differ.
pub fn gelu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    let _span = trace::moves("gelu_backward", &[dy, x, x]);
    const OP: &str = "gelu_backward";
    expect_shape(OP, "dy", dy, x.dims())?;
    on_gpu!(x, activation::gelu_backward(dy, x, OP));
    by_elem!(x, OP, E => cpu::activation::gelu_backward::<E>(dy, x, OP))
}

/// The gradient of `x` of [`gelu`], and `gelu(x)` again, bit for bit: for a backward whose forward did not keep it.
///
/// # Errors
/// As [`gelu_backward`].
pub fn gelu_backward_recompute(dy: &Tensor, x: &Tensor) -> Result<[Tensor; 2]> {
    const OP: &str = "gelu_backward_recompute";
    expect_shape(OP, "dy", dy, x.dims())?;
    let _span = trace::moves(OP, &[dy, x, x, x]);
    on_gpu!(x, activation::gelu_backward_recompute(dy, x, OP));
    let (_, width) = rows_of(x, OP)?;
    by_elem!(x, OP, E => cpu::activation::gelu_backward_recompute::<E>(dy, x, width, OP))
}

fn halves(x: &Tensor, op: &'static str) -> Result<usize> {
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
    let f = halves(x, OP)?;
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
    let f = halves(x, OP)?;
    expect_shape(OP, "dy", dy, &with_last(x, f))?;
    on_gpu!(x, activation::swiglu_backward(dy, x, f, OP));
    by_elem!(x, OP, E => cpu::activation::swiglu_backward::<E>(dy, x, f, OP))
}

/// The gradient of `x` of [`swiglu`], and `swiglu(x)` again, bit for bit: for a backward whose forward did not keep it.
///
/// # Errors
/// As [`swiglu_backward`].
pub fn swiglu_backward_recompute(dy: &Tensor, x: &Tensor) -> Result<[Tensor; 2]> {
    const OP: &str = "swiglu_backward_recompute";
    let _span = trace::moves(OP, &[dy, x, x, dy]);
    let f = halves(x, OP)?;
    expect_shape(OP, "dy", dy, &with_last(x, f))?;
    on_gpu!(x, activation::swiglu_backward_recompute(dy, x, f, OP));
    by_elem!(x, OP, E => cpu::activation::swiglu_backward_recompute::<E>(dy, x, f, OP))
}
