//! Reorders rows on a GPU: `cuda/regroup.cu`.

use candle_core::Tensor;

use crate::Result;
use crate::tensor::gpu::items::{Divider, in_vectors, items, vector};
use crate::tensor::gpu::launch::blocks;
use crate::tensor::gpu::{Gpu, THREADS};

/// Items that each thread of `cuda/regroup.cu` copies.
const UNROLL: usize = 4;

/// `y[j, i] = x[i, j]` for rows of `[a, b, …]`; `shape` is the result's.
pub fn swap_leading(
    x: &Tensor,
    a: usize,
    b: usize,
    shape: Vec<usize>,
    op: &'static str,
) -> Result<Tensor> {
    let (gpu, dtype) = (Gpu::of(x, op)?, x.dtype());
    let from = gpu.input(x, dtype, op, "x")?;
    let (y, to) = gpu.output(shape, dtype, op)?;
    let width = x.elem_count() / (a * b).max(1);
    if width == 0 {
        return Ok(y);
    }
    let (size, per_row) = match in_vectors(width, dtype, &[Some(from), Some(to)]) {
        true => (16, width / vector(dtype)),
        false => (dtype.size_in_bytes(), width),
    };
    let count = items(op, a * b * per_row)?;
    let (per_row, rows) = (Divider::new(op, per_row)?, Divider::new(op, a)?);
    let grid = [blocks(op, count as usize, THREADS as usize * UNROLL)?, 1, 1];
    gpu.launch("regroup", &format!("swap_leading_{size}"), grid, THREADS, 0, |args| {
        args.ptr(to).ptr(from).u32(count);
        // SAFETY: as `Divider` of `cuda/include/divider.cuh`; three u32 have no padding.
        unsafe { args.structure(&per_row).structure(&rows) };
        args.u32(b as u32);
    })?;
    Ok(y)
}
