//! Optimizer steps over flat ranges, in place and in one pass.
//!
//! AdamW: Loshchilov & Hutter 2019; SGD with momentum: as PyTorch's. Arithmetic in the order of PyTorch's.

use candle_core::Tensor;

use crate::float::{Float, by_float};
use crate::host::with_slice_mut;
use crate::simd::vectorize;
use crate::view::{View, expect_dtype, expect_elements, same_storage};
use crate::{Error, Result, par};

/// One step's settings of AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// Decoupled: p ← p·(1 − lr·weight_decay) first.
    pub weight_decay: f64,
    /// Number of this step, from 1.
    pub step: u64,
    /// Factor on the gradient before anything else (clipping, loss scale).
    pub grad_scale: f32,
}

/// One step's settings of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    pub lr: f64,
    pub momentum: f64,
    /// L2: added to the gradient as weight_decay·p.
    pub weight_decay: f64,
    /// Factor on the gradient before anything else.
    pub grad_scale: f32,
}

/// Checks that all tensors fit `p` and that no two share a storage.
fn check(op: &'static str, p: &Tensor, others: &[(&str, &Tensor)]) -> Result<()> {
    for (i, (name, t)) in others.iter().enumerate() {
        expect_elements(op, name, t, p.elem_count())?;
        expect_dtype(op, t, p.dtype())?;
        let mut earlier = others[..i].iter().map(|(_, t)| *t).chain([p]);
        if earlier.any(|e| same_storage(e, t)) {
            return Err(Error::shape(op, format!("{name} shares its storage with another operand")));
        }
    }
    Ok(())
}

/// An AdamW step on parameters `p` with gradients `g` and moments `m`, `v`: equally long, contiguous, in four storages.
///
/// # Errors
/// If lengths or dtypes differ, an operand is not contiguous, two share a storage, or `step` is 0.
pub fn adamw(p: &Tensor, g: &Tensor, m: &Tensor, v: &Tensor, h: &AdamW) -> Result<()> {
    const OP: &str = "adamw";
    check(OP, p, &[("g", g), ("m", m), ("v", v)])?;
    if h.step == 0 {
        return Err(Error::shape(OP, "steps are counted from 1, got step 0"));
    }
    by_float!(p, OP, T => {
        let gs = View::<T>::new(g, OP, "g")?;
        let gs: &[T] = &gs;
        with_slice_mut::<T, _>(p, OP, |p| {
            with_slice_mut::<T, _>(m, OP, |m| {
                with_slice_mut::<T, _>(v, OP, |v| {
                    let rule = AdamRule::<T>::new(h);
                    let mut parts: Vec<_> = p
                        .chunks_mut(par::GRAIN)
                        .zip(gs.chunks(par::GRAIN))
                        .zip(m.chunks_mut(par::GRAIN).zip(v.chunks_mut(par::GRAIN)))
                        .collect();
                    par::blocks(&mut parts, 1, |_, parts| {
                        for ((p, g), (m, v)) in parts {
                            vectorize(#[inline(always)] || rule.step(p, g, m, v));
                        }
                    });
                    Ok(())
                })
            })
        })
    })
}

struct AdamRule<T> {
    grad_scale: T,
    keep: T,
    one_minus_beta1: T,
    beta2: T,
    one_minus_beta2: T,
    inv_sqrt_correction2: T,
    eps: T,
    step_size: T,
}

impl<T: Float> AdamRule<T> {
    fn new(h: &AdamW) -> Self {
        let correction = |beta: f64| 1.0 - beta.powf(h.step as f64);
        Self {
            grad_scale: T::of(f64::from(h.grad_scale)),
            keep: T::of(1.0 - h.lr * h.weight_decay),
            one_minus_beta1: T::of(1.0 - h.beta1),
            beta2: T::of(h.beta2),
            one_minus_beta2: T::of(1.0 - h.beta2),
            inv_sqrt_correction2: T::of(1.0 / correction(h.beta2).sqrt()),
            eps: T::of(h.eps),
            step_size: T::of(h.lr / correction(h.beta1)),
        }
    }

    #[inline(always)]
    fn step(&self, p: &mut [T], g: &[T], m: &mut [T], v: &mut [T]) {
        for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let g = g * self.grad_scale;
            *m += self.one_minus_beta1 * (g - *m);
            *v = self.beta2 * *v + self.one_minus_beta2 * g * g;
            let denominator = v.sqrt() * self.inv_sqrt_correction2 + self.eps;
            *p = *p * self.keep - self.step_size * (*m / denominator);
        }
    }
}

/// An SGD step: `d = grad_scale·g + weight_decay·p; buf = momentum·buf + d; p −= lr·buf`. `buf` starts as zeros.
///
/// # Errors
/// If lengths or dtypes differ, an operand is not contiguous, or two share a storage.
pub fn sgd(p: &Tensor, g: &Tensor, buf: &Tensor, h: &Sgd) -> Result<()> {
    const OP: &str = "sgd";
    check(OP, p, &[("g", g), ("buf", buf)])?;
    by_float!(p, OP, T => {
        let gs = View::<T>::new(g, OP, "g")?;
        let gs: &[T] = &gs;
        let (lr, momentum) = (T::of(h.lr), T::of(h.momentum));
        let (decay, scale) = (T::of(h.weight_decay), T::of(f64::from(h.grad_scale)));
        with_slice_mut::<T, _>(p, OP, |p| {
            with_slice_mut::<T, _>(buf, OP, |buf| {
                par::blocks2(p, par::GRAIN, buf, par::GRAIN, |i, p, buf| vectorize(#[inline(always)] || {
                    for ((p, buf), &g) in p.iter_mut().zip(buf).zip(&gs[i * par::GRAIN..]) {
                        *buf = momentum * *buf + (scale * g + decay * *p);
                        *p -= lr * *buf;
                    }
                }));
                Ok(())
            })
        })
    })
}
