//! Linear layers on a GPU. cuBLASLt computes the products. Its epilogue adds biases where it can;
//! otherwise `cuda/linear.cu` does. GELU runs in the epilogue, and residuals are added by the
//! product itself, where that is faster; otherwise `cuda/activation.cu` and `cuda/dropout.cu` do
//! it.
//!
//! The emulator has no cuBLASLt: there the CPU computes the products.

use candle_core::{DType, Tensor};

use super::product::{Epilogue, Operand, Product};
use super::{activation, dropout};
use crate::tensor::gpu::launch::{blocks, blocks_y};
use crate::tensor::gpu::memory::suffix;
use crate::tensor::gpu::{DevicePointer, Gpu, THREADS};
use crate::tensor::trace;
use crate::tensor::view::with_last;
use crate::{Error, Result};

const FILE: &str = "linear";

/// A new tensor of `shape`, or `into` if given.
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

/// `x · wᵀ` into `y`; `x` has `rows` rows, `w` is [n, k], both are of `dtype`.
fn times_weight_transposed(
    [x, w, y]: [DevicePointer; 3],
    [rows, k, n]: [usize; 3],
    dtype: DType,
    y_dtype: DType,
    epilogue: Epilogue,
) -> Product {
    Product {
        a: Operand { at: x, dtype, rows, columns: k, transposed: false },
        b: Operand { at: w, dtype, rows: n, columns: k, transposed: true },
        y,
        y_dtype,
        epilogue,
        accumulate: false,
        residual: None,
    }
}

/// `dy · w` into `dx`; `dy` has `rows` rows, `w` is [n, k], all are of `dtype`.
fn times_weight(
    [dy, w, dx]: [DevicePointer; 3],
    [rows, k, n]: [usize; 3],
    dtype: DType,
) -> Product {
    Product {
        a: Operand { at: dy, dtype, rows, columns: n, transposed: false },
        b: Operand { at: w, dtype, rows: n, columns: k, transposed: false },
        y: dx,
        y_dtype: dtype,
        epilogue: Epilogue::None,
        accumulate: false,
        residual: None,
    }
}

fn none(op: &'static str, [rows, n, k]: [usize; 3]) -> Error {
    Error::gpu(
        op,
        format!(
            "cuBLASLt has no algorithm for a product [{rows}, {k}] · [{k}, {n}] of these operands"
        ),
    )
}

/// `x · wᵀ + bias` of dtype `y_dtype`, in a new tensor or in `into`. Shapes must have been checked.
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
    // The epilogue requires a bias of the result's dtype, and aligned.
    let in_epilogue = bias.filter(|bias| dtype == y_dtype && is_aligned(*bias));
    let epilogue = in_epilogue.map_or(Epilogue::None, Epilogue::Bias);
    let mut product = times_weight_transposed([xs, ws, ys], [rows, k, n], dtype, y_dtype, epilogue);
    if k == 0 {
        return Err(none(op, [rows, n, k]));
    }
    if !(in_epilogue.is_some() && product.run(&gpu)?) {
        product.epilogue = Epilogue::None;
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

/// Whether an address has the alignment that epilogues require of biases and auxiliary matrices.
fn is_aligned(at: DevicePointer) -> bool {
    at.address().is_multiple_of(16)
}

/// `x · wᵀ + bias + residual` into `y`. The product adds the residual, with one rounding, where
/// that is faster. Shapes must have been checked.
pub fn forward_add(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    residual: &Tensor,
    [rows, k, n]: [usize; 3],
    y: &Tensor,
    op: &'static str,
) -> Result<()> {
    let (gpu, dtype) = (Gpu::of(x, op)?, x.dtype());
    let suffix = suffix(dtype, op)?;
    let (xs, ws) = (gpu.input(x, dtype, op, "x")?, gpu.input(w, dtype, op, "weight")?);
    let bias = bias.map(|bias| gpu.input(bias, dtype, op, "bias")).transpose()?;
    let (around, ys) =
        (gpu.input(residual, dtype, op, "residual")?, gpu.inplace(y, dtype, op, "y")?);
    let plain = times_weight_transposed([xs, ws, ys], [rows, k, n], dtype, dtype, Epilogue::None);
    // In place: each element is read by the thread that writes it.
    let add = || {
        dropout::launch_add(
            &gpu,
            [ys; 2],
            [bias, Some(around)],
            (rows, n),
            None,
            (dtype, suffix),
            op,
        )
    };
    if k > 0 && bias.into_iter().chain([around, ys]).all(is_aligned) {
        let epilogue = bias.map_or(Epilogue::None, Epilogue::Bias);
        let fused = Product { epilogue, residual: Some(around), ..plain };
        if fused.pays(&gpu, &plain, &add)? && fused.run(&gpu)? {
            return Ok(());
        }
    }
    if k == 0 || !plain.run(&gpu)? {
        return Err(none(op, [rows, n, k]));
    }
    if rows > 0 && n > 0 { add() } else { Ok(()) }
}

/// Whether cuBLASLt may apply GELU, or its gradient, to results of `n` columns: rows of GELU's
/// argument must be multiples of 16 bytes. f32 stays with our kernels, because their error is
/// known.
fn takes_gelu(dtype: DType, n: usize, operands: &[DevicePointer]) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
        && n.is_multiple_of(8)
        && operands.iter().all(|at| is_aligned(*at))
}

/// `h = x · wᵀ + bias` and `gelu(h)`. Shapes must have been checked.
pub fn forward_gelu(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    [rows, k, n]: [usize; 3],
    op: &'static str,
) -> Result<(Tensor, Tensor)> {
    let _span = trace::product(op, x, w);
    let (gpu, dtype) = (Gpu::of(x, op)?, x.dtype());
    suffix(dtype, op)?;
    let (xs, ws) = (gpu.input(x, dtype, op, "x")?, gpu.input(w, dtype, op, "weight")?);
    let biases = bias.map(|bias| gpu.input(bias, dtype, op, "bias")).transpose()?;
    let (hidden, before) = gpu.output(with_last(x, n), dtype, op)?;
    let (y, ys) = gpu.output(with_last(x, n), dtype, op)?;
    let gelu = || activation::launch(&gpu, "gelu", before, ys, rows * n, dtype, op);
    let operands: Vec<DevicePointer> = [before, ys].into_iter().chain(biases).collect();
    if takes_gelu(dtype, n, &operands) {
        let epilogue = biases.map_or(Epilogue::None, Epilogue::Bias);
        let apart = times_weight_transposed([xs, ws, before], [rows, k, n], dtype, dtype, epilogue);
        let fused = Product { y: ys, epilogue: Epilogue::Gelu { bias: biases, before }, ..apart };
        if fused.pays(&gpu, &apart, &gelu)? && fused.run(&gpu)? {
            return Ok((hidden, y));
        }
    }
    forward(x, w, bias, [rows, k, n], dtype, Some(&hidden), op)?;
    gelu()?;
    Ok((hidden, y))
}

/// The gradient of `hidden`, given that `dy · w` is the gradient of `gelu(hidden)`. Shapes must
/// have been checked.
pub fn dgrad_gelu(
    dy: &Tensor,
    w: &Tensor,
    hidden: &Tensor,
    [rows, k, n]: [usize; 3],
    op: &'static str,
) -> Result<Tensor> {
    let _span = trace::product(op, dy, w);
    let (gpu, dtype) = (Gpu::of(dy, op)?, dy.dtype());
    suffix(dtype, op)?;
    let (dys, ws) = (gpu.input(dy, dtype, op, "dy")?, gpu.input(w, dtype, op, "weight")?);
    let before = gpu.input(hidden, dtype, op, "hidden")?;
    let (dx, dxs) = gpu.output(with_last(dy, k), dtype, op)?;
    // In place: each element is read by the thread that writes it.
    let gelu =
        || activation::launch_backward(&gpu, "gelu", [dxs, before, dxs], rows * k, dtype, op);
    if takes_gelu(dtype, k, &[before, dxs]) {
        let apart = times_weight([dys, ws, dxs], [rows, k, n], dtype);
        let fused = Product { epilogue: Epilogue::GeluBackward { before }, ..apart };
        if fused.pays(&gpu, &apart, &gelu)? && fused.run(&gpu)? {
            return Ok(dx);
        }
    }
    dgrad(dy, w, [rows, k, n], Some(&dx), op)?;
    gelu()?;
    Ok(dx)
}

/// As [`forward`], into `y`, which has the operands' dtype or f32.
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

/// `dy · w`, in a new tensor or in `into`. Shapes must have been checked.
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
    let product = times_weight([dys, ws, dxs], [rows, k, n], dtype);
    if product.run(&gpu)? { Ok(dx) } else { Err(none(op, [rows, k, n])) }
}

/// `dw += dyᵀ · x`, in f32. Shapes must have been checked.
pub fn wgrad(
    dy: &Tensor,
    x: &Tensor,
    dw: &Tensor,
    [rows, k, n]: [usize; 3],
    add: bool,
    op: &'static str,
) -> Result<()> {
    let (gpu, dtype) = (Gpu::of(dy, op)?, dy.dtype());
    suffix(dtype, op)?;
    let (dys, xs) = (gpu.input(dy, dtype, op, "dy")?, gpu.input(x, dtype, op, "x")?);
    let product = Product {
        a: Operand { at: dys, dtype, rows, columns: n, transposed: true },
        b: Operand { at: xs, dtype, rows, columns: k, transposed: false },
        y: gpu.inplace(dw, DType::F32, op, "dw")?,
        y_dtype: DType::F32,
        epilogue: Epilogue::None,
        accumulate: add,
        residual: None,
    };
    if product.run(&gpu)? { Ok(()) } else { Err(none(op, [n, k, rows])) }
}
