//! The line of timers after a log line.

use megatron::config::TimingLogOption;
use megatron::train::{StepTimers, TimerEntry};

/// E.g. ` (min, max) time across ranks (ms): forward: (1.00, 2.00) | …`, with Megatron-LM's words.
pub fn timers_line(timers: &StepTimers) -> String {
    let ranks = match timers.option {
        TimingLogOption::Minmax => "(min, max) time",
        TimingLogOption::Max => "max time",
        TimingLogOption::All => "times",
    };
    let mut line = format!(" {ranks} across ranks (ms): {}", entries(&timers.entries));
    if !timers.details.is_empty() {
        line += &format!(" of these: {}", entries(&timers.details));
    }
    line
}

fn entries(entries: &[TimerEntry]) -> String {
    let entry = |TimerEntry { name, ms }: &TimerEntry| {
        let ms: Vec<String> = ms.iter().map(|ms| format!("{ms:.2}")).collect();
        match ms.as_slice() {
            [one] => format!("{name}: {one} |"),
            _ => format!("{name}: ({}) |", ms.join(", ")),
        }
    };
    entries.iter().map(entry).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_the_ranks_are_summarized_and_has_two_digits() {
        let entry = |name, ms: &[f64]| TimerEntry { name, ms: ms.to_vec() };
        for (option, ms, expected) in [
            (
                TimingLogOption::Minmax,
                &[1.0, 2.345][..],
                " (min, max) time across ranks (ms): wait: (1.00, 2.35) |",
            ),
            (TimingLogOption::Max, &[2.345], " max time across ranks (ms): wait: 2.35 |"),
            (
                TimingLogOption::All,
                &[3.0, 1.0, 2.0],
                " times across ranks (ms): wait: (3.00, 1.00, 2.00) |",
            ),
        ] {
            let entries = vec![entry("wait", ms)];
            let timers = StepTimers { option, entries, details: vec![] };
            assert_eq!(timers_line(&timers), expected);
            let details = vec![entry("send", &ms[..1])];
            let line = timers_line(&StepTimers { details, ..timers });
            assert_eq!(line, format!("{expected} of these: send: {:.2} |", ms[0]));
        }
    }
}
