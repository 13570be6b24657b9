//! The arithmetic of AdamW and SGD on one element.

use super::place::Place;
use super::run::Rule;
use crate::tensor::arguments::optimizer::{AdamRule, Segment, Sgd};
use crate::tensor::element::Float;

impl<T: Float> Rule<T> for AdamRule<T> {
    #[inline(always)]
    fn step(
        &self,
        p: impl Iterator<Item = impl Place<T>>,
        g: &[T],
        m: impl Iterator<Item = impl Place<T>>,
        v: impl Iterator<Item = impl Place<T>>,
    ) {
        for (((mut p, &g), mut m), mut v) in p.zip(g).zip(m).zip(v) {
            let g = g * self.grad_scale;
            let first = m.get() + self.one_minus_beta1 * (g - m.get());
            let second = self.beta2 * v.get() + self.one_minus_beta2 * g * g;
            m.set(first);
            v.set(second);
            // The step uses the values before rounding; only the stored ones are rounded.
            let denominator = second.sqrt() * self.inv_sqrt_correction2 + self.eps;
            p.set(p.get() * self.keep - self.step_size * (first / denominator));
        }
    }
}

pub(super) struct SgdRule<T> {
    lr: T,
    momentum: T,
    decay: T,
    grad_scale: T,
}

impl<T: Float> SgdRule<T> {
    pub fn new(h: &Sgd, segment: &Segment) -> Self {
        Self {
            lr: T::of(h.lr),
            momentum: T::of(h.momentum),
            decay: T::of(segment.decay(h.weight_decay)),
            grad_scale: T::of(f64::from(h.grad_scale)),
        }
    }
}

impl<T: Float> Rule<T> for SgdRule<T> {
    #[inline(always)]
    fn step(
        &self,
        p: impl Iterator<Item = impl Place<T>>,
        g: &[T],
        buf: impl Iterator<Item = impl Place<T>>,
        _: impl Iterator<Item = impl Place<T>>,
    ) {
        for ((mut p, mut buf), &g) in p.zip(buf).zip(g) {
            let momentum = self.momentum * buf.get() + (self.grad_scale * g + self.decay * p.get());
            buf.set(momentum);
            p.set(p.get() - self.lr * momentum);
        }
    }
}
