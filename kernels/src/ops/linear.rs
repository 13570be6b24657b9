//! Linear layers: forward, input gradient, and weight and bias gradients that accumulate in place.

use candle_core::Tensor;

use crate::cpu::gemm::{Mat, Start, all_threads, gemm, gemm_plus};
use crate::ops::activation::{gelu, gelu_backward, gelu_backward_again};
use crate::tensor::element::{Elem, Float, by_elem};
use crate::tensor::host::{with_rows_mut, with_slice_mut};
use crate::tensor::simd::{LANES, ask_for, vectorize};
use crate::tensor::view::{
    View, copied, expect_apart, expect_dtype, expect_elements, expect_shape, rows_of, tensor, with_last,
};
use crate::tensor::{parallel, trace};
use crate::{Error, Result, on_cuda, on_gpu};

/// Rows per partial sum of a reduction over rows; fixed, so that results do not depend on the number of threads.
pub(crate) const ROW_BLOCK: usize = 64;

fn weight_dims(w: &Tensor, op: &'static str) -> Result<(usize, usize)> {
    match w.dims() {
        &[n, k] if n > 0 => Ok((n, k)),
        dims => Err(Error::shape(op, format!("weight has shape {dims:?} where [n, k] is needed"))),
    }
}

fn expect_forward(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, op: &'static str) -> Result<[usize; 3]> {
    let (rows, k) = rows_of(x, op)?;
    let (n, wk) = weight_dims(w, op)?;
    if k != wk {
        let message = format!("x has shape {:?} and weight {:?}; their last dimensions must agree", x.dims(), w.dims());
        return Err(Error::shape(op, message));
    }
    if let Some(bias) = bias {
        expect_shape(op, "bias", bias, &[n])?;
    }
    Ok([rows, k, n])
}

/// Writes all of `y`, which has room for `rows` of n elements as far apart as it says: the product, and `plus`, of as many elements, where there is one.
fn forward<E: Elem, C: Elem<Acc = E::Acc>>(
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
    // SAFETY: x is [rows, k], w [n, k], y and plus [rows, n]; the rows of x and y lie as far apart as they say.
    unsafe {
        match plus {
            Some(plus) => gemm_plus(shape, y, start, (plus.as_ptr(), n), a, b, all_threads()),
            None => gemm(shape, y, start, a, b, E::Acc::ONE, all_threads()),
        }
    };
    Ok(())
}

/// `n` elements that `write` writes, all of them if it succeeds.
fn written<T>(n: usize, write: impl FnOnce(*mut T) -> Result<()>) -> Result<Vec<T>> {
    let mut values = Vec::with_capacity(n);
    write(values.as_mut_ptr())?;
    // SAFETY: there is room for n elements, and all were written.
    unsafe { values.set_len(n) };
    Ok(values)
}

/// `y [.., n] = x [.., k] · wᵀ + bias` with `w [n, k]`, `bias [n]`; all of one dtype, with sums in f32 (f64 for f64). On a CPU the rows of `x` may
/// lie apart.
///
/// # Errors
/// If shapes contradict each other, dtypes differ or are no floats, or an operand is not contiguous.
pub fn linear(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let _span = trace::product("linear", x, w);
    const OP: &str = "linear";
    let dims = expect_forward(x, w, bias, OP)?;
    let [rows, _, n] = dims;
    on_cuda!(x, linear::forward(x, w, bias, dims, x.dtype(), None, OP));
    by_elem!(x, OP, E => {
        let y = written(rows * n, |y| forward::<E, E>(x, w, bias, None, dims, (y, n), OP))?;
        tensor(y, with_last(x, n), x)
    })
}

/// `y [.., n] = x [.., k] · wᵀ + bias + residual`, into another tensor of the result's elements and dtype: in one pass, which rounds once; on a GPU
/// where that is faster than the product and a pass behind it.
///
/// # Errors
/// As [`linear`], or if `residual` or `y` has another shape or dtype.
pub fn linear_add_into(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, residual: &Tensor, y: &Tensor) -> Result<()> {
    let _span = trace::product("linear", x, w);
    const OP: &str = "linear_add_into";
    let dims = expect_forward(x, w, bias, OP)?;
    for (what, t) in [("residual", residual), ("y", y)] {
        expect_shape(OP, what, t, &with_last(x, dims[2]))?;
        expect_dtype(OP, t, x.dtype())?;
    }
    expect_apart(OP, "y", y, &[x, w, residual])?;
    on_cuda!(x, linear::forward_add(x, w, bias, residual, dims, y, OP));
    by_elem!(x, OP, E => {
        let residual = View::<E>::new(residual, OP, "residual")?;
        with_slice_mut::<E, _>(y, OP, |y| {
            forward::<E, E>(x, w, bias, Some(&residual), dims, (y.as_mut_ptr(), dims[2]), OP)
        })
    })
}

/// `h = x · wᵀ + bias` as [`linear`], and [`gelu`] of it: returns both, `h` for backward.
///
/// On a GPU one kernel may do both, which applies GELU to sums in f32 that `h` has rounded; it is taken where it is faster.
///
/// # Errors
/// As [`linear`].
pub fn linear_gelu(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
    on_cuda!(x, linear::forward_gelu(x, w, bias, expect_forward(x, w, bias, "linear_gelu")?, "linear_gelu"));
    let h = linear(x, w, bias)?;
    let y = gelu(&h)?;
    Ok((h, y))
}

/// As [`linear`], with a result in f32 (f64 for f64): sums of 16-bit operands that are not rounded, for logits.
///
/// # Errors
/// As [`linear`].
pub fn linear_to_f32(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let _span = trace::product("linear", x, w);
    const OP: &str = "linear_to_f32";
    let dims = expect_forward(x, w, bias, OP)?;
    let [rows, _, n] = dims;
    on_cuda!(x, linear::forward(x, w, bias, dims, candle_core::DType::F32, None, OP));
    by_elem!(x, OP, E => {
        let y = written(rows * n, |y| forward::<E, <E as Elem>::Acc>(x, w, bias, None, dims, (y, n), OP))?;
        tensor(y, with_last(x, n), x)
    })
}

/// As [`linear`] or [`linear_to_f32`], by the dtype of `y`, into (a view of) another tensor of the result's elements. On a CPU the rows of
/// `y` may lie apart, if they are the result's.
///
/// # Errors
/// As [`linear`], or if `y` has another number of elements or a dtype that is not one of the two.
pub fn linear_into(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, y: &Tensor) -> Result<()> {
    let _span = trace::product("linear", x, w);
    const OP: &str = "linear_into";
    let dims = expect_forward(x, w, bias, OP)?;
    expect_elements(OP, "y", y, dims[0] * dims[2])?;
    on_cuda!(x, linear::forward_into(x, w, bias, dims, y, OP));
    expect_apart(OP, "y", y, &[x, w])?;
    let contiguous = y.is_contiguous();
    if !contiguous && rows_of(y, OP)? != (dims[0], dims[2]) {
        let message = format!("y has shape {:?} and rows that lie apart; they must be those of the result", y.dims());
        return Err(Error::shape(OP, message));
    }
    // However a contiguous tensor is shaped, the result's rows follow each other in it.
    let row_of = |apart| if contiguous { dims[2] } else { apart };
    by_elem!(x, OP, E => {
        if y.dtype() == x.dtype() {
            return with_rows_mut::<E, _>(y, OP, |y, apart| {
                forward::<E, E>(x, w, bias, None, dims, (y.as_mut_ptr(), row_of(apart)), OP)
            });
        }
        expect_dtype(OP, y, <<E as Elem>::Acc as candle_core::WithDType>::DTYPE)?;
        with_rows_mut::<<E as Elem>::Acc, _>(y, OP, |y, apart| {
            forward::<E, _>(x, w, bias, None, dims, (y.as_mut_ptr(), row_of(apart)), OP)
        })
    })
}

fn with_slice_mut_of<T: Elem>(t: &Tensor, op: &'static str, f: impl FnOnce(&mut [T]) -> Result<()>) -> Result<()> {
    expect_dtype(op, t, T::DTYPE)?;
    with_slice_mut(t, op, f)
}

fn expect_dgrad(dy: &Tensor, w: &Tensor, op: &'static str) -> Result<[usize; 3]> {
    let (rows, n) = rows_of(dy, op)?;
    let (wn, k) = weight_dims(w, op)?;
    if n != wn {
        let message = format!("dy has shape {:?} and weight {:?}; last must equal first", dy.dims(), w.dims());
        return Err(Error::shape(op, message));
    }
    Ok([rows, k, n])
}

/// Writes all of `dx`, which has room for `rows · k` elements.
fn dgrad<E: Elem>(dy: &Tensor, w: &Tensor, [rows, k, n]: [usize; 3], dx: *mut E, op: &'static str) -> Result<()> {
    let ((dy, dy_row), w) = (View::<E>::rows(dy, op, "dy")?, View::<E>::new(w, op, "weight")?);
    let (a, b) = (Mat(dy.as_ptr(), dy_row, 1), Mat(w.as_ptr(), k, 1));
    // SAFETY: dy is [rows, n], w [n, k] and dx [rows, k]; the rows of dy lie as far apart as they say.
    unsafe { gemm((rows, k, n), Mat(dx, k, 1), Start::Zero, a, b, E::Acc::ONE, all_threads()) };
    Ok(())
}

/// The gradient of `x`: `dx [.., k] = dy [.., n] · w`. On a CPU the rows of `dy` may lie apart.
///
/// # Errors
/// As [`linear`].
pub fn linear_dgrad(dy: &Tensor, w: &Tensor) -> Result<Tensor> {
    let _span = trace::product("linear_dgrad", dy, w);
    const OP: &str = "linear_dgrad";
    let dims = expect_dgrad(dy, w, OP)?;
    let [rows, k, _] = dims;
    on_cuda!(dy, linear::dgrad(dy, w, dims, None, OP));
    by_elem!(dy, OP, E => {
        let dx = written(rows * k, |dx| dgrad::<E>(dy, w, dims, dx, OP))?;
        tensor(dx, with_last(dy, k), dy)
    })
}

/// As [`linear_dgrad`], into (a view of) another tensor of the result's elements and dtype.
///
/// # Errors
/// As [`linear`], or if `dx` has another number of elements or another dtype.
pub fn linear_dgrad_into(dy: &Tensor, w: &Tensor, dx: &Tensor) -> Result<()> {
    let _span = trace::product("linear_dgrad", dy, w);
    const OP: &str = "linear_dgrad_into";
    let dims = expect_dgrad(dy, w, OP)?;
    let [rows, k, _] = dims;
    expect_elements(OP, "dx", dx, rows * k)?;
    expect_dtype(OP, dx, dy.dtype())?;
    on_cuda!(dy, linear::dgrad(dy, w, dims, Some(dx), OP).map(|_| ()));
    expect_apart(OP, "dx", dx, &[dy, w])?;
    by_elem!(dy, OP, E => with_slice_mut::<E, _>(dx, OP, |dx| dgrad::<E>(dy, w, dims, dx.as_mut_ptr(), OP)))
}

/// The gradient of `h [.., k]` where that of `gelu(h)` is [`linear_dgrad`]`(dy, w)`: backward of [`linear_gelu`]'s result through the layer behind
/// it.
///
/// # Errors
/// As [`linear`], or if `h` has another shape or dtype.
pub fn linear_dgrad_gelu(dy: &Tensor, w: &Tensor, h: &Tensor) -> Result<Tensor> {
    const OP: &str = "linear_dgrad_gelu";
    let dims = expect_dgrad(dy, w, OP)?;
    expect_shape(OP, "h", h, &with_last(dy, dims[1]))?;
    expect_dtype(OP, h, dy.dtype())?;
    on_cuda!(dy, linear::dgrad_gelu(dy, w, h, dims, OP));
    gelu_backward(&linear_dgrad(dy, w)?, h)
}

/// As [`linear_dgrad_gelu`], and `gelu(h)` again, bit for bit: for a backward whose forward did not keep it.
///
/// # Errors
/// As [`linear_dgrad_gelu`].
pub fn linear_dgrad_gelu_again(dy: &Tensor, w: &Tensor, h: &Tensor) -> Result<[Tensor; 2]> {
    gelu_backward_again(&linear_dgrad(dy, w)?, h)
}

/// Adds the gradient of the weight: `dw [n, k] += dyᵀ · x`, into the (view of a flat) buffer; `dw` is f32 for 16-bit operands. On a CPU the
/// rows of `dy` and of `x` may lie apart.
///
/// # Errors
/// As [`linear`].
pub fn linear_wgrad(dy: &Tensor, x: &Tensor, dw: &Tensor) -> Result<()> {
    wgrad(dy, x, dw, true, "linear_wgrad")
}

/// As [`linear_wgrad`], in the place of what `dw` held.
///
/// # Errors
/// As [`linear`].
pub fn linear_wgrad_into(dy: &Tensor, x: &Tensor, dw: &Tensor) -> Result<()> {
    wgrad(dy, x, dw, false, "linear_wgrad_into")
}

fn wgrad(dy: &Tensor, x: &Tensor, dw: &Tensor, add: bool, op: &'static str) -> Result<()> {
    let _span = trace::product("linear_wgrad", dy, dw);
    let ((rows, n), (x_rows, k)) = (rows_of(dy, op)?, rows_of(x, op)?);
    if rows != x_rows {
        let message = format!("dy has shape {:?} and x {:?}; they must have as many rows", dy.dims(), x.dims());
        return Err(Error::shape(op, message));
    }
    expect_shape(op, "dw", dw, &[n, k])?;
    on_cuda!(dy, linear::wgrad(dy, x, dw, [rows, k, n], add, op));
    expect_apart(op, "dw", dw, &[dy, x])?;
    by_elem!(dy, op, E => {
        let ((dy, dy_row), (x, x_row)) = (View::<E>::rows(dy, op, "dy")?, View::<E>::rows(x, op, "x")?);
        let (a, b) = (Mat(dy.as_ptr(), dy_row, 1).t(), Mat(x.as_ptr(), x_row, 1));
        let start = if add { Start::Old } else { Start::Zero };
        with_slice_mut_of::<<E as Elem>::Acc>(dw, op, |dw| {
            let (dw, one) = (Mat(dw.as_mut_ptr(), k, 1), <<E as Elem>::Acc as Float>::ONE);
            // SAFETY: dy is [rows, n], x [rows, k] and dw [n, k]; the rows of dy and x lie as far apart as they say.
            unsafe { gemm((n, k, rows), dw, start, a, b, one, all_threads()) };
            Ok(())
        })
    })
}

/// Adds the gradient of the bias: `db [n] += Σ_rows dy [.., n]`; `db` is f32 for 16-bit `dy`. On a CPU the rows of `dy` may lie apart.
///
/// # Errors
/// As [`linear`].
pub fn bias_grad(dy: &Tensor, db: &Tensor) -> Result<()> {
    let _span = trace::moves("bias_grad", &[dy]);
    const OP: &str = "bias_grad";
    let (rows, n) = rows_of(dy, OP)?;
    expect_shape(OP, "db", db, &[n])?;
    on_gpu!(dy, columns::bias_grad(dy, db, (rows, n), OP));
    by_elem!(dy, OP, E => {
        type Acc = <E as Elem>::Acc;
        expect_dtype(OP, db, <Acc as candle_core::WithDType>::DTYPE)?;
        let (dys, apart) = View::<E>::rows(dy, OP, "dy")?;
        let mut partials = vec![Acc::ZERO; rows.div_ceil(ROW_BLOCK) * n];
        let dys: &[E] = &dys;
        parallel::blocks(&mut partials, n, |start, partial| {
            let first = start / n.max(1) * ROW_BLOCK;
            let last = (first + ROW_BLOCK).min(rows);
            vectorize(#[inline(always)] || {
                let row = |row: usize| &dys[row * apart..][..n];
                let together = first + (last - first) / ROWS_AT_ONCE * ROWS_AT_ONCE;
                for first in (first..together).step_by(ROWS_AT_ONCE) {
                    add_rows(partial, std::array::from_fn::<_, ROWS_AT_ONCE, _>(|i| row(first + i)), ROWS_AT_ONCE * apart);
                }
                (together..last).for_each(|last| add(partial, row(last)));
            });
        });
        accumulate(&partials, n, 0, n, db, OP)
    })
}

/// Rows that [`bias_grad`] adds to a partial sum in one reading and writing of it, in order.
const ROWS_AT_ONCE: usize = 8;

/// As [`add`] of each of `rows` in order, with the sums in registers. Asks for the rows `ahead` elements behind.
#[inline(always)]
fn add_rows<E: Elem, const R: usize>(acc: &mut [E::Acc], rows: [&[E]; R], ahead: usize) {
    let n = acc.len();
    let rows = rows.map(|row| row[..n].as_chunks::<LANES>());
    let (blocks, rest) = acc.as_chunks_mut::<LANES>();
    for (i, block) in blocks.iter_mut().enumerate() {
        let mut sums = *block;
        for (row, _) in rows {
            ask_for(row[i].as_ptr().wrapping_add(ahead));
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
