//! What a run writes down of its steps and evaluations.

use super::metrics::{EvalMetrics, MetricsWriter, StepMetrics};
use super::report::Reporter;
use super::tensorboard::{self, TensorboardWriter};
use super::trainer::Progress;
use crate::Result;
use crate::config::RunConfig;

/// The files of metrics and events that one rank of a run owns, as far as they were asked for. The others' are none.
#[derive(Debug, Default)]
pub struct Records {
    metrics: Option<MetricsWriter>,
    tensorboard: Option<TensorboardWriter>,
}

impl Records {
    /// Opens the files of a run that goes on after `done`, and, if it `goes_back`, leaves a later checkpoint behind.
    ///
    /// # Errors
    /// If one cannot be written to, or the file of metrics is one of something else.
    pub fn open(run: &RunConfig, done: &Progress, goes_back: bool, reporter: &mut dyn Reporter) -> Result<Self> {
        let mut records = Self::default();
        if let Some(path) = &run.logging.metrics {
            if goes_back && let Some(copy) = MetricsWriter::keep_whole(path, done.iteration)? {
                reporter.message(&format!(
                    "{} goes on after step {}; with the steps that were made after it, it is {} now",
                    path.display(),
                    done.iteration,
                    copy.display()
                ));
            }
            let (writer, aside) = MetricsWriter::open(path, done.iteration)?;
            if let Some(aside) = aside {
                reporter.message(&format!("{} is another run's and is {} now", path.display(), aside.display()));
            }
            records.metrics = Some(writer);
        }
        if let Some(settings) = &run.logging.tensorboard {
            if done.iteration == 0 && tensorboard::has_events(&settings.dir)? {
                reporter.message(&format!(
                    "note: {} has the events of an earlier run, which TensorBoard takes for this one's; give every run a folder of its own",
                    settings.dir.display()
                ));
            }
            records.tensorboard = Some(TensorboardWriter::create(settings, run, done)?);
        }
        Ok(records)
    }

    /// Opens the file of metrics of a run that makes no step, behind what is there. Curves of TensorBoard are left as they are.
    ///
    /// # Errors
    /// As [`Records::open`].
    pub fn append(run: &RunConfig) -> Result<Self> {
        let all = u64::MAX;
        let metrics = run.logging.metrics.as_ref().map(|path| MetricsWriter::open(path, all)).transpose()?;
        Ok(Self { metrics: metrics.map(|(writer, _)| writer), tensorboard: None })
    }

    /// Writes down a step.
    ///
    /// # Errors
    /// If a file cannot be written, e.g. on a full disk.
    pub fn step(&mut self, step: &StepMetrics) -> Result<()> {
        if let Some(file) = &mut self.metrics {
            file.step(step)?;
        }
        self.tensorboard.as_mut().map_or(Ok(()), |events| events.step(step))
    }

    /// Writes down an evaluation that was made after `consumed_samples`.
    ///
    /// # Errors
    /// If a file cannot be written, e.g. on a full disk.
    pub fn eval(&mut self, result: &EvalMetrics, consumed_samples: u64) -> Result<()> {
        if let Some(file) = &mut self.metrics {
            file.eval(result)?;
        }
        self.tensorboard.as_mut().map_or(Ok(()), |events| events.eval(result, consumed_samples))
    }

    /// Leaves nothing behind in memory, before what takes longer than a step.
    ///
    /// # Errors
    /// If a file cannot be written, e.g. on a full disk.
    pub fn flush(&mut self) -> Result<()> {
        self.tensorboard.as_mut().map_or(Ok(()), TensorboardWriter::flush)
    }

    /// Writes down the end of the run, and the largest memory of each rank in bytes.
    ///
    /// # Errors
    /// If a file cannot be written, e.g. on a full disk.
    pub fn finish(&mut self, iteration: u64, memory_by_rank: &[u64]) -> Result<()> {
        if let Some(file) = &mut self.metrics {
            file.memory(iteration, memory_by_rank)?;
        }
        self.flush()
    }
}
