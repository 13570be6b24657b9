//! Event files for TensorBoard, with the curves of Megatron-LM: `training_log` and
//! `evaluate_and_print_results` in its `megatron/training/training.py`.

mod event;
mod event_file;

use std::time::{Duration, Instant};

pub use event_file::has_events;

use super::metrics::{EvalMetrics, StepMetrics};
use super::progress::Progress;
use super::timers::StepTimers;
use crate::Result;
use crate::config::{Precision, RunConfig, TensorboardConfig};
use event_file::EventFile;

/// Longest delay until readers see a value.
const DELAY: Duration = Duration::from_secs(1);

/// Writes the event files of a run. Only one rank has this writer.
#[derive(Debug)]
pub struct TensorboardWriter {
    settings: TensorboardConfig,
    /// Steps between the log lines.
    log_interval: u64,
    has_loss_scale: bool,
    /// Curves over steps.
    steps: EventFile,
    /// Curves over consumed samples. They need their own folder, because a session start truncates
    /// all curves of a folder at the same axis value.
    samples: EventFile,
    window: Window,
    flushed: Instant,
}

/// Sums over the steps since the last log line.
#[derive(Debug, Default)]
struct Window {
    steps: u64,
    elapsed_ms: f64,
    /// 10⁹ floating-point operations.
    work: f64,
}

impl TensorboardWriter {
    /// Creates new files for `run`, which continues after `done`.
    ///
    /// # Errors
    /// If the files cannot be created or written.
    pub fn create(settings: &TensorboardConfig, run: &RunConfig, done: &Progress) -> Result<Self> {
        Ok(Self {
            settings: settings.clone(),
            log_interval: run.logging.log_interval,
            has_loss_scale: matches!(run.training.precision, Precision::Fp16(_)),
            steps: EventFile::create(&settings.dir, 0, done.iteration + 1)?,
            samples: EventFile::create(&settings.samples_dir(), 1, done.consumed_samples + 1)?,
            window: Window::default(),
            flushed: Instant::now(),
        })
    }

    /// Appends the values that are due for a step.
    ///
    /// # Errors
    /// If they cannot be written, e.g. on a full disk.
    pub fn step(&mut self, m: &StepMetrics) -> Result<()> {
        if m.iteration.is_multiple_of(self.settings.log_interval) {
            let batch_size = m.global_batch_size as f64;
            let mut curves = vec![
                ("learning-rate", m.learning_rate),
                ("batch-size", batch_size),
                ("lm loss", m.lm_loss),
            ];
            if self.has_loss_scale {
                curves.push(("loss-scale", m.loss_scale));
            }
            curves.push(("grad-norm", m.grad_norm));
            curves.extend(m.num_zeros_in_grad.map(|zeros| ("num-zeros", zeros)));
            curves.extend(m.params_norm.map(|norm| ("params-norm", norm)));
            self.on_both_axes((m.iteration, m.consumed_samples), &curves)?;
            if self.settings.log_memory {
                self.steps.scalars(
                    m.iteration,
                    &[("mem-max-allocated-bytes", m.memory.allocated as f64)],
                )?;
            }
        }
        let window = &mut self.window;
        window.steps += 1;
        window.elapsed_ms += m.elapsed_ms;
        window.work += m.tflops * m.elapsed_ms;
        if m.iteration.is_multiple_of(self.log_interval) {
            let Window { steps, elapsed_ms, work } = std::mem::take(window);
            if self.settings.log_timers {
                let seconds = elapsed_ms / 1e3 / steps as f64;
                let tflops = if elapsed_ms > 0.0 { work / elapsed_ms } else { 0.0 };
                self.steps
                    .scalars(m.iteration, &[("iteration-time", seconds), ("throughput", tflops)])?;
                for (name, ms) in m.timers.iter().flat_map(StepTimers::largest) {
                    let tag = format!("{name}-time");
                    self.steps.scalars(m.iteration, &[(&tag, ms / 1e3)])?;
                }
            }
        }
        if self.flushed.elapsed() < DELAY { Ok(()) } else { self.flush() }
    }

    /// Appends an evaluation after `consumed_samples` samples and makes it visible to readers.
    /// Megatron-LM adds the final loss on the test data to the curve `lm loss validation`; here it
    /// has its own curve, `lm loss test`.
    ///
    /// # Errors
    /// If it cannot be written, e.g. on a full disk.
    pub fn eval(&mut self, m: &EvalMetrics, consumed_samples: u64) -> Result<()> {
        let loss = format!("lm loss {}", m.split);
        let perplexity = format!("{loss} ppl");
        let mut curves = vec![(loss.as_str(), m.lm_loss)];
        if self.settings.log_validation_ppl {
            curves.push((&perplexity, m.perplexity()));
        }
        self.on_both_axes((m.iteration, consumed_samples), &curves)?;
        self.flush()
    }

    fn on_both_axes(
        &mut self,
        (iteration, samples): (u64, u64),
        curves: &[(&str, f64)],
    ) -> Result<()> {
        self.steps.scalars(iteration, curves)?;
        let tags: Vec<String> = curves.iter().map(|(tag, _)| format!("{tag} vs samples")).collect();
        let curves: Vec<(&str, f64)> =
            tags.iter().zip(curves).map(|(tag, (_, value))| (tag.as_str(), *value)).collect();
        self.samples.scalars(samples, &curves)
    }

    /// Makes appended values visible to readers.
    ///
    /// # Errors
    /// If they cannot be written, e.g. on a full disk.
    pub fn flush(&mut self) -> Result<()> {
        self.flushed = Instant::now();
        self.steps.flush()?;
        self.samples.flush()
    }
}

#[cfg(test)]
mod tests;
