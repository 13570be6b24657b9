//! Normalization of the residual stream: LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich
//! 2019).
//!
//! It works on each rank's part of the stream. Under sequence parallelism its weight gradients are
//! partial over tp.

use candle_core::Tensor;
use kernels::ops::norm::NormStats;

use super::context::Ctx;
use super::layout::Stream;
use crate::Result;
use crate::config::Normalization;
use crate::params::{Init, ParamId, ParamSpec, ParamsBuilder, Partition};

/// The common settings of a model's normalizations.
#[derive(Clone, Copy, Debug)]
pub struct NormSpec {
    /// Width of the normalized rows.
    pub hidden: usize,
    /// The kind of normalization; it determines whether there is a bias.
    pub kind: Normalization,
    /// Added to the variance before the square root.
    pub eps: f64,
    /// Whether tp ranks normalize different tokens, so that the gradients of weight and bias are
    /// partial sums.
    pub sequence_parallel: bool,
}

/// A normalization with weight (and bias for LayerNorm) over the last dimension.
pub struct Norm {
    weight: ParamId,
    /// `None`: RMSNorm.
    bias: Option<ParamId>,
    eps: f64,
}

impl Norm {
    /// `name`: prefix of the parameter names, without `.weight`.
    pub fn declare(name: &str, norm: &NormSpec, params: &mut ParamsBuilder) -> Self {
        let spec = |suffix: &str, init| ParamSpec {
            name: format!("{name}.{suffix}"),
            shape: vec![norm.hidden],
            partition: Partition::Replicated,
            padded_dim0: norm.hidden,
            init,
            weight_decay: false,
            tie_group: None,
            grad_partial_over_tp: norm.sequence_parallel,
        };
        let weight = params.declare(spec("weight", Init::Ones));
        let bias = (norm.kind == Normalization::LayerNorm)
            .then(|| params.declare(spec("bias", Init::Zeros)));
        Self { weight, bias, eps: norm.eps }
    }

    /// Returns the normalized stream, and the row statistics for backward.
    pub fn forward(&self, x: &Stream, ctx: &Ctx) -> Result<(Stream, NormStats)> {
        let weight = &ctx.weight(self.weight)?;
        let (y, stats) = match self.bias {
            Some(bias) => {
                kernels::ops::norm::layer_norm(&x.0, weight, &ctx.weight(bias)?, self.eps)?
            }
            None => kernels::ops::norm::rms_norm(&x.0, weight, self.eps)?,
        };
        Ok((Stream(y), stats))
    }

    /// Returns the gradient of the input; accumulates those of weight and bias.
    pub fn backward(
        &self,
        dy: &Stream,
        x: &Stream,
        stats: &NormStats,
        ctx: &Ctx,
    ) -> Result<Stream> {
        self.gradient(dy, x, stats, None, ctx)
    }

    /// As [`Norm::backward`], plus `around`, the gradient that reaches the input through the
    /// residual connection.
    pub fn backward_add(
        &self,
        dy: &Stream,
        x: &Stream,
        stats: &NormStats,
        around: &Stream,
        ctx: &Ctx,
    ) -> Result<Stream> {
        self.gradient(dy, x, stats, Some(&around.0), ctx)
    }

    fn gradient(
        &self,
        dy: &Stream,
        x: &Stream,
        stats: &NormStats,
        around: Option<&Tensor>,
        ctx: &Ctx,
    ) -> Result<Stream> {
        let (weight, dweight) = (&ctx.weight(self.weight)?, ctx.params.grad(self.weight)?);
        let dx = match self.bias {
            Some(bias) => {
                let dbias = ctx.params.grad(bias)?;
                kernels::ops::norm::layer_norm_backward(
                    &dy.0, &x.0, stats, weight, &dweight, &dbias, around,
                )?
            }
            None => {
                kernels::ops::norm::rms_norm_backward(&dy.0, &x.0, stats, weight, &dweight, around)?
            }
        };
        Ok(Stream(dx))
    }

    /// The weight, and the bias if there is one.
    pub fn params(&self) -> impl Iterator<Item = ParamId> + use<> {
        [self.weight].into_iter().chain(self.bias)
    }
}
