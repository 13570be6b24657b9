//! Attention of a few new tokens over the keys and values of all tokens so far: one task per (batch, head). Where there are none before them, as with a prompt, it is
//! that of a sequence.
//!
//! For generation; no gradient, no dropout. Pope et al. 2022 (multi-query attention with a key/value cache).

use candle_core::Tensor;

use super::{Geometry, HeadShape, HostScores, Scores, attention, round, tilt};
use crate::float::{Elem, Float, by_elem};
use crate::host::with_slice_mut;
use crate::par::{self, Shared};
use crate::simd::{max, sum, sum2, vectorize};
use crate::view::{View, expect_apart, expect_dtype, expect_shape, tensor};
use crate::{Error, Result, on_gpu};

/// Appends the keys and values of `qkv [n, b, width]` (rotated) to `cache [positions, b, groups·2·head_dim]` and gives
/// each new query's attention over the positions up to its own: `[n, b, heads·head_dim]`. Sample i's first new token has position
/// `starts[i]`; what the cache holds from there on is replaced.
///
/// # Errors
/// If shapes, dtypes or [`Scores`] do not fit or these name first keys, the cache is too short, or `qkv` is no float.
pub fn attention_cached<'a>(
    qkv: &Tensor,
    cache: &Tensor,
    starts: &[usize],
    shape: HeadShape,
    scores: impl Into<Scores<'a>>,
) -> Result<Tensor> {
    const OP: &str = "attention_cached";
    let (s, b) = shape.check(qkv, OP)?;
    let positions = cache.dim(0)?;
    expect_shape(OP, "cache", cache, &[positions, b, shape.groups * 2 * shape.head_dim])?;
    expect_dtype(OP, cache, qkv.dtype())?;
    if starts.len() != b || starts.iter().any(|start| start.checked_add(s).is_none_or(|end| end > positions)) {
        let message =
            format!("{s} tokens from positions {starts:?} on, of {b} samples, in a cache of {positions} positions");
        return Err(Error::shape(OP, message));
    }
    let scores = scores.into();
    scores.check(s, b, shape, OP)?;
    if scores.first_keys.is_some() {
        return Err(Error::shape(OP, "first keys of a sequence say nothing of what the cache holds"));
    }
    let geometry = Geometry { s, b, shape };
    on_gpu!(qkv, attention::cached(OP, qkv, cache, starts, geometry, scores));
    expect_apart(OP, "cache", cache, &[qkv])?;
    let from_the_start = starts.iter().all(|&start| start == 0).then_some(scores);
    let scores = HostScores::new(scores, None, s, OP)?;
    by_elem!(qkv, OP, E => {
        let packed = View::<E>::new(qkv, OP, "qkv")?;
        with_slice_mut::<E, _>(cache, OP, |cache| {
            append(&packed, cache, starts, geometry);
            if let Some(scores) = from_the_start {
                return attention(qkv, shape, scores, None).map(|(out, _)| out);
            }
            tensor(attend(&packed, cache, starts, geometry, scores), (s, b, shape.heads() * shape.head_dim), qkv)
        })
    })
}

/// Offset in the cache of a group's key at a position.
fn key_at(geometry: Geometry, position: usize, batch: usize, group: usize) -> usize {
    let Geometry { b, shape, .. } = geometry;
    ((position * b + batch) * shape.groups + group) * 2 * shape.head_dim
}

fn append<E: Elem>(packed: &[E], cache: &mut [E], starts: &[usize], geometry: Geometry) {
    let Geometry { s, shape, .. } = geometry;
    let pair = 2 * shape.head_dim;
    for (batch, start) in starts.iter().enumerate() {
        for i in 0..s {
            for group in 0..shape.groups {
                // Key and value follow each other in both.
                let from = geometry.qkv_at(batch, group, shape.heads_per_group) + i * geometry.qkv_stride();
                let to = key_at(geometry, start + i, batch, group);
                cache[to..to + pair].copy_from_slice(&packed[from..from + pair]);
            }
        }
    }
}

fn attend<E: Elem>(packed: &[E], cache: &[E], starts: &[usize], geometry: Geometry, scores: HostScores) -> Vec<E> {
    let Geometry { s, b, shape } = geometry;
    let (heads, d) = (shape.heads(), shape.head_dim);
    let mut out = vec![E::store(E::Acc::ZERO); s * b * heads * d];
    let rows = Shared(out.as_mut_ptr());
    par::for_each(b * heads, |task| {
        let (batch, head) = (task / heads, task % heads);
        let (group, in_group) = (head / shape.heads_per_group, head % shape.heads_per_group);
        let (scale, slope) = (E::Acc::of(scores.scale), scores.slope(head));
        let mut weights = vec![E::Acc::ZERO; starts[batch] + s];
        let mut acc = vec![E::Acc::ZERO; d];
        for i in 0..s {
            let position = starts[batch] + i;
            let q_at = geometry.qkv_at(batch, group, in_group) + i * geometry.qkv_stride();
            let q = &packed[q_at..q_at + d];
            let out_at = geometry.out_at(batch, head) + i * geometry.out_stride();
            // SAFETY: only this task writes this head's columns of this sample.
            let out = unsafe { std::slice::from_raw_parts_mut(rows.at(out_at), d) };
            let first = scores.window.map_or(0, |window| (position + 1).saturating_sub(window));
            let weights = &mut weights[..=position - first];
            vectorize(
                #[inline(always)]
                || {
                    for (key, weight) in (first..).zip(weights.iter_mut()) {
                        let at = key_at(geometry, key, batch, group);
                        *weight = scale * sum2(q, &cache[at..at + d], |q, k| q * k);
                    }
                    if let Some(slope) = slope {
                        tilt(weights, slope, position, first);
                    }
                    let top = max(weights);
                    weights.iter_mut().for_each(|w| *w = (*w - top).fast_exp());
                    let norm = E::Acc::ONE / sum(weights, |w| w);
                    round::<E>(weights);
                    acc.fill(E::Acc::ZERO);
                    for (key, &weight) in (first..).zip(weights.iter()) {
                        let at = key_at(geometry, key, batch, group) + d;
                        acc.iter_mut().zip(&cache[at..at + d]).for_each(|(acc, v)| *acc += weight * v.load());
                    }
                    out.iter_mut().zip(&acc).for_each(|(out, &acc)| *out = E::store(acc * norm));
                },
            );
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::attention;
    use candle_core::{DType, Device};

    /// A deterministic spread of values.
    fn values(shape: &[usize], dtype: DType) -> Tensor {
        let n: usize = shape.iter().product();
        let v: Vec<f64> = (0..n).map(|i| ((i * 2_654_435_761) % 1000) as f64 / 500.0 - 1.0).collect();
        Tensor::from_vec(v, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    fn difference(a: &Tensor, b: &Tensor) -> f64 {
        let d = (a - b).unwrap().abs().unwrap().to_dtype(DType::F64).unwrap();
        d.flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
    }

    #[test]
    fn tokens_fed_in_any_portions_give_what_the_whole_sequence_gives() {
        let shape = HeadShape { groups: 2, heads_per_group: 3, head_dim: 5 };
        let slopes = [0.5, 0.25, 0.125, 0.06, 0.03, 0.015];
        let (s, b) = (11, 2);
        let dtypes = [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::BF16, 1.6e-2), (DType::F16, 2e-3)];
        for (dtype, tolerance) in dtypes {
            let qkv = values(&[s, b, shape.width()], dtype);
            for (alibi, window) in [(None, None), (Some(&slopes[..]), None), (None, Some(3)), (Some(&slopes), Some(1))]
            {
                let scores = Scores { alibi, window, ..Scores::from(0.4) };
                let (whole, _) = attention(&qkv, shape, scores, None).unwrap();
                for portions in [vec![11], vec![4, 7], vec![1; 11]] {
                    let cache = Tensor::zeros((s, b, 2 * 2 * 5), dtype, &Device::Cpu).unwrap();
                    let mut at = 0;
                    for n in portions {
                        let part = qkv.narrow(0, at, n).unwrap().contiguous().unwrap();
                        let out = attention_cached(&part, &cache, &[at, at], shape, scores).unwrap();
                        let expected = whole.narrow(0, at, n).unwrap();
                        assert!(difference(&out, &expected) < tolerance);
                        at += n;
                    }
                }
            }
        }
    }

    #[test]
    fn samples_may_be_at_different_positions() {
        let shape = HeadShape { groups: 1, heads_per_group: 2, head_dim: 4 };
        let qkv = values(&[6, 2, shape.width()], DType::F64);
        let (whole, _) = attention(&qkv, shape, 0.5, None).unwrap();
        let cache = Tensor::zeros((6, 2, 8), DType::F64, &Device::Cpu).unwrap();
        // Both prompts are fed padded to 4 tokens; the second sample's real prompt has 2.
        attention_cached(&qkv.narrow(0, 0, 4).unwrap().contiguous().unwrap(), &cache, &[0, 0], shape, 0.5).unwrap();
        let next = |sample: usize, position: usize| qkv.narrow(0, position, 1).unwrap().narrow(1, sample, 1).unwrap();
        let new = Tensor::cat(&[next(0, 4), next(1, 2)], 1).unwrap().contiguous().unwrap();
        let out = attention_cached(&new, &cache, &[4, 2], shape, 0.5).unwrap();
        let expected = |sample: usize, position: usize| {
            whole.narrow(0, position, 1).unwrap().narrow(1, sample, 1).unwrap().contiguous().unwrap()
        };
        assert!(difference(&out.narrow(1, 0, 1).unwrap().contiguous().unwrap(), &expected(0, 4)) < 1e-12);
        assert!(difference(&out.narrow(1, 1, 1).unwrap().contiguous().unwrap(), &expected(1, 2)) < 1e-12);
    }

    #[test]
    fn a_full_cache_is_refused() {
        let shape = HeadShape { groups: 1, heads_per_group: 1, head_dim: 4 };
        let cache = Tensor::zeros((3, 1, 8), DType::F32, &Device::Cpu).unwrap();
        let beyond = [usize::MAX, usize::MAX - 1];
        for start in beyond {
            let error = attention_cached(&values(&[2, 1, 12], DType::F32), &cache, &[start], shape, 0.5).unwrap_err();
            assert!(error.to_string().contains("2 tokens from positions"), "{error}");
        }
        let error = attention_cached(&values(&[2, 1, 12], DType::F32), &cache, &[2], shape, 0.5).unwrap_err();
        assert!(error.to_string().contains("cache of 3 positions"), "{error}");
    }
}
