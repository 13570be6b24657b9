//! AVX-512 BF16: products of pairs along the inner dimension, by the micro-kernel of
//! [`super::avx512_common`].
//!
//! The instructions treat subnormal numbers as 0 (Intel SDM, VDPBF16PS, VCVTNEPS2BF16), whatever
//! MXCSR says.

use std::arch::x86_64::*;

use half::bf16;

use super::Mat;
use super::avx512;
use super::avx512_common::{Layout, MR, NR, Packed, Rows, Word, any_tile, by_rows, skinny, tiles};
use super::interleave::{Fetch, Idle, PackByShares, PackBySteps, Work};
use super::kernel::{Ahead, Blocking, InPlace, Interleaved, Kernel, PIECE, Skinny, Strip, To};
use super::lanes::{Lanes, first, transpose, transposed};
use crate::tensor::allocator::{LINE, rows_crowd};
use crate::tensor::element::Elem;

pub struct Avx512Bf16;

tiles!("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16");
skinny!("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16");

impl Kernel<bf16> for Avx512Bf16 {
    type Packed = bf16;
    const MR: usize = MR;
    const NR: usize = NR;
    const KQ: usize = 2;

    fn blocking() -> Blocking {
        Blocking {
            kc: 768,
            once: 1024,
            mc: 252,
            nc: 256,
            nc_alone: 512,
            panels_alone: true,
            in_place: InPlace::AHEAD,
            whole: 0,
            alone: 4 << 20,
        }
    }

    unsafe fn pack_a(a: Mat<*const bf16>, rows: usize, k: usize, to: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { pack_pairs::<MR>(a, rows, k, to) }
    }

    unsafe fn pack_b(b: Mat<*const bf16>, columns: usize, k: usize, to: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { pack_pairs::<NR>(b.t(), columns, k, to) }
    }

    unsafe fn pack_strips(
        a: Mat<*const bf16>,
        rows: usize,
        k: usize,
        to: *mut bf16,
        stride: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe { pack_all::<MR>(a, rows, k, to, stride) }
    }

    unsafe fn pack_panels(
        b: Mat<*const bf16>,
        columns: usize,
        k: usize,
        to: *mut bf16,
        stride: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe { pack_all::<NR>(b.t(), columns, k, to, stride) }
    }

    fn reads_rows(Mat(_, row, column): Mat<*const bf16>) -> bool {
        column == 1 && !rows_crowd(2 * row)
    }

    const ASKS_FOR_ADDED: bool = true;
    const INTERLEAVES: bool = true;
    const ROUNDS: bool = true;

    fn can_overlap(Mat(_, row, column): Mat<*const bf16>) -> bool {
        row == 1 && column != 1
    }

    unsafe fn tile(
        rows: usize,
        k: usize,
        strip: Strip<bf16, bf16>,
        panel: *const bf16,
        from: (*const f32, usize),
        to: To<bf16>,
        ahead: Ahead,
        interleaved: Option<Interleaved<bf16, bf16>>,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            any_tile!(rows, strip, interleaved, bf16, Pair, (k / 2, panel.cast(), from, to, ahead))
        }
    }

    fn leaves_other_rows(_: usize) -> bool {
        true
    }

    const THIN: Skinny = Skinny::InPlace;

    unsafe fn pack_row(a: Mat<*const bf16>, k: usize, to: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { pack_pairs::<1>(a, 1, k, to) }
    }

    unsafe fn skinny(
        rows: usize,
        columns: usize,
        k: usize,
        (a, row): (*const bf16, usize),
        b: (*const bf16, usize),
        sums: *mut f32,
    ) {
        // SAFETY: the caller's promise.
        unsafe { skinny::<bf16, Pair>(rows, columns, k, Rows(a.cast(), 2 * row), b, sums) }
    }

    unsafe fn finish<C: Elem<Acc = f32>>(
        sums: *const f32,
        rows: usize,
        columns: usize,
        to: (*mut C, usize),
        scale: f32,
        add: (*const C, usize),
    ) {
        // SAFETY: the caller's promise.
        unsafe { finish_tile(sums, rows, columns, to, scale, add) }
    }
}

/// Makes words of pairs from two rows of memory.
struct Pair;

impl Word<bf16> for Pair {
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn words(from: *const bf16, row: usize, mask: u16) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { pairs_of(from, Some(from.wrapping_add(row)), mask) }
    }

    #[inline(always)]
    unsafe fn along(
        from: *const bf16,
        line: usize,
        lines: usize,
        elements: usize,
    ) -> [__m512i; 16] {
        // SAFETY: the caller's promise.
        unsafe {
            if elements >= 32 {
                return transposed(from.cast(), 2 * line, lines);
            }
            let mut words = [_mm512_setzero_si512(); 16];
            for (l, words) in words.iter_mut().enumerate().take(lines) {
                *words = _mm512_maskz_loadu_epi16((1 << elements) - 1, from.add(l * line).cast());
            }
            transpose(words)
        }
    }

    #[inline(always)]
    unsafe fn multiply(sum: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller's promise; __m512bh holds 32 bf16, __m512 the same as 16 words of two.
        unsafe {
            _mm512_dpbf16_ps(
                sum,
                std::mem::transmute::<__m512, __m512bh>(a),
                std::mem::transmute::<__m512, __m512bh>(b),
            )
        }
    }

    #[inline(always)]
    unsafe fn store(to: *mut bf16, [low, high]: [__m512; 2]) {
        // SAFETY: the caller's promise.
        unsafe {
            let both = _mm512_cvtne2ps_pbh(high, low);
            _mm512_storeu_si512(to.cast(), std::mem::transmute::<__m512bh, __m512i>(both));
        }
    }
}

/// Sixteen pairs from rows `i` and `i + 1` of a matrix with contiguous rows, where `mask` selects.
///
/// # Safety
/// The machine has AVX-512; the elements that `mask` selects can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn pairs_of(even: *const bf16, odd: Option<*const bf16>, mask: u16) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even.cast()));
        match odd {
            Some(odd) => {
                let high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, odd.cast()));
                _mm512_or_si512(low, _mm512_slli_epi32::<16>(high))
            }
            None => low,
        }
    }
}

/// Packs `width` ≤ R rows of `k` ≤ 32 columns of `m` as `[k / 2][R][2]`, padded with zeros.
///
/// # Safety
/// The machine has AVX-512; `m` can be read, `to` has R · (k rounded up to 2) elements.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn pack_pairs<const R: usize>(
    m: Mat<*const bf16>,
    width: usize,
    k: usize,
    to: *mut bf16,
) {
    let Mat(from, row, column) = m;
    let pairs = k.div_ceil(2);
    // SAFETY: the caller's promise.
    unsafe {
        if column == 1 {
            for r in (0..R).step_by(16) {
                let lines =
                    Pair::along(from.wrapping_add(r * row), row, width.saturating_sub(r), k);
                for (l, &line) in lines.iter().enumerate().take(pairs) {
                    _mm512_mask_storeu_epi32(to.cast::<i32>().add(l * R + r), first(R - r), line);
                }
            }
        } else if row == 1 {
            pack_rows::<R>(m, width, k, to, 0);
        } else {
            to.write_bytes(0, 2 * pairs * R);
            for i in 0..k {
                for r in 0..width {
                    *to.add((i / 2 * R + r) * 2 + i % 2) = *from.add(r * row + i * column);
                }
            }
        }
    }
}

/// As [`Kernel::pack_strips`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pack_all<const R: usize>(
    m: Mat<*const bf16>,
    width: usize,
    k: usize,
    to: *mut bf16,
    stride: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if m.1 == 1 && m.2 != 1 {
            return pack_rows::<R>(m, width, k, to, stride);
        }
        for (s, r) in (0..width).step_by(R).enumerate() {
            pack_pairs::<R>(m.at(r, 0), R.min(width - r), k, to.add(s * stride));
        }
    }
}

/// As [`Kernel::pack_strips`], for strips side by side in rows of memory. Reads the rows two by two
/// and prefetches those of the next piece.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pack_rows<const R: usize>(
    Mat(from, _, column): Mat<*const bf16>,
    width: usize,
    k: usize,
    to: *mut bf16,
    stride: usize,
) {
    // SAFETY: the caller's promise; a prefetch is no access.
    unsafe {
        for i in 0..k.div_ceil(2) {
            let even = from.wrapping_add(2 * i * column);
            let odd = (2 * i + 1 < k).then(|| even.wrapping_add(column));
            let ahead = [even, even.wrapping_add(column)]
                .map(|row| row.wrapping_add(PIECE * column).cast::<i8>());
            for line in (0..width * size_of::<bf16>()).step_by(64) {
                ahead
                    .into_iter()
                    .for_each(|ahead| _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line)));
            }
            let strip = |s: usize, l: usize, mask: u16| {
                let line = match odd {
                    Some(odd) => pairs_of(
                        even.wrapping_add(s * R + l),
                        Some(odd.wrapping_add(s * R + l)),
                        mask,
                    ),
                    None => pairs_of(even.wrapping_add(s * R + l), None, mask),
                };
                _mm512_mask_storeu_epi32(
                    to.add(s * stride).cast::<i32>().add(i * R + l),
                    first(R - l),
                    line,
                );
            };
            let whole = width / R;
            for s in 0..whole {
                for l in (0..R).step_by(16) {
                    strip(s, l, first(R - l));
                }
            }
            if whole * R < width {
                for l in (0..R).step_by(16) {
                    strip(whole, l, first((width - whole * R).saturating_sub(l)));
                }
            }
        }
    }
}

/// As [`Kernel::finish`]; rounds to bf16 by the dedicated instruction.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn finish_tile<C: Elem<Acc = f32>>(
    sums: *const f32,
    rows: usize,
    columns: usize,
    (to, stride): (*mut C, usize),
    scale: f32,
    add: (*const C, usize),
) {
    if C::DTYPE != candle_core::DType::BF16 {
        // SAFETY: the caller's promise.
        return unsafe {
            <avx512::Avx512 as Kernel<f32>>::finish(sums, rows, columns, (to, stride), scale, add)
        };
    }
    let add = (!add.0.is_null()).then_some((add.0.cast::<bf16>(), add.1));
    // A multiplication by 1 is skipped: it would occupy the units that compute products.
    let factor = (scale != 1.0).then(|| _mm512_set1_ps(scale));
    for r in 0..rows {
        // SAFETY: the caller's promise; C is bf16, and masked lanes are not touched.
        unsafe {
            let (sums, to) = (sums.add(r * NR), to.add(r * stride).cast::<bf16>());
            let sum = |c: usize, mask: u16| {
                let sum = _mm512_maskz_loadu_ps(mask, sums.add(c));
                let sum = factor.map_or(sum, |factor| _mm512_mul_ps(factor, sum));
                add.map_or(sum, |(add, stride)| {
                    _mm512_add_ps(bf16::load16(add.add(r * stride + c), mask), sum)
                })
            };
            if columns == NR {
                Pair::store(to, [sum(0, u16::MAX), sum(16, u16::MAX)]);
                continue;
            }
            for c in (0..columns).step_by(16) {
                let mask = first(columns - c);
                let narrow =
                    std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(sum(c, mask)));
                _mm256_mask_storeu_epi16(to.add(c).cast(), mask, narrow);
            }
        }
    }
}
