//! Every setting of `pretrain`, defined once: name, type, default, help, and the section it belongs
//! to.
//!
//! The command line, the run file, `--help` and error messages all use these definitions. A key of
//! the run file is the flag's name in snake_case, and its value is parsed like the flag's.

mod data;
mod deepspeed_schedule;
mod model;
mod optimizer;
mod parallel;
mod tokenizer;
mod training;

use std::any::TypeId;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Arg, Args, Command};
use serde::de::DeserializeOwned;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as ValueError, StrDeserializer};

pub use data::{CheckpointFlags, DataFlags, LoggingFlags};
pub use deepspeed_schedule::{DeepSpeedScheduleFlags, LrScheduleName, MEGATRON_SCHEDULE};
pub use model::ModelFlags;
pub use optimizer::{IncreaseStyle, MomentFlags, OptimizerFlags};
pub use parallel::{LayoutFlags, ParallelFlags, STRATEGIES};
pub use tokenizer::{ChosenTokenizer, TokenizerFlags};
pub use training::{Granularity, PrecisionFlags, RecomputeFlags, TrainingFlags};

/// All settings of a run.
#[derive(Args, Clone, Debug)]
pub struct Flags {
    #[command(flatten)]
    pub model: ModelFlags,
    #[command(flatten)]
    pub parallel: ParallelFlags,
    #[command(flatten)]
    pub data: DataFlags,
    #[command(flatten)]
    pub training: TrainingFlags,
    #[command(flatten)]
    pub optimizer: OptimizerFlags,
    #[command(flatten)]
    pub checkpoint: CheckpointFlags,
    #[command(flatten)]
    pub logging: LoggingFlags,
}

/// The flags of a layout.
pub fn layout_args() -> Vec<Arg> {
    args_of::<LayoutFlags>()
}

/// The sections of a run file, in the order of `--help`, each with its settings.
pub fn sections() -> Vec<(&'static str, Vec<Arg>)> {
    vec![
        ("model", args_of::<ModelFlags>()),
        ("parallel", args_of::<ParallelFlags>()),
        ("data", args_of::<DataFlags>()),
        ("training", args_of::<TrainingFlags>()),
        ("optimizer", args_of::<OptimizerFlags>()),
        ("checkpoint", args_of::<CheckpointFlags>()),
        ("logging", args_of::<LoggingFlags>()),
    ]
}

fn args_of<T: Args>() -> Vec<Arg> {
    T::augment_args(Command::new("section")).get_arguments().cloned().map(with_switches).collect()
}

/// Gives every boolean flag the form `--flag` or `--flag=true|false`, so that a flag can turn off
/// what the run file turns on.
pub fn with_switches(arg: Arg) -> Arg {
    if !has_type::<bool>(&arg) {
        return arg;
    }
    arg.num_args(0..=1)
        .require_equals(true)
        .default_missing_value("true")
        .value_name("true|false")
        .hide_possible_values(true)
}

/// Whether the values of `arg` are parsed to `T`.
pub fn has_type<T: 'static>(arg: &Arg) -> bool {
    arg.get_value_parser().type_id() == TypeId::of::<T>()
}

/// Parses one of `values` into an enum of the configuration, by its serialized name.
fn choice<T>(values: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: DeserializeOwned + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(values).try_map(|name| {
        let name: StrDeserializer<'_, ValueError> = name.as_str().into_deserializer();
        T::deserialize(name)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_key_belongs_to_one_section_and_is_the_name_of_its_flag() {
        let mut seen = BTreeSet::new();
        for (_, args) in sections() {
            for arg in args {
                let key = arg.get_id().to_string();
                assert_eq!(arg.get_long(), Some(key.replace('_', "-").as_str()));
                assert!(arg.get_help().is_some(), "{key} has no help");
                assert!(seen.insert(key.clone()), "{key} is in two sections");
            }
        }
        assert!(seen.len() > 60);
    }

    #[test]
    fn every_choice_names_a_value_of_its_enum() {
        for (_, args) in sections() {
            for arg in args {
                let name = arg.get_long().unwrap_or_default().to_string();
                for value in arg.get_possible_values() {
                    let word = format!("--{name}={}", value.get_name());
                    let parsed = Command::new("one")
                        .arg(crate::cli::run_file::alone(&arg))
                        .try_get_matches_from(["one", &word]);
                    assert!(parsed.is_ok(), "{word}: {parsed:?}");
                }
            }
        }
    }
}
