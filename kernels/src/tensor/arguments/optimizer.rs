//! Settings and tensors of optimizer steps.

use std::ops::Range;

use candle_core::{DType, Tensor};

pub use super::stochastic_rounding::StochasticRounding;
use crate::tensor::element::Float;

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
    /// Factor for the gradient, applied before anything else (clipping, loss scale).
    pub grad_scale: f32,
}

/// One step's settings of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    pub lr: f64,
    pub momentum: f64,
    /// L2: added to the gradient as weight_decay·p.
    pub weight_decay: f64,
    /// Factor for the gradient, applied before anything else.
    pub grad_scale: f32,
}

/// An optional tensor of a step.
pub(crate) type Maybe<'a> = Option<&'a Tensor>;

/// The tensors of a step, equally long and each in a storage of its own. All have one dtype, except
/// `weight`, halves, and states in bf16.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    /// The parameters; if i16, the low halves of f32 parameters, with `weight` as the high halves.
    pub p: &'a Tensor,
    /// Gets the new parameters, rounded.
    pub weight: Maybe<'a>,
    pub g: &'a Tensor,
    pub first: &'a Tensor,
    pub second: Maybe<'a>,
}

impl Operands<'_> {
    /// Whether the parameters are kept as weights and remainders.
    pub fn has_remainders(&self) -> bool {
        self.p.dtype() == DType::I16
    }
}

/// Neighbouring elements that a step treats alike: a parameter, a part of one, or several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub len: usize,
    /// Whether the step's weight decay applies to them.
    pub decays: bool,
    /// How second moments in bf16 are rounded.
    pub rounding: StochasticRounding,
}

impl Segment {
    /// All of `t`, as one parameter.
    pub(crate) fn all(t: &Tensor, step: u64) -> [Self; 1] {
        [Self {
            len: t.elem_count(),
            decays: true,
            rounding: StochasticRounding::whole(StochasticRounding::key(0, "", step)),
        }]
    }

    /// The segments of the elements `part` within `segments`.
    pub fn of_part(segments: &[Self], part: Range<usize>) -> Vec<Self> {
        let mut end = 0;
        let clip = |segment: &Self| {
            let start = end;
            end += segment.len;
            let (first, last) = (start.max(part.start), end.min(part.end));
            let rounding = segment.rounding.skip(first.saturating_sub(start));
            (first < last).then(|| Self { len: last - first, rounding, ..*segment })
        };
        segments.iter().filter_map(clip).collect()
    }

    pub(crate) fn decay(&self, weight_decay: f64) -> f64 {
        if self.decays { weight_decay } else { 0.0 }
    }
}

pub(crate) struct AdamRule<T> {
    pub grad_scale: T,
    pub keep: T,
    pub one_minus_beta1: T,
    pub beta2: T,
    pub one_minus_beta2: T,
    pub inv_sqrt_correction2: T,
    pub eps: T,
    pub step_size: T,
}

impl<T: Float> AdamRule<T> {
    pub fn new(h: &AdamW, segment: &Segment) -> Self {
        let correction = |beta: f64| 1.0 - beta.powf(h.step as f64);
        Self {
            grad_scale: T::of(f64::from(h.grad_scale)),
            keep: T::of(1.0 - h.lr * segment.decay(h.weight_decay)),
            one_minus_beta1: T::of(1.0 - h.beta1),
            beta2: T::of(h.beta2),
            one_minus_beta2: T::of(1.0 - h.beta2),
            inv_sqrt_correction2: T::of(1.0 / correction(h.beta2).sqrt()),
            eps: T::of(h.eps),
            step_size: T::of(h.lr / correction(h.beta1)),
        }
    }
}
