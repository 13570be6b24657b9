//! Optimizer steps over flat ranges, in place and in one pass. The pass also rounds the new
//! parameters to the weights that a 16-bit model computes with.
//!
//! AdamW: Loshchilov & Hutter 2019. SGD with momentum: as in PyTorch. The order of the arithmetic
//! is PyTorch's. AdamW's moments may be kept in bf16.

use candle_core::{DType, Tensor};

use super::clip::Verdict;
use super::remainders;
pub use crate::tensor::arguments::optimizer::{AdamW, Segment, Sgd, StochasticRounding};
use crate::tensor::arguments::optimizer::{Maybe, Operands};
use crate::tensor::trace;
use crate::tensor::view::{expect_elements, same_storage};
use crate::{Error, Result, cpu, on_gpu};

impl Operands<'_> {
    /// `names` are the names of the states in messages. `may_be_narrow` allows bf16 states with f32
    /// gradients.
    fn check(&self, op: &'static str, names: [&'static str; 2], may_be_narrow: bool) -> Result<()> {
        let &Self { p, weight, g, first, second } = self;
        if self.has_remainders() {
            let high = weight.ok_or_else(|| {
                Error::shape(op, "p of dtype i16 is half of parameters: weight is wanted, too")
            })?;
            remainders::check(op, high, Some(p))?;
        }
        let mut seen = vec![p];
        if !p.is_contiguous() {
            return Err(Error::NotContiguous { op, what: "p" });
        }
        for (name, t) in
            [("weight", weight), ("g", Some(g)), (names[0], Some(first)), (names[1], second)]
        {
            let Some(t) = t else { continue };
            // Segments are views of the flattened tensor; flattening any other tensor would copy
            // it.
            if !t.is_contiguous() {
                return Err(Error::NotContiguous { op, what: name });
            }
            expect_elements(op, name, t, p.elem_count())?;
            let is_narrow = may_be_narrow && (t.dtype(), g.dtype()) == (DType::BF16, DType::F32);
            if names.contains(&name) && t.dtype() != g.dtype() && !is_narrow {
                return Err(Error::DType { op, dtype: t.dtype() });
            }
            if seen.iter().any(|other| same_storage(other, t)) {
                return Err(Error::shape(
                    op,
                    format!("{name} shares its storage with another operand"),
                ));
            }
            seen.push(t);
        }
        Ok(())
    }

    /// Calls `f` with each segment's part of every tensor.
    ///
    /// # Errors
    /// Those of `f`.
    fn by_segment(
        &self,
        segments: &[Segment],
        f: impl Fn(&Segment, Operands) -> Result<()>,
    ) -> Result<()> {
        if let [segment] = segments {
            return f(segment, *self);
        }
        let mut start = 0;
        for segment in segments {
            let part = |t: &Tensor| t.flatten_all()?.narrow(0, start, segment.len);
            let maybe = |t: Maybe| t.map(part).transpose();
            let (p, weight, g) = (part(self.p)?, maybe(self.weight)?, part(self.g)?);
            let (first, second) = (part(self.first)?, maybe(self.second)?);
            f(
                segment,
                Operands {
                    p: &p,
                    weight: weight.as_ref(),
                    g: &g,
                    first: &first,
                    second: second.as_ref(),
                },
            )?;
            start += segment.len;
        }
        Ok(())
    }
}

impl Segment {
    /// # Errors
    /// If `segments` do not cover all of `t`, or the rounding of one is not valid.
    fn check(segments: &[Self], t: &Tensor, op: &'static str) -> Result<()> {
        let total: usize = segments.iter().map(|s| s.len).sum();
        if total == t.elem_count() {
            return segments.iter().try_for_each(|s| s.rounding.check(op));
        }
        Err(Error::shape(
            op,
            format!("segments of {total} elements of p, which has shape {:?}", t.dims()),
        ))
    }
}

/// An AdamW step on parameters `p` with gradients `g` and moments `m`, `v`: equally long,
/// contiguous, in four storages.
///
/// - `weight`, if given, gets the new parameters, rounded. It has a storage of its own and any
///   float dtype.
/// - If `p` is i16, it and the bf16 `weight` are the [`remainders`] of f32 parameters. The step
///   updates both.
/// - With f32 gradients, `m` and `v` may each be bf16. Then `m` is rounded to nearest, and `v`
///   stochastically ([`StochasticRounding`]). The step itself uses their values before rounding.
///
/// # Errors
/// If lengths or dtypes differ, an operand is not contiguous, two share a storage, or `step` is 0.
pub fn adamw(
    p: &Tensor,
    weight: Option<&Tensor>,
    g: &Tensor,
    m: &Tensor,
    v: &Tensor,
    h: &AdamW,
) -> Result<()> {
    adamw_segments(p, weight, g, m, v, h, None, &Segment::all(p, h.step))
}

/// As [`adamw`] of each segment separately, bit for bit; weight decay can be off for some. On a GPU
/// one launch serves many segments. The factor of a `verdict` replaces `h.grad_scale`, and nothing
/// changes if the verdict rejects the step.
///
/// # Errors
/// As [`adamw`], or if `segments` do not cover all of `p`.
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
    of.by_segment(segments, |segment, of| cpu::optimizer::adamw(&of, segment, h, OP))
}

/// A span of a step. The step reads and writes `p`, reads or writes `others`, and writes `weight`,
/// or reads and writes `weight` where it is the high half of the parameters.
fn moves(
    name: &'static str,
    p: &Tensor,
    weight: Option<&Tensor>,
    others: &[&Tensor],
) -> trace::Span {
    let weights = weight.into_iter().chain(weight.filter(|_| p.dtype() == DType::I16));
    trace::moves(
        name,
        &[p, p].into_iter().chain(weights).chain(others.iter().copied()).collect::<Vec<_>>(),
    )
}

/// The factor for the gradients of a step on the CPU; none if the step is skipped.
fn factor(known: f32, verdict: Option<&Verdict>) -> Result<Option<f32>> {
    let Some(verdict) = verdict else { return Ok(Some(known)) };
    let decided = verdict.decided()?;
    Ok(decided.applied.then_some(decided.factor))
}

/// An SGD step: `d = grad_scale·g + weight_decay·p; buf = momentum·buf + d; p −= lr·buf`. `buf`
/// starts as zeros; `weight` as in [`adamw`].
///
/// # Errors
/// If lengths or dtypes differ, an operand is not contiguous, or two share a storage.
pub fn sgd(p: &Tensor, weight: Option<&Tensor>, g: &Tensor, buf: &Tensor, h: &Sgd) -> Result<()> {
    sgd_segments(p, weight, g, buf, h, None, &Segment::all(p, 0))
}

/// As [`sgd`] of each segment separately, bit for bit; weight decay can be off for some. On a GPU
/// one launch serves many segments. `verdict` as in [`adamw_segments`].
///
/// # Errors
/// As [`sgd`], or if `segments` do not cover all of `p`.
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
    let h = &Sgd { grad_scale, ..*h };
    of.by_segment(segments, |segment, of| cpu::optimizer::sgd(&of, segment, h, OP))
}
