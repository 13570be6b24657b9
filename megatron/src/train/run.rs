//! The training loop: steps, evaluation, checkpoints, and the reasons to stop.

use std::sync::atomic::AtomicBool;

use candle_core::{Device, Tensor};

use super::memory::{Peak, describe_memory, peak_memory_of};
use super::metrics::{EvalMetrics, StepMetrics};
use super::profile::Profiler;
use super::records::Records;
use super::report::Reporter;
use super::state;
use super::trainer::{Met, Trainer};
use crate::comm::ReduceOp;
use crate::config::{CheckpointConfig, DataloaderType, RunConfig, Takes};
use crate::data::Loader;
use crate::{Error, Result, checkpoint};

/// The reason why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished,
    /// `exit_interval` was reached.
    ExitInterval,
    /// `exit_duration_in_mins` was reached.
    ExitDuration,
    /// A signal requested it. The state was saved if the run saves checkpoints.
    Interrupted,
}

/// Checks, before any rank starts, that the run can load its checkpoint and save its own.
///
/// # Errors
/// If `load` holds a damaged checkpoint or one of another architecture or optimizer, if `save`
/// holds a checkpoint that this run does not continue, or if a manifest cannot record a path of
/// this run.
pub fn preflight(config: &RunConfig) -> Result<()> {
    let CheckpointConfig { save, load, takes, .. } = &config.checkpoint;
    let found = checkpoint::to_load(&config.checkpoint)?;
    if *takes != Takes::All && found.is_none() {
        let place = load
            .as_ref()
            .map_or("--load is not given".into(), |dir| format!("{} holds none", dir.display()));
        return Err(Error::config(format!(
            "--finetune and --no-load-optim start from a checkpoint, but {place}; give one with --load, or leave them out"
        )));
    }
    if let (true, None, Some(dir)) = (config.checkpoint.exit_on_missing_checkpoint, &found, load) {
        return Err(Error::checkpoint(
            dir,
            "holds no checkpoint, and --exit-on-missing-checkpoint forbids starting without one; \
             check the path of --load, or leave that flag out",
        ));
    }
    if let Some(path) = &found {
        let manifest = checkpoint::Manifest::read(path)?;
        state::from_json(path, &manifest.state, config, None)?;
        if *takes == Takes::All {
            state::require_optimizer(&manifest, config.optimizer.kind)?;
        }
        if save.as_ref().is_some_and(|save| checkpoint::same_folder(save, path)) {
            return Err(Error::checkpoint(
                path,
                "is the folder of one checkpoint; save into its parent folder, or elsewhere",
            ));
        }
    }
    let Some(dir) = save else { return Ok(()) };
    state::require_utf8(config)?;
    // A run that loads an earlier checkpoint also continues the folder around it.
    let lies_there = match &found {
        Some(path) => checkpoint::same_folder(&checkpoint::checkpoints_folder(path)?, dir),
        None => load.as_ref().is_some_and(|load| checkpoint::same_folder(load, dir)),
    };
    let continues = *takes != Takes::Weights && lies_there;
    if !continues && let Some(path) = checkpoint::existing(dir)? {
        // The advice does not tell the user to remove the checkpoint that is loaded.
        let others = if lies_there {
            String::new()
        } else {
            format!(
                "; continue it with --load {0}, or remove the iter_… folders in {0}",
                dir.display()
            )
        };
        return Err(Error::checkpoint(
            path,
            format!("already exists and this run would overwrite it; save elsewhere{others}"),
        ));
    }
    Ok(())
}

/// Whether step `iteration` is a multiple of `interval`.
pub(super) fn is_due(iteration: u64, interval: Option<u64>) -> bool {
    interval.is_some_and(|n| n > 0 && iteration.is_multiple_of(n))
}

impl Trainer {
    /// Resumes from `[checkpoint] load` if it holds a checkpoint, then trains to the end. `stop`
    /// may be set at any time, on any rank. All ranks then save and stop after the current step, or
    /// within the current evaluation. A rank that saves holds the folder's
    /// [`lock_folder`](checkpoint::lock_folder). Collective over the world.
    ///
    /// # Errors
    /// If data, a checkpoint or a peer fails, or the run diverges.
    pub fn run(&mut self, reporter: &mut dyn Reporter, stop: &AtomicBool) -> Result<Outcome> {
        let keep_copy = self.resume(reporter)?;
        if self.config.training.skip_train {
            return self.evaluate_only(reporter, stop);
        }
        let mut records = match self.groups.world.rank() {
            0 => Records::open(&self.config, &self.progress, keep_copy, reporter)?,
            _ => Records::default(),
        };
        let train_iters = self.config.training.train_iters;
        if self.progress.iteration >= train_iters {
            let done = self.progress.iteration;
            reporter.message(&format!(
                "nothing is left to train: the checkpoint is of step {done}, and the run ends after step {train_iters}"
            ));
        }
        if let Some(note) = self.no_evaluation() {
            reporter.message(&note);
        }
        if self.config.logging.timing_log_level > 0 && self.config.training.enable_cuda_graph {
            reporter.message(
                "note: a CUDA graph computes forward and backward together; the timers show them as forward-backward",
            );
        }
        reporter.start(self.progress.iteration, train_iters);
        let mut saved_at = self.progress.iteration;
        let mut withheld = false;
        let mut memory = None;
        let mut outcome = Outcome::Finished;
        let mut profiler = Profiler::new(self.config.logging.profile.as_ref());
        while self.progress.iteration < train_iters {
            let iteration = self.progress.iteration + 1;
            let due = |interval| is_due(iteration, interval);
            profiler.before(self)?;
            // A profile must show each step separately.
            let reads_at_once = self.reads_at_once(iteration)
                || [0, 1].map(|n| profiler.records(iteration + n)).contains(&true);
            let skips = self.skips_next();
            let steps = if skips { self.skip()? } else { self.advance(reads_at_once)? };
            profiler.after();
            for step in steps {
                self.report_step(step, &mut memory, reporter, &mut records)?;
            }
            if profiler.ends_with(iteration) {
                self.finish_profile(&mut profiler, reporter)?;
            }
            if skips {
                reporter
                    .message(&format!("step {iteration} is skipped, as --iterations-to-skip asks"));
            }
            if let Some(operations) = self.take_recorded() {
                let what = "forward and backward of a microbatch run as a CUDA graph from here on";
                reporter.message(&format!("step {iteration}: {what}, of {operations} operations"));
            }
            let Met { stop: mut interrupted, written, overdue } = self.meet(stop)?;
            if written {
                self.finish_and_report(reporter)?;
            }
            if !interrupted && due(self.config.logging.eval_interval) {
                interrupted = !self.validate(stop, reporter, &mut records)?;
            }
            if (interrupted || overdue)
                && let Some(step) = self.settle()?
            {
                self.report_step(step, &mut memory, reporter, &mut records)?;
            }
            let exit = overdue || due(self.config.training.exit_interval);
            let ends = interrupted || exit || iteration == train_iters;
            let saves =
                due(self.config.checkpoint.save_interval) && self.config.checkpoint.save.is_some();
            let withholds = saves && !ends && self.is_amid_nonfinite_steps();
            if withholds && !withheld {
                self.finish_and_report(reporter)?;
                self.config
                    .checkpoint
                    .save
                    .iter()
                    .for_each(|dir| reporter.message(&self.not_saved(dir)));
            }
            // One message for all consecutive steps.
            withheld = self.is_amid_nonfinite_steps() && (withheld || withholds);
            if (saves && !withholds) || exit || interrupted {
                // The checkpoint after the last step is saved synchronously, because no further
                // work could overlap with it.
                saved_at = self.save_and_report(
                    self.config.checkpoint.async_save && !ends,
                    reporter,
                    &mut records,
                )?;
            }
            if interrupted || exit {
                outcome = match (interrupted, overdue) {
                    (true, _) => Outcome::Interrupted,
                    (false, true) => Outcome::ExitDuration,
                    (false, false) => Outcome::ExitInterval,
                };
                break;
            }
        }
        if saved_at != self.progress.iteration {
            self.save_and_report(false, reporter, &mut records)?;
        }
        self.finish_profile(&mut profiler, reporter)?;
        if outcome == Outcome::Finished {
            let is_validated = is_due(train_iters, self.config.logging.eval_interval)
                || self.validate(stop, reporter, &mut records)?;
            if !is_validated
                || !self.report_evaluation(
                    self.test.as_ref(),
                    ("test", 0),
                    stop,
                    reporter,
                    &mut records,
                )?
            {
                outcome = Outcome::Interrupted;
            }
        }
        let (memory, reserved) = self.memory_by_rank()?;
        match reserved {
            Some(reserved) => {
                reporter.message(&describe_memory("GPU memory of tensors", &memory));
                reporter.message(&describe_memory("GPU memory reserved", &reserved));
            }
            None => reporter.message(&describe_memory("memory", &memory)),
        }
        records.finish(self.progress.iteration, &memory, reporter);
        Ok(outcome)
    }

    fn finish_profile(&self, profiler: &mut Profiler, reporter: &mut dyn Reporter) -> Result<()> {
        if let Some(profile) = profiler.finish(self)? {
            reporter.profile(&profile);
        }
        Ok(())
    }

    /// Whether an action follows step `iteration` that needs its results.
    fn reads_at_once(&self, iteration: u64) -> bool {
        let RunConfig { training, checkpoint, logging, .. } = &self.config;
        let due = |interval| is_due(iteration, interval);
        iteration == training.train_iters
            || [logging.eval_interval, checkpoint.save_interval, training.exit_interval]
                .into_iter()
                .any(due)
    }

    /// Reports a step. `memory` is the last known peak memory of a rank, if it was measured.
    /// Collective over the world.
    ///
    /// # Errors
    /// If too many consecutive steps were not finite. A checkpoint that is being written is
    /// completed first.
    fn report_step(
        &mut self,
        mut step: StepMetrics,
        memory: &mut Option<Peak>,
        reporter: &mut dyn Reporter,
        records: &mut Records,
    ) -> Result<()> {
        step.memory = match *memory {
            Some(known)
                if !step.iteration.is_multiple_of(self.config.logging.log_interval.max(1)) =>
            {
                known
            }
            _ => self.largest_memory(step.memory)?,
        };
        *memory = Some(step.memory);
        reporter.step(&step);
        records.step(&step, reporter);
        match self.divergence(&step) {
            None => Ok(()),
            Some(diverged) => {
                self.finish_and_report(reporter)?;
                Err(diverged)
            }
        }
    }

    /// Saves, or with `meanwhile` begins to save, after the previous checkpoint is written. Returns
    /// the iteration that is saved.
    fn save_and_report(
        &mut self,
        meanwhile: bool,
        reporter: &mut dyn Reporter,
        records: &mut Records,
    ) -> Result<u64> {
        self.finish_and_report(reporter)?;
        if let Some(dir) = self.config.checkpoint.save.clone() {
            records.flush(self.progress.iteration, reporter);
            if meanwhile {
                self.begin_save(&dir)?;
            } else {
                let path = self.save(&dir)?;
                reporter.checkpoint(self.progress.iteration, &path);
                self.remove_old_checkpoints(self.progress.iteration, reporter);
            }
        }
        Ok(self.progress.iteration)
    }

    /// Waits for the checkpoint that is being written, if any.
    fn finish_and_report(&mut self, reporter: &mut dyn Reporter) -> Result<()> {
        let saved = self.finish_save()?;
        if let (Some(iteration), Some(dir)) = (saved, &self.config.checkpoint.save) {
            reporter.checkpoint(iteration, &checkpoint::iteration_dir(dir, iteration));
            self.remove_old_checkpoints(iteration, reporter);
        }
        Ok(())
    }

    /// The message that evaluations were requested but there is no data to evaluate.
    fn no_evaluation(&self) -> Option<String> {
        let logging = &self.config.logging;
        let interval = logging.eval_interval?;
        let why = match (logging.eval_iters, &self.valid) {
            (0, _) => "--eval-iters is 0".to_string(),
            (_, None) => format!(
                "--split {} leaves less than one sample for validation; documents (in text files, paragraphs) are not cut",
                self.config.data.split
            ),
            _ => return None,
        };
        Some(format!("note: --eval-interval {interval} has no effect: {why}"))
    }

    /// Returns false if `stop` ended it early.
    pub(super) fn validate(
        &self,
        stop: &AtomicBool,
        reporter: &mut dyn Reporter,
        records: &mut Records,
    ) -> Result<bool> {
        self.report_evaluation(
            self.valid.as_ref(),
            ("validation", self.validated()),
            stop,
            reporter,
            records,
        )
    }

    /// The index of the validation sample at which this step's evaluation begins. Megatron's orders
    /// continue where the last evaluation ended (`consumed_valid_samples`), which follows from the
    /// step. Our orders restart, so that all evaluations of a run use the same samples.
    fn validated(&self) -> u64 {
        let RunConfig { data, logging, training, .. } = &self.config;
        match (data.dataloader_type, logging.eval_interval) {
            (DataloaderType::Single | DataloaderType::Cyclic, Some(interval @ 1..)) => {
                let before = self.progress.iteration.saturating_sub(1) / interval;
                before
                    .saturating_mul(logging.eval_iters)
                    .saturating_mul(training.global_batch_size as u64)
            }
            _ => 0,
        }
    }

    /// Evaluates a split from sample `first` on and reports the result. Returns false, without a
    /// report, if `stop` was set on any rank.
    pub(super) fn report_evaluation(
        &self,
        loader: Option<&Loader>,
        (split, first): (&str, u64),
        stop: &AtomicBool,
        reporter: &mut dyn Reporter,
        records: &mut Records,
    ) -> Result<bool> {
        let (Some(loader), iters @ 1..) = (loader, self.config.logging.eval_iters) else {
            return Ok(true);
        };
        records.flush(self.progress.iteration, reporter);
        let Some(lm_loss) = self.evaluate_until(loader, first, iters, stop)? else {
            return Ok(false);
        };
        let result =
            EvalMetrics { iteration: self.progress.iteration, split: split.into(), lm_loss };
        reporter.eval(&result);
        records.eval(&result, self.progress.consumed_samples, reporter);
        Ok(true)
    }

    /// Peak memory of every rank so far, in bytes: memory that tensors held (on the CPU, the
    /// resident set), and on GPUs the memory reserved for tensors.
    fn memory_by_rank(&self) -> Result<(Vec<u64>, Option<Vec<u64>>)> {
        let world = &self.groups.world;
        let mine = peak_memory_of(&self.stage().device);
        let mut memory = vec![0.0; 2 * world.size()];
        memory[world.rank()] = mine.allocated as f64;
        memory[world.size() + world.rank()] = mine.reserved.unwrap_or(0) as f64;
        let mut memory: Vec<u64> =
            self.sum_over_world(memory)?.into_iter().map(|bytes| bytes as u64).collect();
        let reserved = memory.split_off(world.size());
        Ok((memory, mine.reserved.map(|_| reserved)))
    }

    fn largest_memory(&self, mine: Peak) -> Result<Peak> {
        let memory = [mine.allocated, mine.reserved.unwrap_or(0)].map(|bytes| bytes as f64);
        let memory = Tensor::new(&memory, &Device::Cpu)?;
        self.groups.world.all_reduce(&memory, ReduceOp::Max)?.wait()?;
        let largest = memory.to_vec1::<f64>()?;
        Ok(Peak {
            allocated: largest[0] as u64,
            reserved: mine.reserved.map(|_| largest[1] as u64),
        })
    }
}
