//! The progress of a run.

use serde::{Deserialize, Serialize};

use crate::optim::Applied;

/// The progress of a run. Together with the parameters and the optimizer's state it is all that a
/// resumed run needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps completed or queued.
    pub iteration: u64,
    /// Samples read.
    pub consumed_samples: u64,
    /// Tokens read. They are counted separately, because a resumed run may use longer or shorter
    /// sequences.
    #[serde(default)]
    pub consumed_tokens: u64,
    /// Samples of steps that updated the parameters; learning-rate schedules count these.
    pub applied_samples: u64,
    /// Updates applied; Adam's step count.
    pub updates: u64,
    /// Updates skipped because the gradient was not finite.
    pub skipped_iterations: u64,
    /// Steps with a non-finite loss.
    pub nan_iterations: u64,
    /// Number of consecutive steps, up to the last one, with a non-finite loss or gradient. An
    /// overflow that lowers the loss scale neither adds to the count nor resets it.
    #[serde(default)]
    pub nonfinite_in_a_row: u64,
}

impl Progress {
    /// The applied steps, which learning-rate schedules count.
    pub fn applied(&self) -> Applied {
        // `updates` starts again with the optimizer's state; schedules go on without it.
        let steps = self.iteration.saturating_sub(self.skipped_iterations);
        Applied { steps, samples: self.applied_samples }
    }

    /// The first sample of `seq_length` tokens that was not read yet. If the sequence length
    /// changed, it is the first sample that starts after all tokens read, so that no token is read
    /// twice.
    pub fn data_position(&self, seq_length: usize) -> u64 {
        self.consumed_tokens.div_ceil(seq_length.max(1) as u64)
    }
}
