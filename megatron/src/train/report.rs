//! What a training loop tells its surroundings while it runs.

use std::path::Path;

use super::{EvalMetrics, Profile, StepMetrics};

/// Receives the progress of a run. One rank of a run has a reporter that shows something; the
/// others' may ignore it all.
pub trait Reporter: Send {
    /// The run has `train_iters` steps, of which `done` were made before it was resumed.
    fn start(&mut self, done: u64, train_iters: u64);
    /// A step ended.
    fn step(&mut self, metrics: &StepMetrics);
    /// An evaluation ended.
    fn eval(&mut self, metrics: &EvalMetrics);
    /// A checkpoint of `iteration` is complete in `path`.
    fn checkpoint(&mut self, iteration: u64, path: &Path);
    /// What the profiled steps spent their time on.
    fn profile(&mut self, profile: &Profile);
    /// Anything else a user should read, as one line.
    fn message(&mut self, text: &str);
}

/// Shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Reporter for Silent {
    fn start(&mut self, _: u64, _: u64) {}
    fn step(&mut self, _: &StepMetrics) {}
    fn eval(&mut self, _: &EvalMetrics) {}
    fn checkpoint(&mut self, _: u64, _: &Path) {}
    fn profile(&mut self, _: &Profile) {}
    fn message(&mut self, _: &str) {}
}
