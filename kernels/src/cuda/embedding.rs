//! Rows of an embedding and their gradient on a GPU: `cuda/embedding.cu`.

use candle_core::{DType, Tensor};

use crate::Result;
use crate::tensor::gpu::items::{Divider, in_vectors, items, variant, vector};
use crate::tensor::gpu::launch::blocks;
use crate::tensor::gpu::memory::suffix;
use crate::tensor::gpu::{Gpu, THREADS};

const FILE: &str = "embedding";
/// Tokens per segment: one block sums a segment of a run.
const SEGMENT: usize = 64;
/// Tokens that one block of `embedding_sort` sorts.
const TILE: usize = 2048;

/// `ids` are u32; `weight` is `[rows, h]`.
pub fn forward(
    ids: &Tensor,
    weight: &Tensor,
    first_row: usize,
    op: &'static str,
) -> Result<Tensor> {
    let (gpu, dtype, suffix) = (Gpu::of(weight, op)?, weight.dtype(), suffix(weight.dtype(), op)?);
    let (rows, h) = weight.dims2()?;
    let (is, ws) =
        (gpu.input(ids, DType::U32, op, "ids")?, gpu.input(weight, dtype, op, "weight")?);
    let mut dims = ids.dims().to_vec();
    dims.push(h);
    let (y, ys) = gpu.output(dims, dtype, op)?;
    let vectors = in_vectors(h, dtype, &[Some(ws), Some(ys)]);
    let per_row = if vectors { h / vector(dtype) } else { h };
    let count = items(op, ids.elem_count() * per_row)?;
    let (first_row, rows, divider) =
        (first(first_row), items(op, rows)?, Divider::new(op, per_row)?);
    let grid = [blocks(op, count as usize, THREADS as usize)?, 1, 1];
    gpu.launch(
        FILE,
        &format!("embedding{}_{suffix}", variant(vectors)),
        grid,
        THREADS,
        0,
        |args| {
            args.ptr(is).ptr(ws).ptr(ys).u32(count).u32(first_row).u32(rows);
            // SAFETY: C layout, equal to the kernel's; no padding.
            unsafe { args.structure(&divider) };
        },
    )?;
    Ok(y)
}

/// The first row's id as kernels compare it: no id exceeds u32.
fn first(row: usize) -> u32 {
    u32::try_from(row).unwrap_or(u32::MAX)
}

/// `dweight [rows, h]` is f32; `dy` has the shape of `ids` followed by `h`.
pub fn backward(
    dy: &Tensor,
    ids: &Tensor,
    first_row: usize,
    dweight: &Tensor,
    op: &'static str,
) -> Result<()> {
    let (gpu, dtype, suffix) = (Gpu::of(dy, op)?, dy.dtype(), suffix(dy.dtype(), op)?);
    let ((rows, h), n) = (dweight.dims2()?, ids.elem_count());
    let (dys, is) = (gpu.input(dy, dtype, op, "dy")?, gpu.input(ids, DType::U32, op, "ids")?);
    let dws = gpu.inplace(dweight, DType::F32, op, "dweight")?;
    if n == 0 {
        return Ok(());
    }
    let vectors = in_vectors(h, dtype, &[Some(dys), Some(dws)]);
    let [(_sorted, sorted), (_order, order), (_starts, starts)] = {
        let list = || gpu.output(n, DType::U32, op);
        [list()?, list()?, list()?]
    };
    let (_keys, keys) = gpu.output(n, DType::I64, op)?;
    let (_partials, partials) = gpu.output((2 * n.div_ceil(SEGMENT), h), DType::F32, op)?;
    let (count, first_row, rows, width) =
        (items(op, n)?, first(first_row), items(op, rows)?, items(op, h)?);
    let by_token = blocks(op, n, THREADS as usize)?;
    gpu.launch(FILE, "embedding_sort", [blocks(op, n, TILE)?, 1, 1], TILE as u32 / 2, 0, |args| {
        args.ptr(is).ptr(keys).u32(count).u32(first_row).u32(rows);
    })?;
    gpu.launch(FILE, "embedding_place", [by_token, 1, 1], THREADS, 0, |args| {
        args.ptr(keys).ptr(sorted).ptr(order).u32(count);
    })?;
    gpu.launch(FILE, "embedding_starts", [by_token, 1, 1], THREADS, 0, |args| {
        args.ptr(sorted).ptr(starts).u32(count);
    })?;
    let threads = |elements: usize| {
        h.div_ceil(elements).next_multiple_of(32).clamp(SEGMENT, THREADS as usize) as u32
    };
    let kernel = format!("embedding_sum{}_{suffix}", variant(vectors));
    let by_thread = if vectors { vector(dtype) } else { 1 };
    gpu.launch(FILE, &kernel, [count, 1, 1], threads(by_thread), 0, |args| {
        args.ptr(dys)
            .ptr(sorted)
            .ptr(order)
            .ptr(starts)
            .ptr(dws)
            .ptr(partials)
            .u32(count)
            .u32(width)
            .u32(rows);
    })?;
    let by_thread = if vectors { vector(DType::F32) } else { 1 };
    let kernel = format!("embedding_join{}", variant(vectors));
    gpu.launch(FILE, &kernel, [blocks(op, n, SEGMENT)?, 1, 1], threads(by_thread), 0, |args| {
        args.ptr(sorted).ptr(starts).ptr(dws).ptr(partials).u32(count).u32(width).u32(rows);
    })
}
