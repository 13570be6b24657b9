//! Backward: one task per sample and group; a group's sums of dk and dv over queries and heads have
//! one order.

use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::engine::{Corner, Engine, Left};
use super::operands::{flip, if_pairs, paired, turned};
use super::prefetch::Prefetcher;
use super::tile::Tile;
use super::weights::{KEYS, QUERIES, Weights, harden};
use super::{BLOCK, LANES, WithEngine, with_engine};
use crate::cpu::attention::buffers::{Rows, with_two_buffers};
use crate::cpu::attention::{Call, Geometry};
use crate::cpu::gemm::lanes::{Lanes, first, transpose};
use crate::tensor::arguments::attention::HeadShape;
use crate::tensor::element::Elem;
use crate::tensor::parallel::{self, Shared};

/// Tensors of the call, as in [`crate::cpu::attention::attention_backward`].
pub struct Tensors<'a, E: Elem> {
    pub packed: &'a [E],
    pub dout: &'a [E],
    pub out: &'a [E],
    pub lse: &'a [E::Acc],
}

/// Writes all of `dqkv`; false if there is no engine for `E`.
pub fn backward<E: Elem>(tensors: Tensors<E>, call: Call, dqkv: Shared<E>) -> bool {
    let Tensors { packed, dout, out, lse } = tensors;
    with_engine::<E>(Backward {
        call,
        packed: packed.as_ptr().cast(),
        dout: dout.as_ptr().cast(),
        out: out.as_ptr().cast(),
        lse: lse.as_ptr().cast(),
        dqkv: dqkv.0.cast(),
    })
}

struct Backward<'a> {
    call: Call<'a>,
    packed: *const u8,
    dout: *const u8,
    out: *const u8,
    lse: *const f32,
    dqkv: *mut u8,
}

impl WithEngine for Backward<'_> {
    unsafe fn run<K: Engine>(self) {
        let Geometry { s, b, shape } = self.call.geometry;
        let (packed, out) = (s * b * shape.width(), s * b * shape.heads() * shape.head_dim);
        // SAFETY: the caller's promise; the tensors have that many elements.
        let pass = unsafe {
            Pass {
                call: self.call,
                packed: std::slice::from_raw_parts(self.packed.cast::<K::Elem>(), packed),
                dout: std::slice::from_raw_parts(self.dout.cast::<K::Elem>(), out),
                out: std::slice::from_raw_parts(self.out.cast::<K::Elem>(), out),
                lse: std::slice::from_raw_parts(self.lse, b * shape.heads() * s),
            }
        };
        let target = Shared(self.dqkv.cast::<K::Elem>());
        let tasks = b * shape.groups;
        parallel::with_queue(tasks, |spread, thread| {
            // SAFETY: the caller's promise; no two tasks write the same columns.
            unsafe {
                K::enter();
                pass.groups::<K>(|| spread.take(thread), target);
                K::leave();
            }
        });
    }
}

struct Pass<'a, E> {
    call: Call<'a>,
    packed: &'a [E],
    dout: &'a [E],
    out: &'a [E],
    lse: &'a [f32],
}

/// Keys and values of a group, and their accumulated gradients.
struct Group<'a, T> {
    /// `[n, width]`.
    keys: Left<T>,
    /// `[n, width]`.
    values: Left<T>,
    /// `[width, n]`.
    keys_turned: Left<T>,
    /// `[n, width]`, not yet multiplied by the scale of scores.
    dk: &'a mut [f32],
    /// `[n, width]`.
    dv: &'a mut [f32],
    /// Whether `dk` and `dv` are still empty.
    fresh: bool,
}

/// Copies of a head's rows.
struct Copies<'a, T> {
    /// `[n, width]`, like `dout`.
    queries: &'a mut [T],
    dout: &'a mut [T],
    /// Σ dout·out.
    delta: &'a mut [f32],
}

/// One head.
struct Head<'a, T> {
    tile: Tile<'a>,
    /// The first key that each of its queries sees.
    first_keys: &'a [u32],
    /// `[n / 32][width, 32]`, like `dout_turned`.
    queries_turned: &'a [T],
    dout_turned: &'a [T],
    /// `[n, width]`, like `dout`.
    queries: &'a [T],
    dout: &'a [T],
    /// `[n / 32][width, 32]`, not yet multiplied by the scale of scores.
    dq: &'a mut [f32],
    /// The log-sum-exp in base 2, per query.
    lse: &'a [f32],
    /// Σ dout·out.
    delta: &'a [f32],
}

impl<E: Lanes> Pass<'_, E> {
    /// Part `part` of group `task % groups` of sample `task / groups`, as in
    /// [`Geometry::qkv_rows`].
    fn part(&self, task: usize, part: usize) -> Rows<'_, E> {
        let groups = self.call.geometry.shape.groups;
        self.call.geometry.qkv_rows(self.packed, task / groups, task % groups, part)
    }

    /// The rows of a query head of this group: queries, output, gradient of the output.
    fn of_head(&self, task: usize, j: usize) -> [Rows<'_, E>; 3] {
        let HeadShape { groups, heads_per_group, .. } = self.call.geometry.shape;
        let rows = |of| {
            self.call.geometry.out_rows(of, task / groups, task % groups * heads_per_group + j)
        };
        [self.part(task, j), rows(self.out), rows(self.dout)]
    }

    /// Schedules copies of the rows that head `j` of group `task` needs. For the group's first
    /// head, these include the group's keys and values.
    ///
    /// # Safety
    /// As [`Prefetcher::copy`], for all of these buffers.
    unsafe fn expect<K: Engine<Elem = E>>(
        &self,
        (task, j): (usize, usize),
        [keys, values]: [&mut [K::Operand]; 2],
        Copies { queries, dout, delta }: &mut Copies<K::Operand>,
        ahead: &mut Prefetcher<K>,
    ) {
        let (s, of_group, width) =
            (self.call.geometry.s, self.call.geometry.shape.heads_per_group, self.call.width());
        let [rows, out, rows_of_dout] = self.of_head(task, j);
        // SAFETY: the caller's promise.
        unsafe {
            if j == 0 {
                ahead.copy(self.part(task, of_group), s, keys, width);
                ahead.copy(self.part(task, of_group + 1), s, values, width);
            }
            ahead.copy(rows, s, queries, width);
            ahead.multiply([rows_of_dout, out], s, (dout, width), delta);
        }
    }

    /// Writes to `dqkv` the columns of the groups that `draw` gives: group `task % groups` of
    /// sample `task / groups`.
    ///
    /// # Safety
    /// As [`Engine`]'s functions; no other task writes these columns.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn groups<K: Engine<Elem = E>>(
        &self,
        draw: impl Fn() -> Option<usize>,
        target: Shared<E>,
    ) {
        let Some(first) = draw() else { return };
        let Geometry { s, shape, .. } = self.call.geometry;
        let (width, of_group, scale) =
            (self.call.width(), shape.heads_per_group, self.call.scores.scale as f32);
        let n = s.next_multiple_of(BLOCK);
        let (all, copy, tile) = (n * width, if_pairs::<K>(n * width), KEYS * QUERIES);
        let operands =
            [all, all, all, all, all, all, all, all, copy, all, all, copy, copy, tile, tile, tile];
        let numbers = [n, n, n, all, all, all, BLOCK * BLOCK, BLOCK * BLOCK];
        with_two_buffers::<K::Operand, f32, 16, 8, _>(
            operands,
            numbers,
            |[
                mut keys,
                mut values,
                mut next_keys,
                mut next_values,
                queries,
                dout,
                next_queries,
                next_dout,
                keys_flipped,
                q_turned,
                do_turned,
                q_pairs,
                do_pairs,
                p,
                ds,
                ds_right,
            ],
             [delta, next_delta, lse, dk, dv, dq, scores, dp]| {
                let mut weights = Weights { scores, dp, p, ds, ds_right };
                let mut copies = Copies { queries, dout, delta };
                let mut next_copies =
                    Copies { queries: next_queries, dout: next_dout, delta: next_delta };
                let mut ahead = Prefetcher::<K>::new();
                // SAFETY: the caller's promise; the buffers have the required lengths.
                unsafe {
                    self.expect((first, 0), [&mut *keys, &mut *values], &mut copies, &mut ahead);
                    ahead.spread(s);
                    ahead.finish();
                }
                let mut following = Some(first);
                while let Some(task) = following {
                    let (batch, group) = (task / shape.groups, task % shape.groups);
                    let first_keys = self.call.first_keys(batch, n);
                    // SAFETY: the caller's promise; the buffers have the required lengths. Copies
                    // go to buffers that are not used before.
                    unsafe {
                        flip::<K>(paired::<K>(keys, n, width, q_pairs), n, width, keys_flipped);
                        let mut of_keys = Group {
                            keys: Left::plain::<K>(keys, width),
                            values: Left::plain::<K>(values, width),
                            keys_turned: Left::flipped::<K>(keys, keys_flipped, width),
                            dk: &mut *dk,
                            dv: &mut *dv,
                            fresh: true,
                        };
                        for j in 0..of_group {
                            let is_last = j + 1 == of_group;
                            if is_last {
                                following = draw();
                            }
                            ahead.clear();
                            let next = if is_last {
                                following.map(|task| (task, 0))
                            } else {
                                Some((task, j + 1))
                            };
                            if let Some(next) = next {
                                let of_group = [&mut *next_keys, &mut *next_values];
                                self.expect(next, of_group, &mut next_copies, &mut ahead);
                            }
                            let written = std::iter::once(j)
                                .chain((of_group..of_group + 2).filter(|_| is_last));
                            written.for_each(|part| {
                                ahead.write(target.0, self.part(task, part), 0..s)
                            });
                            // A lower bound of the products that follow. Those of dq, and of dk and
                            // dv, are this many where all of a tile is seen, else more.
                            ahead.spread((2 + width / BLOCK) * blocks_seen(&first_keys) * K::ASKS);
                            turned::<K>(copies.queries, n, width, q_turned);
                            turned::<K>(copies.dout, n, width, do_turned);
                            let head = group * of_group + j;
                            let of_queries = &self.lse[(batch * shape.heads() + head) * s..][..s];
                            // Padding without a query: its probabilities are 0, whatever a slope
                            // adds to its scores.
                            lse[s..].fill(f32::INFINITY);
                            lse.iter_mut().zip(of_queries).for_each(|(to, lse)| *to = lse * LOG2_E);
                            let mut of_queries = Head {
                                tile: Tile::new(&self.call, batch, head, &first_keys),
                                first_keys: &first_keys,
                                queries_turned: q_turned,
                                dout_turned: do_turned,
                                queries: paired::<K>(copies.queries, n, width, q_pairs),
                                dout: paired::<K>(copies.dout, n, width, do_pairs),
                                dq: &mut *dq,
                                lse: &*lse,
                                delta: &*copies.delta,
                            };
                            self.head::<K>(&mut of_keys, &mut of_queries, &mut weights, &mut ahead);
                            of_keys.fresh = false;
                            ahead.finish();
                            self.store_turned(self.part(task, j), of_queries.dq, scale, target);
                            std::mem::swap(&mut copies, &mut next_copies);
                        }
                        self.store(self.part(task, of_group), of_keys.dk, scale, target);
                        self.store(self.part(task, of_group + 1), of_keys.dv, 1.0, target);
                    }
                    std::mem::swap(&mut keys, &mut next_keys);
                    std::mem::swap(&mut values, &mut next_values);
                }
            },
        );
    }

    /// Adds a head's part to the gradients.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn head<K: Engine<Elem = E>>(
        &self,
        group: &mut Group<K::Operand>,
        head: &mut Head<K::Operand>,
        weights: &mut Weights<K::Operand>,
        ahead: &mut Prefetcher<K>,
    ) {
        let (first_keys, n) = (head.first_keys, head.first_keys.len());
        for key in (0..n).step_by(KEYS) {
            let keys = key..n.min(key + KEYS);
            for query in (key / QUERIES * QUERIES..n).step_by(QUERIES) {
                // This query and all later ones see none of the tile's keys.
                if first_keys[query] as usize >= keys.end {
                    break;
                }
                let queries = query..n.min(query + QUERIES);
                // SAFETY: the caller's promise; the ranges are of whole blocks within the operands.
                unsafe { self.tile::<K>(group, head, weights, ahead, keys.clone(), queries) };
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn tile<K: Engine<Elem = E>>(
        &self,
        group: &mut Group<K::Operand>,
        head: &mut Head<K::Operand>,
        weights: &mut Weights<K::Operand>,
        ahead: &mut Prefetcher<K>,
        keys: Range<usize>,
        queries: Range<usize>,
    ) {
        let (width, first_keys) = (self.call.width(), head.first_keys);
        // Whether any query of a block of queries sees any key of a block of keys.
        let meet = |key: usize, query: usize| {
            key < query + BLOCK && (first_keys[query] as usize) < key + BLOCK
        };
        let blocks = |of: &Range<usize>| of.clone().step_by(BLOCK);
        // SAFETY: the caller's promise.
        unsafe {
            for query in blocks(&queries) {
                let seen = seen(blocks(&keys), |key| meet(key, query));
                if seen.is_empty() {
                    continue;
                }
                head.tile.turn_to(query);
                for key in blocks(&seen) {
                    let right =
                        |of: &[K::Operand]| (of[query * width..].as_ptr(), BLOCK * K::GROUP);
                    let (scores, dp) = (weights.scores.as_mut_ptr(), weights.dp.as_mut_ptr());
                    let (keys_at, values_at) =
                        (group.keys.from::<K>(key, 0), group.values.from::<K>(key, 0));
                    let corner = (key == query).then_some(Corner::Result);
                    K::block(
                        width,
                        corner,
                        keys_at,
                        right(head.queries_turned),
                        (scores, BLOCK),
                        false,
                        ahead,
                    );
                    K::block(
                        width,
                        corner,
                        values_at,
                        right(head.dout_turned),
                        (dp, BLOCK),
                        false,
                        ahead,
                    );
                    let scale = head.tile.tilt(key, weights.scores);
                    let harden = match (head.tile.is_edge(key, BLOCK), head.tile.drops()) {
                        (false, false) => harden::<K, false, false>,
                        (true, false) => harden::<K, true, false>,
                        (false, true) => harden::<K, false, true>,
                        (true, true) => harden::<K, true, true>,
                    };
                    let per_query = [head.lse, head.delta].map(|of| &of[query..query + BLOCK]);
                    let at = (key - keys.start, query - queries.start);
                    let kept = self.call.mask.map_or(1.0, |m| m.scale as f32);
                    harden(&head.tile, key, scale, kept, per_query, weights, at);
                }
                // Tiles of keys come in order. So the first tile that these queries see holds the
                // first key that the first query sees.
                let first = first_keys[query] as usize >= keys.start;
                let corner = (seen.end > query).then_some(Corner::Right);
                let ds = weights.ds_right
                    [(query - queries.start) * KEYS + (seen.start - keys.start) * BLOCK..]
                    .as_ptr();
                for row in (0..width).step_by(BLOCK) {
                    let to = (head.dq[query * width + row * BLOCK..].as_mut_ptr(), BLOCK);
                    let keys_at = group.keys_turned.from::<K>(row, seen.start);
                    K::block(
                        seen.len(),
                        corner,
                        keys_at,
                        (ds, BLOCK * K::GROUP),
                        to,
                        !first,
                        ahead,
                    );
                }
            }
            // The first tile of queries for these keys is the one in which queries start to see
            // them.
            let first = group.fresh && queries.start <= keys.start;
            for key in blocks(&keys) {
                let seen = seen(blocks(&queries), |query| meet(key, query));
                if seen.is_empty() {
                    continue;
                }
                let corner = (seen.start == key).then_some(Corner::Left);
                let left = |of: &[K::Operand]| {
                    Left::plain::<K>(of, QUERIES)
                        .from::<K>(key - keys.start, seen.start - queries.start)
                };
                for column in (0..width).step_by(BLOCK) {
                    let right = |of: &[K::Operand]| {
                        (of[seen.start * width + column * K::GROUP..].as_ptr(), width * K::GROUP)
                    };
                    let to = key * width + column;
                    let (dv, dk) = (group.dv[to..].as_mut_ptr(), group.dk[to..].as_mut_ptr());
                    K::block(
                        seen.len(),
                        corner,
                        left(weights.p),
                        right(head.dout),
                        (dv, width),
                        !first,
                        ahead,
                    );
                    K::block(
                        seen.len(),
                        corner,
                        left(weights.ds),
                        right(head.queries),
                        (dk, width),
                        !first,
                        ahead,
                    );
                }
            }
        }
    }

    /// Writes scale · `from [n, width]` to the place of `to` in dqkv.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn store(&self, to: Rows<E>, from: &[f32], scale: f32, target: Shared<E>) {
        let (width, scale) = (self.call.width(), _mm512_set1_ps(scale));
        for position in 0..self.call.geometry.s {
            for column in (0..to.width).step_by(LANES) {
                // SAFETY: dqkv has qkv's shape; only this task writes its group's columns.
                unsafe {
                    let line = _mm512_loadu_ps(from.as_ptr().add(position * width + column));
                    let at = target.at(to.at + position * to.stride + column);
                    E::store16(at, first(to.width - column), _mm512_mul_ps(line, scale));
                }
            }
        }
    }

    /// As [`Pass::store`], from `[n / 32][width, 32]`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn store_turned(&self, to: Rows<E>, from: &[f32], scale: f32, target: Shared<E>) {
        let (s, width, scale) = (self.call.geometry.s, self.call.width(), _mm512_set1_ps(scale));
        for position in (0..s).step_by(LANES) {
            for column in (0..to.width).step_by(LANES) {
                let tile = position / BLOCK * BLOCK * width + position % BLOCK;
                // SAFETY: as in `store`.
                unsafe {
                    let at = from.as_ptr().add(tile + column * BLOCK);
                    let lines = std::array::from_fn(|l| {
                        _mm512_castps_si512(_mm512_mul_ps(
                            _mm512_loadu_ps(at.add(l * BLOCK)),
                            scale,
                        ))
                    });
                    let mask = first(to.width - column);
                    for (l, line) in transpose(lines).into_iter().enumerate().take(s - position) {
                        let at = target.at(to.at + (position + l) * to.stride + column);
                        E::store16(at, mask, _mm512_castsi512_ps(line));
                    }
                }
            }
        }
    }
}

/// The range from the first block for which `meet` holds to the end of the last; those blocks are
/// consecutive.
fn seen(blocks: impl Iterator<Item = usize>, meet: impl Fn(usize) -> bool) -> Range<usize> {
    let mut met = blocks.filter(|&block| meet(block));
    let Some(first) = met.next() else { return 0..0 };
    first..met.last().unwrap_or(first) + BLOCK
}

/// Number of pairs of a query block and a key block that it sees, given each query's first key.
fn blocks_seen(first_keys: &[u32]) -> usize {
    let blocks = first_keys.iter().step_by(BLOCK).enumerate();
    blocks.map(|(block, &first)| block + 1 - first as usize / BLOCK).sum()
}
