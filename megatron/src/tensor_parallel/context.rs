//! What a layer needs to know besides its input.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::Tensor;
use kernels::ops::dropout::{Dropout, DropoutKey, Tokens};

use super::mappings::TensorParallel;
use crate::Result;
use crate::context_parallel::ContextParallel;
use crate::data::{Documents, NamedTensors};
use crate::params::{ParamId, ParamStore};

/// Training or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Dropout is on; `step` (from 0) enters its keys.
    Train {
        /// Steps made before.
        step: u64,
    },
    /// Dropout is off.
    Evaluate,
}

/// One microbatch's surroundings on one rank.
pub struct Ctx<'a> {
    /// The stage's parameters.
    pub params: &'a ParamStore,
    /// This rank among those that share its layers.
    pub tp: &'a TensorParallel,
    /// This rank among those that share its sequences.
    pub cp: &'a ContextParallel,
    /// u32 `[s/cp, b]`: this rank's part of each sequence.
    pub tokens: &'a Tensor,
    /// u32 `[s/cp, b]`.
    pub labels: &'a Tensor,
    /// f32 `[s/cp, b]`.
    pub loss_mask: &'a Tensor,
    /// Index of each of the b samples within the step's global batch.
    pub samples: &'a [u64],
    /// [`MicroBatch::step_and_samples`](crate::data::MicroBatch::step_and_samples)
    pub step_and_samples: Option<&'a Tensor>,
    /// Where documents begin and end in the sequences, if that changes anything.
    pub documents: &'a Documents,
    /// What the data has beside tokens: see [`Ctx::tensor`].
    pub named: &'a NamedTensors,
    /// Decides about dropout.
    pub phase: Phase,
    /// The run's; keys of dropout follow from it.
    pub seed: u64,
    /// The gradient of what is minimized by every token's loss: `loss_mask` · loss scale / unmasked
    /// tokens of the global batch, f32 `[s/cp, b]` (f64 for f64). In training, where the head is.
    /// On the device, since a graph would repeat a number of the host's.
    pub loss_weights: Option<&'a Tensor>,
    /// Where products that make gradients of weights wait for their time; `None`: they are computed
    /// at once.
    pub later: Option<&'a WeightGradients>,
}

/// Products that make gradients of weights, `dw += dyᵀ·x`, still to be computed, in the order in
/// which layers asked for them.
#[derive(Default)]
pub struct WeightGradients(RefCell<Vec<WeightGradient>>);

/// One of them. It keeps both operands.
struct WeightGradient {
    dy: Tensor,
    x: Tensor,
    id: ParamId,
}

impl WeightGradients {
    /// Whether a weight's gradient is still to come.
    pub fn owes(&self, id: ParamId) -> bool {
        self.0.borrow().iter().any(|product| product.id == id)
    }

    /// Computes all of them, and frees the operands of each.
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

/// Where in a layer dropout strikes.
#[derive(Clone, Copy, Debug)]
pub enum DropoutSite {
    /// Of the embedding's output.
    Embedding = 0,
    /// Of the probabilities that weight values.
    AttentionWeights = 1,
    /// Of what attention adds to the residual stream.
    AttentionOutput = 2,
    /// Of what the MLP adds to the residual stream.
    MlpOutput = 3,
}

impl Ctx<'_> {
    /// The positions, within whole sequences, of the residual stream's rows on this rank: a part of
    /// those of its cp rank where sequence parallelism cuts them, too.
    ///
    /// # Errors
    /// If sequence parallelism cannot cut them evenly.
    pub fn stream_positions(&self) -> Result<Range<usize>> {
        let part = self.tokens.dim(0)?;
        let length = self.tp.stream_length(part)?;
        let first = self.cp.offset(part) + self.tp.stream_offset(length);
        Ok(first..first + length)
    }

    /// The microbatch's tensor of this name, `[b, …]`
    /// ([`SampleSource::named`](crate::data::SampleSource::named)).
    ///
    /// # Errors
    /// If there is none: names those that there are.
    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.named.get(name)
    }

    /// The weight of one of this stage's parameters, in local shape.
    pub fn weight(&self, id: ParamId) -> &Tensor {
        self.params.weight(id)
    }

    /// The key of a dropout site, or `None` where nothing is dropped.
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

    /// Accumulates the gradient of a product's weight, `dw += dyᵀ·x`, now or
    /// [`later`](Self::later); every layer that multiplies by a weight does it here. What else a
    /// layer has a gradient of, it adds to `ctx.params.grad(id)` itself. Neither operand may be written to after this; who reuses
    /// their memory calls [`weight_grad_now`](Self::weight_grad_now).
    pub fn weight_grad(&self, dy: &Tensor, x: &Tensor, id: ParamId) -> Result<()> {
        match self.later {
            Some(later) => {
                later.0.borrow_mut().push(WeightGradient { dy: dy.clone(), x: x.clone(), id });
                Ok(())
            }
            None => self.weight_grad_now(dy, x, id),
        }
    }

    /// As [`weight_grad`](Self::weight_grad), at once under every schedule.
    pub fn weight_grad_now(&self, dy: &Tensor, x: &Tensor, id: ParamId) -> Result<()> {
        self.params.add_weight_grad(id, dy, x)
    }

    /// Accumulates a bias's gradient, the sum of `dy` over rows.
    pub fn bias_grad(&self, dy: &Tensor, id: ParamId) -> Result<()> {
        Ok(kernels::ops::linear::bias_grad(dy, &self.params.grad(id)?)?)
    }
}
