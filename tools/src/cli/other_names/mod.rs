//! How to treat flags of Megatron-LM, DeepSpeed, Hugging Face and torchrun that this program does
//! not have.
//!
//! A flag that cannot change a result here is ignored. A flag that could change a result, or that
//! asks for an unsupported feature, is refused with the reason. A flag that has another name here
//! is an alias in [`super::flags`] instead. docs/reference/from-megatron-lm.md lists the same
//! flags.

mod capabilities;
mod files;
mod launchers;
mod model;
mod parallel;
mod programs;
mod reports;
#[cfg(test)]
mod tests;
mod training;
mod values;

use std::collections::BTreeMap;

/// Pages of docs/reference.
pub const MEGATRON_LM: &str = "from-megatron-lm.md";
const DEEPSPEED: &str = "from-deepspeed.md";
const TORCHRUN: &str = "from-torchrun.md";

pub use launchers::instead_of_launchers;
pub use programs::instead_of_generators;
pub use values::refused_value;

/// How many words a flag takes after it, in Megatron-LM's parser.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    Nothing,
    One,
    /// Up to the next flag.
    Several,
}

/// How to treat a group of flags, and why.
#[derive(Debug)]
pub struct Entry {
    /// Names without leading dashes, separated by spaces; `*` at the end matches any rest.
    names: &'static str,
    pub takes: Takes,
    what: What,
    because: &'static str,
}

#[derive(Debug)]
enum What {
    LeaveOut,
    Refuse,
    /// Ignored with these values, refused with others.
    Unless(&'static [&'static str]),
    /// Refused if one of these flags is given, because Megatron-LM reads it only then; otherwise
    /// ignored.
    With(&'static str),
    /// A switch that is on unless another flag turns it off. It cannot be turned off here.
    On,
    Judged(fn(&Given<'_>) -> Verdict),
}

/// The decision for a flag as it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The flag has no effect here.
    PassedOver,
    /// With the reason.
    Refused(&'static str),
    /// The equivalent words of this program.
    Words(Vec<String>),
}

/// A flag as it was given, with the whole command line.
#[derive(Debug)]
pub struct Given<'a> {
    pub values: &'a [String],
    pub line: &'a Line,
    because: &'static str,
}

impl Given<'_> {
    fn refused(&self) -> Verdict {
        Verdict::Refused(self.because)
    }
}

/// All given settings of a run: values by name with dashes.
#[derive(Clone, Debug, Default)]
pub struct Line(BTreeMap<String, Vec<String>>);

impl Line {
    /// The last value counts.
    pub fn add(&mut self, name: &str, values: &[String]) {
        self.0.insert(name.to_string(), values.to_vec());
    }

    /// Adds all of this to `other` without replacing settings.
    pub fn put_under(self, other: &mut Self) {
        self.0.into_iter().for_each(|(name, values)| {
            other.0.entry(name).or_insert(values);
        });
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|values| values.first().is_none_or(|value| !is_off(value)))
    }

    pub fn value(&self, name: &str) -> Option<&str> {
        self.0.get(name)?.first().map(String::as_str)
    }
}

/// Whether `value` turns a switch off.
pub fn is_off(value: &str) -> bool {
    value.eq_ignore_ascii_case("false")
}

const fn leave_out(takes: Takes, because: &'static str, names: &'static str) -> Entry {
    Entry { names, takes, what: What::LeaveOut, because }
}

/// The values do not matter, because the run does not start.
const fn refuse(because: &'static str, names: &'static str) -> Entry {
    Entry { names, takes: Takes::Several, what: What::Refuse, because }
}

const fn unless(
    values: &'static [&'static str],
    because: &'static str,
    names: &'static str,
) -> Entry {
    Entry { names, takes: Takes::Several, what: What::Unless(values), because }
}

const fn with(
    flags: &'static str,
    takes: Takes,
    because: &'static str,
    names: &'static str,
) -> Entry {
    Entry { names, takes, what: What::With(flags), because }
}

const fn on(because: &'static str, names: &'static str) -> Entry {
    Entry { names, takes: Takes::Nothing, what: What::On, because }
}

const fn judged(
    takes: Takes,
    judge: fn(&Given<'_>) -> Verdict,
    because: &'static str,
    names: &'static str,
) -> Entry {
    Entry { names, takes, what: What::Judged(judge), because }
}

impl Entry {
    /// The page of docs/reference about the program that has this flag.
    pub fn page(&self) -> &'static str {
        let is_in = |table: &[Self]| table.iter().any(|entry| entry.names == self.names);
        match () {
            () if is_in(programs::DEEPSPEED) => DEEPSPEED,
            () if is_in(programs::HUGGING_FACE) => TORCHRUN,
            () => MEGATRON_LM,
        }
    }

    pub fn judge(&self, values: &[String], line: &Line) -> Verdict {
        let refused_if = |refused: bool| {
            if refused { Verdict::Refused(self.because) } else { Verdict::PassedOver }
        };
        match self.what {
            What::On => refused_if(values.first().is_some_and(|value| is_off(value))),
            // `--switch=false`, or a run file's `switch = false`.
            _ if matches!(values, [value] if is_off(value)) => Verdict::PassedOver,
            What::LeaveOut => Verdict::PassedOver,
            What::Refuse => Verdict::Refused(self.because),
            What::Unless(known) => {
                refused_if(!values.iter().all(|value| known.iter().any(|k| same_value(k, value))))
            }
            What::With(flags) => refused_if(flags.split(' ').any(|flag| line.has(flag))),
            What::Judged(judge) => judge(&Given { values, line, because: self.because }),
        }
    }
}

/// Whether two values are the same text or number.
fn same_value(a: &str, b: &str) -> bool {
    a == b || matches!((a.parse::<f64>(), b.parse::<f64>()), (Ok(a), Ok(b)) if a == b)
}

const TABLES: [&[Entry]; 9] = [
    model::TABLE,
    training::TABLE,
    parallel::TABLE,
    files::TABLE,
    reports::TABLE,
    capabilities::TABLE,
    programs::DEEPSPEED,
    programs::SIZES,
    programs::HUGGING_FACE,
];

fn entries() -> impl Iterator<Item = &'static Entry> {
    TABLES.into_iter().flatten()
}

/// The entry for a flag or run-file key that `pretrain` does not have, by its name with dashes.
pub fn find(name: &str) -> Option<&'static Entry> {
    let exact = entries().find(|entry| entry.names.split_whitespace().any(|known| known == name));
    exact.or_else(|| {
        entries().find(|entry| {
            let mut beginnings =
                entry.names.split_whitespace().filter_map(|known| known.strip_suffix('*'));
            beginnings.any(|beginning| name.starts_with(beginning))
        })
    })
}

/// The name with inner dashes instead of underscores, without leading dashes.
pub fn with_dashes(name: &str) -> String {
    name.trim_start_matches('-').replace('_', "-")
}

/// The line that lists the flags that a run ignores, if any.
pub fn passed_over(flags: &[String]) -> Option<String> {
    let what = match flags.len() {
        0 => return None,
        1 => "1 flag of Megatron-LM has no effect here".to_string(),
        n => format!("{n} flags of Megatron-LM have no effect here"),
    };
    Some(format!("{what}: {}", flags.join(", ")))
}
