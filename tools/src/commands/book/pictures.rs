//! The book's pictures are those that the program's own values make.

mod memory;
mod parameter;
mod rank_grid;

use std::fs;

use megatron::pipeline::{
    ChunkCosts, Costs, Report, Schedule, delay_weight_gradients, gpipe, interleaved, one_f_one_b,
    simulate,
};
use megatron::topology::RankGrid;

use super::root;
use crate::pictures::timeline::{Panel, timeline};

const AXIS: &str = "time: 1 is a forward, gradients of inputs or gradients of weights";

/// The same costs for all chunks of four stages.
fn even(v: usize, chunk: ChunkCosts) -> Costs {
    Costs::even(4, v, chunk).unwrap()
}

/// With weight gradients in the gaps.
fn delayed(schedule: &Schedule, costs: &Costs) -> Schedule {
    delay_weight_gradients(schedule, costs).unwrap()
}

/// Schedules of four stages, each with what is said of it.
fn schedules(title: &str, schedules: &[(&str, Schedule, Costs)], axis: &str) -> String {
    let reports: Vec<Report> =
        schedules.iter().map(|(_, schedule, costs)| simulate(schedule, costs).unwrap()).collect();
    let panels: Vec<Panel<'_>> = schedules
        .iter()
        .zip(&reports)
        .map(|((name, ..), report)| {
            let in_flight = report.peak_in_flight.iter().map(usize::to_string);
            let caption = format!(
                "{name}: a step takes {}, bubble {:.0}%, in flight {}",
                report.makespan,
                100.0 * report.bubble,
                in_flight.collect::<Vec<_>>().join(", ")
            );
            Panel { caption, report }
        })
        .collect();
    timeline(title, &panels, 1, axis)
}

/// Each picture with the name of its file.
fn pictures() -> Vec<(&'static str, String)> {
    // A stage is two chunks of half its time, or one.
    let whole =
        ChunkCosts { forward: 2, input_gradients: 2, weight_gradients: 2, ..ChunkCosts::EVEN };
    let equal = even(1, ChunkCosts::EVEN);
    let one = one_f_one_b(4, 6, 0).unwrap();
    // The third stage has two layers; the last has one and the output matrix.
    let last = ChunkCosts { forward: 3, ..ChunkCosts::EVEN };
    let uneven = Costs::new(4, vec![ChunkCosts::EVEN, ChunkCosts::EVEN, whole, last]).unwrap();
    let ahead = one_f_one_b(4, 6, 1).unwrap();
    vec![
        (
            "schedule-1f1b",
            schedules(
                "GPipe and 1F1B: pp 4, 4 microbatches",
                &[
                    ("GPipe", gpipe(4, 4).unwrap(), equal.clone()),
                    ("1F1B", one_f_one_b(4, 4, 0).unwrap(), equal.clone()),
                ],
                "time: 1 is a forward, 2 a backward",
            ),
        ),
        (
            "schedule-interleaved",
            schedules(
                "1F1B and interleaved 1F1B: pp 4, 4 microbatches",
                &[
                    ("1F1B", one_f_one_b(4, 4, 0).unwrap(), even(1, whole)),
                    ("interleaved, v 2", interleaved(4, 2, 4).unwrap(), even(2, ChunkCosts::EVEN)),
                ],
                "time: 1 is the forward of half a stage, 2 its backward",
            ),
        ),
        (
            "schedule-delayed",
            schedules(
                "Delayed weight gradients: pp 4, 6 microbatches",
                &[
                    ("1F1B", one.clone(), equal.clone()),
                    ("delayed (ZB-H1)", delayed(&one, &equal), equal.clone()),
                ],
                AXIS,
            ),
        ),
        (
            "schedule-extra-warmup",
            schedules(
                "More forwards first: pp 4, 6 microbatches, unequal stages",
                &[
                    ("delayed", delayed(&one, &uneven), uneven.clone()),
                    ("delayed, 1 more forward", delayed(&ahead, &uneven), uneven.clone()),
                ],
                "time: 1 is a forward, gradients of inputs or gradients of weights of one layer",
            ),
        ),
        ("rank-grid", rank_grid::picture(&RankGrid::new(2, 1, 1, 2, 2).unwrap(), None)),
        ("two-machines", rank_grid::picture(&RankGrid::new(4, 1, 1, 2, 2).unwrap(), Some(8))),
        ("parameter", parameter::picture()),
        ("memory", memory::picture()),
    ]
}

/// `UPDATE_BOOK=1` writes the pictures anew.
#[test]
fn pictures_are_those_of_the_program() {
    let folder = root().join("docs/pictures");
    for (name, picture) in pictures() {
        let path = folder.join(format!("{name}.svg"));
        if std::env::var_os("UPDATE_BOOK").is_some() {
            fs::create_dir_all(&folder).unwrap();
            fs::write(&path, &picture).unwrap();
        }
        let there = fs::read_to_string(&path).unwrap_or_default();
        assert!(there == picture, "{} is old: run this test with UPDATE_BOOK=1", path.display());
    }
}

#[test]
fn every_picture_is_in_a_page_and_readable() {
    let pages: String =
        super::pages().iter().map(|page| fs::read_to_string(page).unwrap()).collect();
    for (name, text) in pictures() {
        assert!(pages.contains(&format!("pictures/{name}.svg)")), "no page shows {name}");
        assert!(text.contains("<title id") && text.contains("<desc id"), "{name}");
        let sizes = text.split("font-size=\"").skip(1).filter_map(|rest| rest.split('"').next());
        assert!(sizes.map(|size| size.parse::<f64>().unwrap()).all(|size| size >= 11.0), "{name}");
    }
}
