//! Evaluation without training (`--skip-train`).

use std::sync::atomic::AtomicBool;

use super::records::Records;
use super::report::Reporter;
use super::run::Outcome;
use super::trainer::Trainer;
use crate::{Error, Result};

impl Trainer {
    /// Evaluates the loaded model on the validation and the test data, as a run does after its last
    /// step. Saves nothing. Collective over the world.
    pub(super) fn evaluate_only(
        &mut self,
        reporter: &mut dyn Reporter,
        stop: &AtomicBool,
    ) -> Result<Outcome> {
        if self.valid.is_none() && self.test.is_none() {
            return Err(Error::config(
                "--skip-train only evaluates, but there are no validation or test data; give more data, or another --split",
            ));
        }
        let is_lead = self.groups.world.rank() == 0;
        let mut records = if is_lead { Records::append(&self.config)? } else { Records::default() };
        reporter.message(&format!("evaluating step {}, without training", self.progress.iteration));
        let is_done = self.validate(stop, reporter, &mut records)?
            && self.report_evaluation(
                self.test.as_ref(),
                ("test", 0),
                stop,
                reporter,
                &mut records,
            )?;
        Ok(if is_done { Outcome::Finished } else { Outcome::Interrupted })
    }
}
