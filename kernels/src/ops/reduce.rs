//! Sums of squares in f64, counts, and in-place arithmetic on (views of) flat buffers.

use candle_core::{DType, Device, Tensor};

#[cfg(gpu)]
use crate::tensor::device::to_host;
use crate::tensor::element::by_elem;
use crate::tensor::trace;
use crate::tensor::view::{View, expect_dtype, expect_elements, same_storage};
use crate::{Error, Result, cpu, on_gpu};

/// Σ x² in f64: fixed blocks of 4096 elements, combined in order with compensation (Neumaier 1974).
/// NaN and infinity show in the result.
///
/// # Errors
/// If `x` is not contiguous or its dtype is not a float.
pub fn sum_of_squares(x: &Tensor) -> Result<f64> {
    Ok(sums_of_squares(&[x])?[0])
}

/// [`sum_of_squares`] of each tensor, in one pass and, on a GPU, with one wait for the device.
///
/// # Errors
/// As [`sum_of_squares`]; also if tensors lie on different devices or differ in dtype.
pub fn sums_of_squares(xs: &[&Tensor]) -> Result<Vec<f64>> {
    let _span = trace::moves("sum_of_squares", xs);
    const OP: &str = "sum_of_squares";
    let Some(&first) = xs.first() else { return Ok(Vec::new()) };
    expect_alike(xs, OP)?;
    on_gpu!(first, reduce::sums_of_squares(xs, OP).and_then(|sums| Ok(to_host(&sums)?.to_vec1()?)));
    by_elem!(first, OP, E => cpu::reduce::sums_of_squares::<E>(xs, OP))
}

/// # Errors
/// If tensors lie on different devices or differ in dtype.
fn expect_alike(xs: &[&Tensor], op: &'static str) -> Result<()> {
    let Some(&first) = xs.first() else { return Ok(()) };
    let other =
        xs.iter().find(|x| x.dtype() != first.dtype() || !x.device().same_device(first.device()));
    let Some(other) = other else { return Ok(()) };
    let place = |t: &Tensor| format!("{:?} on {:?}", t.dtype(), t.device().location());
    Err(Error::shape(op, format!("one tensor is {}, another {}", place(first), place(other))))
}

/// Σ of [`sum_of_squares`] of each tensor, in order: f64 `[1]` on their device. Does not wait for
/// the device. Zero if there are no tensors.
///
/// # Errors
/// As [`sums_of_squares`].
pub fn total_of_squares(xs: &[&Tensor], device: &Device) -> Result<Tensor> {
    const OP: &str = "total_of_squares";
    if xs.is_empty() {
        return Ok(Tensor::zeros(1, DType::F64, device)?);
    }
    expect_alike(xs, OP)?;
    #[cfg(gpu)]
    if crate::tensor::gpu::runs_here(xs[0]) {
        let _span = trace::moves("sum_of_squares", xs);
        return crate::cuda::reduce::sum_in_order(
            &crate::cuda::reduce::sums_of_squares(xs, OP)?,
            OP,
        );
    }
    sum_in_order(&Tensor::from_vec(sums_of_squares(xs)?, xs.len(), device)?)
}

/// The sum of f64 `[n]`, added in order: f64 `[1]`, on their device.
///
/// # Errors
/// If `values` is not contiguous or not f64.
pub fn sum_in_order(values: &Tensor) -> Result<Tensor> {
    const OP: &str = "sum_in_order";
    expect_dtype(OP, values, DType::F64)?;
    #[cfg(gpu)]
    if crate::tensor::gpu::computes(values.device()) {
        return crate::cuda::reduce::sum_in_order(values, OP);
    }
    let sum: f64 = View::<f64>::new(values, OP, "values")?.iter().fold(0.0, |sum, v| sum + v);
    Ok(Tensor::from_vec(vec![sum], 1, values.device())?)
}

/// Elements of a GPU's tensor that are compared at a time. An f32 counts this many exactly.
const COUNTED: usize = 1 << 22;

/// How many elements are zero, of either sign. Waits for the device.
///
/// # Errors
/// If `x` is not contiguous or its dtype is not a float.
pub fn count_zeros(x: &Tensor) -> Result<u64> {
    let _span = trace::moves("count_zeros", &[x]);
    const OP: &str = "count_zeros";
    if !x.device().is_cpu() {
        let x = x.flatten_all()?;
        let count = |from: usize| {
            let part = x.narrow(0, from, COUNTED.min(x.elem_count() - from))?;
            let zeros = part.eq(&part.zeros_like()?)?.to_dtype(DType::F32)?;
            Ok(zeros.sum_all()?.to_scalar::<f32>()? as u64)
        };
        return (0..x.elem_count()).step_by(COUNTED).map(count).sum();
    }
    by_elem!(x, OP, E => cpu::reduce::count_zeros::<E>(x, OP))
}

/// `dst += src`, elementwise; both may be views of one storage.
///
/// # Errors
/// If the numbers of elements or dtypes differ, or an operand is not contiguous.
pub fn add_inplace(dst: &Tensor, src: &Tensor) -> Result<()> {
    let _span = trace::moves("add_inplace", &[dst, dst, src]);
    const OP: &str = "add_inplace";
    expect_elements(OP, "src", src, dst.elem_count())?;
    expect_dtype(OP, src, dst.dtype())?;
    on_gpu!(dst, reduce::add(dst, src, OP));
    by_elem!(dst, OP, E => cpu::reduce::add_inplace::<E>(dst, src, OP))
}

/// `t *= factor`; for 16-bit `t`, with `factor` rounded to f32.
///
/// # Errors
/// If `t` is not contiguous or its dtype is not a float.
pub fn scale_inplace(t: &Tensor, factor: f64) -> Result<()> {
    let _span = trace::moves("scale_inplace", &[t, t]);
    const OP: &str = "scale_inplace";
    on_gpu!(t, reduce::scale(t, factor, OP));
    by_elem!(t, OP, E => cpu::reduce::scale_inplace::<E>(t, factor, OP))
}

/// `t = 0`.
///
/// # Errors
/// As [`scale_inplace`].
pub fn zero(t: &Tensor) -> Result<()> {
    let _span = trace::moves("zero", &[t]);
    const OP: &str = "zero";
    on_gpu!(t, reduce::zero(t, OP));
    by_elem!(t, OP, E => cpu::reduce::zero::<E>(t, OP))
}

/// `dst = src` in the dtype of `dst`, rounded to nearest, ties to even; values beyond its range
/// become infinite.
///
/// # Errors
/// If the numbers of elements differ, a dtype is not a float, an operand is not contiguous, or both
/// share one storage.
pub fn cast(dst: &Tensor, src: &Tensor) -> Result<()> {
    let _span = trace::moves("cast", &[dst, src]);
    const OP: &str = "cast";
    if dst.dtype() == src.dtype() {
        return copy(dst, src);
    }
    expect_elements(OP, "src", src, dst.elem_count())?;
    if same_storage(dst, src) {
        return Err(Error::shape(OP, "dst and src share one storage"));
    }
    on_gpu!(dst, reduce::cast(dst, src, OP));
    by_elem!(src, OP, S => cpu::reduce::cast::<S>(dst, src, OP))
}

/// `dst = src`, bit for bit. The shapes may differ; the number of elements and the dtype may not.
///
/// # Errors
/// If the numbers of elements or dtypes differ, an operand is not contiguous, or both share one
/// storage.
pub fn copy(dst: &Tensor, src: &Tensor) -> Result<()> {
    let _span = trace::moves("copy", &[dst, src]);
    const OP: &str = "copy";
    expect_elements(OP, "src", src, dst.elem_count())?;
    expect_dtype(OP, src, dst.dtype())?;
    if same_storage(dst, src) {
        return Err(Error::shape(OP, "dst and src share one storage"));
    }
    on_gpu!(dst, reduce::copy(dst, src, OP));
    cpu::reduce::copy(dst, src, OP)
}
