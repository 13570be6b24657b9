//! Forward: one task per (batch, head), or several tasks per head, each for a part of its queries,
//! if there are few heads.

use std::ops::Range;

use candle_core::Tensor;

use super::buffers::{transpose, with_buffers};
use super::product::product;
use super::{Call, Geometry, HeadMask, HostScores, Mask, TILE_K, TILE_Q, round, tilt};
use crate::Result;
use crate::cpu::gemm::Mat;
use crate::cpu::gemm::unpacked::CausalPart;
use crate::cpu::lanes::{max, sum};
use crate::tensor::element::{Elem, Float};
use crate::tensor::parallel::{self, Shared};
use crate::tensor::simd::vectorize;
use crate::tensor::view::{View, tensor};

pub(super) fn run<E: Elem>(op: &'static str, qkv: &Tensor, call: Call) -> Result<(Tensor, Tensor)> {
    let Geometry { s, b, shape } = call.geometry;
    let heads = shape.heads();
    let packed = View::<E>::new(qkv, op, "qkv")?;
    let packed: &[E] = &packed;
    let (mut out, mut lse) =
        (Vec::with_capacity(s * b * heads * shape.head_dim), Vec::with_capacity(b * heads * s));
    fill(packed, call, Shared(out.as_mut_ptr()), Shared(lse.as_mut_ptr()));
    // SAFETY: there is room for that many elements, and all were written.
    unsafe {
        out.set_len(s * b * heads * shape.head_dim);
        lse.set_len(b * heads * s);
    }
    Ok((tensor(out, (s, b, heads * shape.head_dim), qkv)?, tensor(lse, (b, heads, s), qkv)?))
}

/// Writes all of `out` and `lse`.
fn fill<E: Elem>(packed: &[E], call: Call, out: Shared<E>, lse: Shared<E::Acc>) {
    #[cfg(target_arch = "x86_64")]
    if super::lanes::forward::<E>(packed, call, out, lse) {
        return;
    }
    let Call { geometry, scores, mask } = call;
    let Geometry { s, b, shape } = geometry;
    let heads = shape.heads();
    let tiles = s.div_ceil(TILE_Q);
    // No tile depends on how tiles are distributed. Two tasks per thread balance the load at the
    // end.
    let parts = (2 * parallel::threads()).div_ceil((b * heads).max(1)).clamp(1, tiles.max(1));
    parallel::for_each(b * heads * parts, |task| {
        let (batch_head, part) = (task / parts, task % parts);
        let head =
            Head { geometry, batch: batch_head / heads, head: batch_head % heads, scores, mask };
        // Every parts-th tile, from the last one back, so that each part gets short and long rows.
        head.forward(packed, (0..tiles).rev().skip(part).step_by(parts), out, lse);
    });
}

const _: () = assert!(
    TILE_K.is_multiple_of(TILE_Q),
    "no tile of queries begins before the last tile of keys that it sees"
);

/// One head of one sample.
struct Head<'a> {
    geometry: Geometry,
    batch: usize,
    head: usize,
    scores: HostScores<'a>,
    mask: Option<&'a Mask<'a>>,
}

/// Operands of the products for one tile of queries and the keys and values of its head.
struct Operands<'a, T> {
    /// `[TILE_Q, d]`, multiplied by the scale of scores.
    queries: &'a [T],
    /// `[s / TILE_K][d][TILE_K]`.
    keys_t: &'a [T],
    /// `[s, d]`.
    values: &'a [T],
}

/// The accumulated state of a tile's queries.
struct Gathered<'a, T> {
    /// Σ exp(score − maximum)·v per query, `[TILE_Q, d]`.
    acc: &'a mut [T],
    maxima: [T; TILE_Q],
    /// Σ exp(score − maximum).
    sums: [T; TILE_Q],
}

impl Head<'_> {
    /// Writes the rows of these tiles of queries, latest first, to `out` and `lse`. No other task
    /// writes these rows.
    fn forward<E: Elem>(
        &self,
        packed: &[E],
        tiles: impl Iterator<Item = usize>,
        out: Shared<E>,
        lse: Shared<E::Acc>,
    ) {
        let Geometry { s, shape, .. } = self.geometry;
        let d = shape.head_dim;
        let (group, in_group) =
            (self.head / shape.heads_per_group, self.head % shape.heads_per_group);
        let part = |part| self.geometry.qkv_rows(packed, self.batch, group, part);
        let (q, k, v) =
            (part(in_group), part(shape.heads_per_group), part(shape.heads_per_group + 1));
        let mut tiles = tiles.peekable();
        let Some(&last) = tiles.peek() else { return };
        let end = s.min((last + 1) * TILE_Q);
        let lengths = [
            end * d,
            end * d,
            end.next_multiple_of(TILE_K) * d,
            TILE_Q * d,
            TILE_Q * TILE_K,
            TILE_Q * d,
        ];
        with_buffers::<E::Acc, 6, _>(lengths, |[keys, values, keys_t, queries, p, acc]| {
            vectorize(
                #[inline(always)]
                || {
                    k.copy(0..end, E::Acc::ONE, keys);
                    transpose::<_, TILE_K>(keys, d, keys_t);
                    v.copy(0..end, E::Acc::ONE, values);
                },
            );
            for tile in tiles {
                let rows = tile * TILE_Q..s.min((tile + 1) * TILE_Q);
                vectorize(
                    #[inline(always)]
                    || q.copy(rows.clone(), E::Acc::of(self.scores.scale), queries),
                );
                acc.fill(E::Acc::ZERO);
                let gathered = Gathered {
                    acc,
                    maxima: [E::Acc::NEG_INFINITY; TILE_Q],
                    sums: [E::Acc::ZERO; TILE_Q],
                };
                self.tile::<E>(rows, Operands { queries, keys_t, values }, p, gathered, out, lse);
            }
        });
    }

    /// Computes one tile of queries.
    fn tile<E: Elem>(
        &self,
        rows: Range<usize>,
        operands: Operands<E::Acc>,
        p: &mut [E::Acc],
        mut gathered: Gathered<E::Acc>,
        out: Shared<E>,
        lse: Shared<E::Acc>,
    ) {
        let Geometry { s, shape, .. } = self.geometry;
        let d = shape.head_dim;
        let mask = self.mask.map(|m| m.head(self.batch, self.head));
        // Skip tiles that no query sees: the first query sees furthest back.
        let seen = self.scores.first_key(s, self.batch, rows.start) / TILE_K * TILE_K;
        for first_key in (seen..rows.end).step_by(TILE_K) {
            let (keys_t, values) =
                (&operands.keys_t[first_key * d..], &operands.values[first_key * d..]);
            // Keys after the last query are hidden from all queries.
            let keys = (rows.end - first_key).min(TILE_K);
            let (m, p_at) = (rows.len(), p.as_mut_ptr());
            // Keys before the first query; each later query sees one more.
            let before = rows.start - first_key;
            // SAFETY: queries, p and acc have m rows; keys_t has d rows of TILE_K, with `keys`
            // columns before the sequence's end, and values have `keys` rows.
            unsafe {
                let q = Mat(operands.queries.as_ptr(), d, 1);
                product(
                    (m, keys, d),
                    CausalPart::Columns(before),
                    (p_at, TILE_K),
                    false,
                    q,
                    (keys_t.as_ptr(), TILE_K),
                );
            }
            vectorize(
                #[inline(always)]
                || {
                    for r in 0..m {
                        self.soften::<E>(
                            rows.start + r,
                            r,
                            first_key,
                            keys,
                            p,
                            &mut gathered,
                            mask.as_ref(),
                        );
                    }
                },
            );
            // SAFETY: as above.
            unsafe {
                let (p, acc) = (Mat(p.as_ptr(), TILE_K, 1), (gathered.acc.as_mut_ptr(), d));
                product(
                    (m, d, keys),
                    CausalPart::First(before),
                    acc,
                    true,
                    p,
                    (values.as_ptr(), d),
                );
            }
        }
        let kept = E::Acc::of(self.mask.map_or(1.0, |m| m.scale));
        let out_at = self.geometry.out_at(self.batch, self.head);
        let lse_at = (self.batch * shape.heads() + self.head) * s;
        vectorize(
            #[inline(always)]
            || {
                for (r, position) in rows.enumerate() {
                    // SAFETY: only this task writes these elements: its head's columns at its
                    // positions.
                    let (out, lse) = unsafe {
                        let out = out.at(out_at + position * self.geometry.out_stride());
                        (std::slice::from_raw_parts_mut(out, d), &mut *lse.at(lse_at + position))
                    };
                    *lse = gathered.maxima[r] + gathered.sums[r].ln();
                    let norm = kept / gathered.sums[r];
                    out.iter_mut()
                        .zip(&gathered.acc[r * d..])
                        .for_each(|(out, &acc)| *out = E::store(acc * norm));
                }
            },
        );
    }

    /// One row of the online softmax. Replaces visible scores by exp(score − maximum), dropped and
    /// rounded to `E`, and other scores by 0. Rescales the accumulated state to the new maximum.
    #[inline(always)]
    fn soften<E: Elem>(
        &self,
        query: usize,
        r: usize,
        first_key: usize,
        keys: usize,
        p: &mut [E::Acc],
        gathered: &mut Gathered<E::Acc>,
        mask: Option<&HeadMask>,
    ) {
        let d = self.geometry.shape.head_dim;
        let p = &mut p[r * TILE_K..][..keys];
        let visible = (query + 1).saturating_sub(first_key).min(keys);
        let first = self.scores.first_key(self.geometry.s, self.batch, query);
        let hidden = first.saturating_sub(first_key).min(visible);
        if let Some(slope) = self.scores.slope(self.head) {
            tilt(&mut p[..visible], slope, query, first_key);
        }
        p[..hidden].fill(E::Acc::ZERO);
        p[visible..].fill(E::Acc::ZERO);
        let seen = &mut p[hidden..visible];
        let tile_max = max(seen);
        let maximum = &mut gathered.maxima[r];
        if tile_max > *maximum {
            let correction = (*maximum - tile_max).fast_exp();
            gathered.sums[r] *= correction;
            gathered.acc[r * d..][..d].iter_mut().for_each(|a| *a *= correction);
            *maximum = tile_max;
        }
        let m = *maximum;
        for s in seen.iter_mut() {
            *s = (*s - m).fast_exp();
        }
        gathered.sums[r] += sum(seen, |p| p);
        if let Some(mask) = mask {
            drop_row(mask, query, first_key, &mut p[..visible]);
        }
        round::<E>(&mut p[hidden..visible]);
    }
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
