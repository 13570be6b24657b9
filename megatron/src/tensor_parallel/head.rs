//! The last layer of a model: final normalization, output projection cut over tp by vocabulary, loss.

use candle_core::Tensor;
use kernels::norm::NormStats;

use super::context::Ctx;
use super::cross_entropy::{TokenLosses, VocabParallelCrossEntropy};
use super::embedding::VocabSpec;
use super::layout::{Partial, Replicated, Stream};
use super::norm::{Norm, NormSpec};
use crate::Result;
use crate::params::{ParamId, ParamSpec, ParamsBuilder};

/// Normalization, output matrix and loss.
pub struct Head {
    norm: Norm,
    output: ParamId,
    loss: VocabParallelCrossEntropy,
    spec: VocabSpec,
}

/// Activations of one microbatch.
pub struct SavedHead {
    x: Stream,
    stats: NormStats,
    normed: Stream,
    losses: TokenLosses,
}

impl SavedHead {
    /// Σ of the microbatch's unmasked token losses.
    pub fn loss_sum(&self) -> f64 {
        self.losses.loss_sum
    }
}

impl Head {
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

    fn logits(&self, x: &Replicated, ctx: &Ctx) -> Result<Tensor> {
        Ok(kernels::linear::linear(&x.0, ctx.weight(self.output), None)?)
    }

    /// Losses of the residual stream's predictions.
    pub fn forward(&self, x: Stream, ctx: &Ctx) -> Result<SavedHead> {
        let (normed, stats) = self.norm.forward(&x, ctx)?;
        let logits = self.logits(&ctx.tp.enter(&normed)?, ctx)?;
        let losses = self.loss.forward(super::layout::FeatureSharded(logits), ctx)?;
        Ok(SavedHead { x, stats, normed, losses })
    }

    /// Gradient of the residual stream.
    pub fn backward(&self, saved: SavedHead, ctx: &Ctx) -> Result<Stream> {
        let SavedHead { x, stats, normed, losses } = saved;
        let dlogits = self.loss.backward(losses, ctx)?.0;
        let input = ctx.tp.enter(&normed)?;
        ctx.weight_grad(&dlogits, &input.0, self.output)?;
        let dx = Partial(kernels::linear::linear_dgrad(&dlogits, ctx.weight(self.output))?);
        drop((dlogits, input));
        let dnormed = ctx.tp.enter_backward(dx)?;
        self.norm.backward(&dnormed, &x, &stats, ctx)
    }

    /// f32 `[b, vocab]`: for each sample the logits at row `rows[i]` of the stream, the same on every tp rank, without padding.
    pub fn logits_at(&self, x: &Stream, rows: &[usize], ctx: &Ctx) -> Result<Tensor> {
        let (normed, _) = self.norm.forward(x, ctx)?;
        let whole = ctx.tp.enter(&normed)?;
        let (seq, batch, hidden) = whole.0.dims3()?;
        let wanted: Vec<u32> = rows.iter().enumerate().map(|(sample, row)| (row * batch + sample) as u32).collect();
        let wanted = Tensor::from_vec(wanted, rows.len(), whole.0.device())?;
        let picked = Replicated(whole.0.reshape((seq * batch, hidden))?.index_select(&wanted, 0)?);
        let local = self.logits(&picked, ctx)?.to_dtype(candle_core::DType::F32)?;
        let (tp, width) = (ctx.tp.size(), self.spec.padded / self.spec.tp);
        let all = Tensor::zeros((tp, rows.len(), width), local.dtype(), local.device())?;
        ctx.tp.group().all_gather(&local, &all)?.wait()?;
        let all = all.transpose(0, 1)?.reshape((rows.len(), tp * width))?;
        Ok(all.narrow(1, 0, self.spec.vocab_size)?.contiguous()?)
    }

    pub fn params(&self) -> impl Iterator<Item = ParamId> + use<> {
        self.norm.params().chain([self.output])
    }
}
