//! Statistics of rows of logits, losses, and gradients.

use candle_core::{DType, Tensor};

use crate::Result;
use crate::cpu::lanes::{max, sum_of};
use crate::tensor::arguments::cross_entropy::{Columns, Rows};
use crate::tensor::element::{Elem, Float};
use crate::tensor::host::with_slice_mut;
use crate::tensor::output::Uninit;
use crate::tensor::parallel;
use crate::tensor::simd::vectorize;
use crate::tensor::view::{View, copied, expect_dtype, expect_elements, rows_of, tensor};

fn target_ids(targets: &Tensor, rows: usize, op: &'static str) -> Result<Vec<u32>> {
    expect_dtype(op, targets, DType::U32)?;
    expect_elements(op, "targets", targets, rows)?;
    copied(targets, op, "targets")
}

fn per_row<T: Float>(
    t: &Tensor,
    rows: usize,
    op: &'static str,
    what: &'static str,
) -> Result<Vec<T>> {
    expect_elements(op, what, t, rows)?;
    copied(t, op, what)
}

/// The column of a target, if it is one of this rank's first `valid` columns. Column 0 has id
/// `first_column`.
#[inline(always)]
fn target_column(target: u32, first_column: usize, valid: usize) -> Option<usize> {
    (target as usize).checked_sub(first_column).filter(|&column| column < valid)
}

/// Calls `f` with the index and the logits of every row. Its three results per row make `[rows]`
/// and `[2, rows]`.
fn by_row<E: Elem>(
    op: &'static str,
    logits: &Tensor,
    f: impl Fn(usize, &[E::Acc]) -> [E::Acc; 3] + Sync,
) -> Result<(Tensor, Tensor)> {
    let (rows, v) = rows_of(logits, op)?;
    let ls = View::<E>::new(logits, op, "logits")?;
    let ls: &[E] = &ls;
    let mut out = vec![[E::Acc::ZERO; 3]; rows];
    parallel::blocks(&mut out, parallel::rows_per_block(v), |start, out| {
        let mut wide = E::buffer(v);
        for (r, out) in out.iter_mut().enumerate() {
            let row = start + r;
            *out = f(row, E::widened(&ls[row * v..(row + 1) * v], &mut wide));
        }
    });
    let column = |c: usize| out.iter().map(move |row| row[c]);
    let sums = tensor(column(1).chain(column(2)).collect::<Vec<_>>(), (2, rows), logits)?;
    Ok((tensor(column(0).collect::<Vec<_>>(), rows, logits)?, sums))
}

/// The largest logit; −∞ if there are none.
fn max_line<T: Float>(l: &[T]) -> T {
    vectorize(
        #[inline(always)]
        || max(l),
    )
}

/// Σ exp(l − m).
fn sum_exp_line<T: Float>(l: &[T], m: T) -> T {
    vectorize(
        #[inline(always)]
        || {
            sum_of(
                l,
                #[inline(always)]
                |l| (l - m).fast_exp(),
            )
        },
    )
}

/// exp(l − m)·factor.
fn softmax_line<E: Elem>(l: &[E::Acc], m: E::Acc, factor: E::Acc, out: &mut [E]) {
    vectorize(
        #[inline(always)]
        || {
            Uninit::over(out).each(
                [],
                [l],
                #[inline(always)]
                |[], [l]| (l - m).fast_exp() * factor,
            );
        },
    );
}

/// As [`softmax_line`], in place.
fn softmax_in_place<T: Float>(l: &mut [T], m: T, factor: T) {
    vectorize(
        #[inline(always)]
        || l.iter_mut().for_each(|l| *l = (*l - m).fast_exp() * factor),
    );
}

pub fn row_statistics<E: Elem>(
    logits: &Tensor,
    targets: &Tensor,
    columns: Columns,
    op: &'static str,
) -> Result<(Tensor, Tensor)> {
    let (rows, _) = rows_of(logits, op)?;
    let Columns { first, valid } = columns;
    let targets = target_ids(targets, rows, op)?;
    by_row::<E>(op, logits, |row, l| {
        let m = max_line(&l[..valid]);
        let target = target_column(targets[row], first, valid);
        [m, sum_exp_line(&l[..valid], m), target.map_or(E::Acc::ZERO, |column| l[column] - m)]
    })
}

pub fn rebase<T: Float>(
    sums: &Tensor,
    own_max: &Tensor,
    max: &Tensor,
    targets: &Tensor,
    columns: Columns,
    op: &'static str,
) -> Result<()> {
    let Columns { first, valid } = columns;
    let rows = max.elem_count();
    let targets = target_ids(targets, rows, op)?;

    let (own, all) =
        (per_row::<T>(own_max, rows, op, "own_max")?, per_row::<T>(max, rows, op, "max")?);
    with_slice_mut::<T, _>(sums, op, |sums| {
        let (totals, target_logits) = sums.split_at_mut(rows);
        for row in 0..rows {
            // With no columns the sum is 0 and the maximum −∞.
            if own[row] > T::NEG_INFINITY {
                totals[row] *= (own[row] - all[row]).fast_exp();
            }
            if target_column(targets[row], first, valid).is_some() {
                target_logits[row] += own[row] - all[row];
            }
        }
        Ok(())
    })
}

pub fn add_losses<T: Float>(
    total: &Tensor,
    sums: &Tensor,
    mask: &Tensor,
    op: &'static str,
) -> Result<()> {
    let rows = mask.elem_count();

    let (sums, mask) = (copied::<T>(sums, op, "sums")?, copied::<f32>(mask, op, "mask")?);
    let (sum_exp, target) = sums.split_at(rows);
    with_slice_mut::<f64, _>(total, op, |total| {
        for ((sum_exp, target), mask) in
            sum_exp.iter().zip(target).zip(mask).filter(|(_, mask)| *mask != 0.0)
        {
            total[0] += (Float::ln(*sum_exp) - *target).f64() * f64::from(mask);
        }
        Ok(())
    })
}

/// Inputs of the gradient of a row's logits.
struct RowGradient<T> {
    max: T,
    /// dL/d(token loss) / Σ exp.
    factor: T,
    scale: T,
    target: Option<usize>,
}

impl<T: Float> RowGradient<T> {
    /// The gradient of the target's logit `l`.
    fn of_target(&self, l: T) -> T {
        (l - self.max).fast_exp() * self.factor - self.scale
    }
}

/// The [`RowGradient`]s of all rows.
fn gradients<T: Float>(
    op: &'static str,
    Rows { max, sum_exp, targets, row_scale }: Rows,
    rows: usize,
    Columns { first, valid }: Columns,
) -> Result<Vec<RowGradient<T>>> {
    let targets = target_ids(targets, rows, op)?;
    let max = per_row::<T>(max, rows, op, "max")?;
    let sum_exp = per_row::<T>(sum_exp, rows, op, "sum_exp")?;
    let row_scale = per_row::<T>(row_scale, rows, op, "row_scale")?;
    let row = |r: usize| RowGradient {
        max: max[r],
        factor: row_scale[r] / sum_exp[r],
        scale: row_scale[r],
        target: target_column(targets[r], first, valid),
    };
    Ok((0..rows).map(row).collect())
}

pub fn backward<E: Elem>(
    logits: &Tensor,
    of: Rows,
    columns: Columns,
    op: &'static str,
) -> Result<()> {
    let (rows, v) = rows_of(logits, op)?;
    let valid = columns.valid;
    let rows = gradients::<E::Acc>(op, of, rows, columns)?;
    with_slice_mut::<E, _>(logits, op, |ls| {
        parallel::blocks(ls, parallel::rows_per_block(v) * v, |start, ls| {
            let mut wide = E::buffer(E::STAGE);
            for (l, row) in ls.chunks_exact_mut(v).zip(&rows[start / v..]) {
                let target = row.target.map(|column| (column, row.of_target(l[column].load())));
                let (real, padding) = l.split_at_mut(valid);
                for l in real.chunks_mut(E::STAGE) {
                    E::update(l, &mut wide, |l| softmax_in_place(l, row.max, row.factor));
                }
                padding.fill(E::store(E::Acc::ZERO));
                if let Some((column, value)) = target {
                    real[column] = E::store(value);
                }
            }
        });
        Ok(())
    })
}

pub fn backward_into<E: Elem>(
    dlogits: &Tensor,
    logits: &Tensor,
    of: Rows,
    columns: Columns,
    op: &'static str,
) -> Result<()> {
    let (rows, v) = rows_of(logits, op)?;
    let valid = columns.valid;
    let rows = gradients::<E::Acc>(op, of, rows, columns)?;
    let ls = View::<E::Acc>::new(logits, op, "logits")?;
    let ls: &[E::Acc] = &ls;
    with_slice_mut::<E, _>(dlogits, op, |ds| {
        parallel::blocks(ds, parallel::rows_per_block(v) * v, |start, ds| {
            let inputs = ls[start..].chunks_exact(v).zip(&rows[start / v..]);
            for (d, (l, row)) in ds.chunks_exact_mut(v).zip(inputs) {
                let (real, padding) = d.split_at_mut(valid);
                softmax_line(&l[..valid], row.max, row.factor, real);
                padding.fill(E::store(E::Acc::ZERO));
                if let Some(column) = row.target {
                    real[column] = E::store(row.of_target(l[column]));
                }
            }
        });
        Ok(())
    })
}
