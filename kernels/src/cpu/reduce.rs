//! Sums of squares in f64, counts, and arithmetic in place on flat buffers.

use candle_core::Tensor;

use crate::Result;
use crate::tensor::element::{Elem, Float, by_elem};
use crate::tensor::host::{with_bytes, with_bytes_mut, with_slice_mut};
use crate::tensor::output::Uninit;
use crate::tensor::simd::{AHEAD, prefetch, vectorize};
use crate::tensor::view::{View, copied, same_storage};
use crate::tensor::{nontemporal, parallel};

/// Elements per partial sum.
const BLOCK: usize = 4096;

/// Elements that are cast at a time, through the L1 cache.
const CAST: usize = 1024;

/// Independent sums within a block.
const SUMS: usize = 16;

pub fn sums_of_squares<E: Elem>(xs: &[&Tensor], op: &'static str) -> Result<Vec<f64>> {
    let views = xs.iter().map(|x| View::<E>::new(x, op, "x")).collect::<Result<Vec<_>>>()?;
    let blocks: Vec<&[E]> = views.iter().flat_map(|x| x.chunks(BLOCK)).collect();
    let mut partials = vec![0.0; blocks.len()];
    parallel::blocks(&mut partials, 16, |first, partials| {
        vectorize(
            #[inline(always)]
            || {
                for (partial, block) in partials.iter_mut().zip(&blocks[first..]) {
                    *partial = block_sum(block);
                }
            },
        )
    });
    let mut partials = &partials[..];
    let sum = |x: &View<E>| {
        let (own, rest) = partials.split_at(x.len().div_ceil(BLOCK));
        partials = rest;
        compensated_sum(own)
    };
    Ok(views.iter().map(sum).collect())
}

pub fn count_zeros<E: Elem>(x: &Tensor, op: &'static str) -> Result<u64> {
    let x = View::<E>::new(x, op, "x")?;
    let blocks: Vec<&[E]> = x.chunks(BLOCK).collect();
    let mut counts = vec![0u64; blocks.len()];
    parallel::blocks(&mut counts, 16, |first, counts| {
        vectorize(
            #[inline(always)]
            || {
                for (count, block) in counts.iter_mut().zip(&blocks[first..]) {
                    *count = block.iter().map(|v| u64::from(v.load().f64() == 0.0)).sum();
                }
            },
        )
    });
    Ok(counts.iter().sum())
}

#[inline(always)]
fn block_sum<E: Elem>(x: &[E]) -> f64 {
    let mut acc = [0.0f64; SUMS];
    let chunks = x.chunks_exact(SUMS);
    let rest = chunks.remainder();
    for c in chunks {
        prefetch(c.as_ptr().wrapping_byte_add(AHEAD));
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

/// The sum of `values` in order; the rounding errors of all additions are added at the end.
fn compensated_sum(values: &[f64]) -> f64 {
    let (mut total, mut error) = (0.0f64, 0.0);
    for &v in values {
        let next = total + v;
        // Knuth's two-sum: the rounding error of the addition.
        let shadow = next - total;
        error += (total - (next - shadow)) + (v - shadow);
        total = next;
    }
    // If the total is infinite, the error is NaN.
    if total.is_finite() { total + error } else { total }
}

pub fn add_inplace<E: Elem>(dst: &Tensor, src: &Tensor, op: &'static str) -> Result<()> {
    if same_storage(dst, src) {
        let src = copied::<E>(src, op, "src")?;
        add::<E>(dst, &src, op)
    } else {
        let src = View::<E>::new(src, op, "src")?;
        add::<E>(dst, &src, op)
    }
}

fn add<E: Elem>(dst: &Tensor, src: &[E], op: &'static str) -> Result<()> {
    with_slice_mut::<E, _>(dst, op, |dst| {
        parallel::blocks(dst, parallel::GRAIN, |start, dst| {
            vectorize(
                #[inline(always)]
                || {
                    dst.iter_mut()
                        .zip(&src[start..])
                        .for_each(|(d, s)| *d = E::store(d.load() + s.load()))
                },
            );
        });
        Ok(())
    })
}

pub fn scale_inplace<E: Elem>(t: &Tensor, factor: f64, op: &'static str) -> Result<()> {
    with_slice_mut::<E, _>(t, op, |t| {
        let factor = E::Acc::of(factor);
        parallel::blocks(t, parallel::GRAIN, |_, t| {
            vectorize(
                #[inline(always)]
                || {
                    t.iter_mut().for_each(|v| *v = E::store(v.load() * factor));
                },
            )
        });
        Ok(())
    })
}

pub fn zero<E: Elem>(t: &Tensor, op: &'static str) -> Result<()> {
    with_slice_mut::<E, _>(t, op, |t| {
        let past_caches = size_of_val(t) >= BEYOND_CACHES;
        parallel::blocks(t, parallel::GRAIN, |_, t| {
            if past_caches { nontemporal::zeros(t) } else { t.fill(E::store(E::Acc::ZERO)) }
        });
        Ok(())
    })
}

/// Size in bytes beyond which no cache keeps data until it is read again.
const BEYOND_CACHES: usize = 64 << 20;

pub fn cast<S: Elem>(dst: &Tensor, src: &Tensor, op: &'static str) -> Result<()> {
    let src = View::<S>::new(src, op, "src")?;
    let src: &[S] = &src;
    by_elem!(dst, op, D => with_slice_mut::<D, _>(dst, op, |dst| {
        parallel::blocks(dst, parallel::GRAIN, |start, dst| {
            let mut buffer = S::buffer(CAST);
            for (dst, src) in dst.chunks_mut(CAST).zip(src[start..].chunks(CAST)) {
                let wide = S::widened(&src[..dst.len()], &mut buffer);
                vectorize(#[inline(always)] || Float::narrow_all(wide, Uninit::over(dst)));
            }
        });
        Ok(())
    }))
}

pub fn copy(dst: &Tensor, src: &Tensor, op: &'static str) -> Result<()> {
    with_bytes(src, op, |src| {
        with_bytes_mut(dst, op, |dst| {
            dst.copy_from_slice(src);
            Ok(())
        })
    })
}
