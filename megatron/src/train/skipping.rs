//! Steps whose samples are skipped (`--iterations-to-skip`), for example those that made the loss
//! jump.
//!
//! Source: Megatron-LM `training/training.py`. The data advances; the schedules do not.

use super::metrics::StepMetrics;
use super::trainer::Trainer;
use crate::Result;

impl Trainer {
    /// Whether the next step is to be skipped.
    pub(super) fn skips_next(&self) -> bool {
        self.config.training.iterations_to_skip.contains(&(self.progress.iteration + 1))
    }

    /// Skips the samples of the next step. Returns the metrics of the previous step if they were
    /// not read yet. Collective over the world.
    pub(super) fn skip(&mut self) -> Result<Vec<StepMetrics>> {
        let before = Vec::from_iter(self.settle()?);
        let samples = self.config.training.global_batch_size_at(self.progress.consumed_samples);
        self.progress.iteration += 1;
        self.progress.consumed_samples += samples as u64;
        self.progress.consumed_tokens += (samples * self.config.model.seq_length) as u64;
        self.progress.skipped_iterations += 1;
        Ok(before)
    }
}
