//! Resumes a run from a checkpoint and reports differences.

use super::progress::Progress;
use super::report::Reporter;
use super::run::{is_due, preflight};
use super::trainer::Trainer;
use super::{resume_notes, state};
use crate::checkpoint::{self, Later};
use crate::config::{RunConfig, Takes};
use crate::{Error, Result};

/// The number of training samples that a run reads until its end. A run that continued with shorter
/// sequences counts the tokens of earlier steps in samples of the present length. The order of
/// samples is drawn for this number.
///
/// # Errors
/// If the checkpoint to continue from cannot be read.
pub fn samples_to_read(config: &RunConfig) -> Result<u64> {
    let samples = config.training.samples();
    let Some(path) = checkpoint::to_load(&config.checkpoint)?
        .filter(|_| config.checkpoint.takes != Takes::Weights)
    else {
        return Ok(samples);
    };
    let progress = state::saved_run(&path, &checkpoint::Manifest::read(&path)?.state)?.progress;
    let moved =
        progress.data_position(config.model.seq_length).saturating_sub(progress.consumed_samples);
    Ok(samples.saturating_add(moved))
}

impl Trainer {
    /// Loads the checkpoint that the run continues from, if there is one, and reports differences.
    /// Returns whether the metrics may hold later steps that another run made: this one skipped a
    /// later checkpoint than the one it continues from, or saves elsewhere. Collective over the
    /// world.
    pub(super) fn resume(&mut self, reporter: &mut dyn Reporter) -> Result<bool> {
        preflight(&self.config)?;
        let Some(path) = checkpoint::to_load(&self.config.checkpoint)? else {
            if let Some(dir) = &self.config.checkpoint.load {
                let weights = match &self.config.checkpoint.init_from_hf {
                    Some(folder) => format!("the weights in {}", folder.display()),
                    None => "initial weights".to_string(),
                };
                reporter.message(&format!(
                    "no checkpoint in {}: starting from {weights}",
                    dir.display()
                ));
            }
            return Ok(false);
        };
        let given = self.config.clone();
        self.load(&path)?;
        let consumed = self.progress.consumed_samples;
        // Earlier steps may have had another global batch size.
        let training = &mut self.config.training;
        if let Some(samples) = training.train_samples {
            training.train_iters = self.progress.iteration + training.steps_left(consumed, samples);
        }
        let takes = self.config.checkpoint.takes;
        reporter.message(&match takes {
            Takes::All => format!("resumed from {} ({consumed} samples consumed)", path.display()),
            Takes::WithoutOptimizer => {
                format!(
                    "resumed from {} ({consumed} samples consumed), with a fresh optimizer",
                    path.display()
                )
            }
            Takes::Weights => format!("starting from the weights in {}", path.display()),
        });
        let manifest = checkpoint::Manifest::read(&path)?;
        let precision = self.config.training.precision;
        if let Some(theirs) =
            state::precision(&manifest.state).filter(|theirs| theirs.dtype() != precision.dtype())
        {
            reporter.message(&format!(
                "note: the checkpoint was trained in {theirs}; this run continues in {precision} from the same fp32 values"
            ));
        }
        if takes != Takes::Weights {
            let other_data = state::data_fingerprint(&manifest.state)
                .is_some_and(|theirs| theirs != self.fingerprint);
            if other_data {
                reporter.message(
                    "note: the data or the tokenizer differ from those that the checkpoint was trained on; the loss may jump",
                );
            }
            let changed =
                resume_notes::changed(&manifest.state, &given, &self.progress).map_err(|e| {
                    Error::config(format!("cannot compare this run with the checkpoint: {e}"))
                })?;
            changed.iter().for_each(|note| reporter.message(note));
        }
        if let Some(note) = self.early_end_of_decay() {
            reporter.message(&note);
        }
        let later = checkpoint::later(&self.config.checkpoint, &path, manifest.iteration)?;
        if let Some(note) = later.as_ref().and_then(|later| self.replaces(later)) {
            reporter.message(&note);
        }
        let skips = later.is_some_and(|later| later.latest > manifest.iteration);
        let folder = checkpoint::checkpoints_folder(&path)?;
        let save = self.config.checkpoint.save.as_ref();
        Ok(skips || !save.is_some_and(|save| checkpoint::same_folder(save, &folder)))
    }

    /// The message about later checkpoints that a run which goes back will replace.
    fn replaces(&self, later: &Later) -> Option<String> {
        let RunConfig { training, checkpoint, .. } = &self.config;
        let now = self.progress.iteration;
        let dir = checkpoint.save.as_ref()?;
        let next = |interval: Option<u64>| {
            interval.filter(|n| *n > 0).map(|n| (now / n + 1).saturating_mul(n))
        };
        let end = next(training.exit_interval)
            .map_or(training.train_iters, |exit| exit.min(training.train_iters));
        if end <= now {
            return None;
        }
        let first = next(checkpoint.save_interval).map_or(end, |save| save.min(end));
        let saves =
            |step: &u64| *step == end || *step < end && is_due(*step, checkpoint.save_interval);
        let (replaced, kept): (Vec<u64>, Vec<u64>) =
            later.iterations.iter().copied().partition(saves);
        let mut text = format!(
            "note: {} has checkpoints of later steps than {now}, where this run continues: {}.",
            dir.display(),
            listed(&later.iterations)
        );
        if !replaced.is_empty() {
            text += &format!(
                " It replaces {} when it saves the same {}.",
                listed(&replaced),
                steps(replaced.len())
            );
        }
        // Retention looks at all checkpoints older than the newest one, which this run saves at its
        // end.
        let saved_after = |step: u64| match checkpoint.save_interval {
            Some(interval @ 1..) => end.div_ceil(interval) - step / interval,
            _ => 1,
        };
        let stays = |step: &u64| {
            let between = kept.iter().filter(|other| *other > step && **other < end).count() as u64;
            *step > end || checkpoint.retention.keeps(*step, saved_after(*step) + between)
        };
        let (left, removed): (Vec<u64>, Vec<u64>) = kept.iter().copied().partition(stays);
        if !left.is_empty() {
            text += &format!(
                " It leaves {} as {}.",
                listed(&left),
                if left.len() == 1 { "it is" } else { "they are" }
            );
        }
        if !removed.is_empty() {
            let flag = if checkpoint.retention.most_recent.is_some() {
                "--most-recent-k"
            } else {
                "--save-retain-interval"
            };
            text += &format!(
                " {flag} removes {} as older checkpoints once later steps are saved.",
                listed(&removed)
            );
        }
        if later.latest > now {
            text += &format!(
                " {} is the latest until this run first saves, at step {first}.",
                later.latest
            );
        }
        Some(text)
    }

    /// The message that the learning-rate decay, which was given in steps, ends before the run,
    /// because earlier steps had more samples.
    fn early_end_of_decay(&self) -> Option<String> {
        let Progress { iteration, consumed_samples, applied_samples, .. } = self.progress;
        let training = &self.config.training;
        let batch = training.global_batch_size as u64;
        // With a batch-size ramp-up, the decay is given in samples.
        if consumed_samples == iteration.saturating_mul(batch) || training.rampup.is_some() {
            return None;
        }
        let total =
            applied_samples + training.train_iters.saturating_sub(iteration).saturating_mul(batch);
        let (end, lowest) = self.lr.end().filter(|(end, _)| *end < total)?;
        let when = if applied_samples < end { "ends before this run does" } else { "is over" };
        Some(format!(
            "note: the decay of the learning rate {when}, after {end} samples: earlier steps had \
             another global batch size, {applied_samples} samples in total, and this run ends at \
             {total}. Steps after the decay train at the lowest rate, {lowest}; --lr-decay-samples \
             {total} extends the decay"
        ))
    }
}

fn steps(count: usize) -> &'static str {
    if count == 1 { "step" } else { "steps" }
}

/// "A, B and C"; of a long list only the first ones.
fn listed(iterations: &[u64]) -> String {
    const MOST: usize = 10;
    let shown: Vec<String> = iterations.iter().take(MOST).map(u64::to_string).collect();
    match shown.split_last() {
        _ if iterations.len() > MOST => {
            format!("{}, … (up to {})", shown.join(", "), iterations[iterations.len() - 1])
        }
        Some((last, before @ [_, ..])) => format!("{} and {last}", before.join(", ")),
        _ => shown.join(", "),
    }
}
