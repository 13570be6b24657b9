//! Sixteen elements of a storage type in an AVX-512 register of f32, and the transposition of
//! sixteen such registers.

use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::tensor::element::Elem;

/// Storage types that AVX-512 converts to and from sixteen f32.
pub trait Lanes: Elem<Acc = f32> {
    /// The elements that `mask` selects; others are 0 and not read.
    ///
    /// # Safety
    /// The machine has AVX-512 (F, BW, DQ, VL); the elements can be read.
    unsafe fn load16(from: *const Self, mask: u16) -> __m512;

    /// Stores the nearest values, ties to even, where `mask` selects.
    ///
    /// # Safety
    /// As [`Lanes::load16`]; the elements can be written.
    unsafe fn store16(to: *mut Self, mask: u16, v: __m512);
}

impl Lanes for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load16(from: *const Self, mask: u16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(mask, from) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn store16(to: *mut Self, mask: u16, v: __m512) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_mask_storeu_ps(to, mask, v) }
    }
}

impl Lanes for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load16(from: *const Self, mask: u16) -> __m512 {
        // SAFETY: the caller's promise.
        let bits = unsafe { _mm256_maskz_loadu_epi16(mask, from.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn store16(to: *mut Self, mask: u16, v: __m512) {
        let bits = _mm512_castps_si512(v);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        let result =
            _mm512_mask_blend_epi32(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v), rounded, quiet);
        // SAFETY: the caller's promise.
        unsafe {
            _mm256_mask_storeu_epi16(
                to.cast(),
                mask,
                _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(result)),
            )
        }
    }
}

impl Lanes for f16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load16(from: *const Self, mask: u16) -> __m512 {
        // SAFETY: the caller's promise.
        _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(mask, from.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn store16(to: *mut Self, mask: u16, v: __m512) {
        // SAFETY: the caller's promise.
        unsafe {
            _mm256_mask_storeu_epi16(
                to.cast(),
                mask,
                _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v),
            )
        }
    }
}

/// Mask of the lowest `n` of sixteen lanes; all if there are more.
#[inline(always)]
pub fn first(n: usize) -> u16 {
    if n >= 16 { u16::MAX } else { (1 << n) - 1 }
}

/// Register i of the result holds lane i of every register.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    // First pairs of 32 bits, then of 64 bits, within quarters of registers; then the quarters
    // themselves.
    let mut t = r;
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    let mut u = t;
    for i in 0..4 {
        u[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    // u[4i + j] holds, in quarter q, lane 4q + j of registers 4i .. 4i + 4.
    let mut out = u;
    for j in 0..4 {
        let low = [
            _mm512_shuffle_i32x4::<0x88>(u[j], u[4 + j]),
            _mm512_shuffle_i32x4::<0x88>(u[8 + j], u[12 + j]),
        ];
        let high = [
            _mm512_shuffle_i32x4::<0xdd>(u[j], u[4 + j]),
            _mm512_shuffle_i32x4::<0xdd>(u[8 + j], u[12 + j]),
        ];
        out[j] = _mm512_shuffle_i32x4::<0x88>(low[0], low[1]);
        out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(low[0], low[1]);
        out[4 + j] = _mm512_shuffle_i32x4::<0x88>(high[0], high[1]);
        out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(high[0], high[1]);
    }
    out
}

/// Register i of the result holds the 32 bits at byte 4·i of each of `rows` ≤ 16 rows, which lie
/// `row` bytes apart, and 0 for missing rows. The loads already put quarters of registers into
/// place, which saves half of the shuffles of [`transpose`].
///
/// # Safety
/// The machine has AVX-512; 64 bytes of every row can be read.
#[inline]
#[target_feature(enable = "avx512f")]
pub unsafe fn transposed(from: *const u8, row: usize, rows: usize) -> [__m512i; 16] {
    let mut out = [_mm512_setzero_si512(); 16];
    for quarter in 0..4 {
        let mut x = [_mm512_setzero_si512(); 4];
        for (t, x) in x.iter_mut().enumerate() {
            for lane in 0..4 {
                let r = 4 * lane + t;
                if r < rows {
                    // SAFETY: the caller's promise.
                    let four = unsafe { _mm_loadu_si128(from.add(r * row + 16 * quarter).cast()) };
                    *x = _mm512_mask_broadcast_i32x4(*x, 0xf << (4 * lane), four);
                }
            }
        }
        let low = [_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpacklo_epi32(x[2], x[3])];
        let high = [_mm512_unpackhi_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[2], x[3])];
        out[4 * quarter] = _mm512_unpacklo_epi64(low[0], low[1]);
        out[4 * quarter + 1] = _mm512_unpackhi_epi64(low[0], low[1]);
        out[4 * quarter + 2] = _mm512_unpacklo_epi64(high[0], high[1]);
        out[4 * quarter + 3] = _mm512_unpackhi_epi64(high[0], high[1]);
    }
    out
}
