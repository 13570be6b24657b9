//! Merges the settings of `pretrain`: the command line overrides the run file. Also handles flags
//! of other programs.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, FromArgMatches};

use super::deepspeed;
use super::flags::Flags;
use super::from_checkpoint::{self, Recorded};
use super::other_names::Verdict;
use super::problems::Problems;
use super::run_file::{self, RunFile, Setting};
use super::words::Words;
use super::{PretrainArgs, Stop, asks_for_help, typed_origins};
use crate::error::{Error, Result};

/// The settings of `pretrain`, merged, with the origin of each that is not a default.
#[derive(Clone, Debug)]
pub struct Gathered {
    pub flags: Flags,
    /// By key: `--num-layers`, `run.toml:7`, or `saved/iter_0000100`.
    pub origins: BTreeMap<String, String>,
    /// Flags and keys of Megatron-LM that have no effect here.
    pub passed_over: Vec<String>,
    /// What the run prints about DeepSpeed's configuration.
    pub notes: Vec<String>,
    /// All settings as they were parsed, if the run file that results is to be printed.
    pub print_config: Option<ArgMatches>,
    /// The checkpoint that supplies settings missing from flags and run file, if any.
    pub recorded: Option<Recorded>,
}

impl Gathered {
    /// Settings from nowhere but `flags`.
    pub fn of(flags: Flags, origins: BTreeMap<String, String>) -> Self {
        let (passed_over, notes) = (Vec::new(), Vec::new());
        Self { flags, origins, passed_over, notes, print_config: None, recorded: None }
    }
}

/// Groups of settings for the same value in different units; a run has one of each group.
pub(crate) const SAME_THING: [&[&str]; 6] = [
    &["train_iters", "train_samples"],
    &["lr_decay_iters", "lr_decay_samples"],
    &["lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"],
    &["lr_wsd_decay_iters", "lr_wsd_decay_samples"],
    &["check_for_nan_in_loss_and_grad", "no_check_for_nan_in_loss_and_grad"],
    &["num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"],
];

/// The settings equivalent to `key`, including `key`.
pub(super) fn ways_to_say(key: &str) -> &'static [&'static str] {
    SAME_THING.into_iter().find(|keys| keys.contains(&key)).unwrap_or_default()
}

fn pretrain_args(
    command: &clap::Command,
    words: &[OsString],
) -> std::result::Result<(PretrainArgs, ArgMatches), clap::Error> {
    let matches = command.clone().try_get_matches_from(words)?;
    // `pretrain`, or another command that takes its settings.
    let typed = matches.subcommand().map(|(_, typed)| typed.clone()).unwrap_or_default();
    Ok((PretrainArgs::from_arg_matches(&typed)?, typed))
}

/// Whether `key` names a data source while the flags name another: made-up data or the user's.
pub(super) fn is_other_source(key: &str, flags: &Flags) -> bool {
    let data = &flags.data;
    key == "data_path" && data.mock_data || key == "mock_data" && !data.data_path.is_empty()
}

/// Merges settings: the command line overrides the run file, and both override a checkpoint.
/// `before` are the words that name the command.
pub fn gather(
    command: &clap::Command,
    before: &[OsString],
    sorted: Words,
) -> std::result::Result<Gathered, Stop> {
    let Words { own, others, mut line, mut problems } = sorted;
    let mut words = [before, &own].concat();
    asks_for_help(command, &words)?;
    let parsed = pretrain_args(command, &words);
    let path = match &parsed {
        Ok((args, _)) => run_file_of(args)?,
        Err(_) => None,
    };
    let file = path.as_deref().map_or_else(|| Ok(RunFile::default()), run_file::read)?;
    let place =
        |at: usize| format!("{}:{at}", path.as_deref().unwrap_or(Path::new("run file")).display());
    file.line.put_under(&mut line);

    let (mut passed_over, mut settings) = (Vec::new(), file.settings);
    for other in &others {
        match other.judge(&line) {
            Verdict::PassedOver => passed_over.push(other.shown.clone()),
            Verdict::Refused(why) => {
                problems.of_others(&other.with_values(), why, other.entry.page())
            }
            Verdict::Words(instead) => words.extend(instead.into_iter().map(OsString::from)),
        }
    }
    for other in &file.others {
        match other.entry.judge(&other.values, &line) {
            Verdict::PassedOver => passed_over.push(other.key.clone()),
            Verdict::Refused(why) => {
                let message = format!("`{}`: {why}", other.key);
                problems.key_of_others(&place(other.line), &message, other.entry.page());
            }
            Verdict::Words(instead) => {
                settings.extend(instead.into_iter().map(|word| Setting::of(word, other.line)))
            }
        }
    }
    file.problems.iter().for_each(|(at, message)| problems.key(&place(*at), message));
    problems.result()?;
    let (args, typed) = match words.len() == before.len() + own.len() {
        true => parsed.map_err(second_run_file)?,
        false => pretrain_args(command, &words).map_err(second_run_file)?,
    };

    let (matches, typed) = (typed.clone(), typed_origins(&typed, |_| true));
    let is_overridden = |key: &str| {
        let is_said = typed.contains_key(key)
            || ways_to_say(key).iter().any(|other| typed.contains_key(*other));
        is_said || is_other_source(key, &args.flags)
    };
    let kept = settings.into_iter().filter(|setting| !is_overridden(&setting.key));
    let file: Vec<_> = kept.map(|setting| (place(setting.line), setting)).collect();
    let added = match deepspeed_config_of(&args)? {
        Some(path) => deepspeed::read(&path)?.beneath(&given(&matches, &typed, &file)),
        None => deepspeed::Added::default(),
    };
    let mut problems = Problems::default();
    added.problems.iter().for_each(|(at, message)| problems.key(at, message));
    problems.result()?;
    let mut layers = Layers {
        command,
        before,
        words: &words[before.len()..],
        typed,
        file,
        deepspeed: added.settings,
        checkpoint: Vec::new(),
    };
    let gathered = Gathered { passed_over, notes: added.notes, ..layers.merged()? };
    let has_world = crate::ranks::is_in_world()?;
    let Some((recorded, settings)) =
        from_checkpoint::beneath(&gathered, path.is_some(), has_world)?
    else {
        return Ok(gathered);
    };
    let origin = recorded.origin();
    layers.checkpoint = settings.into_iter().map(|setting| (origin.clone(), setting)).collect();
    let Gathered { passed_over, notes, .. } = gathered;
    let recorded = Some(recorded);
    Ok(Gathered { recorded, passed_over, notes, ..layers.merged()? })
}

/// What flags and run file say, by key.
fn given(
    matches: &ArgMatches,
    typed: &BTreeMap<String, String>,
    file: &[(String, Setting)],
) -> BTreeMap<String, deepspeed::Given> {
    let text = |key: &str| {
        let words = matches.get_raw(key).into_iter().flatten();
        words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    };
    let typed = typed.iter().map(|(key, flag)| (key.clone(), flag.clone(), text(key)));
    let file = file.iter().map(|(place, setting)| {
        let values =
            setting.words.iter().map(|word| word.split_once('=').map_or(word.as_str(), |(_, v)| v));
        (setting.key.clone(), place.clone(), values.collect::<Vec<_>>().join(" "))
    });
    let all = file.chain(typed);
    all.map(|(key, origin, value)| (key, deepspeed::Given { origin, value })).collect()
}

/// The sources of a run's settings, in ascending priority: a checkpoint, the run file, the command
/// line. No setting is in two of them.
struct Layers<'a> {
    /// The parser of the whole command line.
    command: &'a clap::Command,
    before: &'a [OsString],
    words: &'a [OsString],
    typed: BTreeMap<String, String>,
    /// Each setting with its origin.
    file: Vec<(String, Setting)>,
    /// What DeepSpeed's configuration adds.
    deepspeed: Vec<(String, Setting)>,
    checkpoint: Vec<(String, Setting)>,
}

impl Layers<'_> {
    /// All settings as one command line, so that one parse sees every setting once.
    fn merged(&self) -> std::result::Result<Gathered, Stop> {
        let mut origins = self.typed.clone();
        let mut merged = self.before.to_vec();
        for (origin, setting) in self.checkpoint.iter().chain(&self.deepspeed).chain(&self.file) {
            merged.extend(setting.words.iter().map(OsString::from));
            origins.insert(setting.key.clone(), origin.clone());
        }
        merged.extend_from_slice(self.words);
        let (args, matches) = pretrain_args(self.command, &merged)?;
        let print_config = args.print_config.then_some(matches);
        Ok(Gathered { print_config, ..Gathered::of(args.flags, origins) })
    }
}

/// The error for a second run file, which is no word that clap expects.
fn second_run_file(error: clap::Error) -> Stop {
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(word))
            if error.kind() == ErrorKind::UnknownArgument && word.ends_with(".toml") =>
        {
            Error::usage(format!("two run files: {word} is the second; name only one run file"))
                .into()
        }
        _ => error.into(),
    }
}

/// DeepSpeed's configuration, by whichever of its flags names it.
fn deepspeed_config_of(args: &PretrainArgs) -> Result<Option<PathBuf>> {
    match (&args.deepspeed_config, args.deepspeed.as_ref().and_then(Option::as_ref)) {
        (Some(one), Some(other)) if one != other => Err(Error::usage(format!(
            "two configurations of DeepSpeed: {} and {}; name only one",
            one.display(),
            other.display()
        ))),
        (path, other) => Ok(path.as_ref().or(other).cloned()),
    }
}

fn run_file_of(args: &PretrainArgs) -> Result<Option<PathBuf>> {
    match (&args.run_file, &args.config) {
        (Some(run_file), Some(config)) => Err(Error::usage(format!(
            "two run files: {} and --config {}; name only one run file",
            run_file.display(),
            config.display()
        ))),
        (path, None) | (None, path) => Ok(path.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::{Request, parse};

    fn gathered(words: &[&str]) -> Gathered {
        let words: Vec<OsString> =
            ["megatron", "pretrain"].iter().chain(words).map(OsString::from).collect();
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
    fn flags_override_the_run_file_which_overrides_defaults() {
        let (_folder, path) = run_file("[optimizer]\nlr = 0.5\nadam_beta1 = 0.7\n");
        let gathered = gathered(&[&path, "--lr", "0.25"]);
        let optimizer = &gathered.flags.optimizer;
        assert_eq!(
            (optimizer.lr, optimizer.adam_beta1, optimizer.adam_beta2),
            (Some(0.25), 0.7, 0.999)
        );
        assert_eq!(gathered.origins["lr"], "--lr");
        assert_eq!(gathered.origins["adam_beta1"], format!("{path}:3"));
        assert!(!gathered.origins.contains_key("adam_beta2"));
    }

    #[test]
    fn a_flag_overrides_what_the_run_file_says_in_another_unit() {
        let (_folder, path) = run_file(
            "[training]\ntrain_iters = 5\n[optimizer]\nlr_warmup_iters = 2\nlr_decay_iters = 4\n",
        );
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
        assert_eq!(
            gathered(&["--config", &path, "--data-path", "c", "d"]).flags.data.data_path,
            ["c", "d"]
        );
    }

    #[test]
    fn the_last_of_a_repeated_flag_counts() {
        let flags = gathered(&["--lr=1", "--bf16", "--lr", "2", "--bf16=false"]).flags;
        assert_eq!((flags.optimizer.lr, flags.training.precision.bf16), (Some(2.0), false));
        let words = [
            "--data-path",
            "a",
            "b",
            "--profile-ranks=1",
            "--lr=1",
            "--data-path",
            "c",
            "d",
            "--profile-ranks",
            "2",
        ];
        let flags = gathered(&words).flags;
        assert_eq!(
            (flags.data.data_path, flags.logging.profile_ranks),
            (vec!["c".into(), "d".into()], vec![2])
        );
        let flags =
            gathered(&["--rampup-batch-size", "1", "2", "3", "--rampup-batch-size", "4", "5", "6"])
                .flags;
        assert_eq!(flags.training.rampup_batch_size, [4, 5, 6]);
    }

    #[test]
    fn underscores_in_flags_are_dashes_in_every_command() {
        assert_eq!(
            gathered(&["--num_layers=3", "--adam_beta1", "0.5"]).flags.model.num_layers,
            Some(3)
        );
        let words = ["megatron", "launch", "--nproc_per_node", "3", "--", "x", "--flag_of_another"]
            .map(OsString::from);
        match parse(&words).unwrap() {
            Request::Launch(launch) => {
                assert_eq!(
                    (launch.nproc_per_node, launch.command),
                    (3, vec!["x".into(), "--flag_of_another".into()])
                );
            }
            _ => unreachable!(),
        }
        let words = ["megatron", "bench", "step", "--warm_up=1"].map(OsString::from);
        assert!(message(&words).contains("--warm_up: no such flag"));
    }

    fn message(words: &[OsString]) -> String {
        match parse(words).unwrap_err() {
            Stop::Error(error) => error.to_string(),
            Stop::Clap(error) => error.to_string(),
        }
    }

    fn refused(words: &[&str]) -> String {
        let words: Vec<OsString> =
            ["megatron", "pretrain"].iter().chain(words).map(OsString::from).collect();
        message(&words)
    }

    #[test]
    fn all_names_that_cannot_be_used_are_told_at_once() {
        let (_folder, path) =
            run_file("[model]\nnum_layer = 4\nnum_experts = 8\n[training]\ntrain_batch_size = 8\n");
        let text = refused(&[
            &path,
            "--hiden-size",
            "4",
            "--banana",
            "--moe-router-topk",
            "2",
            "--optimizer",
            "muon",
        ]);
        let parts = [
            "--hiden-size: no such flag; did you mean --hidden-size?",
            "--banana: no such flag; --help lists",
            "--moe-router-topk 2: mixture of experts is not supported",
            "--optimizer muon: only AdamW",
            "run.toml:2: unknown key `num_layer` under [model]; did you mean `num_layers`?",
            "run.toml:3: `num_experts`: mixture of experts is not supported",
            "run.toml:5: `train_batch_size`: use --global-batch-size",
        ];
        for part in parts {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
        assert_eq!(
            refused(&["--lr-wramup-iters=3"]),
            "--lr-wramup-iters: no such flag; did you mean --lr-warmup-iters?"
        );
        for (flag, instead) in
            [("--tp-size", "--tensor-model-parallel-size"), ("--num-train-epochs", "--train-iters")]
        {
            assert!(
                refused(&[flag, "2"]).starts_with(&format!("{flag} 2: use {instead}")),
                "{flag}"
            );
        }
    }

    #[test]
    fn what_changes_nothing_is_passed_over_with_its_values() {
        let (_folder, path) = run_file("[model]\ntransformer_impl = \"local\"\nswiglu = true\n");
        let words = [
            "--use-mcore-models",
            &path,
            "--cp-comm-type",
            "a2a",
            "p2p",
            "--logging-level=0",
            "--num_workers",
            "6",
        ];
        let gathered = gathered(&[&words[..], &["--no-bias-gelu-fusion", "--lr", "0.5"]].concat());
        assert_eq!(gathered.flags.optimizer.lr, Some(0.5));
        let names = ["--use-mcore-models", "--cp-comm-type", "--logging-level", "--num_workers"];
        assert_eq!(
            gathered.passed_over,
            [&names[..], &["--no-bias-gelu-fusion", "transformer_impl"]].concat()
        );
    }

    #[test]
    fn flags_of_other_names_say_the_same_and_override_the_run_file() {
        let (_folder, path) = run_file(
            "[data]\ndata_cache_path = \"a\"\n[training]\nrecompute_granularity = \"full\"\n",
        );
        let flags = gathered(&[
            &path,
            "--recompute-activations",
            "--window-size",
            "15,0",
            "--layernorm_epsilon=1",
        ])
        .flags;
        assert_eq!(flags.data.cache_dir, Some("a".into()));
        assert_eq!(
            flags.training.recompute.recompute_granularity,
            Some(crate::cli::flags::Granularity::Selective)
        );
        assert_eq!((flags.model.sliding_window, flags.model.norm_epsilon), (Some(16), 1.0));
    }

    #[test]
    fn a_switch_with_a_word_behind_it_says_what_was_meant() {
        let text =
            refused(&["--no-load-optim", "true", "--bf16", "False", "--use-flash-attn", "true"]);
        for part in
            ["write --no-load-optim=true", "write --bf16=false", "write --use-flash-attn alone"]
        {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
    }

    #[test]
    fn help_comes_before_what_is_wrong() {
        assert!(refused(&["--banana", "--help"]).contains("--num-layers <N>"));
    }
}
