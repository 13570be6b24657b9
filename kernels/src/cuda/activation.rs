//! Activations on a GPU: `cuda/activation.cu`.

use candle_core::{DType, Tensor};

use crate::Result;
use crate::tensor::gpu::launch::{blocks, blocks_y};
use crate::tensor::gpu::memory::suffix;
use crate::tensor::gpu::{DevicePointer, Gpu, THREADS};
use crate::tensor::view::{rows_of, with_last};

const FILE: &str = "activation";
/// Vectors of 16 bytes that each thread of an elementwise kernel processes.
const UNROLL: usize = 2;

/// Number of elements in 16 bytes.
fn vector(dtype: DType) -> usize {
    16 / dtype.size_in_bytes().max(1)
}

/// Applies the activation with kernel name `name`.
pub fn forward(name: &str, x: &Tensor, op: &'static str) -> Result<Tensor> {
    let (gpu, dtype) = (Gpu::of(x, op)?, x.dtype());
    let xs = gpu.input(x, dtype, op, "x")?;
    let (y, ys) = gpu.output(x.dims(), dtype, op)?;
    launch(&gpu, name, xs, ys, x.elem_count(), dtype, op)?;
    Ok(y)
}

/// Writes `n` elements at `y`, which may be `x`.
pub fn launch(
    gpu: &Gpu,
    name: &str,
    x: DevicePointer,
    y: DevicePointer,
    n: usize,
    dtype: DType,
    op: &'static str,
) -> Result<()> {
    let grid = [blocks(op, n, THREADS as usize * vector(dtype) * UNROLL)?, 1, 1];
    gpu.launch(FILE, &format!("{name}_{}", suffix(dtype, op)?), grid, THREADS, 0, |args| {
        args.ptr(x).ptr(y).count(n);
    })
}

/// The gradient of [`forward`] with respect to `x`.
pub fn backward(name: &str, dy: &Tensor, x: &Tensor, op: &'static str) -> Result<Tensor> {
    let (gpu, dtype) = (Gpu::of(x, op)?, x.dtype());
    let (dys, xs) = (gpu.input(dy, dtype, op, "dy")?, gpu.input(x, dtype, op, "x")?);
    let (dx, dxs) = gpu.output(x.dims(), dtype, op)?;
    launch_backward(&gpu, name, [dys, xs, dxs], x.elem_count(), dtype, op)?;
    Ok(dx)
}

/// Launches one kernel for each of the two results: neither is bound by arithmetic.
pub fn backward_recompute(
    name: &str,
    dy: &Tensor,
    x: &Tensor,
    op: &'static str,
) -> Result<[Tensor; 2]> {
    Ok([backward(name, dy, x, op)?, forward(name, x, op)?])
}

/// Writes `n` elements at `dx`, which may be `dy`.
pub fn launch_backward(
    gpu: &Gpu,
    name: &str,
    [dy, x, dx]: [DevicePointer; 3],
    n: usize,
    dtype: DType,
    op: &'static str,
) -> Result<()> {
    let grid = [blocks(op, n, THREADS as usize * vector(dtype) * UNROLL)?, 1, 1];
    gpu.launch(FILE, &format!("{name}_backward_{}", suffix(dtype, op)?), grid, THREADS, 0, |args| {
        args.ptr(dy).ptr(x).ptr(dx).count(n);
    })
}

/// A block for each part of each row.
fn grid(x: &Tensor, f: usize, op: &'static str) -> Result<[u32; 3]> {
    let (rows, _) = rows_of(x, op)?;
    Ok([blocks(op, rows, 1)?, blocks_y(op, f, THREADS as usize * vector(x.dtype()))?, 1])
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

/// As [`backward_recompute`].
pub fn swiglu_backward_recompute(
    dy: &Tensor,
    x: &Tensor,
    f: usize,
    op: &'static str,
) -> Result<[Tensor; 2]> {
    Ok([swiglu_backward(dy, x, f, op)?, swiglu(x, f, op)?])
}
