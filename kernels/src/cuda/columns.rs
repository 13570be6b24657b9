//! Sums of columns on a GPU: `cuda/columns.cu`.

use candle_core::{DType, Tensor};

use crate::Result;
use crate::tensor::gpu::items::{in_vectors, items, variant, vector};
use crate::tensor::gpu::launch::{blocks, blocks_y};
use crate::tensor::gpu::memory::suffix;
use crate::tensor::gpu::{DevicePointer, Gpu, THREADS};
use crate::tensor::view::rows_of;

const FILE: &str = "columns";
/// Threads of a block that are adjacent along a row.
const LANES: usize = 32;
/// Threads per block for adding up the partial sums.
const ADD_THREADS: u32 = 1024;
/// Blocks that fill a GPU of 132 multiprocessors once, with three on each. A second wave would
/// leave many multiprocessors idle.
const BLOCKS: usize = 396;
/// Least rows per block, as many as its threads load at once. This keeps the number of partial sums
/// small.
const MIN_SHARE: usize = 64;

/// `db [n] += Σ rows of dy [rows, n]`.
pub fn bias_grad(dy: &Tensor, db: &Tensor, op: &'static str) -> Result<()> {
    let (rows, n) = rows_of(dy, op)?;
    let (gpu, suffix) = (Gpu::of(dy, op)?, suffix(dy.dtype(), op)?);
    let (dys, dbs) = (gpu.input(dy, dy.dtype(), op, "dy")?, gpu.inplace(db, DType::F32, op, "db")?);
    let vectors = in_vectors(n, dy.dtype(), &[Some(dys)]);
    let columns = LANES * if vectors { vector(dy.dtype()) } else { 1 };
    let tiles = n.div_ceil(columns).max(1);
    let share = rows.div_ceil((BLOCKS / tiles).max(1)).max(MIN_SHARE);
    let shares = rows.div_ceil(share);
    let (partials, to) = gpu.output((shares, n), DType::F32, op)?;
    let grid = [blocks(op, n, columns)?, blocks_y(op, shares, 1)?, 1];
    let (rows, width, share) = (items(op, rows)?, items(op, n)?, items(op, share)?);
    gpu.launch(
        FILE,
        &format!("column_sums{}_{suffix}", variant(vectors)),
        grid,
        THREADS,
        0,
        |args| {
            args.ptr(dys).ptr(to).u32(rows).u32(width).u32(share);
        },
    )?;
    add_shares(&gpu, &partials, dbs, None, n, op)
}

/// Adds up partial sums `[shares, width]`: those of the first `n` columns go to `first`, the others
/// to `second`.
pub fn add_shares(
    gpu: &Gpu,
    partials: &Tensor,
    first: DevicePointer,
    second: Option<DevicePointer>,
    n: usize,
    op: &'static str,
) -> Result<()> {
    let (shares, width) = partials.dims2()?;
    if shares == 0 {
        return Ok(());
    }
    let from = gpu.input(partials, DType::F32, op, "sums")?;
    let (shares, n, count) = (items(op, shares)?, items(op, n)?, items(op, width)?);
    gpu.launch(FILE, "add_shares", [blocks(op, width, LANES)?, 1, 1], ADD_THREADS, 0, |args| {
        args.ptr(from).ptr(first).optional(second).u32(shares).u32(count).u32(n);
    })
}
