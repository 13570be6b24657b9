//! Linear layers as matrix products.

use candle_core::{Tensor, WithDType};

use super::gemm::{Mat, Start, all_threads, gemm, gemm_plus};
use crate::Result;
use crate::tensor::element::{Elem, Float};
use crate::tensor::host::{with_rows_mut, with_slice_mut};
use crate::tensor::view::{View, copied, expect_dtype, rows_of, tensor, with_last};

/// Writes all of `y`, which has room for `rows` rows of n elements at the given stride: the
/// product, plus `plus`, of the same number of elements, if given.
fn write_forward<E: Elem, C: Elem<Acc = E::Acc>>(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    plus: Option<&[C]>,
    [rows, k, n]: [usize; 3],
    (y, y_row): (*mut C, usize),
    op: &'static str,
) -> Result<()> {
    let bias = bias.map(|b| copied::<E>(b, op, "bias")).transpose()?;
    let start = bias.as_deref().map_or(Start::Zero, Start::Bias);
    let ((x, x_row), w) = (View::<E>::rows(x, op, "x")?, View::<E>::new(w, op, "weight")?);
    let (a, b) = (Mat(x.as_ptr(), x_row, 1), Mat(w.as_ptr(), k, 1).t());
    let (shape, y) = ((rows, n, k), Mat(y, y_row, 1));
    // SAFETY: x is [rows, k], w [n, k], y and plus [rows, n]; the rows of x and y have the given
    // strides.
    unsafe {
        match plus {
            Some(plus) => gemm_plus(shape, y, start, (plus.as_ptr(), n), a, b, all_threads()),
            None => gemm(shape, y, start, a, b, E::Acc::ONE, all_threads()),
        }
    };
    Ok(())
}

/// `n` elements from `write`, which writes all of them if it succeeds.
fn written<T>(n: usize, write: impl FnOnce(*mut T) -> Result<()>) -> Result<Vec<T>> {
    let mut values = Vec::with_capacity(n);
    write(values.as_mut_ptr())?;
    // SAFETY: there is room for n elements, and all were written.
    unsafe { values.set_len(n) };
    Ok(values)
}

pub fn linear<E: Elem>(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    dims: [usize; 3],
    op: &'static str,
) -> Result<Tensor> {
    let [rows, _, n] = dims;

    let y = written(rows * n, |y| write_forward::<E, E>(x, w, bias, None, dims, (y, n), op))?;
    tensor(y, with_last(x, n), x)
}

pub fn add_into<E: Elem>(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    residual: &Tensor,
    dims: [usize; 3],
    y: &Tensor,
    op: &'static str,
) -> Result<()> {
    let residual = View::<E>::new(residual, op, "residual")?;
    with_slice_mut::<E, _>(y, op, |y| {
        write_forward::<E, E>(x, w, bias, Some(&residual), dims, (y.as_mut_ptr(), dims[2]), op)
    })
}

pub fn to_f32<E: Elem>(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    dims: [usize; 3],
    op: &'static str,
) -> Result<Tensor> {
    let [rows, _, n] = dims;

    let y = written(rows * n, |y| write_forward::<E, E::Acc>(x, w, bias, None, dims, (y, n), op))?;
    tensor(y, with_last(x, n), x)
}

pub fn into<E: Elem>(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    dims: [usize; 3],
    y: &Tensor,
    op: &'static str,
) -> Result<()> {
    let contiguous = y.is_contiguous();
    // In a contiguous tensor of any shape, the result's rows are consecutive.
    let row_of = |apart| if contiguous { dims[2] } else { apart };

    if y.dtype() == x.dtype() {
        return with_rows_mut::<E, _>(y, op, |y, apart| {
            write_forward::<E, E>(x, w, bias, None, dims, (y.as_mut_ptr(), row_of(apart)), op)
        });
    }
    expect_dtype(op, y, E::Acc::DTYPE)?;
    with_rows_mut::<E::Acc, _>(y, op, |y, apart| {
        write_forward::<E, _>(x, w, bias, None, dims, (y.as_mut_ptr(), row_of(apart)), op)
    })
}

fn with_slice_mut_of<T: Elem>(
    t: &Tensor,
    op: &'static str,
    f: impl FnOnce(&mut [T]) -> Result<()>,
) -> Result<()> {
    expect_dtype(op, t, T::DTYPE)?;
    with_slice_mut(t, op, f)
}

/// Writes all of `dx`, which has room for `rows · k` elements.
fn write_dgrad<E: Elem>(
    dy: &Tensor,
    w: &Tensor,
    [rows, k, n]: [usize; 3],
    dx: *mut E,
    op: &'static str,
) -> Result<()> {
    let ((dy, dy_row), w) = (View::<E>::rows(dy, op, "dy")?, View::<E>::new(w, op, "weight")?);
    let (a, b) = (Mat(dy.as_ptr(), dy_row, 1), Mat(w.as_ptr(), k, 1));
    // SAFETY: dy is [rows, n], w [n, k] and dx [rows, k]; the rows of dy have the given stride.
    unsafe { gemm((rows, k, n), Mat(dx, k, 1), Start::Zero, a, b, E::Acc::ONE, all_threads()) };
    Ok(())
}

pub fn dgrad<E: Elem>(
    dy: &Tensor,
    w: &Tensor,
    dims: [usize; 3],
    op: &'static str,
) -> Result<Tensor> {
    let [rows, k, _] = dims;

    let dx = written(rows * k, |dx| write_dgrad::<E>(dy, w, dims, dx, op))?;
    tensor(dx, with_last(dy, k), dy)
}

pub fn dgrad_into<E: Elem>(
    dy: &Tensor,
    w: &Tensor,
    dims: [usize; 3],
    dx: &Tensor,
    op: &'static str,
) -> Result<()> {
    with_slice_mut::<E, _>(dx, op, |dx| write_dgrad::<E>(dy, w, dims, dx.as_mut_ptr(), op))
}

pub fn wgrad<E: Elem>(
    dy: &Tensor,
    x: &Tensor,
    dw: &Tensor,
    add: bool,
    op: &'static str,
) -> Result<()> {
    let ((rows, n), (_, k)) = (rows_of(dy, op)?, rows_of(x, op)?);

    let ((dy, dy_row), (x, x_row)) = (View::<E>::rows(dy, op, "dy")?, View::<E>::rows(x, op, "x")?);
    let (a, b) = (Mat(dy.as_ptr(), dy_row, 1).t(), Mat(x.as_ptr(), x_row, 1));
    let start = if add { Start::Old } else { Start::Zero };
    with_slice_mut_of::<E::Acc>(dw, op, |dw| {
        let (dw, one) = (Mat(dw.as_mut_ptr(), k, 1), E::Acc::ONE);
        // SAFETY: dy is [rows, n], x [rows, k] and dw [n, k]; the rows of dy and x have the given
        // strides.
        unsafe { gemm((n, k, rows), dw, start, a, b, one, all_threads()) };
        Ok(())
    })
}
