//! Attention of a few new tokens over the keys and values of all tokens so far: one task per sample
//! and group of heads, or per some of a group's heads. If there are no earlier tokens, as for a
//! prompt, this is attention over a sequence.
//!
//! A task goes over the cache once, some positions at a time, for all of its heads (the online
//! softmax: Milakov & Gimelshein 2018). Positions lie kilobytes apart, so reaching one, perhaps
//! with a page-table walk, takes longer than computing with it.
//!
//! For generation; no gradient, no dropout. Pope et al. 2022 (multi-query attention with a
//! key/value cache).

#[cfg(target_arch = "x86_64")]
use candle_core::DType;
use candle_core::Tensor;
#[cfg(target_arch = "x86_64")]
use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
use super::lanes::{add_rows, inner_product};
use super::{Geometry, HostScores, Scores, round, tilt};
use crate::Result;
use crate::cpu::lanes::{max, sum, sum2};
use crate::tensor::allocator::LINE;
use crate::tensor::element::{Elem, Float};
use crate::tensor::host::with_slice_mut;
use crate::tensor::parallel::{self, Shared};
use crate::tensor::simd::{prefetch_l2, vectorize};
use crate::tensor::view::{View, tensor};

/// See [`attention_cached`](crate::tensor::arguments::attention::attention_cached).
pub fn cached<E: Elem>(
    qkv: &Tensor,
    cache: &Tensor,
    starts: &[usize],
    geometry: Geometry,
    scores: Scores,
    op: &'static str,
) -> Result<Tensor> {
    let Geometry { s, b, shape } = geometry;
    let from_the_start = starts.iter().all(|&start| start == 0).then_some(scores);
    let scores = HostScores::new(scores, None, geometry.s, op)?;

    let packed = View::<E>::new(qkv, op, "qkv")?;
    with_slice_mut::<E, _>(cache, op, |cache| {
        append(&packed, cache, starts, geometry);
        if let Some(scores) = from_the_start {
            return super::forward::<E>(qkv, geometry, scores, None, op).map(|(out, _)| out);
        }
        tensor(
            attend(&packed, cache, starts, geometry, scores),
            (s, b, shape.heads() * shape.head_dim),
            qkv,
        )
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
                // In both, the value directly follows the key.
                let from = geometry.qkv_at(batch, group, shape.heads_per_group)
                    + i * geometry.qkv_stride();
                let to = key_at(geometry, start + i, batch, group);
                cache[to..to + pair].copy_from_slice(&packed[from..from + pair]);
            }
        }
    }
}

/// Positions computed at a time.
const BLOCK: usize = 32;
/// Positions whose values are added at a time.
const TOGETHER: usize = 4;
/// Prefetch distance, in positions.
const AHEAD: usize = 16;

fn attend<E: Elem>(
    packed: &[E],
    cache: &[E],
    starts: &[usize],
    geometry: Geometry,
    scores: HostScores,
) -> Vec<E> {
    let Geometry { s, b, shape } = geometry;
    let (d, of_group) = (shape.head_dim, shape.heads_per_group);
    let mut out = vec![E::store(E::Acc::ZERO); s * b * shape.heads() * d];
    let rows = Shared(out.as_mut_ptr());
    // If there are fewer groups than threads, each group's heads are split over several tasks. Each
    // task then reads all of the group's keys and values.
    let parts = parallel::threads().div_ceil((b * shape.groups).max(1)).clamp(1, of_group.max(1));
    parallel::for_each(b * shape.groups * parts, |task| {
        let (batch_group, part) = (task / parts, task % parts);
        let (batch, group) = (batch_group / shape.groups, batch_group % shape.groups);
        let in_group = part * of_group / parts..(part + 1) * of_group / parts;
        let mut heads: Vec<_> = in_group.clone().map(|_| Gathered::<E>::new(d)).collect();
        for i in 0..s {
            let position = starts[batch] + i;
            for (j, head) in in_group.clone().zip(&mut heads) {
                let q_at = geometry.qkv_at(batch, group, j) + i * geometry.qkv_stride();
                head.begin(&packed[q_at..q_at + d]);
            }
            let first = scores.window.map_or(0, |window| (position + 1).saturating_sub(window));
            for key in (first..=position).step_by(BLOCK) {
                let keys = key..(key + BLOCK).min(position + 1);
                let row = |key: usize| {
                    let at = key_at(geometry, key, batch, group);
                    cache[at..at + 2 * d].split_at(d)
                };
                vectorize(
                    #[inline(always)]
                    || {
                        for (n, key) in keys.clone().enumerate() {
                            if key + AHEAD <= position {
                                let (ahead, _) = row(key + AHEAD);
                                (0..2 * size_of_val(ahead)).step_by(LINE).for_each(|line| {
                                    prefetch_l2(ahead.as_ptr().wrapping_byte_add(line));
                                });
                            }
                            heads
                                .iter_mut()
                                .for_each(|head| head.weights[n] = dot(&head.query, row(key).0));
                        }
                        for (j, head) in in_group.clone().zip(&mut heads) {
                            let slope = scores.slope(group * of_group + j);
                            head.soften(keys.len(), E::Acc::of(scores.scale), |weights| {
                                if let Some(slope) = slope {
                                    tilt(weights, slope, position, key);
                                }
                            });
                        }
                        for n in (0..keys.len()).step_by(TOGETHER) {
                            let at = key + n;
                            if n + TOGETHER <= keys.len() {
                                let values: [_; TOGETHER] = std::array::from_fn(|i| row(at + i).1);
                                heads.iter_mut().for_each(|head| head.add(n, values));
                            } else {
                                (at..keys.end).for_each(|key| {
                                    heads
                                        .iter_mut()
                                        .for_each(|head| head.add(key - keys.start, [row(key).1]));
                                });
                            }
                        }
                    },
                );
            }
            for (j, head) in in_group.clone().zip(&heads) {
                let at = geometry.out_at(batch, group * of_group + j) + i * geometry.out_stride();
                // SAFETY: only this task writes this head's columns of this sample.
                head.end(unsafe { std::slice::from_raw_parts_mut(rows.at(at), d) });
            }
        }
    });
    out
}

/// A query's accumulated state over the positions so far.
struct Gathered<E: Elem> {
    query: Vec<E>,
    /// For the current positions: scores, then e^(score − top), rounded.
    weights: [E::Acc; BLOCK],
    /// The largest score so far.
    top: E::Acc,
    /// Σ e^(score − top).
    norm: E::Acc,
    /// Σ e^(score − top) · value.
    sums: Vec<E::Acc>,
}

impl<E: Elem> Gathered<E> {
    fn new(d: usize) -> Self {
        let (top, norm) = (E::Acc::NEG_INFINITY, E::Acc::ZERO);
        let query = vec![E::store(E::Acc::ZERO); d];
        Self { query, weights: [E::Acc::ZERO; BLOCK], top, norm, sums: vec![E::Acc::ZERO; d] }
    }

    /// Resets the state for a new query.
    fn begin(&mut self, query: &[E]) {
        self.query.copy_from_slice(query);
        (self.top, self.norm) = (E::Acc::NEG_INFINITY, E::Acc::ZERO);
        self.sums.fill(E::Acc::ZERO);
    }

    /// Turns the first `n` scores into weights, and rescales the accumulated sums to the new
    /// largest score.
    #[inline(always)]
    fn soften(&mut self, n: usize, scale: E::Acc, tilt: impl FnOnce(&mut [E::Acc])) {
        let weights = &mut self.weights[..n];
        weights.iter_mut().for_each(|w| *w *= scale);
        tilt(weights);
        let top = max(weights);
        if top > self.top {
            let correction = (self.top - top).fast_exp();
            self.top = top;
            self.norm *= correction;
            self.sums.iter_mut().for_each(|sum| *sum *= correction);
        }
        // If all scores so far are −∞, the weights are 0.
        let top = if self.top == E::Acc::NEG_INFINITY { E::Acc::ZERO } else { self.top };
        weights.iter_mut().for_each(|w| *w = (*w - top).fast_exp());
        self.norm += sum(weights, |w| w);
        round::<E>(weights);
    }

    /// Adds the values of the current positions, from `n` on.
    #[inline(always)]
    fn add<const N: usize>(&mut self, n: usize, values: [&[E]; N]) {
        let weights: [E::Acc; N] = std::array::from_fn(|i| self.weights[n + i]);
        let d = self.sums.len();
        let values = values.map(|value| &value[..d]);
        #[cfg(target_arch = "x86_64")]
        if E::DTYPE == DType::F16
            && crate::tensor::simd::Isa::detected() >= crate::tensor::simd::Isa::Avx512
        {
            // LLVM does not vectorize these conversions; its code takes five times as long.
            let (values, weights) =
                (values.map(|value| value.as_ptr().cast()), weights.map(|w| w.f64() as f32));
            // SAFETY: the machine has AVX-512, E is f16, which is computed in f32, and every row
            // has d elements.
            return unsafe {
                add_rows::<f16, N>(self.sums.as_mut_ptr().cast(), d, weights, values)
            };
        }
        for (c, sum) in self.sums.iter_mut().enumerate() {
            for i in 0..N {
                *sum += weights[i] * values[i][c].load();
            }
        }
    }

    fn end(&self, out: &mut [E]) {
        let norm = E::Acc::ONE / self.norm;
        out.iter_mut().zip(&self.sums).for_each(|(out, &sum)| *out = E::store(sum * norm));
    }
}

/// The inner product of two rows.
#[inline(always)]
fn dot<E: Elem>(a: &[E], b: &[E]) -> E::Acc {
    #[cfg(target_arch = "x86_64")]
    if size_of::<E>() == 2
        && crate::tensor::simd::Isa::detected() >= crate::tensor::simd::Isa::Avx512
    {
        // LLVM's vector code for bf16 takes twice as long; for f16 it does not vectorize.
        let (rows, n) = ([a.as_ptr(), b.as_ptr()], a.len().min(b.len()));
        // SAFETY: the machine has AVX-512, and E is the type of its DTYPE.
        let product = unsafe {
            match E::DTYPE {
                DType::BF16 => inner_product::<bf16>(rows.map(<*const E>::cast), n),
                _ => inner_product::<f16>(rows.map(<*const E>::cast), n),
            }
        };
        return E::Acc::of(product.into());
    }
    sum2(a, b, |a, b| a * b)
}
