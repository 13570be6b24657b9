//! Products of the tiles of attention: few rows at a time, so that what lies above the diagonal costs nothing.
//!
//! f32 on AVX-512 has a kernel of its own, which reads A where it lies and B in contiguous rows: tiles stay in L1 and L2, and
//! no operand is packed again for a product. All else goes through [`crate::gemm`].

use std::any::TypeId;
use std::ops::Range;

use ::gemm::Parallelism;

use crate::float::Float;
use crate::gemm::{Mat, gemm};
use crate::simd::Isa;

/// Rows of a strip where [`wide`] computes; with two columns of vectors they fill 28 of 32 registers.
const STRIP: usize = 14;

/// Whether the kernel of this file serves `T`.
#[inline]
fn own_kernel<T: Float>() -> bool {
    #[cfg(target_arch = "x86_64")]
    return TypeId::of::<T>() == TypeId::of::<f32>() && Isa::detected() >= Isa::Avx512;
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Cuts `rows` into strips of nearly equal length, small enough to follow the diagonal where that pays.
pub fn strips<T: Float>(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let limit = if own_kernel::<T>() { STRIP } else { rows.len().max(1) };
    let count = rows.len().div_ceil(limit).max(1);
    let (length, longer) = (rows.len() / count, rows.len() % count);
    let start = move |i: usize| rows.start + i * length + i.min(longer);
    (0..count).map(move |i| start(i)..start(i + 1)).filter(|strip| !strip.is_empty())
}

/// `dst [m, n] = scale · a [m, k] · b [k, n]`, plus the old `dst` where `accumulate`. `dst` and `b` are given with the distance of
/// their rows, whose elements are contiguous. `m` is the length of one of [`strips`].
///
/// # Safety
/// Every element of the three matrices can be read (`a`, `b`) or written (`dst`), `dst` apart from the others.
#[inline]
pub unsafe fn product<T: Float>(
    (m, n, k): (usize, usize, usize),
    dst: (*mut T, usize),
    accumulate: bool,
    a: Mat<*const T>,
    b: (*const T, usize),
    scale: T,
) {
    #[cfg(target_arch = "x86_64")]
    if own_kernel::<T>() {
        let a = Mat(a.0.cast::<f32>(), a.1, a.2);
        let (dst, b) = ((dst.0.cast::<f32>(), dst.1), (b.0.cast::<f32>(), b.1));
        // SAFETY: T is f32, the machine has the instructions, and the caller promises the memory.
        unsafe { wide(m, n, k, dst, accumulate, a, b, scale.f64() as f32) };
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { gemm::<T, T>((m, n, k), Mat(dst.0, dst.1, 1), accumulate, a, Mat(b.0, b.1, 1), scale, Parallelism::None) };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,fma")]
unsafe fn wide(
    m: usize,
    n: usize,
    k: usize,
    dst: (*mut f32, usize),
    accumulate: bool,
    a: Mat<*const f32>,
    b: (*const f32, usize),
    scale: f32,
) {
    macro_rules! by_rows {
        ($($rows:literal)*) => {
            match m {
                // SAFETY: the caller's promise.
                $($rows => unsafe { strip::<$rows>(n, k, dst, accumulate, a, b, scale) },)*
                _ => debug_assert!(false, "{m} rows in a strip"),
            }
        };
    }
    by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,fma")]
unsafe fn strip<const ROWS: usize>(
    n: usize,
    k: usize,
    (dst, dst_stride): (*mut f32, usize),
    accumulate: bool,
    Mat(a, row, column): Mat<*const f32>,
    (b, b_stride): (*const f32, usize),
    scale: f32,
) {
    use std::arch::x86_64::*;
    let scale = _mm512_set1_ps(scale);
    for first in (0..n).step_by(32) {
        let left = n - first;
        let bits = if left >= 32 { u32::MAX } else { (1 << left) - 1 };
        let masks = [bits as u16, (bits >> 16) as u16];
        // SAFETY: the caller's promise; masked lanes are not touched.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
            let (mut a, mut b) = (a, b.add(first));
            if masks[1] == u16::MAX {
                for _ in 0..k {
                    let lanes = [_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16))];
                    for r in 0..ROWS {
                        let a = _mm512_set1_ps(*a.add(r * row));
                        sums[r] = [_mm512_fmadd_ps(a, lanes[0], sums[r][0]), _mm512_fmadd_ps(a, lanes[1], sums[r][1])];
                    }
                    (a, b) = (a.wrapping_add(column), b.wrapping_add(b_stride));
                }
            } else if masks[1] == 0 {
                for _ in 0..k {
                    let lanes = _mm512_maskz_loadu_ps(masks[0], b);
                    for r in 0..ROWS {
                        sums[r][0] = _mm512_fmadd_ps(_mm512_set1_ps(*a.add(r * row)), lanes, sums[r][0]);
                    }
                    (a, b) = (a.wrapping_add(column), b.wrapping_add(b_stride));
                }
            } else {
                for _ in 0..k {
                    let lanes = [_mm512_loadu_ps(b), _mm512_maskz_loadu_ps(masks[1], b.add(16))];
                    for r in 0..ROWS {
                        let a = _mm512_set1_ps(*a.add(r * row));
                        sums[r] = [_mm512_fmadd_ps(a, lanes[0], sums[r][0]), _mm512_fmadd_ps(a, lanes[1], sums[r][1])];
                    }
                    (a, b) = (a.wrapping_add(column), b.wrapping_add(b_stride));
                }
            }
            for r in 0..ROWS {
                for half in 0..2 {
                    let (to, mask) = (dst.add(r * dst_stride + first).wrapping_add(16 * half), masks[half]);
                    let old = if accumulate { _mm512_maskz_loadu_ps(mask, to) } else { _mm512_setzero_ps() };
                    _mm512_mask_storeu_ps(to, mask, _mm512_fmadd_ps(scale, sums[r][half], old));
                }
            }
        }
    }
}
