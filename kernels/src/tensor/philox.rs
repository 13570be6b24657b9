//! Counter-based random numbers. Every number is a function of (seed, place), so none depends on
//! the parallel layout.
//!
//! Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3": Philox4x32-10.

use std::ops::Range;

use crate::tensor::parallel;
use crate::tensor::simd::{LANES, vectorize};

pub(crate) const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
pub(crate) const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
pub(crate) const ROUNDS: usize = 10;

/// Philox4x32-10: four random words, a bijection of `counter` for every `key`.
#[inline(always)]
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..ROUNDS {
        let p0 = u64::from(MULTIPLIERS[0]) * u64::from(c0);
        let p1 = u64::from(MULTIPLIERS[1]) * u64::from(c2);
        (c0, c1, c2, c3) =
            ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    [c0, c1, c2, c3]
}

/// The low and high word of a 64-bit number.
pub(crate) fn words(v: u64) -> [u32; 2] {
    [v as u32, (v >> 32) as u32]
}

/// An endless sequence of random words: word i is word i % 4 of Philox at counter `[a, b, i / 4,
/// d]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WordRow {
    pub a: u32,
    pub b: u32,
    pub d: u32,
    pub key: [u32; 2],
}

impl WordRow {
    /// Fills `out` with the words from index `4 · first_block` on.
    #[inline(always)]
    pub fn fill(self, first_block: u32, out: &mut [u32]) {
        let mut block = first_block;
        let mut chunks = out.chunks_exact_mut(4 * LANES);
        for chunk in &mut chunks {
            self.lanes(block, chunk);
            block = block.wrapping_add(LANES as u32);
        }
        let rest = chunks.into_remainder();
        if !rest.is_empty() {
            let mut chunk = [0; 4 * LANES];
            self.lanes(block, &mut chunk);
            rest.copy_from_slice(&chunk[..rest.len()]);
        }
    }

    /// The words of [`LANES`] consecutive blocks.
    #[inline(always)]
    fn lanes(self, first_block: u32, out: &mut [u32]) {
        let wide = |word: u32| [u64::from(word); LANES];
        let mut blocks = wide(0);
        for l in 0..LANES {
            blocks[l] = u64::from(first_block.wrapping_add(l as u32));
        }
        let [c0, c1, c2, c3] =
            philox_lanes([wide(self.a), wide(self.b), blocks, wide(self.d)], self.key);
        for (l, out) in out.chunks_exact_mut(4).enumerate() {
            out.copy_from_slice(&[c0[l] as u32, c1[l] as u32, c2[l] as u32, c3[l] as u32]);
        }
    }
}

/// [`LANES`] instances of [`philox4x32`], side by side. Words are in the low halves of 64-bit
/// lanes, where the multiplication needs them; the high halves are garbage.
#[inline(always)]
fn philox_lanes(counter: [[u64; LANES]; 4], key: [u32; 2]) -> [[u64; LANES]; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..ROUNDS {
        for l in 0..LANES {
            let p0 = u64::from(MULTIPLIERS[0]) * (c0[l] & 0xFFFF_FFFF);
            let p1 = u64::from(MULTIPLIERS[1]) * (c2[l] & 0xFFFF_FFFF);
            c0[l] = (p1 >> 32) ^ c1[l] ^ u64::from(k0);
            c1[l] = p1;
            c2[l] = (p0 >> 32) ^ c3[l] ^ u64::from(k1);
            c3[l] = p0;
        }
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    [c0, c1, c2, c3]
}

/// The stream id of a parameter: FNV-1a (64 bits) of its name.
pub fn stream_id(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

/// Fills `out` with draws from N(0, std²). The value of an element depends only on `seed`, `stream`
/// and its global index. `stream` is the [`stream_id`] of the parameter's name, `first` the global
/// index of `out[0]`.
///
/// Element 4c + j is the j-th of the four normals that Box–Muller makes, in f64, from Philox at
/// counter (c, stream). Only IEEE additions, multiplications, divisions and square roots are used,
/// so every machine draws the same numbers.
pub fn fill_normal(out: &mut [f32], seed: u64, stream: u64, first: u64, std: f64) {
    let key = words(seed);
    parallel::blocks(out, parallel::GRAIN, |start, out| {
        vectorize(
            #[inline(always)]
            || {
                let mut buffer = [0.0; 4 * LANES];
                let mut index = first + start as u64;
                let mut rest = out;
                while !rest.is_empty() {
                    normals(index / 4, stream, key, &mut buffer);
                    let skip = (index % 4) as usize;
                    let (now, later) = rest.split_at_mut(rest.len().min(buffer.len() - skip));
                    for (out, normal) in now.iter_mut().zip(&buffer[skip..]) {
                        *out = (normal * std) as f32;
                    }
                    index += now.len() as u64;
                    rest = later;
                }
            },
        );
    });
}

/// Fills `out` with draws from the uniform distribution over `range`, by place as in
/// [`fill_normal`]: element 4c + j is made from word j of Philox at counter (c, stream).
pub fn fill_uniform(out: &mut [f32], seed: u64, stream: u64, first: u64, range: Range<f64>) {
    let (key, [s0, s1]) = (words(seed), words(stream));
    let width = range.end - range.start;
    for (i, out) in out.iter_mut().enumerate() {
        let index = first + i as u64;
        let [low, high] = words(index / 4);
        let word = philox4x32([low, high, s0, s1], key)[(index % 4) as usize];
        *out = (range.start + width * (f64::from(word) + 0.5) / 4_294_967_296.0) as f32;
    }
}

/// The standard normals of [`LANES`] blocks, starting at `first_block` (Box & Muller 1958).
#[inline(always)]
fn normals(first_block: u64, stream: u64, key: [u32; 2], out: &mut [f64; 4 * LANES]) {
    let wide = |word: u32| [u64::from(word); LANES];
    let ([s0, s1], mut low, mut high) = (words(stream), wide(0), wide(0));
    for l in 0..LANES {
        let block = first_block + l as u64;
        low[l] = block & 0xFFFF_FFFF;
        high[l] = block >> 32;
    }
    let random = philox_lanes([low, high, wide(s0), wide(s1)], key);
    for pair in 0..2 {
        let (mut cosines, mut sines) = ([0.0; LANES], [0.0; LANES]);
        for l in 0..LANES {
            let uniform = |word: u64| (f64::from(word as u32) + 0.5) / 4_294_967_296.0; // in (0, 1)
            let radius = (-2.0 * ln(uniform(random[2 * pair][l]))).sqrt();
            let (sin, cos) = sin_cos_of_turn(uniform(random[2 * pair + 1][l]));
            (cosines[l], sines[l]) = (radius * cos, radius * sin);
        }
        for l in 0..LANES {
            out[4 * l + 2 * pair] = cosines[l];
            out[4 * l + 2 * pair + 1] = sines[l];
        }
    }
}

/// ln x of a positive x that is not subnormal, to about 1e-16 relative: 2·artanh((m − 1)/(m + 1)) +
/// e·ln 2 for x = m·2ᵉ.
#[inline(always)]
fn ln(x: f64) -> f64 {
    const SQRT_HALF_BITS: u64 = 0x3FE6_A09E_667F_3BCD;
    const MANTISSA: u64 = (1 << 52) - 1;
    let shifted = x.to_bits().wrapping_sub(SQRT_HALF_BITS & !MANTISSA) as i64;
    // The mantissa lies in [√½, √2): borrow one from the exponent where the mantissa would be
    // below.
    let low = (x.to_bits() & MANTISSA) < (SQRT_HALF_BITS & MANTISSA);
    let exponent = (shifted >> 52) as i32 - i32::from(low);
    let m = f64::from_bits(
        (x.to_bits() & MANTISSA) | if low { 0x3FF0_0000_0000_0000 } else { 0x3FE0_0000_0000_0000 },
    );
    let s = (m - 1.0) / (m + 1.0);
    let s2 = s * s;
    let mut sum = 1.0 / 23.0;
    for k in (0..11).rev() {
        sum = sum * s2 + 1.0 / (2 * k + 1) as f64;
    }
    2.0 * s * sum + f64::from(exponent) * std::f64::consts::LN_2
}

/// sin and cos of 2π·v for v in [0, 1], by their series around the nearest quarter turn.
#[inline(always)]
fn sin_cos_of_turn(v: f64) -> (f64, f64) {
    // 1.5·2⁵²: adding it leaves the nearest integer in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let t = v * 4.0 + ROUND;
    let quarter = t.to_bits() & 3;
    let x = (v - (t - ROUND) * 0.25) * std::f64::consts::TAU; // the subtraction is exact; |x| ≤ π/4
    let x2 = x * x;
    let (mut sin, mut cos) = (1.0, 1.0);
    for k in (1..9).rev() {
        let k = f64::from(2 * k);
        sin = 1.0 - sin * (x2 * (1.0 / (k * (k + 1.0))));
        cos = 1.0 - cos * (x2 * (1.0 / (k * (k - 1.0))));
    }
    sin *= x;
    let (a, b) = if quarter & 1 == 0 { (sin, cos) } else { (cos, -sin) };
    if quarter & 2 == 0 { (a, b) } else { (-a, -b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_agrees_with_the_published_vectors() {
        // From Random123's `kat_vectors`.
        assert_eq!(
            philox4x32([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox4x32([!0; 4], [!0; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let (counter, key) =
            ([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]);
        assert_eq!(philox4x32(counter, key), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn a_row_of_words_is_philox_block_by_block() {
        let row = WordRow { a: 7, b: 8, d: 9, key: [1, 2] };
        let mut out = vec![0; 4 * LANES + 7];
        row.fill(5, &mut out);
        for (i, &word) in out.iter().enumerate() {
            assert_eq!(word, philox4x32([7, 8, 5 + i as u32 / 4, 9], [1, 2])[i % 4], "word {i}");
        }
    }

    #[test]
    fn logarithm_and_circle_agree_with_the_library() {
        for i in (0..1 << 32).step_by(9973).chain([(1u64 << 32) - 1]) {
            let u = (i as f64 + 0.5) / 4_294_967_296.0;
            assert!(
                (ln(u) - u.ln()).abs() <= 1e-15 * u.ln().abs().max(0.1),
                "ln {u}: {} {}",
                ln(u),
                u.ln()
            );
            let ((sin, cos), (s, c)) = (sin_cos_of_turn(u), (std::f64::consts::TAU * u).sin_cos());
            assert!((sin - s).abs() < 1e-14 && (cos - c).abs() < 1e-14, "turn {u}: {sin} {cos}");
        }
    }

    #[test]
    fn normals_are_box_muller_of_philox() {
        let (seed, stream, first) = (3u64 << 32 | 5, 0x1234_5678_9abc_def0, (1u64 << 34) + 2);
        let mut out = [0.0; 200];
        fill_normal(&mut out, seed, stream, first, 0.5);
        for (i, &got) in out.iter().enumerate() {
            let index = first + i as u64;
            let ([c0, c1], [s0, s1]) = (words(index / 4), words(stream));
            let w = philox4x32([c0, c1, s0, s1], words(seed))
                .map(|w| (f64::from(w) + 0.5) / 4_294_967_296.0);
            let (u, v) = if index % 4 < 2 { (w[0], w[1]) } else { (w[2], w[3]) };
            let (sin, cos) = (std::f64::consts::TAU * v).sin_cos();
            let want =
                0.5 * (-2.0 * u.ln()).sqrt() * if index.is_multiple_of(2) { cos } else { sin };
            assert!(
                (f64::from(got) - want).abs() <= 1e-7 * want.abs() + 1e-14,
                "element {i}: {got}, want {want}"
            );
        }
    }

    #[test]
    fn normals_do_not_depend_on_where_the_range_is_cut() {
        let mut whole = vec![0.0; 100_000];
        fill_normal(&mut whole, 42, 7, 0, 0.02);
        for (first, len) in [(0, 3), (1, 9), (50_001, 33_333), (99_999, 1)] {
            let mut part = vec![0.0; len];
            fill_normal(&mut part, 42, 7, first as u64, 0.02);
            assert_eq!(part, whole[first..first + len]);
        }
    }

    #[test]
    fn normals_have_the_moments_of_a_normal_distribution() {
        let mut x = vec![0.0; 1 << 20];
        fill_normal(&mut x, 1, stream_id("weight"), 0, 2.0);
        let moment = |k: i32| x.iter().map(|&v| f64::from(v).powi(k)).sum::<f64>() / x.len() as f64;
        // Standard errors: 2/√n, 4·√2/√n, 16·√96/√n with √n = 1024.
        assert!(
            moment(1).abs() < 0.01
                && (moment(2) - 4.0).abs() < 0.03
                && (moment(4) - 48.0).abs() < 0.8
        );
        let lag = x.windows(2).map(|w| f64::from(w[0] * w[1])).sum::<f64>() / x.len() as f64;
        assert!(lag.abs() < 0.02, "neighbours correlate: {lag}");
    }

    #[test]
    fn seeds_and_names_give_different_numbers() {
        let draw = |seed, name| {
            let mut out = [0.0; 4];
            fill_normal(&mut out, seed, stream_id(name), 0, 1.0);
            out
        };
        assert_ne!(draw(1, "a"), draw(2, "a"));
        assert_ne!(draw(1, "a"), draw(1, "b"));
        assert_ne!(draw(1, "a"), draw(1 << 32, "a"));
    }

    #[test]
    fn stream_ids_are_fnv_1a() {
        assert_eq!(stream_id(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(stream_id("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(stream_id("foobar"), 0x8594_4171_f739_67e8);
    }
}
