//! Blocks of pairs of bf16: by AMX tiles, and by AVX-512 BF16.

use std::arch::asm;
use std::arch::x86_64::*;

use half::bf16;

use super::engine::{Corner, Engine, Left, Span};
use super::prefetch::Prefetcher;
use super::{BLOCK, LANES};
use crate::cpu::gemm::amx_tiles;

/// Tiles of 16 × 16 sums, with 32 elements of the inner dimension per step.
pub struct Amx;

/// VDPBF16PS.
pub struct Dot;

/// The code that both engines share.
macro_rules! of_pairs {
    () => {
        type Elem = bf16;
        type Operand = bf16;
        const GROUP: usize = 2;
        const STEP: usize = 32;

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        unsafe fn row(from: *const bf16, n: usize, to: *mut bf16, width: usize) {
            for c in (0..width).step_by(32) {
                let left = n.saturating_sub(c);
                let mask = if left >= 32 { u32::MAX } else { (1 << left) - 1 };
                // SAFETY: the caller's promise; masked elements are not touched.
                unsafe {
                    let line = _mm512_maskz_loadu_epi16(mask, from.wrapping_add(c).cast());
                    _mm512_storeu_epi16(to.add(c).cast(), line);
                }
            }
        }

        /// Storing rounds.
        #[inline(always)]
        unsafe fn round(p: __m512) -> __m512 {
            p
        }

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        unsafe fn right(rows: [__m512; 2], to: *mut bf16) {
            const HALVES: [u16; 32] = {
                let mut order = [0; 32];
                let mut i = 0;
                while i < 32 {
                    order[i] = (i / 2 + i % 2 * 16) as u16;
                    i += 1;
                }
                order
            };
            // SAFETY: the caller's promise.
            unsafe {
                let order = _mm512_loadu_epi16(HALVES.as_ptr().cast());
                _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi16(order, narrow(rows)));
            }
        }

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        unsafe fn left(rows: [__m512; 2], (to, stride): (*mut bf16, usize)) {
            // SAFETY: the caller's promise.
            unsafe {
                let both = narrow(rows);
                _mm256_storeu_si256(to.cast(), _mm512_castsi512_si256(both));
                _mm256_storeu_si256(to.add(stride).cast(), _mm512_extracti64x4_epi64::<1>(both));
            }
        }
    };
}

/// Rounds two rows and concatenates them. In assembly, so that code shared with other engines can
/// contain it.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn narrow([low, high]: [__m512; 2]) -> __m512i {
    let both: __m512i;
    // SAFETY: machines with engines of pairs have AVX-512 BF16.
    unsafe {
        asm!(
            "vcvtne2ps2bf16 {both}, {high}, {low}",
            both = lateout(zmm_reg) both,
            high = in(zmm_reg) high,
            low = in(zmm_reg) low,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    both
}

impl Engine for Amx {
    of_pairs!();

    const ASKS: usize = 1;

    #[inline]
    unsafe fn block(
        inner: usize,
        // Tiles are multiplied whole.
        _: Option<Corner>,
        Left { at: a, row, step }: Left<bf16>,
        (b, b_stride): (*const bf16, usize),
        (c, c_stride): (*mut f32, usize),
        add: bool,
        ahead: &mut Prefetcher<Self>,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            ahead.ask();
            asm!(
                "test {add}, {add}",
                "jz 3f",
                "tileloadd tmm0, [{c} + {c_stride}]",
                "tileloadd tmm1, [{c} + {c_stride} + 64]",
                "tileloadd tmm2, [{c16} + {c_stride}]",
                "tileloadd tmm3, [{c16} + {c_stride} + 64]",
                "jmp 2f",
                "3:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{a} + {a_stride}]",
                "tileloadd tmm6, [{b} + {b_stride}]",
                "tileloadd tmm7, [{b} + {b_stride} + 64]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a16} + {a_stride}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, {a_step}",
                "add {a16}, {a_step}",
                "add {b}, {b_step}",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{c} + {c_stride}], tmm0",
                "tilestored [{c} + {c_stride} + 64], tmm1",
                "tilestored [{c16} + {c_stride}], tmm2",
                "tilestored [{c16} + {c_stride} + 64], tmm3",
                a = inout(reg) a => _,
                a16 = inout(reg) a.add(16 * row) => _,
                a_stride = in(reg) 2 * row,
                a_step = in(reg) 2 * step,
                b = inout(reg) b => _,
                b_stride = in(reg) 2 * b_stride,
                b_step = in(reg) 32 * b_stride,
                c = in(reg) c,
                c16 = in(reg) c.add(16 * c_stride),
                c_stride = in(reg) 4 * c_stride,
                steps = inout(reg) inner / BLOCK => _,
                add = in(reg) usize::from(add),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    #[inline]
    unsafe fn enter() {
        // SAFETY: AMX is detected only with the operating system's permission.
        unsafe { amx_tiles::configure() }
    }

    #[inline]
    unsafe fn leave() {
        // SAFETY: the caller's promise; no tile is in use.
        unsafe { amx_tiles::release() }
    }
}

impl Engine for Dot {
    of_pairs!();

    const ASKS: usize = BLOCK / 8;

    #[inline]
    unsafe fn block(
        inner: usize,
        corner: Option<Corner>,
        a: Left<bf16>,
        b: (*const bf16, usize),
        (c, c_stride): (*mut f32, usize),
        add: bool,
        ahead: &mut Prefetcher<Self>,
    ) {
        for r in (0..BLOCK).step_by(8) {
            let span = Span::new(inner, corner, r);
            // SAFETY: the caller's promise.
            unsafe {
                ahead.ask();
                strip::<8>(span, a.from::<Self>(r, 0), b, (c.add(r * c_stride), c_stride), add);
            }
        }
    }
}

/// ROWS rows of [`Engine::block`].
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn strip<const ROWS: usize>(
    Span { first, both, end }: Span,
    Left { at: a, row, step }: Left<bf16>,
    (b, b_stride): (*const bf16, usize),
    (c, c_stride): (*mut f32, usize),
    add: bool,
) {
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    // SAFETY: the caller's promise; __m512bh holds 32 bf16, __m512i the same as 16 pairs.
    unsafe {
        let pairs = |v: __m512i| std::mem::transmute::<__m512i, __m512bh>(v);
        if add {
            for r in 0..ROWS {
                let c = c.add(r * c_stride);
                sums[r] = [_mm512_loadu_ps(c), _mm512_loadu_ps(c.add(LANES))];
            }
        }
        let b = |i: usize, half: usize| {
            pairs(_mm512_loadu_epi32(b.add(i * b_stride).cast::<i32>().add(half * LANES)))
        };
        let a = |i: usize, r: usize| {
            let a = a.add(i / 16 * step + 2 * (i % 16) + r * row);
            pairs(_mm512_set1_epi32(a.cast::<i32>().read_unaligned()))
        };
        for i in first / 2..both / 2 {
            let lanes = [b(i, 0), b(i, 1)];
            for r in 0..ROWS {
                let a = a(i, r);
                sums[r] = [
                    _mm512_dpbf16_ps(sums[r][0], a, lanes[0]),
                    _mm512_dpbf16_ps(sums[r][1], a, lanes[1]),
                ];
            }
        }
        for i in both / 2..end / 2 {
            let lanes = b(i, 1);
            for r in 0..ROWS {
                sums[r][1] = _mm512_dpbf16_ps(sums[r][1], a(i, r), lanes);
            }
        }
        for r in 0..ROWS {
            let c = c.add(r * c_stride);
            _mm512_storeu_ps(c, sums[r][0]);
            _mm512_storeu_ps(c.add(LANES), sums[r][1]);
        }
    }
}
