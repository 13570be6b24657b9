//! A progress bar with loss, tokens/s and the time left.

use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use megatron::train::{EvalMetrics, Profile, Reporter, StepMetrics};

use super::profile::render;

/// Shows steps on a terminal.
pub struct Bar(ProgressBar);

impl Bar {
    pub fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template("{wide_bar:.cyan/blue} {pos}/{len} {msg} ETA {eta_precise}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self(bar)
    }
}

/// What stands beside the bar.
fn summary(m: &StepMetrics) -> String {
    let mut text = format!("loss {:.4} · {} tokens/s ·", m.lm_loss, thousands(m.tokens_per_second));
    if m.skipped_iterations > 0 {
        text.push_str(&format!(" {} skipped ·", m.skipped_iterations));
    }
    if m.nan_iterations > 0 {
        text.push_str(&format!(" {} NaN ·", m.nan_iterations));
    }
    text
}

fn thousands(x: f64) -> String {
    if x >= 99_950.0 {
        format!("{:.0}k", x / 1000.0)
    } else if x >= 1000.0 {
        format!("{:.1}k", x / 1000.0)
    } else {
        format!("{x:.0}")
    }
}

impl Reporter for Bar {
    fn start(&mut self, done: u64, train_iters: u64) {
        self.0.set_draw_target(ProgressDrawTarget::stdout());
        self.0.set_length(train_iters);
        self.0.set_position(done);
        self.0.reset_eta();
        self.0.enable_steady_tick(Duration::from_secs(1));
    }

    fn step(&mut self, metrics: &StepMetrics) {
        self.0.set_message(summary(metrics));
        self.0.set_position(metrics.iteration);
    }

    fn eval(&mut self, metrics: &EvalMetrics) {
        let (loss, ppl) = (metrics.lm_loss, metrics.perplexity());
        self.message(&format!("step {}: {} loss {loss:.4}, perplexity {ppl:.2}", metrics.iteration, metrics.split));
    }

    fn checkpoint(&mut self, iteration: u64, path: &Path) {
        self.message(&format!("step {iteration}: saved {}", path.display()));
    }

    fn profile(&mut self, profile: &Profile) {
        self.message(&render(profile));
    }

    fn message(&mut self, text: &str) {
        self.0.suspend(|| crate::print_line(text));
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        // Leaves the last state on the screen.
        self.0.abandon();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_short() {
        assert_eq!([12.4, 1234.0, 99_949.0, 123_456.0].map(thousands), ["12", "1.2k", "99.9k", "123k"]);
    }
}
