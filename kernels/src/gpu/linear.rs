//! Linear layers on a GPU: products by cuBLASLt, biases by its epilogue where it has one, else by `cuda/linear.cu`.
//!
//! The emulator has no cuBLASLt: there products are the CPU's.

use candle_core::{DType, Tensor};

use super::launch::{blocks, blocks_y};
use super::memory::suffix;
use super::product::{Operand, Product};
use super::{DevicePointer, Gpu, THREADS};
use crate::view::with_last;
use crate::{Error, Result};

const FILE: &str = "linear";

/// A new tensor of `shape`, or the one to write into.
fn result(
    gpu: &Gpu,
    into: Option<&Tensor>,
    shape: Vec<usize>,
    dtype: DType,
    op: &'static str,
) -> Result<(Tensor, DevicePointer)> {
    match into {
        Some(y) => Ok((y.clone(), gpu.inplace(y, dtype, op, "result")?)),
        None => gpu.output(shape, dtype, op),
    }
}

fn none(op: &'static str, [rows, n, k]: [usize; 3]) -> Error {
    Error::gpu(op, format!("cuBLASLt has no algorithm for a product [{rows}, {k}] · [{k}, {n}] of these operands"))
}

/// `x · wᵀ + bias` of dtype `y_dtype`, new or into `into`. Shapes were checked.
pub fn forward(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    [rows, k, n]: [usize; 3],
    y_dtype: DType,
    into: Option<&Tensor>,
    op: &'static str,
) -> Result<Tensor> {
    let (gpu, dtype) = (Gpu::of(x, op)?, x.dtype());
    suffix(dtype, op)?;
    let (xs, ws) = (gpu.input(x, dtype, op, "x")?, gpu.input(w, dtype, op, "weight")?);
    let bias = bias.map(|bias| gpu.input(bias, dtype, op, "bias")).transpose()?;
    let (y, ys) = result(&gpu, into, with_last(x, n), y_dtype, op)?;
    let mut product = Product {
        a: Operand { at: xs, dtype, rows, columns: k, transposed: false },
        b: Operand { at: ws, dtype, rows: n, columns: k, transposed: true },
        y: ys,
        y_dtype,
        // The epilogue's bias is of the result's dtype, and aligned.
        bias: bias.filter(|bias| dtype == y_dtype && bias.address().is_multiple_of(16)),
        accumulate: false,
    };
    if k == 0 {
        return Err(none(op, [rows, n, k]));
    }
    if !(product.bias.is_some() && product.run(&gpu)?) {
        product.bias = None;
        if !product.run(&gpu)? {
            return Err(none(op, [rows, n, k]));
        }
        if let Some(bias) = bias {
            let name = format!("add_bias_{}_{}", suffix(dtype, op)?, suffix(y_dtype, op)?);
            let grid = [blocks(op, rows, 1)?, blocks_y(op, n, THREADS as usize)?, 1];
            gpu.launch(FILE, &name, grid, THREADS, 0, |args| {
                args.ptr(ys).ptr(bias).count(n);
            })?;
        }
    }
    Ok(y)
}

/// As [`forward`], into `y`, of the operands' dtype or f32.
pub fn forward_into(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    dims: [usize; 3],
    y: &Tensor,
    op: &'static str,
) -> Result<()> {
    let dtype = if y.dtype() == x.dtype() { x.dtype() } else { DType::F32 };
    forward(x, w, bias, dims, dtype, Some(y), op).map(|_| ())
}

/// `dy · w`, new or into `into`. Shapes were checked.
pub fn dgrad(
    dy: &Tensor,
    w: &Tensor,
    [rows, k, n]: [usize; 3],
    into: Option<&Tensor>,
    op: &'static str,
) -> Result<Tensor> {
    let (gpu, dtype) = (Gpu::of(dy, op)?, dy.dtype());
    suffix(dtype, op)?;
    let (dys, ws) = (gpu.input(dy, dtype, op, "dy")?, gpu.input(w, dtype, op, "weight")?);
    let (dx, dxs) = result(&gpu, into, with_last(dy, k), dtype, op)?;
    let product = Product {
        a: Operand { at: dys, dtype, rows, columns: n, transposed: false },
        b: Operand { at: ws, dtype, rows: n, columns: k, transposed: false },
        y: dxs,
        y_dtype: dtype,
        bias: None,
        accumulate: false,
    };
    if product.run(&gpu)? { Ok(dx) } else { Err(none(op, [rows, k, n])) }
}

/// `dw += dyᵀ · x`, in f32. Shapes were checked.
pub fn wgrad(dy: &Tensor, x: &Tensor, dw: &Tensor, [rows, k, n]: [usize; 3], op: &'static str) -> Result<()> {
    let (gpu, dtype) = (Gpu::of(dy, op)?, dy.dtype());
    suffix(dtype, op)?;
    let (dys, xs) = (gpu.input(dy, dtype, op, "dy")?, gpu.input(x, dtype, op, "x")?);
    let product = Product {
        a: Operand { at: dys, dtype, rows, columns: n, transposed: true },
        b: Operand { at: xs, dtype, rows, columns: k, transposed: false },
        y: gpu.inplace(dw, DType::F32, op, "dw")?,
        y_dtype: DType::F32,
        bias: None,
        accumulate: true,
    };
    if product.run(&gpu)? { Ok(()) } else { Err(none(op, [n, k, rows])) }
}
