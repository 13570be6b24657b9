//! AVX-512: FMA of f32 by the micro-kernel of [`super::avx512_common`].

use std::arch::x86_64::*;

use candle_core::DType;
use half::{bf16, f16};

use super::Mat;
use super::avx512_common::{Layout, MR, NR, Packed, Rows, Word, any_tile, by_rows, skinny, tiles};
use super::interleave::{Fetch, Idle, PackByShares, PackBySteps, Work};
use super::kernel::{Ahead, Blocking, InPlace, Interleaved, Kernel, PIECE, Skinny, Strip, To};
use super::lanes::{Lanes, first, transpose, transposed};
use crate::tensor::allocator::{LINE, rows_crowd};
use crate::tensor::element::Elem;
use crate::tensor::simd::is_intel;

pub struct Avx512;

tiles!("avx512f,avx512bw,avx512dq,avx512vl");
skinny!("avx512f,avx512bw,avx512dq,avx512vl");

impl<E: Lanes> Kernel<E> for Avx512 {
    type Packed = f32;
    const MR: usize = MR;
    const NR: usize = NR;
    const KQ: usize = 1;

    fn blocking() -> Blocking {
        let zen = Blocking {
            kc: 768,
            once: 1024,
            mc: 252,
            nc: 256,
            nc_alone: 384,
            panels_alone: true,
            in_place: InPlace::AHEAD,
            whole: 0,
            alone: 4 << 20,
        };
        if !is_intel() {
            return zen;
        }
        // Longer blocks slow weight gradients by 4 to 9% on Intel's cores, and speed them up on
        // AMD's (commits bfc0c68 and 31c48f2).
        Blocking { kc: 384, once: 768, in_place: InPlace::ALONE, ..zen }
    }

    unsafe fn pack_a(a: Mat<*const E>, rows: usize, k: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack_all::<E, MR>(a, rows, k, to, 0) }
    }

    unsafe fn pack_b(b: Mat<*const E>, columns: usize, k: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack_all::<E, NR>(b.t(), columns, k, to, 0) }
    }

    unsafe fn pack_strips(a: Mat<*const E>, rows: usize, k: usize, to: *mut f32, stride: usize) {
        // SAFETY: the caller's promise.
        unsafe { pack_all::<E, MR>(a, rows, k, to, stride) }
    }

    unsafe fn pack_panels(b: Mat<*const E>, columns: usize, k: usize, to: *mut f32, stride: usize) {
        // SAFETY: the caller's promise.
        unsafe { pack_all::<E, NR>(b.t(), columns, k, to, stride) }
    }

    fn reads_rows(Mat(_, row, column): Mat<*const E>) -> bool {
        E::DTYPE == DType::F32 && column == 1 && !rows_crowd(4 * row)
    }

    const ASKS_FOR_ADDED: bool = true;
    const INTERLEAVES: bool = true;
    const ROUNDS: bool = true;

    fn can_overlap(Mat(_, row, column): Mat<*const E>) -> bool {
        row == 1 && column != 1
    }

    unsafe fn tile(
        rows: usize,
        k: usize,
        strip: Strip<E, f32>,
        panel: *const f32,
        from: (*const f32, usize),
        to: To<E>,
        ahead: Ahead,
        interleaved: Option<Interleaved<E, f32>>,
    ) {
        // SAFETY: the caller's promise; only f32 is read unpacked.
        unsafe { any_tile!(rows, strip, interleaved, E, Line, (k, panel, from, to, ahead)) }
    }

    fn leaves_other_rows(_: usize) -> bool {
        true
    }

    const THIN: Skinny = Skinny::InPlace;

    unsafe fn pack_row(a: Mat<*const E>, k: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack::<E, 1>(a, 1, k, to) }
    }

    unsafe fn skinny(
        rows: usize,
        columns: usize,
        k: usize,
        (a, row): (*const f32, usize),
        b: (*const E, usize),
        sums: *mut f32,
    ) {
        // SAFETY: the caller's promise.
        unsafe { skinny::<E, Line>(rows, columns, k, Rows(a, 4 * row), b, sums) }
    }

    unsafe fn finish<C: Elem<Acc = f32>>(
        sums: *const f32,
        rows: usize,
        columns: usize,
        to: (*mut C, usize),
        scale: f32,
        add: (*const C, usize),
    ) {
        // SAFETY: the caller's promise, and C is the type of its DTYPE.
        unsafe {
            match C::DTYPE {
                DType::F32 => finish::<f32>(
                    sums,
                    rows,
                    columns,
                    (to.0.cast(), to.1),
                    scale,
                    (add.0.cast(), add.1),
                ),
                DType::BF16 => finish::<bf16>(
                    sums,
                    rows,
                    columns,
                    (to.0.cast(), to.1),
                    scale,
                    (add.0.cast(), add.1),
                ),
                _ => finish::<f16>(
                    sums,
                    rows,
                    columns,
                    (to.0.cast(), to.1),
                    scale,
                    (add.0.cast(), add.1),
                ),
            }
        }
    }
}

/// Makes words of f32 from one row of memory.
struct Line;

impl<E: Lanes> Word<E> for Line {
    const ROWS: usize = 1;

    #[inline(always)]
    unsafe fn words(from: *const E, _: usize, mask: u16) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_castps_si512(E::load16(from, mask)) }
    }

    #[inline(always)]
    unsafe fn along(from: *const E, line: usize, lines: usize, elements: usize) -> [__m512i; 16] {
        // SAFETY: the caller's promise.
        unsafe {
            if E::DTYPE == DType::F32 && elements >= 16 {
                return transposed(from.cast(), 4 * line, lines);
            }
            let mut words = [_mm512_setzero_si512(); 16];
            for (l, words) in words.iter_mut().enumerate().take(lines) {
                *words = _mm512_castps_si512(E::load16(from.add(l * line), first(elements)));
            }
            transpose(words)
        }
    }

    #[inline(always)]
    unsafe fn multiply(sum: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_fmadd_ps(a, b, sum) }
    }
}

/// As [`super::pack::pack`], for matrices that do not have their panels' rows contiguous in memory.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pack<E: Lanes, const R: usize>(m: Mat<*const E>, width: usize, k: usize, to: *mut f32) {
    let Mat(from, row, column) = m;
    // SAFETY: the caller's promise.
    unsafe {
        if column == 1 {
            for r in (0..R).step_by(16) {
                for i in (0..k).step_by(16) {
                    let lines = <Line as Word<E>>::along(
                        from.wrapping_add(r * row + i),
                        row,
                        width.saturating_sub(r),
                        k - i,
                    );
                    for (l, &line) in lines.iter().enumerate().take(k - i) {
                        _mm512_mask_storeu_epi32(
                            to.add((i + l) * R + r).cast(),
                            first(R - r),
                            line,
                        );
                    }
                }
            }
        } else {
            super::pack::pack::<E, R>(m, width, k, to);
        }
    }
}

/// As [`Kernel::pack_strips`]. If strips lie side by side in rows of memory, reads row by row and
/// prefetches the rows of the next piece.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pack_all<E: Lanes, const R: usize>(
    m: Mat<*const E>,
    width: usize,
    k: usize,
    to: *mut f32,
    stride: usize,
) {
    let Mat(from, row, column) = m;
    // SAFETY: the caller's promise; a prefetch is no access.
    unsafe {
        if row != 1 || column == 1 {
            for (s, r) in (0..width).step_by(R).enumerate() {
                pack::<E, R>(m.at(r, 0), R.min(width - r), k, to.add(s * stride));
            }
            return;
        }
        for i in 0..k {
            let from = from.wrapping_add(i * column);
            let ahead = from.wrapping_add(PIECE * column).cast::<i8>();
            for line in (0..width * size_of::<E>()).step_by(64) {
                _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line));
            }
            let strip = |s: usize, l: usize, mask: u16| {
                let line = E::load16(from.wrapping_add(s * R + l), mask);
                _mm512_mask_storeu_ps(to.add(s * stride + i * R + l), first(R - l), line);
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

/// As [`Kernel::finish`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn finish<C: Lanes>(
    sums: *const f32,
    rows: usize,
    columns: usize,
    (to, stride): (*mut C, usize),
    scale: f32,
    add: (*const C, usize),
) {
    let scale = _mm512_set1_ps(scale);
    for r in 0..rows {
        for c in (0..columns).step_by(16) {
            let mask = first(columns - c);
            // SAFETY: the caller's promise; masked lanes are not touched.
            unsafe {
                let to = to.add(r * stride + c);
                let sum = _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(mask, sums.add(r * NR + c)));
                let sum = match add {
                    (add, _) if add.is_null() => sum,
                    (add, stride) => _mm512_add_ps(C::load16(add.add(r * stride + c), mask), sum),
                };
                C::store16(to, mask, sum);
            }
        }
    }
}
