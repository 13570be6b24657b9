//! The keys that 32 queries see, and the operations on their scores.

use std::arch::x86_64::*;
use std::f64::consts::LOG2_E;

use super::{BLOCK, LANES};
use crate::cpu::attention::{Call, HeadMask};
use crate::tensor::philox::{MULTIPLIERS, ROUNDS, WEYL};

/// 32 queries of a head, in two vectors of sixteen.
pub struct Tile<'a> {
    /// Factor of the scores, for powers of two.
    scale: f32,
    mask: Option<HeadMask>,
    /// Added per position by which a key follows a query.
    slope: Option<f32>,
    first_keys: &'a [u32],
    /// The first query.
    query: usize,
    queries: [__m512i; 2],
    first_of: [__m512i; 2],
}

impl<'a> Tile<'a> {
    /// A tile without queries yet. `first_keys` are those of all queries of the sample, padded to a
    /// whole block.
    #[target_feature(enable = "avx512f")]
    pub fn new(call: &Call, batch: usize, head: usize, first_keys: &'a [u32]) -> Self {
        let slope = call.scores.slope(head).map(|slope| (slope * LOG2_E) as f32);
        let scale = (call.scores.scale * LOG2_E) as f32;
        let nothing = [_mm512_setzero_si512(); 2];
        let mask = call.mask.map(|m| m.head(batch, head));
        Self { scale, mask, slope, first_keys, query: 0, queries: nothing, first_of: nothing }
    }

    /// Moves to the 32 queries from `query` on.
    #[target_feature(enable = "avx512f")]
    pub fn turn_to(&mut self, query: usize) {
        const STEPS: [i32; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        let first_of = &self.first_keys[query..query + BLOCK];
        self.query = query;
        for half in 0..2 {
            let first = _mm512_set1_epi32((query + half * LANES) as i32);
            // SAFETY: sixteen words fill a vector.
            unsafe {
                self.queries[half] = _mm512_add_epi32(first, _mm512_loadu_epi32(STEPS.as_ptr()));
                self.first_of[half] =
                    _mm512_loadu_epi32(first_of.as_ptr().add(half * LANES).cast());
            }
        }
    }

    /// Whether weights are dropped.
    pub fn drops(&self) -> bool {
        self.mask.is_some()
    }

    /// Whether any query does not see all of these keys.
    pub fn is_edge(&self, key: usize, keys: usize) -> bool {
        key + keys > self.query + 1 || self.first_keys[self.query + BLOCK - 1] as usize > key
    }

    /// The queries that see a key.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn seen(&self, half: usize, key: usize) -> __mmask16 {
        let key = _mm512_set1_epi32(key as i32);
        _mm512_mask_cmple_epi32_mask(
            _mm512_cmple_epi32_mask(key, self.queries[half]),
            self.first_of[half],
            key,
        )
    }

    /// Returns the factor by which the scores `[keys, 32]` of the keys from `key` on must still be
    /// multiplied. If there is a slope, this already multiplies them and adds the slope's term.
    #[target_feature(enable = "avx512f")]
    pub fn tilt(&self, key: usize, scores: &mut [f32]) -> f32 {
        let Some(slope) = self.slope else { return self.scale };
        let (scale, slope) = (_mm512_set1_ps(self.scale), _mm512_set1_ps(slope));
        for (i, row) in scores.chunks_exact_mut(BLOCK).enumerate() {
            for half in 0..2 {
                let distance =
                    _mm512_sub_epi32(_mm512_set1_epi32((key + i) as i32), self.queries[half]);
                let term = _mm512_mul_ps(slope, _mm512_cvtepi32_ps(distance));
                // SAFETY: a row has 32 elements.
                unsafe {
                    let at = row.as_mut_ptr().add(half * LANES);
                    _mm512_storeu_ps(at, _mm512_fmadd_ps(scale, _mm512_loadu_ps(at), term));
                }
            }
        }
        1.0
    }

    /// The queries that keep each of the four keys from `key` (a multiple of 4) on, under the mask.
    #[inline(never)]
    // Not inlined: within its caller, closures like these became calls (`map` lacks their
    // instruction set), at four times the cost.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub fn kept(&self, half: usize, key: usize) -> [__mmask16; 4] {
        let Some(mask) = &self.mask else { return [u16::MAX; 4] };
        let [mut k0, mut k1, b, d] = mask.derived;
        // Words are in the low halves of 64-bit lanes, where the multiplication needs them; the
        // high halves are garbage.
        let wide = |word: u32| _mm512_set1_epi64(i64::from(word));
        let [m0, m1] = MULTIPLIERS.map(wide);
        let queries = self.queries[half];
        let queries = [_mm512_castsi512_si256(queries), _mm512_extracti64x4_epi64::<1>(queries)];
        let mut counters = queries.map(|queries| {
            [_mm512_cvtepu32_epi64(queries), wide(b), wide((key / 4) as u32), wide(d)]
        });
        for _ in 0..ROUNDS {
            for [c0, c1, c2, c3] in &mut counters {
                let (p0, p1) = (_mm512_mul_epu32(m0, *c0), _mm512_mul_epu32(m1, *c2));
                // 0x96: the exclusive or of three.
                *c0 = _mm512_ternarylogic_epi64::<0x96>(_mm512_srli_epi64::<32>(p1), *c1, wide(k0));
                *c2 = _mm512_ternarylogic_epi64::<0x96>(_mm512_srli_epi64::<32>(p0), *c3, wide(k1));
                (*c1, *c3) = (p1, p0);
            }
            (k0, k1) = (k0.wrapping_add(WEYL[0]), k1.wrapping_add(WEYL[1]));
        }
        let [first, second] = counters;
        let threshold = _mm512_set1_epi32(mask.threshold.cast_signed());
        // SAFETY: sixteen words fill a vector.
        let low = unsafe { _mm512_loadu_epi32(LOW_HALVES.as_ptr()) };
        std::array::from_fn(|i| {
            _mm512_cmpge_epu32_mask(_mm512_permutex2var_epi32(first[i], low, second[i]), threshold)
        })
    }
}

/// Indices of the low halves of sixteen 64-bit numbers in two vectors.
const LOW_HALVES: [i32; LANES] = [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30];
