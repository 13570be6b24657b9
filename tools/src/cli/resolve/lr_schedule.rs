//! DeepSpeed's learning-rate schedules: which settings belong to the chosen one, and its rates.

use clap::ValueEnum;
use megatron::config::{
    DeepSpeedSchedule, LrRangeTest, OneCycle, OptimizerKind, TrainingConfig, Warmup, WarmupCosine,
    WarmupDecay,
};

use super::Resolver;
use crate::cli::Gathered;
use crate::cli::flags::{LrScheduleName, MEGATRON_SCHEDULE};
use crate::cli::from_checkpoint::Recorded;
use crate::error::{Error, Result};

impl Resolver<'_> {
    /// Refuses settings of other schedules than the chosen one, of which DeepSpeed and Megatron-LM
    /// would silently use none. `given` says whether the user set a key.
    pub(super) fn refuse_other_schedules(
        &self,
        gathered: &Gathered,
        given: &dyn Fn(&&'static str) -> bool,
    ) -> Result<()> {
        let said = |key: &str| format!("{key} ({})", self.origins.of(key).unwrap_or("?"));
        let all = LrScheduleName::value_variants().iter().flat_map(|name| name.keys());
        let mut of_deepspeed = all.copied().filter(given);
        let Some(name) = self.flags.optimizer.deepspeed.lr_schedule else {
            return of_deepspeed.next().map_or(Ok(()), |key| {
                let owners = LrScheduleName::value_variants().iter();
                let owners = owners.filter(|name| name.keys().contains(&key));
                Err(Error::usage(format!(
                    "{} is a setting of DeepSpeed's {}; choose it with lr_schedule, or leave the setting out",
                    said(key),
                    owners.map(ToString::to_string).collect::<Vec<_>>().join(" and ")
                )))
            });
        };
        let chosen = self.origins.cite("lr_schedule", name);
        if let Some(key) = of_deepspeed.find(|key| !name.keys().contains(key)) {
            return Err(Error::usage(format!(
                "{} is not a setting of {chosen}, whose settings are {}; leave it out",
                said(key),
                name.keys().join(", ")
            )));
        }
        if let Some(key) = MEGATRON_SCHEDULE.into_iter().find(|key| given(key)) {
            return Err(Error::usage(format!(
                "{} and {chosen} are settings of two schedules; leave one out",
                said(key)
            )));
        }
        if name == LrScheduleName::OneCycle {
            self.refuse_momenta(gathered, given)?;
        }
        self.refuse_two_peaks(gathered, name)
    }

    /// Refuses settings that a cycled momentum replaces, and settings of a momentum that is not
    /// cycled.
    fn refuse_momenta(
        &self,
        gathered: &Gathered,
        given: &dyn Fn(&&'static str) -> bool,
    ) -> Result<()> {
        let o = &self.flags.optimizer;
        let said = |key: &str| format!("{key} ({})", self.origins.of(key).unwrap_or("?"));
        let switch = || self.origins.cite("cycle_momentum", o.deepspeed.cycle_momentum);
        if o.optimizer == OptimizerKind::Sgd
            && o.deepspeed.cycle_momentum
            && given(&"cycle_momentum")
        {
            return Err(Error::usage(format!(
                "{} is not possible with {}: as in DeepSpeed, only Adam's beta1 is cycled",
                switch(),
                self.origins.cite("optimizer", "sgd")
            )));
        }
        if !o.deepspeed.cycle_momentum || o.optimizer == OptimizerKind::Sgd {
            let mut of_momentum = ["cycle_min_mom", "cycle_max_mom", "decay_mom_rate"].into_iter();
            return of_momentum.find(|key| given(key)).map_or(Ok(()), |key| {
                let why = match o.optimizer {
                    OptimizerKind::Sgd => self.origins.cite("optimizer", "sgd"),
                    OptimizerKind::Adam => switch(),
                };
                Err(Error::usage(format!("{} has no effect with {why}; leave one out", said(key))))
            });
        }
        // A checkpoint records the betas of a run whose schedule may have replaced them.
        let recorded = gathered.recorded.as_ref().map(Recorded::origin);
        let is_given = |key: &&str| {
            gathered.origins.get(*key).is_some_and(|origin| recorded.as_ref() != Some(origin))
        };
        match ["adam_beta1", "adam_beta2"].iter().find(|key| is_given(key)) {
            Some(key) => Err(Error::usage(format!(
                "{} has no effect: {} with {} sets both betas, beta2 to 0.99; leave it out, or set \
                 cycle_momentum = false",
                said(key),
                self.origins.cite("lr_schedule", "OneCycle"),
                switch()
            ))),
            None => Ok(()),
        }
    }

    /// Refuses an `lr` that differs from the schedule's own rate, which DeepSpeed would use.
    fn refuse_two_peaks(&self, gathered: &Gathered, name: LrScheduleName) -> Result<()> {
        let (Some(lr), Some(key), Some(peak)) =
            (self.flags.optimizer.lr, name.peak_key(), self.own_peak(name))
        else {
            return Ok(());
        };
        if lr == peak || !gathered.origins.contains_key("lr") {
            return Ok(());
        }
        Err(Error::usage(format!(
            "{} and {} differ, but are the same rate of {}; leave lr out",
            self.origins.cite("lr", lr),
            self.origins.cite(key, peak),
            self.origins.cite("lr_schedule", name)
        )))
    }

    /// The rate of the schedule that `lr` may repeat.
    fn own_peak(&self, name: LrScheduleName) -> Option<f64> {
        let d = &self.flags.optimizer.deepspeed;
        match name {
            LrScheduleName::WarmupLr | LrScheduleName::WarmupDecayLr => d.warmup_max_lr,
            LrScheduleName::WarmupCosineLr => None,
            LrScheduleName::OneCycle => d.cycle_max_lr,
            LrScheduleName::LrRangeTest => Some(d.lr_range_test_min_lr),
        }
    }

    /// The run's `lr`, and how to name it if it is missing.
    pub(super) fn peak_lr(&self) -> (Option<f64>, &'static str) {
        const LR: &str = "lr under [optimizer]";
        let o = &self.flags.optimizer;
        match o.deepspeed.lr_schedule {
            None | Some(LrScheduleName::WarmupCosineLr) => (o.lr, LR),
            Some(name @ (LrScheduleName::WarmupLr | LrScheduleName::WarmupDecayLr)) => {
                (self.own_peak(name).or(o.lr), "lr (or warmup_max_lr) under [optimizer]")
            }
            Some(name @ LrScheduleName::OneCycle) => (
                self.own_peak(name).filter(|_| o.deepspeed.cycle_min_lr.is_some()),
                "cycle_min_lr and cycle_max_lr under [optimizer]",
            ),
            Some(name @ LrScheduleName::LrRangeTest) => (self.own_peak(name), LR),
        }
    }

    /// The chosen schedule of DeepSpeed; `lr` is the run's.
    pub(super) fn deepspeed_schedule(
        &mut self,
        lr: f64,
        training: &TrainingConfig,
    ) -> Option<DeepSpeedSchedule> {
        let o = &self.flags.optimizer;
        let d = &o.deepspeed;
        let name = d.lr_schedule?;
        let steps = training.train_iters;
        if name.keys().contains(&"total_num_steps") && d.total_num_steps.is_none() {
            self.origins.record("total_num_steps", "default: the whole run");
        }
        let total_num_steps = d.total_num_steps.unwrap_or(steps);
        if name.keys().contains(&"warmup_max_lr") && d.warmup_max_lr.is_none() {
            self.origins.record("warmup_max_lr", self.origins.cite("lr", lr));
        }
        let warmup = Warmup {
            warmup_min_lr: d.warmup_min_lr,
            warmup_max_lr: d.warmup_max_lr.unwrap_or(lr),
            warmup_num_steps: d.warmup_num_steps,
            warmup_type: d.warmup_type,
        };
        Some(match name {
            LrScheduleName::WarmupLr => DeepSpeedSchedule::WarmupLr(warmup),
            LrScheduleName::WarmupDecayLr => {
                DeepSpeedSchedule::WarmupDecayLr(WarmupDecay { warmup, total_num_steps })
            }
            LrScheduleName::WarmupCosineLr => DeepSpeedSchedule::WarmupCosineLr(WarmupCosine {
                warmup_min_ratio: d.warmup_min_ratio,
                warmup_num_steps: d.warmup_num_steps,
                warmup_type: d.warmup_type,
                cos_min_ratio: d.cos_min_ratio,
                total_num_steps,
            }),
            LrScheduleName::OneCycle => DeepSpeedSchedule::OneCycle(OneCycle {
                cycle_min_lr: d.cycle_min_lr?,
                cycle_max_lr: d.cycle_max_lr?,
                cycle_first_step_size: d.cycle_first_step_size,
                cycle_second_step_size: d.cycle_second_step_size.unwrap_or(d.cycle_first_step_size),
                cycle_first_stair_count: d.cycle_first_stair_count,
                cycle_second_stair_count: d
                    .cycle_second_stair_count
                    .unwrap_or(d.cycle_first_stair_count),
                decay_step_size: d.decay_step_size,
                decay_lr_rate: d.decay_lr_rate,
                cycle_momentum: d.cycle_momentum && o.optimizer == OptimizerKind::Adam,
                cycle_min_mom: d.cycle_min_mom,
                cycle_max_mom: d.cycle_max_mom,
                decay_mom_rate: d.decay_mom_rate,
            }),
            LrScheduleName::LrRangeTest => DeepSpeedSchedule::LrRangeTest(LrRangeTest {
                lr_range_test_min_lr: d.lr_range_test_min_lr,
                lr_range_test_step_size: d.lr_range_test_step_size,
                lr_range_test_step_rate: d.lr_range_test_step_rate,
                lr_range_test_staircase: d.lr_range_test_staircase,
            }),
        })
    }
}
