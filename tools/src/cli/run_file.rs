//! Run files: TOML with the flags of `pretrain` as keys, in sections.
//!
//! A file is turned into equivalent words of a command line, so that one set of definitions parses
//! both.

use std::path::Path;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgAction, Command};
use megatron::files;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::flags::{has_type, sections};
use super::nearest::nearest;
use super::other_names::{self, Entry, Line, Verdict};
use super::words::is_named;
use crate::error::{Error, Result};

/// Largest file of settings, in bytes.
const MAX_BYTES: u64 = 16 << 20;

/// `arg` in a command of its own, without the flags that it may override there.
pub(super) fn alone(arg: &Arg) -> Arg {
    arg.clone().overrides_with(clap::builder::Resettable::<clap::Id>::Reset)
}

/// One key of a run file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The flag's id: its name in snake_case.
    pub key: String,
    pub section: &'static str,
    /// Line in the file, from 1.
    pub line: usize,
    /// The same setting as words of a command line, e.g. `--num-layers=4`.
    pub words: Vec<String>,
}

impl Setting {
    /// A setting from `word`, a flag with its value.
    pub fn of(word: String, line: usize) -> Self {
        let name = word.split('=').next().unwrap_or_default();
        let key = name.trim_start_matches('-').replace('-', "_");
        let section = owner_of(&sections(), &key).map_or("", |(section, _)| section);
        Self { key, section, line, words: vec![word] }
    }
}

/// A key of another program.
#[derive(Debug)]
pub struct OtherKey {
    pub key: String,
    pub line: usize,
    pub values: Vec<String>,
    pub entry: &'static Entry,
}

/// The contents of a run file.
#[derive(Debug, Default)]
pub struct RunFile {
    pub settings: Vec<Setting>,
    pub others: Vec<OtherKey>,
    /// Errors, by line.
    pub problems: Vec<Problem>,
    /// All settings in the file, for flags of other programs to refer to.
    pub line: Line,
}

/// Reads the run file at `path`.
///
/// # Errors
/// If it cannot be read, or is not TOML. Other errors are reported together with those of the
/// command line.
pub fn read(path: &Path) -> Result<RunFile> {
    // A pipe is refused, because every rank reads the file and only one could read a pipe.
    let text = files::read_text(path, MAX_BYTES).map_err(|source| {
        Error::usage(format!("cannot read the run file {}: {source}", path.display()))
    })?;
    parse(&text).map_err(|(line, message)| Error::RunFile {
        path: path.to_path_buf(),
        line,
        message,
    })
}

/// A line and its error.
pub type Problem = (usize, String);

/// Reads the text of a run file.
pub(super) fn parse(text: &str) -> std::result::Result<RunFile, Problem> {
    let line_of = |at: usize| {
        text.as_bytes()[..at.min(text.len())].iter().filter(|&&b| b == b'\n').count() + 1
    };
    let document = DeTable::parse(text).map_err(|e| {
        (line_of(e.span().map_or(0, |s| s.start)), format!("not valid TOML: {}", e.message()))
    })?;
    let sections = sections();
    let mut file = RunFile::default();
    for (name, value) in document.get_ref() {
        let line = line_of(name.span().start);
        let found = find_section(&sections, name.get_ref(), value).and_then(|section| match value
            .get_ref()
        {
            DeValue::Table(table) => Ok((section, table)),
            _ => Err(format!("`{}` must be a section: [{}]", name.get_ref(), name.get_ref())),
        });
        let (section, table) = match found {
            Ok(found) => found,
            Err(message) => {
                file.problems.push((line, message));
                continue;
            }
        };
        for (key, value) in table {
            file.add(&sections, section, key.get_ref(), value, line_of(key.span().start));
        }
    }
    file.settings.sort_by_key(|s| s.line);
    file.others.sort_by_key(|other| other.line);
    file.problems.sort();
    Ok(file)
}

impl RunFile {
    fn add(
        &mut self,
        sections: &Sections,
        section: &(&'static str, Vec<Arg>),
        key: &str,
        value: &Spanned<DeValue<'_>>,
        line: usize,
    ) {
        let name = other_names::with_dashes(key);
        let is_ours = sections.iter().any(|(_, args)| args.iter().any(|arg| is_named(arg, &name)));
        if let (false, Some(entry)) = (is_ours, other_names::find(&name)) {
            let values = texts(value.get_ref());
            self.line.add(&name, &values);
            return self.others.push(OtherKey { key: key.to_string(), line, values, entry });
        }
        match setting(sections, section, key, value) {
            Ok((id, words)) => match self.settings.iter().find(|s| s.key == id) {
                Some(twice) => self
                    .problems
                    .push((line, format!("`{id}` is already set in line {}", twice.line))),
                None => {
                    self.line.add(&id.replace('_', "-"), &texts(value.get_ref()));
                    self.settings.push(Setting { key: id, section: section.0, line, words });
                }
            },
            Err(message) => self.problems.push((line, message)),
        }
    }
}

/// The strings, numbers and booleans in a value.
fn texts(value: &DeValue<'_>) -> Vec<String> {
    match value {
        DeValue::Array(items) => items.iter().flat_map(|item| texts(item.get_ref())).collect(),
        DeValue::String(x) => vec![x.to_string()],
        other => vec![show(other)],
    }
}

type Sections = [(&'static str, Vec<Arg>)];

fn section_names(sections: &Sections) -> String {
    sections.iter().map(|(name, _)| format!("[{name}]")).collect::<Vec<_>>().join(" ")
}

fn find_section<'a>(
    sections: &'a Sections,
    name: &str,
    value: &Spanned<DeValue<'_>>,
) -> std::result::Result<&'a (&'static str, Vec<Arg>), String> {
    if let Some(section) = sections.iter().find(|(known, _)| *known == name) {
        return Ok(section);
    }
    if !value.get_ref().is_table() {
        if let Some((owner, _)) = owner_of(sections, name) {
            return Err(format!("`{name}` is outside of any section; it belongs under [{owner}]"));
        }
        if let Some(why) = refused(name) {
            return Err(format!("`{name}`: {why}"));
        }
        let hint = nearest_key(sections, name)
            .map(|(key, owner)| format!("; did you mean `{key}` under [{owner}]?"));
        return Err(format!(
            "unknown key `{name}` outside of a section{}",
            hint.unwrap_or_default()
        ));
    }
    if let Some(why) = refused(name) {
        return Err(format!("unknown section [{name}]; {why}"));
    }
    let hint = match nearest(name, sections.iter().map(|(known, _)| *known)) {
        Some(known) => format!("did you mean [{known}]?"),
        None => format!("the sections are {}", section_names(sections)),
    };
    Err(format!("unknown section [{name}]; {hint}"))
}

/// Why a section of another program, or its key outside of any section, is refused.
fn refused(name: &str) -> Option<&'static str> {
    match other_names::find(&other_names::with_dashes(name))?.judge(&[], &Line::default()) {
        Verdict::Refused(why) => Some(why),
        _ => None,
    }
}

fn owner_of<'a>(sections: &'a Sections, key: &str) -> Option<(&'static str, &'a Arg)> {
    let name = other_names::with_dashes(key);
    sections.iter().find_map(|(owner, args)| {
        args.iter().find(|arg| is_named(arg, &name)).map(|arg| (*owner, arg))
    })
}

fn nearest_key(sections: &Sections, key: &str) -> Option<(String, &'static str)> {
    let ids = || {
        sections
            .iter()
            .flat_map(|(_, args)| args)
            .filter(|a| !a.is_hide_set())
            .map(|a| a.get_id().as_str())
    };
    let key = nearest(&key.replace('-', "_"), ids())?.to_string();
    let (owner, _) = owner_of(sections, &key)?;
    Some((key, owner))
}

/// The id of `key` and the words that set it to `value`.
fn setting(
    sections: &Sections,
    (section, args): &(&'static str, Vec<Arg>),
    key: &str,
    value: &Spanned<DeValue<'_>>,
) -> std::result::Result<(String, Vec<String>), String> {
    let name = other_names::with_dashes(key);
    let Some(arg) = args.iter().find(|arg| is_named(arg, &name)) else {
        if let Some((owner, _)) = owner_of(sections, key) {
            return Err(format!("`{key}` belongs under [{owner}], not under [{section}]"));
        }
        let hint = match nearest_key(sections, key) {
            Some((known, owner)) if owner == *section => format!("; did you mean `{known}`?"),
            Some((known, owner)) => format!("; did you mean `{known}` under [{owner}]?"),
            None => "; `megatron pretrain --help` lists the keys".to_string(),
        };
        return Err(format!("unknown key `{key}` under [{section}]{hint}"));
    };
    let (id, flag) = (arg.get_id().to_string(), arg.get_long().unwrap_or_default());
    let values = values(arg, value.get_ref()).map_err(|expected| {
        format!("`{key}` under [{section}] expects {expected}, not {}", show(value.get_ref()))
    })?;
    let all_at_once = arg.get_num_args().is_some_and(|number| number.min_values() > 1);
    let words: Vec<String> = match all_at_once {
        true => std::iter::once(format!("--{flag}")).chain(values).collect(),
        false => values.into_iter().map(|text| format!("--{flag}={text}")).collect(),
    };
    let mut line = vec!["file".to_string()];
    line.extend(words.iter().cloned());
    if let Err(refused) = Command::new("file").arg(alone(arg)).try_get_matches_from(line) {
        return Err(format!(
            "`{key}` under [{section}] cannot be {}: {}",
            show(value.get_ref()),
            reason(&refused)
        ));
    }
    Ok((id, words))
}

/// The words for the flag that are equivalent to `value`, or the kind of value that is expected.
fn values(arg: &Arg, value: &DeValue<'_>) -> std::result::Result<Vec<String>, String> {
    let is_list = matches!(arg.get_action(), ArgAction::Append);
    let is_bool = has_type::<bool>(arg);
    let is_integer = has_type::<usize>(arg) || has_type::<u64>(arg) || has_type::<i64>(arg);
    let is_number = has_type::<f64>(arg);
    match value {
        DeValue::Boolean(x) if is_bool => Ok(vec![x.to_string()]),
        DeValue::Integer(x) if is_integer || is_number => Ok(vec![decimal(x)]),
        DeValue::Float(x) if is_number => Ok(vec![x.as_str().to_string()]),
        DeValue::String(x) if !is_bool && !is_integer && !is_number => Ok(vec![x.to_string()]),
        DeValue::Array(items) if is_list => {
            let (kind, text): (_, fn(&DeValue<'_>) -> Option<String>) = match is_integer {
                true => ("a list of whole numbers", |item| item.as_integer().map(decimal)),
                false => ("a list of strings", |item| item.as_str().map(str::to_string)),
            };
            let text = |item: &Spanned<DeValue<'_>>| {
                text(item.get_ref())
                    .ok_or_else(|| format!("{kind}, without {}", show(item.get_ref())))
            };
            items.iter().map(text).collect()
        }
        // To the user these are lists of numbers.
        DeValue::Array(items)
            if ["split", "pipeline_partition"].contains(&arg.get_id().as_str()) =>
        {
            let parts: Option<Vec<String>> =
                items.iter().map(|item| number(item.get_ref())).collect();
            parts
                .map(|p| vec![p.join(",")])
                .ok_or_else(|| "a string or a list of numbers".to_string())
        }
        _ if is_bool => Err("true or false".to_string()),
        _ if is_integer && is_list => Err("a whole number or a list of them".to_string()),
        _ if is_integer => Err("a whole number".to_string()),
        _ if is_number => Err("a number".to_string()),
        _ if is_list => Err("a string or a list of strings".to_string()),
        _ if arg_has_choices(arg) => Err(format!("one of {}", choices(arg))),
        _ => Err("a string".to_string()),
    }
}

fn arg_has_choices(arg: &Arg) -> bool {
    !arg.get_possible_values().is_empty()
}

fn choices(arg: &Arg) -> String {
    arg.get_possible_values()
        .iter()
        .map(|v| v.get_name().to_string())
        .collect::<Vec<_>>()
        .join(", ")
}

fn number(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::Integer(x) => Some(decimal(x)),
        DeValue::Float(x) => Some(x.as_str().to_string()),
        _ => None,
    }
}

/// TOML's integers may be written in other bases.
fn decimal(x: &toml::de::DeInteger<'_>) -> String {
    i128::from_str_radix(x.as_str(), x.radix())
        .map_or_else(|_| x.as_str().to_string(), |n| n.to_string())
}

fn show(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(x) => format!("the string \"{x}\""),
        DeValue::Integer(x) => decimal(x),
        DeValue::Float(x) => x.as_str().to_string(),
        DeValue::Boolean(x) => x.to_string(),
        DeValue::Datetime(x) => format!("the date {x}"),
        DeValue::Array(_) => "a list".to_string(),
        DeValue::Table(_) => "a section".to_string(),
    }
}

/// Why the flag's parser refused a value, without the command line's framing.
fn reason(error: &clap::Error) -> String {
    if let Some(ContextValue::Strings(known)) = error.get(ContextKind::ValidValue) {
        return format!("expected one of {}", known.join(", "));
    }
    if let Some(because) = super::no_number(error) {
        return because.to_string();
    }
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error
            .to_string()
            .lines()
            .next()
            .unwrap_or_default()
            .trim_start_matches("error: ")
            .to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        let file = parse(text).unwrap();
        assert_eq!(file.problems, []);
        file.settings.into_iter().flat_map(|s| s.words).collect()
    }

    fn problem(text: &str) -> (usize, String) {
        match parse(text) {
            Ok(file) => file.problems[0].clone(),
            Err(problem) => problem,
        }
    }

    #[test]
    fn keys_become_the_words_of_their_flags() {
        let text = "[model]\nnum_layers = 0x10\nswiglu = true\nnorm_epsilon = 1e-6\n[data]\ndata-path = [\"a b\", \"-c\"]\n";
        let expected = [
            "--num-layers=16",
            "--swiglu=true",
            "--norm-epsilon=1e-6",
            "--data-path=a b",
            "--data-path=-c",
        ];
        assert_eq!(words(text), expected);
    }

    #[test]
    fn lists_of_numbers_are_accepted_where_a_flag_takes_commas() {
        let text = "[parallel]\npipeline_partition = [3, 4]\n[data]\nsplit = [0.9, 0.1]";
        assert_eq!(words(text), ["--pipeline-partition=3,4", "--split=0.9,0.1"]);
    }

    #[test]
    fn lists_hold_what_their_flags_take() {
        let text = "[logging]\nprofile_ranks = [0, 3]";
        assert_eq!(words(text), ["--profile-ranks=0", "--profile-ranks=3"]);
        let (line, message) = problem("[logging]\nprofile_ranks = [0, \"1\"]");
        let expected = "`profile_ranks` under [logging] expects a list of whole numbers, without the string \"1\"";
        assert!(line == 2 && message.starts_with(expected), "{message}");
        assert_eq!(
            problem("[checkpoint]\nsave = [1, 2]").1,
            "`save` under [checkpoint] expects a string, not a list"
        );
    }

    #[test]
    fn an_unknown_key_names_its_line_and_the_nearest_key() {
        let (line, message) = problem("[model]\n\nnum_layer = 4\n");
        assert_eq!(
            (line, message.as_str()),
            (3, "unknown key `num_layer` under [model]; did you mean `num_layers`?")
        );
    }

    #[test]
    fn a_key_in_the_wrong_section_names_the_right_one() {
        assert_eq!(
            problem("[model]\nlr = 1").1,
            "`lr` belongs under [optimizer], not under [model]"
        );
        assert_eq!(
            problem("lr = 1").1,
            "`lr` is outside of any section; it belongs under [optimizer]"
        );
    }

    #[test]
    fn an_unknown_section_names_the_nearest() {
        assert_eq!(
            problem("[optimiser]\nlr = 1").1,
            "unknown section [optimiser]; did you mean [optimizer]?"
        );
    }

    #[test]
    fn a_value_of_the_wrong_type_names_the_expected_one() {
        let (line, message) = problem("[model]\nnum_layers = \"four\"");
        assert_eq!(line, 2);
        assert_eq!(
            message,
            "`num_layers` under [model] expects a whole number, not the string \"four\""
        );
        assert_eq!(
            problem("[model]\nswiglu = 1").1,
            "`swiglu` under [model] expects true or false, not 1"
        );
        assert_eq!(
            problem("[model]\nnum_layers = 4.5").1,
            "`num_layers` under [model] expects a whole number, not 4.5"
        );
    }

    #[test]
    fn a_value_that_the_flag_refuses_says_why() {
        let message = problem("[parallel]\npipeline_schedule = \"1fb1\"").1;
        assert_eq!(
            message,
            "`pipeline_schedule` under [parallel] cannot be the string \"1fb1\": expected one of gpipe, 1f1b, interleaved"
        );
        assert!(problem("[model]\nnum_layers = -4").1.contains("cannot be -4"));
    }

    #[test]
    fn a_key_spelled_two_ways_is_set_twice() {
        assert!(
            problem("[model]\nnum_layers = 4\nnum-layers = 5").1.contains("already set in line")
        );
    }

    #[test]
    fn a_syntax_error_names_its_line() {
        let (line, message) = problem("[model]\nnum_layers = \n");
        assert_eq!(line, 2);
        assert!(message.starts_with("not valid TOML"), "{message}");
    }
}
