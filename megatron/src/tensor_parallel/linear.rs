//! Linear layers split over tp (Shoeybi et al. 2019, §3): column-parallel by output features,
//! row-parallel by input features.
//!
//! Weights are `[out, in]`. The two kinds are used in pairs, so that one sum over tp suffices for
//! both.

use std::cell::OnceCell;

use candle_core::Tensor;
use kernels::ops::dropout::{Dropout, bias_dropout_add};
use kernels::tensor::device::empty;

use super::context::Ctx;
use super::layout::{FeatureSharded, Partial, Replicated, Stream};
use crate::Result;
use crate::params::{Init, ParamId, ParamSpec, ParamsBuilder, Partition};

/// The parameters of a linear layer of either kind.
pub struct LinearSpec {
    /// Prefix of the parameter names, without `.weight`.
    pub name: String,
    /// Columns of the weight, over all tp ranks.
    pub in_features: usize,
    /// Rows of the weight, over all tp ranks.
    pub out_features: usize,
    /// Whether it has a bias.
    pub bias: bool,
    /// Standard deviation of the initial weights.
    pub init_std: f64,
}

impl LinearSpec {
    /// A layer with a bias, whose initial weights have a standard deviation of 1/√`in_features`.
    pub fn new(name: impl Into<String>, in_features: usize, out_features: usize) -> Self {
        let init_std = (in_features.max(1) as f64).sqrt().recip();
        Self { name: name.into(), in_features, out_features, bias: true, init_std }
    }

    fn weight(&self, partition: Partition) -> ParamSpec {
        ParamSpec {
            name: format!("{}.weight", self.name),
            shape: vec![self.out_features, self.in_features],
            partition,
            padded_dim0: self.out_features,
            init: Init::Normal { std: self.init_std },
            weight_decay: true,
            tie_group: None,
            grad_partial_over_tp: false,
        }
    }

    fn bias(&self, partition: Partition, grad_partial_over_tp: bool) -> ParamSpec {
        ParamSpec {
            name: format!("{}.bias", self.name),
            shape: vec![self.out_features],
            partition,
            padded_dim0: self.out_features,
            init: Init::Zeros,
            weight_decay: false,
            tie_group: None,
            grad_partial_over_tp,
        }
    }
}

/// `y = x·Wᵀ + b`, with W split by rows: every rank computes its share of the output features.
pub struct ColumnParallelLinear {
    weight: ParamId,
    bias: Option<ParamId>,
}

impl ColumnParallelLinear {
    /// `parts`: number of equal sections of the output that are each split over tp (2 for gate|up,
    /// else 1).
    pub fn declare(spec: &LinearSpec, parts: usize, params: &mut ParamsBuilder) -> Self {
        let partition = Partition::Split { dim: 0, parts };
        let weight = params.declare(spec.weight(partition));
        let bias = spec.bias.then(|| params.declare(spec.bias(partition, false)));
        Self { weight, bias }
    }

    /// `[s, b, in]` → `[s, b, out/tp]`.
    pub fn forward(&self, x: &Replicated, ctx: &Ctx) -> Result<FeatureSharded> {
        let bias = self.bias.map(|id| ctx.weight(id)).transpose()?;
        Ok(FeatureSharded(kernels::ops::linear::linear(
            &x.0,
            &ctx.weight(self.weight)?,
            bias.as_ref(),
        )?))
    }

    /// As [`forward`](Self::forward), and also returns GELU of the output.
    pub fn forward_gelu(
        &self,
        x: &Replicated,
        ctx: &Ctx,
    ) -> Result<(FeatureSharded, FeatureSharded)> {
        let bias = self.bias.map(|id| ctx.weight(id)).transpose()?;
        let (h, y) =
            kernels::ops::linear::linear_gelu(&x.0, &ctx.weight(self.weight)?, bias.as_ref())?;
        Ok((FeatureSharded(h), FeatureSharded(y)))
    }

    /// Computes the gradients of weight and bias, and returns that of the residual stream `input`
    /// before this layer.
    ///
    /// Communication overlaps with computation, as in Megatron-LM's
    /// `LinearWithGradAccumulationAndAsyncCommunication` (Korthikanti et al. 2022): the input is
    /// gathered while its gradient is computed, and that gradient is summed over tp while the
    /// weight's gradient is computed.
    pub fn backward(&self, dy: &FeatureSharded, input: &Stream, ctx: &Ctx) -> Result<Stream> {
        let x = ctx.tp.begin_enter(input)?;
        let dx = Partial(kernels::ops::linear::linear_dgrad(&dy.0, &ctx.weight(self.weight)?)?);
        let x = x.finish()?;
        let dx = ctx.tp.begin_enter_backward(dx)?;
        ctx.weight_grad(&dy.0, &x.0, self.weight)?;
        self.bias.map_or(Ok(()), |id| ctx.bias_grad(&dy.0, id))?;
        dx.finish()
    }

    /// The weight, and the bias if there is one.
    pub fn params(&self) -> impl Iterator<Item = ParamId> + use<> {
        [self.weight].into_iter().chain(self.bias)
    }
}

/// The residual connection that a [`RowParallelLinear`] output is added to: residual +
/// dropout(output).
pub struct Join<'a> {
    residual: &'a Stream,
    dropout: Option<Dropout<'a>>,
    /// Whether the product and the addition are one operation, because nothing comes between them.
    by_product: bool,
    place: OnceCell<Tensor>,
}

impl<'a> Join<'a> {
    /// The output will be added to `residual`, after `dropout` if it is given.
    pub fn new(residual: &'a Stream, dropout: Option<Dropout<'a>>, ctx: &Ctx) -> Self {
        let by_product = ctx.tp.size() == 1 && dropout.is_none();
        Self { residual, dropout, by_product, place: OnceCell::new() }
    }

    /// Memory for the result of a product that includes the residual addition; the first call
    /// allocates it. Call it before allocating temporary operands of that product: the lasting
    /// result then does not lie behind temporary memory.
    pub fn place(&self) -> Result<Option<&Tensor>> {
        let x = &self.residual.0;
        if self.by_product && self.place.get().is_none() {
            let _ = self.place.set(empty(x.shape(), x.dtype(), x.device())?);
        }
        Ok(self.place.get())
    }
}

/// `y = x·Wᵀ + b`, with W split by columns: every rank multiplies its share of the input features,
/// and the result must be summed over tp. The bias is added once, after the sum (fused with dropout
/// and the residual).
pub struct RowParallelLinear {
    weight: ParamId,
    bias: Option<ParamId>,
}

impl RowParallelLinear {
    /// With `sequence_parallel` the bias acts on this rank's tokens only, so its gradient is
    /// partial over tp.
    pub fn declare(spec: &LinearSpec, sequence_parallel: bool, params: &mut ParamsBuilder) -> Self {
        let weight = params.declare(spec.weight(Partition::Split { dim: 1, parts: 1 }));
        let bias =
            spec.bias.then(|| params.declare(spec.bias(Partition::Replicated, sequence_parallel)));
        Self { weight, bias }
    }

    /// `[s, b, in/tp]` → the residual stream, `[s, b, out]`: the sum over tp plus bias, added to
    /// the residual.
    pub fn forward(&self, x: &FeatureSharded, join: &Join, ctx: &Ctx) -> Result<Stream> {
        let bias = self.bias.map(|id| ctx.weight(id)).transpose()?;
        let (residual, dropout) = (&join.residual.0, join.dropout.as_ref());
        if let Some(y) = join.place()? {
            kernels::ops::linear::linear_add_into(
                &x.0,
                &ctx.weight(self.weight)?,
                bias.as_ref(),
                residual,
                y,
            )?;
            return Ok(Stream(y.clone()));
        }
        let y = self.sum(x, ctx)?;
        Ok(Stream(bias_dropout_add(&y.0, bias.as_ref(), Some(residual), dropout)?))
    }

    /// `[s, b, in/tp]` → `[s, b, out]`, split like the residual stream: the sum over tp plus bias,
    /// without a residual.
    pub fn project(&self, x: &FeatureSharded, ctx: &Ctx) -> Result<Stream> {
        let bias = self.bias.map(|id| ctx.weight(id)).transpose()?;
        Ok(Stream(bias_dropout_add(&self.sum(x, ctx)?.0, bias.as_ref(), None, None)?))
    }

    /// The sum over tp, without bias.
    fn sum(&self, x: &FeatureSharded, ctx: &Ctx) -> Result<Stream> {
        let y = kernels::ops::linear::linear(&x.0, &ctx.weight(self.weight)?, None)?;
        ctx.tp.exit(Partial(y))
    }

    /// Returns the gradient of the input `x` of [`project`](Self::project), and accumulates those
    /// of weight and bias.
    pub fn project_backward(
        &self,
        dy: &Stream,
        x: &FeatureSharded,
        ctx: &Ctx,
    ) -> Result<FeatureSharded> {
        let whole = ctx.tp.begin_exit_backward(dy)?;
        self.bias.map_or(Ok(()), |id| ctx.bias_grad(&dy.0, id))?;
        let whole = whole.finish()?;
        self.backward_weight(&whole, x, ctx)?;
        self.backward_input(&whole, ctx)
    }

    /// The bias, if there is one.
    pub fn bias(&self) -> Option<ParamId> {
        self.bias
    }

    /// Gradient of the input.
    pub fn backward_input(&self, dy: &Replicated, ctx: &Ctx) -> Result<FeatureSharded> {
        Ok(FeatureSharded(kernels::ops::linear::linear_dgrad(&dy.0, &ctx.weight(self.weight)?)?))
    }

    /// Gradient of `h`, when the input is GELU of `h`.
    pub fn backward_input_gelu(
        &self,
        dy: &Replicated,
        h: &Tensor,
        ctx: &Ctx,
    ) -> Result<FeatureSharded> {
        Ok(FeatureSharded(kernels::ops::linear::linear_dgrad_gelu(
            &dy.0,
            &ctx.weight(self.weight)?,
            h,
        )?))
    }

    /// As [`backward_input_gelu`](Self::backward_input_gelu), and also recomputes the input.
    pub fn backward_input_gelu_again(
        &self,
        dy: &Replicated,
        h: &Tensor,
        ctx: &Ctx,
    ) -> Result<[FeatureSharded; 2]> {
        Ok(kernels::ops::linear::linear_dgrad_gelu_recompute(&dy.0, &ctx.weight(self.weight)?, h)?
            .map(FeatureSharded))
    }

    /// Gradient of the weight.
    pub fn backward_weight(&self, dy: &Replicated, x: &FeatureSharded, ctx: &Ctx) -> Result<()> {
        ctx.weight_grad(&dy.0, &x.0, self.weight)
    }

    /// The weight, and the bias if there is one.
    pub fn params(&self) -> impl Iterator<Item = ParamId> + use<> {
        [self.weight].into_iter().chain(self.bias)
    }
}
