//! What a rank keeps of the run of `examples/two-machines` under several layouts.

use std::ffi::OsString;

use megatron::config::RunConfig;
use megatron::train::Footprint;
use models::Gpt;

use super::root;
use crate::cli::resolve;
use crate::commands::reshard::describe_layout;
use crate::commands::{Request, parse};
use crate::pictures::svg::{Anchor, Box, Colour, HEADING, Svg, TEXT, width};

const MARGIN: f64 = 12.0;
const BAR: f64 = 22.0;
const GIB: f64 = (1u64 << 30) as f64;
/// Pixels of a GiB.
const SCALE: f64 = 4.2;
/// What a GPU has.
const GPU: f64 = 80.0;
const COLOURS: [Colour; 5] =
    [Colour::BLUE, Colour::SKY, Colour::YELLOW, Colour::ORANGE, Colour::GREEN];

/// A layout in words, and what a rank of each of its stages keeps.
type Bars = (String, Vec<(String, Footprint)>);

/// The example's run with `flags` in place of its own.
fn run(flags: &[&str]) -> RunConfig {
    let file = root().join("examples/two-machines/run.toml").into_os_string();
    let own = ["--device", "cpu", "--mock-data", "--tokenizer", "null:31999"];
    let words = ["megatron", "pretrain"].iter().map(OsString::from).chain([file]);
    let words: Vec<OsString> = words.chain(own.iter().chain(flags).map(OsString::from)).collect();
    let Ok(Request::Pretrain(settings)) = parse(&words) else { panic!("{words:?}") };
    let mut run = resolve(&settings, None).unwrap().run;
    run.model.vocab_size = 32_000;
    run
}

fn bars(run: &RunConfig, more: &str) -> Bars {
    let stages = Footprint::of_stages(run, &Gpt::outline_of(run)).unwrap();
    let named = |(stage, footprint)| match stages.len() {
        1 => (String::from("all ranks"), footprint),
        _ => (format!("stage {stage}"), footprint),
    };
    let layout = describe_layout(&run.parallel) + more;
    (layout, stages.iter().copied().enumerate().map(named).collect())
}

fn layouts() -> Vec<Bars> {
    const REPLICAS: [&str; 3] = [
        "--tensor-model-parallel-size=1",
        "--pipeline-model-parallel-size=1",
        "--data-parallel-size=16",
    ];
    const WHOLE: &str = "--use-distributed-optimizer=false";
    vec![
        bars(&run(&[&REPLICAS[..], &[WHOLE]].concat()), ""),
        bars(&run(&REPLICAS), ""),
        bars(&run(&[WHOLE]), ""),
        bars(&run(&[]), ""),
        bars(&run(&["--recompute-granularity=full"]), " · full recompute"),
    ]
}

pub fn picture() -> String {
    let title = "Memory of a rank: a Llama of 6.7B parameters in bf16 on 16 ranks";
    let layouts = layouts();
    let words = layouts.iter().map(|(layout, stages)| {
        let of = |(name, footprint): &(String, Footprint)| {
            format!("{name} {:.1} GiB", footprint.total() / GIB)
        };
        format!("{layout}: {}.", stages.iter().map(of).collect::<Vec<_>>().join(", "))
    });
    let mut svg = Svg::new(title, &words.collect::<Vec<_>>().join(" "));
    svg.heading((MARGIN, MARGIN + HEADING), title);
    let names = Footprint::default().parts().map(|(name, _)| name.to_string());
    let entries: Vec<_> = COLOURS.into_iter().zip(names).collect();
    let legend_end = svg.legend((MARGIN, MARGIN + HEADING + 12.0), &entries);

    let left = MARGIN + width("all ranks", TEXT) + 8.0;
    let totals = layouts.iter().flat_map(|(_, stages)| stages).map(|(_, all)| all.total() / GIB);
    let most = totals.fold(GPU, f64::max);
    let right = left + most * SCALE;
    let top = MARGIN + HEADING + 44.0;
    let height: f64 =
        layouts.iter().map(|(_, stages)| TEXT + 16.0 + stages.len() as f64 * (BAR + 3.0)).sum();
    let of_gpu = left + GPU * SCALE;
    svg.line((of_gpu, top), (of_gpu, top + height), Colour::INK);
    svg.label((of_gpu + 4.0, top + height - 4.0), "a GPU of 80 GiB");
    let mut y = top;
    for (layout, stages) in &layouts {
        svg.label((MARGIN, y + TEXT), layout);
        y += TEXT + 6.0;
        for (name, footprint) in stages {
            let baseline = y + BAR / 2.0 + TEXT * 0.35;
            svg.text((left - 8.0, baseline), TEXT, Anchor::End, Colour::INK, name);
            bar(&mut svg, (left, y), footprint);
            y += BAR + 3.0;
        }
        y += 10.0;
    }
    svg.line((left, y), (right, y), Colour::INK);
    for tick in (0..=most as usize).step_by(20) {
        let x = left + tick as f64 * SCALE;
        svg.line((x, y), (x, y + 4.0), Colour::INK);
        svg.text((x, y + 6.0 + TEXT), TEXT, Anchor::Middle, Colour::INK, &tick.to_string());
    }
    svg.label((left, y + TEXT + 24.0), "GiB; activations: the minimum that a step needs at once");
    let end = (right + width(" 000.0 GiB", TEXT) + 8.0).max(legend_end);
    svg.finish(end + MARGIN, y + TEXT + 24.0 + MARGIN)
}

/// Draws the parts of a footprint one behind the other, and their sum.
fn bar(svg: &mut Svg, (mut x, y): (f64, f64), footprint: &Footprint) {
    for (colour, (_, bytes)) in COLOURS.into_iter().zip(footprint.parts()) {
        let w = bytes / GIB * SCALE;
        if w > 0.0 {
            svg.cell(Box(x, y, w, BAR), colour, &format!("{:.1}", bytes / GIB));
        }
        x += w;
    }
    let total = format!("{:.1} GiB", footprint.total() / GIB);
    svg.label((x + 8.0, y + BAR / 2.0 + TEXT * 0.35), &total);
}
