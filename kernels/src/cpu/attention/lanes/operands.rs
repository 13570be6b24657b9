//! Makes operands of blocks from rows of heads. Two steps suffice: pairing neighbouring rows
//! element by element, and transposing matrices of 32-bit words (a number, or a pair).

use std::arch::x86_64::*;

use super::BLOCK;
use super::engine::Engine;
use crate::cpu::attention::buffers::Rows;
use crate::cpu::gemm::lanes::transpose;

/// Number of elements of a copy that only engines of pairs need.
pub fn if_pairs<K: Engine>(n: usize) -> usize {
    if K::GROUP == 2 { n } else { 0 }
}

/// Copies `n` rows of a part of a tensor, from row `first` on, to `to [n, width]`. Rows from `s`
/// on, and columns beyond the part's, become zeros.
///
/// # Safety
/// As [`Engine`]'s functions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn plain<K: Engine>(
    part: Rows<K::Elem>,
    s: usize,
    first: usize,
    n: usize,
    to: &mut [K::Operand],
    width: usize,
) {
    assert!(to.len() >= n * width);
    for r in 0..n {
        let columns = if first + r < s { part.width } else { 0 };
        let at = part.elements.as_ptr().wrapping_add(part.at + (first + r) * part.stride);
        // SAFETY: row `first + r` lies in the tensor if it is below s; `to` has room for it.
        unsafe { K::row(at, columns, to.as_mut_ptr().add(r * width), width) };
    }
}

/// Transposes `from [rows, columns]` of words, both multiples of 16. Rows have the given strides.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn transpose_words(
    (rows, columns): (usize, usize),
    (from, from_stride): (*const i32, usize),
    (to, to_stride): (*mut i32, usize),
) {
    for r in (0..rows).step_by(16) {
        for c in (0..columns).step_by(16) {
            // SAFETY: the caller's promise.
            unsafe {
                let lines = std::array::from_fn(|l| {
                    _mm512_loadu_epi32(from.add((r + l) * from_stride + c))
                });
                for (l, line) in transpose(lines).into_iter().enumerate() {
                    _mm512_storeu_epi32(to.add((c + l) * to_stride + r), line);
                }
            }
        }
    }
}

/// Makes right operands from plain rows `[n, width]`: 32 rows each become the columns, and the
/// width is the inner dimension; `to [n / 32][width / GROUP][32][GROUP]`.
///
/// # Safety
/// As [`Engine`]'s functions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn turned<K: Engine>(
    rows: &[K::Operand],
    n: usize,
    width: usize,
    to: &mut [K::Operand],
) {
    let words = width / K::GROUP;
    assert!(rows.len() >= n * width && to.len() >= n * width);
    for block in 0..n / BLOCK {
        let at = block * BLOCK * width;
        // SAFETY: both have n / 32 blocks of 32 · width elements.
        unsafe {
            let (from, to) = (rows.as_ptr().add(at).cast(), to.as_mut_ptr().add(at).cast());
            transpose_words((BLOCK, words), (from, words), (to, BLOCK));
        }
    }
}

/// Makes a right operand from plain rows `[n, width]`, with the rows as inner dimension: `[n /
/// GROUP][width][GROUP]`. If GROUP is 1, these are the rows themselves; otherwise they are written
/// to `to`.
///
/// # Safety
/// As [`Engine`]'s functions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn paired<'a, K: Engine>(
    rows: &'a [K::Operand],
    n: usize,
    width: usize,
    to: &'a mut [K::Operand],
) -> &'a [K::Operand] {
    if K::GROUP == 1 {
        return rows;
    }
    assert!(rows.len() >= n * width && to.len() >= n * width);
    let (from, target) = (rows.as_ptr().cast::<u16>(), to.as_mut_ptr().cast::<u16>());
    for pair in 0..n / 2 {
        for c in (0..width).step_by(16) {
            // SAFETY: operands of pairs are bf16, and the elements lie within both slices.
            unsafe {
                let from = from.add(2 * pair * width + c);
                let low = _mm512_cvtepu16_epi32(_mm256_loadu_epi16(from.cast()));
                let high = _mm512_cvtepu16_epi32(_mm256_loadu_epi16(from.add(width).cast()));
                let words = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
                _mm512_storeu_epi32(target.add(2 * (pair * width + c)).cast(), words);
            }
        }
    }
    to
}

/// Makes the operand for [`Left::flipped`], `to [n / 32][width][32]`, from the result of [`paired`]
/// for rows `[n, width]`. Does nothing if GROUP is 1.
///
/// # Safety
/// As [`Engine`]'s functions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn flip<K: Engine>(
    paired: &[K::Operand],
    n: usize,
    width: usize,
    to: &mut [K::Operand],
) {
    if K::GROUP == 1 {
        return;
    }
    assert!(paired.len() >= n * width && to.len() >= n * width);
    for block in 0..n / BLOCK {
        let at = block * BLOCK * width;
        // SAFETY: both have n / 32 blocks of 16 · width words.
        unsafe {
            let (from, to) = (paired.as_ptr().add(at).cast(), to.as_mut_ptr().add(at).cast());
            transpose_words((BLOCK / 2, width), (from, width), (to, BLOCK / 2));
        }
    }
}
