//! Prepares the words of a command line for the parser: applies argparse's conventions and handles
//! flags of other programs.
//!
//! `--flag_name` is `--flag-name`. If a list is given twice, the last one counts. Flags that the
//! command does not have are removed, and then ignored or refused all at once.

use std::ffi::{OsStr, OsString};

use clap::{Arg, ArgAction, Command};

use super::nearest::nearest;
use super::other_names::{self, Entry, Line, Takes, Verdict};
use super::problems::Problems;

/// Which flags of other programs are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// Flags of training programs.
    Trainers,
    /// Flags of launchers; their command line ends with the command to start.
    Launchers,
    /// Flags of text generators.
    Generators,
    None,
}

/// Words, sorted.
#[derive(Debug, Default)]
pub struct Words {
    /// Words of the command's own flags and arguments.
    pub own: Vec<OsString>,
    /// Flags of other programs, in the order given.
    pub others: Vec<Other>,
    /// Everything that was given.
    pub line: Line,
    pub problems: Problems,
}

/// A flag of another program as it was given.
#[derive(Debug)]
pub struct Other {
    pub shown: String,
    pub values: Vec<String>,
    pub entry: &'static Entry,
}

impl Other {
    pub fn judge(&self, line: &Line) -> Verdict {
        self.entry.judge(&self.values, line)
    }

    /// As it was typed.
    pub fn with_values(&self) -> String {
        std::iter::once(&self.shown).chain(&self.values).cloned().collect::<Vec<_>>().join(" ")
    }
}

/// Sorts the words that follow the name of `command`.
pub fn sort(command: &Command, words: &[OsString], others: Others) -> Words {
    let mut sorter =
        Sorter { command, others, rest: words, sorted: Words::default(), lists: Vec::new() };
    sorter.sort();
    sorter.sorted
}

struct Sorter<'a> {
    command: &'a Command,
    others: Others,
    rest: &'a [OsString],
    sorted: Words,
    /// Position of the last occurrence of each list in `own`.
    lists: Vec<(String, std::ops::Range<usize>)>,
}

impl<'a> Sorter<'a> {
    fn sort(&mut self) {
        while let Some((word, rest)) = self.rest.split_first() {
            self.rest = rest;
            match word.to_str().and_then(|text| text.strip_prefix("--")) {
                Some("") => {
                    self.sorted.own.push(word.clone());
                    self.sorted.own.extend_from_slice(std::mem::take(&mut self.rest));
                }
                Some(flag) => self.flag(flag),
                None => {
                    // As with torchrun, the command begins at the first word that does not belong
                    // to a flag.
                    let begins_command = self.others == Others::Launchers && !is_short_flag(word);
                    if begins_command {
                        self.sorted.own.push("--".into());
                    }
                    self.sorted.own.push(word.clone());
                    if begins_command {
                        self.sorted.own.extend_from_slice(std::mem::take(&mut self.rest));
                    }
                }
            }
        }
    }

    fn flag(&mut self, flag: &str) {
        let (name, attached) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (flag, None),
        };
        let name = other_names::with_dashes(name);
        if let Some(arg) = self.command.get_arguments().find(|arg| is_named(arg, &name)) {
            return self.own(arg, attached);
        }
        // clap adds these itself while parsing.
        if matches!(name.as_str(), "help" | "version") {
            return self.sorted.own.push(format!("--{flag}").into());
        }
        let shown = format!("--{}", flag.split('=').next().unwrap_or_default());
        match self.others {
            Others::Trainers => {
                if let Some(entry) = other_names::find(&name) {
                    return self.other(shown, &name, attached, entry);
                }
            }
            Others::Launchers => {
                if let Some((instead, page)) = other_names::instead_of_launchers(&name) {
                    self.take(Takes::One);
                    return self.sorted.problems.of_others(&shown, instead, page);
                }
            }
            Others::Generators => {
                if let Some(instead) = other_names::instead_of_generators(&name) {
                    self.take(Takes::Several);
                    return self.sorted.problems.of_others(
                        &shown,
                        instead,
                        other_names::MEGATRON_LM,
                    );
                }
            }
            Others::None => {}
        }
        self.take(if self.others == Others::Launchers { Takes::One } else { Takes::Several });
        let known =
            self.command.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(Arg::get_long);
        self.sorted
            .problems
            .unknown(&shown, nearest(&name, known).map(|known| format!("--{known}")));
    }

    /// Handles a flag of the command.
    fn own(&mut self, arg: &'a Arg, attached: Option<&str>) {
        let long = arg.get_long().unwrap_or_default();
        let values = match attached {
            Some(value) => vec![value.to_string()],
            None => self.following(),
        };
        let is_switch = !arg.get_action().takes_values() || arg.is_require_equals_set();
        let values =
            if is_switch { attached.map(str::to_string).into_iter().collect() } else { values };
        if is_switch && attached.is_none() {
            self.refuse_stray_value(long, arg.is_require_equals_set());
        }
        if let Some(because) =
            values.first().and_then(|value| other_names::refused_value(long, value))
            && self.others == Others::Trainers
        {
            let shown = format!("--{long} {}", values[0]);
            self.sorted.problems.of_others(&shown, because, other_names::MEGATRON_LM);
            if attached.is_none() {
                self.take(Takes::One);
            }
            return;
        }
        self.sorted.line.add(long, &values);
        let start = self.sorted.own.len();
        self.sorted.own.push(match attached {
            Some(value) => format!("--{long}={value}").into(),
            None => format!("--{long}").into(),
        });
        let takes_word = self.others == Others::Launchers
            && !is_switch
            && self.rest.first().is_some_and(|w| !is_flag(w));
        if attached.is_none() && (arg.is_allow_hyphen_values_set() || takes_word) {
            self.keep(1);
        } else if attached.is_none() && is_list(arg) {
            self.keep(values.len());
        }
        if is_list(arg) {
            self.replace_list(long, start);
        }
    }

    /// The words that follow, up to the next flag.
    fn following(&self) -> Vec<String> {
        let values = self.rest.iter().take_while(|word| !is_flag(word));
        values.map(|word| word.to_string_lossy().into_owned()).collect()
    }

    fn keep(&mut self, number: usize) {
        let (kept, rest) = self.rest.split_at(number.min(self.rest.len()));
        self.sorted.own.extend_from_slice(kept);
        self.rest = rest;
    }

    /// Removes the earlier occurrence of a list.
    fn replace_list(&mut self, long: &str, start: usize) {
        if let Some(at) = self.lists.iter().position(|(name, _)| name == long) {
            let (_, range) = self.lists.remove(at);
            let length = range.len();
            self.sorted.own.drain(range.clone());
            self.lists.iter_mut().filter(|(_, later)| later.start >= range.end).for_each(
                |(_, later)| {
                    *later = later.start - length..later.end - length;
                },
            );
            let end = self.sorted.own.len();
            self.lists.push((long.to_string(), start - length..end));
            return;
        }
        self.lists.push((long.to_string(), start..self.sorted.own.len()));
    }

    fn other(&mut self, shown: String, name: &str, attached: Option<&str>, entry: &'static Entry) {
        if entry.takes == Takes::Nothing && attached.is_none() {
            self.refuse_stray_value(&shown, false);
        }
        let values = match attached {
            Some(value) => vec![value.to_string()],
            None => self.take(entry.takes),
        };
        self.sorted.line.add(name, &values);
        self.sorted.others.push(Other { shown, values, entry });
    }

    /// Removes the values that follow a flag. The name of a run file is not one of them.
    fn take(&mut self, takes: Takes) -> Vec<String> {
        let most = match takes {
            Takes::Nothing => 0,
            Takes::One => 1,
            Takes::Several => usize::MAX,
        };
        let is_value =
            |word: &&OsString| !is_flag(word) && !word.to_string_lossy().ends_with(".toml");
        let number = self.rest.iter().take(most).take_while(is_value).count();
        let (values, rest) = self.rest.split_at(number);
        self.rest = rest;
        values.iter().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    /// Refuses `--switch true`, which argparse does not accept either.
    fn refuse_stray_value(&mut self, flag: &str, takes_equals: bool) {
        let Some(next) = self.rest.first().and_then(|word| word.to_str()) else { return };
        if !["true", "false", "1", "0", "yes", "no", "on", "off"]
            .iter()
            .any(|word| next.eq_ignore_ascii_case(word))
        {
            return;
        }
        let flag = format!("--{}", flag.trim_start_matches('-'));
        let on = !["false", "0", "no", "off"].iter().any(|word| next.eq_ignore_ascii_case(word));
        let what = match takes_equals {
            true => format!("write {flag}={on}"),
            false if on => format!("write {flag} alone"),
            false => format!("leave {flag} out"),
        };
        self.sorted.problems.add(
            &format!("{flag} {next}"),
            &format!("a switch takes no value as a separate word; {what}"),
        );
        self.rest = &self.rest[1..];
    }
}

fn is_short_flag(word: &OsStr) -> bool {
    word.to_str().is_some_and(|text| text.starts_with('-'))
}

fn is_flag(word: &OsStr) -> bool {
    word.to_str().is_some_and(|text| text.starts_with("--"))
}

/// Whether the flag, or one of its other names, is `name`.
pub fn is_named(arg: &Arg, name: &str) -> bool {
    let others = arg.get_all_aliases().unwrap_or_default();
    arg.get_long()
        .into_iter()
        .chain(others)
        .any(|known| known == name || known.replace('_', "-") == name)
}

/// Whether all values of the flag follow one occurrence of it.
fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
        && arg.get_num_args().is_some_and(|number| number.max_values() > 1)
}
