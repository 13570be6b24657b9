//! A step of a run's pipeline on paper: which pass comes when on which stage, without any rank.

use std::ops::Range;

use super::model::{ModelBuilder, costs, layers_of_chunks};
use super::schedules::make;
use crate::Result;
use crate::config::RunConfig;
use crate::pipeline::{Costs, Report, Schedule, simulate};

/// What the pipeline of a run does in a step.
#[derive(Clone, Debug)]
pub struct StepPlan {
    /// The schedule that the run executes, with receives right before their use.
    pub schedule: Schedule,
    /// What passes cost by the model's own count ([`ModelBuilder::costs`]).
    pub costs: Costs,
    /// The layers of each virtual stage: chunk c of stage p is at c·pp + p.
    pub layers: Vec<Range<usize>>,
}

impl StepPlan {
    /// Plans a step of `microbatches` microbatches.
    ///
    /// # Errors
    /// If there is no such schedule, or the layers cannot be dealt to the stages.
    pub fn new(run: &RunConfig, model: &dyn ModelBuilder, microbatches: usize) -> Result<Self> {
        let parallel = &run.parallel;
        let costs = costs(parallel, model, run.training.recompute)?;
        let delayed = parallel.delay_wgrad_compute.then_some(&costs);
        let schedule = make(parallel, delayed, false, microbatches)?;
        Ok(Self { schedule, layers: layers_of_chunks(parallel, model)?, costs })
    }

    /// Times it; messages take no time.
    ///
    /// # Errors
    /// If the schedule is wrong, which no schedule of a run is.
    pub fn simulate(&self) -> Result<Report> {
        simulate(&self.schedule, &self.costs)
    }
}
