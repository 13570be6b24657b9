//! Cross entropy over a vocabulary cut over tp, without gathering the logits (Shoeybi et al. 2019 §3).
//!
//! Forward: all-reduce of the row maximum, then of (Σ exp, target logit) in fp32. Backward needs no collective.
//! Padding columns take no part.

use candle_core::Tensor;
use kernels::cross_entropy::{cross_entropy_backward, row_max, sum_exp_and_target};
use kernels::host::with_slice;

use super::context::Ctx;
use super::embedding::VocabSpec;
use super::layout::FeatureSharded;
use crate::Result;
use crate::comm::ReduceOp;

/// The loss over one rank's share of the vocabulary.
pub struct VocabParallelCrossEntropy {
    spec: VocabSpec,
}

/// What one microbatch's loss was, and what its backward needs.
pub struct TokenLosses {
    /// Σ over unmasked tokens of the token loss (mask-weighted), in f64.
    pub loss_sum: f64,
    logits: FeatureSharded,
    max: Tensor,
    sum_exp: Tensor,
}

impl VocabParallelCrossEntropy {
    pub fn new(spec: &VocabSpec) -> Self {
        Self { spec: spec.clone() }
    }

    /// Losses of logits `[s, b, vocab/tp]` against `ctx.labels`.
    pub fn forward(&self, logits: FeatureSharded, ctx: &Ctx) -> Result<TokenLosses> {
        let rank = ctx.tp.rank();
        let (first, valid) = (self.spec.first_row(rank), self.spec.valid_rows(rank));
        let max = row_max(&logits.0, valid)?;
        ctx.tp.group().all_reduce(&max, ReduceOp::Max)?.wait()?;
        let parts = sum_exp_and_target(&logits.0, &max, ctx.labels, first, valid)?; // [2, rows]
        ctx.tp.group().all_reduce(&parts, ReduceOp::Sum)?.wait()?;
        let (sum_exp, target) = (parts.narrow(0, 0, 1)?.flatten_all()?, parts.narrow(0, 1, 1)?.flatten_all()?);
        let loss = (sum_exp.log()? - target)?.to_dtype(candle_core::DType::F64)?;
        let loss_sum = with_slice::<f64, _>(&loss, "loss", |loss| {
            with_slice::<f32, _>(ctx.loss_mask, "loss", |mask| {
                // A masked token counts nothing, whatever its loss: 0 · inf would be NaN.
                Ok(loss.iter().zip(mask).filter(|(_, m)| **m != 0.0).map(|(l, m)| l * f64::from(*m)).sum())
            })
        })?;
        Ok(TokenLosses { loss_sum, logits, max, sum_exp })
    }

    /// Gradient of the logits, in the place of the logits.
    pub fn backward(&self, saved: TokenLosses, ctx: &Ctx) -> Result<FeatureSharded> {
        let rank = ctx.tp.rank();
        let (first, valid) = (self.spec.first_row(rank), self.spec.valid_rows(rank));
        let scale = ctx.loss_mask.flatten_all()?.to_dtype(saved.max.dtype())?.affine(ctx.loss_factor, 0.0)?;
        let TokenLosses { logits, max, sum_exp, .. } = saved;
        cross_entropy_backward(&logits.0, &max, &sum_exp, ctx.labels, &scale, first, valid)?;
        Ok(logits)
    }
}
