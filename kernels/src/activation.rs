//! GELU (Hendrycks & Gimpel 2016, tanh approximation) and SwiGLU (Shazeer 2020).

use candle_core::Tensor;

use crate::float::{Elem, Float, by_elem};
use crate::output::{self, Unwritten};
use crate::simd::vectorize;
use crate::view::{View, expect_shape, rows_of, tensor, with_last};
use crate::{Error, Result, on_gpu, par, trace};

/// 1 / (1 + e⁻ˣ)
#[inline(always)]
fn sigmoid<T: Float>(x: T) -> T {
    T::ONE / (T::ONE + (-x).fast_exp())
}

/// The constants of 2·√(2/π)·(x + 0.044715·x³), whose sigmoid is (1 + tanh(√(2/π)·…))/2.
#[inline(always)]
fn gelu_constants<T: Float>() -> (T, T) {
    let c = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
    (T::of(c), T::of(c * 0.044715))
}

/// `y = x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³)))`, elementwise.
///
/// # Errors
/// If `x` is not contiguous or no float.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    let _span = trace::moves("gelu", &[x, x]);
    const OP: &str = "gelu";
    on_gpu!(x, activation::gelu(x, OP));
    by_elem!(x, OP, E => {
        let xs = View::<E>::new(x, OP, "x")?;
        let xs: &[E] = &xs;
        tensor(output::blocks(xs.len(), par::GRAIN, |start, y| gelu_line(&xs[start..], y)), x.dims(), x)
    })
}

fn gelu_line<'a, E: Elem>(x: &[E], y: Unwritten<'a, E>) -> &'a mut [E] {
    vectorize(
        #[inline(always)]
        || {
            let (c, c3) = gelu_constants::<E::Acc>();
            y.each(
                [x],
                [],
                #[inline(always)]
                |[x], []| x * sigmoid(x * (c + c3 * x * x)),
            )
        },
    )
}

/// The gradient of `x` of [`gelu`].
///
/// # Errors
/// As [`gelu`], or if the shapes or dtypes differ.
pub fn gelu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    let _span = trace::moves("gelu_backward", &[dy, x, x]);
    const OP: &str = "gelu_backward";
    expect_shape(OP, "dy", dy, x.dims())?;
    on_gpu!(x, activation::gelu_backward(dy, x, OP));
    by_elem!(x, OP, E => {
        let (xs, dys) = (View::<E>::new(x, OP, "x")?, View::<E>::new(dy, OP, "dy")?);
        let (xs, dys): (&[E], &[E]) = (&xs, &dys);
        let dx = output::blocks(xs.len(), par::GRAIN, |start, dx| gelu_backward_line(&xs[start..], &dys[start..], dx));
        tensor(dx, x.dims(), x)
    })
}

fn gelu_backward_line<'a, E: Elem>(x: &[E], dy: &[E], dx: Unwritten<'a, E>) -> &'a mut [E] {
    vectorize(
        #[inline(always)]
        || {
            let (c, c3) = gelu_constants::<E::Acc>();
            let three = E::Acc::of(3.0);
            dx.each(
                [x, dy],
                [],
                #[inline(always)]
                |[x, dy], []| {
                    let s = sigmoid(x * (c + c3 * x * x));
                    dy * (s + x * s * (E::Acc::ONE - s) * (c + three * c3 * x * x))
                },
            )
        },
    )
}

fn halves(x: &Tensor, op: &'static str) -> Result<usize> {
    let (_, width) = rows_of(x, op)?;
    if !width.is_multiple_of(2) {
        return Err(Error::shape(
            op,
            format!("x has shape {:?}; its last dimension (gate | up) must be even", x.dims()),
        ));
    }
    Ok(width / 2)
}

/// `y [.., f] = silu(gate) · up` of `x [.., 2f]` = gate | up.
///
/// # Errors
/// If the last dimension is odd, or `x` is not contiguous or no float.
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    let _span = trace::moves("swiglu", &[x]);
    const OP: &str = "swiglu";
    let f = halves(x, OP)?;
    on_gpu!(x, activation::swiglu(x, f, OP));
    by_elem!(x, OP, E => {
        let xs = View::<E>::new(x, OP, "x")?;
        let xs: &[E] = &xs;
        let y = output::blocks(xs.len() / 2, par::rows_per_block(f) * f, |start, y| {
            y.parts(f, |at, y| {
                let (gate, up) = xs[2 * (start + at)..][..2 * f].split_at(f);
                swiglu_line(gate, up, y)
            })
        });
        tensor(y, with_last(x, f), x)
    })
}

fn swiglu_line<'a, E: Elem>(gate: &[E], up: &[E], y: Unwritten<'a, E>) -> &'a mut [E] {
    vectorize(
        #[inline(always)]
        || {
            y.each(
                [gate, up],
                [],
                #[inline(always)]
                |[gate, up], []| gate * sigmoid(gate) * up,
            )
        },
    )
}

/// The gradient of `x` of [`swiglu`], `[.., 2f]`.
///
/// # Errors
/// As [`swiglu`], or if `dy` is not `[.., f]` of the same dtype.
pub fn swiglu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    let _span = trace::moves("swiglu_backward", &[dy, x, x]);
    const OP: &str = "swiglu_backward";
    let f = halves(x, OP)?;
    expect_shape(OP, "dy", dy, &with_last(x, f))?;
    on_gpu!(x, activation::swiglu_backward(dy, x, f, OP));
    by_elem!(x, OP, E => {
        let (xs, dys) = (View::<E>::new(x, OP, "x")?, View::<E>::new(dy, OP, "dy")?);
        let (xs, dys): (&[E], &[E]) = (&xs, &dys);
        let dx = output::blocks(xs.len(), par::rows_per_block(f) * 2 * f, |start, dx| {
            dx.parts(2 * f, |at, dx| {
                let row = start + at;
                let ((gate, up), dy) = (xs[row..][..2 * f].split_at(f), &dys[row / 2..][..f]);
                dx.halves(f, |dgate, dup| swiglu_backward_line([gate, up, dy], dgate, dup))
            })
        });
        tensor(dx, x.dims(), x)
    })
}

fn swiglu_backward_line<'a, E: Elem>(
    operands: [&[E]; 3],
    dgate: Unwritten<'a, E>,
    dup: Unwritten<'a, E>,
) -> (&'a mut [E], &'a mut [E]) {
    vectorize(
        #[inline(always)]
        || {
            dgate.both(
                dup,
                operands,
                #[inline(always)]
                |[gate, up, dy]| {
                    let s = sigmoid(gate);
                    [dy * up * (s * (E::Acc::ONE + gate * (E::Acc::ONE - s))), dy * (gate * s)]
                },
            )
        },
    )
}
