//! `megatron timeline`: what the pipeline of a run does in a step, before the run.

mod vocabulary;

use std::ops::Range;
use std::path::PathBuf;

use clap::Args;
use megatron::config::{RunConfig, ScheduleKind};
use megatron::pipeline::{Report, render_within};
use megatron::train::StepPlan;
use models::Gpt;

use super::bench::positive;
use super::reshard::describe_layout;
use crate::cli::{Gathered, PretrainArgs, resolve};
use crate::error::{Error, Result};
use crate::pictures::timeline::{Panel, timeline};
use crate::report::count;
use crate::report::table::Table;

/// The most passes that a picture has; viewers stumble over more.
const MOST_PASSES: usize = 50_000;
/// Stands for the length of a run that was not given, which no schedule depends on.
const SOME_ITERS: u64 = 1 << 32;

/// Draw the pipeline schedule of a run
///
/// Takes a run file and flags as `pretrain` does, which `megatron pretrain --help` explains, and
/// starts nothing. Shows which stage does what when, how long stages wait (the bubble), and how many
/// microbatches they keep activations of. Data, learning rate and length of the run may be left out.
/// If a launcher will start the ranks, give --data-parallel-size: it is not computed here.
///
/// Passes cost what the model counts of their operations, messages nothing. In the drawing a0 is the
/// forward of microbatch 0 through a stage's first chunk of layers (b0: its second), A0 the backward
/// of the same, w0 weight gradients that --delay-wgrad-compute delays.
#[derive(Args, Clone, Debug)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Examples:
  megatron timeline run.toml --pipeline-model-parallel-size 4
  megatron timeline run.toml --num-virtual-stages-per-pipeline-rank 2 --svg schedule.svg")]
pub struct TimelineArgs {
    #[command(flatten)]
    pub drawing: DrawingArgs,
    #[command(flatten)]
    pub run: PretrainArgs,
}

/// How a schedule is drawn.
#[derive(Args, Clone, Debug)]
pub struct DrawingArgs {
    /// Write the drawing as a picture, too
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Characters of a line of the drawing; of a longer one the middle is left out
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = positive)]
    pub columns: usize,
}

/// Prints the schedule, and returns the exit code.
///
/// # Errors
/// If the settings make no run, or the picture cannot be written.
pub fn run(args: &DrawingArgs, settings: &Gathered) -> Result<u8> {
    if settings.print_config.is_some() {
        return Err(Error::usage("--print-config is for `megatron pretrain`; leave it out here"));
    }
    let mut settings = settings.clone();
    complete(&mut settings);
    let mut resolved = resolve(&settings, None)?;
    vocabulary::complete(&mut resolved)?;
    let run = &resolved.run;
    let plan = StepPlan::new(run, &Gpt::outline_of(run), run.num_microbatches())?;
    let report = plan.simulate()?;
    let passes: usize = report.timeline.iter().map(Vec::len).sum();
    if args.svg.is_some() && passes > MOST_PASSES {
        return Err(Error::usage(format!(
            "--svg: a step has {passes} passes, and a picture at most {MOST_PASSES}; give a smaller --global-batch-size"
        )));
    }

    resolved.notes.iter().for_each(|note| crate::print_line(note));
    if let Some(rampup) = run.training.rampup {
        crate::print_line(&format!(
            "note: the batch grows from {} samples; drawn is a step of the whole batch",
            rampup.start
        ));
    }
    let title = title(run);
    crate::print_line(&format!("{title}\n"));
    let (drawing, whole) = render_within(&report, args.columns);
    crate::print_line(&drawing);
    if !whole {
        crate::print_line(
            "~: the middle of the step is left out; --columns N and --svg FILE show more of it\n",
        );
    }
    let unit = unit(&plan);
    crate::print_line(&stages(&plan, &report, unit).to_string());
    crate::print_line(&summary(&report, unit));
    if let Some(path) = &args.svg {
        let axis = "time: 1 is the shortest forward of a chunk";
        let panel = Panel { caption: String::new(), report: &report };
        let picture = timeline(&title, &[panel], unit, axis);
        std::fs::write(path, picture).map_err(|source| Error::Io {
            action: format!("write the picture to {} (--svg)", path.display()),
            source,
        })?;
        crate::print_line(&format!("picture: {}", path.display()));
    }
    Ok(0)
}

/// Gives settings that a run must have, and no schedule depends on, some value.
fn complete(settings: &mut Gathered) {
    let flags = &mut settings.flags;
    if flags.optimizer.deepspeed.lr_schedule.is_none() {
        flags.optimizer.lr.get_or_insert(1e-3);
    }
    if flags.training.train_samples.is_none() {
        flags.training.train_iters.get_or_insert(SOME_ITERS);
    }
    flags.data.mock_data |= flags.data.data_path.is_empty();
}

fn title(run: &RunConfig) -> String {
    let p = &run.parallel;
    let mut schedule = String::from(match p.schedule {
        ScheduleKind::Gpipe => "gpipe",
        ScheduleKind::OneFOneB => "1f1b",
        ScheduleKind::Interleaved => "interleaved",
    });
    if p.delay_wgrad_compute {
        schedule.push_str(" with delayed weight gradients");
    }
    format!(
        "{schedule} | {} | {} of {}",
        describe_layout(p),
        count(run.num_microbatches() as u64, "microbatch"),
        count(run.training.micro_batch_size as u64, "sample")
    )
}

/// The time of the shortest forward of a chunk.
fn unit(plan: &StepPlan) -> u64 {
    let (pp, chunks) = (plan.schedule.pp(), plan.schedule.num_chunks);
    let forwards =
        (0..pp).flat_map(|stage| (0..chunks).map(move |c| plan.costs.of(stage, c).forward));
    forwards.filter(|time| *time > 0).min().unwrap_or(1)
}

/// What each stage has, and does in a step.
fn stages(plan: &StepPlan, report: &Report, unit: u64) -> Table {
    let pp = plan.schedule.pp();
    let mut table = Table::new(["stage", "layers", "forward", "backward", "waits", "in flight"]);
    for (stage, slots) in report.timeline.iter().enumerate() {
        let layers = plan.layers.iter().skip(stage).step_by(pp).map(range);
        let costs = (0..plan.schedule.num_chunks).map(|chunk| plan.costs.of(stage, chunk));
        let of = |time: u64| format!("{:.2}", time as f64 / unit as f64);
        let busy: u64 = slots.iter().map(|slot| slot.end - slot.start).sum();
        let waits = (report.makespan - busy) as f64 / report.makespan.max(1) as f64;
        table.row([
            stage.to_string(),
            layers.collect::<Vec<_>>().join(" + "),
            of(costs.clone().map(|cost| cost.forward).sum()),
            of(costs.map(|cost| cost.backward()).sum()),
            format!("{:.1}%", 100.0 * waits),
            report.peak_in_flight[stage].to_string(),
        ]);
    }
    table
}

/// Layers in few words.
fn range(layers: &Range<usize>) -> String {
    match layers.len() {
        0 => "none".to_string(),
        1 => layers.start.to_string(),
        _ => format!("{}–{}", layers.start, layers.end - 1),
    }
}

fn summary(report: &Report, unit: u64) -> String {
    let time = report.makespan as f64 / unit as f64;
    format!(
        "bubble: {:.1}% of all stages' time\na step takes {time:.1}, {:.1} if no stage waited; 1.00 is the shortest forward of a chunk\n\
         in flight: forwards of chunks whose activations a stage keeps, at most",
        100.0 * report.bubble,
        time * (1.0 - report.bubble)
    )
}
