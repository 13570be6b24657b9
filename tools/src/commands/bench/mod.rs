//! `megatron bench`: measures this machine, and the share of its peak that kernels, collectives and
//! whole training steps reach.
//!
//! Every benchmark ends with a Markdown table for `docs/benchmarks.md`.

mod collectives;
mod kernels;
mod machine;
mod preset;
mod step;
mod timing;

use std::collections::BTreeMap;
use std::time::Duration;

use clap::{Args, Subcommand};

pub use machine::ceilings;

use crate::error::Result;

/// How long ranks may take to stop after a request: a benchmark has nothing to save.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// Measure this machine, and the speed of kernels, collectives and training steps on it
///
/// Results are meaningful only if nothing else runs on the machine.
#[derive(Args, Clone, Debug)]
#[command(arg_required_else_help = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub what: Bench,
}

/// What to measure.
#[derive(Clone, Debug, Subcommand)]
pub enum Bench {
    Step(Box<step::StepArgs>),
    Kernels(kernels::KernelsArgs),
    Collectives(collectives::CollectivesArgs),
    Machine(machine::MachineArgs),
}

/// Runs a benchmark and returns the exit code. `origins` are the settings that the user typed.
///
/// # Errors
/// If settings cannot be used, or the measured operation fails.
pub fn run(bench: &Bench, origins: BTreeMap<String, String>) -> Result<u8> {
    match bench {
        Bench::Step(args) => step::run(args, origins),
        Bench::Kernels(args) => kernels::run(args).map(|()| 0),
        Bench::Collectives(args) => collectives::run(args),
        Bench::Machine(args) => machine::run(args).map(|()| 0),
    }
}

/// Parses a number that must be at least 1.
pub(super) fn positive(text: &str) -> std::result::Result<usize, String> {
    const MOST: usize = 1 << 20;
    let number = text.parse().ok().filter(|number| (1..=MOST).contains(number));
    number.ok_or_else(|| format!("expected a whole number from 1 to {MOST}"))
}

/// One line that describes the machine of a table's results.
pub fn machine_line() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("unknown processor", |rest| rest.trim_start_matches([' ', '\t', ':']).trim());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("machine: {model}, {cores} cores; megatron {}", env!("CARGO_PKG_VERSION"))
}
