//! The table of a profile: where the time of a step was spent, and how near its operations came to
//! the machine's ceilings.

use std::fmt::Write;

use megatron::train::{Profile, SpanGroup, Summary, Total};

use super::table::{Table, significant};
use super::words::count;

/// Kernels that are matrix products or attention; the rest is overhead.
const PRODUCTS: [&str; 5] =
    ["linear", "linear_dgrad", "linear_wgrad", "attention", "attention_backward"];
/// Rows with less than this share of a step are summed into one.
const LEAST_SHARE: f64 = 0.002;

/// The whole report, ending with Markdown tables by operation and by rank.
pub fn render(profile: &Profile) -> String {
    if profile.ranks.is_empty() {
        return "profile: the run did not reach the steps to be recorded".to_string();
    }
    let ranks = profile.ranks.len();
    let mean = Summary::mean(profile.ranks.iter().map(|(_, summary)| summary));
    let steps = mean.steps.max(1) as f64;
    let of = if ranks == 1 { String::new() } else { format!(", mean of {ranks} ranks") };
    let mut text = format!(
        "profile: {} of {} ms{of}; traces in {} (open them in https://ui.perfetto.dev or \
         chrome://tracing)\nceilings of one rank while all are busy: {} product {} GFLOP/s, copy \
         {} GB/s\n",
        count(mean.steps, "step"),
        significant(mean.seconds / steps * 1e3),
        profile.dir.display(),
        profile.dtype.as_str(),
        significant(profile.ceilings.flops / 1e9),
        significant(profile.ceilings.bytes / 1e9),
    );
    let _ = write!(text, "\n{}", by_operation(profile, &mean));
    let products: f64 =
        mean.main.iter().filter(|(_, name, _)| is_product(name)).map(|(_, _, t)| t.seconds).sum();
    let _ = write!(
        text,
        "\nmatrix products and attention: {}; everything else: {}\n",
        percent(products / mean.seconds),
        percent(1.0 - products / mean.seconds)
    );
    if ranks > 1 {
        let _ = write!(text, "\n{}", by_rank(profile));
    }
    for failure in &profile.failures {
        let _ = write!(text, "\nnote: {failure}");
    }
    text
}

fn is_product(name: &str) -> bool {
    PRODUCTS.contains(&name)
}

fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// Rows of the main thread, longest first, then work on other threads.
fn by_operation(profile: &Profile, mean: &Summary) -> Table {
    let steps = mean.steps.max(1) as f64;
    let mut table = Table::new([
        "operation",
        "calls",
        "ms a step",
        "share",
        "GFLOP/s",
        "of ceiling",
        "GB/s",
        "of ceiling",
    ]);
    let mut row = |name: String, total: &Total, share: String| {
        let rate = |amount: f64, ceiling: f64| match amount > 0.0 && total.seconds > 0.0 {
            true => (
                significant(amount / total.seconds / 1e9),
                percent(amount / total.seconds / ceiling),
            ),
            false => (String::new(), String::new()),
        };
        let (flops, of_flops) = rate(total.flops, profile.ceilings.flops);
        let (bytes, of_bytes) = rate(total.bytes, profile.ceilings.bytes);
        let calls = format!("{:.0}", total.calls as f64 / steps);
        let ms = format!("{:.2}", total.seconds / steps * 1e3);
        table.row([name, calls, ms, share, flops, of_flops, bytes, of_bytes]);
    };
    let mut rows: Vec<_> = mean.main.iter().collect();
    rows.sort_by(|a, b| b.2.seconds.total_cmp(&a.2.seconds));
    let (shown, small): (Vec<_>, Vec<_>) =
        rows.into_iter().partition(|(_, _, total)| total.seconds >= LEAST_SHARE * mean.seconds);
    for (group, name, total) in shown {
        let name = match group {
            SpanGroup::Other => format!("({name}: between operations)"),
            SpanGroup::Kernel | SpanGroup::Communication | SpanGroup::Wait => name.clone(),
        };
        row(name, total, percent(total.seconds / mean.seconds));
    }
    if !small.is_empty() {
        let sum = |f: fn(&Total) -> f64| small.iter().map(|(_, _, total)| f(total)).sum::<f64>();
        let total = Total {
            calls: sum(|t| t.calls as f64) as u64,
            seconds: sum(|t| t.seconds),
            ..Total::default()
        };
        row(
            format!(
                "({} of less than {} each)",
                count(small.len() as u64, "other"),
                percent(LEAST_SHARE)
            ),
            &total,
            percent(total.seconds / mean.seconds),
        );
    }
    for (name, total) in &mean.beside {
        row(format!("beside: {name}"), total, String::new());
    }
    table
}

/// What each rank's main thread did.
fn by_rank(profile: &Profile) -> Table {
    let mut table =
        Table::new(["rank", "ms a step", "kernels", "communication", "waiting", "between"]);
    for (rank, summary) in &profile.ranks {
        let share = |group| percent(summary.seconds_in(group) / summary.seconds);
        table.row([
            rank.to_string(),
            format!("{:.2}", summary.seconds / summary.steps.max(1) as f64 * 1e3),
            share(SpanGroup::Kernel),
            share(SpanGroup::Communication),
            share(SpanGroup::Wait),
            share(SpanGroup::Other),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use megatron::train::Ceilings;

    use super::*;

    fn total(calls: u64, seconds: f64, flops: f64, bytes: f64) -> Total {
        Total { calls, seconds, flops, bytes }
    }

    fn profile(ranks: usize) -> Profile {
        let summary = Summary {
            steps: 2,
            seconds: 0.2,
            main: vec![
                (SpanGroup::Kernel, "gelu".into(), total(12, 0.02, 0.0, 2e8)),
                (SpanGroup::Kernel, "linear".into(), total(24, 0.1598, 1.6e10, 1e8)),
                (SpanGroup::Wait, "receive".into(), total(4, 0.02, 0.0, 0.0)),
                (SpanGroup::Other, "step".into(), total(2, 0.0002, 0.0, 0.0)),
            ],
            beside: vec![("all_reduce".into(), total(4, 0.03, 0.0, 1e8))],
        };
        Profile {
            dir: "profile".into(),
            ranks: (0..ranks).map(|rank| (rank, summary.clone())).collect(),
            ceilings: Ceilings { flops: 2e11, bytes: 2e10 },
            dtype: candle_core::DType::F32,
            failures: Vec::new(),
        }
    }

    #[test]
    fn operations_come_longest_first_with_their_part_of_the_ceilings() {
        let text = render(&profile(1));
        let rows: Vec<&str> = text.lines().filter(|line| line.starts_with("| ")).collect();
        assert!(rows[2].starts_with("| linear"), "{text}");
        assert!(rows[2].contains("79.9%") && rows[2].contains("50.1%"), "{text}");
        assert!(rows[3].starts_with("| gelu") && rows[3].contains("50.0%"), "{text}");
        assert!(text.contains("everything else: 20.1%"), "{text}");
        assert!(text.contains("beside: all_reduce"), "{text}");
        assert!(!text.contains("| rank"), "{text}");
    }

    #[test]
    fn traces_that_could_not_be_written_are_told() {
        let profile = Profile {
            failures: vec!["cannot write profile/trace: No space left".into()],
            ..profile(1)
        };
        assert!(render(&profile).ends_with("\nnote: cannot write profile/trace: No space left"));
    }

    #[test]
    fn several_ranks_have_a_table_of_their_own() {
        let text = render(&profile(2));
        assert!(text.contains("| rank | ms a step |"), "{text}");
        let ranks = text.lines().skip_while(|line| !line.starts_with("| rank")).skip(2);
        assert_eq!(
            ranks.filter(|line| line.contains("100.00") && line.contains("10.0%")).count(),
            2,
            "{text}"
        );
    }
}
