//! The training schedule of a step. It depends on the number of microbatches, which differs between
//! steps during a batch-size ramp-up.

use super::model::{ModelBuilder, costs};
use crate::Result;
use crate::config::{ParallelConfig, Recompute};
use crate::pipeline::{Costs, Schedule, delay_weight_gradients, generate};

/// Generates the schedules of a run, and keeps the last one.
pub(super) struct Schedules {
    parallel: ParallelConfig,
    /// Costs of every pass, if weight gradients are delayed.
    costs: Option<Costs>,
    /// Whether inputs are received before they are needed.
    early: bool,
    last: Schedule,
}

impl Schedules {
    /// Starts with the schedule for `m` microbatches.
    ///
    /// # Errors
    /// If there is no such schedule, or the layers cannot be distributed over the stages.
    pub fn new(
        parallel: &ParallelConfig,
        model: &dyn ModelBuilder,
        recompute: Recompute,
        early: bool,
        m: usize,
    ) -> Result<Self> {
        let costs = if parallel.delay_wgrad_compute {
            Some(costs(parallel, model, recompute)?)
        } else {
            None
        };
        let last = make(parallel, costs.as_ref(), early, m)?;
        Ok(Self { parallel: parallel.clone(), costs, early, last })
    }

    /// Makes the schedule for `m` microbatches the [last](Self::last) one.
    ///
    /// # Errors
    /// If there is no such schedule.
    pub fn prepare(&mut self, m: usize) -> Result<()> {
        if m != self.last.num_microbatches {
            self.last = make(&self.parallel, self.costs.as_ref(), self.early, m)?;
        }
        Ok(())
    }

    pub fn last(&self) -> &Schedule {
        &self.last
    }
}

pub(super) fn make(
    parallel: &ParallelConfig,
    costs: Option<&Costs>,
    early: bool,
    m: usize,
) -> Result<Schedule> {
    let (pp, v) = (parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_size);
    let mut schedule = generate(parallel.schedule, pp, v, m, parallel.extra_warmup)?;
    if let Some(costs) = costs {
        schedule = delay_weight_gradients(&schedule, costs)?;
    }
    Ok(if early { schedule.receiving_early() } else { schedule })
}
