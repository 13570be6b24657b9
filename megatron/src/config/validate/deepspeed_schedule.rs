//! Checks of DeepSpeed's learning-rate schedules. DeepSpeed itself only warns of most of these
//! mistakes, or trains with rates that nobody meant.

use super::Check;
use crate::Result;
use crate::config::{
    DeepSpeedSchedule, LrRangeTest, OneCycle, Origins, RunConfig, Warmup, WarmupCosine, WarmupDecay,
};

impl DeepSpeedSchedule {
    /// Checks the schedule alone.
    pub(crate) fn validate(&self) -> Result<()> {
        let mut check = Check { origins: &Origins::default(), problems: Vec::new() };
        check.deepspeed_schedule(self);
        check.finish()
    }
}

impl Check<'_> {
    pub(super) fn lr_schedule(&mut self, run: &RunConfig) {
        let Some(schedule) = &run.optimizer.lr_schedule else { return };
        self.deepspeed_schedule(schedule);
        self.momentum_stays_below_one(schedule, run.training.train_iters);
    }

    fn deepspeed_schedule(&mut self, schedule: &DeepSpeedSchedule) {
        match schedule {
            DeepSpeedSchedule::WarmupLr(warmup) => self.warmup(warmup),
            DeepSpeedSchedule::WarmupDecayLr(WarmupDecay { warmup, total_num_steps }) => {
                self.warmup(warmup);
                self.warmup_ends(warmup.warmup_num_steps, *total_num_steps);
            }
            DeepSpeedSchedule::WarmupCosineLr(cosine) => self.warmup_cosine(cosine),
            DeepSpeedSchedule::OneCycle(cycle) => self.one_cycle(cycle),
            DeepSpeedSchedule::LrRangeTest(test) => self.lr_range_test(test),
        }
    }

    fn warmup(&mut self, warmup: &Warmup) {
        self.non_negative("warmup_min_lr", warmup.warmup_min_lr);
        self.above_zero("warmup_max_lr", warmup.warmup_max_lr);
        self.ordered(
            ("warmup_min_lr", warmup.warmup_min_lr),
            ("warmup_max_lr", warmup.warmup_max_lr),
        );
        self.steps_of("warmup_num_steps", warmup.warmup_num_steps);
    }

    fn warmup_cosine(&mut self, cosine: &WarmupCosine) {
        for (key, ratio) in
            [("warmup_min_ratio", cosine.warmup_min_ratio), ("cos_min_ratio", cosine.cos_min_ratio)]
        {
            self.require((0.0..=1.0).contains(&ratio), |c| {
                format!("{} must be in [0, 1]", c.cite(key, ratio))
            });
        }
        self.steps_of("warmup_num_steps", cosine.warmup_num_steps);
        self.warmup_ends(cosine.warmup_num_steps, cosine.total_num_steps);
    }

    fn one_cycle(&mut self, cycle: &OneCycle) {
        self.non_negative("cycle_min_lr", cycle.cycle_min_lr);
        self.above_zero("cycle_max_lr", cycle.cycle_max_lr);
        self.ordered(("cycle_min_lr", cycle.cycle_min_lr), ("cycle_max_lr", cycle.cycle_max_lr));
        self.steps_of("cycle_first_step_size", cycle.cycle_first_step_size);
        let mut decays = vec![("decay_lr_rate", cycle.decay_lr_rate)];
        if cycle.cycle_momentum {
            self.fraction("cycle_min_mom", cycle.cycle_min_mom);
            self.fraction("cycle_max_mom", cycle.cycle_max_mom);
            self.ordered(
                ("cycle_min_mom", cycle.cycle_min_mom),
                ("cycle_max_mom", cycle.cycle_max_mom),
            );
            decays.push(("decay_mom_rate", cycle.decay_mom_rate));
        }
        for (key, rate) in decays {
            self.non_negative(key, rate);
            self.require(cycle.decay_step_size > 0 || rate == 0.0, |c| {
                format!(
                    "{} has no effect with {}, the steps of an interval of the decay; set decay_step_size",
                    c.cite(key, rate),
                    c.cite("decay_step_size", 0)
                )
            });
        }
    }

    fn lr_range_test(&mut self, test: &LrRangeTest) {
        self.above_zero("lr_range_test_min_lr", test.lr_range_test_min_lr);
        self.steps_of("lr_range_test_step_size", test.lr_range_test_step_size);
        self.non_negative("lr_range_test_step_rate", test.lr_range_test_step_rate);
    }

    fn steps_of(&mut self, key: &str, steps: u64) {
        self.require(steps > 0, |c| format!("{} must be at least 1", c.cite(key, steps)));
    }

    fn ordered(&mut self, (low, min): (&str, f64), (high, max): (&str, f64)) {
        self.require(min <= max || min.is_nan() || max.is_nan(), |c| {
            format!("{} exceeds {}", c.cite(low, min), c.cite(high, max))
        });
    }

    fn warmup_ends(&mut self, warmup: u64, total: u64) {
        self.require(warmup <= total, |c| {
            format!(
                "{} exceeds {}, which includes the warm-up",
                c.cite("warmup_num_steps", warmup),
                c.cite("total_num_steps", total)
            )
        });
    }

    /// The momentum grows in the decay after a cycle, and at 1 AdamW divides by 0.
    fn momentum_stays_below_one(&mut self, schedule: &DeepSpeedSchedule, steps: u64) {
        let DeepSpeedSchedule::OneCycle(cycle) = schedule else { return };
        let decays = cycle.cycle_momentum && cycle.decay_step_size > 0 && cycle.cycle_max_mom < 1.0;
        let last = steps.checked_sub(2).filter(|_| decays);
        let Some(intervals) = last.and_then(|last| cycle.decay(last)) else { return };
        let beta1 = cycle.cycle_max_mom * (1.0 + cycle.decay_mom_rate * intervals);
        self.require(beta1 < 1.0 || beta1.is_nan(), |c| {
            format!(
                "{} lets the momentum grow to {beta1} by step {steps}, the run's last, but it must stay below 1",
                c.cite("decay_mom_rate", cycle.decay_mom_rate)
            )
        });
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{DeepSpeedSchedule, OneCycle, valid};

    fn cycle() -> OneCycle {
        OneCycle {
            cycle_min_lr: 1e-4,
            cycle_max_lr: 1e-3,
            cycle_first_step_size: 2,
            cycle_second_step_size: 2,
            cycle_first_stair_count: 0,
            cycle_second_stair_count: 0,
            decay_step_size: 1,
            decay_lr_rate: 0.0,
            cycle_momentum: true,
            cycle_min_mom: 0.8,
            cycle_max_mom: 0.9,
            decay_mom_rate: 0.0,
        }
    }

    fn check(cycle: OneCycle, steps: u64) -> crate::Result<()> {
        let mut run = valid();
        run.optimizer.lr_schedule = Some(DeepSpeedSchedule::OneCycle(cycle));
        run.training.train_iters = steps;
        run.validate()
    }

    #[test]
    fn a_momentum_that_reaches_one_within_the_run_is_refused() {
        // Step 7, counted from 1, is the second after the cycle: 0.9 · (1 + 2 · 0.05) = 0.99.
        let growing = OneCycle { decay_mom_rate: 0.05, ..cycle() };
        check(growing.clone(), 7).unwrap();
        let text = check(growing.clone(), 8).unwrap_err().to_string();
        assert!(text.contains("decay_mom_rate = 0.05 lets the momentum grow to 1.03"), "{text}");
        check(OneCycle { cycle_momentum: false, ..growing }, 8).unwrap();
    }

    #[test]
    fn a_decay_without_intervals_and_rates_in_the_wrong_order_are_refused_together() {
        let wrong = OneCycle {
            cycle_min_lr: 1.0,
            cycle_first_step_size: 0,
            decay_step_size: 0,
            decay_lr_rate: 0.5,
            ..cycle()
        };
        let text = check(wrong, 4).unwrap_err().to_string();
        for part in [
            "cycle_min_lr = 1 exceeds cycle_max_lr = 0.001",
            "cycle_first_step_size = 0 must be at least 1",
            "decay_lr_rate = 0.5 has no effect with decay_step_size = 0",
        ] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
    }
}
