//! Sums of squares, and arithmetic on (views of) flat buffers on a GPU: `cuda/squares.cu` and
//! `cuda/flat.cu`.

use candle_core::{DType, Tensor};

use crate::Result;
use crate::tensor::gpu::flat::{FILE, grid};
use crate::tensor::gpu::items::items;
use crate::tensor::gpu::memory::suffix;
use crate::tensor::gpu::{DevicePointer, Gpu, THREADS};
use crate::tensor::view::same_storage;

/// `dst += src`, of equal dtypes and sizes.
pub fn add(dst: &Tensor, src: &Tensor, op: &'static str) -> Result<()> {
    let (gpu, dtype, suffix) = (Gpu::of(dst, op)?, dst.dtype(), suffix(dst.dtype(), op)?);
    let (n, size) = (dst.elem_count(), dtype.size_in_bytes());
    let (to, from) = (gpu.inplace(dst, dtype, op, "dst")?, gpu.input(src, dtype, op, "src")?);
    // Overlapping elements must be read before another thread overwrites them.
    let overlap =
        same_storage(dst, src) && to.address().abs_diff(from.address()) < (n * size) as u64;
    let kept = if overlap { Some(gpu.output(n, dtype, op)?) } else { None };
    if let Some((_, kept)) = &kept {
        copy_bytes(&gpu, *kept, from, n, size, op)?;
    }
    let from = kept.as_ref().map_or(from, |kept| kept.1);
    gpu.launch(FILE, &format!("add_{suffix}"), grid(op, n, 16 / size)?, THREADS, 0, |args| {
        args.ptr(to).ptr(from).count(n);
    })
}

/// `t *= factor`, with `factor` rounded to f32.
pub fn scale(t: &Tensor, factor: f64, op: &'static str) -> Result<()> {
    let (gpu, dtype, suffix) = (Gpu::of(t, op)?, t.dtype(), suffix(t.dtype(), op)?);
    let (to, n) = (gpu.inplace(t, dtype, op, "tensor")?, t.elem_count());
    gpu.launch(
        FILE,
        &format!("scale_{suffix}"),
        grid(op, n, 16 / dtype.size_in_bytes())?,
        THREADS,
        0,
        |args| {
            args.ptr(to).f32(factor as f32).count(n);
        },
    )
}

/// `t = 0`.
pub fn zero(t: &Tensor, op: &'static str) -> Result<()> {
    let (gpu, dtype) = (Gpu::of(t, op)?, t.dtype());
    let to = gpu.inplace(t, dtype, op, "tensor")?;
    gpu.zero(to, t.elem_count(), dtype.size_in_bytes(), op)
}

/// `dst = src`, bit for bit, of equal dtypes and sizes in two storages.
pub fn copy(dst: &Tensor, src: &Tensor, op: &'static str) -> Result<()> {
    let (gpu, dtype) = (Gpu::of(dst, op)?, dst.dtype());
    let (to, from) = (gpu.inplace(dst, dtype, op, "dst")?, gpu.input(src, dtype, op, "src")?);
    copy_bytes(&gpu, to, from, dst.elem_count(), dtype.size_in_bytes(), op)
}

fn copy_bytes(
    gpu: &Gpu,
    to: DevicePointer,
    from: DevicePointer,
    n: usize,
    size: usize,
    op: &'static str,
) -> Result<()> {
    gpu.launch(FILE, &format!("copy_{size}"), grid(op, n, 16 / size)?, THREADS, 0, |args| {
        args.ptr(to).ptr(from).count(n);
    })
}

/// `dst = src` in another dtype, of equal sizes.
pub fn cast(dst: &Tensor, src: &Tensor, op: &'static str) -> Result<()> {
    let gpu = Gpu::of(dst, op)?;
    let (from, to) = (suffix(src.dtype(), op)?, suffix(dst.dtype(), op)?);
    let n = dst.elem_count();
    let (dsts, srcs) =
        (gpu.inplace(dst, dst.dtype(), op, "dst")?, gpu.input(src, src.dtype(), op, "src")?);
    gpu.launch(FILE, &format!("cast_{from}_{to}"), grid(op, n, 8)?, THREADS, 0, |args| {
        args.ptr(dsts).ptr(srcs).count(n);
    })
}

/// Splits f32 `values` into halves ([`crate::ops::remainders`]) of equal sizes.
pub fn split(values: &Tensor, high: &Tensor, low: Option<&Tensor>, op: &'static str) -> Result<()> {
    let (gpu, n) = (Gpu::of(high, op)?, values.elem_count());
    let (from, highs) =
        (gpu.input(values, DType::F32, op, "values")?, gpu.inplace(high, DType::BF16, op, "high")?);
    let lows = low.map(|low| gpu.inplace(low, DType::I16, op, "low")).transpose()?;
    gpu.launch(FILE, "split_floats", grid(op, n, 4)?, THREADS, 0, |args| {
        args.ptr(highs).optional(lows).ptr(from).count(n);
    })
}

/// Tensors per launch of `cuda/squares.cu`.
const TENSORS: usize = 128;
/// Elements per partial sum.
const BLOCK: usize = 4096;

/// `Tensors` of `cuda/squares.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Tensors {
    address: [u64; TENSORS],
    size: [u64; TENSORS],
    first_block: [u32; TENSORS],
    count: u32,
    unused: u32,
}

/// The sum of f64 `[n]`, added in order: f64 `[1]`.
pub fn sum_in_order(values: &Tensor, op: &'static str) -> Result<Tensor> {
    let gpu = Gpu::of(values, op)?;
    let (from, n) = (gpu.input(values, DType::F64, op, "values")?, items(op, values.elem_count())?);
    let (sum, to) = gpu.output(1, DType::F64, op)?;
    gpu.launch("squares", "add_in_order", [1, 1, 1], THREADS, 0, |args| {
        args.ptr(from).u32(n).ptr(to);
    })?;
    Ok(sum)
}

/// The values of a [`Verdict`](crate::ops::clip::Verdict) from parts of the squared norm, f64
/// `[n]`.
pub fn judge(shares: &Tensor, max_norm: f32, loss_scale: f64, op: &'static str) -> Result<Tensor> {
    let gpu = Gpu::of(shares, op)?;
    let (from, n) = (gpu.input(shares, DType::F64, op, "shares")?, items(op, shares.elem_count())?);
    let (verdict, to) = gpu.output(3, DType::F32, op)?;
    gpu.launch("squares", "judge", [1, 1, 1], THREADS, 0, |args| {
        args.ptr(from).u32(n).f32(max_norm).f64(loss_scale).ptr(to);
    })?;
    Ok(verdict)
}

/// Σ x² of each of the tensors, all of one dtype and device: `[tensors]` f64, on the device.
pub fn sums_of_squares(xs: &[&Tensor], op: &'static str) -> Result<Tensor> {
    let gpu = Gpu::of(xs[0], op)?;
    let dtype = xs[0].dtype();
    let suffix = suffix(dtype, op)?;
    let (sums, to) = gpu.output(xs.len(), DType::F64, op)?;
    for (i, xs) in xs.chunks(TENSORS).enumerate() {
        let mut table = Tensors {
            address: [0; TENSORS],
            size: [0; TENSORS],
            first_block: [0; TENSORS],
            count: xs.len() as u32,
            unused: 0,
        };
        let mut total = 0;
        for (j, x) in xs.iter().enumerate() {
            table.address[j] = gpu.input(x, dtype, op, "x")?.address();
            table.size[j] = x.elem_count() as u64;
            table.first_block[j] = items(op, total)?;
            total += x.elem_count().div_ceil(BLOCK);
        }
        let num_blocks = items(op, total)?;
        let (_partials, partials) = gpu.output(total, DType::F64, op)?;
        gpu.launch(
            "squares",
            &format!("sum_of_squares_{suffix}"),
            [num_blocks, 1, 1],
            THREADS,
            0,
            |args| {
                // SAFETY: C layout, equal to the kernel's; no padding.
                unsafe { args.structure(&table) };
                args.ptr(partials);
            },
        )?;
        gpu.launch("squares", "add_squares", [xs.len() as u32, 1, 1], THREADS, 0, |args| {
            // SAFETY: as above.
            unsafe { args.structure(&table) };
            args.ptr(partials).ptr(to.offset(8 * TENSORS * i)).u32(num_blocks);
        })?;
    }
    Ok(sums)
}
