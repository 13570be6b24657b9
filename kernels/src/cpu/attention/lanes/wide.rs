//! Blocks by FMA of f32, for tensors of every storage type.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::BLOCK;
use super::engine::{Corner, Engine, Left, Span};
use super::prefetch::Prefetcher;
use crate::cpu::gemm::lanes::{Lanes, first};

pub struct Wide<E>(PhantomData<E>);

impl<E: Lanes> Engine for Wide<E> {
    type Elem = E;
    type Operand = f32;
    const GROUP: usize = 1;
    const STEP: usize = 1;
    const ASKS: usize = 3;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn row(from: *const E, n: usize, to: *mut f32, width: usize) {
        for c in (0..width).step_by(16) {
            // SAFETY: the caller's promise; masked elements are not touched.
            unsafe {
                _mm512_storeu_ps(
                    to.add(c),
                    E::load16(from.wrapping_add(c), first(n.saturating_sub(c))),
                )
            };
        }
    }

    #[inline]
    unsafe fn block(
        inner: usize,
        corner: Option<Corner>,
        a: Left<f32>,
        b: (*const f32, usize),
        c: (*mut f32, usize),
        add: bool,
        ahead: &mut Prefetcher<Self>,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let down = |r: usize| {
                (Span::new(inner, corner, r), a.from::<Self>(r, 0), (c.0.add(r * c.1), c.1))
            };
            // Both halves have the same span.
            if matches!(corner, None | Some(Corner::Right)) {
                for r in [0, 11] {
                    let (span, a, c) = down(r);
                    ahead.ask();
                    strip::<11>(span, a, b, c, add);
                }
                let (span, a, c) = down(22);
                ahead.ask();
                strip::<10>(span, a, b, c, add);
            } else {
                for r in (0..BLOCK).step_by(8) {
                    let (span, a, c) = down(r);
                    ahead.ask();
                    strip::<8>(span, a, b, c, add);
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn round(p: __m512) -> __m512 {
        if size_of::<E>() == size_of::<f32>() {
            return p;
        }
        let mut narrow = [E::store(0.0); 16];
        // SAFETY: the machine has the instructions, and there are sixteen elements.
        unsafe {
            E::store16(narrow.as_mut_ptr(), u16::MAX, p);
            E::load16(narrow.as_ptr(), u16::MAX)
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn right(rows: [__m512; 2], to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            _mm512_storeu_ps(to, rows[0]);
            _mm512_storeu_ps(to.add(BLOCK), rows[1]);
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn left(rows: [__m512; 2], (to, stride): (*mut f32, usize)) {
        // SAFETY: the caller's promise.
        unsafe {
            _mm512_storeu_ps(to, rows[0]);
            _mm512_storeu_ps(to.add(stride), rows[1]);
        }
    }
}

/// ROWS rows of [`Engine::block`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn strip<const ROWS: usize>(
    Span { first, both, end }: Span,
    Left { at: a, row, step }: Left<f32>,
    (b, b_stride): (*const f32, usize),
    (c, c_stride): (*mut f32, usize),
    add: bool,
) {
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    // SAFETY: the caller's promise.
    unsafe {
        if add {
            for r in 0..ROWS {
                let c = c.add(r * c_stride);
                sums[r] = [_mm512_loadu_ps(c), _mm512_loadu_ps(c.add(16))];
            }
        }
        let (mut a, mut b) = (a.wrapping_add(first * step), b.wrapping_add(first * b_stride));
        for _ in first..both {
            let lanes = [_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16))];
            for r in 0..ROWS {
                let a = _mm512_set1_ps(*a.add(r * row));
                sums[r] = [
                    _mm512_fmadd_ps(a, lanes[0], sums[r][0]),
                    _mm512_fmadd_ps(a, lanes[1], sums[r][1]),
                ];
            }
            (a, b) = (a.wrapping_add(step), b.wrapping_add(b_stride));
        }
        for _ in both..end {
            let lanes = _mm512_loadu_ps(b.add(16));
            for r in 0..ROWS {
                sums[r][1] = _mm512_fmadd_ps(_mm512_set1_ps(*a.add(r * row)), lanes, sums[r][1]);
            }
            (a, b) = (a.wrapping_add(step), b.wrapping_add(b_stride));
        }
        for r in 0..ROWS {
            let c = c.add(r * c_stride);
            _mm512_storeu_ps(c, sums[r][0]);
            _mm512_storeu_ps(c.add(16), sums[r][1]);
        }
    }
}
