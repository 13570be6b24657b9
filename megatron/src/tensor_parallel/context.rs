//! The context of a layer's computation besides its input.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::Tensor;
use kernels::ops::dropout::{Dropout, DropoutKey, Tokens};

use super::mappings::TensorParallel;
use crate::Result;
use crate::context_parallel::ContextParallel;
use crate::data::{Documents, NamedTensors};
use crate::params::{ParamId, ParamStore};

/// Training or evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Dropout is on; `step` (from 0) is part of its keys.
    Train {
        /// Number of earlier steps.
        step: u64,
    },
    /// Dropout is off.
    Evaluate,
}

/// The context of one microbatch on one rank.
pub struct Ctx<'a> {
    /// The stage's parameters.
    pub params: &'a ParamStore,
    /// This rank's place among those that share its layers.
    pub tp: &'a TensorParallel,
    /// This rank's place among those that share its sequences.
    pub cp: &'a ContextParallel,
    /// u32 `[s/cp, b]`: this rank's part of each sequence.
    pub tokens: &'a Tensor,
    /// u32 `[s/cp, b]`: the label of each token.
    pub labels: &'a Tensor,
    /// f32 `[s/cp, b]`: the weight of each token in the loss.
    pub loss_mask: &'a Tensor,
    /// Index of each of the b samples within the step's global batch.
    pub samples: &'a [u64],
    /// [`MicroBatch::step_and_samples`](crate::data::MicroBatch::step_and_samples)
    pub step_and_samples: Option<&'a Tensor>,
    /// Where documents begin and end in the sequences, if they are treated separately.
    pub documents: &'a Documents,
    /// Further tensors of the data: see [`Ctx::tensor`].
    pub named: &'a NamedTensors,
    /// Determines whether dropout is on.
    pub phase: Phase,
    /// The run's seed; dropout keys are derived from it.
    pub seed: u64,
    /// The gradient of the minimized value with respect to every token's loss: `loss_mask` · loss
    /// scale / unmasked tokens of the global batch, f32 `[s/cp, b]` (f64 for f64 models). Present
    /// in training on the stage with the head. It is on the device, because a CUDA graph would
    /// repeat a number from the host.
    pub loss_weights: Option<&'a Tensor>,
    /// Collects the weight-gradient products for later. `None`: they are computed at once.
    pub later: Option<&'a WeightGradients>,
}

/// Delayed weight-gradient products, `dw += dyᵀ·x`, in the order of the layers' calls.
#[derive(Default)]
pub struct WeightGradients(RefCell<Vec<WeightGradient>>);

/// One delayed product. It keeps both operands alive.
struct WeightGradient {
    dy: Tensor,
    x: Tensor,
    id: ParamId,
}

impl WeightGradients {
    /// Whether a product for this weight is still delayed.
    pub fn owes(&self, id: ParamId) -> bool {
        self.0.borrow().iter().any(|product| product.id == id)
    }

    /// Computes all products, and frees the operands of each.
    ///
    /// # Errors
    /// If a kernel fails.
    pub fn compute(self, params: &ParamStore) -> Result<()> {
        for WeightGradient { dy, x, id } in self.0.into_inner() {
            params.add_weight_grad(id, &dy, &x)?;
        }
        Ok(())
    }
}

/// The places in a model where dropout acts.
#[derive(Clone, Copy, Debug)]
pub enum DropoutSite {
    /// The embedding's output.
    Embedding = 0,
    /// The attention probabilities.
    AttentionWeights = 1,
    /// The output of attention before it is added to the residual stream.
    AttentionOutput = 2,
    /// The output of the MLP before it is added to the residual stream.
    MlpOutput = 3,
}

impl Ctx<'_> {
    /// The positions, within whole sequences, of the residual stream's rows on this rank. Under
    /// sequence parallelism they are a part of the positions of its cp rank.
    ///
    /// # Errors
    /// If the sequence cannot be split evenly.
    pub fn stream_positions(&self) -> Result<Range<usize>> {
        let part = self.tokens.dim(0)?;
        let length = self.tp.stream_length(part)?;
        let first = self.cp.offset(part) + self.tp.stream_offset(length);
        Ok(first..first + length)
    }

    /// The microbatch's tensor with this name, `[b, …]`
    /// ([`SampleSource::named`](crate::data::SampleSource::named)).
    ///
    /// # Errors
    /// If it does not exist; the message lists the names that do.
    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.named.get(name)
    }

    /// The weight of one of this stage's parameters, in local shape.
    ///
    /// # Errors
    /// As [`ParamStore::weight`].
    pub fn weight(&self, id: ParamId) -> Result<Tensor> {
        self.params.weight(id)
    }

    /// The key of a dropout site, or `None` if nothing is dropped.
    pub fn dropout_key(&self, p: f64, layer: usize, site: DropoutSite) -> Option<DropoutKey> {
        match self.phase {
            Phase::Train { step } if p > 0.0 => {
                Some(DropoutKey { seed: self.seed, step, layer: layer as u32, site: site as u32 })
            }
            _ => None,
        }
    }

    /// Dropout of the residual stream.
    pub fn stream_dropout(
        &self,
        p: f64,
        layer: usize,
        site: DropoutSite,
    ) -> Result<Option<Dropout<'_>>> {
        let Some(key) = self.dropout_key(p, layer, site) else { return Ok(None) };
        let seq_len = self.cp.whole_length(self.tokens.dim(0)?);
        let seq_offset = self.stream_positions()?.start;
        let tokens = Tokens {
            samples: self.samples,
            seq_offset,
            seq_len,
            step_and_samples: self.step_and_samples,
        };
        Ok(Some(Dropout { p, key, tokens }))
    }

    /// Accumulates a weight's gradient, `dw += dyᵀ·x`, now or [`later`](Self::later). Every layer
    /// with a weight product must use this function; it adds other gradients to
    /// `ctx.params.grad(id)` itself. Neither operand may be overwritten afterwards. To reuse their
    /// memory, call [`weight_grad_now`](Self::weight_grad_now) instead.
    pub fn weight_grad(&self, dy: &Tensor, x: &Tensor, id: ParamId) -> Result<()> {
        match self.later {
            Some(later) => {
                later.0.borrow_mut().push(WeightGradient { dy: dy.clone(), x: x.clone(), id });
                Ok(())
            }
            None => self.weight_grad_now(dy, x, id),
        }
    }

    /// As [`weight_grad`](Self::weight_grad), but at once under every schedule.
    pub fn weight_grad_now(&self, dy: &Tensor, x: &Tensor, id: ParamId) -> Result<()> {
        self.params.add_weight_grad(id, dy, x)
    }

    /// Accumulates a bias's gradient, the sum of `dy` over rows.
    pub fn bias_grad(&self, dy: &Tensor, id: ParamId) -> Result<()> {
        Ok(kernels::ops::linear::bias_grad(dy, &self.params.grad(id)?)?)
    }
}
