//! The files in which a run records its steps and evaluations.

use super::metrics::{EvalMetrics, MetricsWriter, StepMetrics};
use super::progress::Progress;
use super::report::Reporter;
use super::tensorboard::{self, TensorboardWriter};
use crate::config::RunConfig;
use crate::{Error, Result};

/// The requested files of metrics and events. One rank of a run writes them; on the other ranks
/// both are `None`.
#[derive(Debug, Default)]
pub struct Records {
    metrics: Option<MetricsWriter>,
    tensorboard: Option<TensorboardWriter>,
    /// The files that were given up, and the reasons.
    lost: Vec<String>,
}

impl Records {
    /// Opens the files of a run that continues after `done`. `keep_copy` means that later steps in
    /// them may belong to another run: a copy is kept.
    ///
    /// # Errors
    /// If a file cannot be written, or the metrics file contains something else.
    pub fn open(
        run: &RunConfig,
        done: &Progress,
        keep_copy: bool,
        reporter: &mut dyn Reporter,
    ) -> Result<Self> {
        let mut records = Self::default();
        if let Some(path) = &run.logging.metrics {
            if keep_copy && let Some(copy) = MetricsWriter::keep_whole(path, done.iteration)? {
                reporter.message(&format!(
                    "{} continues after step {}; a copy with the later steps is {}",
                    path.display(),
                    done.iteration,
                    copy.display()
                ));
            }
            let (writer, aside) = MetricsWriter::open(path, done.iteration)?;
            if let Some(aside) = aside {
                reporter.message(&format!(
                    "{} belonged to another run and was renamed to {}",
                    path.display(),
                    aside.display()
                ));
            }
            records.metrics = Some(writer);
        }
        if let Some(settings) = &run.logging.tensorboard {
            if done.iteration == 0 && tensorboard::has_events(&settings.dir)? {
                reporter.message(&format!(
                    "note: {} has the events of an earlier run, which TensorBoard would show as \
                     this run's; give every run a separate folder",
                    settings.dir.display()
                ));
            }
            records.tensorboard = Some(TensorboardWriter::create(settings, run, done)?);
        }
        Ok(records)
    }

    /// Opens the metrics file of a run without steps and appends to it. TensorBoard curves stay
    /// unchanged.
    ///
    /// # Errors
    /// As [`Records::open`].
    pub fn append(run: &RunConfig) -> Result<Self> {
        let all = u64::MAX;
        let metrics =
            run.logging.metrics.as_ref().map(|path| MetricsWriter::open(path, all)).transpose()?;
        Ok(Self { metrics: metrics.map(|(writer, _)| writer), ..Self::default() })
    }

    /// Records a step.
    pub fn step(&mut self, step: &StepMetrics, reporter: &mut dyn Reporter) {
        self.each(reporter, step.iteration, |file| file.step(step), |events| events.step(step));
    }

    /// Records an evaluation after `consumed_samples` samples.
    pub fn eval(
        &mut self,
        result: &EvalMetrics,
        consumed_samples: u64,
        reporter: &mut dyn Reporter,
    ) {
        let of_events = |events: &mut TensorboardWriter| events.eval(result, consumed_samples);
        self.each(reporter, result.iteration, |file| file.eval(result), of_events);
    }

    /// Flushes everything up to step `iteration`, before an operation that takes longer than a
    /// step.
    pub fn flush(&mut self, iteration: u64, reporter: &mut dyn Reporter) {
        self.each(reporter, iteration, |_| Ok(()), TensorboardWriter::flush);
    }

    /// Records the end of the run and the peak memory of each rank in bytes. Reports again which
    /// files could not be written.
    pub fn finish(&mut self, iteration: u64, memory_by_rank: &[u64], reporter: &mut dyn Reporter) {
        self.each(
            reporter,
            iteration,
            |file| file.memory(iteration, memory_by_rank),
            TensorboardWriter::flush,
        );
        for lost in &self.lost {
            reporter.message(&format!("note: {lost}"));
        }
    }

    /// Writes to each file. A file that cannot be written, for example on a full disk, is given up
    /// and the reporter is told: a failing log must not end training.
    fn each(
        &mut self,
        reporter: &mut dyn Reporter,
        iteration: u64,
        of_metrics: impl FnOnce(&mut MetricsWriter) -> Result<()>,
        of_events: impl FnOnce(&mut TensorboardWriter) -> Result<()>,
    ) {
        let mut give_up = |what: &str, error: Error| {
            reporter.message(&format!("note: {error}; training continues without {what}"));
            self.lost.push(format!("{what} end before step {iteration}: {error}"));
        };
        if let Some(Err(error)) = self.metrics.as_mut().map(of_metrics) {
            self.metrics = None;
            give_up("metrics", error);
        }
        if let Some(Err(error)) = self.tensorboard.as_mut().map(of_events) {
            self.tensorboard = None;
            give_up("TensorBoard's events", error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::valid;
    use crate::train::Profile;

    /// Collects the messages.
    #[derive(Default)]
    struct Told(Vec<String>);

    impl Reporter for Told {
        fn start(&mut self, _: u64, _: u64) {}
        fn step(&mut self, _: &StepMetrics) {}
        fn eval(&mut self, _: &EvalMetrics) {}
        fn checkpoint(&mut self, _: u64, _: &Path) {}
        fn profile(&mut self, _: &Profile) {}
        fn message(&mut self, text: &str) {
            self.0.push(text.into());
        }
    }

    #[test]
    fn a_full_disk_is_told_when_it_happens_and_at_the_end_and_ends_nothing() {
        let mut run = valid();
        run.logging.metrics = Some("/dev/full".into());
        let mut told = Told::default();
        let mut records = Records::open(&run, &Progress::default(), false, &mut told).unwrap();
        for iteration in 1..4 {
            records.step(&StepMetrics::example(iteration), &mut told);
        }
        records.flush(3, &mut told);
        assert_eq!(told.0.len(), 1);
        assert!(
            told.0[0].starts_with("note: cannot write /dev/full: No space left on device"),
            "{:?}",
            told.0
        );
        records.finish(3, &[1], &mut told);
        assert!(
            told.0.len() == 2 && told.0[1].contains("metrics end before step 1"),
            "{:?}",
            told.0
        );
    }
}
