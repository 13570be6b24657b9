//! `[checkpoint]`: which checkpoints are saved, loaded, and kept.

use megatron::config::{CheckpointConfig, Retention, SchedulerOf, Takes};

use super::Resolver;
use crate::error::{Error, Result};

impl Resolver<'_> {
    pub(super) fn checkpoint(&mut self) -> Result<CheckpointConfig> {
        let c = &self.flags.checkpoint;
        if c.load.is_none() {
            self.pass_over(&[("no_load_optim", c.no_load_optim)]);
        }
        let (takes, key) = match (c.finetune, c.no_load_optim && c.load.is_some()) {
            (true, _) => (Takes::Weights, "finetune"),
            (false, true) => (Takes::WithoutOptimizer, "no_load_optim"),
            (false, false) => (Takes::All, ""),
        };
        if takes != Takes::All && c.load.is_none() {
            let cited = self.origins.cite(key, true);
            return Err(Error::usage(format!(
                "{cited} has no effect without load; name a checkpoint's folder with --load"
            )));
        }
        if let (Some(step), None) = (c.ckpt_step, &c.load) {
            let cited = self.origins.cite("ckpt_step", step);
            return Err(Error::usage(format!(
                "{cited} has no effect without load; name the folder of the checkpoints with --load"
            )));
        }
        if c.exit_on_missing_checkpoint && c.load.is_none() {
            let cited = self.origins.cite("exit_on_missing_checkpoint", true);
            return Err(Error::usage(format!(
                "{cited} has no effect without load; name the folder of the checkpoints with --load"
            )));
        }
        if takes != Takes::All && c.max_restarts > 0 {
            return Err(Error::usage(format!(
                "{} would also apply to this run's own checkpoints when {} restarts it; run the first steps without restarts",
                self.origins.cite(key, true),
                self.origins.cite("max_restarts", c.max_restarts)
            )));
        }
        // Megatron-LM's command lines give --save together with --skip-train, which saves nothing.
        let saves = !self.flags.training.skip_train;
        Ok(CheckpointConfig {
            save: c.save.clone().filter(|_| saves),
            save_interval: c.save_interval.filter(|_| saves),
            async_save: c.async_save && saves,
            retention: if saves { self.retention()? } else { Retention::default() },
            load: c.load.clone(),
            ckpt_step: c.ckpt_step,
            scheduler: self.scheduler()?,
            exit_on_missing_checkpoint: c.exit_on_missing_checkpoint,
            takes,
            init_from_hf: c.init_from_hf.clone(),
        })
    }

    pub(super) fn scheduler(&self) -> Result<SchedulerOf> {
        let o = &self.flags.optimizer;
        match (o.override_opt_param_scheduler, o.use_checkpoint_opt_param_scheduler) {
            (false, false) => Ok(SchedulerOf::RunNoted),
            (true, false) => Ok(SchedulerOf::Run),
            (false, true) => Ok(SchedulerOf::Checkpoint),
            (true, true) => Err(Error::usage(format!(
                "{} uses this run's schedule, but {} uses the checkpoint's; give only one",
                self.origins.cite("override_opt_param_scheduler", true),
                self.origins.cite("use_checkpoint_opt_param_scheduler", true)
            ))),
        }
    }
}
