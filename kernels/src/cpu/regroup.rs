//! Reorders rows.

use candle_core::Tensor;

use crate::Result;
use crate::tensor::device::empty;
use crate::tensor::host::{with_bytes, with_bytes_mut};
use crate::tensor::parallel;

/// `[a, b, …]` → `shape`, `[b, a, …]`.
pub fn swap_leading(
    x: &Tensor,
    a: usize,
    b: usize,
    shape: Vec<usize>,
    op: &'static str,
) -> Result<Tensor> {
    let row = shape[2..].iter().product::<usize>() * x.dtype().size_in_bytes();
    let y = empty(shape, x.dtype(), x.device())?;
    with_bytes(x, op, |x| {
        with_bytes_mut(&y, op, |y| {
            if row > 0 {
                parallel::blocks(y, parallel::rows_per_block(row) * row, |start, y| {
                    for (at, y) in (start / row..).zip(y.chunks_mut(row)) {
                        let from = (at % a * b + at / a) * row;
                        y.copy_from_slice(&x[from..from + row]);
                    }
                });
            }
            Ok(())
        })
    })?;
    Ok(y)
}
