//! Causal grouped-query self-attention. Heads are split by key/value group over tp, and in
//! attention itself also over cp (Shoeybi et al. 2019, Ainslie et al. 2023).
//!
//! As in Megatron-LM, the rows of the fused QKV projection are grouped per key/value group: (query
//! heads…, key, value).

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;
use kernels::ops::attention::{AttentionDropout, HeadShape, RopeTable, Rotation, Scores};

use super::context::{Ctx, DropoutSite};
use super::layout::{FeatureSharded, Stream};
use super::linear::{ColumnParallelLinear, Join, LinearSpec, RowParallelLinear};
use crate::Result;
use crate::params::{ParamId, ParamsBuilder};

/// The shape of a model's attention, over all tp ranks.
#[derive(Clone, Debug)]
pub struct AttentionSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads, each shared by heads / groups query heads.
    pub groups: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Whether the QKV projection has a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub bias: bool,
    /// Standard deviation of the initial QKV weights.
    pub init_std: f64,
    /// Standard deviation of the initial weights of the output projection, which writes into the
    /// residual stream.
    pub output_init_std: f64,
    /// Probability of dropping an attention weight.
    pub dropout: f64,
    /// Rotary table, if positions are rotary.
    pub rope: Option<Arc<RopeTable>>,
    /// A slope for each of the model's query heads, if positions are linear biases (ALiBi).
    pub alibi: Option<Arc<[f64]>>,
    /// Maximum number of tokens that a query sees, including itself.
    pub window: Option<usize>,
    /// Number of ranks that heads are split over.
    pub tp: usize,
    /// Whether the residual stream is split along the sequence over tp.
    pub sequence_parallel: bool,
    /// Whether backward recomputes the attention core.
    pub recompute_core: bool,
}

/// Self-attention between its normalization and its residual.
pub struct SelfAttention {
    qkv: ColumnParallelLinear,
    proj: RowParallelLinear,
    spec: AttentionSpec,
    /// Index of the layer in the model, from 0.
    layer: usize,
}

/// Activations of one microbatch.
pub struct SavedAttention {
    input: Stream,
    /// Rotated and packed: all tokens of this rank's heads.
    qkv: Tensor,
    /// Output `[s, b, heads/(tp·cp)·d]` and log-sum-exp; `None` if they are recomputed.
    core: Option<(Tensor, Tensor)>,
}

impl SelfAttention {
    /// Declares the parameters of layer `layer` (from 0) under the prefix `name`.
    pub fn declare(
        name: &str,
        layer: usize,
        spec: &AttentionSpec,
        params: &mut ParamsBuilder,
    ) -> Self {
        let qkv = LinearSpec {
            name: format!("{name}.linear_qkv"),
            in_features: spec.hidden,
            out_features: (spec.heads + 2 * spec.groups) * spec.head_dim,
            bias: spec.qkv_bias,
            init_std: spec.init_std,
        };
        let proj = LinearSpec {
            name: format!("{name}.linear_proj"),
            in_features: spec.heads * spec.head_dim,
            out_features: spec.hidden,
            bias: spec.bias,
            init_std: spec.output_init_std,
        };
        let qkv = ColumnParallelLinear::declare(&qkv, 1, params);
        let proj = RowParallelLinear::declare(&proj, spec.sequence_parallel, params);
        Self { qkv, proj, spec: spec.clone(), layer }
    }

    /// Shape of one rank's heads when heads are split over `ranks`.
    fn shape(&self, ranks: usize) -> HeadShape {
        HeadShape {
            groups: self.spec.groups / ranks,
            heads_per_group: self.spec.heads / self.spec.groups,
            head_dim: self.spec.head_dim,
        }
    }

    /// The score options for the model's heads `heads`.
    fn scores<'a>(&'a self, heads: Range<usize>, ctx: &Ctx<'a>) -> Scores<'a> {
        let alibi = self.spec.alibi.as_ref().map(|slopes| &slopes[heads]);
        let first_keys = ctx.documents.first_keys.as_ref();
        Scores {
            scale: 1.0 / (self.spec.head_dim as f64).sqrt(),
            alibi,
            window: self.spec.window,
            first_keys,
        }
    }

    fn dropout<'a>(&self, ctx: &'a Ctx) -> Option<AttentionDropout<'a>> {
        let key = ctx.dropout_key(self.spec.dropout, self.layer, DropoutSite::AttentionWeights)?;
        let first_head = self.heads(ctx).start;
        let (samples, step_and_samples) = (ctx.samples, ctx.step_and_samples);
        Some(AttentionDropout { p: self.spec.dropout, key, samples, first_head, step_and_samples })
    }

    /// Number of ranks that a layer's heads are split over.
    fn ranks(&self, ctx: &Ctx) -> usize {
        self.spec.tp * ctx.cp.size()
    }

    /// The query heads of the model that this rank computes: the part of its cp rank within those
    /// of its tp rank.
    fn heads(&self, ctx: &Ctx) -> Range<usize> {
        let count = self.spec.heads / self.ranks(ctx);
        let first = (ctx.tp.rank() * ctx.cp.size() + ctx.cp.rank()) * count;
        first..first + count
    }

    fn core(&self, qkv: &Tensor, ctx: &Ctx) -> Result<(Tensor, Tensor)> {
        let (shape, scores) = (self.shape(self.ranks(ctx)), self.scores(self.heads(ctx), ctx));
        Ok(kernels::ops::attention::attention(qkv, shape, scores, self.dropout(ctx).as_ref())?)
    }

    fn rotation<'a>(&'a self, ctx: &'a Ctx) -> Option<Rotation<'a>> {
        self.spec
            .rope
            .as_ref()
            .map(|table| Rotation { table, positions: ctx.documents.positions.as_ref() })
    }

    /// The bias of the output projection. The caller must compute its gradient.
    pub fn output_bias(&self) -> Option<ParamId> {
        self.proj.bias()
    }

    /// From the normalized stream to the residual stream after adding the output.
    pub fn forward(
        &self,
        input: Stream,
        join: &Join,
        ctx: &Ctx,
    ) -> Result<(Stream, SavedAttention)> {
        let x = ctx.tp.enter(&input)?;
        let qkv = self.qkv.forward(&x, ctx)?.0;
        drop(x);
        let qkv = ctx.cp.to_heads(qkv)?;
        if let Some(rotation) = self.rotation(ctx) {
            rotation.turn(&qkv, self.shape(self.ranks(ctx)), false)?;
        }
        let (out, lse) = self.core(&qkv, ctx)?;
        let core = (!self.spec.recompute_core).then(|| (out.clone(), lse));
        let y = self.proj.forward(&FeatureSharded(ctx.cp.to_tokens(out)?), join, ctx)?;
        Ok((y, SavedAttention { input, qkv, core }))
    }

    /// Allocates the key/value cache for `positions` tokens of `batch` samples.
    pub fn cache(&self, positions: usize, batch: usize, ctx: &Ctx) -> Result<Tensor> {
        let options = ctx.params.options();
        let shape = self.shape(self.spec.tp);
        let width = shape.groups * 2 * shape.head_dim;
        Ok(Tensor::zeros((positions, batch, width), options.dtype, &options.device)?)
    }

    /// As [`forward`](Self::forward), for the next tokens of each sample, which also attend to the
    /// tokens in the cache. Every cp rank has all tokens and computes the same.
    pub fn decode(
        &self,
        input: &Stream,
        cache: &Tensor,
        starts: &[usize],
        join: &Join,
        ctx: &Ctx,
    ) -> Result<Stream> {
        let qkv = self.qkv.forward(&ctx.tp.enter(input)?, ctx)?.0;
        let (shape, heads) = (self.shape(self.spec.tp), self.spec.heads / self.spec.tp);
        let first = ctx.tp.rank() * heads;
        if let Some(table) = &self.spec.rope {
            kernels::ops::attention::rope_at(&qkv, table, shape, starts, false)?;
        }
        let scores = self.scores(first..first + heads, ctx);
        let out = kernels::ops::attention::attention_cached(&qkv, cache, starts, shape, scores)?;
        self.proj.forward(&FeatureSharded(out), join, ctx)
    }

    /// Gradient of the normalized stream.
    pub fn backward(&self, dy: &Stream, saved: SavedAttention, ctx: &Ctx) -> Result<Stream> {
        let SavedAttention { input, qkv, core } = saved;
        let dy = ctx.tp.begin_exit_backward(dy)?;
        let (out, lse) = match core {
            Some(core) => core,
            None => self.core(&qkv, ctx)?,
        };
        let dy = dy.finish()?;
        let dout = self.proj.backward_input(&dy, ctx)?;
        // The exchange of forward is repeated, because saving both forms would double the memory.
        self.proj.backward_weight(&dy, &FeatureSharded(ctx.cp.to_tokens(out.clone())?), ctx)?;
        drop(dy);
        let dout = ctx.cp.to_heads(dout.0)?;
        let dropout = self.dropout(ctx);
        let (shape, scores) = (self.shape(self.ranks(ctx)), self.scores(self.heads(ctx), ctx));
        let dropout = dropout.as_ref();
        let dqkv = match self.rotation(ctx) {
            Some(rotation) => {
                let tensors = [&dout, &qkv, &out, &lse];
                kernels::ops::attention::attention_backward_rotated(
                    tensors, shape, scores, dropout, &rotation,
                )?
            }
            None => kernels::ops::attention::attention_backward(
                &dout, &qkv, &out, &lse, shape, scores, dropout,
            )?,
        };
        drop((qkv, out, dout));
        self.qkv.backward(&FeatureSharded(ctx.cp.to_tokens(dqkv)?), &input, ctx)
    }

    /// The parameters, QKV's first.
    pub fn params(&self) -> impl Iterator<Item = ParamId> + use<> {
        self.qkv.params().chain(self.proj.params())
    }
}
