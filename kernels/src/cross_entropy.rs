//! Cross entropy over a vocabulary that is cut over ranks: the pieces between the collectives.
//!
//! Shoeybi et al. 2019 (Megatron-LM), §3. Max of all ranks' [`row_max`]; sum of all ranks' [`sum_exp_and_target`];
//! then the token's loss is ln(Σ exp) − (target − max), and [`cross_entropy_backward`] needs no collective.

use candle_core::{DType, Tensor};

use crate::float::{Float, by_float};
use crate::host::with_slice_mut;
use crate::simd::{max, sum_of, vectorize};
use crate::view::{View, copied, expect_dtype, expect_elements, rows_of, tensor};
use crate::{Error, Result, par};

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

/// The largest of the first `valid` logits of each row of `logits [.., v_local]`: `[rows]`; −∞ if `valid` is 0.
///
/// # Errors
/// If `valid` exceeds the columns, or `logits` is not contiguous or neither f32 nor f64.
pub fn row_max(logits: &Tensor, valid: usize) -> Result<Tensor> {
    const OP: &str = "row_max";
    let (rows, v) = dims(logits, valid, OP)?;
    by_float!(logits, OP, T => {
        let ls = View::<T>::new(logits, OP, "logits")?;
        let ls: &[T] = &ls;
        let mut out = vec![T::ZERO; rows];
        par::blocks(&mut out, par::rows_per_block(v), |start, out| vectorize(#[inline(always)] || {
            for (r, out) in out.iter_mut().enumerate() {
                let at = (start + r) * v;
                *out = max(&ls[at..at + valid]);
            }
        }));
        tensor(out, rows, logits)
    })
}

/// `[2, rows]`: Σ exp(l − max) over the first `valid` columns, and l_target − max where the target is one of them
/// (column 0 has id `first_column`), else 0. `max [rows]`, `targets [..]` u32.
///
/// # Errors
/// If shapes or dtypes do not fit, or an operand is not contiguous.
pub fn sum_exp_and_target(
    logits: &Tensor,
    max: &Tensor,
    targets: &Tensor,
    first_column: usize,
    valid: usize,
) -> Result<Tensor> {
    const OP: &str = "sum_exp_and_target";
    let (rows, v) = dims(logits, valid, OP)?;
    let targets = target_ids(targets, rows, OP)?;
    by_float!(logits, OP, T => {
        let max = per_row::<T>(max, rows, OP, "max")?;
        let ls = View::<T>::new(logits, OP, "logits")?;
        let ls: &[T] = &ls;
        let mut out = vec![T::ZERO; 2 * rows];
        let (sums, target_logits) = out.split_at_mut(rows);
        let block = par::rows_per_block(v);
        par::blocks2(sums, block, target_logits, block, |i, sums, target_logits| vectorize(#[inline(always)] || {
            for (r, (total, target)) in sums.iter_mut().zip(target_logits).enumerate() {
                let row = i * block + r;
                let l = &ls[row * v..row * v + valid];
                let m = max[row];
                *total = sum_of(l, #[inline(always)] |l| (l - m).fast_exp());
                if let Some(&l) = (targets[row] as usize).checked_sub(first_column).and_then(|column| l.get(column)) {
                    *target = l - m;
                }
            }
        }));
        tensor(out, (2, rows), logits)
    })
}

/// Replaces `logits` by their gradient `(exp(l − max) / sum_exp − [target]) · row_scale`; padding columns get 0.
/// `max` and `sum_exp` are those of all ranks, `row_scale` is dL/d(token loss); all `[rows]`.
///
/// # Errors
/// As [`sum_exp_and_target`].
pub fn cross_entropy_backward(
    logits: &Tensor,
    max: &Tensor,
    sum_exp: &Tensor,
    targets: &Tensor,
    row_scale: &Tensor,
    first_column: usize,
    valid: usize,
) -> Result<()> {
    const OP: &str = "cross_entropy_backward";
    let (rows, v) = dims(logits, valid, OP)?;
    let targets = target_ids(targets, rows, OP)?;
    by_float!(logits, OP, T => {
        let max = per_row::<T>(max, rows, OP, "max")?;
        let sum_exp = per_row::<T>(sum_exp, rows, OP, "sum_exp")?;
        let row_scale = per_row::<T>(row_scale, rows, OP, "row_scale")?;
        with_slice_mut::<T, _>(logits, OP, |ls| {
            let block = par::rows_per_block(v);
            par::blocks(ls, block * v, |start, ls| vectorize(#[inline(always)] || {
                for (r, l) in ls.chunks_exact_mut(v).enumerate() {
                    let row = start / v + r;
                    let (m, scale) = (max[row], row_scale[row]);
                    let factor = scale / sum_exp[row];
                    let (real, padding) = l.split_at_mut(valid);
                    for l in real.iter_mut() {
                        *l = (*l - m).fast_exp() * factor;
                    }
                    padding.fill(T::ZERO);
                    let target = (targets[row] as usize).checked_sub(first_column);
                    if let Some(l) = target.and_then(|column| real.get_mut(column)) {
                        *l -= scale;
                    }
                }
            }));
            Ok(())
        })
    })
}
