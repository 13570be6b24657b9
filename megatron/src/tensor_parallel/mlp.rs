//! The MLP: column-parallel, activation, row-parallel (Shoeybi et al. 2019 §3; SwiGLU: Shazeer
//! 2020).

use candle_core::Tensor;
use kernels::tensor::device::computes_ahead;

use super::context::Ctx;
use super::layout::{FeatureSharded, Replicated, Stream};
use super::linear::{ColumnParallelLinear, Join, LinearSpec, RowParallelLinear};
use crate::Result;
use crate::params::{ParamId, ParamsBuilder};

/// The shape of a model's MLPs, over all tp ranks.
#[derive(Clone, Debug)]
pub struct MlpSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width between the two products.
    pub ffn: usize,
    /// Whether the activation is SwiGLU instead of GELU.
    pub swiglu: bool,
    /// Whether both products have a bias.
    pub bias: bool,
    /// Standard deviation of the initial weights of the first product.
    pub init_std: f64,
    /// Standard deviation of the initial weights of the second product, which writes into the
    /// residual stream.
    pub output_init_std: f64,
    /// Whether the residual stream is split along the sequence over tp.
    pub sequence_parallel: bool,
    /// Whether backward recomputes the activation function.
    pub recompute_activation: bool,
}

/// The MLP between its normalization and its residual.
pub struct Mlp {
    fc1: ColumnParallelLinear,
    fc2: RowParallelLinear,
    swiglu: bool,
    recompute_activation: bool,
}

/// Activations of one microbatch.
pub struct SavedMlp {
    input: Stream,
    hidden: Tensor,
    /// `None` if it is recomputed.
    activated: Option<Tensor>,
}

impl Mlp {
    /// Declares the parameters under the prefix `name`.
    pub fn declare(name: &str, spec: &MlpSpec, params: &mut ParamsBuilder) -> Self {
        let parts = if spec.swiglu { 2 } else { 1 };
        let fc1 = LinearSpec {
            name: format!("{name}.linear_fc1"),
            in_features: spec.hidden,
            out_features: parts * spec.ffn,
            bias: spec.bias,
            init_std: spec.init_std,
        };
        let fc2 = LinearSpec {
            name: format!("{name}.linear_fc2"),
            in_features: spec.ffn,
            out_features: spec.hidden,
            bias: spec.bias,
            init_std: spec.output_init_std,
        };
        Self {
            fc1: ColumnParallelLinear::declare(&fc1, parts, params),
            fc2: RowParallelLinear::declare(&fc2, spec.sequence_parallel, params),
            swiglu: spec.swiglu,
            recompute_activation: spec.recompute_activation,
        }
    }

    fn activate(&self, x: &Tensor) -> Result<Tensor> {
        Ok(if self.swiglu {
            kernels::ops::activation::swiglu(x)?
        } else {
            kernels::ops::activation::gelu(x)?
        })
    }

    /// The bias of the output projection. The caller must compute its gradient.
    pub fn output_bias(&self) -> Option<ParamId> {
        self.fc2.bias()
    }

    /// From the normalized stream to the residual stream after adding the output.
    pub fn forward(&self, input: Stream, join: &Join, ctx: &Ctx) -> Result<(Stream, SavedMlp)> {
        let (hidden, activated) = self.hidden(&input, Some(join), ctx)?;
        let y = self.fc2.forward(&activated, join, ctx)?;
        let activated = (!self.recompute_activation).then_some(activated.0);
        Ok((y, SavedMlp { input, hidden, activated }))
    }

    /// Recomputes what [`forward`](Self::forward) saves, without the output projection.
    pub fn recompute(&self, input: Stream, ctx: &Ctx) -> Result<SavedMlp> {
        if self.recompute_activation {
            let hidden = self.fc1.forward(&ctx.tp.enter(&input)?, ctx)?.0;
            return Ok(SavedMlp { input, hidden, activated: None });
        }
        let (hidden, activated) = self.hidden(&input, None, ctx)?;
        Ok(SavedMlp { input, hidden, activated: Some(activated.0) })
    }

    /// The input and output of the activation function. The output may be temporary, so the memory
    /// for the MLP's result is allocated before it.
    fn hidden(
        &self,
        input: &Stream,
        join: Option<&Join>,
        ctx: &Ctx,
    ) -> Result<(Tensor, FeatureSharded)> {
        let x = ctx.tp.enter(input)?;
        // A recomputed activation must equal the one in forward. The fused product with GELU does
        // not give it: GELU there sees the unrounded sums, while `hidden` holds rounded ones.
        if self.swiglu || self.recompute_activation {
            let hidden = self.fc1.forward(&x, ctx)?.0;
            join.map(Join::place).transpose()?;
            let activated = FeatureSharded(self.activate(&hidden)?);
            Ok((hidden, activated))
        } else {
            let (hidden, activated) = self.fc1.forward_gelu(&x, ctx)?;
            Ok((hidden.0, activated))
        }
    }

    /// Gradient of the normalized stream.
    pub fn backward(&self, dy: &Stream, saved: SavedMlp, ctx: &Ctx) -> Result<Stream> {
        let SavedMlp { input, hidden, activated } = saved;
        let dy = ctx.tp.begin_exit_backward(dy)?;
        let activated = match activated {
            // Overlaps with the gather.
            None if computes_ahead(hidden.device()) => Some(self.activate(&hidden)?),
            kept => kept,
        };
        let dy = dy.finish()?;
        let dhidden = match activated {
            Some(activated) => {
                self.fc2.backward_weight(&dy, &FeatureSharded(activated), ctx)?;
                self.backward_activation(&dy, &hidden, ctx)?
            }
            None => {
                let [dhidden, activated] = self.backward_activation_again(&dy, &hidden, ctx)?;
                self.fc2.backward_weight(&dy, &activated, ctx)?;
                dhidden
            }
        };
        drop((hidden, dy));
        self.fc1.backward(&dhidden, &input, ctx)
    }

    /// Gradient of the activation function's argument.
    fn backward_activation(
        &self,
        dy: &Replicated,
        hidden: &Tensor,
        ctx: &Ctx,
    ) -> Result<FeatureSharded> {
        if !self.swiglu {
            return self.fc2.backward_input_gelu(dy, hidden, ctx);
        }
        let dactivated = self.fc2.backward_input(dy, ctx)?.0;
        Ok(FeatureSharded(kernels::ops::activation::swiglu_backward(&dactivated, hidden)?))
    }

    /// As [`backward_activation`](Self::backward_activation), and also recomputes the activation
    /// function's result in the same pass.
    fn backward_activation_again(
        &self,
        dy: &Replicated,
        hidden: &Tensor,
        ctx: &Ctx,
    ) -> Result<[FeatureSharded; 2]> {
        if !self.swiglu {
            return self.fc2.backward_input_gelu_again(dy, hidden, ctx);
        }
        let dactivated = self.fc2.backward_input(dy, ctx)?.0;
        Ok(kernels::ops::activation::swiglu_backward_recompute(&dactivated, hidden)?
            .map(FeatureSharded))
    }

    /// The parameters, in forward order.
    pub fn params(&self) -> impl Iterator<Item = ParamId> + use<> {
        self.fc1.params().chain(self.fc2.params())
    }
}
