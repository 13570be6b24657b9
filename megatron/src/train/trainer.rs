//! One rank's training: build, step, evaluate, save, resume.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use kernels::tensor::graph::can_record;
use kernels::tensor::trace::{Kind, Part, span, timed};

use super::agreement::require as require_alike;
use super::divergence::at_step;
use super::flops::step_flops;
use super::inference::{Sharding, build_stage};
use super::memory::peak_memory_of;
use super::metrics::StepMetrics;
use super::model::{ModelBuilder, residence};
use super::out_of_memory::{MemoryByUse, explain};
use super::progress::Progress;
use super::schedules::Schedules;
use super::sources::Sources;
use super::timers::{IntervalTimers, StepTimers};
use crate::checkpoint::{FolderLock, Saving};
use crate::comm::{Group, ReduceOp};
use crate::config::RunConfig;
use crate::data::{GlobalBatch, Loader, MicroBatch, SampleSource};
use crate::data_parallel::GradientReducer;
use crate::optim::{LossScaler, LrSchedule, Optimizer, Queued, Rates, weight_decay_at};
use crate::params::{ParamId, ParamStore};
use crate::pipeline::{
    GradientListener, Replay, Results, SavedInputs, Schedule, Stage, forward_only,
};
use crate::tensor_parallel::Phase;
use crate::topology::{ProcessGroups, RankGrid, ReplicaGroups};
use crate::{Error, Result};

/// A queued step: its known values, and where to read its results.
pub(super) struct InFlight {
    iteration: u64,
    global_batch_size: usize,
    consumed_samples: u64,
    consumed_tokens: u64,
    start: Instant,
    /// 1 / tokens of the global batch.
    factor: f64,
    learning_rate: f64,
    loss_scale: f64,
    /// This rank's share of the parameters' squared norm and of the zeros in the gradient, if
    /// requested.
    squared_params: Option<f64>,
    zeros_in_grad: Option<u64>,
    update: Queued,
    results: Results,
}

/// One rank of a training run.
pub struct Trainer {
    pub(super) config: RunConfig,
    pub(super) groups: ProcessGroups,
    pub(super) stage: Stage,
    schedules: Schedules,
    eval_schedule: Schedule,
    reducer: GradientReducer,
    /// Present under `enable_cuda_graph`.
    replay: Option<Replay>,
    pub(super) optimizer: Optimizer,
    pub(super) lr: LrSchedule,
    pub(super) loss_scaler: LossScaler,
    train: Loader,
    /// The next step's microbatches, read while a GPU computes the current step, and the samples
    /// consumed before them.
    pub(super) ahead: Option<(u64, Result<Vec<MicroBatch>>)>,
    /// The last step, while its results are not read.
    pub(super) in_flight: Option<InFlight>,
    /// A checkpoint that is being written in the background.
    pub(super) saving: Option<Saving>,
    /// Lock of the folder for checkpoints, if one was taken.
    pub(super) folder_lock: Option<FolderLock>,
    /// Time at which results were last read.
    last_read: Option<Instant>,
    /// Present if the log shows the time of a step's parts.
    timers: Option<IntervalTimers>,
    /// Start of the time that `exit_duration_in_mins` limits.
    started: Instant,
    pub(super) valid: Option<Loader>,
    pub(super) test: Option<Loader>,
    pub(super) progress: Progress,
    pub(super) fingerprint: String,
    /// [`ModelBuilder::architecture`]
    pub(super) architecture: String,
}

/// The information that ranks exchange after a step.
pub(super) struct Met {
    /// Whether some rank was asked to stop.
    pub stop: bool,
    /// Whether all ranks have written the checkpoint in progress.
    pub written: bool,
    /// Whether the time of `exit_duration_in_mins` is over on some rank.
    pub overdue: bool,
}

/// Ignores gradients: evaluation has none.
pub(super) struct NoGradients;

impl GradientListener for NoGradients {
    fn ready(&mut self, _: &[ParamId], _: &ParamStore) -> Result<()> {
        Ok(())
    }
}

impl Trainer {
    /// Builds this rank's share of the model with its initial weights, in the configured precision.
    /// Collective over `world`.
    ///
    /// # Errors
    /// If the configuration is inconsistent, does not fit the world or differs from that of another
    /// rank, or if memory is exhausted.
    pub fn new(
        config: &RunConfig,
        model: &dyn ModelBuilder,
        world: Group,
        sources: &Sources,
        device: &Device,
    ) -> Result<Self> {
        let built = Self::build(config, model, world, sources, device);
        built.map_err(|error| explain(error, config, device, &MemoryByUse::new()))
    }

    fn build(
        config: &RunConfig,
        model: &dyn ModelBuilder,
        world: Group,
        sources: &Sources,
        device: &Device,
    ) -> Result<Self> {
        if config.training.enable_cuda_graph && !can_record(device) {
            return Err(Error::config(format!(
                "enable_cuda_graph records the work of a GPU, but this run computes on {}; leave it out, or compute on a GPU",
                kernels::tensor::device::name(device)
            )));
        }
        config.validate_cuda_graph()?;
        require_alike(&world, config, &sources.fingerprint)?;
        let parallel = &config.parallel;
        let groups = ProcessGroups::new(world, RankGrid::from_config(parallel)?)?;
        let (pp, v) = (parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_size);
        let (seed, dtype) = (config.training.seed, config.training.precision.dtype());
        let copies = parallel.num_distributed_optimizer_instances;
        let replicas = ReplicaGroups::new(groups.replicas.clone(), copies)?;
        let sharding = Some(Sharding {
            replicas: replicas.clone(),
            weights_in: residence(&parallel.param_offload, device),
            optimizer_in: residence(&config.optimizer.offload, device),
        });
        let hidden = config.model.hidden_size;
        let mut stage =
            build_stage(parallel, model, &groups, sharding, hidden, seed, dtype, device)?;
        let training = &config.training;
        // Otherwise there is nothing that ranks have in common.
        let replicated = stage.tp.size() > 1 && !stage.tp.sequence_parallel();
        stage.saved_inputs = SavedInputs::new(
            training.distribute_saved_activations && replicated,
            residence(&training.activation_offload, device),
        );
        stage.params.keep_masters()?;
        stage.params.initialize(seed)?;

        let optimizer = Optimizer::new(
            &config.optimizer,
            &stage.params,
            groups.tp.clone(),
            replicas.clone(),
            groups.pp.clone(),
            seed,
        )?;
        let embedding = groups.embedding.clone().filter(|_| model.tied());
        let reducer = GradientReducer::new(
            groups.tp.clone(),
            replicas,
            embedding,
            parallel.overlap_grad_reduce,
        )
        .in_dtype(config.training.grad_reduce_dtype());
        let batch = GlobalBatch::new(
            training.micro_batch_size,
            training.global_batch_size,
            groups.dp_rank(),
            groups.dp_size(),
        )?;
        let loader = |source: &Arc<dyn SampleSource>| {
            Loader::new(source.clone(), batch, config.model.vocab_size, device.clone())
                .with_documents(sources.document_ends)
                .with_part_of_sequences(groups.cp.rank(), groups.cp.size())
        };
        let early = groups.pp.overlaps();
        let first = batch.resized(training.global_batch_size_at(0))?.num_microbatches();
        let schedules = Schedules::new(parallel, model, training.recompute, early, first)?;
        // The kinds of messages do not depend on the number of microbatches.
        let [sends, receives] = schedules.last().lanes(groups.pp.rank());
        stage.cp.connect(device)?;
        groups.pp.connect(&sends, &receives)?;
        if training.enable_cuda_graph {
            stage.params.clear_all_grads();
        }
        let drops = config.model.attention_dropout > 0.0 || config.model.hidden_dropout > 0.0;
        let eval_schedule = forward_only(pp, v, batch.num_microbatches())?;
        Ok(Self {
            eval_schedule: if early { eval_schedule.receiving_early() } else { eval_schedule },
            schedules,
            stage,
            reducer,
            replay: training.enable_cuda_graph.then(|| Replay::new(drops)),
            optimizer,
            lr: LrSchedule::new(&config.optimizer)?,
            loss_scaler: LossScaler::new(config.training.precision),
            train: loader(&sources.train),
            ahead: None,
            in_flight: None,
            saving: None,
            folder_lock: None,
            last_read: None,
            timers: IntervalTimers::of(config),
            started: Instant::now(),
            valid: sources.valid.as_ref().map(loader),
            test: sources.test.as_ref().map(loader),
            progress: Progress::default(),
            fingerprint: sources.fingerprint.clone(),
            architecture: model.architecture().into(),
            config: config.clone(),
            groups,
        })
    }

    /// Counts the minutes of `exit_duration_in_mins` from the program's start instead of this
    /// trainer's.
    pub fn count_minutes_from(&mut self, start: Instant) {
        self.started = start;
    }

    /// Progress of the run.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// This rank's groups.
    pub fn groups(&self) -> &ProcessGroups {
        &self.groups
    }

    /// This rank's layers and parameters.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// The number of operations in a CUDA graph, if one was recorded since the last call.
    pub fn take_recorded(&mut self) -> Option<usize> {
        self.replay.as_mut().and_then(Replay::take_news)
    }

    /// The microbatches of the next step, read ahead if possible.
    fn next_batches(&mut self) -> Result<Vec<MicroBatch>> {
        let consumed = self.progress.consumed_samples;
        match self.ahead.take().filter(|(first, _)| *first == consumed) {
            Some((_, batches)) => batches,
            None => self.read(),
        }
    }

    /// Reads the microbatches of the next step.
    fn read(&self) -> Result<Vec<MicroBatch>> {
        let global_batch_size =
            self.config.training.global_batch_size_at(self.progress.consumed_samples);
        let batch = self.train.batch().resized(global_batch_size)?;
        self.train
            .microbatches_of(&batch, self.progress.data_position(self.config.model.seq_length))
    }

    /// Reads the microbatches of the next step while a GPU computes the current one. An error is
    /// returned by the next step.
    fn read_ahead(&mut self) {
        let training = &self.config.training;
        if kernels::tensor::device::computes_ahead(&self.stage.device)
            && self.progress.iteration < training.train_iters
        {
            let _span = timed("read data", Kind::Phase, Part::Data);
            self.ahead = Some((self.progress.consumed_samples, self.read()));
        }
    }

    /// Number of unmasked tokens in the global batch.
    fn count_tokens(&self, batches: &[MicroBatch]) -> Result<f64> {
        let count: f64 = batches.iter().map(|batch| batch.counted).sum();
        let count = Tensor::from_vec(vec![count], 1, &Device::Cpu)?;
        self.groups.replicas.all_reduce(&count, ReduceOp::Sum)?.wait()?;
        Ok(count.to_vec1::<f64>()?[0])
    }

    /// The sum of `values` over all ranks, in rank order, in f64.
    pub(super) fn sum_over_world(&self, values: Vec<f64>) -> Result<Vec<f64>> {
        let len = values.len();
        let sums = Tensor::from_vec(values, len, &Device::Cpu)?;
        self.groups.world.all_reduce(&sums, ReduceOp::Sum)?.wait()?;
        Ok(sums.to_vec1()?)
    }

    /// This rank's contribution to the loss of the global batch. Only tp rank 0 contributes,
    /// because every tp rank computes the same loss.
    fn loss_share(&self, loss_sum: f64) -> f64 {
        if self.groups.tp.rank() == 0 { loss_sum } else { 0.0 }
    }

    /// Runs one training step on the next global batch and returns its metrics. Collective over the
    /// world. The memory in the metrics is this rank's. Unread metrics of an earlier
    /// [`Trainer::advance`] are dropped.
    ///
    /// # Errors
    /// If data cannot be read, a peer fails, gradients overflow at the smallest loss scale, or
    /// memory is exhausted.
    pub fn step(&mut self) -> Result<StepMetrics> {
        let last = self.advance(true)?.pop();
        last.ok_or_else(|| {
            Error::config("internal error: a step that was to be read at once was not")
        })
    }

    /// Queues the next step. Returns the metrics of all steps whose results were read during the
    /// call, in order. Collective over the world.
    ///
    /// This keeps a GPU busy: the results of step n are read only after forward and backward of
    /// step n + 1 are queued. That is early enough for the learning rate and Adam's step count,
    /// which depend on them. The step's own results are read at once in three cases: with
    /// `at_once`, on a CPU, and with a dynamic loss scale, which the next forward needs.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn advance(&mut self, at_once: bool) -> Result<Vec<StepMetrics>> {
        self.try_advance(at_once).map_err(|error| {
            explain(error, &self.config, &self.stage.device, &self.memory_by_use())
        })
    }

    /// Bytes that this rank keeps from step to step, by use.
    pub fn memory_by_use(&self) -> MemoryByUse {
        self.stage
            .params
            .bytes_by_kind()
            .into_iter()
            .chain([("optimizer state", self.optimizer.bytes())])
            .collect()
    }

    fn try_advance(&mut self, at_once: bool) -> Result<Vec<StepMetrics>> {
        let start = Instant::now();
        let device = &self.stage.device;
        let _timing = self.timers.as_ref().map(|timers| timers.enter(device)).transpose()?;
        let _step = span("step", Kind::Phase);
        let reading = timed("read data", Kind::Phase, Part::Data);
        let batches = self.next_batches()?;
        let tokens = self.count_tokens(&batches)?;
        drop(reading);
        self.schedules.prepare(batches.len())?;
        let factor = if tokens > 0.0 { 1.0 / tokens } else { 0.0 };
        self.reducer.begin(&self.stage.params)?;
        let phase = Phase::Train { step: self.progress.iteration };
        let loss_scale = self.loss_scaler.scale();
        let (stage, schedule, weight) = (&self.stage, self.schedules.last(), factor * loss_scale);
        let losses = match &mut self.replay {
            Some(replay) => {
                replay.run(stage, schedule, &batches, phase, weight, &mut self.reducer)?
            }
            None => stage.run(schedule, &batches, phase, weight, &mut self.reducer)?,
        };
        self.stage.params.release_weights()?;
        {
            let _span = timed("finish gradients", Kind::Phase, Part::Reduce);
            self.reducer.finish(&self.stage.params)?;
        }
        // Whether the previous update was applied determines this step's learning rate and Adam's
        // step count.
        let mut known = Vec::from_iter(self.settle()?);
        let learning_rate = self.lr.lr_at(self.progress.applied());
        let betas = self.lr.betas_at(self.progress.applied());
        let weight_decay = weight_decay_at(&self.config.optimizer, self.progress.applied_samples);
        let update = {
            let _span = timed("optimizer", Kind::Phase, Part::Optimizer);
            self.optimizer.step(
                &self.stage.params,
                Rates { learning_rate, weight_decay, betas },
                loss_scale,
            )?
        };
        let (squared_params, zeros_in_grad) = self.statistics(self.progress.iteration + 1)?;
        self.stage.params.release_grads();
        self.timers.iter().for_each(IntervalTimers::end_step);
        let results = losses.read_with(vec![update.verdict().clone()])?;
        let global_batch_size =
            self.config.training.global_batch_size_at(self.progress.consumed_samples);
        self.progress.iteration += 1;
        self.progress.consumed_samples += global_batch_size as u64;
        self.progress.consumed_tokens += (global_batch_size * self.config.model.seq_length) as u64;
        let Progress { iteration, consumed_samples, consumed_tokens, .. } = self.progress;
        self.in_flight = Some(InFlight {
            iteration,
            global_batch_size,
            consumed_samples,
            consumed_tokens,
            start,
            factor,
            learning_rate,
            loss_scale,
            squared_params,
            zeros_in_grad,
            update,
            results,
        });
        self.read_ahead();
        let may_wait = kernels::tensor::device::computes_ahead(&self.stage.device)
            && !self.loss_scaler.adapts();
        if at_once || !may_wait {
            known.extend(self.settle()?);
        }
        Ok(known)
    }

    /// This rank's share of the statistics for the log line of step `iteration`, whose update is
    /// made or queued.
    fn statistics(&self, iteration: u64) -> Result<(Option<f64>, Option<u64>)> {
        let (logging, params) = (&self.config.logging, &self.stage.params);
        let intervals = [
            logging.log_interval,
            logging.tensorboard.as_ref().map_or(0, |board| board.log_interval),
        ];
        let mut intervals = intervals.into_iter().filter(|interval| *interval > 0);
        if !intervals.any(|n| iteration.is_multiple_of(n))
            && iteration != self.config.training.train_iters
        {
            return Ok((None, None));
        }
        let squares =
            logging.log_params_norm.then(|| self.optimizer.squared_params(params)).transpose()?;
        let zeros = logging
            .log_num_zeros_in_grad
            .then(|| self.optimizer.zeros_in_grad(params))
            .transpose()?;
        Ok((squares, zeros))
    }

    /// Reads the results of the step in flight, if any. This is the only place that waits for a
    /// GPU. Collective over the world.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn settle(&mut self) -> Result<Option<StepMetrics>> {
        let Some(step) = self.in_flight.take() else { return Ok(None) };
        let (loss, read) = step.results.wait()?;
        let result = self.optimizer.settle(step.update, &read[0])?;
        let is_answered = !result.applied && self.loss_scaler.may_fall();
        self.loss_scaler.update(!result.applied).map_err(|error| at_step(step.iteration, error))?;
        // The optional values are present on all ranks or on none.
        let shares = [
            Some(self.loss_share(loss)),
            step.squared_params,
            step.zeros_in_grad.map(|zeros| zeros as f64),
        ];
        let mut sums = self.sum_over_world(shares.into_iter().flatten().collect())?.into_iter();
        let lm_loss = sums.next().unwrap_or(f64::NAN) * step.factor;
        let params_norm = step.squared_params.and_then(|_| sums.next()).map(f64::sqrt);
        let num_zeros_in_grad = step.zeros_in_grad.and_then(|_| sums.next());

        let gbs = step.global_batch_size;
        let progress = &mut self.progress;
        progress.updates = self.optimizer.steps();
        if result.applied {
            progress.applied_samples += gbs as u64;
        } else {
            progress.skipped_iterations += 1;
        }
        if !lm_loss.is_finite() {
            progress.nan_iterations += 1;
        }
        if result.applied && lm_loss.is_finite() {
            progress.nonfinite_in_a_row = 0;
        } else if !is_answered {
            progress.nonfinite_in_a_row += 1;
        }
        // Steps overlap, so each step's time starts at the end of the previous one.
        let now = Instant::now();
        let start = self.last_read.replace(now).map_or(step.start, |last| last.max(step.start));
        let seconds = (now - start).as_secs_f64();
        let timers = self.add_to_timers(step.iteration, now - start)?;
        let progress = &self.progress;
        let model = &self.config.model;
        let flops = step_flops(model, gbs, model.padded_vocab_size(self.groups.tp.size()));
        Ok(Some(StepMetrics {
            iteration: step.iteration,
            train_iters: self.config.training.train_iters,
            consumed_samples: step.consumed_samples,
            consumed_tokens: step.consumed_tokens,
            lm_loss,
            grad_norm: f64::from(result.grad_norm),
            params_norm,
            num_zeros_in_grad,
            learning_rate: step.learning_rate,
            loss_scale: step.loss_scale,
            global_batch_size: gbs,
            elapsed_ms: seconds * 1e3,
            tokens_per_second: (gbs * model.seq_length) as f64 / seconds,
            tflops: flops / seconds / 1e12 / self.groups.world.size() as f64,
            skipped: !result.applied,
            skipped_iterations: progress.skipped_iterations,
            nan_iterations: progress.nan_iterations,
            nonfinite_in_a_row: progress.nonfinite_in_a_row,
            memory: peak_memory_of(&self.stage.device),
            timers,
        }))
    }

    /// Adds a step that took `elapsed` to the timers, if there are any. Returns their summary if
    /// the step has a log line. Collective over the world for these steps.
    fn add_to_timers(&mut self, iteration: u64, elapsed: Duration) -> Result<Option<StepTimers>> {
        let Some(mut timers) = self.timers.take() else { return Ok(None) };
        timers.add(elapsed);
        let is_due = iteration.is_multiple_of(self.config.logging.log_interval.max(1))
            || iteration == self.config.training.train_iters;
        let world = &self.groups.world;
        let sum = |values| self.sum_over_world(values);
        let summary =
            is_due.then(|| timers.summarize(world.rank(), world.size(), sum)).transpose()?;
        self.timers = Some(timers);
        Ok(summary)
    }

    /// Mean loss per token over `iters` global batches of a split, starting at sample `first`.
    /// Collective over the world.
    ///
    /// # Errors
    /// If data cannot be read or a peer fails.
    pub fn evaluate(&self, loader: &Loader, first: u64, iters: u64) -> Result<f64> {
        let loss = self.evaluate_until(loader, first, iters, &AtomicBool::new(false))?;
        loss.ok_or_else(|| Error::config("internal error: an evaluation stopped without a request"))
    }

    /// As [`Trainer::evaluate`], but returns `None` if `stop` was set on any rank meanwhile.
    pub(super) fn evaluate_until(
        &self,
        loader: &Loader,
        first: u64,
        iters: u64,
        stop: &AtomicBool,
    ) -> Result<Option<f64>> {
        let (mut loss, mut tokens) = (0f64, 0f64);
        for iter in 0..iters {
            if self.is_told_to_stop(stop)? {
                return Ok(None);
            }
            let batches = loader.microbatches(
                first.saturating_add(iter * self.config.training.global_batch_size as u64),
            )?;
            tokens += self.count_tokens(&batches)?;
            loss += self
                .stage
                .run(&self.eval_schedule, &batches, Phase::Evaluate, 0.0, &mut NoGradients)?
                .sum()?;
        }
        self.stage.params.release_weights()?;
        Ok(Some(self.sum_over_world(vec![self.loss_share(loss)])?[0] / tokens.max(1.0)))
    }

    /// Whether `stop` is set on any rank. Collective over the world.
    fn is_told_to_stop(&self, stop: &AtomicBool) -> Result<bool> {
        Ok(self.meet(stop)?.stop)
    }

    /// Exchanges the information of [`Met`] between the ranks. Collective over the world.
    pub(super) fn meet(&self, stop: &AtomicBool) -> Result<Met> {
        let limit = self.config.training.exit_duration_in_mins;
        let overdue =
            limit.is_some_and(|minutes| self.started.elapsed().as_secs_f64() > minutes * 60.0);
        let mine = [stop.load(Ordering::SeqCst), self.is_saving(), overdue]
            .map(|is| f64::from(u8::from(is)));
        let ranks = self.sum_over_world(mine.to_vec())?;
        Ok(Met {
            stop: ranks[0] > 0.0,
            written: self.saving.is_some() && ranks[1] == 0.0,
            overdue: ranks[2] > 0.0,
        })
    }
}
