//! Forward and backward of a microbatch as one CUDA graph, which is launched for every microbatch
//! of every step: the counterpart of Megatron-LM's `--enable-cuda-graph`.
//!
//! The values that differ between microbatches reach the graph through tensors at fixed addresses,
//! which are filled before each launch. They are tokens, labels, the loss mask, the loss weights
//! (with the number of unmasked tokens and the loss scale), the places of documents in the samples,
//! and the step and sample numbers for dropout masks. The rest of a step (clearing and reducing
//! gradients, the optimizer with its learning rate, counts and clipping) stays outside the graph.
//! Gradients and weights lie in flat buffers, which do not move.

use candle_core::{DType, Tensor};
use kernels::ops::dropout::step_and_samples;
use kernels::ops::reduce::copy;
use kernels::tensor::device::empty;
use kernels::tensor::graph::{Graph, record};
use kernels::tensor::trace::{Kind, Part, Recorder, timed, unheard};

use super::engine::{GradientListener, Losses, Stage};
use super::generators::one_f_one_b;
use super::schedule::Schedule;
use crate::data::MicroBatch;
use crate::params::{ParamId, ParamStore};
use crate::tensor_parallel::Phase;
use crate::{Error, Result};

/// Ordinary steps before one is recorded. They choose algorithms, load kernels, and upload
/// constants.
const WARM_UP: u32 = 2;

/// Records forward and backward of a stage that holds the whole model, and repeats them.
pub struct Replay {
    /// Whether the model uses dropout masks.
    drops: bool,
    /// Ordinary steps since the last change of the microbatches' shape.
    warm: u32,
    shape: Option<(usize, usize)>,
    recorded: Option<Recorded>,
    /// Number of operations of a graph that was recorded in the last step.
    news: Option<usize>,
}

/// A graph, and the tensors that it reads and writes.
struct Recorded {
    graph: Graph,
    input: MicroBatch,
    weights: Tensor,
    /// f64 `[1]`.
    loss: Tensor,
}

/// A listener that starts no reduction before backward has ended.
struct NothingEarly;

impl GradientListener for NothingEarly {
    fn ready(&mut self, _: &[ParamId], _: &ParamStore) -> Result<()> {
        Ok(())
    }
}

impl Replay {
    /// `drops`: whether the model's forward uses dropout masks.
    pub fn new(drops: bool) -> Self {
        Self { drops, warm: 0, shape: None, recorded: None, news: None }
    }

    /// As [`Stage::run`] for training the whole model. `schedule` and `gradients` are used by steps
    /// that do not replay the graph: the first ones, and those that a profile records.
    ///
    /// # Errors
    /// If a kernel fails, or an operation was requested that cannot be recorded.
    pub fn run(
        &mut self,
        stage: &Stage,
        schedule: &Schedule,
        batches: &[MicroBatch],
        phase: Phase,
        loss_factor: f64,
        gradients: &mut dyn GradientListener,
    ) -> Result<Losses> {
        if batches.iter().any(|batch| !batch.named.is_empty()) {
            return Err(Error::config(
                "enable_cuda_graph records only text models: every microbatch would use the named \
                 tensors of the first; leave it out",
            ));
        }
        let shape = one_shape(batches)?;
        if shape.is_none() || shape != self.shape {
            *self = Self { shape, ..Self::new(self.drops) };
        }
        if shape.is_none() || self.warm < WARM_UP || Recorder::current().is_some() {
            self.warm += 1;
            return stage.run(schedule, batches, phase, loss_factor, gradients);
        }
        let of_dropout = |batch: &MicroBatch| match phase {
            Phase::Train { step } if self.drops => {
                step_and_samples(step, &batch.samples, batch.tokens.device()).map(Some)
            }
            _ => Ok(None),
        };
        let recorded = match self.recorded.take() {
            Some(recorded) => recorded,
            None => {
                let recorded = Recorded::new(stage, &batches[0], phase, of_dropout(&batches[0])?)?;
                self.news = Some(recorded.graph.num_operations());
                recorded
            }
        };
        let recorded = self.recorded.insert(recorded);
        let launch = |batch| {
            let weights = stage.loss_weights(batch, loss_factor)?;
            recorded.launch(batch, &weights, of_dropout(batch)?.as_ref()).map(Some)
        };
        Ok(Losses(batches.iter().map(launch).collect::<Result<_>>()?))
    }

    /// The number of operations of a graph, if one was recorded since the last call.
    pub fn take_news(&mut self) -> Option<usize> {
        self.news.take()
    }
}

/// The common `[s, b]` of all microbatches.
fn one_shape(batches: &[MicroBatch]) -> Result<Option<(usize, usize)>> {
    let mut shapes = batches.iter().map(|batch| batch.tokens.dims2());
    let Some(first) = shapes.next().transpose()? else { return Ok(None) };
    for shape in shapes {
        if shape? != first {
            return Ok(None);
        }
    }
    Ok(Some(first))
}

impl Recorded {
    /// Records forward and backward of a microbatch with the shape of `like`.
    fn new(
        stage: &Stage,
        like: &MicroBatch,
        phase: Phase,
        step_and_samples: Option<Tensor>,
    ) -> Result<Self> {
        let room = |t: &Tensor| -> Result<Tensor> { Ok(empty(t.shape(), t.dtype(), t.device())?) };
        let input = MicroBatch {
            tokens: room(&like.tokens)?,
            labels: room(&like.labels)?,
            loss_mask: room(&like.loss_mask)?,
            step_and_samples,
            documents: like.documents.map(room)?,
            ..like.clone()
        };
        let weights = stage.loss_weights(like, 1.0)?;
        let loss = empty(1, DType::F64, &stage.device)?;
        let schedule = one_f_one_b(1, 1, 0)?;
        let graph = record(&stage.device, || {
            let weigh = |_: &MicroBatch| Ok(weights.clone());
            let inputs = std::slice::from_ref(&input);
            // Spans of a recording have no time.
            let losses = unheard(|| {
                stage.run_weighted(&schedule, inputs, phase, &weigh, &mut NothingEarly)
            })?;
            match losses.0.as_slice() {
                [Some(sum)] => Ok(copy(&loss, sum)?),
                _ => Err(Error::config("internal error: a graph of a stage without the head")),
            }
        })?;
        Ok(Self { graph, input, weights, loss })
    }

    /// Queues forward and backward of a microbatch. Returns Σ of its losses.
    fn launch(
        &self,
        batch: &MicroBatch,
        weights: &Tensor,
        step_and_samples: Option<&Tensor>,
    ) -> Result<Tensor> {
        let _span = timed("graph", Kind::Phase, Part::Forward);
        let inputs = [
            (&self.input.tokens, &batch.tokens),
            (&self.input.labels, &batch.labels),
            (&self.input.loss_mask, &batch.loss_mask),
            (&self.weights, weights),
        ];
        let of_dropout = self.input.step_and_samples.iter().zip(step_and_samples);
        let of_documents = self.input.documents.tables().zip(batch.documents.tables());
        for (to, from) in inputs.into_iter().chain(of_dropout).chain(of_documents) {
            copy(to, from)?;
        }
        self.graph.launch()?;
        // Copied, because the next launch overwrites it.
        let loss = empty(1, DType::F64, self.loss.device())?;
        copy(&loss, &self.loss)?;
        Ok(loss)
    }
}
