//! Backward: one task per (batch, group), so that the sums of dk and dv over queries and heads have one order.

use candle_core::Tensor;

use super::{Geometry, HeadMask, Mask, Scores, TILE_K, TILE_Q, tilt};
use crate::Result;
use crate::float::Float;
use crate::gemm::{Mat, gemm};
use crate::par::{self, Shared};
use crate::simd::{sum2, vectorize};
use crate::view::{View, tensor};

pub(super) fn run<T: Float>(
    op: &'static str,
    dout: &Tensor,
    qkv: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    geometry: Geometry,
    scores: Scores,
    mask: Option<&Mask>,
) -> Result<Tensor> {
    let (packed, dout) = (View::<T>::new(qkv, op, "qkv")?, View::<T>::new(dout, op, "dout")?);
    let (out, lse) = (View::<T>::new(out, op, "out")?, View::<T>::new(lse, op, "lse")?);
    let mut dqkv = vec![T::ZERO; packed.len()];
    let pass = Pass { geometry, packed: &packed, dout: &dout, out: &out, lse: &lse, scores, mask };
    let target = Shared(dqkv.as_mut_ptr());
    let groups = geometry.shape.groups;
    par::for_each(geometry.b * groups, |task| pass.group(task / groups, task % groups, target));
    tensor(dqkv, qkv.dims(), qkv)
}

struct Pass<'a, T> {
    geometry: Geometry,
    packed: &'a [T],
    dout: &'a [T],
    out: &'a [T],
    lse: &'a [T],
    scores: Scores<'a>,
    mask: Option<&'a Mask<'a>>,
}

/// What one task needs besides its results.
struct Scratch<T> {
    /// Scores of a tile, then its (dropped) probabilities.
    p: Vec<T>,
    /// Gradients of the probabilities, then of the scores.
    ds: Vec<T>,
    /// Σ dout·out per query of every head of the group.
    delta: Vec<T>,
}

impl<T: Float> Pass<'_, T> {
    /// Adds to the columns of one group in `dqkv`, which no other task touches.
    fn group(&self, batch: usize, group: usize, dqkv: Shared<T>) {
        let Geometry { s, shape, .. } = self.geometry;
        let mut scratch = Scratch {
            p: vec![T::ZERO; TILE_Q * TILE_K],
            ds: vec![T::ZERO; TILE_Q * TILE_K],
            delta: vec![T::ZERO; shape.heads_per_group * s],
        };
        for j in 0..shape.heads_per_group {
            let delta = &mut scratch.delta[j * s..(j + 1) * s];
            self.delta(batch, group * shape.heads_per_group + j, delta);
        }
        for first_key in (0..s).step_by(TILE_K) {
            for j in 0..shape.heads_per_group {
                for first_query in (first_key / TILE_Q * TILE_Q..s).step_by(TILE_Q) {
                    // This query and all later ones see nothing of the tile.
                    if self.scores.first_key(s, batch, first_query) >= first_key + TILE_K {
                        break;
                    }
                    self.tile(batch, group, j, first_query, first_key, &mut scratch, dqkv);
                }
            }
        }
    }

    fn delta(&self, batch: usize, head: usize, delta: &mut [T]) {
        let (at, stride, d) =
            (self.geometry.out_at(batch, head), self.geometry.out_stride(), self.geometry.shape.head_dim);
        vectorize(
            #[inline(always)]
            || {
                for (position, delta) in delta.iter_mut().enumerate() {
                    let row = at + position * stride..at + position * stride + d;
                    *delta = sum2(&self.dout[row.clone()], &self.out[row], |a, b| a * b);
                }
            },
        );
    }

    fn tile(
        &self,
        batch: usize,
        group: usize,
        in_group: usize,
        first_query: usize,
        first_key: usize,
        scratch: &mut Scratch<T>,
        dqkv: Shared<T>,
    ) {
        let Geometry { s, shape, .. } = self.geometry;
        let (d, head) = (shape.head_dim, group * shape.heads_per_group + in_group);
        let (rows, keys) = (TILE_Q.min(s - first_query), TILE_K.min(s - first_key));
        // Keys behind the last query of the tile are hidden from all of it.
        let keys = keys.min(first_query + rows - first_key);
        let (stride, out_stride) = (self.geometry.qkv_stride(), self.geometry.out_stride());
        let at = |part: usize, position: usize| self.geometry.qkv_at(batch, group, part) + position * stride;
        let q_at = at(in_group, first_query);
        let (k_at, v_at) = (at(shape.heads_per_group, first_key), at(shape.heads_per_group + 1, first_key));
        let mat = |offset: usize| Mat(self.packed[offset..].as_ptr(), stride, 1);
        let dout_at = self.geometry.out_at(batch, head) + first_query * out_stride;
        let dout = Mat(self.dout[dout_at..].as_ptr(), out_stride, 1);
        let (scale, slope) = (T::of(self.scores.scale), self.scores.slope(head));
        let none = gemm::Parallelism::None;
        let Scratch { p, ds, delta } = scratch;

        // SAFETY: the last query and key lie before position s of qkv, dout and dqkv; p and ds hold TILE_Q rows of
        // TILE_K; only this task touches the group's columns of dqkv.
        unsafe {
            let (p, ds) = (Mat(p.as_mut_ptr(), TILE_K, 1), Mat(ds.as_mut_ptr(), TILE_K, 1));
            gemm((rows, keys, d), p, false, mat(q_at), mat(k_at).t(), scale, none);
            gemm((rows, keys, d), ds, false, dout, mat(v_at).t(), T::ONE, none);
        }
        let lse = &self.lse[(batch * shape.heads() + head) * s + first_query..];
        let delta = &delta[in_group * s + first_query..];
        let mask = self.mask.map(|m| m.head(batch, head));
        let kept = T::of(self.mask.map_or(1.0, |m| m.scale));
        vectorize(
            #[inline(always)]
            || {
                let rows = p.chunks_exact_mut(TILE_K).zip(ds.chunks_exact_mut(TILE_K)).take(rows);
                for (r, (p, ds)) in rows.enumerate() {
                    let query = first_query + r;
                    let visible = (query + 1).saturating_sub(first_key).min(keys);
                    let hidden = self.scores.first_key(s, batch, query).saturating_sub(first_key).min(visible);
                    p[visible..keys].fill(T::ZERO);
                    ds[visible..keys].fill(T::ZERO);
                    if let Some(slope) = slope {
                        tilt(&mut p[..visible], slope, query, first_key);
                    }
                    // The words of a mask begin at the tile's first key.
                    let (p, ds) = (&mut p[..visible], &mut ds[..visible]);
                    match &mask {
                        Some(mask) => dropped_row(p, ds, lse[r], delta[r], mask, kept, query, first_key),
                        None => plain_row(p, ds, lse[r], delta[r]),
                    }
                    p[..hidden].fill(T::ZERO);
                    ds[..hidden].fill(T::ZERO);
                }
            },
        );
        // SAFETY: as above.
        unsafe {
            let (p, ds) = (Mat(p.as_ptr(), TILE_K, 1), Mat(ds.as_ptr(), TILE_K, 1));
            let target = |offset: usize| Mat(dqkv.at(offset), stride, 1);
            gemm((keys, d, rows), target(v_at), true, p.t(), dout, T::ONE, none);
            gemm((keys, d, rows), target(k_at), true, ds.t(), mat(q_at), scale, none);
            gemm((rows, d, keys), target(q_at), true, ds, mat(k_at), scale, none);
        }
    }
}

/// Scores and gradients of probabilities become probabilities and gradients of (scaled) scores.
#[inline(always)]
fn plain_row<T: Float>(p: &mut [T], ds: &mut [T], lse: T, delta: T) {
    for (p, ds) in p.iter_mut().zip(ds) {
        *p = (*p - lse).fast_exp();
        *ds = *p * (*ds - delta);
    }
}

/// As [`plain_row`], with the mask and 1/(1−p) of forward on the probabilities and on their gradients.
#[inline(always)]
fn dropped_row<T: Float>(
    p: &mut [T],
    ds: &mut [T],
    lse: T,
    delta: T,
    mask: &HeadMask,
    kept: T,
    query: usize,
    first_key: usize,
) {
    let mut words = [0; TILE_K];
    let words = &mut words[..p.len()];
    mask.fill(query, first_key, words);
    for ((p, ds), &word) in p.iter_mut().zip(ds).zip(&*words) {
        let probability = (*p - lse).fast_exp();
        let factor = if word < mask.threshold { T::ZERO } else { kept };
        *p = probability * factor;
        *ds = probability * (*ds * factor - delta);
    }
}
