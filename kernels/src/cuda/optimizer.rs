//! Optimizer steps on a GPU: `cuda/optimizer.cu`.

use candle_core::{DType, Tensor};

use crate::Result;
use crate::tensor::arguments::clip::Verdict;
use crate::tensor::arguments::optimizer::{
    AdamRule, AdamW, Operands, Segment, Sgd, StochasticRounding,
};
use crate::tensor::gpu::launch::blocks;
use crate::tensor::gpu::memory::suffix;
use crate::tensor::gpu::{Args, Gpu, THREADS};

/// Segments per launch.
const SEGMENTS: usize = 64;
/// Elements per thread.
const PER_THREAD: usize = 4;

/// `Segments` of `cuda/optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Segments {
    ends: [u64; SEGMENTS],
    decay: [f32; SEGMENTS],
    count: u32,
    unused: u32,
}

/// `StochasticRounding` of `cuda/include/stochastic_rounding.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Numbers {
    row: u64,
    column: u64,
    width: u64,
    pitch: u64,
    key: u32,
    unused: u32,
}

impl From<StochasticRounding> for Numbers {
    fn from(StochasticRounding { key, row, column, width, pitch }: StochasticRounding) -> Self {
        Self { row, column, width, pitch, key, unused: 0 }
    }
}

/// `AdamW` of `cuda/optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Adam {
    grad_scale: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    inv_sqrt_correction2: f32,
    eps: f32,
    step_size: f32,
}

/// `Sgd` of `cuda/optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Momentum {
    grad_scale: f32,
    lr: f32,
    momentum: f32,
}

/// The segments cover all of the operands, which must have been checked.
pub fn adamw(
    of: &Operands,
    h: &AdamW,
    verdict: Option<&Verdict>,
    segments: &[Segment],
    op: &'static str,
) -> Result<()> {
    let rule = |segment: &Segment| AdamRule::<f32>::new(h, segment);
    let AdamRule {
        grad_scale,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        inv_sqrt_correction2,
        eps,
        step_size,
        ..
    } = rule(&Segment { len: 0, decays: true, rounding: StochasticRounding::default() });
    let adam = Adam {
        grad_scale,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        inv_sqrt_correction2,
        eps,
        step_size,
    };
    let segments: Vec<_> = segments.iter().map(|s| (s.len, rule(s).keep, s.rounding)).collect();
    // SAFETY: C layout, equal to the kernel's; no padding.
    step(of, ["m", "v"], "adamw", verdict, &segments, op, |args| unsafe {
        args.structure(&adam);
    })
}

/// As [`adamw`].
pub fn sgd(
    of: &Operands,
    h: &Sgd,
    verdict: Option<&Verdict>,
    segments: &[Segment],
    op: &'static str,
) -> Result<()> {
    let sgd = Momentum { grad_scale: h.grad_scale, lr: h.lr as f32, momentum: h.momentum as f32 };
    let segments: Vec<_> =
        segments.iter().map(|s| (s.len, s.decay(h.weight_decay) as f32, s.rounding)).collect();
    // SAFETY: as above.
    step(of, ["buf", ""], "sgd", verdict, &segments, op, |args| unsafe {
        args.structure(&sgd);
    })
}

/// The segments of each launch: up to [`SEGMENTS`]. Where possible, their total is a multiple of
/// [`PER_THREAD`], so that the next launch can use vectors, too.
fn chunks(
    mut segments: &[(usize, f32, StochasticRounding)],
) -> impl Iterator<Item = &[(usize, f32, StochasticRounding)]> {
    std::iter::from_fn(move || {
        let most = segments.len().min(SEGMENTS);
        let mut end = 0;
        let ends = segments[..most].iter().map(|&(len, ..)| {
            end += len;
            end
        });
        let even = ends.enumerate().filter(|(_, end)| end.is_multiple_of(PER_THREAD)).last();
        let count = even.filter(|_| most < segments.len()).map_or(most, |(last, _)| last + 1);
        let (now, rest) = segments.split_at(count);
        segments = rest;
        (count > 0).then_some(now)
    })
}

/// Each of `segments` has its number of elements, its weight-decay factor for the kernel, and the
/// rounding of second moments.
fn step(
    of: &Operands,
    names: [&'static str; 2],
    kernel: &str,
    verdict: Option<&Verdict>,
    segments: &[(usize, f32, StochasticRounding)],
    op: &'static str,
    rule: impl Fn(&mut Args),
) -> Result<()> {
    let gpu = Gpu::of(of.p, op)?;
    let (kept, size) = if of.has_remainders() { (DType::I16, 2) } else { (DType::F32, 4) };
    let (p, g) = (gpu.inplace(of.p, kept, op, "p")?, gpu.input(of.g, DType::F32, op, "g")?);
    let inplace = |t: &Tensor, name| {
        gpu.inplace(t, t.dtype(), op, name).map(|at| (at, t.dtype().size_in_bytes()))
    };
    // The operands' check has verified the dtypes of states.
    let (first, first_size) = inplace(of.first, names[0])?;
    let second = of.second.map(|t| inplace(t, names[1])).transpose()?;
    let weight = of.weight.map(|t| inplace(t, "weight")).transpose()?;
    let (narrow_first, narrow_second) =
        (first_size == 2, second.is_some_and(|(_, size)| size == 2));
    let verdict = verdict.map(|v| gpu.input(v.values(), DType::F32, op, "verdict")).transpose()?;
    let weights = match of.weight {
        Some(_) if of.has_remainders() => "split",
        Some(weight) => suffix(weight.dtype(), op)?,
        None => "none",
    };
    let states = [(narrow_first, "_m16"), (narrow_second, "_v16")]
        .map(|(narrow, of)| if narrow { of } else { "" });
    let kernel = format!("{kernel}_{weights}{}", states.concat());
    let mut at = 0;
    for segments in chunks(segments) {
        let mut table = Segments {
            ends: [0; SEGMENTS],
            decay: [0.0; SEGMENTS],
            count: segments.len() as u32,
            unused: 0,
        };
        let mut roundings = [Numbers::default(); SEGMENTS];
        let mut n = 0;
        for (i, &(len, decay, rounding)) in segments.iter().enumerate() {
            n += len;
            (table.ends[i], table.decay[i], roundings[i]) = (n as u64, decay, rounding.into());
        }
        let grid = [blocks(op, n, THREADS as usize * PER_THREAD)?, 1, 1];
        gpu.launch("optimizer", &kernel, grid, THREADS, 0, |args| {
            rule(args);
            args.optional(verdict);
            // SAFETY: as above.
            unsafe { args.structure(&table) };
            if narrow_second {
                // SAFETY: as above.
                unsafe { args.structure(&roundings) };
            }
            args.ptr(p.offset(size * at)).optional(weight.map(|(w, size)| w.offset(size * at)));
            args.ptr(g.offset(4 * at)).ptr(first.offset(first_size * at));
            if let Some((second, size)) = second {
                args.ptr(second.offset(size * at));
            }
            args.count(n);
        })?;
        at += n;
    }
    Ok(())
}
