//! GELU and SwiGLU on a GPU: `cuda/activation.cu`.

use candle_core::Tensor;

use super::launch::{blocks, blocks_y};
use super::memory::suffix;
use super::{Gpu, THREADS};
use crate::Result;
use crate::view::{rows_of, with_last};

const FILE: &str = "activation";
/// Vectors of 16 bytes that a thread of an elementwise kernel does.
const UNROLL: usize = 2;

/// Elements in 16 bytes.
fn vector(t: &Tensor) -> usize {
    16 / t.dtype().size_in_bytes().max(1)
}

pub fn gelu(x: &Tensor, op: &'static str) -> Result<Tensor> {
    let (gpu, suffix) = (Gpu::of(x, op)?, suffix(x.dtype(), op)?);
    let n = x.elem_count();
    let xs = gpu.input(x, x.dtype(), op, "x")?;
    let (y, ys) = gpu.output(x.dims(), x.dtype(), op)?;
    let grid = [blocks(op, n, THREADS as usize * vector(x) * UNROLL)?, 1, 1];
    gpu.launch(FILE, &format!("gelu_{suffix}"), grid, THREADS, 0, |args| {
        args.ptr(xs).ptr(ys).count(n);
    })?;
    Ok(y)
}

pub fn gelu_backward(dy: &Tensor, x: &Tensor, op: &'static str) -> Result<Tensor> {
    let (gpu, suffix) = (Gpu::of(x, op)?, suffix(x.dtype(), op)?);
    let n = x.elem_count();
    let (dys, xs) = (gpu.input(dy, x.dtype(), op, "dy")?, gpu.input(x, x.dtype(), op, "x")?);
    let (dx, dxs) = gpu.output(x.dims(), x.dtype(), op)?;
    let grid = [blocks(op, n, THREADS as usize * vector(x) * UNROLL)?, 1, 1];
    gpu.launch(FILE, &format!("gelu_backward_{suffix}"), grid, THREADS, 0, |args| {
        args.ptr(dys).ptr(xs).ptr(dxs).count(n);
    })?;
    Ok(dx)
}

/// Rows, and parts of a row, each a block.
fn grid(x: &Tensor, f: usize, op: &'static str) -> Result<[u32; 3]> {
    let (rows, _) = rows_of(x, op)?;
    Ok([blocks(op, rows, 1)?, blocks_y(op, f, THREADS as usize * vector(x))?, 1])
}

/// `f` is half the width of `x`, which is even.
pub fn swiglu(x: &Tensor, f: usize, op: &'static str) -> Result<Tensor> {
    let (gpu, suffix) = (Gpu::of(x, op)?, suffix(x.dtype(), op)?);
    let xs = gpu.input(x, x.dtype(), op, "x")?;
    let (y, ys) = gpu.output(with_last(x, f), x.dtype(), op)?;
    gpu.launch(FILE, &format!("swiglu_{suffix}"), grid(x, f, op)?, THREADS, 0, |args| {
        args.ptr(xs).ptr(ys).count(f);
    })?;
    Ok(y)
}

/// `dy` has the shape of the result of [`swiglu`].
pub fn swiglu_backward(dy: &Tensor, x: &Tensor, f: usize, op: &'static str) -> Result<Tensor> {
    let (gpu, suffix) = (Gpu::of(x, op)?, suffix(x.dtype(), op)?);
    let (dys, xs) = (gpu.input(dy, x.dtype(), op, "dy")?, gpu.input(x, x.dtype(), op, "x")?);
    let (dx, dxs) = gpu.output(x.dims(), x.dtype(), op)?;
    gpu.launch(FILE, &format!("swiglu_backward_{suffix}"), grid(x, f, op)?, THREADS, 0, |args| {
        args.ptr(dys).ptr(xs).ptr(dxs).count(f);
    })?;
    Ok(dx)
}
