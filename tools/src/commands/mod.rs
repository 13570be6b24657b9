//! The list of commands, and the parsed request. Each command has its own file or folder.

pub mod bench;
#[cfg(test)]
mod book;
pub mod completions;
pub mod convert;
pub mod convert_config;
pub mod doctor;
pub mod eval;
pub mod generate;
pub mod inspect;
pub mod launch;
pub mod preprocess;
pub mod pretrain;
pub mod reshard;
pub mod timeline;

use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::{Arg, ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};

use self::bench::{Bench, BenchArgs};
use self::completions::{CompletionsArgs, ManArgs};
use self::convert::{ExportArgs, ImportArgs};
use self::convert_config::ConvertConfigArgs;
use self::doctor::DoctorArgs;
use self::eval::EvalArgs;
use self::generate::GenerateArgs;
use self::inspect::InspectArgs;
use self::launch::LaunchArgs;
use self::preprocess::{PreprocessArgs, TokenizerArgs};
use self::reshard::ReshardArgs;
use self::timeline::{DrawingArgs, TimelineArgs};
use crate::cli::words::{self, Others};
use crate::cli::{
    Gathered, PretrainArgs, Stop, asks_for_help, flags, gather, origins_of, typed_origins,
};
use crate::error::Error;

/// Pretrains GPT-like models under data × tensor × pipeline parallelism.
#[derive(Debug, Parser)]
#[command(name = "megatron", version, arg_required_else_help = true, args_override_self = true)]
#[command(after_help = "`megatron COMMAND --help` or `megatron help COMMAND` describes a command.")]
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
    ConvertConfig(ConvertConfigArgs),
    Timeline(Box<TimelineArgs>),
    Bench(BenchArgs),
    Doctor(DoctorArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// The parsed command.
#[derive(Debug)]
pub enum Request {
    Pretrain(Box<Gathered>),
    Launch(LaunchArgs),
    Import(ImportArgs),
    Export(ExportArgs),
    ConvertConfig(ConvertConfigArgs),
    Generate(GenerateArgs),
    Eval(EvalArgs),
    Preprocess(PreprocessArgs),
    Tokenizer(TokenizerArgs),
    /// With the origins of the flags that were typed.
    Reshard(Box<ReshardArgs>, BTreeMap<String, String>),
    Inspect(InspectArgs),
    Timeline(DrawingArgs, Box<Gathered>),
    /// With the origins of the flags that were typed.
    Bench(Bench, BTreeMap<String, String>),
    Doctor(DoctorArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// The whole command line, as it is parsed and described in `--help`.
pub fn command() -> clap::Command {
    let command =
        ["preprocess", "generate", "eval"].into_iter().fold(Cli::command(), |command, name| {
            // Their own switches take no value.
            let shared = |arg: Arg| {
                if matches!(arg.get_action(), ArgAction::Set) {
                    flags::with_switches(arg)
                } else {
                    arg
                }
            };
            command.mut_subcommand(name, |subcommand| subcommand.mut_args(shared))
        });
    command
        .mut_subcommand("pretrain", |pretrain| pretrain.mut_args(flags::with_switches))
        .mut_subcommand("timeline", |timeline| {
            // Its help names its own flags alone.
            let of_pretrain = |arg: &Arg| arg.get_help_heading().is_some();
            let hidden = |arg: Arg| match of_pretrain(&arg) {
                true => arg.hide_short_help(true).hide_long_help(true),
                false => arg,
            };
            timeline.mut_args(|arg| hidden(flags::with_switches(arg)))
        })
        .mut_subcommand("reshard", |reshard| reshard.mut_args(flags::with_switches))
        .mut_subcommand("inspect", |inspect| inspect.mut_args(flags::with_switches))
        .mut_subcommand("bench", |bench| {
            bench.mut_subcommand("step", |step| step.mut_args(flags::with_switches))
        })
}

/// Reads the command line `words` (the program's name first) and the run file it names.
///
/// # Errors
/// [`Stop`] if there is only something to print and no command to run.
pub fn parse(words: &[OsString]) -> std::result::Result<Request, Stop> {
    let (command, mut names) = (command(), Vec::new());
    let mut innermost = &command;
    while let Some(next) =
        words.get(1 + names.len()).and_then(|word| innermost.find_subcommand(word))
    {
        innermost = next;
        names.push(next.get_name());
    }
    let (before, rest) = words.split_at((1 + names.len()).min(words.len()));
    if names == ["pretrain"] {
        let words = words::sort(innermost, rest, Others::Trainers);
        return gather(&command, before, words)
            .map(|settings| Request::Pretrain(Box::new(settings)));
    }
    if names == ["timeline"] {
        let words = words::sort(innermost, rest, Others::Trainers);
        let own = [before, &words.own].concat();
        let settings = gather(&command, before, words)?;
        let matches = command.try_get_matches_from(own)?;
        let typed = matches.subcommand_matches("timeline").cloned().unwrap_or_default();
        let args = DrawingArgs::from_arg_matches(&typed)?;
        return Ok(Request::Timeline(args, Box::new(settings)));
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
        asks_for_help(&command, &known)?;
        words.problems.result()?;
    }
    let matches = command.try_get_matches_from(known)?;
    let cli = Cli::from_arg_matches(&matches)?;
    match cli.command {
        Command::Reshard(args) => {
            let typed = matches.subcommand_matches("reshard");
            let origins =
                typed.map_or_else(BTreeMap::new, |typed| origins_of(typed, &flags::layout_args()));
            Ok(Request::Reshard(args, origins))
        }
        Command::Doctor(args) => Ok(Request::Doctor(args)),
        Command::Inspect(args) => Ok(Request::Inspect(args)),
        Command::Generate(args) => Ok(Request::Generate(args)),
        Command::Eval(args) => Ok(Request::Eval(args)),
        Command::Import(args) => Ok(Request::Import(args)),
        Command::Export(args) => Ok(Request::Export(args)),
        Command::ConvertConfig(args) => Ok(Request::ConvertConfig(args)),
        Command::Launch(launch) => {
            launch.check()?;
            Ok(Request::Launch(launch))
        }
        Command::Preprocess(args) => Ok(Request::Preprocess(args)),
        Command::Tokenizer(args) => Ok(Request::Tokenizer(args)),
        Command::Completions(args) => Ok(Request::Completions(args)),
        Command::Man(args) => Ok(Request::Man(args)),
        Command::Pretrain(_) | Command::Timeline(_) => {
            Err(Error::usage("internal error: `pretrain` and `timeline` are parsed elsewhere")
                .into())
        }
        Command::Bench(args) => {
            let step = matches
                .subcommand_matches("bench")
                .and_then(|bench| bench.subcommand_matches("step"));
            Ok(Request::Bench(
                args.what,
                step.map_or_else(BTreeMap::new, |step| {
                    typed_origins(step, |section| matches!(section, "parallel" | "training"))
                }),
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_known_by_its_name() {
        let command = command();
        let mut names: Vec<&str> = command.get_subcommands().map(|one| one.get_name()).collect();
        let mut known = crate::launch::COMMANDS.to_vec();
        names.sort_unstable();
        known.sort_unstable();
        assert_eq!(names, known);
    }

    #[test]
    fn the_command_line_is_well_formed() {
        command().debug_assert();
    }
}
