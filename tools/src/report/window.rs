//! Means over the steps since the last line.

use megatron::train::StepMetrics;

/// Sums over the steps since the last line.
#[derive(Default)]
pub struct Window {
    steps: u64,
    loss: f64,
    elapsed_ms: f64,
    tokens: f64,
    /// 10⁹ floating-point operations.
    work: f64,
    pub skipped: u64,
    pub nan: u64,
}

impl Window {
    /// Adds a step. If a line is due after it (every `log_interval` steps and after the last step),
    /// returns the steps for the line and starts again.
    pub fn add(&mut self, m: &StepMetrics, log_interval: u64) -> Option<Self> {
        self.steps += 1;
        self.loss += m.lm_loss;
        self.elapsed_ms += m.elapsed_ms;
        self.tokens += m.tokens_per_second * m.elapsed_ms / 1e3;
        self.work += m.tflops * m.elapsed_ms;
        self.skipped += u64::from(m.skipped);
        self.nan += u64::from(!m.lm_loss.is_finite());
        let is_due =
            m.iteration.is_multiple_of(log_interval.max(1)) || m.iteration == m.train_iters;
        is_due.then(|| std::mem::take(self))
    }

    /// Mean loss.
    pub fn loss(&self) -> f64 {
        self.loss / self.steps as f64
    }

    /// Mean milliseconds of a step.
    pub fn elapsed_ms(&self) -> f64 {
        self.elapsed_ms / self.steps as f64
    }

    /// 10¹² floating-point operations per second and rank.
    pub fn tflops(&self) -> f64 {
        if self.elapsed_ms > 0.0 { self.work / self.elapsed_ms } else { 0.0 }
    }

    /// Tokens per second of all ranks.
    pub fn tokens_per_second(&self) -> f64 {
        if self.elapsed_ms > 0.0 { self.tokens / self.elapsed_ms * 1e3 } else { 0.0 }
    }
}
