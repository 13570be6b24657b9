//! Steps whose samples are passed over (`--iterations-to-skip`), as those that made the loss jump.
//!
//! Source: Megatron-LM `training/training.py`: data advance, schedules do not.

use super::metrics::StepMetrics;
use super::trainer::Trainer;
use crate::Result;

impl Trainer {
    /// Whether the next step is one to be skipped.
    pub(super) fn skips_next(&self) -> bool {
        self.config.training.iterations_to_skip.contains(&(self.progress.iteration + 1))
    }

    /// Passes the samples of the next step over, and returns the metrics of the step before, if
    /// they were not read yet. Collective over the world.
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
