//! Weights of rows in backward's tiles: probabilities, recomputed from the log-sum-exp, and
//! gradients of scores.

use std::arch::x86_64::*;

use super::engine::Engine;
use super::math::exp2;
use super::tile::Tile;
use super::{BLOCK, LANES};
use crate::cpu::gemm::lanes::{Lanes, first};

/// Keys per tile.
pub const KEYS: usize = 64;
/// Queries per tile.
pub const QUERIES: usize = 128;

/// Buffers of a tile's probabilities and gradients of scores.
pub struct Weights<'a, T> {
    /// `[32 keys, 32 queries]` of a block: scores, and gradients of probabilities.
    pub scores: &'a mut [f32],
    pub dp: &'a mut [f32],
    /// `[KEYS, QUERIES]`, like `ds`: the (dropped) probabilities, and the gradients of scores.
    pub p: &'a mut [T],
    pub ds: &'a mut [T],
    /// `[QUERIES / 32][KEYS, 32]`: `ds` as right operands.
    pub ds_right: &'a mut [T],
}

/// The inner product of two rows of `n` elements.
///
/// # Safety
/// The machine has AVX-512; the elements can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn inner_product<E: Lanes>([a, b]: [*const E; 2], n: usize) -> f32 {
    let mut sum = _mm512_setzero_ps();
    for column in (0..n).step_by(LANES) {
        let mask = first(n - column);
        // SAFETY: masked elements are not read.
        unsafe {
            let (a, b) = (E::load16(a.add(column), mask), E::load16(b.add(column), mask));
            sum = _mm512_fmadd_ps(a, b, sum);
        }
    }
    _mm512_reduce_add_ps(sum)
}

/// Adds `weights` times rows of `n` elements to `sums [n]`, one row after the other.
///
/// # Safety
/// The machine has AVX-512; the elements can be read, and the sums written.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn add_rows<E: Lanes, const N: usize>(
    sums: *mut f32,
    n: usize,
    weights: [f32; N],
    rows: [*const E; N],
) {
    for column in (0..n).step_by(LANES) {
        let mask = first(n - column);
        // SAFETY: masked elements are neither read nor written.
        unsafe {
            let to = sums.add(column);
            let mut sum = _mm512_maskz_loadu_ps(mask, to);
            for i in 0..N {
                let product =
                    _mm512_mul_ps(_mm512_set1_ps(weights[i]), E::load16(rows[i].add(column), mask));
                sum = _mm512_add_ps(sum, product);
            }
            _mm512_mask_storeu_ps(to, mask, sum);
        }
    }
}

/// Turns scores and gradients of probabilities of a block into (dropped) probabilities and
/// gradients of scores, at `at` (key, query) in the tile; 0 for keys that a query does not see.
///
/// # Safety
/// As [`Engine`]'s functions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn harden<K: Engine, const EDGE: bool, const DROP: bool>(
    tile: &Tile,
    first_key: usize,
    scale: f32,
    kept: f32,
    [lse, delta]: [&[f32]; 2],
    weights: &mut Weights<K::Operand>,
    (key_at, query_at): (usize, usize),
) {
    let (scale, factor) = (_mm512_set1_ps(scale), _mm512_set1_ps(kept));
    let Weights { scores, dp, p, ds, ds_right } = weights;
    assert!(
        scores.len() == BLOCK * BLOCK
            && dp.len() == BLOCK * BLOCK
            && lse.len() == BLOCK
            && delta.len() == BLOCK
    );
    assert!([&p, &ds, &ds_right].iter().all(|of| of.len() == KEYS * QUERIES));
    assert!(key_at + BLOCK <= KEYS && query_at + BLOCK <= QUERIES);
    // SAFETY: the assertions check lengths and places.
    unsafe {
        for half in 0..2 {
            let lse = _mm512_loadu_ps(lse.as_ptr().add(half * LANES));
            let delta = _mm512_loadu_ps(delta.as_ptr().add(half * LANES));
            for key in (0..BLOCK).step_by(4) {
                let mut kept = [u16::MAX; 4];
                if DROP {
                    kept = tile.kept(half, first_key + key);
                }
                let mut rows = [[_mm512_setzero_ps(); 4]; 2];
                for i in 0..4 {
                    let at = (key + i) * BLOCK + half * LANES;
                    let score = _mm512_loadu_ps(scores.as_ptr().add(at));
                    let mut dp = _mm512_loadu_ps(dp.as_ptr().add(at));
                    let power = exp2(_mm512_fmsub_ps(score, scale, lse));
                    let mut weight = power;
                    if DROP {
                        weight = _mm512_maskz_mul_ps(kept[i], power, factor);
                        dp = _mm512_maskz_mul_ps(kept[i], dp, factor);
                    }
                    let mut gradient = _mm512_mul_ps(power, _mm512_sub_ps(dp, delta));
                    if EDGE {
                        let seen = tile.seen(half, first_key + key + i);
                        weight = _mm512_maskz_mov_ps(seen, weight);
                        gradient = _mm512_maskz_mov_ps(seen, gradient);
                    }
                    rows[0][i] = K::round(weight);
                    rows[1][i] = gradient;
                }
                for i in [0, 2] {
                    let [weight, ds_rows] = rows.map(|rows| [rows[i], rows[i + 1]]);
                    let key = key_at + key + i;
                    let at = key * QUERIES + query_at + half * LANES;
                    K::left(weight, (p.as_mut_ptr().add(at), QUERIES));
                    K::left(ds_rows, (ds.as_mut_ptr().add(at), QUERIES));
                    let at = query_at * KEYS + key * BLOCK + half * LANES * K::GROUP;
                    K::right(ds_rows, ds_right.as_mut_ptr().add(at));
                }
            }
        }
    }
}
