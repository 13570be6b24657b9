//! Steps on the CPU.

use candle_core::DType;
use half::bf16;

use super::place::{Parameters, Place, State};
use crate::Result;
use crate::tensor::arguments::optimizer::{Maybe, Operands, Segment, StochasticRounding};
use crate::tensor::element::{Float, by_elem};
use crate::tensor::host::{HostElem, with_slice_mut};
use crate::tensor::output::Uninit;
use crate::tensor::parallel;
use crate::tensor::simd::vectorize;
use crate::tensor::view::View;

/// The arithmetic of a step.
pub(super) trait Rule<T>: Sync {
    /// Updates parameters `p` and the states from gradients `g`. All are equally long; `second` is
    /// empty if the rule has one state.
    fn step(
        &self,
        p: impl Iterator<Item = impl Place<T>>,
        g: &[T],
        first: impl Iterator<Item = impl Place<T>>,
        second: impl Iterator<Item = impl Place<T>>,
    );
}

/// Steps f32 operands, all of them one segment, in parallel.
pub(super) fn step_f32(
    op: &'static str,
    of: &Operands,
    segment: &Segment,
    rule: &impl Rule<f32>,
) -> Result<()> {
    let narrow = |state: Maybe| state.is_some_and(|t| t.dtype() == DType::BF16);
    let step = match (narrow(Some(of.first)), narrow(of.second), of.has_remainders()) {
        (false, false, false) => step_whole::<f32, f32, f32, _>,
        (false, true, false) => step_whole::<f32, f32, bf16, _>,
        (true, false, false) => step_whole::<f32, bf16, f32, _>,
        (true, true, false) => step_whole::<f32, bf16, bf16, _>,
        (false, false, true) => step_remainders::<f32, f32, _>,
        (false, true, true) => step_remainders::<f32, bf16, _>,
        (true, false, true) => step_remainders::<bf16, f32, _>,
        (true, true, true) => step_remainders::<bf16, bf16, _>,
    };
    step(op, of, segment, rule)
}

/// As [`step_f32`], for f64 operands.
pub(super) fn step_f64(
    op: &'static str,
    of: &Operands,
    segment: &Segment,
    rule: &impl Rule<f64>,
) -> Result<()> {
    step_whole::<f64, f64, f64, _>(op, of, segment, rule)
}

/// Steps parameters, with states stored as `A` and `B`, and rounds the parameters of each block to
/// the weights.
fn step_whole<T: Float, A: State<T> + HostElem, B: State<T> + HostElem, R: Rule<T>>(
    op: &'static str,
    &Operands { p, weight, g, first, second }: &Operands,
    segment: &Segment,
    rule: &R,
) -> Result<()> {
    let g = View::<T>::new(g, op, "g")?;
    with_slice_mut::<T, _>(p, op, |p| {
        with_slice_mut::<A, _>(first, op, |first| {
            lend::<B>(second, op, |second| match weight {
                None => run(
                    (p, &mut [] as &mut [T], &g, first, second),
                    segment,
                    |at, p, _, g, first, second| {
                        step_block(rule, at, p, g, first, second);
                    },
                ),
                Some(weight) => {
                    by_elem!(weight, op, W => with_slice_mut::<W, _>(weight, op, |weight| {
                        run((p, weight, &g, first, second), segment, |at, p, weight, g, first, second| {
                            step_block(rule, at, &mut *p, g, first, second);
                            T::narrow_all(p, Uninit::over(weight));
                        })
                    }))
                }
            })
        })
    })
}

/// As [`step_whole`], for parameters that are two halves.
fn step_remainders<A: State<f32> + HostElem, B: State<f32> + HostElem, R: Rule<f32>>(
    op: &'static str,
    &Operands { p: low, weight: high, g, first, second }: &Operands,
    segment: &Segment,
    rule: &R,
) -> Result<()> {
    let g = View::<f32>::new(g, op, "g")?;
    with_slice_mut::<i16, _>(low, op, |low| {
        with_slice_mut::<A, _>(first, op, |first| {
            lend::<B>(second, op, |second| {
                lend::<bf16>(high, op, |high| {
                    run(
                        (low, high, &g, first, second),
                        segment,
                        |at, low, high, g, first, second| {
                            step_block(rule, at, (high, low), g, first, second);
                        },
                    )
                })
            })
        })
    })
}

/// Calls `f` with the elements of `t`, or with an empty slice.
fn lend<T: HostElem>(
    t: Maybe,
    op: &'static str,
    f: impl FnOnce(&mut [T]) -> Result<()>,
) -> Result<()> {
    match t {
        Some(t) => with_slice_mut(t, op, f),
        None => f(&mut []),
    }
}

/// Steps consecutive elements.
#[inline(always)]
fn step_block<T, A: State<T>, B: State<T>>(
    rule: &impl Rule<T>,
    mut rounding: StochasticRounding,
    mut p: impl Parameters<T>,
    g: &[T],
    first: &mut [A],
    second: &mut [B],
) {
    vectorize(
        #[inline(always)]
        || {
            if !B::STOCHASTIC {
                return rule.step(p.places(0..g.len()), g, A::nearest(first), B::nearest(second));
            }
            let mut start = 0;
            while start < g.len() {
                let (n, words) = rounding.words(g.len() - start);
                let row = start..start + n;
                let (first, second) = (
                    A::nearest(&mut first[row.clone()]),
                    B::random(&mut second[row.clone()], words),
                );
                rule.step(p.places(row.clone()), &g[row], first, second);
                rounding = rounding.skip(n);
                start += n;
            }
        },
    );
}

type Slices<'a, P, W, T, A, B> = (&'a mut [P], &'a mut [W], &'a [T], &'a mut [A], &'a mut [B]);

/// Calls `step` with blocks of each slice, in parallel: parameters, weights, gradients, first and
/// second state; and with the block's rounding.
fn run<P: Send, W: Send, T: Float, A: Send, B: Send>(
    (p, weight, g, first, second): Slices<P, W, T, A, B>,
    segment: &Segment,
    step: impl Fn(StochasticRounding, &mut [P], &mut [W], &[T], &mut [A], &mut [B]) + Sync,
) -> Result<()> {
    let inputs = p.chunks_mut(parallel::GRAIN).zip(g.chunks(parallel::GRAIN));
    let mut blocks: Vec<_> =
        inputs.zip(parts(weight)).zip(parts(first).zip(parts(second))).collect();
    parallel::blocks(&mut blocks, 1, |start, blocks| {
        for (i, (((p, g), weight), (first, second))) in blocks.iter_mut().enumerate() {
            step(segment.rounding.skip((start + i) * parallel::GRAIN), p, weight, g, first, second);
        }
    });
    Ok(())
}

/// The blocks of `slice`, followed by endless empty ones.
fn parts<T>(slice: &mut [T]) -> impl Iterator<Item = &mut [T]> {
    slice.chunks_mut(parallel::GRAIN).chain(std::iter::repeat_with(Default::default))
}
