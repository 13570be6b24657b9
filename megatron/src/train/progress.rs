//! How far a run is.

use serde::{Deserialize, Serialize};

/// How far a run is. With the parameters and the optimizer's state, all there is to resume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps made, or queued.
    pub iteration: u64,
    /// Samples read.
    pub consumed_samples: u64,
    /// Tokens of these: a run may go on with longer or shorter sequences.
    #[serde(default)]
    pub consumed_tokens: u64,
    /// Samples of steps that updated the parameters; what learning-rate schedules count.
    pub applied_samples: u64,
    /// Updates applied; Adam's step count.
    pub updates: u64,
    /// Updates left out because the gradient was not finite.
    pub skipped_iterations: u64,
    /// Steps whose loss was not finite.
    pub nan_iterations: u64,
    /// The last steps, as far as they had in a row a loss or a gradient that was not finite.
    /// Overflows that a loss scale answers by falling neither count nor end the row.
    #[serde(default)]
    pub nonfinite_in_a_row: u64,
}

impl Progress {
    /// The first sample of `seq_length` tokens that is not read yet. Where the length of sequences
    /// changed, it is the first one behind the tokens that were read, so that none of these is in
    /// it.
    pub fn data_position(&self, seq_length: usize) -> u64 {
        self.consumed_tokens.div_ceil(seq_length.max(1) as u64)
    }
}
