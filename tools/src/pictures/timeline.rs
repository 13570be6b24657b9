//! The timeline of a schedule: a row per stage, time to the right.

use megatron::pipeline::{Pass, Report, Slot};

use super::svg::{Anchor, Box, Colour, HEADING, Svg, TEXT, width};

/// Room that a picture in a page has.
const PAGE: f64 = 660.0;
/// The most that a picture is as long as, unless passes became too narrow to be seen.
const LONGEST: f64 = 4000.0;
/// Width of the shortest pass: to be seen, and at most.
const SEEN: f64 = 4.0;
const MOST: f64 = 34.0;
const ROW: f64 = 24.0;
const MARGIN: f64 = 12.0;
/// Between ticks of the time axis, at least.
const TICKS: f64 = 40.0;

/// A schedule, and what is said above it.
pub struct Panel<'a> {
    pub caption: String,
    pub report: &'a Report,
}

/// Draws schedules one below the other, on one scale. `unit` is 1 on the time axis, which `axis`
/// explains.
pub fn timeline(title: &str, panels: &[Panel<'_>], unit: u64, axis: &str) -> String {
    let mut svg = Svg::new(title, &description(panels));
    let slots = || panels.iter().flat_map(|panel| panel.report.timeline.iter().flatten());
    let makespan = panels.iter().map(|panel| panel.report.makespan).max().unwrap_or(0).max(1);
    let chunks = slots().map(|slot| slot.chunk + 1).max().unwrap_or(1);
    let scale = scale(slots(), makespan);
    let stages = panels.iter().map(|panel| panel.report.timeline.len()).max().unwrap_or(0);
    let left = MARGIN + width(&format!("stage {}", stages.saturating_sub(1)), TEXT) + 6.0;
    let right = left + makespan as f64 * scale;

    svg.heading((MARGIN, MARGIN + HEADING), title);
    let legend_end = svg.legend((MARGIN, MARGIN + HEADING + 12.0), &legend(slots(), chunks));
    let mut y = MARGIN + HEADING + 40.0;
    for panel in panels {
        if !panel.caption.is_empty() {
            svg.label((MARGIN, y + TEXT), &panel.caption);
            y += TEXT + 8.0;
        }
        y = rows(&mut svg, panel.report, (left, y), scale, chunks);
        y = time_axis(&mut svg, (left, y), panel.report.makespan, unit, scale);
    }
    svg.text((left, y + TEXT), TEXT, Anchor::Start, Colour::INK, axis);
    let texts = panels.iter().map(|panel| panel.caption.as_str()).chain([axis]);
    let widest = texts.map(|text| left + width(text, TEXT)).fold(right, f64::max);
    svg.finish(
        widest.max(legend_end).max(MARGIN + width(title, HEADING)) + MARGIN,
        y + TEXT + MARGIN,
    )
}

/// Pixels of one unit of the costs.
fn scale<'a>(slots: impl Iterator<Item = &'a Slot> + Clone, makespan: u64) -> f64 {
    let shortest = slots.clone().map(|slot| slot.end - slot.start).filter(|time| *time > 0).min();
    let shortest = shortest.unwrap_or(1) as f64;
    let last = slots.map(|slot| slot.microbatch).max().unwrap_or(0).to_string();
    let readable = (width(&last, TEXT) + 4.0).min(MOST);
    let [seen, readable, most] = [SEEN, readable, MOST].map(|width| width / shortest);
    let [page, longest] = [PAGE, LONGEST].map(|width| width / makespan as f64);
    page.clamp(readable, most).min(longest).max(seen)
}

/// The colour of a pass: chunks differ in shade.
fn colour(pass: Pass, chunk: usize, chunks: usize) -> Colour {
    let colour = match pass {
        Pass::Forward => Colour::BLUE,
        Pass::Backward => Colour::ORANGE,
        Pass::InputGradients => Colour::YELLOW,
        Pass::WeightGradients => Colour::GREEN,
    };
    colour.lighter(chunk, chunks)
}

fn legend<'a>(
    slots: impl Iterator<Item = &'a Slot> + Clone,
    chunks: usize,
) -> Vec<(Colour, String)> {
    let passes = [
        (Pass::Forward, "forward"),
        (Pass::Backward, "backward"),
        (Pass::InputGradients, "gradients of inputs"),
        (Pass::WeightGradients, "gradients of weights"),
    ];
    let mut entries = Vec::new();
    for (pass, name) in passes {
        if !slots.clone().any(|slot| slot.pass == pass) {
            continue;
        }
        // Of many chunks the first and the last.
        for chunk in [0, chunks - 1].into_iter().take(chunks) {
            let of = if chunks > 1 { format!(" of chunk {chunk}") } else { String::new() };
            entries.push((colour(pass, chunk, chunks), format!("{name}{of}")));
        }
    }
    entries.push((Colour::PALE, "waits".into()));
    entries
}

/// Draws a row per stage; returns where they end.
fn rows(svg: &mut Svg, report: &Report, at: (f64, f64), scale: f64, chunks: usize) -> f64 {
    let (left, mut y) = at;
    for (stage, slots) in report.timeline.iter().enumerate() {
        let name = format!("stage {stage}");
        let baseline = y + ROW / 2.0 + TEXT * 0.35;
        svg.text((left - 6.0, baseline), TEXT, Anchor::End, Colour::INK, &name);
        let whole = Box(left, y, report.makespan as f64 * scale, ROW);
        svg.outlined(whole, Colour::PALE, Colour::PALE);
        for slot in slots.iter().filter(|slot| slot.end > slot.start) {
            let (x, w) = (slot.start as f64 * scale, (slot.end - slot.start) as f64 * scale);
            let fill = colour(slot.pass, slot.chunk, chunks);
            svg.cell(Box(left + x, y, w, ROW), fill, &slot.microbatch.to_string());
        }
        y += ROW + 4.0;
    }
    y
}

/// Draws a time axis of `makespan` with numbers in `unit`; returns where it ends.
fn time_axis(svg: &mut Svg, at: (f64, f64), makespan: u64, unit: u64, scale: f64) -> f64 {
    let (left, y) = at;
    svg.line((left, y), (left + makespan as f64 * scale, y), Colour::INK);
    let per_unit = unit as f64 * scale;
    let steps = (0..).flat_map(|power| [1, 2, 5].map(|digit| digit * 10u64.pow(power)));
    let step = steps.take(30).find(|step| *step as f64 * per_unit >= TICKS).unwrap_or(u64::MAX);
    let last = makespan / unit.max(1);
    for tick in (0..=last).step_by(usize::try_from(step).unwrap_or(usize::MAX)) {
        let x = left + tick as f64 * per_unit;
        svg.line((x, y), (x, y + 4.0), Colour::INK);
        svg.text((x, y + 6.0 + TEXT), TEXT, Anchor::Middle, Colour::INK, &tick.to_string());
    }
    y + TEXT + 18.0
}

/// The schedules in words.
fn description(panels: &[Panel<'_>]) -> String {
    let words = panels.iter().map(|Panel { caption, report }| {
        let stages = report.timeline.len();
        let microbatches = report.timeline.iter().flatten().map(|slot| slot.microbatch + 1).max();
        let caption = if caption.is_empty() { String::new() } else { format!("{caption}: ") };
        format!(
            "{caption}{stages} stages and {} microbatches; stages wait {:.1}% of the time; at most {} are in flight.",
            microbatches.unwrap_or(0),
            100.0 * report.bubble,
            report.peak_in_flight.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
        )
    });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use megatron::pipeline::{ChunkCosts, Costs, one_f_one_b, simulate};

    use super::*;

    fn drawn(microbatches: usize) -> String {
        let chunk = ChunkCosts { forward: 10, input_gradients: 20, ..Default::default() };
        let schedule = one_f_one_b(2, microbatches, 0).unwrap();
        let report = simulate(&schedule, &Costs::even(2, 1, chunk).unwrap()).unwrap();
        timeline("1F1B", &[Panel { caption: String::new(), report: &report }], 10, "forwards")
    }

    #[test]
    fn every_pass_is_drawn_with_its_microbatch() {
        let text = drawn(3);
        // A background, two rows, three legend entries, and twelve passes.
        assert_eq!(text.matches("<rect").count(), 1 + 2 + 3 + 12);
        assert_eq!(text.matches(">2</text>").count(), 4 + 1, "and a tick of the axis");
        assert!(text.contains("2 stages and 3 microbatches; stages wait 25.0% of the time"));
    }

    #[test]
    fn a_long_schedule_is_not_longer_than_passes_need_to_be_seen() {
        let text = drawn(500);
        let width = text.split("width=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
        assert!((6000..6200).contains(&width.parse().unwrap()), "{width}");
        assert!(text.contains("<rect") && !text.contains(">499</text>"));
    }
}
