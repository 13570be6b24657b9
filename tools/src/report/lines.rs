//! Megatron-LM's log lines, to the letter, because scripts parse them.
//!
//! Differences: a loss that is not a number is printed instead of left out, the time is UTC,
//! throughputs below 1 have three digits, and values without a place in Megatron's line are at its
//! end.

use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use megatron::train::{EvalMetrics, Peak, Profile, Reporter, StepMetrics};

use super::profile::render;
use super::timers::timers_line;
use super::window::Window;

/// Prints a line every `log_interval` steps: means over these steps, as in Megatron.
pub struct Lines<W> {
    out: W,
    log_interval: u64,
    window: Window,
}

impl<W: Write + Send> Lines<W> {
    pub fn new(out: W, log_interval: u64) -> Self {
        Self { out, log_interval: log_interval.max(1), window: Window::default() }
    }

    fn print(&mut self, line: &str) {
        // A closed reader must not stop a run.
        let _ = writeln!(self.out, "{line}").and_then(|()| self.out.flush());
    }
}

impl<W: Write + Send> Reporter for Lines<W> {
    fn start(&mut self, _done: u64, _train_iters: u64) {}

    fn step(&mut self, m: &StepMetrics) {
        if let Some(window) = self.window.add(m, self.log_interval) {
            self.print(&step_line(&now(), m, &window));
            m.timers.iter().for_each(|timers| self.print(&timers_line(timers)));
        }
    }

    fn eval(&mut self, m: &EvalMetrics) {
        let on =
            if m.split == "validation" { String::new() } else { format!(" on {} set", m.split) };
        let line = format!(
            " validation loss at iteration {}{on} | lm loss value: {} | lm loss PPL: {} | ",
            m.iteration,
            scientific(m.lm_loss),
            scientific(m.perplexity())
        );
        let rule = "-".repeat(line.chars().count() + 1);
        self.print(&format!("{rule}\n{line}\n{rule}"));
    }

    fn checkpoint(&mut self, iteration: u64, path: &Path) {
        self.print(&format!(
            "  successfully saved checkpoint from iteration {iteration:7} to {}",
            path.display()
        ));
    }

    fn profile(&mut self, profile: &Profile) {
        self.message(&render(profile));
    }

    fn message(&mut self, text: &str) {
        self.print(text);
    }
}

fn step_line(date: &str, m: &StepMetrics, w: &Window) -> String {
    let zeros =
        m.num_zeros_in_grad.map(|zeros| format!(" num zeros: {zeros:.1} |")).unwrap_or_default();
    let norm =
        m.params_norm.map(|norm| format!(" params norm: {} |", fixed(norm))).unwrap_or_default();
    format!(
        " [{date}] iteration {:8}/{:8} | consumed samples: {:12} | elapsed time per iteration (ms): {:.1} | throughput per GPU \
         (TFLOP/s/GPU): {} | learning rate: {} | global batch size: {:5} | lm loss: {} | loss scale: {:.1} | grad \
         norm: {} |{zeros}{norm} number of skipped iterations: {:3} | number of nan iterations: {:3} |{} tokens per second: {:.1} |",
        m.iteration,
        m.train_iters,
        m.consumed_samples,
        w.elapsed_ms(),
        throughput(w.tflops()),
        scientific(m.learning_rate),
        m.global_batch_size,
        scientific(w.loss()),
        m.loss_scale,
        fixed(m.grad_norm),
        w.skipped,
        w.nan,
        gpu_memory(m.memory),
        w.tokens_per_second(),
    )
}

/// `%.1f` as in Megatron, except for small values, such as a CPU's, which get three digits.
fn throughput(tflops: f64) -> String {
    if !(tflops > 0.0 && tflops < 1.0) {
        return format!("{tflops:.1}");
    }
    let decimals = (2.0 - tflops.log10().floor()).clamp(1.0, 12.0) as usize;
    format!("{tflops:.decimals$}")
}

/// The largest memory use of a GPU so far, in GiB, which Megatron's line does not have. Nothing on
/// the CPU.
fn gpu_memory(memory: Peak) -> String {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let line = |reserved| {
        let (allocated, reserved) = (gib(memory.allocated), gib(reserved));
        format!(" max allocated (GiB): {allocated:.2} | max reserved (GiB): {reserved:.2} |")
    };
    memory.reserved.map(line).unwrap_or_default()
}

/// C's and Python's `%.6E`.
fn scientific(x: f64) -> String {
    if x.is_nan() {
        return "NAN".to_string();
    }
    if x.is_infinite() {
        return if x > 0.0 { "INF" } else { "-INF" }.to_string();
    }
    let text = format!("{x:.6E}");
    match text.split_once('E') {
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
            format!("{digits}E{sign}{exponent:0>2}")
        }
        None => text,
    }
}

/// C's and Python's `%.3f`.
fn fixed(x: f64) -> String {
    format!("{x:.3}").to_lowercase()
}

/// The time as Python's `%Y-%m-%d %H:%M:%S.%f` prints it, in UTC.
fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    date(since.as_secs(), since.subsec_micros())
}

/// The civil date of a Unix time (H. Hinnant, "chrono-Compatible Low-Level Date Algorithms",
/// `civil_from_days`).
fn date(seconds: u64, micros: u32) -> String {
    let (days, time) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}.{micros:06}",
        time / 3600,
        time / 60 % 60,
        time % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(iteration: u64, lm_loss: f64) -> StepMetrics {
        StepMetrics {
            iteration,
            train_iters: 10,
            consumed_samples: 32 * iteration,
            consumed_tokens: 2048 * iteration,
            lm_loss,
            grad_norm: 1.5,
            params_norm: None,
            num_zeros_in_grad: None,
            learning_rate: 1.5e-4,
            loss_scale: 1.0,
            global_batch_size: 32,
            elapsed_ms: 10.0,
            tokens_per_second: 100.0,
            tflops: 2.0,
            skipped: false,
            skipped_iterations: 0,
            nan_iterations: 0,
            nonfinite_in_a_row: 0,
            memory: Peak::default(),
            timers: None,
        }
    }

    fn lines(log_interval: u64, steps: &[StepMetrics]) -> String {
        let mut reporter = Lines::new(Vec::new(), log_interval);
        steps.iter().for_each(|s| reporter.step(s));
        String::from_utf8(reporter.out).unwrap()
    }

    #[test]
    fn a_step_is_megatrons_line_to_the_letter() {
        let line = lines(1, &[metrics(1, 10.94919)]);
        let (date, rest) = line.split_once(']').unwrap();
        assert_eq!(date.len(), " [2026-11-21 03:00:00.000000".len());
        assert_eq!(
            rest,
            " iteration        1/      10 | consumed samples:           32 | elapsed time per iteration (ms): 10.0 | \
             throughput per GPU (TFLOP/s/GPU): 2.0 | learning rate: 1.500000E-04 | global batch size:    32 | \
             lm loss: 1.094919E+01 | loss scale: 1.0 | grad norm: 1.500 | number of skipped iterations:   0 | \
             number of nan iterations:   0 | tokens per second: 100.0 |\n"
        );
    }

    #[test]
    fn a_gpus_memory_is_at_the_end_of_the_line() {
        let mut metrics = metrics(1, 1.0);
        metrics.memory = Peak { allocated: 3 << 29, reserved: Some(2 << 30) };
        let line = lines(1, &[metrics]);
        let end = " number of nan iterations:   0 | max allocated (GiB): 1.50 | max reserved (GiB): 2.00 | tokens per second: 100.0 |\n";
        assert!(line.ends_with(end), "{line}");
    }

    #[test]
    fn statistics_that_were_asked_for_stand_where_megatron_has_them() {
        let m = StepMetrics {
            params_norm: Some(12.3456),
            num_zeros_in_grad: Some(77.0),
            ..metrics(1, 1.0)
        };
        let line = lines(1, &[m]);
        let middle = "| grad norm: 1.500 | num zeros: 77.0 | params norm: 12.346 | number of skipped iterations:   0 |";
        assert!(line.contains(middle), "{line}");
    }

    #[test]
    fn what_a_cpu_does_has_digits() {
        let texts = [0.0, 0.001234, 0.02, 0.5678, 1.26, 312.04, f64::NAN].map(throughput);
        assert_eq!(texts, ["0.0", "0.00123", "0.0200", "0.568", "1.3", "312.0", "NaN"]);
    }

    #[test]
    fn a_line_shows_the_mean_of_its_interval() {
        let text = lines(2, &[metrics(1, 4.0), metrics(2, 2.0), metrics(3, 1.0)]);
        assert_eq!(text.lines().count(), 1);
        assert!(text.contains("lm loss: 3.000000E+00"), "{text}");
    }

    #[test]
    fn a_loss_that_is_not_a_number_is_printed_and_counted() {
        let text = lines(2, &[metrics(1, f64::NAN), metrics(2, 2.0)]);
        assert!(
            text.contains("lm loss: NAN |") && text.contains("number of nan iterations:   1 |"),
            "{text}"
        );
    }

    #[test]
    fn numbers_are_formatted_as_c_does() {
        let texts = [0.0, 1.0, -1.5e-7, 6.02e123, f64::INFINITY].map(scientific);
        assert_eq!(
            texts,
            ["0.000000E+00", "1.000000E+00", "-1.500000E-07", "6.020000E+123", "INF"]
        );
        assert_eq!(fixed(f64::NAN), "nan");
    }

    #[test]
    fn dates_are_civil() {
        assert_eq!(date(0, 0), "1970-01-01 00:00:00.000000");
        assert_eq!(date(951_782_400, 5), "2000-02-29 00:00:00.000005");
        assert_eq!(date(1_795_229_884, 0), "2026-11-21 02:58:04.000000");
    }

    #[test]
    fn an_evaluation_stands_between_rules() {
        let mut reporter = Lines::new(Vec::new(), 1);
        reporter.eval(&EvalMetrics { iteration: 5, split: "validation".into(), lm_loss: 0.0 });
        let text = String::from_utf8(reporter.out).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[1],
            " validation loss at iteration 5 | lm loss value: 0.000000E+00 | lm loss PPL: 1.000000E+00 | "
        );
        assert_eq!((lines[0], lines[0].len()), (lines[2], lines[1].len() + 1));
    }
}
