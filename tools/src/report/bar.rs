//! A progress bar with loss, tokens/s and time left.

use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use megatron::train::{EvalMetrics, Profile, Reporter, StepMetrics};

use super::profile::render;
use super::timers::timers_line;
use super::window::Window;

/// Shows steps on a terminal: a permanent line every `log_interval` steps, and the bar below.
pub struct Bar {
    bar: ProgressBar,
    log_interval: u64,
    window: Window,
    /// Whether a step was made, so that the time left is known.
    runs: bool,
}

/// The template while steps are made, and the one before and afterwards, without a time left.
const RUNNING: &str = "{wide_bar:.cyan/blue} {pos}/{len} {msg} · ETA {eta_precise}";
const AT_REST: &str = "{wide_bar:.cyan/blue} {pos}/{len} {msg}";

impl Bar {
    pub fn new(log_interval: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden());
        bar.set_style(style(AT_REST));
        Self { bar, log_interval, window: Window::default(), runs: false }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// The permanent line of several steps; `m` is the last of them.
fn step_line(m: &StepMetrics, w: &Window) -> String {
    let mut text = format!(
        "step {}: loss {:.4} · learning rate {:.3e} · grad norm {:.3}",
        m.iteration,
        w.loss(),
        m.learning_rate,
        m.grad_norm
    );
    if let Some(zeros) = m.num_zeros_in_grad {
        text.push_str(&format!(" · {zeros} zeros in the gradient"));
    }
    if let Some(norm) = m.params_norm {
        text.push_str(&format!(" · params norm {norm:.3}"));
    }
    for (n, what) in [(w.skipped, "skipped"), (w.nan, "NaN")] {
        if n > 0 {
            text.push_str(&format!(" · {n} {what}"));
        }
    }
    text.push_str(&format!(" · {} tokens/s", thousands(w.tokens_per_second())));
    text
}

/// The text beside the bar.
fn summary(m: &StepMetrics) -> String {
    let mut text = format!("loss {:.4} · {} tokens/s", m.lm_loss, thousands(m.tokens_per_second));
    if m.skipped_iterations > 0 {
        text.push_str(&format!(" · {} skipped", m.skipped_iterations));
    }
    if m.nan_iterations > 0 {
        text.push_str(&format!(" · {} NaN", m.nan_iterations));
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
        self.bar.set_draw_target(ProgressDrawTarget::stdout());
        self.bar.set_length(train_iters);
        self.bar.set_position(done);
        self.bar.reset_eta();
        self.bar.enable_steady_tick(Duration::from_secs(1));
    }

    fn step(&mut self, metrics: &StepMetrics) {
        if let Some(window) = self.window.add(metrics, self.log_interval) {
            self.message(&step_line(metrics, &window));
            metrics.timers.iter().for_each(|timers| self.message(timers_line(timers).trim()));
        }
        if !std::mem::replace(&mut self.runs, true) {
            self.bar.set_style(style(RUNNING));
        }
        self.bar.set_message(summary(metrics));
        self.bar.set_position(metrics.iteration);
    }

    fn eval(&mut self, metrics: &EvalMetrics) {
        let (loss, ppl) = (metrics.lm_loss, metrics.perplexity());
        self.message(&format!(
            "step {}: {} loss {loss:.4}, perplexity {ppl:.2}",
            metrics.iteration, metrics.split
        ));
    }

    fn checkpoint(&mut self, iteration: u64, path: &Path) {
        self.message(&format!("step {iteration}: saved {}", path.display()));
    }

    fn profile(&mut self, profile: &Profile) {
        self.message(&render(profile));
    }

    fn message(&mut self, text: &str) {
        self.bar.suspend(|| crate::print_line(text));
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        // Leaves the last state on the screen, without an ETA.
        self.bar.set_style(style(AT_REST));
        self.bar.abandon();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_short() {
        assert_eq!(
            [12.4, 1234.0, 99_949.0, 123_456.0].map(thousands),
            ["12", "1.2k", "99.9k", "123k"]
        );
    }
}
