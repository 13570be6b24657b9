//! The command line: turns flags, run files and flags of other programs into settings.

mod deepspeed;
pub mod flags;
mod from_checkpoint;
mod gather;
mod layout;
mod nearest;
mod other_names;
mod partition;
pub mod print_config;
mod problems;
mod resolve;
pub mod run_file;
pub mod words;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args};

pub use deepspeed::convert;
pub use gather::Gathered;
pub(crate) use gather::SAME_THING;
pub use layout::resolve_layout;
pub use resolve::{Resolved, default_cache, resolve};

use crate::error::Error;
use flags::Flags;
pub(crate) use gather::gather;

/// Pretrain a model on text
///
/// Starts the tp·cp·pp·dp ranks of the run on this machine and supervises them. Under a launcher
/// that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun, `megatron launch`), under
/// `srun` with several tasks and under `mpirun` (Open MPI, MPICH, Intel MPI) it joins as that rank.
///
/// Settings come from a run file and from flags; flags override the file. The run file is TOML: its
/// keys are the flags below in snake_case (`num_layers = 12`), under the sections named in
/// brackets. `--flag=false` turns a switch off.
///
/// Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 saves a checkpoint (if --save is set) and stops; a
/// second Ctrl-C stops at once.
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
    /// The run file, given as a flag
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// DeepSpeed's configuration. Flags and run file must not contradict it; `auto` is what they say
    #[arg(long, value_name = "FILE")]
    pub deepspeed_config: Option<PathBuf>,
    /// The same by the name that transformers' Trainer uses. Without FILE it has no effect
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub deepspeed: Option<Option<PathBuf>>,
    /// Print the whole run file that results, with where each value comes from, and stop
    #[arg(long)]
    pub print_config: bool,
    #[command(flatten)]
    pub flags: Flags,
}

/// Why parsing stops without a command to run.
#[derive(Debug)]
pub enum Stop {
    /// clap has something to print: help, the version, or a usage error.
    Clap(clap::Error),
    Error(Error),
}

impl From<clap::Error> for Stop {
    fn from(error: clap::Error) -> Self {
        Self::Clap(in_plain_words(error))
    }
}

/// The same error, without Rust's words for a value that is not a number.
fn in_plain_words(error: clap::Error) -> clap::Error {
    let source = std::error::Error::source(&error).map(ToString::to_string);
    let (Some(source), Some(because)) = (source, no_number(&error)) else { return error };
    let text = error.to_string().replacen(&source, because, 1);
    clap::Error::raw(error.kind(), text.trim_start_matches("error: "))
}

/// Why a value is not the number that its flag expects, if that is the error.
fn no_number(error: &clap::Error) -> Option<&'static str> {
    let source = std::error::Error::source(error)?;
    if source.is::<ParseFloatError>() {
        return Some("expects a number");
    }
    let value = match error.get(ContextKind::InvalidValue) {
        Some(ContextValue::String(value)) => value.as_str(),
        _ => "",
    };
    Some(match source.downcast_ref::<ParseIntError>()?.kind() {
        IntErrorKind::PosOverflow => "the number is too large",
        _ if value.parse::<i64>().is_ok_and(|number| number < 0) => "must not be negative",
        _ => "expects a whole number",
    })
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

fn is_typed(matches: &ArgMatches, key: &str) -> bool {
    // A command can have a subset of the settings.
    matches.try_contains_id(key).is_ok()
        && matches.value_source(key) == Some(ValueSource::CommandLine)
}

/// The flags that the user typed, of the requested sections, by key.
pub fn typed_origins(
    matches: &ArgMatches,
    of_section: impl Fn(&str) -> bool,
) -> BTreeMap<String, String> {
    let sections = flags::sections().into_iter().filter(|(name, _)| of_section(name));
    origins_of(matches, &sections.flat_map(|(_, args)| args).collect::<Vec<_>>())
}

/// The flags of `args` that the user typed, by key.
pub fn origins_of(matches: &ArgMatches, args: &[Arg]) -> BTreeMap<String, String> {
    let typed = args.iter().filter(|arg| is_typed(matches, arg.get_id().as_str()));
    typed
        .map(|arg| (arg.get_id().to_string(), format!("--{}", arg.get_long().unwrap_or_default())))
        .collect()
}

/// clap's output if the user asks for help or the version. This takes priority over errors.
pub fn asks_for_help(command: &clap::Command, words: &[OsString]) -> std::result::Result<(), Stop> {
    if !words
        .iter()
        .any(|word| ["--help", "-h", "--version", "-V"].iter().any(|known| word == known))
    {
        return Ok(());
    }
    match command.clone().try_get_matches_from(words) {
        Err(error)
            if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) =>
        {
            Err(error.into())
        }
        _ => Ok(()),
    }
}
