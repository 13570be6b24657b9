//! Matrix multiplication on strided matrices, by the `gemm` crate.
//!
//! Its blocking over the inner dimension depends on the shape alone, so results do not depend on the number of threads.

use ::gemm::Parallelism;

use crate::float::Float;
use crate::par;

/// A matrix in memory: pointer to element (0, 0), row stride, column stride.
#[derive(Clone, Copy)]
pub struct Mat<P>(pub P, pub usize, pub usize);

impl<T> Mat<*const T> {
    /// The transpose.
    pub fn t(self) -> Self {
        Self(self.0, self.2, self.1)
    }
}

/// All threads of the current pool, or none besides the caller.
pub fn all_threads() -> Parallelism {
    match par::threads() {
        1 => Parallelism::None,
        n => Parallelism::Rayon(n),
    }
}

/// `dst [m, n] = scale · a [m, k] · b [k, n]`, plus the old `dst` where `accumulate`.
///
/// # Safety
/// Every element of the three matrices must lie in memory that may be read (`a`, `b`) or written (`dst`) for the call,
/// `dst` apart from the others.
pub unsafe fn gemm<T: Float>(
    (m, n, k): (usize, usize, usize),
    dst: Mat<*mut T>,
    accumulate: bool,
    a: Mat<*const T>,
    b: Mat<*const T>,
    scale: T,
    threads: Parallelism,
) {
    let (Mat(dst, dst_rs, dst_cs), Mat(a, a_rs, a_cs), Mat(b, b_rs, b_cs)) = (dst, a, b);
    let stride = |s: usize| s as isize;
    // SAFETY: the caller's promise. `alpha` scales the old dst, `beta` the product.
    unsafe {
        ::gemm::gemm(
            m,
            n,
            k,
            dst,
            stride(dst_cs),
            stride(dst_rs),
            accumulate,
            a,
            stride(a_cs),
            stride(a_rs),
            b,
            stride(b_cs),
            stride(b_rs),
            T::ONE,
            scale,
            false,
            false,
            false,
            threads,
        );
    }
}
