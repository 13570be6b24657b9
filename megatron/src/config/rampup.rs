//! A global batch that grows at the start of a run, and the resulting number of steps.
//!
//! Source: Megatron-LM `core/num_microbatches_calculator.py`
//! (`RampupBatchsizeNumMicroBatchesCalculator`) and `training/training.py` (`update_train_iters`).

use serde::{Deserialize, Serialize};

use super::TrainingConfig;

/// `--rampup-batch-size START INCREMENT SAMPLES`: the global batch grows from `start` to the full
/// size in equal increments, each for the same number of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchSizeRampup {
    /// Samples of the first step.
    pub start: usize,
    /// Samples by which the global batch grows at a time.
    pub increment: usize,
    /// Samples after which the batch has its full size.
    pub samples: u64,
}

impl BatchSizeRampup {
    /// Samples of the step that follows `consumed` samples; `whole` is the full global batch size.
    /// Computed as in Megatron, in f64.
    fn at(&self, consumed: u64, whole: usize) -> usize {
        let increments = whole.saturating_sub(self.start).checked_div(self.increment).unwrap_or(0);
        if consumed > self.samples || increments == 0 {
            return whole;
        }
        let samples_per_increment = self.samples as f64 / increments as f64;
        let steps = (consumed as f64 / samples_per_increment) as usize;
        (self.start + steps.saturating_mul(self.increment)).min(whole)
    }
}

impl TrainingConfig {
    /// GBS of the step that follows `consumed` samples.
    pub fn global_batch_size_at(&self, consumed: u64) -> usize {
        self.rampup
            .map_or(self.global_batch_size, |rampup| rampup.at(consumed, self.global_batch_size))
    }

    /// Steps left for a run that has consumed `consumed` of `samples` samples; the samples left at
    /// the end are less than one step.
    pub fn steps_left(&self, mut consumed: u64, samples: u64) -> u64 {
        let mut steps = 0u64;
        while consumed < samples {
            let batch = self.global_batch_size_at(consumed).max(1) as u64;
            let most = (samples - consumed) / batch;
            let alike = self.steps_alike(consumed, most);
            steps += alike;
            consumed += alike * batch;
            // Later steps never have smaller batches.
            if alike == most {
                break;
            }
        }
        steps
    }

    /// How many steps from `consumed` samples on have the same global batch size, at most `most`.
    /// Found by bisection, because batches only grow.
    fn steps_alike(&self, consumed: u64, most: u64) -> u64 {
        let batch = self.global_batch_size_at(consumed);
        let is_alike =
            |steps: u64| self.global_batch_size_at(consumed + steps * batch as u64) == batch;
        if is_alike(most) {
            return most;
        }
        let (mut alike, mut other) = (0, most);
        while other - alike > 1 {
            let middle = alike + (other - alike) / 2;
            if is_alike(middle) {
                alike = middle;
            } else {
                other = middle;
            }
        }
        other // Steps before the first that differs.
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::valid;

    fn ramp(start: usize, increment: usize, samples: u64, whole: usize) -> TrainingConfig {
        let rampup = Some(BatchSizeRampup { start, increment, samples });
        TrainingConfig { global_batch_size: whole, rampup, ..valid().training }
    }

    /// `--rampup-batch-size 16 8 300`, global batch 64.
    #[test]
    fn batches_grow_as_megatrons_do() {
        let training = ramp(16, 8, 300, 64);
        // Six increments of 50 samples each.
        for (consumed, batch) in
            [(0, 16), (49, 16), (50, 24), (99, 24), (100, 32), (249, 48), (250, 56), (299, 56)]
        {
            assert_eq!(training.global_batch_size_at(consumed), batch, "after {consumed} samples");
        }
        for consumed in [300, 301, 10_000] {
            assert_eq!(training.global_batch_size_at(consumed), 64, "after {consumed} samples");
        }
    }

    #[test]
    fn without_it_every_step_has_the_whole_batch() {
        let training = TrainingConfig { rampup: None, global_batch_size: 64, ..valid().training };
        assert_eq!([0, 1, 1000].map(|consumed| training.global_batch_size_at(consumed)), [64; 3]);
        assert_eq!(
            [0, 63, 64, 127, 128].map(|samples| training.steps_left(0, samples)),
            [0, 0, 1, 1, 2]
        );
        assert_eq!(training.steps_left(100, 60), 0);
    }

    #[test]
    fn steps_are_counted_as_if_they_were_made() {
        for (start, increment, samples, whole) in [
            (16, 8, 300, 64),
            (1, 1, 1000, 7),
            (4, 4, 3, 64),
            (8, 24, 1001, 32),
            (32, 32, 1 << 14, 256),
        ] {
            let training = ramp(start, increment, samples, whole);
            for all in [0, 1, 15, 16, 17, 300, 301, 999, 4000, 1 << 15] {
                for first in [0, 5, 160, 3000] {
                    let (mut consumed, mut steps) = (first, 0);
                    while consumed + training.global_batch_size_at(consumed) as u64 <= all {
                        consumed += training.global_batch_size_at(consumed) as u64;
                        steps += 1;
                    }
                    assert_eq!(
                        training.steps_left(first, all),
                        steps,
                        "{:?}: {first} to {all}",
                        training.rampup
                    );
                }
            }
        }
    }

    #[test]
    fn steps_of_the_longest_run_are_counted_at_once() {
        let steps = ramp(1, 1, u64::MAX / 4, 4096).steps_left(0, u64::MAX / 2);
        assert!(steps > u64::MAX / 2 / 4096, "{steps}");
    }
}
