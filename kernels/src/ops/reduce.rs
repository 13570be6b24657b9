//! Sums of squares in f64, counts, and in-place arithmetic on (views of) flat buffers.

use candle_core::{DType, Device, Tensor};

#[cfg(gpu)]
use crate::tensor::device::to_host;
use crate::tensor::element::{Elem, Float, by_elem};
use crate::tensor::host::{with_bytes, with_bytes_mut, with_slice_mut};
use crate::tensor::output::Unwritten;
use crate::tensor::simd::{AHEAD, ask_for, vectorize};
use crate::tensor::view::{View, copied, expect_dtype, expect_elements, same_storage};
use crate::tensor::{nontemporal, parallel, trace};
use crate::{Error, Result, on_gpu};

/// Elements per partial sum.
const BLOCK: usize = 4096;
/// Elements that are cast at a time, by way of the L1 cache.
const CAST: usize = 1024;
/// Independent sums within a block.
const SUMS: usize = 16;

/// Σ x² in f64: fixed blocks of 4096 elements, combined in order with compensation (Neumaier 1974). NaN and infinity
/// show in the result.
///
/// # Errors
/// If `x` is not contiguous or no float.
pub fn sum_of_squares(x: &Tensor) -> Result<f64> {
    Ok(sums_of_squares(&[x])?[0])
}

/// [`sum_of_squares`] of each tensor, in one reading and, on a GPU, one wait for the device.
///
/// # Errors
/// As [`sum_of_squares`]; also if tensors lie on different devices or differ in dtype.
pub fn sums_of_squares(xs: &[&Tensor]) -> Result<Vec<f64>> {
    let _span = trace::moves("sum_of_squares", xs);
    const OP: &str = "sum_of_squares";
    let Some(&first) = xs.first() else { return Ok(Vec::new()) };
    expect_alike(xs, OP)?;
    on_gpu!(first, reduce::sums_of_squares(xs, OP).and_then(|sums| Ok(to_host(&sums)?.to_vec1()?)));
    by_elem!(first, OP, E => {
        let views = xs.iter().map(|x| View::<E>::new(x, OP, "x")).collect::<Result<Vec<_>>>()?;
        let blocks: Vec<&[E]> = views.iter().flat_map(|x| x.chunks(BLOCK)).collect();
        let mut partials = vec![0.0; blocks.len()];
        parallel::blocks(&mut partials, 16, |first, partials| vectorize(#[inline(always)] || {
            for (partial, block) in partials.iter_mut().zip(&blocks[first..]) {
                *partial = block_sum(block);
            }
        }));
        let mut partials = &partials[..];
        let sum = |x: &View<E>| {
            let (own, rest) = partials.split_at(x.len().div_ceil(BLOCK));
            partials = rest;
            compensated_sum(own)
        };
        Ok(views.iter().map(sum).collect())
    })
}

/// # Errors
/// If tensors lie on different devices or differ in dtype.
fn expect_alike(xs: &[&Tensor], op: &'static str) -> Result<()> {
    let Some(&first) = xs.first() else { return Ok(()) };
    let other = xs.iter().find(|x| x.dtype() != first.dtype() || !x.device().same_device(first.device()));
    let Some(other) = other else { return Ok(()) };
    let place = |t: &Tensor| format!("{:?} on {:?}", t.dtype(), t.device().location());
    Err(Error::shape(op, format!("one tensor is {}, another {}", place(first), place(other))))
}

/// Σ of [`sum_of_squares`] of each tensor, in order: f64 `[1]` on their device, for which nobody waits. Zero of none.
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
        return crate::cuda::reduce::sum_in_order(&crate::cuda::reduce::sums_of_squares(xs, OP)?, OP);
    }
    sum_in_order(&Tensor::from_vec(sums_of_squares(xs)?, xs.len(), device)?)
}

/// The sum of f64 `[n]`, added in order: f64 `[1]`, on their device.
///
/// # Errors
/// If `values` is not contiguous or not of f64.
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

/// Elements of a GPU's tensor that are compared at a time, which an f32 counts exactly.
const COUNTED: usize = 1 << 22;

/// How many elements are zero, of either sign. On a GPU it is waited for them.
///
/// # Errors
/// If `x` is not contiguous or no float.
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
    by_elem!(x, OP, E => {
        let x = View::<E>::new(x, OP, "x")?;
        let blocks: Vec<&[E]> = x.chunks(BLOCK).collect();
        let mut counts = vec![0u64; blocks.len()];
        parallel::blocks(&mut counts, 16, |first, counts| vectorize(#[inline(always)] || {
            for (count, block) in counts.iter_mut().zip(&blocks[first..]) {
                *count = block.iter().map(|v| u64::from(v.load().f64() == 0.0)).sum();
            }
        }));
        Ok(counts.iter().sum())
    })
}

#[inline(always)]
fn block_sum<E: Elem>(x: &[E]) -> f64 {
    let mut acc = [0.0f64; SUMS];
    let chunks = x.chunks_exact(SUMS);
    let rest = chunks.remainder();
    for c in chunks {
        ask_for(c.as_ptr().wrapping_byte_add(AHEAD));
        for l in 0..SUMS {
            let v = c[l].load().f64();
            acc[l] += v * v;
        }
    }
    for (acc, v) in acc.iter_mut().zip(rest) {
        let v = v.load().f64();
        *acc += v * v;
    }
    acc.chunks_exact(4).map(|a| (a[0] + a[1]) + (a[2] + a[3])).sum()
}

/// The sum of `values` in order, with the rounding error of every addition added at the end.
fn compensated_sum(values: &[f64]) -> f64 {
    let (mut total, mut error) = (0.0f64, 0.0);
    for &v in values {
        let next = total + v;
        // Knuth's two-sum: what the addition lost.
        let shadow = next - total;
        error += (total - (next - shadow)) + (v - shadow);
        total = next;
    }
    // An infinite total has a NaN for its error.
    if total.is_finite() { total + error } else { total }
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
    by_elem!(dst, OP, E => {
        if same_storage(dst, src) {
            let src = copied::<E>(src, OP, "src")?;
            add::<E>(dst, &src, OP)
        } else {
            let src = View::<E>::new(src, OP, "src")?;
            add::<E>(dst, &src, OP)
        }
    })
}

fn add<E: Elem>(dst: &Tensor, src: &[E], op: &'static str) -> Result<()> {
    with_slice_mut::<E, _>(dst, op, |dst| {
        parallel::blocks(dst, parallel::GRAIN, |start, dst| {
            vectorize(
                #[inline(always)]
                || dst.iter_mut().zip(&src[start..]).for_each(|(d, s)| *d = E::store(d.load() + s.load())),
            );
        });
        Ok(())
    })
}

/// `t *= factor`; for 16-bit `t`, with `factor` rounded to f32.
///
/// # Errors
/// If `t` is not contiguous or no float.
pub fn scale_inplace(t: &Tensor, factor: f64) -> Result<()> {
    let _span = trace::moves("scale_inplace", &[t, t]);
    const OP: &str = "scale_inplace";
    on_gpu!(t, reduce::scale(t, factor, OP));
    by_elem!(t, OP, E => with_slice_mut::<E, _>(t, OP, |t| {
        let factor = <E as Elem>::Acc::of(factor);
        parallel::blocks(t, parallel::GRAIN, |_, t| vectorize(#[inline(always)] || {
            t.iter_mut().for_each(|v| *v = E::store(v.load() * factor));
        }));
        Ok(())
    }))
}

/// `t = 0`.
///
/// # Errors
/// As [`scale_inplace`].
pub fn zero(t: &Tensor) -> Result<()> {
    let _span = trace::moves("zero", &[t]);
    const OP: &str = "zero";
    on_gpu!(t, reduce::zero(t, OP));
    by_elem!(t, OP, E => with_slice_mut::<E, _>(t, OP, |t| {
        let past_caches = size_of_val(t) >= BEYOND_CACHES;
        parallel::blocks(t, parallel::GRAIN, |_, t| if past_caches { nontemporal::zeros(t) } else { t.fill(E::store(<E as Elem>::Acc::ZERO)) });
        Ok(())
    }))
}

/// Bytes that no cache keeps until they are read again.
const BEYOND_CACHES: usize = 64 << 20;

/// `dst = src` in the dtype of `dst`, rounded to nearest, ties to even; values beyond its range become infinite.
///
/// # Errors
/// If the numbers of elements differ, a dtype is no float, an operand is not contiguous, or both share one storage.
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
    by_elem!(src, OP, S => {
        let src = View::<S>::new(src, OP, "src")?;
        let src: &[S] = &src;
        by_elem!(dst, OP, D => with_slice_mut::<D, _>(dst, OP, |dst| {
            parallel::blocks(dst, parallel::GRAIN, |start, dst| {
                let mut buffer = S::buffer(CAST);
                for (dst, src) in dst.chunks_mut(CAST).zip(src[start..].chunks(CAST)) {
                    let wide = S::widened(&src[..dst.len()], &mut buffer);
                    vectorize(#[inline(always)] || Float::narrow_all(wide, Unwritten::over(dst)));
                }
            });
            Ok(())
        }))
    })
}

/// `dst = src`, bit for bit; the shapes may differ, the elements' number and dtype may not.
///
/// # Errors
/// If the numbers of elements or dtypes differ, an operand is not contiguous, or both share one storage.
pub fn copy(dst: &Tensor, src: &Tensor) -> Result<()> {
    let _span = trace::moves("copy", &[dst, src]);
    const OP: &str = "copy";
    expect_elements(OP, "src", src, dst.elem_count())?;
    expect_dtype(OP, src, dst.dtype())?;
    if same_storage(dst, src) {
        return Err(Error::shape(OP, "dst and src share one storage"));
    }
    on_gpu!(dst, reduce::copy(dst, src, OP));
    with_bytes(src, OP, |src| {
        with_bytes_mut(dst, OP, |dst| {
            dst.copy_from_slice(src);
            Ok(())
        })
    })
}
