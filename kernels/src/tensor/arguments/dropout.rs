//! The elements that dropout drops.
//!
//! An element's random word is Philox keyed by (seed, step, layer, site) at counter (global token,
//! hidden index / 4).

use candle_core::{DType, Device, Tensor};

use crate::tensor::device::upload;
use crate::tensor::philox::{WordRow, philox4x32, words};
use crate::tensor::view::{expect_dtype, expect_shape};
use crate::{Error, Result};

/// Identifies one dropout mask of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutKey {
    pub seed: u64,
    /// Training step.
    pub step: u64,
    /// Global number of the layer.
    pub layer: u32,
    /// Number of the dropout within the layer.
    pub site: u32,
}

impl DropoutKey {
    /// Four words that represent the key: two for the key of Philox, two for its counter.
    pub(crate) fn derive(self) -> [u32; 4] {
        let [step0, step1] = words(self.step);
        let [k0, k1, layer, site] = self.without_step();
        philox4x32([step0, step1, layer, site], [k0, k1])
    }

    /// The inputs of [`DropoutKey::derive`] without the step.
    pub(crate) fn without_step(self) -> [u32; 4] {
        // Initial values use the seed itself as key. Its complement keeps the two key spaces apart.
        let [k0, k1] = words(!self.seed);
        [k0, k1, self.layer, self.site]
    }
}

/// A training step and the global numbers of a microbatch's samples on a device: u32 `[2 + 2·b]`,
/// low words first. These are the parts of dropout that change between microbatches. Kernels of a
/// CUDA graph read them from the device, because numbers passed by the host would repeat at every
/// launch.
///
/// # Errors
/// If there is no memory.
pub fn step_and_samples(step: u64, samples: &[u64], device: &Device) -> Result<Tensor> {
    let all: Vec<u32> = [step].iter().chain(samples).flat_map(|&number| words(number)).collect();
    let n = all.len();
    upload(all, n, device)
}

/// # Errors
/// If there is a tensor, and it does not have the form of [`step_and_samples`].
pub(crate) fn expect_step_and_samples(
    op: &'static str,
    t: Option<&Tensor>,
    batch: usize,
) -> Result<()> {
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
    /// See [`step_and_samples`]: a GPU reads this instead of the key's step and the samples.
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

/// A [`Dropout`] prepared for the rows of an activation.
pub(crate) struct Mask<'a> {
    pub key: [u32; 4],
    /// [`DropoutKey::without_step`].
    #[cfg(gpu)]
    pub without_step: [u32; 4],
    pub threshold: u32,
    /// 1 / (1 − p).
    pub scale: f64,
    pub tokens: Tokens<'a>,
}

impl<'a> Mask<'a> {
    pub fn new(dropout: &Dropout<'a>, x: &Tensor, op: &'static str) -> Result<Self> {
        let batch = dropout.tokens.samples.len();
        match x.dims() {
            [_, b, _] if *b == batch => {}
            dims => {
                let message = format!(
                    "x has shape {dims:?} where [s, b, h] with b = {batch} samples is needed"
                );
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

    /// Fills `out` with the words of row `row` (= position · number of samples + sample).
    #[inline(always)]
    pub fn fill(&self, row: usize, out: &mut [u32]) {
        let (s, b) = (row / self.tokens.samples.len(), row % self.tokens.samples.len());
        let position = (self.tokens.seq_offset + s) as u64;
        let token =
            self.tokens.samples[b].wrapping_mul(self.tokens.seq_len as u64).wrapping_add(position);
        let ([a, b], [k0, k1, d, _]) = (words(token), self.key);
        WordRow { a, b, d, key: [k0, k1] }.fill(0, out);
    }
}
