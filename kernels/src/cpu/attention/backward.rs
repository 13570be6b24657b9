//! Backward: one task per (batch, group), so that the sums of dk and dv over queries and heads have
//! one order.

use std::ops::Range;

use candle_core::Tensor;

use super::buffers::{Rows, transpose, with_buffers};
use super::product::product;
use super::{Call, Geometry, HeadMask, HostScores, Mask, TILE_Q, round, tilt};
use crate::Result;
use crate::cpu::gemm::Mat;
use crate::cpu::gemm::unpacked::CausalPart;
use crate::cpu::lanes::sum2;
use crate::tensor::element::{Elem, Float};
use crate::tensor::parallel::{self, Shared};
use crate::tensor::simd::vectorize;
use crate::tensor::view::{View, tensor};

/// Keys per tile; a multiple of 4, as masks need it. Fewer than in forward: two tiles of scores and
/// all operands must stay in L2.
const TILE_K: usize = 64;
const _: () = assert!(
    TILE_K.is_multiple_of(TILE_Q),
    "the first tile of queries that sees keys begins no later than they do"
);

pub(super) fn run<E: Elem>(
    op: &'static str,
    dout: &Tensor,
    qkv: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    call: Call,
) -> Result<Tensor> {
    let (packed, dout) = (View::<E>::new(qkv, op, "qkv")?, View::<E>::new(dout, op, "dout")?);
    let (out, lse) = (View::<E>::new(out, op, "out")?, View::<E::Acc>::new(lse, op, "lse")?);
    let mut dqkv = Vec::with_capacity(packed.len());
    let Call { geometry, scores, mask } = call;
    let pass = Pass { geometry, packed: &packed, dout: &dout, out: &out, lse: &lse, scores, mask };
    pass.fill(Shared(dqkv.as_mut_ptr()));
    // SAFETY: there is room for that many elements, and all were written.
    unsafe { dqkv.set_len(packed.len()) };
    tensor(dqkv, qkv.dims(), qkv)
}

struct Pass<'a, E: Elem> {
    geometry: Geometry,
    packed: &'a [E],
    dout: &'a [E],
    out: &'a [E],
    lse: &'a [E::Acc],
    scores: HostScores<'a>,
    mask: Option<&'a Mask<'a>>,
}

/// Keys and values of a group, and their accumulated gradients: `[s, d]`, transposed `[s /
/// TILE_K][d][TILE_K]`.
struct Group<'a, T> {
    keys: &'a [T],
    keys_t: &'a [T],
    values_t: &'a [T],
    dk: &'a mut [T],
    dv: &'a mut [T],
}

/// One head: `[s, d]`, and a number per query.
struct Head<'a, T> {
    batch: usize,
    head: usize,
    /// Multiplied by the scale of scores.
    queries: &'a [T],
    dout: &'a [T],
    dq: &'a mut [T],
    lse: &'a [T],
    /// Σ dout·out.
    delta: &'a [T],
}

impl<E: Elem> Pass<'_, E> {
    /// Writes all of `target`, the gradient of `packed`.
    fn fill(&self, target: Shared<E>) {
        #[cfg(target_arch = "x86_64")]
        {
            let &Self { geometry, packed, dout, out, lse, scores, mask } = self;
            let tensors = super::lanes::Tensors { packed, dout, out, lse };
            if super::lanes::backward::<E>(tensors, Call { geometry, scores, mask }, target) {
                return;
            }
        }
        let groups = self.geometry.shape.groups;
        parallel::for_each(self.geometry.b * groups, |task| {
            self.group(task / groups, task % groups, target)
        });
    }

    /// Writes the columns of one group in `dqkv`, which no other task touches.
    fn group(&self, batch: usize, group: usize, target: Shared<E>) {
        let Geometry { s, shape, .. } = self.geometry;
        let (d, of_group) = (shape.head_dim, shape.heads_per_group);
        let part = |part| self.geometry.qkv_rows(self.packed, batch, group, part);
        let (rows, tiles) = (s * d, s.next_multiple_of(TILE_K) * d);
        let lengths =
            [rows, tiles, tiles, rows, rows, rows, rows, rows, TILE_Q * TILE_K, TILE_Q * TILE_K, s];
        with_buffers::<E::Acc, 11, _>(
            lengths,
            |[keys, keys_t, values_t, dk, dv, queries, dout, dq, p, ds, delta]| {
                vectorize(
                    #[inline(always)]
                    || {
                        // The untransposed values are not needed, so their buffer then takes the
                        // queries.
                        part(of_group + 1).copy(0..s, E::Acc::ONE, queries);
                        transpose::<_, TILE_K>(queries, d, values_t);
                        part(of_group).copy(0..s, E::Acc::ONE, keys);
                        transpose::<_, TILE_K>(keys, d, keys_t);
                    },
                );
                dk.fill(E::Acc::ZERO);
                dv.fill(E::Acc::ZERO);
                let mut of_keys = Group { keys, keys_t, values_t, dk, dv };
                for j in 0..of_group {
                    let head = group * of_group + j;
                    let scale = E::Acc::of(self.scores.scale);
                    vectorize(
                        #[inline(always)]
                        || {
                            part(j).copy(0..s, scale, queries);
                            let rows = |of| self.geometry.out_rows(of, batch, head);
                            let (dout_rows, out_rows) = (rows(self.dout), rows(self.out));
                            dout_rows.copy(0..s, E::Acc::ONE, dout);
                            for (position, delta) in delta.iter_mut().enumerate() {
                                *delta = sum2(
                                    dout_rows.row(position),
                                    out_rows.row(position),
                                    |a, b| a * b,
                                );
                            }
                        },
                    );
                    dq.fill(E::Acc::ZERO);
                    let lse = &self.lse[(batch * shape.heads() + head) * s..][..s];
                    self.head(
                        &mut of_keys,
                        Head { batch, head, queries, dout, dq, lse, delta },
                        p,
                        ds,
                    );
                    self.store(part(j), dq, scale, target);
                }
                self.store(part(of_group), of_keys.dk, E::Acc::ONE, target);
                self.store(part(of_group + 1), of_keys.dv, E::Acc::ONE, target);
            },
        );
    }

    /// Writes scale · `from [s, d]` to the place of `to` in dqkv.
    fn store(&self, to: Rows<E>, from: &[E::Acc], scale: E::Acc, target: Shared<E>) {
        vectorize(
            #[inline(always)]
            || {
                for (position, from) in from.chunks_exact(to.width).enumerate() {
                    // SAFETY: dqkv has qkv's shape; only this task writes its group's columns.
                    let to = unsafe {
                        std::slice::from_raw_parts_mut(
                            target.at(to.at + position * to.stride),
                            to.width,
                        )
                    };
                    to.iter_mut().zip(from).for_each(|(to, &from)| *to = E::store(from * scale));
                }
            },
        );
    }

    fn head(
        &self,
        group: &mut Group<E::Acc>,
        mut head: Head<E::Acc>,
        p: &mut [E::Acc],
        ds: &mut [E::Acc],
    ) {
        let s = self.geometry.s;
        for first_key in (0..s).step_by(TILE_K) {
            let keys = first_key..s.min(first_key + TILE_K);
            for first_query in (first_key / TILE_Q * TILE_Q..s).step_by(TILE_Q) {
                // This query and all later ones see none of the tile's keys.
                if self.scores.first_key(s, head.batch, first_query) >= keys.end {
                    break;
                }
                self.tile(
                    group,
                    &mut head,
                    first_query..s.min(first_query + TILE_Q),
                    keys.clone(),
                    p,
                    ds,
                );
            }
        }
    }

    fn tile(
        &self,
        group: &mut Group<E::Acc>,
        head: &mut Head<E::Acc>,
        queries: Range<usize>,
        keys: Range<usize>,
        p: &mut [E::Acc],
        ds: &mut [E::Acc],
    ) {
        let d = self.geometry.shape.head_dim;
        let mask = self.mask.map(|m| m.head(head.batch, head.head));
        // Keys after the last query are hidden from all queries; `before` keys come before the
        // first query.
        let (m, seen, before) =
            (queries.len(), (queries.end - keys.start).min(keys.len()), queries.start - keys.start);
        let row = queries.start * d;
        let operand = |of: &[E::Acc]| Mat(of[row..].as_ptr(), d, 1);
        let transposed = |of: &[E::Acc]| (of[keys.start * d..].as_ptr(), TILE_K);
        // SAFETY: a tile has m rows of the head's [s, d] and of p and ds; the tile has `seen` ≤
        // TILE_K keys.
        unsafe {
            for (to, rows, turned) in
                [(&mut *p, head.queries, group.keys_t), (&mut *ds, head.dout, group.values_t)]
            {
                let to = (to.as_mut_ptr(), TILE_K);
                product(
                    (m, seen, d),
                    CausalPart::Columns(before),
                    to,
                    false,
                    operand(rows),
                    transposed(turned),
                );
            }
        }
        vectorize(
            #[inline(always)]
            || {
                for r in 0..m {
                    let at = r * TILE_K..r * TILE_K + keys.len();
                    self.row(
                        head,
                        queries.start + r,
                        keys.start,
                        (&mut p[at.clone()], &mut ds[at]),
                        mask.as_ref(),
                    );
                }
            },
        );
        let across = |of: &[E::Acc]| Mat(of.as_ptr(), 1, TILE_K);
        let (to, by_keys) = (keys.start * d, (keys.len(), d, m));
        // SAFETY: as above; the group has keys.len() rows of its [s, d].
        unsafe {
            let (weights, to_queries) = (Mat(ds.as_ptr(), TILE_K, 1), head.dq[row..].as_mut_ptr());
            let keys = (group.keys[to..].as_ptr(), d);
            product((m, d, seen), CausalPart::First(before), (to_queries, d), true, weights, keys);
            let (dk, dv) = (group.dk[to..].as_mut_ptr(), group.dv[to..].as_mut_ptr());
            let (dout, queries) =
                ((head.dout[row..].as_ptr(), d), (head.queries[row..].as_ptr(), d));
            product(by_keys, CausalPart::From(before), (dv, d), true, across(p), dout);
            product(by_keys, CausalPart::From(before), (dk, d), true, across(ds), queries);
        }
    }

    /// Turns one query's scores and gradients of probabilities into (dropped) probabilities and
    /// gradients of scores; 0 for keys that the query does not see.
    #[inline(always)]
    fn row(
        &self,
        head: &Head<E::Acc>,
        query: usize,
        first_key: usize,
        (p, ds): (&mut [E::Acc], &mut [E::Acc]),
        mask: Option<&HeadMask>,
    ) {
        let visible = (query + 1).saturating_sub(first_key).min(p.len());
        let hidden = self
            .scores
            .first_key(self.geometry.s, head.batch, query)
            .saturating_sub(first_key)
            .min(visible);
        p[visible..].fill(E::Acc::ZERO);
        ds[visible..].fill(E::Acc::ZERO);
        if let Some(slope) = self.scores.slope(head.head) {
            tilt(&mut p[..visible], slope, query, first_key);
        }
        // The words of a mask begin at the tile's first key.
        let (p, ds) = (&mut p[..visible], &mut ds[..visible]);
        let (lse, delta) = (head.lse[query], head.delta[query]);
        match mask {
            Some(mask) => {
                let kept = E::Acc::of(self.mask.map_or(1.0, |m| m.scale));
                dropped_row(p, ds, lse, delta, mask, kept, query, first_key);
            }
            None => plain_row(p, ds, lse, delta),
        }
        p[..hidden].fill(E::Acc::ZERO);
        ds[..hidden].fill(E::Acc::ZERO);
        round::<E>(p);
    }
}

/// Turns scores and gradients of probabilities into probabilities and gradients of scores.
#[inline(always)]
fn plain_row<T: Float>(p: &mut [T], ds: &mut [T], lse: T, delta: T) {
    for (p, ds) in p.iter_mut().zip(ds) {
        *p = (*p - lse).fast_exp();
        *ds = *p * (*ds - delta);
    }
}

/// As [`plain_row`], with forward's mask and 1/(1−p) applied to the probabilities and to their
/// gradients.
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
