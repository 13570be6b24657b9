//! GELU (Hendrycks & Gimpel 2016, tanh approximation) and SwiGLU (Shazeer 2020).

use candle_core::Tensor;

use crate::float::{Elem, Float, by_elem};
use crate::output::{self, Unwritten};
use crate::simd::vectorize;
use crate::view::{View, expect_shape, rows_of, tensor, with_last};
use crate::{Error, Result, par, trace};

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
    by_elem!(x, OP, E => tensor(output::map(&View::<E>::new(x, OP, "x")?, gelu_line), x.dims(), x))
}

fn gelu_line<'a, T: Float>(x: &[T], y: Unwritten<'a, T>) -> &'a mut [T] {
    vectorize(
        #[inline(always)]
        || {
            let (c, c3) = gelu_constants::<T>();
            y.write(x.iter().map(|&x| x * sigmoid(x * (c + c3 * x * x))))
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
    by_elem!(x, OP, E => {
        let (xs, dys) = (View::<E>::new(x, OP, "x")?, View::<E>::new(dy, OP, "dy")?);
        tensor(output::map2(&xs, &dys, gelu_backward_line), x.dims(), x)
    })
}

fn gelu_backward_line<'a, T: Float>(x: &[T], dy: &[T], dx: Unwritten<'a, T>) -> &'a mut [T] {
    vectorize(
        #[inline(always)]
        || {
            let (c, c3) = gelu_constants::<T>();
            let three = T::of(3.0);
            dx.write(x.iter().zip(dy).map(|(&x, &dy)| {
                let s = sigmoid(x * (c + c3 * x * x));
                dy * (s + x * s * (T::ONE - s) * (c + three * c3 * x * x))
            }))
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
    by_elem!(x, OP, E => {
        let xs = View::<E>::new(x, OP, "x")?;
        let xs: &[E] = &xs;
        let y = output::blocks(xs.len() / 2, par::rows_per_block(f) * f, |start, y| {
            let [mut wide_gate, mut wide_up, mut results] = [E::STAGE; 3].map(E::buffer);
            y.parts(f, |at, y| {
                let (gate, up) = xs[2 * (start + at)..][..2 * f].split_at(f);
                y.parts(E::STAGE, |at, y| {
                    let n = y.len();
                    let gate = E::widened(&gate[at..at + n], &mut wide_gate);
                    let up = E::widened(&up[at..at + n], &mut wide_up);
                    E::fill(y, &mut results, |y| swiglu_line(gate, up, y))
                })
            })
        });
        tensor(y, with_last(x, f), x)
    })
}

fn swiglu_line<'a, T: Float>(gate: &[T], up: &[T], y: Unwritten<'a, T>) -> &'a mut [T] {
    vectorize(
        #[inline(always)]
        || y.write(gate.iter().zip(up).map(|(&gate, &up)| gate * sigmoid(gate) * up)),
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
    by_elem!(x, OP, E => {
        let (xs, dys) = (View::<E>::new(x, OP, "x")?, View::<E>::new(dy, OP, "dy")?);
        let (xs, dys): (&[E], &[E]) = (&xs, &dys);
        let dx = output::blocks(xs.len(), par::rows_per_block(f) * 2 * f, |start, dx| {
            let mut sigmoids = vec![<E as Elem>::Acc::ZERO; f];
            let [mut wide_gate, mut wide_up, mut wide_dy, mut results] = [E::STAGE; 4].map(E::buffer);
            dx.parts(2 * f, |at, dx| {
                let row = start + at;
                let ((gate, up), dy) = (xs[row..][..2 * f].split_at(f), &dys[row / 2..][..f]);
                dx.halves(f, |dgate, dup| {
                    let dgate = dgate.parts(E::STAGE, |at, dgate| {
                        let part = at..at + dgate.len();
                        let gate = E::widened(&gate[part.clone()], &mut wide_gate);
                        let up = E::widened(&up[part.clone()], &mut wide_up);
                        let dy = E::widened(&dy[part.clone()], &mut wide_dy);
                        let sigmoids = &mut sigmoids[part];
                        E::fill(dgate, &mut results, |dgate| gate_gradient_line(gate, up, dy, sigmoids, dgate))
                    });
                    let dup = dup.parts(E::STAGE, |at, dup| {
                        let part = at..at + dup.len();
                        let gate = E::widened(&gate[part.clone()], &mut wide_gate);
                        let dy = E::widened(&dy[part.clone()], &mut wide_dy);
                        let sigmoids = &sigmoids[part];
                        E::fill(dup, &mut results, |dup| up_gradient_line(gate, dy, sigmoids, dup))
                    });
                    (dgate, dup)
                })
            })
        });
        tensor(dx, x.dims(), x)
    })
}

/// Also writes sigmoid(gate), for [`up_gradient_line`].
fn gate_gradient_line<'a, T: Float>(
    gate: &[T],
    up: &[T],
    dy: &[T],
    sigmoids: &mut [T],
    dgate: Unwritten<'a, T>,
) -> &'a mut [T] {
    vectorize(
        #[inline(always)]
        || {
            // One result a loop: LLVM does not vectorize both in one.
            for (s, &gate) in sigmoids.iter_mut().zip(gate) {
                *s = sigmoid(gate);
            }
            let inputs = gate.iter().zip(up).zip(dy).zip(sigmoids);
            dgate.write(inputs.map(|(((&gate, &up), &dy), &mut s)| dy * up * (s * (T::ONE + gate * (T::ONE - s)))))
        },
    )
}

fn up_gradient_line<'a, T: Float>(gate: &[T], dy: &[T], sigmoids: &[T], dup: Unwritten<'a, T>) -> &'a mut [T] {
    vectorize(
        #[inline(always)]
        || dup.write(gate.iter().zip(dy).zip(sigmoids).map(|((&gate, &dy), &s)| dy * (gate * s))),
    )
}
