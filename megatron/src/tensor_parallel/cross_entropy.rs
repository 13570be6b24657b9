//! Cross entropy over a vocabulary split over tp, without gathering the logits (Shoeybi et al. 2019
//! §3).
//!
//! Forward computes the statistics of each rank's logits in one pass. It all-reduces the row
//! maximum, then (Σ exp, target logit) relative to that maximum, in fp32. Backward needs no
//! collective. A single rank does both for a row in one pass. Padding columns are excluded.

use candle_core::Tensor;
use kernels::ops::cross_entropy::{
    add_losses, cross_entropy_backward, cross_entropy_backward_into, cross_entropy_fused, rebase,
    row_statistics,
};

use super::context::Ctx;
use super::embedding::VocabSpec;
use super::layout::FeatureSharded;
use crate::comm::ReduceOp;
use crate::{Error, Result};

/// The loss over one rank's share of the vocabulary.
pub struct VocabParallelCrossEntropy {
    spec: VocabSpec,
}

/// A set of tokens to predict.
pub struct Targets {
    /// u32 `[rows]`.
    pub labels: Tensor,
    /// f32 `[rows]`: each token's weight in the loss sum.
    pub mask: Tensor,
    /// f32 `[rows]` (f64 for f64 models): each token's weight in the gradient; see
    /// [`Ctx::loss_weights`].
    pub weights: Option<Tensor>,
}

impl Targets {
    fn weights(&self) -> Result<&Tensor> {
        let weights = self.weights.as_ref();
        weights.ok_or_else(|| Error::config("internal error: a gradient of losses without weights"))
    }
}

/// Row statistics over the whole vocabulary, `[rows]` each, for backward.
pub struct RowStats {
    max: Tensor,
    sum_exp: Tensor,
}

impl VocabParallelCrossEntropy {
    /// The loss over `spec`'s vocabulary; padding rows are excluded.
    pub fn new(spec: &VocabSpec) -> Self {
        Self { spec: spec.clone() }
    }

    /// Adds the mask-weighted losses of logits `[rows, vocab/tp]` to `loss_sum`, f64 `[1]`.
    pub fn forward(
        &self,
        logits: &FeatureSharded,
        targets: &Targets,
        loss_sum: &Tensor,
        ctx: &Ctx,
    ) -> Result<RowStats> {
        let rank = ctx.tp.rank();
        let (first, valid) = (self.spec.first_row(rank), self.spec.valid_rows(rank));
        // [rows], [2, rows]
        let (max, parts) = row_statistics(&logits.0, &targets.labels, first, valid)?;
        if ctx.tp.size() > 1 {
            let own = max.copy()?;
            ctx.tp.group().all_reduce(&max, ReduceOp::Max)?.wait()?;
            rebase(&parts, &own, &max, &targets.labels, first, valid)?;
            ctx.tp.group().all_reduce(&parts, ReduceOp::Sum)?.wait()?;
        }
        add_losses(loss_sum, &parts, &targets.mask)?;
        let sum_exp = parts.narrow(0, 0, 1)?.flatten_all()?;
        Ok(RowStats { max, sum_exp })
    }

    /// Computes the gradient of the weighted loss with respect to the logits: in place, or rounded
    /// to `rounded`, if given.
    ///
    /// # Errors
    /// If the targets have no weights.
    pub fn backward(
        &self,
        logits: &FeatureSharded,
        rounded: Option<&FeatureSharded>,
        stats: &RowStats,
        targets: &Targets,
        ctx: &Ctx,
    ) -> Result<()> {
        let rank = ctx.tp.rank();
        let (first, valid) = (self.spec.first_row(rank), self.spec.valid_rows(rank));
        let (RowStats { max, sum_exp }, labels, weights) =
            (stats, &targets.labels, targets.weights()?);
        match rounded {
            None => cross_entropy_backward(&logits.0, max, sum_exp, labels, weights, first, valid)?,
            Some(to) => cross_entropy_backward_into(
                &to.0, &logits.0, max, sum_exp, labels, weights, first, valid,
            )?,
        }
        Ok(())
    }

    /// [`Self::forward`] and then [`Self::backward`].
    ///
    /// # Errors
    /// If the targets have no weights.
    pub fn forward_and_backward(
        &self,
        logits: &FeatureSharded,
        rounded: Option<&FeatureSharded>,
        targets: &Targets,
        loss_sum: &Tensor,
        ctx: &Ctx,
    ) -> Result<()> {
        if ctx.tp.size() > 1 {
            let stats = self.forward(logits, targets, loss_sum, ctx)?;
            return self.backward(logits, rounded, &stats, targets, ctx);
        }
        let (rounded, labels) = (rounded.map(|to| &to.0), &targets.labels);
        let (first, valid) = (self.spec.first_row(0), self.spec.valid_rows(0));
        let parts =
            cross_entropy_fused(&logits.0, rounded, labels, targets.weights()?, first, valid)?;
        Ok(add_losses(loss_sum, &parts, &targets.mask)?)
    }
}
