//! Checks of an operation's tensors and ranks before it is issued, shared by all transports.
//!
//! `operation` names the operation in errors, e.g. `all_gather on group tp (ranks 0,1)`.

use candle_core::Tensor;

use crate::{Error, Result};

/// Dtype and number of elements, e.g. `f32×128`.
pub fn elements(t: &Tensor) -> String {
    format!("{}×{}", t.dtype().as_str(), t.elem_count())
}

/// Checks that `large` holds `size` times the elements of `small`, of the same dtype.
pub fn check_parts(
    operation: impl Fn() -> String,
    size: usize,
    small: &Tensor,
    large: &Tensor,
) -> Result<()> {
    if small.dtype() == large.dtype() && small.elem_count() * size == large.elem_count() {
        return Ok(());
    }
    Err(Error::comm(format!(
        "{}: {} cannot be split into {size} parts of {}",
        operation(),
        elements(large),
        elements(small)
    )))
}

/// Checks that `input` and `output` of an all_to_all have equal dtype and length and divide into
/// `size` parts.
pub fn check_exchange(
    operation: impl Fn() -> String,
    size: usize,
    input: &Tensor,
    output: &Tensor,
) -> Result<()> {
    let count = input.elem_count();
    if output.elem_count() == count && output.dtype() == input.dtype() && count.is_multiple_of(size)
    {
        return Ok(());
    }
    Err(Error::comm(format!(
        "{}: input of {} and output of {} must be equal and divide by {size}",
        operation(),
        elements(input),
        elements(output),
    )))
}

/// Checks that `rank` exists in a group of `size`.
pub fn check_rank(operation: impl Fn() -> String, size: usize, rank: usize) -> Result<()> {
    if rank < size {
        return Ok(());
    }
    Err(Error::comm(format!("{}: there is no rank {rank} in the group", operation())))
}
