//! Executes any [`Schedule`] on one rank: forward, backward, and the messages between stages.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use kernels::tensor::device::{Reading, empty, read_later};
use kernels::tensor::trace::{Kind, Part, timed};

use super::chunk::{Chunk, ChunkOutput, SavedChunk};
use super::saved_inputs::SavedInputs;
use super::schedule::{Action, Payload, Schedule};
use crate::comm::{Group, Work};
use crate::context_parallel::ContextParallel;
use crate::data::MicroBatch;
use crate::params::{ParamId, ParamStore};
use crate::tensor_parallel::{Ctx, Phase, TensorParallel, WeightGradients};
use crate::{Error, Result};

/// The part of a run on one rank that stays the same over all steps.
pub struct Stage {
    /// This rank's chunks, in order of their virtual stages.
    pub chunks: Vec<Chunk>,
    /// The parameters of all chunks.
    pub params: ParamStore,
    /// The ranks that share the stage's layers.
    pub tp: TensorParallel,
    /// The ranks that share the stage's sequences.
    pub cp: ContextParallel,
    /// The stages of the pipeline, in order.
    pub pp: Group,
    /// Width of the residual stream between stages.
    pub hidden: usize,
    /// Dtype of weights and of the residual stream.
    pub dtype: DType,
    /// Device of the computations.
    pub device: Device,
    /// Seed of the dropout keys.
    pub seed: u64,
    /// How the inputs of recomputed layers are kept.
    pub saved_inputs: SavedInputs,
}

/// Receives the gradients that no later pass of the step adds to.
pub trait GradientListener {
    /// The gradients of `params` are complete on this rank.
    fn ready(&mut self, params: &[ParamId], store: &ParamStore) -> Result<()>;
    /// Whether it is told after every microbatch, rather than after a step's last one alone.
    fn after_every_microbatch(&self) -> bool {
        false
    }
}

type Key = (usize, usize); // microbatch, chunk

/// The part of a backward that input gradients leave to weight gradients.
struct DelayedWeightGradients {
    products: WeightGradients,
    /// Parameters whose gradients these products complete.
    completes: Vec<ParamId>,
}

impl Stage {
    /// The context of one microbatch.
    pub fn ctx<'a>(
        &'a self,
        batch: &'a MicroBatch,
        phase: Phase,
        loss_weights: Option<&'a Tensor>,
    ) -> Ctx<'a> {
        Ctx {
            params: &self.params,
            tp: &self.tp,
            cp: &self.cp,
            tokens: &batch.tokens,
            labels: &batch.labels,
            loss_mask: &batch.loss_mask,
            samples: &batch.samples,
            step_and_samples: batch.step_and_samples.as_ref(),
            documents: &batch.documents,
            named: &batch.named,
            phase,
            seed: self.seed,
            loss_weights,
            later: None,
        }
    }

    /// [`Ctx::loss_weights`] of a microbatch; `loss_factor`: loss scale / unmasked tokens of the
    /// global batch.
    ///
    /// # Errors
    /// If there is no memory.
    pub(super) fn loss_weights(&self, batch: &MicroBatch, loss_factor: f64) -> Result<Tensor> {
        let wide = if self.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        Ok(batch.loss_mask.to_dtype(wide)?.affine(loss_factor, 0.0)?)
    }

    /// Shape of the residual stream between stages.
    fn stream_shape(&self, batch: &MicroBatch) -> Result<(usize, usize, usize)> {
        let (seq, b) = batch.tokens.dims2()?;
        Ok((self.tp.stream_length(seq)?, b, self.hidden))
    }

    /// Makes room for what a step saves for recomputation.
    fn prepare_saved_inputs(&self, schedule: &Schedule, batches: &[MicroBatch]) -> Result<()> {
        let (mut in_flight, mut most, mut elements) = (0, 0, 0);
        for action in &schedule.stages[self.pp.rank()] {
            match *action {
                Action::Forward { chunk, .. } => in_flight += self.chunks[chunk].num_saved_inputs(),
                Action::Backward { chunk, .. } | Action::InputGradients { chunk, .. } => {
                    in_flight -= self.chunks[chunk].num_saved_inputs();
                }
                _ => {}
            }
            most = most.max(in_flight);
        }
        for batch in batches {
            let (s, b, h) = self.stream_shape(batch)?;
            elements = elements.max(s * b * h);
        }
        self.saved_inputs.prepare(most, elements, &self.tp, self.dtype, &self.device)
    }

    /// Runs this rank's actions over a step's microbatches. `loss_factor`: loss scale / unmasked
    /// tokens of the global batch.
    ///
    /// # Errors
    /// If a kernel or a peer fails.
    pub fn run(
        &self,
        schedule: &Schedule,
        batches: &[MicroBatch],
        phase: Phase,
        loss_factor: f64,
        gradients: &mut dyn GradientListener,
    ) -> Result<Losses> {
        let weigh = |batch: &MicroBatch| self.loss_weights(batch, loss_factor);
        self.run_weighted(schedule, batches, phase, &weigh, gradients)
    }

    /// As [`Stage::run`]; `weigh` returns a microbatch's [`Ctx::loss_weights`].
    pub(super) fn run_weighted(
        &self,
        schedule: &Schedule,
        batches: &[MicroBatch],
        phase: Phase,
        weigh: &dyn Fn(&MicroBatch) -> Result<Tensor>,
        gradients: &mut dyn GradientListener,
    ) -> Result<Losses> {
        let mut received: HashMap<(Payload, Key), (Tensor, Work)> = HashMap::new();
        let mut outgoing: HashMap<(Payload, Key), Tensor> = HashMap::new();
        let mut saved: HashMap<Key, SavedChunk> = HashMap::new();
        let mut delayed: HashMap<Key, DelayedWeightGradients> = HashMap::new();
        let mut sends: Vec<Work> = Vec::new();
        let mut losses = Losses(vec![None; batches.len()]);
        let (last, every) = (batches.len() - 1, gradients.after_every_microbatch());
        let trains = matches!(phase, Phase::Train { .. });
        if trains {
            self.prepare_saved_inputs(schedule, batches)?;
        }
        for action in &schedule.stages[self.pp.rank()] {
            match *action {
                Action::Recv { what: payload, microbatch, chunk, from: peer } => {
                    let shape = self.stream_shape(&batches[microbatch])?;
                    let buffer = empty(shape, self.dtype, &self.device)?;
                    let work = self.pp.recv(&buffer, peer, payload.tag())?;
                    received.insert((payload, (microbatch, chunk)), (buffer, work));
                }
                Action::Send { what: payload, microbatch, chunk, to: peer } => {
                    let tensor =
                        take(&mut outgoing, (payload, (microbatch, chunk)), "a tensor to send")?;
                    let _span =
                        timed("send", Kind::Communication, Part::Send).at(microbatch, chunk);
                    sends.push(self.pp.send(&tensor, peer, payload.tag())?);
                }
                Action::Forward { microbatch, chunk } => {
                    let batch = &batches[microbatch];
                    let weighs = trains && self.chunks[chunk].output.is_some();
                    let weights = if weighs { Some(weigh(batch)?) } else { None };
                    let ctx = self.ctx(batch, phase, weights.as_ref());
                    let input = arrive(&mut received, Payload::Activation, (microbatch, chunk))?;
                    let _span = timed("forward", Kind::Phase, Part::Forward).at(microbatch, chunk);
                    let (output, kept) =
                        self.chunks[chunk].forward(input, &ctx, &self.saved_inputs)?;
                    match output {
                        ChunkOutput::Loss(loss) => losses.0[microbatch] = Some(loss),
                        ChunkOutput::Stream(x) => {
                            outgoing.insert((Payload::Activation, (microbatch, chunk)), x);
                        }
                    }
                    if trains {
                        saved.insert((microbatch, chunk), kept);
                        // Before the next microbatch's forward adds to them.
                        let output = self.chunks[chunk].output.as_ref().filter(|_| every);
                        if let Some(output) = output.filter(|o| o.makes_gradients_in_forward()) {
                            gradients.ready(&output.params(), &self.params)?;
                        }
                    }
                }
                Action::Backward { microbatch, chunk }
                | Action::InputGradients { microbatch, chunk } => {
                    let whole = matches!(action, Action::Backward { .. });
                    let products = WeightGradients::default();
                    let later = (!whole).then_some(&products);
                    let ctx = Ctx { later, ..self.ctx(&batches[microbatch], phase, None) };
                    let dy = arrive(&mut received, Payload::Gradient, (microbatch, chunk))?;
                    let kept = take(&mut saved, (microbatch, chunk), "activations")?;
                    let name = if whole { "backward" } else { "input gradients" };
                    let _span = timed(name, Kind::Phase, Part::Backward).at(microbatch, chunk);
                    // A chunk's backwards run in order of microbatches, so the last one completes
                    // the gradients.
                    let mut completes = Vec::new();
                    let mut ready = |params: &[ParamId]| {
                        if microbatch != last && !every {
                            return Ok(());
                        }
                        let (owing, complete): (Vec<_>, Vec<_>) =
                            params.iter().partition(|id| products.owes(**id));
                        completes.extend(owing);
                        gradients.ready(&complete, &self.params)
                    };
                    let dx = self.chunks[chunk].backward(
                        dy,
                        kept,
                        &ctx,
                        &self.saved_inputs,
                        &mut ready,
                    )?;
                    if let Some(dx) = dx {
                        outgoing.insert((Payload::Gradient, (microbatch, chunk)), dx);
                    }
                    if !whole {
                        delayed.insert(
                            (microbatch, chunk),
                            DelayedWeightGradients { products, completes },
                        );
                    }
                }
                Action::WeightGradients { microbatch, chunk } => {
                    let DelayedWeightGradients { products, completes } =
                        take(&mut delayed, (microbatch, chunk), "weight gradients")?;
                    let _span = timed("weight gradients", Kind::Phase, Part::Backward)
                        .at(microbatch, chunk);
                    products.compute(&self.params)?;
                    gradients.ready(&completes, &self.params)?;
                }
            }
        }
        let _span = (!sends.is_empty()).then(|| timed("wait for sends", Kind::Wait, Part::Send));
        for send in sends {
            send.wait()?;
        }
        Ok(losses)
    }
}

/// Σ token losses of each microbatch of a step; empty if this rank has no head. They are on the
/// device, which may not have computed them yet.
pub struct Losses(pub(super) Vec<Option<Tensor>>);

impl Losses {
    /// The sum of the losses, in order of microbatches. Waits for the device.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn sum(&self) -> Result<f64> {
        self.read_with(Vec::new())?.wait().map(|(sum, _)| sum)
    }

    /// Starts to read the sum and `others`, once the device has computed everything queued so far.
    /// Does not wait.
    ///
    /// # Errors
    /// If the device reports an error.
    pub fn read_with(&self, others: Vec<Tensor>) -> Result<Results> {
        let there: Vec<&Tensor> = self.0.iter().flatten().collect();
        let (num_others, mut wanted) = (others.len(), others);
        if !there.is_empty() {
            wanted.push(Tensor::cat(&there, 0)?);
        }
        Ok(Results { num_others, reading: read_later(wanted)? })
    }
}

/// Results of a step that are read to the host.
pub struct Results {
    num_others: usize,
    /// The other tensors, then the losses if this rank has any.
    reading: Reading,
}

impl Results {
    /// The sum of the losses, in order of microbatches, and the other tensors. Waits until the
    /// device has computed them.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn wait(self) -> Result<(f64, Vec<Tensor>)> {
        let mut others = self.reading.wait()?;
        let losses: Vec<f64> = match others.get(self.num_others) {
            Some(losses) => losses.to_vec1()?,
            None => Vec::new(),
        };
        others.truncate(self.num_others);
        Ok((losses.iter().sum(), others))
    }
}

fn take<K: std::hash::Hash + Eq + std::fmt::Debug, V>(
    map: &mut HashMap<K, V>,
    key: K,
    what: &str,
) -> Result<V> {
    map.remove(&key).ok_or_else(|| {
        Error::config(format!(
            "internal error: the schedule asks for {what} that does not exist: {key:?}"
        ))
    })
}

/// Takes the tensor received for an action, if a receive was posted.
fn arrive(
    received: &mut HashMap<(Payload, Key), (Tensor, Work)>,
    payload: Payload,
    key: Key,
) -> Result<Option<Tensor>> {
    match received.remove(&(payload, key)) {
        Some((tensor, work)) => {
            let name = match payload {
                Payload::Activation => "wait for an activation",
                Payload::Gradient => "wait for a gradient",
            };
            let _span = timed(name, Kind::Wait, Part::Receive).at(key.0, key.1);
            work.wait()?;
            Ok(Some(tensor))
        }
        None => Ok(None),
    }
}
