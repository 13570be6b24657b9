//! Products of attention tiles, on one thread.

use ::gemm::Parallelism;
use candle_core::DType;

use crate::cpu::gemm::unpacked::{self, CausalPart};
use crate::cpu::gemm::{Mat, gemm};
use crate::tensor::element::Float;

/// As [`unpacked::product`]; in f64, the whole product.
///
/// # Safety
/// As [`unpacked::product`].
pub unsafe fn product<T: Float>(
    (m, n, k): (usize, usize, usize),
    seen: CausalPart,
    dst: (*mut T, usize),
    accumulate: bool,
    a: Mat<*const T>,
    b: (*const T, usize),
) {
    // SAFETY: the caller's promise; T is the type of its DTYPE.
    unsafe {
        if T::DTYPE == DType::F32 {
            unpacked::product(
                (m, n, k),
                seen,
                (dst.0.cast(), dst.1),
                accumulate,
                a.cast(),
                (b.0.cast(), b.1),
            );
        } else {
            let (dst, b) = (Mat(dst.0, dst.1, 1), Mat(b.0, b.1, 1));
            gemm::<T, T>((m, n, k), dst, accumulate, a, b, T::ONE, Parallelism::None);
        }
    }
}
