//! Dropout (Srivastava et al. 2014) whose mask is a function of the place in the global problem, fused with bias and residual.
//!
//! An element's word is Philox keyed by (seed, step, layer, site) at counter (global token, hidden index / 4).

use candle_core::Tensor;

use crate::float::{Float, by_float};
use crate::philox::{WordRow, philox4x32, words};
use crate::simd::vectorize;
use crate::view::{View, copied, expect_shape, rows_of, tensor};
use crate::{Error, Result, par};

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
        // Initial values use the seed itself as key; complemented, the two never meet.
        let [step0, step1] = words(self.step);
        philox4x32([step0, step1, self.layer, self.site], words(!self.seed))
    }
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
struct Mask<'a> {
    key: [u32; 4],
    threshold: u32,
    tokens: Tokens<'a>,
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
        Ok(Self { key: dropout.key.derive(), threshold: threshold(dropout.p, op)?, tokens: dropout.tokens })
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

/// `y = residual + dropout(x + bias)`, with `x` and `residual` `[s, b, h]` and `bias` `[h]`.
///
/// # Errors
/// If shapes contradict each other, dtypes differ or are neither f32 nor f64, an operand is not contiguous, or p is
/// not in [0, 1).
pub fn bias_dropout_add(
    x: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    dropout: Option<&Dropout>,
) -> Result<Tensor> {
    const OP: &str = "bias_dropout_add";
    let (_, h) = rows_of(x, OP)?;
    if let Some(bias) = bias {
        expect_shape(OP, "bias", bias, &[h])?;
    }
    if let Some(residual) = residual {
        expect_shape(OP, "residual", residual, x.dims())?;
    }
    by_float!(x, OP, T => {
        let bias = bias.map(|b| copied::<T>(b, OP, "bias")).transpose()?;
        let residual = residual.map(|r| View::<T>::new(r, OP, "residual")).transpose()?;
        apply(OP, x, bias.as_deref(), residual.as_deref(), dropout)
    })
}

/// The gradient of what was dropped: the mask of forward and 1/(1−p) again. `dy` is `[s, b, h]`.
///
/// # Errors
/// As [`bias_dropout_add`].
pub fn dropout_backward(dy: &Tensor, dropout: &Dropout) -> Result<Tensor> {
    const OP: &str = "dropout_backward";
    by_float!(dy, OP, T => apply::<T>(OP, dy, None, None, Some(dropout)))
}

fn apply<T: Float>(
    op: &'static str,
    x: &Tensor,
    bias: Option<&[T]>,
    residual: Option<&[T]>,
    dropout: Option<&Dropout>,
) -> Result<Tensor> {
    let (_, h) = rows_of(x, op)?;
    let mask = dropout.map(|d| Mask::new(d, x, op)).transpose()?.filter(|m| m.threshold > 0);
    let scale = T::of(dropout.map_or(1.0, |d| 1.0 / (1.0 - d.p)));
    let xs = View::<T>::new(x, op, "x")?;
    let xs: &[T] = &xs;
    let mut y = vec![T::ZERO; xs.len()];
    let block = par::rows_per_block(h);
    par::blocks(&mut y, block * h, |start, y| {
        let mut random = vec![0; if mask.is_some() { h } else { 0 }];
        vectorize(
            #[inline(always)]
            || {
                for (r, y) in y.chunks_exact_mut(h).enumerate() {
                    let at = start + r * h;
                    let x = &xs[at..at + h];
                    match bias {
                        Some(bias) => y.iter_mut().zip(x).zip(bias).for_each(|((y, &x), &b)| *y = x + b),
                        None => y.copy_from_slice(x),
                    }
                    if let Some(mask) = &mask {
                        mask.fill(start / h + r, &mut random);
                        for (y, &word) in y.iter_mut().zip(&random) {
                            *y = if word < mask.threshold { T::ZERO } else { *y * scale };
                        }
                    }
                    if let Some(residual) = residual {
                        y.iter_mut().zip(&residual[at..at + h]).for_each(|(y, &r)| *y += r);
                    }
                }
            },
        );
    });
    tensor(y, x.dims(), x)
}
