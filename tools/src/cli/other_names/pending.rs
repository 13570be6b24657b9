//! Flags that are being built. Whoever adds one takes its name out of here; the file goes with the last.

use super::{Entry, refuse};

pub const TABLE: &[Entry] = &[refuse(
    "this is not there yet",
    "mock-data exit-duration-in-mins exit-signal-handler exit-signal save-retain-interval skip-train \
     exit-on-missing-checkpoint start-weight-decay end-weight-decay weight-decay-incr-style lr-warmup-init \
     iterations-to-skip use-checkpoint-args most-recent-k",
)];
