//! LayerNorm and RMSNorm on a GPU: `cuda/norm.cu` and `cuda/norm_backward.cu`.

use candle_core::{DType, Tensor};

use super::columns::add_shares;
use crate::Result;
use crate::tensor::arguments::norm::{Backward, NormStats};
use crate::tensor::gpu::items::{in_vectors, items};
use crate::tensor::gpu::launch::{blocks, blocks_y};
use crate::tensor::gpu::memory::suffix;
use crate::tensor::gpu::{Gpu, THREADS};
use crate::tensor::view::rows_of;

/// Threads per block if each warp has its own row.
const WARPS: u32 = 128;
/// Most threads per block with which backward has all the registers it needs.
const ROOMY: u32 = 512;
/// Elements per thread of a row that a block shares.
const PER_THREAD: usize = 16;

/// Distribution of rows over threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    /// One row per warp, with this many elements per thread.
    Warp(usize),
    /// One row per block of this many threads.
    Block(u32),
    /// One row per block, read several times: for rows that are too wide, or not a multiple of the
    /// vector.
    Any,
}

impl Cut {
    /// For rows of `h` elements. `per_lane` lists the kernels for warps; `widest` is the widest row
    /// that kernels for blocks take.
    fn new(h: usize, vectors: bool, per_lane: &[usize], widest: usize) -> Self {
        match per_lane.iter().find(|&&elements| 32 * elements >= h) {
            _ if !vectors => Self::Any,
            Some(&elements) => Self::Warp(elements),
            None if h <= widest => Self::Block(h.div_ceil(PER_THREAD).next_multiple_of(32) as u32),
            None => Self::Any,
        }
    }

    fn kernel(self, norm: &str, suffix: &str) -> String {
        match self {
            Self::Warp(elements) => format!("{norm}_warp{elements}_{suffix}"),
            Self::Block(_) => format!("{norm}_block_{suffix}"),
            Self::Any => format!("{norm}_any_{suffix}"),
        }
    }

    fn threads(self) -> u32 {
        match self {
            Self::Warp(_) => WARPS,
            Self::Block(threads) => threads,
            Self::Any => THREADS,
        }
    }

    /// Rows out of `rows` that one block of backward processes: enough blocks for a large GPU, few
    /// enough that their sums are cheap to add up.
    fn share(self, rows: usize) -> usize {
        let (blocks, least) = match self {
            Self::Warp(0..=16) => (528, 8),
            Self::Warp(17..=24) => (396, 8),
            Self::Warp(_) => (264, 8),
            Self::Block(0..=128) => (528, 2),
            Self::Block(129..=256) => (264, 2),
            Self::Block(_) => (132, 2),
            Self::Any => (256, 16),
        };
        rows.div_ceil(blocks).max(least)
    }
}

/// LayerNorm if there is a bias, else RMSNorm. Shapes must have been checked.
pub fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
    op: &'static str,
) -> Result<(Tensor, NormStats)> {
    let (gpu, dtype, suffix) = (Gpu::of(x, op)?, x.dtype(), suffix(x.dtype(), op)?);
    let (rows, h) = rows_of(x, op)?;
    let (xs, ws) = (gpu.input(x, dtype, op, "x")?, gpu.input(weight, dtype, op, "weight")?);
    let bs = bias.map(|bias| gpu.input(bias, dtype, op, "bias")).transpose()?;
    let (y, ys) = gpu.output(x.dims(), dtype, op)?;
    let (rstd, rstds) = gpu.output(rows, DType::F32, op)?;
    let mean = bias.map(|_| gpu.output(rows, DType::F32, op)).transpose()?;
    let cut = Cut::new(
        h,
        in_vectors(h, dtype, &[Some(xs), Some(ws), bs, Some(ys)]),
        &[8, 16, 24, 32, 64],
        16384,
    );
    let per_block = if let Cut::Warp(_) = cut { WARPS as usize / 32 } else { 1 };
    let norm = if bias.is_some() { "layer_norm" } else { "rms_norm" };
    let grid = [blocks(op, rows, per_block)?, 1, 1];
    let (row_count, width) = (items(op, rows)?, items(op, h)?);
    gpu.launch("norm", &cut.kernel(norm, suffix), grid, cut.threads(), 0, |args| {
        args.ptr(xs).ptr(ws).optional(bs).ptr(ys).optional(mean.as_ref().map(|m| m.1)).ptr(rstds);
        if cut != Cut::Any {
            args.u32(row_count);
        }
        args.u32(width).f32(eps as f32);
    })?;
    Ok((y, NormStats { mean: mean.map(|m| m.0), rstd }))
}

/// Shapes must have been checked.
pub fn backward(of: &Backward, op: &'static str) -> Result<Tensor> {
    let (x, dtype) = (of.x, of.x.dtype());
    let (gpu, suffix) = (Gpu::of(x, op)?, suffix(dtype, op)?);
    let (rows, h) = rows_of(x, op)?;
    let (dys, xs) = (gpu.input(of.dy, dtype, op, "dy")?, gpu.input(x, dtype, op, "x")?);
    let ws = gpu.input(of.weight, dtype, op, "weight")?;
    let residual = of.residual.map(|r| gpu.input(r, dtype, op, "residual")).transpose()?;
    let rstd = gpu.input(&of.stats.rstd, DType::F32, op, "rstd")?;
    let mean =
        of.stats.mean.as_ref().map(|mean| gpu.input(mean, DType::F32, op, "mean")).transpose()?;
    let dweight = gpu.inplace(of.dweight, DType::F32, op, "dweight")?;
    let dbias = of.dbias.map(|dbias| gpu.inplace(dbias, DType::F32, op, "dbias")).transpose()?;
    let (dx, dxs) = gpu.output(x.dims(), dtype, op)?;
    let vectors = in_vectors(h, dtype, &[Some(dys), Some(xs), Some(ws), residual, Some(dxs)]);
    let cut =
        Cut::new(h, vectors, &[8, 16, 24, 32], if dtype == DType::F32 { 8192 } else { 16384 });
    let share = cut.share(rows);
    let shares = rows.div_ceil(share);
    let width = if mean.is_some() { 2 * h } else { h };
    let (partials, to) = gpu.output((shares, width), DType::F32, op)?;
    let norm = if mean.is_some() { "layer_norm" } else { "rms_norm" };
    let kernel = match cut {
        Cut::Block(threads) if threads > ROOMY => format!("{norm}_backward_wide_{suffix}"),
        _ => cut.kernel(&format!("{norm}_backward"), suffix),
    };
    let (row_count, h_count, share) = (items(op, rows)?, items(op, h)?, items(op, share)?);
    const FILE: &str = "norm_backward";
    if cut == Cut::Any {
        gpu.launch(FILE, &kernel, [row_count, 1, 1], cut.threads(), 0, |args| {
            args.ptr(dys)
                .ptr(xs)
                .optional(mean)
                .ptr(rstd)
                .ptr(ws)
                .optional(residual)
                .ptr(dxs)
                .u32(h_count);
        })?;
        let grid = [blocks(op, h, THREADS as usize)?, blocks_y(op, shares, 1)?, 1];
        gpu.launch(FILE, &format!("{norm}_parameters_any_{suffix}"), grid, THREADS, 0, |args| {
            args.ptr(dys)
                .ptr(xs)
                .optional(mean)
                .ptr(rstd)
                .ptr(to)
                .u32(row_count)
                .u32(h_count)
                .u32(share);
        })?;
    } else {
        gpu.launch(FILE, &kernel, [blocks(op, shares, 1)?, 1, 1], cut.threads(), 0, |args| {
            args.ptr(dys)
                .ptr(xs)
                .optional(mean)
                .ptr(rstd)
                .ptr(ws)
                .optional(residual)
                .ptr(dxs)
                .ptr(to);
            args.u32(row_count).u32(h_count).u32(share);
        })?;
    }
    add_shares(&gpu, &partials, dweight, dbias, h, op)?;
    Ok(dx)
}
