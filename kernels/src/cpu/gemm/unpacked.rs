//! Products of small f32 matrices that lie in the nearest caches, as attention's tiles do, on one
//! thread. Operands are read unpacked: each is used only once or twice, and packing would make the
//! product take twice as long.

use std::ops::Range;

use super::Mat;
#[cfg(target_arch = "x86_64")]
use super::avx2::Avx2;
use super::portable::Portable;
#[cfg(target_arch = "x86_64")]
use crate::tensor::simd::Isa;

/// A micro-kernel that reads unpacked operands.
pub trait Unpacked {
    /// Most rows of a tile.
    const MR: usize;
    /// Columns of a tile, at most [`COLUMNS`].
    const NR: usize;

    /// `c [rows, NR] = a [rows, k] · b [k, NR]`, plus the old `c` if `add`; terms are added one
    /// after the other. `b` and `c` come with their row strides.
    ///
    /// # Safety
    /// The machine has the instruction set; the matrices can be read, and `c` written.
    unsafe fn multiply(
        rows: usize,
        k: usize,
        a: Mat<*const f32>,
        b: (*const f32, usize),
        c: (*mut f32, usize),
        add: bool,
    );
}

const COLUMNS: usize = 16;
const ROWS: usize = 6;
/// Inner dimension per copy of columns, if they are fewer than a tile's.
const COPIED: usize = 64;

/// The causal part of a product with a tile on the diagonal. The rest may be skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CausalPart {
    /// Of row r of the result, the first n + r + 1 columns; others may have any value.
    Columns(usize),
    /// Of row r of `a`, the first n + r + 1 elements; others are 0.
    First(usize),
    /// Of row r of `a`, the elements from index r − n on; others are 0.
    From(usize),
}

impl CausalPart {
    /// The first of `rows` with visible elements in the columns from `column` on.
    fn first_row(self, column: usize, rows: usize) -> usize {
        match self {
            Self::Columns(n) => column.saturating_sub(n).min(rows),
            Self::First(_) | Self::From(_) => 0,
        }
    }

    /// The range of the inner dimension, of length `k`, that contributes to these rows.
    fn inner(self, k: usize, rows: Range<usize>) -> Range<usize> {
        match self {
            Self::Columns(_) => 0..k,
            Self::First(n) => 0..k.min(n + rows.end),
            Self::From(n) => rows.start.saturating_sub(n).min(k)..k,
        }
    }
}

/// The part `seen` of `dst [m, n] = a [m, k] · b [k, n]`, plus the old `dst` if `accumulate`. `dst`
/// and `b` have contiguous rows and come with their row strides.
///
/// # Safety
/// Every element of the three matrices can be read (`a`, `b`) or written (`dst`); `dst` does not
/// overlap the others.
pub unsafe fn product(
    shape: (usize, usize, usize),
    seen: CausalPart,
    dst: (*mut f32, usize),
    accumulate: bool,
    a: Mat<*const f32>,
    b: (*const f32, usize),
) {
    // SAFETY: the caller's promise; the machine has the detected instruction set.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if Isa::detected() >= Isa::Avx2 {
            return by_tiles::<Avx2>(shape, seen, dst, accumulate, a, b);
        }
        by_tiles::<Portable>(shape, seen, dst, accumulate, a, b);
    }
}

/// # Safety
/// As [`product`], and the machine has the instruction set.
unsafe fn by_tiles<K: Unpacked>(
    (m, n, k): (usize, usize, usize),
    seen: CausalPart,
    (dst, stride): (*mut f32, usize),
    accumulate: bool,
    a: Mat<*const f32>,
    (b, b_row): (*const f32, usize),
) {
    const { assert!(K::MR <= ROWS && K::NR <= COLUMNS) };
    for column in (0..n).step_by(K::NR) {
        let count = K::NR.min(n - column);
        for row in (seen.first_row(column, m)..m).step_by(K::MR) {
            let rows = row..m.min(row + K::MR);
            let inner = seen.inner(k, rows.clone());
            let (rows, k, a) = (rows.len(), inner.len(), a.at(row, inner.start));
            // SAFETY: the caller's promise.
            unsafe {
                let (dst, b) =
                    (dst.add(row * stride + column), b.wrapping_add(inner.start * b_row + column));
                if count == K::NR {
                    K::multiply(rows, k, a, (b, b_row), (dst, stride), accumulate);
                } else {
                    narrow::<K>((rows, count, k), a, (b, b_row), (dst, stride), accumulate);
                }
            }
        }
    }
}

/// As [`Unpacked::multiply`], for fewer columns, through copies of them and of their sums.
///
/// # Safety
/// As [`Unpacked::multiply`].
unsafe fn narrow<K: Unpacked>(
    (rows, columns, k): (usize, usize, usize),
    a: Mat<*const f32>,
    (b, b_row): (*const f32, usize),
    (c, c_row): (*mut f32, usize),
    add: bool,
) {
    let (mut copy, mut sums) = ([0.0; COPIED * COLUMNS], [0.0; ROWS * COLUMNS]);
    // SAFETY: the caller's promise; both buffers have rows of NR elements.
    unsafe {
        if add {
            for r in 0..rows {
                c.add(r * c_row).copy_to_nonoverlapping(sums.as_mut_ptr().add(r * K::NR), columns);
            }
        }
        for first in (0..k).step_by(COPIED) {
            let inner = COPIED.min(k - first);
            for i in 0..inner {
                let line = b.add((first + i) * b_row);
                (0..columns).for_each(|column| copy[i * K::NR + column] = *line.add(column));
            }
            K::multiply(
                rows,
                inner,
                a.at(0, first),
                (copy.as_ptr(), K::NR),
                (sums.as_mut_ptr(), K::NR),
                true,
            );
        }
        for r in 0..rows {
            sums.as_ptr().add(r * K::NR).copy_to_nonoverlapping(c.add(r * c_row), columns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whole numbers, so that every sum is exact.
    fn numbers(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i * 37 % 23) as f32 - 11.0).collect()
    }

    fn check<K: Unpacked>() {
        for (m, n, k) in [
            (1, 1, 1),
            (6, 16, 64),
            (64, 128, 64),
            (64, 122, 80),
            (13, 7, 200),
            (61, 33, 61),
            (5, 24, 0),
        ] {
            for seen in [
                CausalPart::Columns(3),
                CausalPart::Columns(0),
                CausalPart::First(0),
                CausalPart::First(70),
                CausalPart::From(0),
                CausalPart::From(9),
            ] {
                for (accumulate, across) in
                    [(false, false), (true, false), (false, true), (true, true)]
                {
                    let counts = |r: usize, i: usize| match seen {
                        CausalPart::Columns(_) => true,
                        CausalPart::First(before) => i <= before + r,
                        CausalPart::From(before) => i + before >= r,
                    };
                    // Row or column strides are a little longer than the rows or columns.
                    let (row, column) = if across { (1, m + 2) } else { (k + 3, 1) };
                    let (mut a, b, old) =
                        (numbers(m * k + 3 * (m + k)), numbers(k * (n + 1)), numbers(m * (n + 5)));
                    let places = || (0..m).flat_map(|r| (0..k).map(move |i| (r, i)));
                    places()
                        .filter(|&(r, i)| !counts(r, i))
                        .for_each(|(r, i)| a[r * row + i * column] = 0.0);
                    let mut c = old.clone();
                    // SAFETY: the callers have checked the machine; the matrices have these
                    // lengths.
                    unsafe {
                        let (a, b) = (Mat(a.as_ptr(), row, column), (b.as_ptr(), n + 1));
                        by_tiles::<K>((m, n, k), seen, (c.as_mut_ptr(), n + 5), accumulate, a, b);
                    }
                    for at in 0..m * (n + 5) {
                        let (r, j) = (at / (n + 5), at % (n + 5));
                        let product = |i: usize| a[r * row + i * column] * b[i * (n + 1) + j];
                        let want = match j < n {
                            true => {
                                (0..k).map(product).sum::<f32>()
                                    + if accumulate { old[at] } else { 0.0 }
                            }
                            false => old[at],
                        };
                        let left_out =
                            matches!(seen, CausalPart::Columns(before) if j < n && j > before + r);
                        assert!(
                            left_out || c[at] == want,
                            "{m} × {n} × {k}, {seen:?}, {accumulate}: ({r}, {j}) is {} not {want}",
                            c[at]
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn products_on_the_diagonal_are_those_of_whole_matrices_and_nothing_else_is_written() {
        check::<Portable>();
        #[cfg(target_arch = "x86_64")]
        if Isa::supported() >= Isa::Avx2 {
            check::<Avx2>();
        }
    }
}
