//! Activations and their gradients, elementwise: one [`Activation`] each; and SwiGLU.

use candle_core::Tensor;

use crate::Result;
use crate::tensor::element::{Elem, Float};
use crate::tensor::output::{self, Uninit};
use crate::tensor::parallel;
use crate::tensor::simd::vectorize;
use crate::tensor::view::{View, with_last};

/// 1 / (1 + e⁻ˣ).
#[inline(always)]
fn sigmoid<T: Float>(x: T) -> T {
    sigmoid_of_bits(x * T::of(-std::f64::consts::LOG2_E))
}

/// 1 / (1 + 2ᶻ): the sigmoid of x for z = −x·log₂ e.
#[inline(always)]
fn sigmoid_of_bits<T: Float>(z: T) -> T {
    T::ONE / (T::ONE + z.fast_exp2())
}

/// GELU is x times the sigmoid of u = 2·√(2/π)·(x + 0.044715·x³), which is (1 + tanh(u/2))/2.
const GELU: f64 = 2.0 * 0.797_884_560_802_865_4; // √(2/π)

const GELU_CUBIC: f64 = GELU * 0.044715;

/// x², limited where larger values change nothing. From |x| = 22 on the sigmoid of u is 0 or 1 (in
/// f64, too). There u′, which grows with x², is multiplied by 0, so it must not overflow. With the
/// limit, gradients are finite for inputs up to ±10³⁶ (PyTorch's up to ±10¹⁹).
#[inline(always)]
fn gelu_square<T: Float>(x: T) -> T {
    let (square, enough) = (x * x, T::of(500.0));
    if enough < square { enough } else { square }
}

/// The sigmoid of u, given x and x².
#[inline(always)]
fn gelu_sigmoid<T: Float>(x: T, square: T) -> T {
    let (linear, cubic) =
        (T::of(-GELU * std::f64::consts::LOG2_E), T::of(-GELU_CUBIC * std::f64::consts::LOG2_E));
    sigmoid_of_bits(x * square.fused(cubic, linear))
}

/// The gradient of x, given dy, x, x² and the sigmoid s of u: dy·(s + x·s·(1 − s)·u′).
#[inline(always)]
fn gelu_gradient<T: Float>(dy: T, x: T, square: T, s: T) -> T {
    let slope = x * square.fused(T::of(3.0 * GELU_CUBIC), T::of(GELU));
    dy * s * slope.fused(T::ONE - s, T::ONE)
}

/// An elementwise activation, in the type that elements are computed in.
pub trait Activation {
    /// The activation's name in the kernels of `cuda/activation.cu`.
    #[cfg_attr(not(gpu), allow(dead_code))]
    const NAME: &str;
    fn value<T: Float>(x: T) -> T;
    /// The gradient with respect to `x`; `dy` is the gradient of the value.
    fn gradient<T: Float>(dy: T, x: T) -> T;
    /// Gradient and value, with the same bits as when computed alone.
    #[inline(always)]
    fn gradient_and_value<T: Float>(dy: T, x: T) -> [T; 2] {
        [Self::gradient(dy, x), Self::value(x)]
    }
}

/// GELU, by its tanh approximation (Hendrycks & Gimpel 2016).
pub struct Gelu;

impl Activation for Gelu {
    const NAME: &str = "gelu";

    #[inline(always)]
    fn value<T: Float>(x: T) -> T {
        x * gelu_sigmoid(x, x * x)
    }

    #[inline(always)]
    fn gradient<T: Float>(dy: T, x: T) -> T {
        let square = gelu_square(x);
        gelu_gradient(dy, x, square, gelu_sigmoid(x, square))
    }

    #[inline(always)]
    fn gradient_and_value<T: Float>(dy: T, x: T) -> [T; 2] {
        let square = gelu_square(x);
        let s = gelu_sigmoid(x, square);
        [gelu_gradient(dy, x, square, s), x * s]
    }
}

/// max(x, 0); NaN for NaN.
pub struct Relu;

impl Activation for Relu {
    const NAME: &str = "relu";

    #[inline(always)]
    fn value<T: Float>(x: T) -> T {
        if x < T::ZERO { T::ZERO } else { x }
    }

    #[inline(always)]
    fn gradient<T: Float>(dy: T, x: T) -> T {
        if x <= T::ZERO { T::ZERO } else { dy }
    }
}

/// max(x, 0)² (So et al. 2021, Primer).
pub struct SquaredRelu;

impl Activation for SquaredRelu {
    const NAME: &str = "squared_relu";

    #[inline(always)]
    fn value<T: Float>(x: T) -> T {
        let x = Relu::value(x);
        x * x
    }

    #[inline(always)]
    fn gradient<T: Float>(dy: T, x: T) -> T {
        let x = Relu::value(x);
        dy * (x + x)
    }
}

/// Applies `A` to every element.
pub fn forward<E: Elem, A: Activation>(x: &Tensor, op: &'static str) -> Result<Tensor> {
    let xs = View::<E>::new(x, op, "x")?;
    let xs: &[E] = &xs;
    output::for_products(x.dims(), parallel::GRAIN, x, |start, y| {
        vectorize(
            #[inline(always)]
            || {
                y.each(
                    [&xs[start..]],
                    [],
                    #[inline(always)]
                    |[x], []| A::value(x),
                )
            },
        )
    })
}

/// The gradient of [`forward`] with respect to `x`.
pub fn backward<E: Elem, A: Activation>(
    dy: &Tensor,
    x: &Tensor,
    op: &'static str,
) -> Result<Tensor> {
    let (xs, dys) = (View::<E>::new(x, op, "x")?, View::<E>::new(dy, op, "dy")?);
    let (xs, dys): (&[E], &[E]) = (&xs, &dys);
    output::for_products(x.dims(), parallel::GRAIN, x, |start, dx| {
        vectorize(
            #[inline(always)]
            || {
                dx.each(
                    [&xs[start..], &dys[start..]],
                    [],
                    #[inline(always)]
                    |[x, dy], []| A::gradient(dy, x),
                )
            },
        )
    })
}

/// The gradient of [`forward`] with respect to `x`, and the result of [`forward`]. `width` is the
/// width of the rows.
pub fn backward_recompute<E: Elem, A: Activation>(
    dy: &Tensor,
    x: &Tensor,
    width: usize,
    op: &'static str,
) -> Result<[Tensor; 2]> {
    let (xs, dys) = (View::<E>::new(x, op, "x")?, View::<E>::new(dy, op, "dy")?);
    let (xs, dys): (&[E], &[E]) = (&xs, &dys);
    output::rows_for_products(&x.dims()[..x.rank() - 1], width, x, |row, results| {
        let row = row * width..(row + 1) * width;
        let operands = [&xs[row.clone()], &dys[row]];
        vectorize(
            #[inline(always)]
            || {
                Uninit::all(
                    results,
                    operands,
                    #[inline(always)]
                    |[x, dy]| A::gradient_and_value(dy, x),
                )
            },
        )
    })
}

pub fn swiglu<E: Elem>(x: &Tensor, f: usize, op: &'static str) -> Result<Tensor> {
    let xs = View::<E>::new(x, op, "x")?;
    let xs: &[E] = &xs;
    output::for_products(&with_last(x, f), parallel::rows_per_block(f) * f, x, |start, y| {
        y.parts(f, |at, y| {
            let (gate, up) = xs[2 * (start + at)..][..2 * f].split_at(f);
            swiglu_line(gate, up, y)
        })
    })
}

fn swiglu_line<'a, E: Elem>(gate: &[E], up: &[E], y: Uninit<'a, E>) -> &'a mut [E] {
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

pub fn swiglu_backward<E: Elem>(
    dy: &Tensor,
    x: &Tensor,
    f: usize,
    op: &'static str,
) -> Result<Tensor> {
    let (xs, dys) = (View::<E>::new(x, op, "x")?, View::<E>::new(dy, op, "dy")?);
    let (xs, dys): (&[E], &[E]) = (&xs, &dys);
    output::for_products(x.dims(), parallel::rows_per_block(f) * 2 * f, x, |start, dx| {
        dx.parts(2 * f, |at, dx| {
            let row = start + at;
            let ((gate, up), dy) = (xs[row..][..2 * f].split_at(f), &dys[row / 2..][..f]);
            dx.halves(f, |dgate, dup| swiglu_backward_line([gate, up, dy], dgate, dup))
        })
    })
}

fn swiglu_backward_line<'a, E: Elem>(
    operands: [&[E]; 3],
    dgate: Uninit<'a, E>,
    dup: Uninit<'a, E>,
) -> (&'a mut [E], &'a mut [E]) {
    vectorize(
        #[inline(always)]
        || {
            dgate.both(
                dup,
                operands,
                #[inline(always)]
                |[gate, up, dy]| swiglu_gradients(gate, up, dy, sigmoid(gate)),
            )
        },
    )
}

/// The gradients of gate and up, given the sigmoid of the gate.
#[inline(always)]
fn swiglu_gradients<T: Float>(gate: T, up: T, dy: T, s: T) -> [T; 2] {
    let through = dy * s;
    [through * up * gate.fused(T::ONE - s, T::ONE), through * gate]
}

pub fn swiglu_backward_recompute<E: Elem>(
    dy: &Tensor,
    x: &Tensor,
    f: usize,
    op: &'static str,
) -> Result<[Tensor; 2]> {
    let (xs, dys) = (View::<E>::new(x, op, "x")?, View::<E>::new(dy, op, "dy")?);
    let (xs, dys): (&[E], &[E]) = (&xs, &dys);
    output::rows_for_products(&x.dims()[..x.rank() - 1], f, x, |row, results| {
        let ((gate, up), dy) = (xs[row * 2 * f..][..2 * f].split_at(f), &dys[row * f..][..f]);
        swiglu_backward_recompute_line([gate, up, dy], results)
    })
}

fn swiglu_backward_recompute_line<'a, E: Elem>(
    operands: [&[E]; 3],
    results: [Uninit<'a, E>; 3],
) -> [&'a mut [E]; 3] {
    vectorize(
        #[inline(always)]
        || {
            Uninit::all(
                results,
                operands,
                #[inline(always)]
                |[gate, up, dy]| {
                    let s = sigmoid(gate);
                    let [dgate, dup] = swiglu_gradients(gate, up, dy, s);
                    [dgate, dup, gate * s * up]
                },
            )
        },
    )
}
