//! GELU (Hendrycks & Gimpel 2016, tanh approximation) and SwiGLU (Shazeer 2020).

use candle_core::Tensor;

use crate::float::{Elem, Float, by_elem};
use crate::simd::vectorize;
use crate::view::{View, expect_shape, rows_of, tensor, with_last};
use crate::{Error, Result, output, par, trace};

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
    by_elem!(x, OP, E => {
        let xs = View::<E>::new(x, OP, "x")?;
        let xs: &[E] = &xs;
        let y = output::blocks(xs.len(), par::GRAIN, |start, y| vectorize(#[inline(always)] || {
            let (c, c3) = gelu_constants::<<E as Elem>::Acc>();
            y.write(xs[start..].iter().map(#[inline(always)] |x| {
                let x = x.load();
                E::store(x * sigmoid(x * (c + c3 * x * x)))
            }))
        }));
        tensor(y, x.dims(), x)
    })
}

/// The gradient of `x` of [`gelu`].
///
/// # Errors
/// As [`gelu`], or if the shapes or dtypes differ.
pub fn gelu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    let _span = trace::moves("gelu_backward", &[dy, x, x]);
    const OP: &str = "gelu_backward";
    expect_shape(OP, "dy", dy, x.dims())?;
    by_elem!(x, OP, E => {
        let (xs, dys) = (View::<E>::new(x, OP, "x")?, View::<E>::new(dy, OP, "dy")?);
        let (xs, dys): (&[E], &[E]) = (&xs, &dys);
        let dx = output::blocks(xs.len(), par::GRAIN, |start, dx| vectorize(#[inline(always)] || {
            type Acc = <E as Elem>::Acc;
            let (c, c3) = gelu_constants::<Acc>();
            let three = Acc::of(3.0);
            dx.write(xs[start..].iter().zip(&dys[start..]).map(#[inline(always)] |(x, dy)| {
                let (x, dy) = (x.load(), dy.load());
                let s = sigmoid(x * (c + c3 * x * x));
                E::store(dy * (s + x * s * (Acc::ONE - s) * (c + three * c3 * x * x)))
            }))
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
/// If the last dimension is odd, or `x` is not contiguous or no float.
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    let _span = trace::moves("swiglu", &[x]);
    const OP: &str = "swiglu";
    let f = halves(x, OP)?;
    by_elem!(x, OP, E => {
        let xs = View::<E>::new(x, OP, "x")?;
        let xs: &[E] = &xs;
        let y = output::blocks(xs.len() / 2, par::rows_per_block(f) * f, |start, y| vectorize(#[inline(always)] || {
            y.rows(f, |r, y| {
                let (gate, up) = xs[2 * (start + r * f)..][..2 * f].split_at(f);
                y.write(gate.iter().zip(up).map(#[inline(always)] |(gate, up)| {
                    let gate = gate.load();
                    E::store(gate * sigmoid(gate) * up.load())
                }))
            })
        }));
        tensor(y, with_last(x, f), x)
    })
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
    by_elem!(x, OP, E => {
        type Acc = <E as Elem>::Acc;
        let (xs, dys) = (View::<E>::new(x, OP, "x")?, View::<E>::new(dy, OP, "dy")?);
        let (xs, dys): (&[E], &[E]) = (&xs, &dys);
        let dx = output::blocks(xs.len(), par::rows_per_block(f) * 2 * f, |start, dx| {
            let mut sigmoids = vec![Acc::ZERO; f];
            vectorize(#[inline(always)] || dx.rows(2 * f, |r, dx| {
                let at = start / 2 + r * f;
                let ((gate, up), dy) = (xs[2 * at..][..2 * f].split_at(f), &dys[at..at + f]);
                // One result a loop: LLVM does not vectorize both in one.
                for (s, gate) in sigmoids.iter_mut().zip(gate) {
                    *s = sigmoid(gate.load());
                }
                let inputs = || gate.iter().zip(dy).zip(&sigmoids);
                dx.halves(f, |dgate, dup| {
                    let dgate = dgate.write(inputs().zip(up).map(#[inline(always)] |(((gate, dy), &s), up)| {
                        E::store(dy.load() * up.load() * (s * (Acc::ONE + gate.load() * (Acc::ONE - s))))
                    }));
                    let dup = dup.write(inputs().map(#[inline(always)] |((gate, dy), &s)| {
                        E::store(dy.load() * (gate.load() * s))
                    }));
                    (dgate, dup)
                })
            }))
        });
        tensor(dx, x.dims(), x)
    })
}
