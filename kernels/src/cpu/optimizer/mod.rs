//! Optimizer steps over flat ranges, in place and in one pass, which also rounds the new parameters to the weights that a
//! 16-bit model computes with.
//!
//! AdamW: Loshchilov & Hutter 2019; SGD with momentum: as PyTorch's. Arithmetic in the order of PyTorch's. AdamW's moments may be kept in bf16.

mod dither;
mod place;
mod run;

use std::ops::Range;

use candle_core::{DType, Tensor};

pub use self::dither::Dither;
use self::place::Place;
use self::run::{Rule, step_f32, step_f64};
use crate::ops::clip::Verdict;
use crate::ops::halves;
use crate::tensor::element::Float;
use crate::tensor::trace;
use crate::tensor::view::{expect_elements, same_storage};
use crate::{Error, Result, on_gpu};

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

/// A tensor of a step that there may be none of.
type Maybe<'a> = Option<&'a Tensor>;

/// The tensors of a step: equally long and, but for `weight`, halves and states in bf16, of one dtype; all in storages of their own.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    /// The parameters; of dtype i16 the low halves of f32 ones, whose high halves are `weight`.
    pub p: &'a Tensor,
    /// Gets the new parameters, rounded.
    pub weight: Maybe<'a>,
    pub g: &'a Tensor,
    pub first: &'a Tensor,
    pub second: Maybe<'a>,
}

impl Operands<'_> {
    /// `names` are those of the states in messages, which beside f32 may be bf16 or not.
    fn check(&self, op: &'static str, names: [&'static str; 2], may_be_narrow: bool) -> Result<()> {
        let &Self { p, weight, g, first, second } = self;
        if self.in_halves() {
            let high = weight
                .ok_or_else(|| Error::shape(op, "p of dtype i16 is half of parameters: weight is wanted, too"))?;
            halves::check(op, high, Some(p))?;
        }
        let mut seen = vec![p];
        if !p.is_contiguous() {
            return Err(Error::NotContiguous { op, what: "p" });
        }
        for (name, t) in [("weight", weight), ("g", Some(g)), (names[0], Some(first)), (names[1], second)] {
            let Some(t) = t else { continue };
            // Segments are views of the flattened tensor, which of others would be a copy.
            if !t.is_contiguous() {
                return Err(Error::NotContiguous { op, what: name });
            }
            expect_elements(op, name, t, p.elem_count())?;
            let is_narrow = may_be_narrow && (t.dtype(), g.dtype()) == (DType::BF16, DType::F32);
            if names.contains(&name) && t.dtype() != g.dtype() && !is_narrow {
                return Err(Error::DType { op, dtype: t.dtype() });
            }
            if seen.iter().any(|other| same_storage(other, t)) {
                return Err(Error::shape(op, format!("{name} shares its storage with another operand")));
            }
            seen.push(t);
        }
        Ok(())
    }

    /// Whether the parameters are kept as [`halves`].
    pub fn in_halves(&self) -> bool {
        self.p.dtype() == DType::I16
    }

    /// Calls `f` with what each segment has of every tensor.
    ///
    /// # Errors
    /// What `f` returns.
    fn by_segment(&self, segments: &[Segment], f: impl Fn(&Segment, Operands) -> Result<()>) -> Result<()> {
        if let [segment] = segments {
            return f(segment, *self);
        }
        let mut start = 0;
        for segment in segments {
            let part = |t: &Tensor| t.flatten_all()?.narrow(0, start, segment.len);
            let maybe = |t: Maybe| t.map(part).transpose();
            let (p, weight, g) = (part(self.p)?, maybe(self.weight)?, part(self.g)?);
            let (first, second) = (part(self.first)?, maybe(self.second)?);
            f(segment, Operands { p: &p, weight: weight.as_ref(), g: &g, first: &first, second: second.as_ref() })?;
            start += segment.len;
        }
        Ok(())
    }
}

/// Neighbouring elements that a step treats alike: a parameter, a part of one, or several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub len: usize,
    /// Whether the step's weight decay is theirs.
    pub decays: bool,
    /// How their second moments are rounded, where these are bf16.
    pub dither: Dither,
}

impl Segment {
    /// All of `t`, which is a parameter of its own.
    fn all(t: &Tensor, step: u64) -> [Self; 1] {
        [Self { len: t.elem_count(), decays: true, dither: Dither::whole(Dither::key(0, "", step)) }]
    }

    /// # Errors
    /// If `segments` are not all of `t`, or not rounded as anything is.
    fn check(segments: &[Self], t: &Tensor, op: &'static str) -> Result<()> {
        let total: usize = segments.iter().map(|s| s.len).sum();
        if total == t.elem_count() {
            return segments.iter().try_for_each(|s| s.dither.check(op));
        }
        Err(Error::shape(op, format!("segments of {total} elements of p, which has shape {:?}", t.dims())))
    }

    /// Those of the elements `part` of what `segments` are.
    pub fn of_part(segments: &[Self], part: Range<usize>) -> Vec<Self> {
        let mut end = 0;
        let clip = |segment: &Self| {
            let start = end;
            end += segment.len;
            let (first, last) = (start.max(part.start), end.min(part.end));
            let dither = segment.dither.skip(first.saturating_sub(start));
            (first < last).then(|| Self { len: last - first, dither, ..*segment })
        };
        segments.iter().filter_map(clip).collect()
    }

    pub(crate) fn decay(&self, weight_decay: f64) -> f64 {
        if self.decays { weight_decay } else { 0.0 }
    }
}

/// An AdamW step on parameters `p` with gradients `g` and moments `m`, `v`: equally long, contiguous, in four storages. Where
/// `weight` is given, in a storage of its own and of any float dtype, it gets the new parameters, rounded. Where `p` is of dtype i16, it and
/// bf16 `weight` are the [`halves`] of f32 parameters, which both change. Beside f32 gradients `m` and `v` may each be bf16: then `m` is rounded to the nearest,
/// and `v` stochastically ([`Dither`]); the step itself goes by what they were before they were rounded.
///
/// # Errors
/// If lengths or dtypes differ, an operand is not contiguous, two share a storage, or `step` is 0.
pub fn adamw(p: &Tensor, weight: Option<&Tensor>, g: &Tensor, m: &Tensor, v: &Tensor, h: &AdamW) -> Result<()> {
    adamw_segments(p, weight, g, m, v, h, None, &Segment::all(p, h.step))
}

/// As [`adamw`] of every segment by itself, bit for bit, some without weight decay; on a GPU in one launch for many. The factor of a `verdict`
/// stands in place of `h.grad_scale`, and nothing changes where it is against the step.
///
/// # Errors
/// As [`adamw`], or if `segments` are not all of `p`.
pub fn adamw_segments(
    p: &Tensor,
    weight: Option<&Tensor>,
    g: &Tensor,
    m: &Tensor,
    v: &Tensor,
    h: &AdamW,
    verdict: Option<&Verdict>,
    segments: &[Segment],
) -> Result<()> {
    let _span = moves("adamw", p, weight, &[g, m, m, v, v]);
    const OP: &str = "adamw";
    if h.step == 0 {
        return Err(Error::shape(OP, "steps are counted from 1, got step 0"));
    }
    let of = Operands { p, weight, g, first: m, second: Some(v) };
    of.check(OP, ["m", "v"], true)?;
    Segment::check(segments, p, OP)?;
    on_gpu!(p, optimizer::adamw(&of, h, verdict, segments, OP));
    let Some(grad_scale) = factor(h.grad_scale, verdict)? else { return Ok(()) };
    let h = &AdamW { grad_scale, ..*h };
    of.by_segment(segments, |segment, of| match of.g.dtype() {
        DType::F64 => step_f64(OP, &of, segment, &AdamRule::new(h, segment)),
        _ => step_f32(OP, &of, segment, &AdamRule::new(h, segment)),
    })
}

/// A span of a step that reads and writes `p`, reads or writes `others`, and writes `weight`, or reads and writes it as the high half of
/// parameters.
fn moves(name: &'static str, p: &Tensor, weight: Option<&Tensor>, others: &[&Tensor]) -> trace::Span {
    let weights = weight.into_iter().chain(weight.filter(|_| p.dtype() == DType::I16));
    trace::moves(name, &[p, p].into_iter().chain(weights).chain(others.iter().copied()).collect::<Vec<_>>())
}

/// The factor on the gradients of a step on the CPU; none if it is not to be made.
fn factor(known: f32, verdict: Option<&Verdict>) -> Result<Option<f32>> {
    let Some(verdict) = verdict else { return Ok(Some(known)) };
    let decided = verdict.decided()?;
    Ok(decided.applied.then_some(decided.factor))
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
            // What is rounded is what is kept, not what this step goes by.
            let denominator = second.sqrt() * self.inv_sqrt_correction2 + self.eps;
            p.set(p.get() * self.keep - self.step_size * (first / denominator));
        }
    }
}

/// An SGD step: `d = grad_scale·g + weight_decay·p; buf = momentum·buf + d; p −= lr·buf`. `buf` starts as zeros; `weight` as in
/// [`adamw`].
///
/// # Errors
/// If lengths or dtypes differ, an operand is not contiguous, or two share a storage.
pub fn sgd(p: &Tensor, weight: Option<&Tensor>, g: &Tensor, buf: &Tensor, h: &Sgd) -> Result<()> {
    sgd_segments(p, weight, g, buf, h, None, &Segment::all(p, 0))
}

/// As [`sgd`] of every segment by itself, bit for bit, some without weight decay; on a GPU in one launch for many. `verdict` as in
/// [`adamw_segments`].
///
/// # Errors
/// As [`sgd`], or if `segments` are not all of `p`.
pub fn sgd_segments(
    p: &Tensor,
    weight: Option<&Tensor>,
    g: &Tensor,
    buf: &Tensor,
    h: &Sgd,
    verdict: Option<&Verdict>,
    segments: &[Segment],
) -> Result<()> {
    let _span = moves("sgd", p, weight, &[g, buf, buf]);
    const OP: &str = "sgd";
    let of = Operands { p, weight, g, first: buf, second: None };
    of.check(OP, ["buf", ""], false)?;
    Segment::check(segments, p, OP)?;
    on_gpu!(p, optimizer::sgd(&of, h, verdict, segments, OP));
    let Some(grad_scale) = factor(h.grad_scale, verdict)? else { return Ok(()) };
    of.by_segment(segments, |segment, of| match of.g.dtype() {
        DType::F64 => step_f64(OP, &of, segment, &SgdRule::new(h, grad_scale, segment)),
        _ => step_f32(OP, &of, segment, &SgdRule::new(h, grad_scale, segment)),
    })
}

struct SgdRule<T> {
    lr: T,
    momentum: T,
    decay: T,
    grad_scale: T,
}

impl<T: Float> SgdRule<T> {
    fn new(h: &Sgd, grad_scale: f32, segment: &Segment) -> Self {
        Self {
            lr: T::of(h.lr),
            momentum: T::of(h.momentum),
            decay: T::of(segment.decay(h.weight_decay)),
            grad_scale: T::of(f64::from(grad_scale)),
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
