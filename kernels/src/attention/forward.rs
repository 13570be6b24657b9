//! Forward: one task per (batch, head, tile of queries).

use std::ops::Range;

use candle_core::Tensor;

use super::{Geometry, HeadMask, Mask, Scores, TILE_K, TILE_Q, tilt};
use crate::Result;
use crate::float::Float;
use crate::gemm::{Mat, gemm};
use crate::par::{self, Shared};
use crate::simd::{max, sum, vectorize};
use crate::view::{View, tensor};

pub(super) fn run<T: Float>(
    op: &'static str,
    qkv: &Tensor,
    geometry: Geometry,
    scores: Scores,
    mask: Option<&Mask>,
) -> Result<(Tensor, Tensor)> {
    let Geometry { s, b, shape } = geometry;
    let heads = shape.heads();
    let packed = View::<T>::new(qkv, op, "qkv")?;
    let packed: &[T] = &packed;
    let mut out = vec![T::ZERO; s * b * heads * shape.head_dim];
    let mut lse = vec![T::ZERO; b * heads * s];
    let tiles = s.div_ceil(TILE_Q);
    {
        let (out, lse) = (Shared(out.as_mut_ptr()), Shared(lse.as_mut_ptr()));
        par::for_each(b * heads * tiles, |task| {
            // Long rows first: they make the better start for a pool that steals.
            let (tile, batch_head) = (tiles - 1 - task / (b * heads), task % (b * heads));
            let tile = Tile { geometry, batch: batch_head / heads, head: batch_head % heads, first: tile * TILE_Q };
            tile.forward(packed, out, lse, scores, mask);
        });
    }
    Ok((tensor(out, (s, b, heads * shape.head_dim), qkv)?, tensor(lse, (b, heads, s), qkv)?))
}

/// A tile of queries of one head.
struct Tile {
    geometry: Geometry,
    batch: usize,
    head: usize,
    /// Position of the first query.
    first: usize,
}

impl Tile {
    /// Writes the tile's rows of `out` and `lse`, which no other tile writes.
    fn forward<T: Float>(&self, packed: &[T], out: Shared<T>, lse: Shared<T>, how: Scores, mask: Option<&Mask>) {
        let Geometry { s, shape, .. } = self.geometry;
        let d = shape.head_dim;
        let (group, in_group) = (self.head / shape.heads_per_group, self.head % shape.heads_per_group);
        let at = |part| self.geometry.qkv_at(self.batch, group, part);
        let (q_at, k_at, v_at) = (at(in_group), at(shape.heads_per_group), at(shape.heads_per_group + 1));
        let stride = self.geometry.qkv_stride();
        let rows = TILE_Q.min(s - self.first);
        let (scale, slope) = (T::of(how.scale), how.slope(self.head));
        let head_mask = mask.map(|m| m.head(self.batch, self.head));
        let row_mat = |offset: usize, position: usize| Mat(packed[offset + position * stride..].as_ptr(), stride, 1);

        let mut scores = vec![T::ZERO; TILE_Q * TILE_K];
        let mut acc = vec![T::ZERO; TILE_Q * d];
        let mut maxima = [T::NEG_INFINITY; TILE_Q];
        let mut sums = [T::ZERO; TILE_Q];
        let none = gemm::Parallelism::None;
        // Tiles that all queries see nothing of are left out: the first query sees furthest back.
        let seen = how.first_key(s, self.batch, self.first) / TILE_K * TILE_K;
        for first_key in (seen..self.first + rows).step_by(TILE_K) {
            let keys = TILE_K.min(self.first + rows - first_key);
            let (q, k) = (row_mat(q_at, self.first), row_mat(k_at, first_key));
            // SAFETY: the last query and key lie before position s of qkv; scores holds TILE_Q rows of TILE_K.
            unsafe { gemm((rows, keys, d), Mat(scores.as_mut_ptr(), TILE_K, 1), false, q, k.t(), scale, none) };
            vectorize(
                #[inline(always)]
                || {
                    let rows = scores.chunks_exact_mut(TILE_K).zip(acc.chunks_exact_mut(d)).take(rows);
                    for (r, (scores, acc)) in rows.enumerate() {
                        let query = self.first + r;
                        let visible = (query + 1).saturating_sub(first_key).min(keys);
                        let hidden = how.first_key(s, self.batch, query).saturating_sub(first_key).min(visible);
                        if let Some(slope) = slope {
                            tilt(&mut scores[..visible], slope, query, first_key);
                        }
                        let state = (&mut maxima[r], &mut sums[r]);
                        soften(&mut scores[..keys], hidden..visible, acc, state);
                        if let Some(mask) = &head_mask {
                            drop_row(mask, query, first_key, &mut scores[..visible]);
                        }
                    }
                },
            );
            let (p, v) = (Mat(scores.as_ptr(), TILE_K, 1), row_mat(v_at, first_key));
            // SAFETY: as above; acc holds TILE_Q rows of d.
            unsafe { gemm((rows, d, keys), Mat(acc.as_mut_ptr(), d, 1), true, p, v, T::ONE, none) };
        }

        let kept = T::of(mask.map_or(1.0, |m| m.scale));
        let out_at = self.geometry.out_at(self.batch, self.head);
        let lse_at = (self.batch * shape.heads() + self.head) * s;
        for r in 0..rows {
            let position = self.first + r;
            // SAFETY: only this tile writes these places: its head's columns at its positions.
            let (out, lse) = unsafe {
                let out = out.at(out_at + position * self.geometry.out_stride());
                (std::slice::from_raw_parts_mut(out, d), &mut *lse.at(lse_at + position))
            };
            *lse = maxima[r] + sums[r].ln();
            let norm = kept / sums[r];
            out.iter_mut().zip(&acc[r * d..]).for_each(|(out, &acc)| *out = acc * norm);
        }
    }
}

/// One row of the online softmax: replaces the `visible` scores by exp(score − max), the others by 0, and brings what was
/// accumulated so far to the new maximum.
#[inline(always)]
fn soften<T: Float>(scores: &mut [T], visible: Range<usize>, acc: &mut [T], (maximum, total): (&mut T, &mut T)) {
    scores[..visible.start].fill(T::ZERO);
    scores[visible.end..].fill(T::ZERO);
    let seen = &mut scores[visible];
    let tile_max = max(seen);
    if tile_max > *maximum {
        let correction = (*maximum - tile_max).fast_exp();
        *total *= correction;
        acc.iter_mut().for_each(|a| *a *= correction);
        *maximum = tile_max;
    }
    let m = *maximum;
    for s in seen.iter_mut() {
        *s = (*s - m).fast_exp();
    }
    *total += sum(seen, |p| p);
}

#[inline(always)]
fn drop_row<T: Float>(mask: &HeadMask, query: usize, first_key: usize, p: &mut [T]) {
    let mut words = [0; TILE_K];
    let words = &mut words[..p.len()];
    mask.fill(query, first_key, words);
    for (p, &word) in p.iter_mut().zip(&*words) {
        *p = if word < mask.threshold { T::ZERO } else { *p };
    }
}
