//! The command line: commands, and how `pretrain`'s settings are gathered from flags and a run file.

mod convert;
pub mod flags;
mod from_checkpoint;
mod launch;
mod layout;
mod nearest;
mod other_names;
mod resolve;
pub mod run_file;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};

pub use convert::{ExportArgs, ImportArgs};
pub use from_checkpoint::Recorded;
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
use run_file::Setting;

/// Pretrains GPT-like models under data × tensor × pipeline parallelism.
#[derive(Debug, Parser)]
#[command(name = "megatron", version, arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = "`megatron COMMAND --help` explains a command.")]
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
}

/// Pretrain a model on text
///
/// Starts the tp·cp·pp·dp ranks of the run on this machine and supervises them. Under a launcher that sets RANK, WORLD_SIZE,
/// MASTER_ADDR and MASTER_PORT (torchrun, `megatron launch`), under `srun` with several tasks and under `mpirun` (Open MPI, MPICH, Intel MPI) it joins as that rank.
///
/// Settings come from a run file, a TOML file with the flags below as keys (`num_layers = 12`) in the sections named in
/// brackets, and from flags, which override the file. Switches are turned off by `--flag=false`.
///
/// Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 saves a checkpoint (if --save is set) and stops; Ctrl-C after that stops at once.
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
}

/// The settings of `pretrain`, merged, with the origin of each that is not a default.
#[derive(Clone, Debug)]
pub struct Gathered {
    pub flags: Flags,
    /// By key: `--num-layers`, `run.toml:7`, or `saved/iter_0000100`.
    pub origins: BTreeMap<String, String>,
    /// The checkpoint that says what flags and run file do not, if one does.
    pub recorded: Option<Recorded>,
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

fn command() -> clap::Command {
    Cli::command()
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
    let matches = command().try_get_matches_from(words).map_err(|error| {
        // Other commands have few flags, which nobody brings from elsewhere.
        match words.get(1).and_then(|word| word.to_str()) {
            Some("pretrain") => other_names::explain(error, other_names::instead_of),
            Some("launch") => other_names::explain(error, other_names::instead_of_launchers),
            _ => error,
        }
    })?;
    let (cli, typed) = (Cli::from_arg_matches(&matches)?, matches.subcommand_matches("pretrain"));
    match (cli.command, typed) {
        (Command::Reshard(args), _) => {
            let typed = matches.subcommand_matches("reshard");
            let origins = typed.map_or_else(BTreeMap::new, |typed| origins_of(typed, &flags::layout_args()));
            Ok(Request::Reshard(args, origins))
        }
        (Command::Doctor(args), _) => Ok(Request::Doctor(args)),
        (Command::Inspect(args), _) => Ok(Request::Inspect(args)),
        (Command::Generate(args), _) => Ok(Request::Generate(args)),
        (Command::Eval(args), _) => Ok(Request::Eval(args)),
        (Command::Import(args), _) => Ok(Request::Import(args)),
        (Command::Export(args), _) => Ok(Request::Export(args)),
        (Command::Launch(launch), _) => {
            launch.check()?;
            Ok(Request::Launch(launch))
        }
        (Command::Preprocess(args), _) => Ok(Request::Preprocess(args)),
        (Command::Tokenizer(args), _) => Ok(Request::Tokenizer(args)),
        (Command::Pretrain(args), Some(typed)) => {
            gather(words, *args, typed).map(|settings| Request::Pretrain(Box::new(settings)))
        }
        (Command::Pretrain(args), None) => {
            Ok(Request::Pretrain(Box::new(Gathered { flags: args.flags, origins: BTreeMap::new(), recorded: None })))
        }
        (Command::Bench(args), _) => {
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

/// Settings that say the same thing in different units; a run has one of each.
pub(crate) const SAME_THING: [&[&str]; 6] = [
    &["train_iters", "train_samples"],
    &["lr_decay_iters", "lr_decay_samples"],
    &["lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"],
    &["lr_wsd_decay_iters", "lr_wsd_decay_samples"],
    &["check_for_nan_in_loss_and_grad", "no_check_for_nan_in_loss_and_grad"],
    &["num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"],
];

/// The settings that say what `key` says, itself among them.
fn ways_to_say(key: &str) -> &'static [&'static str] {
    SAME_THING.into_iter().find(|keys| keys.contains(&key)).unwrap_or_default()
}

/// Whether `key` names data where the flags name others: made-up ones or the user's.
fn is_other_source(key: &str, flags: &Flags) -> bool {
    let data = &flags.data;
    key == "data_path" && data.mock_data || key == "mock_data" && !data.data_path.is_empty()
}

/// Puts the run file's settings under those of the command line, and a checkpoint's under both.
fn gather(words: &[OsString], args: PretrainArgs, typed: &ArgMatches) -> std::result::Result<Gathered, Stop> {
    let typed_origins = typed_origins(typed, |_| true);
    let path = match (&args.run_file, &args.config) {
        (Some(run_file), Some(config)) => {
            return Err(Error::usage(format!(
                "two run files: {} and --config {}; name one",
                run_file.display(),
                config.display()
            ))
            .into());
        }
        (Some(path), None) | (None, Some(path)) => Some(path.clone()),
        (None, None) => None,
    };
    let mut layers = Layers { words, typed: typed_origins, file: Vec::new(), checkpoint: Vec::new() };
    if let Some(path) = &path {
        let typed = |key: &str| layers.typed.contains_key(key);
        let is_overridden = |key: &str| {
            let is_said = typed(key) || ways_to_say(key).iter().any(|other| typed(other));
            is_said || is_other_source(key, &args.flags)
        };
        let settings = run_file::read(path)?.into_iter().filter(|setting| !is_overridden(&setting.key));
        layers.file = settings.map(|setting| (format!("{}:{}", path.display(), setting.line), setting)).collect();
    }
    let gathered = match path {
        Some(_) => layers.merged()?,
        None => Gathered { flags: args.flags, origins: layers.typed.clone(), recorded: None },
    };
    let has_world = crate::ranks::place()?.is_some();
    let Some((recorded, settings)) = from_checkpoint::beneath(&gathered, path.is_some(), has_world)? else {
        return Ok(gathered);
    };
    let origin = recorded.origin();
    layers.checkpoint = settings.into_iter().map(|setting| (origin.clone(), setting)).collect();
    Ok(Gathered { recorded: Some(recorded), ..layers.merged()? })
}

/// What is said of a run, the last of which counts: by a checkpoint, by the run file, on the command line. No setting is in two of them.
struct Layers<'a> {
    words: &'a [OsString],
    typed: BTreeMap<String, String>,
    /// Each setting with its origin.
    file: Vec<(String, Setting)>,
    checkpoint: Vec<(String, Setting)>,
}

impl Layers<'_> {
    /// All of them as one command line, so that one parse sees every setting once.
    fn merged(&self) -> std::result::Result<Gathered, Stop> {
        let mut origins = self.typed.clone();
        let (program_and_command, rest) = self.words.split_at(2);
        let mut merged = program_and_command.to_vec();
        for (origin, setting) in self.checkpoint.iter().chain(&self.file) {
            merged.extend(setting.words.iter().map(OsString::from));
            origins.insert(setting.key.clone(), origin.clone());
        }
        merged.extend_from_slice(rest);
        let matches = command().try_get_matches_from(merged)?;
        match Cli::from_arg_matches(&matches)?.command {
            Command::Pretrain(args) => Ok(Gathered { flags: args.flags, origins, recorded: None }),
            _ => Err(Error::usage("the run file turned `pretrain` into another command").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gathered(words: &[&str]) -> Gathered {
        let words: Vec<OsString> = ["megatron", "pretrain"].iter().chain(words).map(OsString::from).collect();
        match parse(&words).unwrap() {
            Request::Pretrain(gathered) => *gathered,
            _ => unreachable!(),
        }
    }

    fn run_file(text: &str) -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        std::fs::write(&path, text).unwrap();
        let path = path.display().to_string();
        (folder, path)
    }

    #[test]
    fn the_command_line_is_well_formed() {
        command().debug_assert();
    }

    #[test]
    fn flags_override_the_run_file_which_overrides_defaults() {
        let (_folder, path) = run_file("[optimizer]\nlr = 0.5\nadam_beta1 = 0.7\n");
        let gathered = gathered(&[&path, "--lr", "0.25"]);
        let optimizer = &gathered.flags.optimizer;
        assert_eq!((optimizer.lr, optimizer.adam_beta1, optimizer.adam_beta2), (Some(0.25), 0.7, 0.999));
        assert_eq!(gathered.origins["lr"], "--lr");
        assert_eq!(gathered.origins["adam_beta1"], format!("{path}:3"));
        assert!(!gathered.origins.contains_key("adam_beta2"));
    }

    #[test]
    fn a_flag_overrides_what_the_run_file_says_in_another_unit() {
        let (_folder, path) =
            run_file("[training]\ntrain_iters = 5\n[optimizer]\nlr_warmup_iters = 2\nlr_decay_iters = 4\n");
        let gathered = gathered(&[&path, "--train-samples", "80", "--lr-warmup-fraction=0.1"]);
        let (training, optimizer) = (&gathered.flags.training, &gathered.flags.optimizer);
        assert_eq!((training.train_iters, training.train_samples), (None, Some(80)));
        assert_eq!((optimizer.lr_warmup_iters, optimizer.lr_warmup_fraction), (None, Some(0.1)));
        assert_eq!(optimizer.lr_decay_iters, Some(4));
        assert!(!gathered.origins.contains_key("train_iters"));
    }

    #[test]
    fn a_switch_of_the_run_file_is_turned_off_by_a_flag() {
        let (_folder, path) = run_file("[model]\nswiglu = true\n");
        assert!(gathered(&[&path]).flags.model.swiglu);
        assert!(!gathered(&[&path, "--swiglu=false"]).flags.model.swiglu);
        assert!(gathered(&["--swiglu"]).flags.model.swiglu);
    }

    #[test]
    fn lists_of_a_flag_replace_those_of_the_run_file() {
        let (_folder, path) = run_file("[data]\ndata_path = [\"a\", \"b\"]\n");
        assert_eq!(gathered(&["--config", &path]).flags.data.data_path, ["a", "b"]);
        assert_eq!(gathered(&["--config", &path, "--data-path", "c", "d"]).flags.data.data_path, ["c", "d"]);
    }
}
