//! Draws the simulator's timeline, one line per stage.

use super::schedule::Pass;
use super::simulator::{Report, Slot};

/// How many times as long as the unit of a drawing a pass may be.
const LONGEST: u64 = 12;
/// Stands for what was left out.
const GAP: &str = " ~ ";

/// Draws a report: one line per stage, time to the right. A forward is its chunk's letter and its
/// microbatch (`a0`, `b0` …). A backward, or its input gradients, has a capital letter (`A0`).
/// Weight gradients are `w0` (`wa0`, `wb0` … with several chunks). Blanks are the bubble.
/// The shortest pass is as wide as the longest label; times are rounded to columns.
pub fn render(report: &Report) -> String {
    render_within(report, usize::MAX).0
}

/// As [`render`], in lines of at most about `columns` characters: the middle of a longer drawing is
/// left out, marked by `~`, and so are passes that reach into it. Also tells whether all was drawn.
pub fn render_within(report: &Report, columns: usize) -> (String, bool) {
    let several = report.timeline.iter().flatten().any(|slot| slot.chunk > 0);
    let slots = || report.timeline.iter().flatten();
    let durations = || slots().map(|slot| slot.end - slot.start).filter(|time| *time > 0);
    let longest = durations().max().unwrap_or(1);
    let unit = durations().min().unwrap_or(1).max(longest / LONGEST);
    let label = |slot: &Slot| {
        let letter = char::from(b'a' + (slot.chunk % 26) as u8);
        match slot.pass {
            Pass::Forward => format!("{letter}{}", slot.microbatch),
            Pass::Backward | Pass::InputGradients => {
                format!("{}{}", letter.to_ascii_uppercase(), slot.microbatch)
            }
            Pass::WeightGradients if several => format!("w{letter}{}", slot.microbatch),
            Pass::WeightGradients => format!("w{}", slot.microbatch),
        }
    };
    // plus the bar that ends the cell
    let cell = slots().map(|slot| label(slot).len() + 1).max().unwrap_or(1);
    let column = |time: u64| (time as f64 / unit as f64 * cell as f64).round() as usize;
    let whole = column(report.makespan) + 1;
    let of_name = format!("stage {} ", report.timeline.len().saturating_sub(1)).len();
    let room = columns.saturating_sub(of_name + GAP.len()).max(2 * cell);
    let is_cut = whole > room + GAP.len();
    // Where the middle begins and ends.
    let (begin, end) = if is_cut { (room - room / 2, whole - room / 2) } else { (whole, whole) };
    let mut text = String::new();
    for (stage, slots) in report.timeline.iter().enumerate() {
        let [mut head, mut tail] = [vec![b' '; begin], vec![b' '; whole - end]];
        for slot in slots {
            let (from, to) = (column(slot.start), column(slot.end));
            let (part, origin) = if to < begin {
                (&mut head, 0)
            } else if from >= end {
                (&mut tail, end)
            } else {
                continue;
            };
            let (from, to, label) = (from - origin, to - origin, label(slot));
            (part[from], part[to]) = (b'|', b'|');
            if to > from + label.len() {
                part[from + 1..=from + label.len()].copy_from_slice(label.as_bytes());
            }
        }
        let gap = if is_cut { GAP } else { "" };
        let line = [head.as_slice(), gap.as_bytes(), &tail].concat();
        let line: String = line.into_iter().map(char::from).collect();
        let name = format!("stage {stage} ");
        text.push_str(&format!("{name:<of_name$}{}\n", line.trim_end()));
    }
    (text, !is_cut)
}

#[cfg(test)]
mod tests {
    use super::super::*;

    /// Costs of `f` for forwards and `b` for backwards on every chunk.
    fn even(schedule: &Schedule, f: u64, b: u64) -> Costs {
        let chunk = ChunkCosts { forward: f, input_gradients: b, ..ChunkCosts::default() };
        Costs::even(schedule.pp(), schedule.num_chunks, chunk).unwrap()
    }

    #[test]
    fn a_rendering_shows_passes_in_proportion_to_their_cost() {
        let schedule = one_f_one_b(2, 2, 0).unwrap();
        let report = simulate(&schedule, &even(&schedule, 10, 20)).unwrap();
        assert_eq!(
            render(&report),
            "stage 0 |a0|a1|     |A0   |  |A1   |\n\
             stage 1    |a0|A0   |a1|A1   |\n"
        );
    }

    #[test]
    fn times_that_have_no_common_unit_are_rounded_to_columns() {
        let schedule = one_f_one_b(2, 2, 0).unwrap();
        let report = simulate(&schedule, &even(&schedule, 1009, 2003)).unwrap();
        assert_eq!(
            render(&report),
            "stage 0 |a0|a1|     |A0   |  |A1   |\n\
             stage 1    |a0|A0   |a1|A1   |\n"
        );
    }

    #[test]
    fn of_a_long_drawing_the_middle_is_left_out() {
        let schedule = one_f_one_b(2, 100, 0).unwrap();
        let report = simulate(&schedule, &even(&schedule, 1, 2)).unwrap();
        let (text, whole) = render_within(&report, 60);
        assert!(!whole && text.lines().all(|line| line.len() <= 60), "{text}");
        assert_eq!(
            text,
            "stage 0 |a0 |a1 |       |A0     | ~    |A98    |   |A99    |\n\
             stage 1     |a0 |A0     |a1 |     ~    |a99|A99    |\n"
        );
        let (text, whole) = render_within(&report, 2000);
        assert!(whole && text == render(&report));
    }

    #[test]
    fn delayed_weight_gradients_have_labels_of_their_own() {
        let chunk = ChunkCosts {
            forward: 1,
            input_gradients: 1,
            weight_gradients: 1,
            activations: 1,
            operands: 1,
            recompute: 1,
        };
        let costs = Costs::even(4, 1, chunk).unwrap();
        let schedule = delay_weight_gradients(&one_f_one_b(4, 6, 0).unwrap(), &costs).unwrap();
        assert_eq!(
            render(&simulate(&schedule, &costs).unwrap()),
            "stage 0 |a0|a1|a2|a3|        |A0   |a4|A1   |a5|A2   |A3   |A4   |A5   |\n\
             stage 1    |a0|a1|a2|     |A0|a3|A1|w0|a4|A2|w1|a5|A3|w2|A4|w3|A5|w4|w5|\n\
             stage 2       |a0|a1|  |A0|a2|A1|a3|A2|w0|a4|A3|w1|a5|A4|w2|A5|w3|w4|w5|\n\
             stage 3          |a0|A0|a1|A1|a2|A2|a3|A3|w0|a4|A4|w1|a5|A5|w2|w3|w4|w5|\n"
        );
    }

    #[test]
    fn the_drawings_in_the_documentation_are_those_of_the_generators() {
        let page = include_str!("../../../docs/explanation/schedules.md");
        let check = |name: &str, drawing: String| {
            assert!(
                page.contains(&format!("```text\n{drawing}```\n")),
                "schedules.md draws {name} otherwise than\n{drawing}"
            );
        };
        for (name, schedule) in
            [("1f1b", one_f_one_b(4, 4, 0)), ("forward only", forward_only(4, 1, 4))]
        {
            let schedule = schedule.unwrap();
            check(name, render(&simulate(&schedule, &even(&schedule, 1, 2)).unwrap()));
        }
    }
}
