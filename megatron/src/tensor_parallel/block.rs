//! The transformer layer, pre-norm: x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x)))
//! (Radford et al. 2019).

use candle_core::Tensor;
use kernels::ops::dropout::dropout_backward;
use kernels::ops::norm::NormStats;

use super::attention::{AttentionSpec, SavedAttention, SelfAttention};
use super::context::{Ctx, DropoutSite};
use super::layer::{Layer, Saved};
use super::layout::Stream;
use super::linear::Join;
use super::mlp::{Mlp, MlpSpec, SavedMlp};
use super::norm::{Norm, NormSpec};
use crate::Result;
use crate::params::{ParamId, ParamsBuilder};

/// The shape of a model's layers.
#[derive(Clone, Debug)]
pub struct BlockSpec {
    /// Settings of both norms.
    pub norm: NormSpec,
    /// Between the first norm and its residual.
    pub attention: AttentionSpec,
    /// Between the second norm and its residual.
    pub mlp: MlpSpec,
    /// Probability of dropping an element of the attention's and the MLP's output.
    pub hidden_dropout: f64,
}

/// One transformer layer.
pub struct TransformerLayer {
    input_norm: Norm,
    attention: SelfAttention,
    mlp_norm: Norm,
    mlp: Mlp,
    hidden_dropout: f64,
    layer: usize,
}

struct SavedBlock {
    first: FirstHalf,
    mlp: SavedMlp,
}

/// The values saved for the backward of everything before the MLP.
struct FirstHalf {
    x: Stream,
    input_stats: NormStats,
    attention: SavedAttention,
    middle: Stream,
    mlp_stats: NormStats,
}

impl TransformerLayer {
    /// Declares layer `layer` (from 0) with Megatron-core's parameter names.
    pub fn declare(layer: usize, spec: &BlockSpec, params: &mut ParamsBuilder) -> Self {
        let name = format!("decoder.layers.{layer}");
        Self {
            input_norm: Norm::declare(&format!("{name}.input_layernorm"), &spec.norm, params),
            attention: SelfAttention::declare(
                &format!("{name}.self_attention"),
                layer,
                &spec.attention,
                params,
            ),
            mlp_norm: Norm::declare(&format!("{name}.pre_mlp_layernorm"), &spec.norm, params),
            mlp: Mlp::declare(&format!("{name}.mlp"), &spec.mlp, params),
            hidden_dropout: spec.hidden_dropout,
            layer,
        }
    }

    /// Computes everything before the MLP. Returns the MLP's normalized input.
    fn first_half(&self, x: Stream, ctx: &Ctx) -> Result<(Stream, FirstHalf)> {
        let (normed, input_stats) = self.input_norm.forward(&x, ctx)?;
        let join = self.join(&x, DropoutSite::AttentionOutput, ctx)?;
        let (middle, attention) = self.attention.forward(normed, &join, ctx)?;
        let (normed, mlp_stats) = self.mlp_norm.forward(&middle, ctx)?;
        Ok((normed, FirstHalf { x, input_stats, attention, middle, mlp_stats }))
    }

    /// How the output of attention or of the MLP is added to the residual stream.
    fn join<'a>(&self, residual: &'a Stream, site: DropoutSite, ctx: &'a Ctx) -> Result<Join<'a>> {
        Ok(Join::new(residual, ctx.stream_dropout(self.hidden_dropout, self.layer, site)?, ctx))
    }

    /// Gradient of the output that [`join`](Self::join) adds; accumulates the bias's gradient. The
    /// residual's gradient is `dy` itself.
    fn join_backward(
        &self,
        dy: &Stream,
        bias: Option<ParamId>,
        site: DropoutSite,
        ctx: &Ctx,
    ) -> Result<Stream> {
        let branch = match ctx.stream_dropout(self.hidden_dropout, self.layer, site)? {
            Some(dropout) => Stream(dropout_backward(&dy.0, &dropout)?),
            None => dy.clone(),
        };
        bias.map_or(Ok(()), |id| ctx.bias_grad(&branch.0, id))?;
        Ok(branch)
    }
}

impl Layer for TransformerLayer {
    fn forward(&self, x: Stream, ctx: &Ctx) -> Result<(Stream, Saved)> {
        let (normed, first) = self.first_half(x, ctx)?;
        let (out, mlp) = self.mlp.forward(
            normed,
            &self.join(&first.middle, DropoutSite::MlpOutput, ctx)?,
            ctx,
        )?;
        Ok((out, Saved::new(SavedBlock { first, mlp })))
    }

    fn recompute(&self, x: Stream, ctx: &Ctx) -> Result<Saved> {
        let (normed, first) = self.first_half(x, ctx)?;
        let mlp = self.mlp.recompute(normed, ctx)?;
        Ok(Saved::new(SavedBlock { first, mlp }))
    }

    fn backward(&self, dy: Stream, saved: Saved, ctx: &Ctx) -> Result<Stream> {
        let SavedBlock { first, mlp } = saved.take()?;
        let FirstHalf { x, input_stats, attention, middle, mlp_stats } = first;
        let branch =
            self.join_backward(&dy, self.mlp.output_bias(), DropoutSite::MlpOutput, ctx)?;
        let dnormed = self.mlp.backward(&branch, mlp, ctx)?;
        drop(branch);
        let dmiddle = self.mlp_norm.backward_add(&dnormed, &middle, &mlp_stats, &dy, ctx)?;
        drop((dy, middle));
        let branch = self.join_backward(
            &dmiddle,
            self.attention.output_bias(),
            DropoutSite::AttentionOutput,
            ctx,
        )?;
        let dnormed = self.attention.backward(&branch, attention, ctx)?;
        drop(branch);
        self.input_norm.backward_add(&dnormed, &x, &input_stats, &dmiddle, ctx)
    }

    fn cache(&self, positions: usize, batch: usize, ctx: &Ctx) -> Result<Tensor> {
        self.attention.cache(positions, batch, ctx)
    }

    fn decode(&self, x: Stream, cache: &Tensor, starts: &[usize], ctx: &Ctx) -> Result<Stream> {
        let normed = self.input_norm.forward(&x, ctx)?.0;
        let join = self.join(&x, DropoutSite::AttentionOutput, ctx)?;
        let middle = self.attention.decode(&normed, cache, starts, &join, ctx)?;
        let normed = self.mlp_norm.forward(&middle, ctx)?.0;
        Ok(self.mlp.forward(normed, &self.join(&middle, DropoutSite::MlpOutput, ctx)?, ctx)?.0)
    }

    fn params(&self) -> Vec<ParamId> {
        let norms = self.input_norm.params().chain(self.mlp_norm.params());
        norms.chain(self.attention.params()).chain(self.mlp.params()).collect()
    }
}
