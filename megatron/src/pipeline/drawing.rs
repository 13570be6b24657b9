//! Draws the simulator's timeline, one line per stage.

use super::schedule::Pass;
use super::simulator::{Report, Slot};

/// Draws a report: one line per stage, time to the right. A forward is its chunk's letter and its
/// microbatch (`a0`, `b0` …). A backward, or its input gradients, has a capital letter (`A0`).
/// Weight gradients are `w0` (`wa0`, `wb0` … with several chunks). Blanks are the bubble.
pub fn render(report: &Report) -> String {
    let several = report.timeline.iter().flatten().any(|slot| slot.chunk > 0);
    let slots = || report.timeline.iter().flatten();
    let unit =
        slots().fold(report.makespan, |unit, slot| gcd(gcd(unit, slot.start), slot.end)).max(1);
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
    let column = |time: u64| (time / unit) as usize * cell;
    let mut text = String::new();
    for (stage, slots) in report.timeline.iter().enumerate() {
        let mut line = vec![b' '; column(report.makespan) + 1];
        for slot in slots {
            let (start, end) = (column(slot.start), column(slot.end));
            (line[start], line[end]) = (b'|', b'|');
            let label = label(slot);
            if end > start {
                line[start + 1..=start + label.len()].copy_from_slice(label.as_bytes());
            }
        }
        let line: String = line.into_iter().map(char::from).collect();
        text.push_str(&format!("stage {stage} {}\n", line.trim_end()));
    }
    text
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
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
    fn the_drawings_in_the_documentation_are_those_of_the_generators() {
        let page = include_str!("../../../docs/explanation/schedules.md");
        let check = |name: &str, drawing: String| {
            assert!(
                page.contains(&format!("```text\n{drawing}```\n")),
                "schedules.md draws {name} otherwise than\n{drawing}"
            );
        };
        for (name, schedule) in [
            ("gpipe", gpipe(4, 4)),
            ("1f1b", one_f_one_b(4, 4, 0)),
            ("interleaved", interleaved(4, 2, 4)),
            ("forward only", forward_only(4, 1, 4)),
        ] {
            let schedule = schedule.unwrap();
            check(name, render(&simulate(&schedule, &even(&schedule, 1, 2)).unwrap()));
        }
        let costs = Costs::even(
            4,
            1,
            ChunkCosts {
                forward: 1,
                input_gradients: 1,
                weight_gradients: 1,
                activations: 1,
                operands: 1,
                recompute: 1,
            },
        );
        let costs = costs.unwrap();
        for (name, m, extra_warmup, delayed) in [
            ("whole backwards", 6, 0, false),
            ("delayed weight gradients", 6, 0, true),
            ("extra warm-up", 8, 3, true),
        ] {
            let mut schedule = one_f_one_b(4, m, extra_warmup).unwrap();
            if delayed {
                schedule = delay_weight_gradients(&schedule, &costs).unwrap();
            }
            check(name, render(&simulate(&schedule, &costs).unwrap()));
        }
    }
}
