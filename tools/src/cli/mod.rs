//! The command line: commands, and what was asked for.

mod convert;
pub mod flags;
mod from_checkpoint;
mod gather;
mod help;
mod launch;
mod layout;
mod nearest;
mod other_names;
mod partition;
mod problems;
mod resolve;
pub mod run_file;
mod words;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};

pub use convert::{ExportArgs, ImportArgs};
pub use gather::Gathered;
pub(crate) use gather::SAME_THING;
pub use help::{CompletionsArgs, ManArgs, completions, man};
pub use launch::LaunchArgs;
pub use layout::resolve_layout;
pub use resolve::{Distributed, Resolved, default_cache, resolve};

use crate::bench::{Bench, BenchArgs};
use crate::doctor::DoctorArgs;
use crate::error::Error;
use crate::inference::evaluate::EvalArgs;
use crate::inference::generate::GenerateArgs;
use crate::inspect::InspectArgs;
use crate::preprocess::{PreprocessArgs, TokenizerArgs};
use crate::reshard::ReshardArgs;
use flags::Flags;
use gather::gather;
use words::Others;

/// Pretrains GPT-like models under data × tensor × pipeline parallelism.
#[derive(Debug, Parser)]
#[command(name = "megatron", version, arg_required_else_help = true, args_override_self = true)]
#[command(after_help = "`megatron COMMAND --help` or `megatron help COMMAND` explains a command.")]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Pretrain(Box<PretrainArgs>),
    Generate(GenerateArgs),
    Eval(EvalArgs),
    Reshard(Box<ReshardArgs>),
    Inspect(InspectArgs),
    Launch(LaunchArgs),
    Preprocess(PreprocessArgs),
    Tokenizer(TokenizerArgs),
    Import(ImportArgs),
    Export(ExportArgs),
    Bench(BenchArgs),
    Doctor(DoctorArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// Pretrain a model on text
///
/// Starts the tp·cp·pp·dp ranks of the run on this machine and supervises them. Under a launcher that sets RANK, WORLD_SIZE,
/// MASTER_ADDR and MASTER_PORT (torchrun, `megatron launch`), under `srun` with several tasks and under `mpirun` (Open MPI, MPICH, Intel MPI) it joins as that rank.
///
/// Settings come from a run file, a TOML file with the flags below as keys (`num_layers = 12`) in the sections named in
/// brackets, and from flags, which override the file. Switches are turned off by `--flag=false`.
///
/// Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 saves a checkpoint (if --save is set) and stops;
/// Ctrl-C after that stops at once.
#[derive(Args, Clone, Debug)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Examples:
  megatron pretrain examples/quickstart.toml
  megatron pretrain run.toml --lr 3e-4 --tensor-model-parallel-size 2
  megatron launch --nproc-per-node 4 -- megatron pretrain run.toml")]
pub struct PretrainArgs {
    /// The run file
    #[arg(value_name = "RUN.toml")]
    pub run_file: Option<PathBuf>,
    /// The run file, as a flag
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub flags: Flags,
}

/// What was asked for.
#[derive(Debug)]
pub enum Request {
    Pretrain(Box<Gathered>),
    Launch(LaunchArgs),
    Import(ImportArgs),
    Export(ExportArgs),
    Generate(GenerateArgs),
    Eval(EvalArgs),
    Preprocess(PreprocessArgs),
    Tokenizer(TokenizerArgs),
    /// With the origins of what was typed.
    Reshard(Box<ReshardArgs>, BTreeMap<String, String>),
    Inspect(InspectArgs),
    /// With the origins of what was typed.
    Bench(Bench, BTreeMap<String, String>),
    Doctor(DoctorArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// Why there is nothing to run.
#[derive(Debug)]
pub enum Stop {
    /// clap has something to print: help, the version, or a usage error.
    Clap(clap::Error),
    Error(Error),
}

impl From<clap::Error> for Stop {
    fn from(error: clap::Error) -> Self {
        Self::Clap(error)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// The whole command line, as it is parsed and explained.
pub fn command() -> clap::Command {
    let command = ["preprocess", "generate", "eval"].into_iter().fold(Cli::command(), |command, name| {
        // Their own switches take no value.
        let shared =
            |arg: Arg| if matches!(arg.get_action(), ArgAction::Set) { flags::with_switches(arg) } else { arg };
        command.mut_subcommand(name, |subcommand| subcommand.mut_args(shared))
    });
    command
        .mut_subcommand("pretrain", |pretrain| pretrain.mut_args(flags::with_switches))
        .mut_subcommand("reshard", |reshard| reshard.mut_args(flags::with_switches))
        .mut_subcommand("inspect", |inspect| inspect.mut_args(flags::with_switches))
        .mut_subcommand("bench", |bench| bench.mut_subcommand("step", |step| step.mut_args(flags::with_switches)))
}

/// Reads the command line `words` (the program's name first) and the run file it names.
///
/// # Errors
/// [`Stop`] if there is something to print instead of something to do.
pub fn parse(words: &[OsString]) -> std::result::Result<Request, Stop> {
    let (command, mut names) = (command(), Vec::new());
    let mut innermost = &command;
    while let Some(next) = words.get(1 + names.len()).and_then(|word| innermost.find_subcommand(word)) {
        innermost = next;
        names.push(next.get_name());
    }
    let (before, rest) = words.split_at((1 + names.len()).min(words.len()));
    if names == ["pretrain"] {
        let words = words::sort(innermost, rest, Others::Trainers);
        return gather(before, words).map(|settings| Request::Pretrain(Box::new(settings)));
    }
    let mut known = before.to_vec();
    if names.is_empty() {
        known.extend_from_slice(rest);
    } else {
        let others = match names[..] {
            ["launch"] => Others::Launchers,
            ["generate"] => Others::Generators,
            _ => Others::None,
        };
        let words = words::sort(innermost, rest, others);
        known.extend(words.own);
        asks_for_help(&known)?;
        words.problems.result()?;
    }
    let matches = command.try_get_matches_from(known)?;
    let cli = Cli::from_arg_matches(&matches)?;
    match cli.command {
        Command::Reshard(args) => {
            let typed = matches.subcommand_matches("reshard");
            let origins = typed.map_or_else(BTreeMap::new, |typed| origins_of(typed, &flags::layout_args()));
            Ok(Request::Reshard(args, origins))
        }
        Command::Doctor(args) => Ok(Request::Doctor(args)),
        Command::Inspect(args) => Ok(Request::Inspect(args)),
        Command::Generate(args) => Ok(Request::Generate(args)),
        Command::Eval(args) => Ok(Request::Eval(args)),
        Command::Import(args) => Ok(Request::Import(args)),
        Command::Export(args) => Ok(Request::Export(args)),
        Command::Launch(launch) => {
            launch.check()?;
            Ok(Request::Launch(launch))
        }
        Command::Preprocess(args) => Ok(Request::Preprocess(args)),
        Command::Tokenizer(args) => Ok(Request::Tokenizer(args)),
        Command::Completions(args) => Ok(Request::Completions(args)),
        Command::Man(args) => Ok(Request::Man(args)),
        Command::Pretrain(_) => Err(Error::usage("internal error: `pretrain` is read elsewhere").into()),
        Command::Bench(args) => {
            let step = matches.subcommand_matches("bench").and_then(|bench| bench.subcommand_matches("step"));
            Ok(Request::Bench(
                args.what,
                step.map_or_else(BTreeMap::new, |step| {
                    typed_origins(step, |section| matches!(section, "parallel" | "training"))
                }),
            ))
        }
    }
}

fn is_typed(matches: &ArgMatches, key: &str) -> bool {
    // A command may have only some of the settings.
    matches.try_contains_id(key).is_ok() && matches.value_source(key) == Some(ValueSource::CommandLine)
}

/// The flags of the sections asked for that were typed, by key.
fn typed_origins(matches: &ArgMatches, of_section: impl Fn(&str) -> bool) -> BTreeMap<String, String> {
    let sections = flags::sections().into_iter().filter(|(name, _)| of_section(name));
    origins_of(matches, &sections.flat_map(|(_, args)| args).collect::<Vec<_>>())
}

/// Those of `args` that were typed, by key.
fn origins_of(matches: &ArgMatches, args: &[Arg]) -> BTreeMap<String, String> {
    let typed = args.iter().filter(|arg| is_typed(matches, arg.get_id().as_str()));
    typed.map(|arg| (arg.get_id().to_string(), format!("--{}", arg.get_long().unwrap_or_default()))).collect()
}

/// What clap has to print, where help or the version is asked for: that comes before anything that
/// is wrong.
fn asks_for_help(words: &[OsString]) -> std::result::Result<(), Stop> {
    if !words.iter().any(|word| ["--help", "-h", "--version", "-V"].iter().any(|known| word == known)) {
        return Ok(());
    }
    match command().try_get_matches_from(words) {
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        command().debug_assert();
    }
}
