//! Removes old checkpoints after a newer one is complete (`--save-retain-interval`,
//! `--most-recent-k`).

use super::report::Reporter;
use super::state;
use super::trainer::Trainer;
use crate::checkpoint;
use crate::config::Retention;

impl Trainer {
    /// On rank 0, removes the checkpoints that retention does not keep next to that of step
    /// `newest`, which is complete. A checkpoint that cannot be removed stays and is reported; the
    /// run continues, because it needs the room at the next save at the earliest. While steps are
    /// not finite all checkpoints stay: a diverged run restarts from an earlier one.
    pub(super) fn remove_old_checkpoints(&self, newest: u64, reporter: &mut dyn Reporter) {
        let config = &self.config.checkpoint;
        let Some(dir) = config.save.as_ref().filter(|_| config.retention != Retention::default())
        else {
            return;
        };
        if self.groups.world.rank() != 0 || self.is_amid_nonfinite_steps() {
            return;
        }
        // A checkpoint that `ckpt_step` names is kept, because the same command would load it
        // again.
        let loaded = config.load.as_ref().map(|load| match config.ckpt_step {
            Some(step) => checkpoint::iteration_dir(load, step),
            None => load.clone(),
        });
        match checkpoint::remove_old(
            dir,
            newest,
            &config.retention,
            loaded.as_deref(),
            state::is_healthy,
        ) {
            Ok(removed) if removed.is_empty() => {}
            Ok(removed) => {
                let steps: Vec<String> = removed.iter().map(u64::to_string).collect();
                let s = if steps.len() > 1 { "s" } else { "" };
                reporter
                    .message(&format!("removed the checkpoint{s} of step{s} {}", steps.join(", ")));
            }
            Err(error) => {
                reporter.message(&format!("note: an old checkpoint could not be removed: {error}"))
            }
        }
    }
}
