//! The time of each part of a step, for the log: Megatron-LM's `--timing-log-level`, DeepSpeed's
//! `wall_clock_breakdown`.

use std::time::Duration;

use candle_core::Device;
use kernels::tensor::trace::{Part, Sums, Timers, Timing};
use serde_json::{Map, Value, json};

use crate::Result;
use crate::config::{RunConfig, TimingLogOption};

/// Where the time of the steps since the last log line went; the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTimers {
    /// How the ranks are summarized.
    pub option: TimingLogOption,
    /// Entries that add up to a rank's step.
    pub entries: Vec<TimerEntry>,
    /// Details of these entries.
    pub details: Vec<TimerEntry>,
}

/// The time of one part of the mean step.
#[derive(Clone, Debug, PartialEq)]
pub struct TimerEntry {
    /// The name in the log, in metrics and in TensorBoard.
    pub name: &'static str,
    /// Milliseconds: the smallest and the largest of a rank, the largest, or those of all ranks.
    pub ms: Vec<f64>,
}

impl StepTimers {
    /// The entries by name, for `metrics.jsonl`. A maximum is a number, everything else a list.
    pub(super) fn to_json(&self) -> Value {
        let value = |entry: &TimerEntry| match self.option {
            TimingLogOption::Max => json!(entry.ms[0]),
            TimingLogOption::Minmax | TimingLogOption::All => json!(entry.ms),
        };
        let all = self.entries.iter().chain(&self.details);
        all.map(|entry| (entry.name.to_string(), value(entry))).collect::<Map<_, _>>().into()
    }

    /// Each entry and its largest time, in milliseconds.
    pub(super) fn largest(&self) -> impl Iterator<Item = (&'static str, f64)> + '_ {
        let all = self.entries.iter().chain(&self.details);
        all.map(|entry| (entry.name, entry.ms.iter().copied().fold(0.0, f64::max)))
    }
}

/// A name, and the parts whose time it has.
type Named = (&'static str, &'static [Part]);

/// The measured entries, and the rest of a step.
const ENTRIES: [Named; 5] = [
    ("forward", &[Part::Forward, Part::OutputForward]),
    ("backward", &[Part::Backward, Part::OutputBackward, Part::Recompute]),
    ("reduce", &[Part::Reduce, Part::Gather]),
    ("optimizer", &[Part::Optimizer]),
    ("wait", &[Part::Wait, Part::Receive, Part::Send]),
];
const OTHER: &str = "other";
/// A CUDA graph does not tell forward from backward.
const OF_A_GRAPH: Named = (
    "forward-backward",
    &[Part::Forward, Part::OutputForward, Part::Backward, Part::OutputBackward, Part::Recompute],
);
/// Details; the first two are in forward and backward.
const DETAILS: [Named; 6] = [
    ("recompute", &[Part::Recompute]),
    ("output", &[Part::OutputForward, Part::OutputBackward]),
    ("gather", &[Part::Gather]),
    ("receive", &[Part::Receive]),
    ("send", &[Part::Send]),
    ("data", &[Part::Data]),
];

/// This rank's timers over the steps since the last log line.
pub(super) struct IntervalTimers {
    timers: Timers,
    details: bool,
    /// Whether a CUDA graph computes forward and backward.
    replays: bool,
    option: TimingLogOption,
    sums: Sums,
    /// Time of the steps that were added, and their number.
    elapsed: Duration,
    steps: u32,
}

impl IntervalTimers {
    /// The timers of a run; `None` if it has none.
    pub fn of(run: &RunConfig) -> Option<Self> {
        let details = run.logging.timing_log_level > 1;
        (run.logging.timing_log_level > 0).then(|| Self {
            timers: Timers::new(details),
            details,
            replays: run.training.enable_cuda_graph,
            option: run.logging.timing_log_option,
            sums: Sums::default(),
            elapsed: Duration::ZERO,
            steps: 0,
        })
    }

    /// As [`Timers::enter`].
    pub fn enter(&self, device: &Device) -> Result<Timing> {
        Ok(self.timers.enter(device)?)
    }

    /// As [`Timers::end_step`].
    pub fn end_step(&self) {
        self.timers.end_step();
    }

    /// Adds the step that was computed, which took `elapsed`.
    pub fn add(&mut self, elapsed: Duration) {
        self.sums.add(&self.timers.lap());
        self.elapsed += elapsed;
        self.steps += 1;
    }

    fn entries(&self) -> Vec<Named> {
        let (passes, rest) = ENTRIES.split_at(2);
        let passes = if self.replays { &[OF_A_GRAPH][..] } else { passes };
        [passes, rest].concat()
    }

    fn details(&self) -> &'static [Named] {
        match (self.details, self.replays) {
            (false, _) => &[],
            (true, false) => &DETAILS,
            (true, true) => &DETAILS[2..],
        }
    }

    /// This rank's milliseconds of each entry, of the rest, and of each detail of the mean step.
    /// Starts again.
    fn take(&mut self) -> Vec<f64> {
        let steps = f64::from(std::mem::take(&mut self.steps).max(1));
        let ms = |time: Duration| time.as_secs_f64() * 1e3 / steps;
        let (sums, elapsed) = (std::mem::take(&mut self.sums), std::mem::take(&mut self.elapsed));
        let of = |(_, parts): &Named| ms(parts.iter().map(|part| sums.of(*part)).sum());
        let mut values: Vec<f64> = self.entries().iter().map(of).collect();
        values.push((ms(elapsed) - values.iter().sum::<f64>()).max(0.0));
        values.extend(self.details().iter().map(of));
        values
    }

    /// Summarizes the steps since the last call over `ranks` ranks, of which this one is `rank`.
    /// `sum` adds the values of all ranks.
    ///
    /// # Errors
    /// Those of `sum`.
    pub fn summarize(
        &mut self,
        rank: usize,
        ranks: usize,
        sum: impl FnOnce(Vec<f64>) -> Result<Vec<f64>>,
    ) -> Result<StepTimers> {
        let mine = self.take();
        let mut all = vec![0.0; ranks * mine.len()];
        all[rank * mine.len()..][..mine.len()].copy_from_slice(&mine);
        let all = sum(all)?;
        let of_entry = |at: usize| -> Vec<f64> {
            let of_ranks: Vec<f64> = all.iter().skip(at).step_by(mine.len()).copied().collect();
            let max = of_ranks.iter().copied().fold(0.0, f64::max);
            match self.option {
                TimingLogOption::Minmax => {
                    vec![of_ranks.iter().copied().fold(f64::INFINITY, f64::min), max]
                }
                TimingLogOption::Max => vec![max],
                TimingLogOption::All => of_ranks,
            }
        };
        let measured = self.entries();
        let names = measured.iter().map(|(name, _)| *name).chain([OTHER]);
        let names = names.chain(self.details().iter().map(|(name, _)| *name));
        let mut entries: Vec<TimerEntry> =
            names.enumerate().map(|(at, name)| TimerEntry { name, ms: of_entry(at) }).collect();
        let details = entries.split_off(measured.len() + 1);
        Ok(StepTimers { option: self.option, entries, details })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::valid;

    fn summary(run: &RunConfig) -> StepTimers {
        let mut timers = IntervalTimers::of(run).unwrap();
        for _ in 0..2 {
            let _timing = timers.enter(&Device::Cpu).unwrap();
            timers.add(Duration::from_millis(10));
        }
        // Rank 0 is twice as slow as rank 1, which is this one.
        let slower = |mine: Vec<f64>| {
            let (_, mine) = mine.split_at(mine.len() / 2);
            Ok([mine.iter().map(|ms| 2.0 * ms).collect(), mine.to_vec()].concat())
        };
        timers.summarize(1, 2, slower).unwrap()
    }

    fn names(entries: &[TimerEntry]) -> Vec<&'static str> {
        entries.iter().map(|entry| entry.name).collect()
    }

    #[test]
    fn the_rest_of_the_mean_step_is_told_as_the_ranks_are_to_be_summarized() {
        for (option, expected, json) in [
            (TimingLogOption::Minmax, vec![10.0, 20.0], json!([10, 20])),
            (TimingLogOption::Max, vec![20.0], json!(20)),
            (TimingLogOption::All, vec![20.0, 10.0], json!([20, 10])),
        ] {
            let mut run = valid();
            (run.logging.timing_log_level, run.logging.timing_log_option) = (1, option);
            let timers = summary(&run);
            let other = timers.entries.last().unwrap();
            assert_eq!(other.name, "other");
            let close = |(ms, expected): (&f64, &f64)| (ms - expected).abs() < 0.5;
            assert_eq!(other.ms.len(), expected.len());
            assert!(other.ms.iter().zip(&expected).all(close), "{:?}", other.ms);
            assert_eq!(timers.to_json()["other"].is_array(), json.is_array());
            assert!((timers.largest().last().unwrap().1 - 20.0).abs() < 1.0);
        }
    }

    #[test]
    fn a_graph_has_one_entry_for_forward_and_backward_and_the_second_level_has_details() {
        let mut run = valid();
        assert!(IntervalTimers::of(&run).is_none());
        let rest = ["reduce", "optimizer", "wait", "other"];
        for (level, graph, entries, details) in [
            (1, false, &["forward", "backward"][..], 0),
            (2, false, &["forward", "backward"], 6),
            (2, true, &["forward-backward"], 4),
        ] {
            (run.logging.timing_log_level, run.training.enable_cuda_graph) = (level, graph);
            let timers = summary(&run);
            assert_eq!(names(&timers.entries), [entries, &rest].concat());
            assert_eq!(timers.details.len(), details);
        }
    }
}
