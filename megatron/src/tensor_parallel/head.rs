//! The last layer of a model: final normalization, output projection split over tp by vocabulary,
//! and loss.
//!
//! Logits are computed for a chunk of rows at a time, so that the logits of a microbatch never
//! exist as a whole. In training each chunk is at once turned into its gradient and the two
//! products with it. Training's backward of this layer is therefore part of its forward.

use candle_core::{DType, Device, Tensor};
use kernels::ops::linear::{linear_dgrad_into, linear_into, linear_to_f32};
use kernels::tensor::allocator::rows_crowd;
use kernels::tensor::device::{empty, upload};

use super::context::{Ctx, Phase};
use super::cross_entropy::{Targets, VocabParallelCrossEntropy};
use super::embedding::VocabSpec;
use super::layer::{Output, Saved};
use super::layout::{FeatureSharded, Partial, Replicated, Stream};
use super::norm::{Norm, NormSpec};
use crate::params::{ParamId, ParamSpec, ParamsBuilder};
use crate::{Error, Result};

/// Maximum rows of logits at a time, on a CPU and on a GPU. A GPU needs more parallel work.
const ROWS: [usize; 2] = [512, 4096];
/// Maximum bytes of logits at a time, unless `FEWEST_ROWS` need more. Every chunk reads the output
/// matrix twice and reads and writes its gradient once: 128 rows of GPT-2's 50304 columns move ten
/// times their own bytes.
const BYTES: [usize; 2] = [128 << 20, 1 << 30];
/// Minimum rows of logits at a time, because fewer rows make the products slow.
const FEWEST_ROWS: usize = 64;
/// Columns added to rows whose width would cause conflicts in a CPU's caches: one cache line of
/// 16-bit numbers. They stay 0 in the gradient.
const PADDING: usize = 32;

/// Normalization, output matrix and loss.
pub struct Head {
    norm: Norm,
    output: ParamId,
    loss: VocabParallelCrossEntropy,
    spec: VocabSpec,
}

impl Head {
    /// Declares the final norm and the output matrix. If `spec` ties them, the output matrix is a
    /// second use of the token embedding.
    pub fn declare(spec: &VocabSpec, norm: &NormSpec, params: &mut ParamsBuilder) -> Self {
        let norm = Norm::declare("decoder.final_layernorm", norm, params);
        let embedding = spec.embedding_param();
        let output = if spec.tied {
            params.declare_tied(embedding)
        } else {
            params.declare(ParamSpec { name: "output_layer.weight".into(), ..embedding })
        };
        Self { norm, output, loss: VocabParallelCrossEntropy::new(spec), spec: spec.clone() }
    }

    /// Σ token losses of the normalized stream. With `dinput`, writes the gradient of `input` to it
    /// and accumulates the output matrix's gradient.
    fn project(&self, input: &Replicated, dinput: Option<&Partial>, ctx: &Ctx) -> Result<Tensor> {
        let (seq, batch, hidden) = input.0.dims3()?;
        let rows = seq * batch;
        let flat = |t: &Tensor| t.reshape((rows, hidden));
        let (xs, dxs) = (flat(&input.0)?, dinput.map(|dinput| flat(&dinput.0)).transpose()?);
        let (labels, mask) = (ctx.labels.flatten_all()?, ctx.loss_mask.flatten_all()?);
        let weights = ctx.loss_weights.map(Tensor::flatten_all).transpose()?;
        let (weight, columns, device) =
            (ctx.weight(self.output)?, self.spec.padded / self.spec.tp, xs.device());
        // All chunks reuse this memory: for their logits, and for the logits' gradient if it is
        // rounded.
        let wide = if xs.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let (step, width) = logits_room(columns, wide, device);
        let step = step.min(rows).max(1);
        let buffer = empty((step, width), wide, device)?;
        let narrow = dxs.is_some() && xs.dtype() != wide;
        let rounded = narrow.then(|| empty((step, width), xs.dtype(), device)).transpose()?;
        let loss_sum = Tensor::zeros(1, DType::F64, device)?;
        for first in (0..rows).step_by(step) {
            let count = step.min(rows - first);
            let x = xs.narrow(0, first, count)?;
            let part = |t: &Tensor| t.narrow(0, first, count);
            let targets = Targets {
                labels: part(&labels)?,
                mask: part(&mask)?,
                weights: weights.as_ref().map(part).transpose()?,
            };
            let logits = FeatureSharded(buffer.narrow(0, 0, count)?);
            linear_into(&x, &weight, None, &logits.0.narrow(1, 0, columns)?)?;
            let Some(dxs) = &dxs else {
                self.loss.forward(&logits, &targets, &loss_sum, ctx)?;
                continue;
            };
            let rounded =
                rounded.as_ref().map(|t| t.narrow(0, 0, count)).transpose()?.map(FeatureSharded);
            self.loss.forward_and_backward(&logits, rounded.as_ref(), &targets, &loss_sum, ctx)?;
            let dlogits = rounded.unwrap_or(logits).0.narrow(1, 0, columns)?;
            // The product runs now, because the next chunk overwrites its operand.
            ctx.weight_grad_now(&dlogits, &x, self.output)?;
            linear_dgrad_into(&dlogits, &weight, &dxs.narrow(0, first, count)?)?;
        }
        Ok(loss_sum)
    }
}

impl Output for Head {
    /// Computes the losses; in training also all gradients of this layer.
    fn forward(&self, x: Stream, ctx: &Ctx) -> Result<(Tensor, Saved)> {
        let (normed, stats) = self.norm.forward(&x, ctx)?;
        let input = ctx.tp.enter(&normed)?;
        drop(normed);
        if !matches!(ctx.phase, Phase::Train { .. }) {
            return Ok((self.project(&input, None, ctx)?, Saved::new(None::<Stream>)));
        }
        let dinput = Partial(empty(input.0.shape(), input.0.dtype(), input.0.device())?);
        let loss_sum = self.project(&input, Some(&dinput), ctx)?;
        drop(input);
        let dnormed = ctx.tp.enter_backward(dinput)?;
        let dx = self.norm.backward(&dnormed, &x, &stats, ctx)?;
        Ok((loss_sum, Saved::new(Some(dx))))
    }

    /// Gradient of the residual stream, which forward has already computed.
    ///
    /// # Errors
    /// If forward did not run in training.
    fn backward(&self, saved: Saved, _: &Ctx) -> Result<Stream> {
        let dx: Option<Stream> = saved.take()?;
        dx.ok_or_else(|| Error::config("internal error: backward of an evaluation"))
    }

    fn params(&self) -> Vec<ParamId> {
        self.norm.params().chain([self.output]).collect()
    }

    fn makes_gradients_in_forward(&self) -> bool {
        true
    }

    /// None: forward has made all gradients.
    fn weights_in_backward(&self) -> Vec<ParamId> {
        Vec::new()
    }

    fn logits_at(&self, x: &Stream, rows: &[usize], ctx: &Ctx) -> Result<Tensor> {
        let (normed, _) = self.norm.forward(x, ctx)?;
        let whole = ctx.tp.enter(&normed)?;
        let (seq, batch, hidden) = whole.0.dims3()?;
        let wanted: Vec<u32> =
            rows.iter().enumerate().map(|(sample, row)| (row * batch + sample) as u32).collect();
        let wanted = upload(wanted, rows.len(), whole.0.device())?;
        let picked = whole.0.reshape((seq * batch, hidden))?.index_select(&wanted, 0)?;
        let local =
            linear_to_f32(&picked, &ctx.weight(self.output)?, None)?.to_dtype(DType::F32)?;
        let (tp, width) = (ctx.tp.size(), self.spec.padded / self.spec.tp);
        let all = if tp == 1 {
            local
        } else {
            let all = empty((tp, rows.len(), width), local.dtype(), local.device())?;
            ctx.tp.group().all_gather(&local, &all)?.wait()?;
            all.transpose(0, 1)?.reshape((rows.len(), tp * width))?
        };
        Ok(all.narrow(1, 0, self.spec.vocab_size)?.contiguous()?)
    }
}

/// The number of rows whose logits are computed at a time, and the distance between rows in
/// elements, for `columns` of the vocabulary and logits of dtype `wide`.
pub fn logits_room(columns: usize, wide: DType, device: &Device) -> (usize, usize) {
    let crowded = device.is_cpu() && rows_crowd(columns * wide.size_in_bytes());
    (rows_at_a_time(columns, device.is_cuda()), columns + if crowded { PADDING } else { 0 })
}

/// The first value of [`logits_room`]. It depends only on the device and on tp, so that sums over
/// rows are the same in every pipeline.
fn rows_at_a_time(columns: usize, gpu: bool) -> usize {
    let fit = BYTES[usize::from(gpu)] / (size_of::<f32>() * columns.max(1));
    (fit / FEWEST_ROWS * FEWEST_ROWS).clamp(FEWEST_ROWS, ROWS[usize::from(gpu)])
}
