//! Sums over rows: the gradients of parameters that all rows share.

use candle_core::{Tensor, WithDType};

use crate::Result;
use crate::tensor::element::{Elem, Float};
use crate::tensor::host::with_slice_mut;
use crate::tensor::parallel;
use crate::tensor::simd::{LANES, prefetch, vectorize};
use crate::tensor::view::{View, expect_dtype, rows_of};

/// Rows per partial sum of a reduction over rows; fixed, so that results do not depend on the
/// number of threads.
pub(crate) const ROW_BLOCK: usize = 64;

pub fn bias_grad<E: Elem>(dy: &Tensor, db: &Tensor, op: &'static str) -> Result<()> {
    let (rows, n) = rows_of(dy, op)?;
    expect_dtype(op, db, E::Acc::DTYPE)?;
    let (dys, apart) = View::<E>::rows(dy, op, "dy")?;
    let mut partials = vec![E::Acc::ZERO; rows.div_ceil(ROW_BLOCK) * n];
    let dys: &[E] = &dys;
    parallel::blocks(&mut partials, n, |start, partial| {
        let first = start / n.max(1) * ROW_BLOCK;
        let last = (first + ROW_BLOCK).min(rows);
        vectorize(
            #[inline(always)]
            || {
                let row = |row: usize| &dys[row * apart..][..n];
                let together = first + (last - first) / ROWS_AT_ONCE * ROWS_AT_ONCE;
                for first in (first..together).step_by(ROWS_AT_ONCE) {
                    add_rows(
                        partial,
                        std::array::from_fn::<_, ROWS_AT_ONCE, _>(|i| row(first + i)),
                        ROWS_AT_ONCE * apart,
                    );
                }
                (together..last).for_each(|last| add(partial, row(last)));
            },
        );
    });
    accumulate(&partials, n, 0, n, db, op)
}

/// Rows that [`bias_grad`] adds to a partial sum per pass over that sum, in order.
const ROWS_AT_ONCE: usize = 8;

/// As [`add`] of each of `rows` in order, with the sums in registers. Prefetches the rows that lie
/// `ahead` elements later.
#[inline(always)]
fn add_rows<E: Elem, const R: usize>(acc: &mut [E::Acc], rows: [&[E]; R], ahead: usize) {
    let n = acc.len();
    let rows = rows.map(|row| row[..n].as_chunks::<LANES>());
    let (blocks, rest) = acc.as_chunks_mut::<LANES>();
    for (i, block) in blocks.iter_mut().enumerate() {
        let mut sums = *block;
        for (row, _) in rows {
            prefetch(row[i].as_ptr().wrapping_add(ahead));
            for l in 0..LANES {
                sums[l] += row[i][l].load();
            }
        }
        *block = sums;
    }
    for (_, row) in rows {
        add(rest, row);
    }
}

#[inline(always)]
fn add<E: Elem>(acc: &mut [E::Acc], x: &[E]) {
    for (a, &v) in acc.iter_mut().zip(x) {
        *a += v.load();
    }
}

/// Sums the columns `first .. first + n` of partial sums of `width` columns, in order, and adds the
/// result to `grad`.
pub(crate) fn accumulate<T: Float>(
    partials: &[T],
    width: usize,
    first: usize,
    n: usize,
    grad: &Tensor,
    op: &'static str,
) -> Result<()> {
    let mut total = vec![T::ZERO; n];
    vectorize(
        #[inline(always)]
        || {
            for partial in partials.chunks_exact(width.max(1)) {
                add(&mut total, &partial[first..first + n]);
            }
        },
    );
    with_slice_mut::<T, _>(grad, op, |grad| {
        add(grad, &total);
        Ok(())
    })
}
