//! The time of a profile by operation: each span's own time, without the spans inside it.

use std::collections::BTreeMap;

use kernels::tensor::trace::{Event, Kind};
use serde::{Deserialize, Serialize};

/// The sums over the spans of one name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Total {
    /// Number of spans.
    pub calls: u64,
    /// Own seconds, without nested spans.
    pub seconds: f64,
    /// Floating-point operations, as the kernels count them.
    pub flops: f64,
    /// Bytes that kernels access or messages move.
    pub bytes: f64,
}

/// The groups of spans in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SpanGroup {
    /// A kernel's computation.
    Kernel,
    /// A collective or a message, while its bytes are moved.
    Communication,
    /// Waiting for other ranks or threads.
    Wait,
    /// Time in a phase outside all nested spans.
    Other,
}

/// One rank's profile.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Recorded steps.
    pub steps: u64,
    /// Seconds inside spans of the main thread.
    pub seconds: f64,
    /// Totals of the main thread, by group and name.
    pub main: Vec<(SpanGroup, String, Total)>,
    /// Totals of other threads, by name: work in parallel to the main thread.
    pub beside: Vec<(String, Total)>,
}

impl Summary {
    /// Summarizes events that are ordered by thread, by start, and outer before inner. Thread 0 is
    /// the main thread.
    pub fn of(events: &[Event], steps: u64) -> Self {
        let mut main: BTreeMap<(SpanGroup, &str), Total> = BTreeMap::new();
        let mut beside: BTreeMap<&str, Total> = BTreeMap::new();
        let own = own_seconds(events);
        let mut seconds = 0.0;
        for (event, own) in events.iter().zip(own) {
            let total = match event.thread {
                0 => main.entry((group(event.kind), event.name)).or_default(),
                _ => beside.entry(event.name).or_default(),
            };
            if event.thread == 0 {
                seconds += own;
            }
            total.calls += 1;
            total.seconds += own;
            total.flops += event.flops as f64;
            total.bytes += event.bytes as f64;
        }
        Self {
            steps,
            seconds,
            main: main
                .into_iter()
                .map(|((group, name), total)| (group, name.to_string(), total))
                .collect(),
            beside: beside.into_iter().map(|(name, total)| (name.to_string(), total)).collect(),
        }
    }

    /// Seconds that the main thread spent in a group.
    pub fn seconds_in(&self, group: SpanGroup) -> f64 {
        self.main.iter().filter(|(g, ..)| *g == group).map(|(_, _, total)| total.seconds).sum()
    }

    /// The mean over ranks. All summaries must have the same number of steps.
    pub fn mean<'a>(all: impl ExactSizeIterator<Item = &'a Self>) -> Self {
        let ranks = all.len().max(1) as f64;
        let mut mean = Self::default();
        let (mut main, mut beside) = (BTreeMap::new(), BTreeMap::new());
        for summary in all {
            mean.steps = summary.steps;
            mean.seconds += summary.seconds / ranks;
            for (group, name, total) in &summary.main {
                add(main.entry((*group, name.clone())).or_default(), total);
            }
            for (name, total) in &summary.beside {
                add(beside.entry(name.clone()).or_default(), total);
            }
        }
        let scaled = |total: Total| Total {
            calls: (total.calls as f64 / ranks).round() as u64,
            seconds: total.seconds / ranks,
            flops: total.flops / ranks,
            bytes: total.bytes / ranks,
        };
        mean.main =
            main.into_iter().map(|((group, name), total)| (group, name, scaled(total))).collect();
        mean.beside = beside.into_iter().map(|(name, total)| (name, scaled(total))).collect();
        mean
    }
}

fn add(sum: &mut Total, total: &Total) {
    sum.calls += total.calls;
    sum.seconds += total.seconds;
    sum.flops += total.flops;
    sum.bytes += total.bytes;
}

fn group(kind: Kind) -> SpanGroup {
    match kind {
        Kind::Phase => SpanGroup::Other,
        Kind::Kernel => SpanGroup::Kernel,
        Kind::Communication => SpanGroup::Communication,
        Kind::Wait => SpanGroup::Wait,
    }
}

/// The length of each event minus the events directly inside it.
fn own_seconds(events: &[Event]) -> Vec<f64> {
    let mut own: Vec<f64> = events.iter().map(|e| e.length.as_secs_f64()).collect();
    let mut open: Vec<usize> = Vec::new();
    for (at, event) in events.iter().enumerate() {
        let holds = |outer: &Event| {
            outer.thread == event.thread && event.start + event.length <= outer.start + outer.length
        };
        while open.last().is_some_and(|&outer| !holds(&events[outer])) {
            open.pop();
        }
        if let Some(&outer) = open.last() {
            own[outer] -= event.length.as_secs_f64();
        }
        open.push(at);
    }
    own
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn event(name: &'static str, kind: Kind, thread: usize, start: u64, length: u64) -> Event {
        let ms = Duration::from_millis;
        Event {
            name,
            kind,
            thread,
            start: ms(start),
            length: ms(length),
            flops: 100,
            bytes: 10,
            place: None,
        }
    }

    #[test]
    fn a_span_s_own_time_leaves_out_the_spans_inside_it() {
        let events = [
            event("step", Kind::Phase, 0, 0, 100),
            event("forward", Kind::Phase, 0, 10, 40),
            event("linear", Kind::Kernel, 0, 10, 20),
            event("linear", Kind::Kernel, 0, 30, 10),
            event("wait", Kind::Wait, 0, 60, 30),
            event("all_reduce", Kind::Communication, 1, 55, 35),
        ];
        let summary = Summary::of(&events, 1);
        let seconds = |name: &str| {
            let found = summary.main.iter().find(|(_, n, _)| n == name).expect("a row");
            (found.2.calls, (found.2.seconds * 1e3).round())
        };
        assert_eq!(
            [seconds("step"), seconds("forward"), seconds("linear"), seconds("wait")],
            [(1, 30.0), (1, 10.0), (2, 30.0), (1, 30.0)]
        );
        assert!((summary.seconds - 0.1).abs() < 1e-9);
        assert!((summary.seconds_in(SpanGroup::Other) - 0.04).abs() < 1e-9);
        assert_eq!(summary.beside.len(), 1);
        assert_eq!(summary.beside[0].1.calls, 1);
    }

    #[test]
    fn the_mean_over_ranks_keeps_operations_that_only_some_have() {
        let first = Summary::of(&[event("linear", Kind::Kernel, 0, 0, 10)], 2);
        let second = Summary::of(&[event("wait", Kind::Wait, 0, 0, 30)], 2);
        let mean = Summary::mean([&first, &second].into_iter());
        assert_eq!((mean.steps, mean.main.len()), (2, 2));
        assert!((mean.seconds - 0.02).abs() < 1e-9);
        assert!((mean.seconds_in(SpanGroup::Wait) - 0.015).abs() < 1e-9);
    }
}
