//! Linear layers: forward, input gradient, and weight and bias gradients that accumulate in place.

use candle_core::Tensor;

use crate::float::{Float, by_float};
use crate::gemm::{Mat, all_threads, gemm};
use crate::host::with_slice_mut;
use crate::simd::vectorize;
use crate::view::{View, copied, expect_dtype, expect_shape, rows_of, tensor, with_last};
use crate::{Error, Result, par};

/// Rows per partial sum of a reduction over rows; fixed, so that results do not depend on the number of threads.
pub(crate) const ROW_BLOCK: usize = 64;

fn weight_dims(w: &Tensor, op: &'static str) -> Result<(usize, usize)> {
    match w.dims() {
        &[n, k] if n > 0 => Ok((n, k)),
        dims => Err(Error::shape(op, format!("weight has shape {dims:?} where [n, k] is needed"))),
    }
}

/// `y [.., n] = x [.., k] · wᵀ + bias` with `w [n, k]`, `bias [n]`.
///
/// # Errors
/// If shapes contradict each other, dtypes differ or are neither f32 nor f64, or an operand is not contiguous.
pub fn linear(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    const OP: &str = "linear";
    let (rows, k) = rows_of(x, OP)?;
    let (n, wk) = weight_dims(w, OP)?;
    if k != wk {
        let message = format!("x has shape {:?} and weight {:?}; their last dimensions must agree", x.dims(), w.dims());
        return Err(Error::shape(OP, message));
    }
    if let Some(bias) = bias {
        expect_shape(OP, "bias", bias, &[n])?;
    }
    by_float!(x, OP, T => {
        let bias = bias.map(|b| copied::<T>(b, OP, "bias")).transpose()?;
        let (xs, ws) = (View::<T>::new(x, OP, "x")?, View::<T>::new(w, OP, "weight")?);
        let mut y = vec![T::ZERO; rows * n];
        if let Some(bias) = &bias {
            par::blocks(&mut y, par::rows_per_block(n) * n, |_, part| {
                part.chunks_exact_mut(n).for_each(|row| row.copy_from_slice(bias));
            });
        }
        let (a, b) = (Mat(xs.as_ptr(), k, 1), Mat(ws.as_ptr(), k, 1).t());
        // SAFETY: x is [rows, k], w [n, k] and y [rows, n], all contiguous.
        unsafe { gemm((rows, n, k), Mat(y.as_mut_ptr(), n, 1), bias.is_some(), a, b, T::ONE, all_threads()) };
        tensor(y, with_last(x, n), x)
    })
}

/// The gradient of `x`: `dx [.., k] = dy [.., n] · w`.
///
/// # Errors
/// As [`linear`].
pub fn linear_dgrad(dy: &Tensor, w: &Tensor) -> Result<Tensor> {
    const OP: &str = "linear_dgrad";
    let (rows, n) = rows_of(dy, OP)?;
    let (wn, k) = weight_dims(w, OP)?;
    if n != wn {
        let message = format!("dy has shape {:?} and weight {:?}; last must equal first", dy.dims(), w.dims());
        return Err(Error::shape(OP, message));
    }
    by_float!(dy, OP, T => {
        let (dys, ws) = (View::<T>::new(dy, OP, "dy")?, View::<T>::new(w, OP, "weight")?);
        let mut dx = vec![T::ZERO; rows * k];
        let (a, b) = (Mat(dys.as_ptr(), n, 1), Mat(ws.as_ptr(), k, 1));
        // SAFETY: dy is [rows, n], w [n, k] and dx [rows, k], all contiguous.
        unsafe { gemm((rows, k, n), Mat(dx.as_mut_ptr(), k, 1), false, a, b, T::ONE, all_threads()) };
        tensor(dx, with_last(dy, k), dy)
    })
}

/// Adds the gradient of the weight: `dw [n, k] += dyᵀ · x`, into the (view of a flat) buffer.
///
/// # Errors
/// As [`linear`].
pub fn linear_wgrad(dy: &Tensor, x: &Tensor, dw: &Tensor) -> Result<()> {
    const OP: &str = "linear_wgrad";
    let ((rows, n), (x_rows, k)) = (rows_of(dy, OP)?, rows_of(x, OP)?);
    if rows != x_rows {
        let message = format!("dy has shape {:?} and x {:?}; they must have as many rows", dy.dims(), x.dims());
        return Err(Error::shape(OP, message));
    }
    expect_shape(OP, "dw", dw, &[n, k])?;
    expect_dtype(OP, dw, dy.dtype())?;
    by_float!(dy, OP, T => {
        let (dys, xs) = (View::<T>::new(dy, OP, "dy")?, View::<T>::new(x, OP, "x")?);
        let (a, b) = (Mat(dys.as_ptr(), n, 1).t(), Mat(xs.as_ptr(), k, 1));
        with_slice_mut::<T, _>(dw, OP, |dw| {
            // SAFETY: dy is [rows, n], x [rows, k] and dw [n, k], all contiguous.
            unsafe { gemm((n, k, rows), Mat(dw.as_mut_ptr(), k, 1), true, a, b, T::ONE, all_threads()) };
            Ok(())
        })
    })
}

/// Adds the gradient of the bias: `db [n] += Σ_rows dy [.., n]`.
///
/// # Errors
/// As [`linear`].
pub fn bias_grad(dy: &Tensor, db: &Tensor) -> Result<()> {
    const OP: &str = "bias_grad";
    let (rows, n) = rows_of(dy, OP)?;
    expect_shape(OP, "db", db, &[n])?;
    expect_dtype(OP, db, dy.dtype())?;
    by_float!(dy, OP, T => {
        let dys = View::<T>::new(dy, OP, "dy")?;
        let mut partials = vec![T::ZERO; rows.div_ceil(ROW_BLOCK) * n];
        let dys: &[T] = &dys;
        par::blocks(&mut partials, n, |start, partial| {
            let first = start / n.max(1) * ROW_BLOCK;
            let last = (first + ROW_BLOCK).min(rows);
            vectorize(#[inline(always)] || {
                for row in dys[first * n..last * n].chunks_exact(n) {
                    add(partial, row);
                }
            });
        });
        accumulate(&partials, n, 0, n, db, OP)
    })
}

#[inline(always)]
fn add<T: Float>(acc: &mut [T], x: &[T]) {
    for (a, &v) in acc.iter_mut().zip(x) {
        *a += v;
    }
}

/// Sums the columns `first .. first + n` of partial sums of `width` columns in order, and adds the sum to `grad`.
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
