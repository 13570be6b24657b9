//! The learning rate, and with [`OneCycle`](crate::config::OneCycle) the momentum, as functions of
//! the applied steps. A step that is skipped does not advance a schedule.

pub(crate) mod deepspeed;
mod megatron;

use crate::Result;
use crate::config::{DeepSpeedSchedule, OptimizerConfig};
use megatron::MegatronSchedule;

/// The applied (not skipped) steps before a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Their number; DeepSpeed's schedules count these.
    pub steps: u64,
    /// Their samples; Megatron-LM's schedules count these.
    pub samples: u64,
}

/// The learning-rate schedule of a run.
#[derive(Clone, Debug)]
pub struct LrSchedule(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Megatron(MegatronSchedule),
    DeepSpeed { schedule: DeepSpeedSchedule, lr: f64 },
}

impl LrSchedule {
    /// The schedule of a run.
    ///
    /// # Errors
    /// If a rate is negative or not finite, if a lower rate exceeds a higher one, or if the lengths
    /// do not fit together.
    pub fn new(config: &OptimizerConfig) -> Result<Self> {
        Ok(Self(match &config.lr_schedule {
            None => Kind::Megatron(MegatronSchedule::new(config)?),
            Some(schedule) => {
                schedule.validate()?;
                Kind::DeepSpeed { schedule: schedule.clone(), lr: config.lr }
            }
        }))
    }

    /// The learning rate of the step after the `applied` ones. With a warm-up, the first step has
    /// the warm-up's initial rate, by default 0.
    pub fn lr_at(&self, applied: Applied) -> f64 {
        match &self.0 {
            Kind::Megatron(schedule) => schedule.lr_at(applied.samples),
            Kind::DeepSpeed { schedule, lr } => deepspeed::lr_at(schedule, *lr, applied.steps),
        }
    }

    /// AdamW's `beta1` and `beta2` of the same step, if the schedule cycles them.
    pub fn betas_at(&self, applied: Applied) -> Option<[f64; 2]> {
        match &self.0 {
            Kind::Megatron(_) => None,
            Kind::DeepSpeed { schedule, .. } => deepspeed::betas_at(schedule, applied.steps),
        }
    }

    /// The number of samples after which the rate stays at its lowest, and that rate. `None` for a
    /// schedule that never falls, or whose length is in steps.
    pub fn end(&self) -> Option<(u64, f64)> {
        match &self.0 {
            Kind::Megatron(schedule) => schedule.end().map(|end| (end, schedule.lowest())),
            Kind::DeepSpeed { .. } => None,
        }
    }
}
