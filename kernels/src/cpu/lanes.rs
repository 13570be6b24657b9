//! Sums and maxima of rows over [`LANES`] lanes, with the same tree of additions on every
//! instruction set.

use crate::tensor::element::{Elem, Float};
use crate::tensor::simd::LANES;

/// Adds lanes pairwise, always in the same tree.
#[inline(always)]
pub fn tree<T: Float>(mut acc: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            acc[l] += acc[l + width];
        }
        width /= 2;
    }
    acc[0]
}

/// Σ f(aᵢ) over [`LANES`] lanes, for an `f` of a few operations.
#[inline(always)]
pub fn sum<E: Elem>(a: &[E], f: impl Fn(E::Acc) -> E::Acc) -> E::Acc {
    let mut acc = [E::Acc::ZERO; LANES];
    let chunks = a.chunks_exact(LANES);
    let rest = chunks.remainder();
    for c in chunks {
        for l in 0..LANES {
            acc[l] += f(c[l].load());
        }
    }
    for (acc, &v) in acc.iter_mut().zip(rest) {
        *acc += f(v.load());
    }
    // Without `black_box`, LLVM sees that the tree adds pairs, and keeps pairs rather than whole
    // vectors. That takes twice as long in bf16.
    tree(std::hint::black_box(acc))
}

/// Σ f(aᵢ, bᵢ) over [`LANES`] lanes.
#[inline(always)]
pub fn sum2<E: Elem>(a: &[E], b: &[E], f: impl Fn(E::Acc, E::Acc) -> E::Acc) -> E::Acc {
    let mut acc = [E::Acc::ZERO; LANES];
    let (ca, cb) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let (ra, rb) = (ca.remainder(), cb.remainder());
    for (a, b) in ca.zip(cb) {
        for l in 0..LANES {
            acc[l] += f(a[l].load(), b[l].load());
        }
    }
    for ((acc, &a), &b) in acc.iter_mut().zip(ra).zip(rb) {
        *acc += f(a.load(), b.load());
    }
    tree(acc)
}

/// Σ f(aᵢ) as [`sum`], for an `f` that LLVM vectorizes only in a separate loop.
#[inline(always)]
pub fn sum_of<E: Elem>(a: &[E], f: impl Fn(E::Acc) -> E::Acc) -> E::Acc {
    const CHUNK: usize = 32 * LANES;
    let mut buffer = [E::Acc::ZERO; CHUNK];
    let mut acc = [E::Acc::ZERO; LANES];
    for chunk in a.chunks(CHUNK) {
        let buffer = &mut buffer[..chunk.len()];
        for (out, &v) in buffer.iter_mut().zip(chunk) {
            *out = f(v.load());
        }
        let lanes = buffer.chunks_exact(LANES);
        let rest = lanes.remainder();
        for c in lanes {
            for l in 0..LANES {
                acc[l] += c[l];
            }
        }
        for (acc, &v) in acc.iter_mut().zip(rest) {
            *acc += v;
        }
    }
    tree(acc)
}

/// The largest element; −∞ if there are none. NaNs are ignored.
#[inline(always)]
pub fn max<E: Elem>(a: &[E]) -> E::Acc {
    let mut acc = [E::Acc::NEG_INFINITY; LANES];
    let chunks = a.chunks_exact(LANES);
    let rest = chunks.remainder();
    for c in chunks {
        for l in 0..LANES {
            let v = c[l].load();
            acc[l] = if v > acc[l] { v } else { acc[l] };
        }
    }
    for (acc, &v) in acc.iter_mut().zip(rest) {
        let v = v.load();
        *acc = if v > *acc { v } else { *acc };
    }
    let mut best = acc[0];
    for &v in &acc[1..] {
        best = if v > best { v } else { best };
    }
    best
}
