//! What a run reports, and where.

use megatron::config::{LoggingConfig, ProfileConfig, TensorboardConfig};

use super::Resolver;

impl Resolver<'_> {
    pub(super) fn logging(&mut self, train_iters: u64) -> LoggingConfig {
        let (profile, tensorboard) = (self.profile(train_iters), self.tensorboard());
        let l = &self.flags.logging;
        let level = l.timing_log_level.max(u64::from(l.wall_clock_breakdown));
        LoggingConfig {
            log_interval: l.log_interval,
            eval_interval: l.eval_interval,
            eval_iters: l.eval_iters,
            log_params_norm: l.log_params_norm,
            log_num_zeros_in_grad: l.log_num_zeros_in_grad,
            timing_log_level: u8::try_from(level).unwrap_or(u8::MAX),
            timing_log_option: l.timing_log_option,
            metrics: l.metrics.clone(),
            tensorboard,
            prompt: l.prompt.clone(),
            prompt_tokens: l.prompt_tokens,
            profile,
        }
    }

    fn tensorboard(&mut self) -> Option<TensorboardConfig> {
        let l = &self.flags.logging;
        let Some(dir) = l.tensorboard_dir.clone() else {
            let given = [
                ("tensorboard_log_interval", l.tensorboard_log_interval.is_some()),
                ("log_validation_ppl_to_tensorboard", l.log_validation_ppl_to_tensorboard),
                ("log_timers_to_tensorboard", l.log_timers_to_tensorboard),
                ("log_memory_to_tensorboard", l.log_memory_to_tensorboard),
            ];
            self.pass_over(&given);
            return None;
        };
        Some(TensorboardConfig {
            dir,
            log_interval: l.tensorboard_log_interval.unwrap_or(1),
            log_validation_ppl: l.log_validation_ppl_to_tensorboard,
            log_timers: l.log_timers_to_tensorboard,
            log_memory: l.log_memory_to_tensorboard,
        })
    }

    fn profile(&mut self, train_iters: u64) -> Option<ProfileConfig> {
        let l = &self.flags.logging;
        let given = [
            ("profile_step_start", l.profile_step_start.is_some()),
            ("profile_step_end", l.profile_step_end.is_some()),
            ("profile_ranks", !l.profile_ranks.is_empty()),
        ];
        if !l.profile {
            self.pass_over(&given);
            return None;
        }
        let (dir, ranks) = (l.profile_dir.clone(), l.profile_ranks.clone());
        let (start, end) = (l.profile_step_start, l.profile_step_end);
        // Megatron-LM's default steps, if the run is long enough.
        let step_start =
            self.derived("profile_step_start", start, "10, or the second-to-last", || {
                10.min(train_iters.saturating_sub(1)).max(1)
            });
        let step_end =
            self.derived("profile_step_end", end, "two steps on", || step_start.saturating_add(2));
        Some(ProfileConfig { dir, step_start, step_end, ranks })
    }
}
