//! GELU (Hendrycks & Gimpel 2016, tanh approximation) and SwiGLU (Shazeer 2020).

use candle_core::Tensor;

use crate::float::{Float, by_float};
use crate::simd::vectorize;
use crate::view::{View, expect_shape, rows_of, tensor, with_last};
use crate::{Error, Result, par};

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
/// If `x` is not contiguous or neither f32 nor f64.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    const OP: &str = "gelu";
    by_float!(x, OP, T => {
        let xs = View::<T>::new(x, OP, "x")?;
        let xs: &[T] = &xs;
        let mut y = vec![T::ZERO; xs.len()];
        par::blocks(&mut y, par::GRAIN, |start, y| vectorize(#[inline(always)] || {
            let (c, c3) = gelu_constants::<T>();
            for (y, &x) in y.iter_mut().zip(&xs[start..]) {
                *y = x * sigmoid(x * (c + c3 * x * x));
            }
        }));
        tensor(y, x.dims(), x)
    })
}

/// The gradient of `x` of [`gelu`].
///
/// # Errors
/// As [`gelu`], or if the shapes differ.
pub fn gelu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    const OP: &str = "gelu_backward";
    expect_shape(OP, "dy", dy, x.dims())?;
    by_float!(x, OP, T => {
        let (xs, dys) = (View::<T>::new(x, OP, "x")?, View::<T>::new(dy, OP, "dy")?);
        let (xs, dys): (&[T], &[T]) = (&xs, &dys);
        let mut dx = vec![T::ZERO; xs.len()];
        par::blocks(&mut dx, par::GRAIN, |start, dx| vectorize(#[inline(always)] || {
            let (c, c3) = gelu_constants::<T>();
            let three = T::of(3.0);
            for ((dx, &x), &dy) in dx.iter_mut().zip(&xs[start..]).zip(&dys[start..]) {
                let s = sigmoid(x * (c + c3 * x * x));
                *dx = dy * (s + x * s * (T::ONE - s) * (c + three * c3 * x * x));
            }
        }));
        tensor(dx, x.dims(), x)
    })
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
/// If the last dimension is odd, or `x` is not contiguous or neither f32 nor f64.
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    const OP: &str = "swiglu";
    let f = halves(x, OP)?;
    by_float!(x, OP, T => {
        let xs = View::<T>::new(x, OP, "x")?;
        let xs: &[T] = &xs;
        let mut y = vec![T::ZERO; xs.len() / 2];
        par::blocks(&mut y, par::rows_per_block(f) * f, |start, y| vectorize(#[inline(always)] || {
            for (y, x) in y.chunks_exact_mut(f).zip(xs[2 * start..].chunks_exact(2 * f)) {
                let (gate, up) = x.split_at(f);
                for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
                    *y = gate * sigmoid(gate) * up;
                }
            }
        }));
        tensor(y, with_last(x, f), x)
    })
}

/// The gradient of `x` of [`swiglu`], `[.., 2f]`.
///
/// # Errors
/// As [`swiglu`], or if `dy` is not `[.., f]`.
pub fn swiglu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    const OP: &str = "swiglu_backward";
    let f = halves(x, OP)?;
    expect_shape(OP, "dy", dy, &with_last(x, f))?;
    by_float!(x, OP, T => {
        let (xs, dys) = (View::<T>::new(x, OP, "x")?, View::<T>::new(dy, OP, "dy")?);
        let (xs, dys): (&[T], &[T]) = (&xs, &dys);
        let mut dx = vec![T::ZERO; xs.len()];
        par::blocks(&mut dx, par::rows_per_block(f) * 2 * f, |start, dx| vectorize(#[inline(always)] || {
            let rows = xs[start..].chunks_exact(2 * f).zip(dys[start / 2..].chunks_exact(f));
            for (dx, (x, dy)) in dx.chunks_exact_mut(2 * f).zip(rows) {
                let ((gate, up), (dgate, dup)) = (x.split_at(f), dx.split_at_mut(f));
                // One result a loop: LLVM does not vectorize both in one.
                for (dup, &gate) in dup.iter_mut().zip(gate) {
                    *dup = sigmoid(gate);
                }
                for ((dgate, &s), ((&gate, &up), &dy)) in dgate.iter_mut().zip(&*dup).zip(gate.iter().zip(up).zip(dy)) {
                    *dgate = dy * up * (s * (T::ONE + gate * (T::ONE - s)));
                }
                for ((dup, &gate), &dy) in dup.iter_mut().zip(gate).zip(dy) {
                    *dup = dy * (gate * *dup);
                }
            }
        }));
        tensor(dx, x.dims(), x)
    })
}
