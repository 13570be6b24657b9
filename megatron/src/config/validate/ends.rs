//! Checks of how a run ends, and of which checkpoints it keeps.

use super::Check;
use crate::config::{CheckpointConfig, RunConfig};

impl Check<'_> {
    pub(super) fn retention(&mut self, checkpoint: &CheckpointConfig) {
        let retention = &checkpoint.retention;
        for (key, value) in
            [("save_retain_interval", retention.interval), ("most_recent_k", retention.most_recent)]
        {
            self.positive_steps(key, value);
            self.require(value.is_none() || checkpoint.save.is_some(), |c| {
                format!(
                    "{} has no effect: no checkpoints are saved; set save",
                    c.cite(key, value.unwrap_or(0))
                )
            });
        }
        if let (Some(retained), Some(saved @ 1..)) = (retention.interval, checkpoint.save_interval)
        {
            self.require(retained.is_multiple_of(saved), |c| {
                format!(
                    "{} must be a multiple of {}: {retained} mod {saved} = {}; other steps have no checkpoint to keep",
                    c.cite("save_retain_interval", retained),
                    c.cite("save_interval", saved),
                    retained % saved
                )
            });
        }
    }

    pub(super) fn skipped_training(&mut self, run: &RunConfig) {
        let t = &run.training;
        if let Some(minutes) = t.exit_duration_in_mins {
            self.above_zero("exit_duration_in_mins", minutes);
        }
        self.require(!t.iterations_to_skip.contains(&0), |c| {
            format!("{}: steps are counted from 1", c.cite("iterations_to_skip", 0))
        });
        self.require(!t.skip_train || run.logging.eval_iters > 0, |c| {
            format!(
                "{} only evaluates, but {} turns evaluation off; leave one out",
                c.cite("skip_train", true),
                c.cite("eval_iters", 0)
            )
        });
    }
}
