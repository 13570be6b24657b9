//! Optimizer steps over flat ranges, in place and in one pass, which also rounds the new parameters to the weights that a
//! 16-bit model computes with.
//!
//! AdamW: Loshchilov & Hutter 2019; SGD with momentum: as PyTorch's. Arithmetic in the order of PyTorch's.

use candle_core::{DType, Tensor};
use half::bf16;

use crate::clip::Verdict;
use crate::float::{Float, by_elem, by_float};
use crate::host::{HostElem, with_slice_mut};
use crate::output::Unwritten;
use crate::simd::vectorize;
use crate::view::{View, expect_elements, same_storage};
use crate::{Error, Result, halves, on_gpu, par, trace};

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

/// The tensors of a step: equally long and, but for `weight` and halves, of one dtype; all in storages of their own.
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
    /// `names` are those of the states in messages.
    fn check(&self, op: &'static str, names: [&str; 2]) -> Result<()> {
        let &Self { p, weight, g, first, second } = self;
        if self.in_halves() {
            let high = weight
                .ok_or_else(|| Error::shape(op, "p of dtype i16 is half of parameters: weight is wanted, too"))?;
            halves::check(op, high, Some(p))?;
        }
        let mut seen = vec![p];
        for (name, t) in [("weight", weight), ("g", Some(g)), (names[0], Some(first)), (names[1], second)] {
            let Some(t) = t else { continue };
            expect_elements(op, name, t, p.elem_count())?;
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

/// Neighbouring elements that a step treats alike: a parameter, or several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub len: usize,
    /// Whether the step's weight decay is theirs.
    pub decays: bool,
}

impl Segment {
    /// All of `t`.
    fn all(t: &Tensor) -> [Self; 1] {
        [Self { len: t.elem_count(), decays: true }]
    }

    /// # Errors
    /// If `segments` are not all of `t`.
    fn check(segments: &[Self], t: &Tensor, op: &'static str) -> Result<()> {
        let total: usize = segments.iter().map(|s| s.len).sum();
        if total == t.elem_count() {
            return Ok(());
        }
        Err(Error::shape(op, format!("segments of {total} elements of p, which has shape {:?}", t.dims())))
    }

    pub(crate) fn decay(&self, weight_decay: f64) -> f64 {
        if self.decays { weight_decay } else { 0.0 }
    }
}

/// Where a parameter is kept.
trait Place<T> {
    fn get(&self) -> T;
    fn set(&mut self, value: T);
}

impl<T: Float> Place<T> for &mut T {
    #[inline(always)]
    fn get(&self) -> T {
        **self
    }

    #[inline(always)]
    fn set(&mut self, value: T) {
        **self = value;
    }
}

impl Place<f32> for (&mut bf16, &mut i16) {
    #[inline(always)]
    fn get(&self) -> f32 {
        halves::join_value(*self.0, *self.1)
    }

    #[inline(always)]
    fn set(&mut self, value: f32) {
        (*self.0, *self.1) = halves::split_value(value);
    }
}

/// What a step does.
trait Rule<T>: Sync {
    /// Changes parameters `p` and state, by gradients `g`. All are equally long; `second` is empty where the rule has none.
    fn step(&self, p: impl Iterator<Item = impl Place<T>>, g: &[T], first: &mut [T], second: &mut [T]);
}

/// Steps the operands, in parallel, and rounds the parameters of each block to the weights.
fn step_whole<T: Float>(
    op: &'static str,
    Operands { p, weight, g, first, second }: Operands,
    rule: &impl Rule<T>,
) -> Result<()> {
    let g = View::<T>::new(g, op, "g")?;
    with_slice_mut::<T, _>(p, op, |p| {
        with_slice_mut::<T, _>(first, op, |first| {
            lend::<T>(second, op, |second| match weight {
                None => run((p, &mut [] as &mut [T], &g, first, second), |p, _, g, first, second| {
                    vectorize(
                        #[inline(always)]
                        || rule.step(p.iter_mut(), g, first, second),
                    );
                }),
                Some(weight) => by_elem!(weight, op, W => with_slice_mut::<W, _>(weight, op, |weight| {
                    run((p, weight, &g, first, second), |p, weight, g, first, second| {
                        vectorize(#[inline(always)] || rule.step(p.iter_mut(), g, first, second));
                        T::narrow_all(p, Unwritten::over(weight));
                    })
                })),
            })
        })
    })
}

/// As [`step_whole`], of parameters that are [`halves`].
fn step_halves(
    op: &'static str,
    Operands { p: low, weight: high, g, first, second }: Operands,
    rule: &impl Rule<f32>,
) -> Result<()> {
    let g = View::<f32>::new(g, op, "g")?;
    with_slice_mut::<i16, _>(low, op, |low| {
        with_slice_mut::<f32, _>(first, op, |first| {
            lend::<f32>(second, op, |second| {
                lend::<bf16>(high, op, |high| {
                    run((low, high, &g, first, second), |low, high, g, first, second| {
                        vectorize(
                            #[inline(always)]
                            || rule.step(high.iter_mut().zip(low), g, first, second),
                        );
                    })
                })
            })
        })
    })
}

/// Calls `f` with the elements of `t`, or with none.
fn lend<T: HostElem>(t: Maybe, op: &'static str, f: impl FnOnce(&mut [T]) -> Result<()>) -> Result<()> {
    match t {
        Some(t) => with_slice_mut(t, op, f),
        None => f(&mut []),
    }
}

type Slices<'a, P, W, T> = (&'a mut [P], &'a mut [W], &'a [T], &'a mut [T], &'a mut [T]);

/// Calls `step` with blocks of each, in parallel: parameters, weights, gradients, first and second state.
fn run<P: Send, W: Send, T: Float>(
    (p, weight, g, first, second): Slices<P, W, T>,
    step: impl Fn(&mut [P], &mut [W], &[T], &mut [T], &mut [T]) + Sync,
) -> Result<()> {
    let inputs = p.chunks_mut(par::GRAIN).zip(g.chunks(par::GRAIN));
    let mut blocks: Vec<_> = inputs.zip(parts(weight)).zip(parts(first).zip(parts(second))).collect();
    par::blocks(&mut blocks, 1, |_, blocks| {
        for (((p, g), weight), (first, second)) in blocks {
            step(p, weight, g, first, second);
        }
    });
    Ok(())
}

/// The blocks of `slice`, then empty ones without end.
fn parts<T>(slice: &mut [T]) -> impl Iterator<Item = &mut [T]> {
    slice.chunks_mut(par::GRAIN).chain(std::iter::repeat_with(Default::default))
}

/// An AdamW step on parameters `p` with gradients `g` and moments `m`, `v`: equally long, contiguous, in four storages. Where
/// `weight` is given, in a storage of its own and of any float dtype, it gets the new parameters, rounded. Where `p` is of dtype i16, it and
/// bf16 `weight` are the [`halves`] of f32 parameters, which both change.
///
/// # Errors
/// If lengths or dtypes differ, an operand is not contiguous, two share a storage, or `step` is 0.
pub fn adamw(p: &Tensor, weight: Option<&Tensor>, g: &Tensor, m: &Tensor, v: &Tensor, h: &AdamW) -> Result<()> {
    adamw_segments(p, weight, g, m, v, h, None, &Segment::all(p))
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
    of.check(OP, ["m", "v"])?;
    Segment::check(segments, p, OP)?;
    on_gpu!(p, optimizer::adamw(&of, h, verdict, segments, OP));
    let Some(grad_scale) = factor(h.grad_scale, verdict)? else { return Ok(()) };
    let h = &AdamW { grad_scale, ..*h };
    if of.in_halves() {
        return of.by_segment(segments, |segment, of| step_halves(OP, of, &AdamRule::new(h, segment)));
    }
    by_float!(p, OP, T => of.by_segment(segments, |segment, of| {
        step_whole(OP, of, &AdamRule::<T>::new(h, segment))
    }))
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
    fn step(&self, p: impl Iterator<Item = impl Place<T>>, g: &[T], m: &mut [T], v: &mut [T]) {
        for (((mut p, &g), m), v) in p.zip(g).zip(m).zip(v) {
            let g = g * self.grad_scale;
            *m += self.one_minus_beta1 * (g - *m);
            *v = self.beta2 * *v + self.one_minus_beta2 * g * g;
            let denominator = v.sqrt() * self.inv_sqrt_correction2 + self.eps;
            p.set(p.get() * self.keep - self.step_size * (*m / denominator));
        }
    }
}

/// An SGD step: `d = grad_scale·g + weight_decay·p; buf = momentum·buf + d; p −= lr·buf`. `buf` starts as zeros; `weight` as in
/// [`adamw`].
///
/// # Errors
/// If lengths or dtypes differ, an operand is not contiguous, or two share a storage.
pub fn sgd(p: &Tensor, weight: Option<&Tensor>, g: &Tensor, buf: &Tensor, h: &Sgd) -> Result<()> {
    sgd_segments(p, weight, g, buf, h, None, &Segment::all(p))
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
    of.check(OP, ["buf", ""])?;
    Segment::check(segments, p, OP)?;
    on_gpu!(p, optimizer::sgd(&of, h, verdict, segments, OP));
    let Some(grad_scale) = factor(h.grad_scale, verdict)? else { return Ok(()) };
    if of.in_halves() {
        return of.by_segment(segments, |segment, of| step_halves(OP, of, &SgdRule::new(h, grad_scale, segment)));
    }
    by_float!(p, OP, T => of.by_segment(segments, |segment, of| {
        step_whole(OP, of, &SgdRule::<T>::new(h, grad_scale, segment))
    }))
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
    fn step(&self, p: impl Iterator<Item = impl Place<T>>, g: &[T], buf: &mut [T], _: &mut [T]) {
        for ((mut p, buf), &g) in p.zip(buf).zip(g) {
            *buf = self.momentum * *buf + (self.grad_scale * g + self.decay * p.get());
            p.set(p.get() - self.lr * *buf);
        }
    }
}
