//! Products of f64, by the `gemm` crate. Only tests and reference computations use them.

use ::gemm::Parallelism;

use super::{Mat, Start};

/// # Safety
/// As [`super::gemm`].
pub unsafe fn gemm(
    (m, n, k): (usize, usize, usize),
    Mat(dst, dst_rs, dst_cs): Mat<*mut f64>,
    start: Start<'_, f64>,
    Mat(a, a_rs, a_cs): Mat<*const f64>,
    Mat(b, b_rs, b_cs): Mat<*const f64>,
    scale: f64,
    threads: Parallelism,
) {
    if let Start::Bias(bias) = start {
        for r in 0..m {
            for (c, &value) in bias.iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe { dst.add(r * dst_rs + c * dst_cs).write(value) };
            }
        }
    }
    let accumulate = !matches!(start, Start::Zero);
    let stride = |s: usize| s as isize;
    // SAFETY: the caller's promise. The crate's `alpha` scales the old dst, its `beta` the product.
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
            1.0,
            scale,
            false,
            false,
            false,
            threads,
        );
    }
}

/// `dst += plus`; columns of `plus` are contiguous, rows `stride` apart.
///
/// # Safety
/// As [`super::gemm_plus`].
pub unsafe fn add(
    (m, n, _): (usize, usize, usize),
    dst: Mat<*mut f64>,
    (plus, stride): (*const f64, usize),
) {
    for r in 0..m {
        for c in 0..n {
            // SAFETY: the caller's promise.
            unsafe { *dst.0.add(r * dst.1 + c * dst.2) += *plus.add(r * stride + c) };
        }
    }
}
