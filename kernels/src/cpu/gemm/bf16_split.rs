//! Splits numbers into sums of bf16, and packs strips and panels of such parts for
//! [`super::amx_split`].
//!
//! An f32 has 24 significant bits, as many as three bf16 of 8 bits together: `x = high + middle +
//! low` exactly. The first two parts are the bf16 nearest to the remainder. (The remainder has
//! either sign, so each part contributes one bit more than it stores.) An f16 has 11 bits, and two
//! parts.

use std::arch::x86_64::*;
use std::ops::Range;

use half::{bf16, f16};

use super::Mat;
use super::amx_tiles::{STEP, WIDTH};
use super::lanes::{Lanes, first, transpose};
use crate::tensor::element::Float;
use crate::tensor::simd::prefetch;

/// Elements of one part of a piece.
pub const PART: usize = WIDTH * STEP;
/// Units in which a piece can be packed.
pub const UNITS: usize = 8;
/// Units packed together where sixteen rows are transposed.
const TURNED: usize = UNITS / 2;

/// Storage types that can be split into sums of bf16.
pub trait SplitBf16: Lanes {
    /// Two or three.
    const PARTS: usize;
    /// A type of the size of all parts of a number. A piece holds first all high parts, then the
    /// next parts.
    type Packed: Copy;
}

impl SplitBf16 for f32 {
    const PARTS: usize = 3;
    type Packed = [bf16; 3];
}

impl SplitBf16 for f16 {
    const PARTS: usize = 2;
    type Packed = [bf16; 2];
}

/// Subtracts the nearest bf16, ties away from 0, from each of sixteen numbers, and returns it as an
/// f32. (Integer instructions suffice; conversions would occupy the shuffle port. A NaN remains in
/// `numbers`.)
#[inline]
#[target_feature(enable = "avx512f")]
fn take(numbers: &mut __m512) -> __m512i {
    let half = _mm512_add_epi32(_mm512_castps_si512(*numbers), _mm512_set1_epi32(1 << 15));
    let part = _mm512_and_si512(half, _mm512_set1_epi32(!0xffff));
    *numbers = _mm512_sub_ps(*numbers, _mm512_castsi512_ps(part));
    part
}

/// The parts of twice sixteen numbers, as f32. The remainder for the last part has at most 8 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn parts_of<E: SplitBf16>(mut first: __m512, mut second: __m512) -> [[__m512i; 2]; 3] {
    let mut parts = [[_mm512_setzero_si512(); 2]; 3];
    for part in parts.iter_mut().take(E::PARTS - 1) {
        *part = [take(&mut first), take(&mut second)];
    }
    parts[E::PARTS - 1] = [_mm512_castps_si512(first), _mm512_castps_si512(second)];
    parts
}

/// Indices of the high halves of 32 words in two vectors.
const HIGH_HALVES: [i16; 32] = {
    let mut at = [0; 32];
    let mut i = 0;
    while i < 32 {
        at[i] = 2 * i as i16 + 1;
        i += 1;
    }
    at
};

/// Stores the parts of 32 numbers, each at its place in a piece.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn store<E: SplitBf16>(numbers: [__m512; 2], to: *mut bf16) {
    let parts = parts_of::<E>(numbers[0], numbers[1]);
    // SAFETY: the caller's promise; the table has as many words as a vector.
    unsafe {
        let high_halves = _mm512_loadu_epi16(HIGH_HALVES.as_ptr());
        for (p, &[first, second]) in parts.iter().enumerate().take(E::PARTS) {
            _mm512_store_si512(
                to.add(p * PART).cast(),
                _mm512_permutex2var_epi16(first, high_halves, second),
            );
        }
    }
}

/// As [`store`], for sixteen pairs of numbers, with the even ones in the low halves of words.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_pairs<E: SplitBf16>(even: __m512, odd: __m512, to: *mut bf16) {
    const FIRST_OR_SECOND_AND_THIRD: i32 = 0xf8;
    let high_half = _mm512_set1_epi32(!0xffff);
    let parts = parts_of::<E>(even, odd);
    for (p, &[even, odd]) in parts.iter().enumerate().take(E::PARTS) {
        // The last part of a number below 2⁻¹⁰² is subnormal and has bits in its low half, too.
        // They are below 2⁻¹³³ and are dropped.
        let even = _mm512_srli_epi32::<16>(even);
        let pairs = _mm512_ternarylogic_epi32::<FIRST_OR_SECOND_AND_THIRD>(even, odd, high_half);
        // SAFETY: the caller's promise.
        unsafe { _mm512_store_si512(to.add(p * PART).cast(), pairs) };
    }
}

/// Packs `rows` ≤ 32 rows of `k` ≤ 32 columns of `a` as `[part][32][32]`, padded with zeros. Packs
/// only the given `units` out of [`UNITS`]. Prefetches the piece that begins at `next`, which has
/// the same strides.
///
/// # Safety
/// The machine has AVX-512; `a` can be read, `to` has room for a piece and begins a cache line.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn pack_rows<E: SplitBf16>(
    a: Mat<*const E>,
    rows: usize,
    k: usize,
    to: *mut bf16,
    units: Range<usize>,
    next: *const E,
) {
    const EACH: usize = WIDTH / UNITS;
    let ahead = distance(a.0, next);
    // SAFETY: the caller's promise.
    unsafe {
        match a {
            Mat(_, row, 1) => {
                for r in units.start * EACH..units.end * EACH {
                    let halves = if r < rows {
                        [
                            part_of_row(a.0, r * row, 0, k, ahead),
                            part_of_row(a.0, r * row, 16, k, ahead),
                        ]
                    } else {
                        [_mm512_setzero_ps(); 2]
                    };
                    store::<E>(halves, to.add(r * STEP));
                }
            }
            Mat(_, 1, _) => {
                for unit in units.filter(|unit| unit % TURNED == 0) {
                    let r = unit * EACH;
                    let [first, second] =
                        columns(a.at(r, 0), k, first(rows.saturating_sub(r)), ahead);
                    let (first, second) = (transpose(first), transpose(second));
                    for l in 0..16 {
                        let halves =
                            [_mm512_castsi512_ps(first[l]), _mm512_castsi512_ps(second[l])];
                        store::<E>(halves, to.add((r + l) * STEP));
                    }
                }
            }
            _ => {
                let copy = gathered(a, rows, k);
                pack_rows(
                    Mat(copy.as_ptr().cast::<E>(), STEP, 1),
                    rows,
                    k,
                    to,
                    units,
                    copy.as_ptr().cast(),
                );
            }
        }
    }
}

/// As [`pack_rows`], packs `width` ≤ 32 rows of `k` ≤ 32 columns of `m` as `[part][16][32][2]`:
/// pairs along the inner dimension, padded with zeros.
///
/// # Safety
/// As [`pack_rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn pack_pairs<E: SplitBf16>(
    m: Mat<*const E>,
    width: usize,
    k: usize,
    to: *mut bf16,
    units: Range<usize>,
    next: *const E,
) {
    const EACH: usize = WIDTH / UNITS;
    const PAIRS: usize = STEP / 2 / UNITS;
    let ahead = distance(m.0, next);
    let place = |pair: usize, c: usize| to.wrapping_add((pair * WIDTH + c) * 2);
    // SAFETY: the caller's promise.
    unsafe {
        match m {
            Mat(_, row, 1) => {
                for unit in units.filter(|unit| unit % TURNED == 0) {
                    let c = unit * EACH;
                    for i in [0, 16] {
                        let mut lines = [_mm512_setzero_si512(); 16];
                        for l in 0..16.min(width.saturating_sub(c)) {
                            lines[l] =
                                _mm512_castps_si512(part_of_row(m.0, (c + l) * row, i, k, ahead));
                        }
                        let lines = transpose(lines);
                        for l in 0..8 {
                            let (even, odd) = (lines[2 * l], lines[2 * l + 1]);
                            let to = place(i / 2 + l, c);
                            store_pairs::<E>(
                                _mm512_castsi512_ps(even),
                                _mm512_castsi512_ps(odd),
                                to,
                            );
                        }
                    }
                }
            }
            Mat(_, 1, _) => {
                for pair in units.start * PAIRS..units.end * PAIRS {
                    for c in [0, 16] {
                        let (m, mask) = (m.at(c, 0), first(width.saturating_sub(c)));
                        let even = part_of_column(m, 2 * pair, k, mask, ahead);
                        store_pairs::<E>(
                            even,
                            part_of_column(m, 2 * pair + 1, k, mask, ahead),
                            place(pair, c),
                        );
                    }
                }
            }
            _ => {
                let copy = gathered(m, width, k);
                pack_pairs(
                    Mat(copy.as_ptr().cast::<E>(), STEP, 1),
                    width,
                    k,
                    to,
                    units,
                    copy.as_ptr().cast(),
                );
            }
        }
    }
}

/// Bytes from one element to another, in wrapping arithmetic.
fn distance<E>(from: *const E, to: *const E) -> usize {
    to.addr().wrapping_sub(from.addr())
}

/// Sixteen elements of a row of `k` that begins at `row`, from `i` on, padded with zeros.
/// Prefetches the elements `ahead` bytes later.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn part_of_row<E: Lanes>(
    from: *const E,
    row: usize,
    i: usize,
    k: usize,
    ahead: usize,
) -> __m512 {
    let at = from.wrapping_add(row + i);
    // SAFETY: the caller's promise; masked elements are not read.
    unsafe {
        prefetch(at.wrapping_byte_add(ahead));
        E::load16(at, first(k.saturating_sub(i)))
    }
}

/// Column `i` (of `k`) of sixteen rows that lie side by side, where `mask` selects; else zeros.
/// Prefetches the memory `ahead` bytes later.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn part_of_column<E: Lanes>(
    Mat(from, _, column): Mat<*const E>,
    i: usize,
    k: usize,
    mask: u16,
    ahead: usize,
) -> __m512 {
    let at = from.wrapping_add(i * column);
    // SAFETY: as in `part_of_row`.
    unsafe {
        prefetch(at.wrapping_byte_add(ahead));
        E::load16(at, if i < k { mask } else { 0 })
    }
}

/// The columns of a piece of sixteen rows that lie side by side.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn columns<E: Lanes>(
    m: Mat<*const E>,
    k: usize,
    mask: u16,
    ahead: usize,
) -> [[__m512i; 16]; 2] {
    let mut all = [[_mm512_setzero_si512(); 16]; 2];
    for i in 0..STEP {
        // SAFETY: the caller's promise.
        all[i / 16][i % 16] = _mm512_castps_si512(unsafe { part_of_column(m, i, k, mask, ahead) });
    }
    all
}

/// Gathers elements that are strided in both directions.
unsafe fn gathered<E: Lanes>(
    Mat(from, row, column): Mat<*const E>,
    rows: usize,
    k: usize,
) -> [[E; STEP]; WIDTH] {
    let mut all = [[E::store(f32::of(0.0)); STEP]; WIDTH];
    for (r, line) in all.iter_mut().enumerate().take(rows) {
        for (i, e) in line.iter_mut().enumerate().take(k) {
            // SAFETY: the caller's promise.
            *e = unsafe { *from.add(r * row + i * column) };
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::simd::Isa;

    /// The parts of a number, as stored in a piece of a strip.
    fn parts<E: SplitBf16>(x: E) -> Vec<f32> {
        #[repr(align(64))]
        struct Piece([bf16; 3 * PART]);
        let mut piece = Piece([bf16::ZERO; 3 * PART]);
        // SAFETY: one element, and room for a piece.
        unsafe {
            pack_rows(Mat(&raw const x, 1, 1), 1, 1, piece.0.as_mut_ptr(), 0..UNITS, &raw const x)
        };
        (0..E::PARTS).map(|p| piece.0[p * PART].to_f32()).collect()
    }

    /// Numbers with varied bits, from 2⁻¹⁰⁰ to 2¹²⁰.
    fn some() -> impl Iterator<Item = f32> {
        let bits = (0..10_000u32).map(|i| i.wrapping_mul(0x9e37_79b9) ^ i << 7);
        bits.map(|bits| f32::from_bits(bits & 0x807f_ffff | (27 + bits % 220) << 23))
    }

    #[test]
    fn an_f32_is_the_sum_of_its_parts_each_far_smaller_than_the_one_before() {
        if Isa::supported() < Isa::Avx512 {
            return;
        }
        for x in some().chain([0.0, 1.0, -1.0, 1.0 + f32::EPSILON, 3.38e38, f32::MIN_POSITIVE]) {
            let [high, middle, low] = parts(x)[..] else { panic!() };
            assert_eq!(f64::from(high) + f64::from(middle) + f64::from(low), f64::from(x), "{x:e}");
            assert!(
                middle.abs() <= x.abs() / 256.0 && low.abs() <= x.abs() / 131_072.0,
                "{x:e}: {middle:e}, {low:e}"
            );
        }
    }

    #[test]
    fn every_f16_is_the_sum_of_its_parts() {
        if Isa::supported() < Isa::Avx512 {
            return;
        }
        for x in (0..=u16::MAX).map(f16::from_bits) {
            let parts = parts(x);
            match x.is_finite() {
                true => assert_eq!(parts.iter().sum::<f32>(), x.to_f32(), "{x:e}"),
                false => assert!(parts.iter().any(|part| part.is_nan()), "{x:e}: {parts:?}"),
            }
        }
    }

    #[test]
    fn what_is_not_finite_or_next_to_it_has_a_part_that_is_no_number() {
        if Isa::supported() < Isa::Avx512 {
            return;
        }
        let nans = [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001, 0x7fc0_0000].map(f32::from_bits);
        for x in nans.into_iter().chain([f32::INFINITY, f32::NEG_INFINITY, f32::MAX]) {
            let parts = parts(x);
            let products: f32 = parts.iter().map(|part| part * 0.5).sum();
            assert!(products.is_nan() || x == f32::MAX && !products.is_finite(), "{x}: {parts:?}");
        }
    }
}
