//! Dropout (Srivastava et al. 2014) whose mask is a function of the place in the global problem, fused with bias and residual.
//!
//! An element's word is Philox keyed by (seed, step, layer, site) at counter (global token, hidden index / 4).

use candle_core::{DType, Device, Tensor};

use crate::tensor::device::upload;
use crate::tensor::element::{Elem, Float, by_elem};
use crate::tensor::output::{self, Unwritten};
use crate::tensor::philox::{WordRow, philox4x32, words};
use crate::tensor::simd::vectorize;
use crate::tensor::view::{View, expect_dtype, expect_shape, rows_of, tensor};
use crate::tensor::{parallel, trace};
use crate::{Error, Result, on_gpu};

/// Which of the run's dropout masks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutKey {
    pub seed: u64,
    /// Training step.
    pub step: u64,
    /// Global number of the layer.
    pub layer: u32,
    /// Which dropout of the layer.
    pub site: u32,
}

impl DropoutKey {
    /// Four words that stand for the key: two as Philox' key, two for its counter.
    pub(crate) fn derive(self) -> [u32; 4] {
        let [step0, step1] = words(self.step);
        let [k0, k1, layer, site] = self.without_step();
        philox4x32([step0, step1, layer, site], [k0, k1])
    }

    /// What they are made of besides the step.
    pub(crate) fn without_step(self) -> [u32; 4] {
        // Initial values use the seed itself as key; complemented, the two never meet.
        let [k0, k1] = words(!self.seed);
        [k0, k1, self.layer, self.site]
    }
}

/// A training step and the global numbers of a microbatch's samples on a device, u32 `[2 + 2·b]`, words of lower value first: what changes of
/// dropout from one microbatch to the next. A CUDA graph's kernels read them there, since they would repeat numbers of the host's.
///
/// # Errors
/// If there is no memory.
pub fn step_and_samples(step: u64, samples: &[u64], device: &Device) -> Result<Tensor> {
    let all: Vec<u32> = [step].iter().chain(samples).flat_map(|&number| words(number)).collect();
    let n = all.len();
    upload(all, n, device)
}

/// # Errors
/// If there is a tensor that is not of the form that [`step_and_samples`] gives.
pub(crate) fn expect_step_and_samples(op: &'static str, t: Option<&Tensor>, batch: usize) -> Result<()> {
    let Some(t) = t else { return Ok(()) };
    expect_shape(op, "step and samples", t, &[2 + 2 * batch])?;
    expect_dtype(op, t, DType::U32)
}

/// The global places of the rows of an `[s, b, h]` activation: the token of row (s, b) is
/// `samples[b] · seq_len + seq_offset + s`.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Global sample numbers, one per column of the batch.
    pub samples: &'a [u64],
    /// Position of the first local row in its sequence.
    pub seq_offset: usize,
    /// Length of the whole sequence.
    pub seq_len: usize,
    /// See [`step_and_samples`]: on a GPU, read instead of the key's step and the samples.
    pub step_and_samples: Option<&'a Tensor>,
}

/// Dropout of hidden activations.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// Probability of zeroing an element, in [0, 1).
    pub p: f64,
    pub key: DropoutKey,
    pub tokens: Tokens<'a>,
}

/// Words below this are dropped.
pub(crate) fn threshold(p: f64, op: &'static str) -> Result<u32> {
    if !(0.0..1.0).contains(&p) {
        return Err(Error::shape(op, format!("dropout probability {p} is not in [0, 1)")));
    }
    Ok((p * 4_294_967_296.0).round().min(4_294_967_295.0) as u32)
}

/// A [`Dropout`] made ready for rows of an activation.
pub(crate) struct Mask<'a> {
    pub key: [u32; 4],
    /// [`DropoutKey::without_step`]
    #[cfg(gpu)]
    pub without_step: [u32; 4],
    pub threshold: u32,
    /// 1 / (1 − p)
    pub scale: f64,
    pub tokens: Tokens<'a>,
}

impl<'a> Mask<'a> {
    fn new(dropout: &Dropout<'a>, x: &Tensor, op: &'static str) -> Result<Self> {
        let batch = dropout.tokens.samples.len();
        match x.dims() {
            [_, b, _] if *b == batch => {}
            dims => {
                let message = format!("x has shape {dims:?} where [s, b, h] with b = {batch} samples is needed");
                return Err(Error::shape(op, message));
            }
        }
        expect_step_and_samples(op, dropout.tokens.step_and_samples, batch)?;
        Ok(Self {
            key: dropout.key.derive(),
            #[cfg(gpu)]
            without_step: dropout.key.without_step(),
            threshold: threshold(dropout.p, op)?,
            scale: 1.0 / (1.0 - dropout.p),
            tokens: dropout.tokens,
        })
    }

    /// Fills `out` with the words of row `row` (= s · b + b).
    #[inline(always)]
    fn fill(&self, row: usize, out: &mut [u32]) {
        let (s, b) = (row / self.tokens.samples.len(), row % self.tokens.samples.len());
        let position = (self.tokens.seq_offset + s) as u64;
        let token = self.tokens.samples[b].wrapping_mul(self.tokens.seq_len as u64).wrapping_add(position);
        let ([a, b], [k0, k1, d, _]) = (words(token), self.key);
        WordRow { a, b, d, key: [k0, k1] }.fill(0, out);
    }
}

/// `y = residual + dropout(x + bias)`, with `x` and `residual` `[s, b, h]` and `bias` `[h]`; the mask is the same for every
/// dtype.
///
/// # Errors
/// If shapes contradict each other, dtypes differ or are no floats, an operand is not contiguous, or p is not in [0, 1).
pub fn bias_dropout_add(
    x: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    dropout: Option<&Dropout>,
) -> Result<Tensor> {
    let _span = trace::moves("bias_dropout_add", &[x, residual.unwrap_or(x), x]);
    const OP: &str = "bias_dropout_add";
    let (_, h) = rows_of(x, OP)?;
    if let Some(bias) = bias {
        expect_shape(OP, "bias", bias, &[h])?;
    }
    if let Some(residual) = residual {
        expect_shape(OP, "residual", residual, x.dims())?;
    }
    let mask = dropout.map(|d| Mask::new(d, x, OP)).transpose()?;
    on_gpu!(x, dropout::apply(x, bias, residual, mask.as_ref(), OP));
    by_elem!(x, OP, E => apply::<E>(OP, x, bias, residual, mask.as_ref()))
}

/// The gradient of what was dropped: the mask of forward and 1/(1−p) again. `dy` is `[s, b, h]`.
///
/// # Errors
/// As [`bias_dropout_add`].
pub fn dropout_backward(dy: &Tensor, dropout: &Dropout) -> Result<Tensor> {
    let _span = trace::moves("dropout_backward", &[dy, dy]);
    const OP: &str = "dropout_backward";
    let mask = Mask::new(dropout, dy, OP)?;
    on_gpu!(dy, dropout::apply(dy, None, None, Some(&mask), OP));
    by_elem!(dy, OP, E => apply::<E>(OP, dy, None, None, Some(&mask)))
}

fn apply<E: Elem>(
    op: &'static str,
    x: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    mask: Option<&Mask>,
) -> Result<Tensor> {
    let (_, h) = rows_of(x, op)?;
    let scale = E::Acc::of(mask.map_or(1.0, |m| m.scale));
    let mask = mask.filter(|m| m.threshold > 0);
    let bias: Option<Vec<E::Acc>> = match bias {
        Some(bias) => Some(View::<E>::new(bias, op, "bias")?.iter().map(|b| b.load()).collect()),
        None => None,
    };
    let residual = residual.map(|r| View::<E>::new(r, op, "residual")).transpose()?;
    let residual = residual.as_deref();
    let xs = View::<E>::new(x, op, "x")?;
    let xs: &[E] = &xs;
    let y = output::blocks(xs.len(), parallel::rows_per_block(h) * h, |start, y| {
        let masked = if mask.is_some() { h } else { 0 };
        let (mut random, mut factors) = (vec![0; masked], vec![E::Acc::ZERO; masked]);
        y.parts(h, |at, y| {
            let at = start + at;
            let (x, residual) = (&xs[at..at + h], residual.map(|r| &r[at..at + h]));
            let mask = mask.map(|mask| (mask, at / h, scale));
            add_line(x, bias.as_deref(), residual, mask, (&mut random, &mut factors), y)
        })
    });
    tensor(y, x.dims(), x)
}

/// One row; with the mask, the row's number and 1/(1−p). The scratch is for a row of words and one of factors.
fn add_line<'a, E: Elem>(
    x: &[E],
    bias: Option<&[E::Acc]>,
    residual: Option<&[E]>,
    mask: Option<(&Mask, usize, E::Acc)>,
    (random, factors): (&mut [u32], &mut [E::Acc]),
    y: Unwritten<'a, E>,
) -> &'a mut [E] {
    vectorize(
        #[inline(always)]
        || {
            let Some((mask, row, scale)) = mask else {
                return match (bias, residual) {
                    (Some(b), Some(r)) => y.each([x, r], [b], |[x, r], [b]| x + b + r),
                    (Some(b), None) => y.each([x], [b], |[x], [b]| x + b),
                    (None, Some(r)) => y.each([x, r], [], |[x, r], []| x + r),
                    (None, None) => y.copy(x),
                };
            };
            mask.fill(row, random);
            for (factor, &word) in factors.iter_mut().zip(&*random) {
                *factor = if word < mask.threshold { E::Acc::ZERO } else { scale };
            }
            // What is dropped is 0 even where it was not finite.
            let keep = |v: E::Acc, factor: E::Acc| if factor > E::Acc::ZERO { v * factor } else { E::Acc::ZERO };
            let factors = &*factors;
            match (bias, residual) {
                (Some(b), Some(r)) => y.each([x, r], [b, factors], |[x, r], [b, f]| keep(x + b, f) + r),
                (Some(b), None) => y.each([x], [b, factors], |[x], [b, f]| keep(x + b, f)),
                (None, Some(r)) => y.each([x, r], [factors], |[x, r], [f]| keep(x, f) + r),
                (None, None) => y.each([x], [factors], |[x], [f]| keep(x, f)),
            }
        },
    )
}
