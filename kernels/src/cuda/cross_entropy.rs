//! Cross entropy on a GPU: `cuda/cross_entropy.cu`.

use candle_core::{DType, Tensor};

use crate::Result;
use crate::tensor::arguments::cross_entropy::{Columns, Rows};
use crate::tensor::gpu::items::{in_vectors, items, variant, vector};
use crate::tensor::gpu::launch::{blocks, blocks_y};
use crate::tensor::gpu::memory::suffix;
use crate::tensor::gpu::{DevicePointer, Gpu, THREADS};
use crate::tensor::trace;
use crate::tensor::view::{expect_dtype, expect_elements, rows_of};

const FILE: &str = "cross_entropy";
/// Most threads of a block that computes a row's statistics.
const ROW_THREADS: usize = 512;
/// Bytes of rows that a multiprocessor's blocks may process at a time, if there are several: a
/// hundred multiprocessors share an L2 cache of 50 MB.
const BYTES_AT_ONCE: usize = 256 << 10;

impl Columns {
    /// First column and number of columns as kernels compare them: no target exceeds u32.
    fn counts(self, op: &'static str) -> Result<(u32, u32)> {
        Ok((u32::try_from(self.first).unwrap_or(u32::MAX), items(op, self.valid)?))
    }
}

fn targets_of(gpu: &Gpu, targets: &Tensor, rows: usize, op: &'static str) -> Result<DevicePointer> {
    expect_dtype(op, targets, DType::U32)?;
    expect_elements(op, "targets", targets, rows)?;
    gpu.input(targets, DType::U32, op, "targets")
}

fn per_row(
    gpu: &Gpu,
    t: &Tensor,
    rows: usize,
    op: &'static str,
    what: &'static str,
) -> Result<DevicePointer> {
    expect_elements(op, what, t, rows)?;
    gpu.input(t, DType::F32, op, what)
}

/// Threads that share a row of `v` logits. The bits of its sum depend on this number.
fn row_threads(v: usize, dtype: DType) -> u32 {
    v.div_ceil(vector(dtype)).next_multiple_of(32).min(ROW_THREADS) as u32
}

/// Returns `[rows]` and `[2, rows]`; `columns` are checked.
pub fn row_statistics(
    logits: &Tensor,
    targets: &Tensor,
    columns: Columns,
    op: &'static str,
) -> Result<(Tensor, Tensor)> {
    let (gpu, dtype, suffix) = (Gpu::of(logits, op)?, logits.dtype(), suffix(logits.dtype(), op)?);
    let (rows, v) = rows_of(logits, op)?;
    let (ls, ts) = (gpu.input(logits, dtype, op, "logits")?, targets_of(&gpu, targets, rows, op)?);
    let ((max, maxs), (sums, sum)) =
        (gpu.output(rows, DType::F32, op)?, gpu.output((2, rows), DType::F32, op)?);
    let vectors = in_vectors(v, dtype, &[Some(ls)]);
    let threads = row_threads(v, dtype);
    let (first, valid) = columns.counts(op)?;
    let (row_count, width) = (items(op, rows)?, items(op, v)?);
    let kernel = format!("row_statistics{}_{suffix}", variant(vectors));
    gpu.launch(FILE, &kernel, [row_count, 1, 1], threads, 0, |args| {
        args.ptr(ls).ptr(ts).ptr(maxs).ptr(sum).u32(row_count).u32(width).u32(first).u32(valid);
    })?;
    Ok((max, sums))
}

/// `sums` is `[2, rows]`.
pub fn rebase(
    sums: &Tensor,
    own_max: &Tensor,
    max: &Tensor,
    targets: &Tensor,
    columns: Columns,
    op: &'static str,
) -> Result<()> {
    let (gpu, rows) = (Gpu::of(sums, op)?, max.elem_count());
    let ts = targets_of(&gpu, targets, rows, op)?;
    let (own, all) =
        (per_row(&gpu, own_max, rows, op, "own_max")?, per_row(&gpu, max, rows, op, "max")?);
    let to = gpu.inplace(sums, DType::F32, op, "sums")?;
    let ((first, valid), count) = (columns.counts(op)?, items(op, rows)?);
    gpu.launch(FILE, "rebase", [blocks(op, rows, THREADS as usize)?, 1, 1], THREADS, 0, |args| {
        args.ptr(to).ptr(own).ptr(all).ptr(ts).u32(count).u32(first).u32(valid);
    })
}

/// `total` has one element, `sums` is `[2, rows]`, `mask` has as many rows.
pub fn add_losses(total: &Tensor, sums: &Tensor, mask: &Tensor, op: &'static str) -> Result<()> {
    let (gpu, rows) = (Gpu::of(sums, op)?, items(op, mask.elem_count())?);
    let (from, weights) =
        (gpu.input(sums, DType::F32, op, "sums")?, gpu.input(mask, DType::F32, op, "mask")?);
    let to = gpu.inplace(total, DType::F64, op, "total")?;
    gpu.launch(FILE, "add_losses", [1, 1, 1], THREADS, 0, |args| {
        args.ptr(to).ptr(from).ptr(weights).u32(rows);
    })
}

/// Replaces `logits` by their gradient, or writes it to `into`, if given: a tensor of the same
/// shape in another storage. `logits` are then f32.
pub fn backward(
    logits: &Tensor,
    into: Option<&Tensor>,
    of: Rows,
    columns: Columns,
    op: &'static str,
) -> Result<()> {
    let gpu = Gpu::of(logits, op)?;
    let (rows, v) = rows_of(logits, op)?;
    let dtype = into.unwrap_or(logits).dtype();
    let (ts, max) =
        (targets_of(&gpu, of.targets, rows, op)?, per_row(&gpu, of.max, rows, op, "max")?);
    let sum_exp = per_row(&gpu, of.sum_exp, rows, op, "sum_exp")?;
    let scale = per_row(&gpu, of.row_scale, rows, op, "row_scale")?;
    let (from, to, kernel) = match into {
        None => {
            let ls = gpu.inplace(logits, dtype, op, "logits")?;
            (ls, ls, "cross_entropy_backward")
        }
        Some(into) => {
            let ls = gpu.input(logits, DType::F32, op, "logits")?;
            (ls, gpu.inplace(into, dtype, op, "dlogits")?, "cross_entropy_backward_into")
        }
    };
    let vectors = in_vectors(v, dtype, &[Some(from), Some(to)]);
    let ((first, valid), width) = (columns.counts(op)?, items(op, v)?);
    let grid = [blocks(op, rows, 1)?, blocks_y(op, v, THREADS as usize * vector(dtype))?, 1];
    let kernel = format!("{kernel}{}_{}", variant(vectors), suffix(dtype, op)?);
    gpu.launch(FILE, &kernel, grid, THREADS, 0, |args| {
        args.ptr(from)
            .ptr(to)
            .ptr(max)
            .ptr(sum_exp)
            .ptr(ts)
            .ptr(scale)
            .u32(width)
            .u32(first)
            .u32(valid);
    })
}

/// Sums `[2, rows]` and gradient of rows that lie entirely on this rank, as by [`row_statistics`]
/// and then [`backward`]. Returns none, and does nothing, if there is no kernel for the case:
/// logits that are not f32, or not in vectors.
pub fn fused(
    logits: &Tensor,
    into: Option<&Tensor>,
    targets: &Tensor,
    row_scale: &Tensor,
    columns: Columns,
    op: &'static str,
) -> Result<Option<Tensor>> {
    let gpu = Gpu::of(logits, op)?;
    let (rows, v) = rows_of(logits, op)?;
    if logits.dtype() != DType::F32 {
        return Ok(None);
    }
    let dtype = into.unwrap_or(logits).dtype();
    let suffix = suffix(dtype, op)?;
    let (from, to) = match into {
        None => {
            let ls = gpu.inplace(logits, DType::F32, op, "logits")?;
            (ls, ls)
        }
        Some(into) => {
            (gpu.input(logits, DType::F32, op, "logits")?, gpu.inplace(into, dtype, op, "dlogits")?)
        }
    };
    if !in_vectors(v, dtype, &[Some(from), Some(to)]) {
        return Ok(None);
    }
    let _span = trace::moves(op, &[logits, into.unwrap_or(logits)]);
    let (ts, scale) =
        (targets_of(&gpu, targets, rows, op)?, per_row(&gpu, row_scale, rows, op, "row_scale")?);
    let (sums, sum) = gpu.output((2, rows), DType::F32, op)?;
    let resident = (BYTES_AT_ONCE / (v * size_of::<f32>()).max(1)).clamp(1, 3);
    let ((first, valid), row_count, width) = (columns.counts(op)?, items(op, rows)?, items(op, v)?);
    let kernel = format!("cross_entropy_at_once{resident}_{suffix}");
    gpu.launch(FILE, &kernel, [row_count, 1, 1], row_threads(v, DType::F32), 0, |args| {
        args.ptr(from)
            .ptr(ts)
            .ptr(scale)
            .ptr(to)
            .ptr(sum)
            .u32(row_count)
            .u32(width)
            .u32(first)
            .u32(valid);
    })?;
    Ok(Some(sums))
}
