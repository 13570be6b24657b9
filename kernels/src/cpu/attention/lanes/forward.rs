//! Forward: one task per sample and group, or several tasks per group, each for a part of its
//! queries, if there are few groups.

use std::arch::x86_64::*;
use std::f32::consts::LN_2;
use std::ops::Range;

use super::engine::{Corner, Engine, Left};
use super::math::{exp2, ln};
use super::operands::{flip, if_pairs, paired, plain, turned};
use super::prefetch::Prefetcher;
use super::tile::Tile;
use super::{BLOCK, LANES, WithEngine, with_engine};
use crate::cpu::attention::buffers::{Rows, with_two_buffers};
use crate::cpu::attention::{Call, Geometry};
use crate::cpu::gemm::lanes::{Lanes, first, transpose};
use crate::tensor::element::Elem;
use crate::tensor::parallel::{self, Shared};

/// Keys per tile.
const KEYS: usize = 128;

/// Writes all of `out` and `lse`, as [`crate::cpu::attention::attention`] describes; false if there
/// is no engine for `E`.
pub fn forward<E: Elem>(packed: &[E], call: Call, out: Shared<E>, lse: Shared<E::Acc>) -> bool {
    with_engine::<E>(Forward {
        call,
        packed: packed.as_ptr().cast(),
        out: out.0.cast(),
        lse: lse.0.cast(),
    })
}

struct Forward<'a> {
    call: Call<'a>,
    packed: *const u8,
    out: *mut u8,
    lse: *mut f32,
}

impl WithEngine for Forward<'_> {
    unsafe fn run<K: Engine>(self) {
        let Self { call, packed, out, lse } = self;
        let Geometry { s, b, shape } = call.geometry;
        // SAFETY: the caller's promise; a packed tensor has that many elements.
        let packed =
            unsafe { std::slice::from_raw_parts(packed.cast::<K::Elem>(), s * b * shape.width()) };
        let (out, lse, tiles) = (Shared(out.cast::<K::Elem>()), Shared(lse), s.div_ceil(BLOCK));
        // No tile depends on how tiles are distributed. Two tasks per thread balance the load at
        // the end.
        let parts =
            (2 * parallel::threads()).div_ceil((b * shape.groups).max(1)).clamp(1, tiles.max(1));
        let tasks = if tiles > 0 { b * shape.groups * parts } else { 0 };
        let of_task = |task: usize| {
            let (batch_group, part) = (task / parts, task % parts);
            let group = Group {
                call,
                packed,
                batch: batch_group / shape.groups,
                group: batch_group % shape.groups,
            };
            // Every parts-th tile, up to the last one, so that each part gets short and long rows.
            (group, ((tiles - 1 - part) % parts..tiles - part).step_by(parts))
        };
        parallel::for_each(tasks, |task| {
            let (group, tiles) = of_task(task);
            // This thread's most likely next task.
            let next = (task + 1 < tasks).then(|| of_task(task + 1));
            let next = next.and_then(|(group, mut tiles)| tiles.next().map(|tile| (group, tile)));
            // SAFETY: the caller's promise; no two tasks write the same places.
            unsafe {
                K::enter();
                group.forward::<K>(tiles, next, out, lse);
                K::leave();
            }
        });
    }
}

/// The heads of a group of one sample.
struct Group<'a, E> {
    call: Call<'a>,
    packed: &'a [E],
    batch: usize,
    group: usize,
}

/// Operands of a tile of 32 queries and of all keys that they see.
struct Operands<'a, T> {
    keys: Left<T>,
    /// `[width, keys]`.
    values: Left<T>,
    /// `[width, 32]`.
    queries: &'a [T],
}

/// The accumulated state of a tile of queries, in two vectors of sixteen each.
struct Gathered<'a> {
    /// Σ 2^(score − maximum)·v, transposed: `[width, 32]`.
    acc: &'a mut [f32],
    /// Whether `acc` is still empty.
    fresh: bool,
    maxima: [__m512; 2],
    /// Σ 2^(score − maximum).
    sums: [__m512; 2],
}

impl<E: Lanes> Group<'_, E> {
    /// A part of the group, as in [`Geometry::qkv_rows`].
    fn part(&self, part: usize) -> Rows<'_, E> {
        self.call.geometry.qkv_rows(self.packed, self.batch, self.group, part)
    }

    /// The heads of the group.
    fn heads(&self) -> Range<usize> {
        let of_group = self.call.geometry.shape.heads_per_group;
        self.group * of_group..(self.group + 1) * of_group
    }

    /// The first key that a tile of queries sees, rounded down to a whole block.
    fn seen(&self, tile: usize) -> usize {
        // The first query sees furthest back.
        self.call.scores.first_key(self.call.geometry.s, self.batch, tile * BLOCK) / BLOCK * BLOCK
    }

    /// Schedules prefetches of the rows that a tile of queries needs. Keys and values before
    /// `copied` exist already.
    fn expect<K: Engine<Elem = E>>(
        &self,
        tile: usize,
        copied: usize,
        out: Shared<E>,
        ahead: &mut Prefetcher<K>,
    ) {
        let Geometry { s, shape, .. } = self.call.geometry;
        let (query, keys) = (tile * BLOCK, copied.max(self.seen(tile)));
        let end = s.min(query + BLOCK);
        for (j, head) in self.heads().enumerate() {
            ahead.write(
                out.0,
                self.call.geometry.out_rows(self.packed, self.batch, head),
                query..end,
            );
            ahead.read(self.part(j), query..end);
        }
        for part in [shape.heads_per_group, shape.heads_per_group + 1] {
            ahead.read(self.part(part), keys..end);
        }
    }

    /// Writes the rows of these tiles of queries, in ascending order, to `out` and `lse`; `next` is
    /// the tile after them.
    ///
    /// # Safety
    /// As [`Engine`]'s functions; no other task writes these rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn forward<K: Engine<Elem = E>>(
        &self,
        mut tiles: impl Iterator<Item = usize> + Clone,
        next: Option<(Self, usize)>,
        out: Shared<E>,
        lse: Shared<f32>,
    ) {
        let Geometry { s, shape, .. } = self.call.geometry;
        let (width, of_group) = (self.call.width(), shape.heads_per_group);
        let Some(last) = tiles.clone().last() else { return };
        let end = (last + 1) * BLOCK;
        let (all, tile, pairs) = (end * width, BLOCK * width, if_pairs::<K>(end * width));
        let first_keys = self.call.first_keys(self.batch, end);
        let mut ahead = Prefetcher::<K>::new();
        with_two_buffers::<K::Operand, f32, 7, 2, _>(
            [all, all, pairs, pairs, tile, tile, KEYS * BLOCK],
            [KEYS * BLOCK, tile],
            |[keys, values, pairs, flipped, rows, queries, p], [scores, acc]| {
                // Keys and values before this index are copied, except those that no later query
                // sees.
                let mut copied = 0;
                while let Some(tile) = tiles.next() {
                    let (query, end, seen) = (tile * BLOCK, (tile + 1) * BLOCK, self.seen(tile));
                    ahead.clear();
                    match (tiles.clone().next(), &next) {
                        (Some(tile), _) => self.expect(tile, end, out, &mut ahead),
                        (None, Some((group, tile))) => group.expect(*tile, 0, out, &mut ahead),
                        (None, None) => (),
                    }
                    // Number of products in [`Group::tile`]; each asks.
                    let products =
                        (end - seen) / BLOCK + (end - seen).div_ceil(KEYS) * (width / BLOCK);
                    ahead.spread(of_group * products * K::ASKS);
                    let from = copied.max(seen);
                    let (n, at) = (end - from, from * width);
                    copied = end;
                    // SAFETY: the caller's promise; the buffers have the required lengths.
                    unsafe {
                        plain::<K>(self.part(of_group), s, from, n, &mut keys[at..], width);
                        plain::<K>(self.part(of_group + 1), s, from, n, &mut values[at..], width);
                        let pairs = paired::<K>(&values[at..], n, width, pairs);
                        flip::<K>(pairs, n, width, flipped.get_mut(at..).unwrap_or_default());
                        let (keys, values) = (
                            Left::plain::<K>(keys, width),
                            Left::flipped::<K>(values, flipped, width),
                        );
                        for (j, head) in self.heads().enumerate() {
                            plain::<K>(self.part(j), s, query, BLOCK, rows, width);
                            turned::<K>(rows, BLOCK, width, queries);
                            let mut gathered = Gathered {
                                acc: &mut *acc,
                                fresh: true,
                                maxima: [_mm512_set1_ps(f32::NEG_INFINITY); 2],
                                sums: [_mm512_setzero_ps(); 2],
                            };
                            let operands = Operands { keys, values, queries };
                            let scratch = (&mut *scores, &mut *p);
                            self.tile::<K>(
                                head,
                                query,
                                &first_keys,
                                operands,
                                scratch,
                                &mut gathered,
                                &mut ahead,
                            );
                            self.store(head, query, gathered, out, lse);
                        }
                    }
                }
            },
        );
    }

    /// Accumulates one tile of queries.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn tile<K: Engine<Elem = E>>(
        &self,
        head: usize,
        query: usize,
        first_keys: &[u32],
        operands: Operands<K::Operand>,
        (scores, p): (&mut [f32], &mut [K::Operand]),
        gathered: &mut Gathered,
        ahead: &mut Prefetcher<K>,
    ) {
        let width = self.call.width();
        let mut tile = Tile::new(&self.call, self.batch, head, first_keys);
        tile.turn_to(query);
        for key in (self.seen(query / BLOCK)..query + BLOCK).step_by(KEYS) {
            let keys = KEYS.min(query + BLOCK - key);
            // SAFETY: the caller's promise; a tile has 32 queries and up to KEYS keys, all before
            // the end of the operands.
            unsafe {
                for k in (0..keys).step_by(BLOCK) {
                    let to = (scores.as_mut_ptr().add(k * BLOCK), BLOCK);
                    let queries = (operands.queries.as_ptr(), BLOCK * K::GROUP);
                    let corner = (key + k == query).then_some(Corner::Result);
                    K::block(
                        width,
                        corner,
                        operands.keys.from::<K>(key + k, 0),
                        queries,
                        to,
                        false,
                        ahead,
                    );
                }
                let scores = &mut scores[..keys * BLOCK];
                let scale = tile.tilt(key, scores);
                let soften = match (tile.is_edge(key, keys), tile.drops()) {
                    (false, false) => soften::<K, false, false>,
                    (true, false) => soften::<K, true, false>,
                    (false, true) => soften::<K, false, true>,
                    (true, true) => soften::<K, true, true>,
                };
                soften(&tile, key, scores, scale, p, gathered);
                let corner = (key + keys > query).then_some(Corner::Right);
                for row in (0..width).step_by(BLOCK) {
                    let to = (gathered.acc.as_mut_ptr().add(row * BLOCK), BLOCK);
                    let p = (p.as_ptr(), BLOCK * K::GROUP);
                    K::block(
                        keys,
                        corner,
                        operands.values.from::<K>(row, key),
                        p,
                        to,
                        !gathered.fresh,
                        ahead,
                    );
                }
            }
            gathered.fresh = false;
        }
    }

    /// Writes the outputs and log-sum-exps of a tile of queries.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn store(
        &self,
        head: usize,
        query: usize,
        gathered: Gathered,
        out: Shared<E>,
        lse: Shared<f32>,
    ) {
        let Call { geometry, mask, .. } = self.call;
        let Geometry { s, shape, .. } = geometry;
        let kept = _mm512_set1_ps(mask.map_or(1.0, |m| m.scale as f32));
        let out_at = geometry.out_at(self.batch, head);
        let lse_at = (self.batch * shape.heads() + head) * s;
        for half in 0..2 {
            let query = query + half * LANES;
            let count = s.saturating_sub(query).min(LANES);
            if count == 0 {
                break;
            }
            let norm = _mm512_div_ps(kept, gathered.sums[half]);
            let of_head = _mm512_fmadd_ps(
                gathered.maxima[half],
                _mm512_set1_ps(LN_2),
                ln(gathered.sums[half]),
            );
            // SAFETY: the caller's promise: this head's columns at its positions.
            unsafe {
                _mm512_mask_storeu_ps(lse.at(lse_at + query), first(count), of_head);
                for column in (0..shape.head_dim).step_by(LANES) {
                    let at = gathered.acc.as_ptr().add(column * BLOCK + half * LANES);
                    let lines = std::array::from_fn(|l| {
                        _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(at.add(l * BLOCK)), norm))
                    });
                    let mask = first(shape.head_dim - column);
                    for (l, line) in transpose(lines).into_iter().enumerate().take(count) {
                        let to = out.at(out_at + (query + l) * geometry.out_stride() + column);
                        E::store16(to, mask, _mm512_castsi512_ps(line));
                    }
                }
            }
        }
    }
}

/// A tile's step of the online softmax. Computes `p`: 2^(score − maximum), dropped and rounded,
/// with 0 for keys that a query does not see. Rescales the accumulated state to the new maximum.
///
/// # Safety
/// As [`Engine`]'s functions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn soften<K: Engine, const EDGE: bool, const DROP: bool>(
    tile: &Tile,
    first_key: usize,
    scores: &[f32],
    scale: f32,
    p: &mut [K::Operand],
    gathered: &mut Gathered,
) {
    let (keys, scale) = (scores.len() / BLOCK, _mm512_set1_ps(scale));
    assert!(keys.is_multiple_of(4) && p.len() >= scores.len());
    let lowest = _mm512_set1_ps(f32::NEG_INFINITY);
    // SAFETY: scores and p have a row of 32 for every key.
    unsafe {
        let at = |key: usize, half: usize| scores.as_ptr().add(key * BLOCK + half * LANES);
        let mut tops = [[lowest; 4]; 2];
        for key in (0..keys).step_by(4) {
            for half in 0..2 {
                for i in 0..4 {
                    let mut score = _mm512_mul_ps(_mm512_loadu_ps(at(key + i, half)), scale);
                    if EDGE {
                        score =
                            _mm512_mask_mov_ps(lowest, tile.seen(half, first_key + key + i), score);
                    }
                    // If one operand is NaN, MAXPS returns the second: NaNs are ignored.
                    tops[half][i] = _mm512_max_ps(score, tops[half][i]);
                }
            }
        }
        let mut changed = false;
        let mut corrections = [_mm512_set1_ps(1.0); 2];
        for half in 0..2 {
            let [a, b, c, d] = tops[half];
            let old = gathered.maxima[half];
            let top = _mm512_max_ps(_mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d)), old);
            let higher = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(top, old);
            corrections[half] =
                _mm512_mask_mov_ps(corrections[half], higher, exp2(_mm512_sub_ps(old, top)));
            gathered.sums[half] = _mm512_mul_ps(gathered.sums[half], corrections[half]);
            gathered.maxima[half] = top;
            changed |= higher != 0;
        }
        if changed && !gathered.fresh {
            for row in gathered.acc.chunks_exact_mut(BLOCK) {
                for half in 0..2 {
                    let at = row.as_mut_ptr().add(half * LANES);
                    _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), corrections[half]));
                }
            }
        }
        for key in (0..keys).step_by(4) {
            for half in 0..2 {
                let mut row: [__m512; 4] = std::array::from_fn(|i| {
                    let score = _mm512_loadu_ps(at(key + i, half));
                    let power = exp2(_mm512_fmsub_ps(score, scale, gathered.maxima[half]));
                    if EDGE {
                        _mm512_maskz_mov_ps(tile.seen(half, first_key + key + i), power)
                    } else {
                        power
                    }
                });
                let sum =
                    _mm512_add_ps(_mm512_add_ps(row[0], row[1]), _mm512_add_ps(row[2], row[3]));
                gathered.sums[half] = _mm512_add_ps(gathered.sums[half], sum);
                if DROP {
                    let kept = tile.kept(half, first_key + key);
                    row = std::array::from_fn(|i| _mm512_maskz_mov_ps(kept[i], row[i]));
                }
                let row = row.map(|p| K::round(p));
                let to = p.as_mut_ptr().add(key * BLOCK + half * LANES * K::GROUP);
                K::right([row[0], row[1]], to);
                K::right([row[2], row[3]], to.add(2 * BLOCK));
            }
        }
    }
}
