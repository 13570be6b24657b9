//! Cross entropy over a vocabulary that is cut over ranks: the pieces between the collectives.
//!
//! Shoeybi et al. 2019 (Megatron-LM), §3. [`row_statistics`] of every rank; the max of all ranks' maxima, to which [`rebase`]
//! moves the sums; the sum of all ranks' sums. Then the token's loss is ln(Σ exp) − (target − max), and the gradient needs no
//! collective. Where one rank has the whole vocabulary, [`cross_entropy_at_once`] makes both without asking anyone in between.
//! Statistics are f32 (f64 for f64 logits), whatever the logits are stored in.

use candle_core::{DType, Tensor};

#[cfg(gpu)]
use crate::cuda::cross_entropy::{Columns, Rows};
use crate::tensor::element::{Elem, Float, by_elem, by_float};
use crate::tensor::host::with_slice_mut;
use crate::tensor::output::Unwritten;
use crate::tensor::simd::{max, sum_of, vectorize};
use crate::tensor::view::{View, copied, expect_apart, expect_dtype, expect_elements, expect_shape, rows_of, tensor};
use crate::tensor::{parallel, trace};
use crate::{Error, Result, on_gpu};

/// Rows and columns of `logits`, of which `valid` columns are real.
fn dims(logits: &Tensor, valid: usize, op: &'static str) -> Result<(usize, usize)> {
    let (rows, v) = rows_of(logits, op)?;
    if valid > v {
        let message = format!("{valid} valid columns of logits of shape {:?}", logits.dims());
        return Err(Error::shape(op, message));
    }
    Ok((rows, v))
}

fn target_ids(targets: &Tensor, rows: usize, op: &'static str) -> Result<Vec<u32>> {
    expect_dtype(op, targets, DType::U32)?;
    expect_elements(op, "targets", targets, rows)?;
    copied(targets, op, "targets")
}

fn per_row<T: Float>(t: &Tensor, rows: usize, op: &'static str, what: &'static str) -> Result<Vec<T>> {
    expect_elements(op, what, t, rows)?;
    copied(t, op, what)
}

/// The column of a target among the first `valid` ones of this rank, whose first has id `first_column`.
#[inline(always)]
fn target_column(target: u32, first_column: usize, valid: usize) -> Option<usize> {
    (target as usize).checked_sub(first_column).filter(|&column| column < valid)
}

/// Calls `f` with the number and the logits of every row, and with its element of three results; these make `[rows]` and
/// `[2, rows]`.
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

/// The largest logit, −∞ of none.
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
            Unwritten::over(out).each(
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

/// Of each row of `logits [.., v_local]`: the largest of the first `valid` logits, `[rows]` (−∞ if `valid` is 0); and `[2, rows]`:
/// Σ exp(l − max) over them, and l_target − max where the target (`targets [..]` u32; column 0 has id `first_column`) is one of
/// them, else 0. A row is read from memory once.
///
/// # Errors
/// If shapes or dtypes do not fit, `valid` exceeds the columns, or an operand is not contiguous.
pub fn row_statistics(
    logits: &Tensor,
    targets: &Tensor,
    first_column: usize,
    valid: usize,
) -> Result<(Tensor, Tensor)> {
    let _span = trace::moves("row_statistics", &[logits]);
    const OP: &str = "row_statistics";
    let (rows, _) = dims(logits, valid, OP)?;
    on_gpu!(logits, cross_entropy::row_statistics(logits, targets, Columns { first: first_column, valid }, OP));
    let targets = target_ids(targets, rows, OP)?;
    by_elem!(logits, OP, E => by_row::<E>(OP, logits, |row, l| {
        let m = max_line(&l[..valid]);
        let target = target_column(targets[row], first_column, valid);
        [m, sum_exp_line(&l[..valid], m), target.map_or(<E as Elem>::Acc::ZERO, |column| l[column] - m)]
    }))
}

/// Moves this rank's sums `[2, rows]` of [`row_statistics`], in place, from its own maxima to those of all ranks, `max [rows]`:
/// Σ exp(l − max), and l_target − max where this rank holds the target.
///
/// # Errors
/// If shapes or dtypes do not fit, or an operand is not contiguous.
pub fn rebase(
    sums: &Tensor,
    own_max: &Tensor,
    max: &Tensor,
    targets: &Tensor,
    first_column: usize,
    valid: usize,
) -> Result<()> {
    const OP: &str = "rebase";
    let rows = max.elem_count();
    expect_shape(OP, "sums", sums, &[2, rows])?;
    on_gpu!(sums, cross_entropy::rebase(sums, own_max, max, targets, Columns { first: first_column, valid }, OP));
    let targets = target_ids(targets, rows, OP)?;
    by_float!(sums, OP, T => {
        let (own, all) = (per_row::<T>(own_max, rows, OP, "own_max")?, per_row::<T>(max, rows, OP, "max")?);
        with_slice_mut::<T, _>(sums, OP, |sums| {
            let (totals, target_logits) = sums.split_at_mut(rows);
            for row in 0..rows {
                // Of no column the sum is 0, and its maximum −∞.
                if own[row] > T::NEG_INFINITY {
                    totals[row] *= (own[row] - all[row]).fast_exp();
                }
                if target_column(targets[row], first_column, valid).is_some() {
                    target_logits[row] += own[row] - all[row];
                }
            }
            Ok(())
        })
    })
}

/// Adds the losses of tokens, ln(Σ exp) − (l_target − max), weighted by `mask [rows]` (f32), to `total [1]` (f64), from sums `[2, rows]` of
/// all ranks. What has no weight counts nothing, even where it is not finite.
///
/// # Errors
/// If shapes or dtypes do not fit, or an operand is not contiguous.
pub fn add_losses(total: &Tensor, sums: &Tensor, mask: &Tensor) -> Result<()> {
    const OP: &str = "add_losses";
    let rows = mask.elem_count();
    expect_elements(OP, "total", total, 1)?;
    expect_shape(OP, "sums", sums, &[2, rows])?;
    on_gpu!(sums, cross_entropy::add_losses(total, sums, mask, OP));
    by_float!(sums, OP, T => {
        let (sums, mask) = (copied::<T>(sums, OP, "sums")?, copied::<f32>(mask, OP, "mask")?);
        let (sum_exp, target) = sums.split_at(rows);
        with_slice_mut::<f64, _>(total, OP, |total| {
            for ((sum_exp, target), mask) in sum_exp.iter().zip(target).zip(mask).filter(|(_, mask)| *mask != 0.0) {
                total[0] += (Float::ln(*sum_exp) - *target).f64() * f64::from(mask);
            }
            Ok(())
        })
    })
}

/// What the gradient of a row's logits is made of.
struct RowGradient<T> {
    max: T,
    /// dL/d(token loss) / Σ exp
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
    (max, sum_exp, row_scale): (&Tensor, &Tensor, &Tensor),
    targets: &Tensor,
    rows: usize,
    first_column: usize,
    valid: usize,
) -> Result<Vec<RowGradient<T>>> {
    let targets = target_ids(targets, rows, op)?;
    let max = per_row::<T>(max, rows, op, "max")?;
    let sum_exp = per_row::<T>(sum_exp, rows, op, "sum_exp")?;
    let row_scale = per_row::<T>(row_scale, rows, op, "row_scale")?;
    let row = |r: usize| RowGradient {
        max: max[r],
        factor: row_scale[r] / sum_exp[r],
        scale: row_scale[r],
        target: target_column(targets[r], first_column, valid),
    };
    Ok((0..rows).map(row).collect())
}

/// Replaces `logits` by their gradient `(exp(l − max) / sum_exp − [target]) · row_scale`; padding columns get 0.
/// `max` and `sum_exp` are those of all ranks, `row_scale` is dL/d(token loss); all `[rows]` in the dtype of the statistics.
///
/// # Errors
/// As [`row_statistics`].
pub fn cross_entropy_backward(
    logits: &Tensor,
    max: &Tensor,
    sum_exp: &Tensor,
    targets: &Tensor,
    row_scale: &Tensor,
    first_column: usize,
    valid: usize,
) -> Result<()> {
    let _span = trace::moves("cross_entropy_backward", &[logits, logits]);
    const OP: &str = "cross_entropy_backward";
    let (rows, v) = dims(logits, valid, OP)?;
    #[cfg(gpu)]
    let (of, columns) = (Rows { max, sum_exp, targets, row_scale }, Columns { first: first_column, valid });
    on_gpu!(logits, cross_entropy::backward(logits, None, of, columns, OP));
    by_elem!(logits, OP, E => {
        type Acc = <E as Elem>::Acc;
        let rows = gradients::<Acc>(OP, (max, sum_exp, row_scale), targets, rows, first_column, valid)?;
        with_slice_mut::<E, _>(logits, OP, |ls| {
            parallel::blocks(ls, parallel::rows_per_block(v) * v, |start, ls| {
                let mut wide = E::buffer(E::STAGE);
                for (l, row) in ls.chunks_exact_mut(v).zip(&rows[start / v..]) {
                    let target = row.target.map(|column| (column, row.of_target(l[column].load())));
                    let (real, padding) = l.split_at_mut(valid);
                    for l in real.chunks_mut(E::STAGE) {
                        E::update(l, &mut wide, |l| softmax_in_place(l, row.max, row.factor));
                    }
                    padding.fill(E::store(Acc::ZERO));
                    if let Some((column, value)) = target {
                        real[column] = E::store(value);
                    }
                }
            });
            Ok(())
        })
    })
}

/// As [`cross_entropy_backward`] of f32 `logits` (f64 for f64 `dlogits`), written to `dlogits` in its own dtype, rounded once.
/// `dlogits` has the shape of `logits`, keeps nothing of what it held, and lies in another storage.
///
/// # Errors
/// As [`cross_entropy_backward`]; also if the shapes differ.
pub fn cross_entropy_backward_into(
    dlogits: &Tensor,
    logits: &Tensor,
    max: &Tensor,
    sum_exp: &Tensor,
    targets: &Tensor,
    row_scale: &Tensor,
    first_column: usize,
    valid: usize,
) -> Result<()> {
    let _span = trace::moves("cross_entropy_backward_into", &[logits, dlogits]);
    const OP: &str = "cross_entropy_backward_into";
    let (rows, v) = dims(logits, valid, OP)?;
    expect_shape(OP, "dlogits", dlogits, logits.dims())?;
    expect_apart(OP, "dlogits", dlogits, &[logits])?;
    #[cfg(gpu)]
    let (of, columns) = (Rows { max, sum_exp, targets, row_scale }, Columns { first: first_column, valid });
    on_gpu!(dlogits, cross_entropy::backward(logits, Some(dlogits), of, columns, OP));
    by_elem!(dlogits, OP, E => {
        type Acc = <E as Elem>::Acc;
        let rows = gradients::<Acc>(OP, (max, sum_exp, row_scale), targets, rows, first_column, valid)?;
        let ls = View::<Acc>::new(logits, OP, "logits")?;
        let ls: &[Acc] = &ls;
        with_slice_mut::<E, _>(dlogits, OP, |ds| {
            parallel::blocks(ds, parallel::rows_per_block(v) * v, |start, ds| {
                let inputs = ls[start..].chunks_exact(v).zip(&rows[start / v..]);
                for (d, (l, row)) in ds.chunks_exact_mut(v).zip(inputs) {
                    let (real, padding) = d.split_at_mut(valid);
                    softmax_line(&l[..valid], row.max, row.factor, real);
                    padding.fill(E::store(Acc::ZERO));
                    if let Some(column) = row.target {
                        real[column] = E::store(row.of_target(l[column]));
                    }
                }
            });
            Ok(())
        })
    })
}

/// Statistics and gradient of rows whose whole vocabulary is here: sums `[2, rows]` as of [`row_statistics`], and `logits` replaced by their
/// gradient as by [`cross_entropy_backward`], or `dlogits`, if given, filled with it as by [`cross_entropy_backward_into`]; the same numbers,
/// bit for bit. Operands are as of these. On a GPU f32 logits come from memory once.
///
/// # Errors
/// As [`cross_entropy_backward_into`].
pub fn cross_entropy_at_once(
    logits: &Tensor,
    dlogits: Option<&Tensor>,
    targets: &Tensor,
    row_scale: &Tensor,
    first_column: usize,
    valid: usize,
) -> Result<Tensor> {
    #[cfg(gpu)]
    if crate::tensor::gpu::runs_here(logits) {
        const OP: &str = "cross_entropy_at_once";
        dims(logits, valid, OP)?;
        if let Some(dlogits) = dlogits {
            expect_shape(OP, "dlogits", dlogits, logits.dims())?;
            expect_apart(OP, "dlogits", dlogits, &[logits])?;
        }
        let columns = Columns { first: first_column, valid };
        let done = crate::cuda::cross_entropy::at_once(logits, dlogits, targets, row_scale, columns, OP)?;
        if let Some(sums) = done {
            return Ok(sums);
        }
    }
    let (max, sums) = row_statistics(logits, targets, first_column, valid)?;
    let sum_exp = sums.get(0)?;
    match dlogits {
        None => cross_entropy_backward(logits, &max, &sum_exp, targets, row_scale, first_column, valid)?,
        Some(to) => cross_entropy_backward_into(to, logits, &max, &sum_exp, targets, row_scale, first_column, valid)?,
    }
    Ok(sums)
}
