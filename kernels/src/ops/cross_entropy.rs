//! Cross entropy over a vocabulary that is split over ranks: the local computations between the
//! collectives.
//!
//! Shoeybi et al. 2019 (Megatron-LM), §3. Every rank computes [`row_statistics`]. The maxima are
//! reduced over all ranks, [`rebase`] moves each rank's sums to them, and the sums are reduced.
//! Then the loss of a token is ln(Σ exp) − (target − max), and the gradient needs no collective.
//! Where one rank has the whole vocabulary, [`cross_entropy_fused`] computes both without
//! communication. Statistics are f32 (f64 for f64 logits), whatever the dtype of the logits.

use candle_core::Tensor;

use crate::tensor::arguments::cross_entropy::{Columns, Rows};
use crate::tensor::element::{by_elem, by_float};
use crate::tensor::trace;
use crate::tensor::view::{expect_apart, expect_elements, expect_shape, rows_of};
use crate::{Error, Result, cpu, on_gpu};

/// Rows and columns of `logits`; `valid` of the columns are not padding.
fn dims(logits: &Tensor, valid: usize, op: &'static str) -> Result<(usize, usize)> {
    let (rows, v) = rows_of(logits, op)?;
    if valid > v {
        let message = format!("{valid} valid columns of logits of shape {:?}", logits.dims());
        return Err(Error::shape(op, message));
    }
    Ok((rows, v))
}

/// Statistics of each row of `logits [.., v_local]`; a row is read from memory once. Returns
///
/// - `[rows]`: the largest of the first `valid` logits (−∞ if `valid` is 0);
/// - `[2, rows]`: Σ exp(l − max) over them; and l_target − max if the target is one of them, else
///   0.
///
/// `targets [..]` are u32; column 0 has id `first_column`.
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
    dims(logits, valid, OP)?;
    let columns = Columns { first: first_column, valid };
    on_gpu!(logits, cross_entropy::row_statistics(logits, targets, columns, OP));
    by_elem!(logits, OP, E => cpu::cross_entropy::row_statistics::<E>(logits, targets, columns, OP))
}

/// Moves this rank's sums `[2, rows]` of [`row_statistics`], in place, from its own maxima to those
/// of all ranks, `max [rows]`: Σ exp(l − max), and l_target − max where this rank holds the target.
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
    let columns = Columns { first: first_column, valid };
    on_gpu!(sums, cross_entropy::rebase(sums, own_max, max, targets, columns, OP));
    by_float!(sums, OP, T => cpu::cross_entropy::rebase::<T>(sums, own_max, max, targets, columns, OP))
}

/// Adds the tokens' losses, ln(Σ exp) − (l_target − max), weighted by `mask [rows]` (f32), to
/// `total [1]` (f64). `sums [2, rows]` are those of all ranks. A token of weight 0 adds nothing,
/// even if its loss is not finite.
///
/// # Errors
/// If shapes or dtypes do not fit, or an operand is not contiguous.
pub fn add_losses(total: &Tensor, sums: &Tensor, mask: &Tensor) -> Result<()> {
    const OP: &str = "add_losses";
    let rows = mask.elem_count();
    expect_elements(OP, "total", total, 1)?;
    expect_shape(OP, "sums", sums, &[2, rows])?;
    on_gpu!(sums, cross_entropy::add_losses(total, sums, mask, OP));
    by_float!(sums, OP, T => cpu::cross_entropy::add_losses::<T>(total, sums, mask, OP))
}

/// Replaces `logits` by their gradient `(exp(l − max) / sum_exp − [target]) · row_scale`; padding
/// columns get 0. `max` and `sum_exp` are those of all ranks, `row_scale` is dL/d(token loss); all
/// `[rows]` in the dtype of the statistics.
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
    dims(logits, valid, OP)?;
    let (of, columns) =
        (Rows { max, sum_exp, targets, row_scale }, Columns { first: first_column, valid });
    on_gpu!(logits, cross_entropy::backward(logits, None, of, columns, OP));
    by_elem!(logits, OP, E => cpu::cross_entropy::backward::<E>(logits, of, columns, OP))
}

/// As [`cross_entropy_backward`] of f32 `logits` (f64 for f64 `dlogits`), but writes the gradient
/// to `dlogits` in the dtype of `dlogits`, rounded once. `dlogits` has the shape of `logits`, lies
/// in another storage, and is overwritten.
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
    dims(logits, valid, OP)?;
    expect_shape(OP, "dlogits", dlogits, logits.dims())?;
    expect_apart(OP, "dlogits", dlogits, &[logits])?;
    let (of, columns) =
        (Rows { max, sum_exp, targets, row_scale }, Columns { first: first_column, valid });
    on_gpu!(dlogits, cross_entropy::backward(logits, Some(dlogits), of, columns, OP));
    by_elem!(dlogits, OP, E => cpu::cross_entropy::backward_into::<E>(dlogits, logits, of, columns, OP))
}

/// Statistics and gradient of rows with their whole vocabulary on this rank. Returns sums `[2,
/// rows]` as [`row_statistics`] does. The gradient replaces `logits` as in
/// [`cross_entropy_backward`], or, if `dlogits` is given, fills it as in
/// [`cross_entropy_backward_into`]. All numbers equal those of these functions, bit for bit; the
/// operands are the same as theirs. On a GPU f32 logits are read from memory once.
///
/// # Errors
/// As [`cross_entropy_backward_into`].
pub fn cross_entropy_fused(
    logits: &Tensor,
    dlogits: Option<&Tensor>,
    targets: &Tensor,
    row_scale: &Tensor,
    first_column: usize,
    valid: usize,
) -> Result<Tensor> {
    #[cfg(gpu)]
    if crate::tensor::gpu::runs_here(logits) {
        const OP: &str = "cross_entropy_fused";
        dims(logits, valid, OP)?;
        if let Some(dlogits) = dlogits {
            expect_shape(OP, "dlogits", dlogits, logits.dims())?;
            expect_apart(OP, "dlogits", dlogits, &[logits])?;
        }
        let columns = Columns { first: first_column, valid };
        let done =
            crate::cuda::cross_entropy::fused(logits, dlogits, targets, row_scale, columns, OP)?;
        if let Some(sums) = done {
            return Ok(sums);
        }
    }
    let (max, sums) = row_statistics(logits, targets, first_column, valid)?;
    let sum_exp = sums.get(0)?;
    match dlogits {
        None => {
            cross_entropy_backward(logits, &max, &sum_exp, targets, row_scale, first_column, valid)?
        }
        Some(to) => cross_entropy_backward_into(
            to,
            logits,
            &max,
            &sum_exp,
            targets,
            row_scale,
            first_column,
            valid,
        )?,
    }
    Ok(sums)
}
