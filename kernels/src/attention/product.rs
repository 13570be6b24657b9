//! Products of the tiles of attention, on one thread.

use ::gemm::Parallelism;

use crate::float::Float;
use crate::gemm::{Mat, gemm};

/// `dst [m, n] = a [m, k] · b [k, n]`, plus the old `dst` where `accumulate`. `dst` and `b` are given with the distance of their rows,
/// whose elements are contiguous.
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
) {
    let (dst, b) = (Mat(dst.0, dst.1, 1), Mat(b.0, b.1, 1));
    // SAFETY: the caller's promise.
    unsafe { gemm::<T, T>((m, n, k), dst, accumulate, a, b, T::ONE, Parallelism::None) };
}
