//! Reorders rows for an exchange between ranks: from some columns of every row to every column of
//! some rows, and back.

use candle_core::Tensor;

use crate::tensor::trace;
use crate::{Error, Result, cpu, on_gpu};

/// `[a, b, …]` → `[b, a, …]`, bit for bit: `y[j, i] = x[i, j]`.
///
/// # Errors
/// If `x` has fewer than two dimensions, is not contiguous, or has a dtype that results cannot
/// have.
pub fn swap_leading(x: &Tensor) -> Result<Tensor> {
    const OP: &str = "swap_leading";
    let [a, b, rest @ ..] = x.dims() else {
        return Err(Error::shape(OP, format!("{:?} has no two dimensions to swap", x.dims())));
    };
    let (a, b) = (*a, *b);
    let shape = [&[b, a], rest].concat();
    if a == 1 || b == 1 {
        return Ok(x.reshape(shape)?);
    }
    let _span = trace::moves("regroup", &[x, x]);
    on_gpu!(x, regroup::swap_leading(x, a, b, shape, OP));
    cpu::regroup::swap_leading(x, a, b, shape, OP)
}
