//! `ds_config.json`: DeepSpeed's configuration as settings of this program.
//!
//! [`read`] judges every key by the table in [`keys`]: it becomes a flag, is known without a meaning
//! here, or is refused. [`Configuration::beneath`] puts the settings beside those of flags and run
//! file: they must agree, and `auto` is what those say.

mod json;
mod keys;
mod merge;
mod sections;

use std::path::Path;

use serde_json::{Map, Value};

use self::keys::{Keys, Kind, Rule, TOP};
use super::nearest::nearest;
use super::print_config::{self, Line};
use super::problems::Problems;
use super::run_file::Setting;
use crate::error::{Error, Result};

pub use merge::{Added, Given};

/// A configuration as settings of this program.
#[derive(Debug, Default)]
pub struct Configuration {
    /// The file, as it was named.
    file: String,
    /// What the file says. Flags and run file must not say anything else.
    said: Vec<Said>,
    /// What holds unless flags or run file say something: values of `auto`, and DeepSpeed's defaults
    /// of keys that are not there.
    otherwise: Vec<Otherwise>,
    /// Keys that are `auto` and take no default of their own, with the keys of a run file.
    auto: Vec<(String, String)>,
    /// Keys without a meaning here.
    without_effect: Vec<String>,
    /// Lines that the run prints.
    notes: Vec<String>,
    /// Keys that are refused, with the reason.
    problems: Vec<(String, String)>,
}

/// A setting and the key that says it.
#[derive(Clone, Debug)]
struct Said {
    path: String,
    setting: Setting,
}

#[derive(Clone, Debug)]
struct Otherwise {
    said: Said,
    /// Keys of this program that each rule it out.
    unless: Vec<&'static str>,
}

/// Reads the configuration in `file`.
///
/// # Errors
/// If it cannot be read, is not JSON, or has keys that are unknown, refused, or of the wrong type:
/// all of them in one message.
pub fn read(file: &Path) -> Result<Configuration> {
    let name = file.display().to_string();
    let text = std::fs::read_to_string(file)
        .map_err(|error| Error::usage(format!("cannot read {name}: {error}")))?;
    let object = json::parse(&text).map_err(|why| Error::usage(format!("{name}: {why}")))?;
    let configuration = Configuration::of(name, &object);
    let mut problems = Problems::default();
    for (path, why) in &configuration.problems {
        problems.key_of_others(&configuration.origin(path), why, "from-deepspeed.md");
    }
    problems.result()?;
    Ok(configuration)
}

/// The sections of a run file that say what the configuration in `file` says. What has no meaning
/// here is a comment.
///
/// # Errors
/// As [`read`].
pub fn convert(file: &Path) -> Result<String> {
    let configuration = read(file)?;
    let line = |said: &Said| Line {
        key: said.setting.key.clone(),
        values: vec![merge::value_of(&said.setting).to_string()],
        origin: said.path.clone(),
        is_comment: false,
    };
    let given: Vec<_> = configuration.said.iter().collect();
    let is_said = |key: &str| given.iter().any(|said| said.setting.key == key);
    let otherwise = configuration.otherwise.iter().map(|other| &other.said);
    let otherwise = otherwise.filter(|said| !is_said(&said.setting.key));
    let mut text =
        print_config::text_of(given.iter().copied().chain(otherwise).map(line).collect());
    let mut comments = Vec::new();
    comments.extend(configuration.auto.iter().map(|(path, key)| format!("{path} is auto: {key}")));
    comments.extend(configuration.notes.iter().cloned());
    comments.extend(
        configuration.without_effect.iter().map(|path| format!("without effect here: {path}")),
    );
    if !comments.is_empty() {
        text.push('\n');
    }
    comments.iter().for_each(|line| text.push_str(&format!("# {line}\n")));
    Ok(text)
}

impl Configuration {
    fn of(file: String, object: &Map<String, Value>) -> Self {
        let mut configuration = Self { file, ..Self::default() };
        configuration.section("", object, TOP);
        if !object.contains_key("scheduler") {
            let style = configuration.setting("lr-decay-style", "constant");
            configuration.otherwise("no scheduler", style, &["lr_schedule"]);
        }
        if !object.contains_key("gradient_clipping") {
            let clip = configuration.setting("clip-grad", "1.0");
            configuration.otherwise("no gradient_clipping", clip, &[]);
        }
        sections::batch(&mut configuration, object);
        configuration
    }

    /// Judges the keys of `object`, whose own path is `path`.
    fn section(&mut self, path: &str, object: &Map<String, Value>, keys: Keys) {
        for (key, value) in object {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            match keys.iter().find(|(known, _)| known == key) {
                // None of DeepSpeed: the default.
                Some(_) if value.is_null() => {}
                Some((_, rule)) => self.judge(&path, value, rule),
                None => {
                    let near = nearest(key, keys.iter().map(|(known, _)| *known));
                    let hint = near.map(|known| format!("; did you mean \"{known}\"?"));
                    self.problem(&path, format!("unknown key{}", hint.unwrap_or_default()));
                }
            }
        }
    }

    fn judge(&mut self, path: &str, value: &Value, rule: &Rule) {
        match rule {
            Rule::Section(keys) => {
                if let Some(object) = self.object(path, value) {
                    self.section(path, object, keys);
                }
            }
            Rule::IfEnabled(keys) => {
                if let Some(object) = self.object(path, value) {
                    match self.is_enabled(path, object) {
                        true => self.section(path, object, keys),
                        false => self.off(path, object, keys),
                    }
                }
            }
            Rule::Flag(flag, kind) => self.flag(path, flag, *kind, value),
            Rule::Auto(flag, kind, default) => {
                if *value != "auto" {
                    return self.flag(path, flag, *kind, value);
                }
                self.auto.push((path.to_string(), flag.replace('-', "_")));
                if let Some(default) = default {
                    let setting = self.setting(flag, default);
                    let unless: &[_] = match *flag {
                        "gradient-accumulation-steps" => &["global_batch_size"],
                        _ => &[],
                    };
                    let origin = format!("{path} = auto: transformers' default");
                    self.otherwise(&origin, setting, unless);
                }
            }
            Rule::NoEffect => self.without_effect.push(path.to_string()),
            Rule::Only(values, instead) => {
                let text = text_of(value);
                if values.contains(&text.as_str()) || text == "auto" {
                    self.without_effect.push(path.to_string());
                } else {
                    self.problem(path, format!("cannot be {text}: {instead}"));
                }
            }
            Rule::Off(instead) => {
                let is_off = match value {
                    Value::Object(object) => {
                        object.is_empty() || object.get("enabled") == Some(&Value::Bool(false))
                    }
                    other => *other == Value::Bool(false),
                };
                if !is_off {
                    self.problem(path, (*instead).to_string());
                }
            }
            Rule::By(decide) => decide(self, path, value),
        }
    }

    /// The object that `value` has to be.
    fn object<'a>(&mut self, path: &str, value: &'a Value) -> Option<&'a Map<String, Value>> {
        if value.as_object().is_none() {
            self.problem(path, format!("expects an object, {{ … }}, not {}", text_of(value)));
        }
        value.as_object()
    }

    /// Whether a section's `enabled` is true or `auto`. Other keys of a section that is off are not
    /// judged.
    fn is_enabled(&mut self, path: &str, object: &Map<String, Value>) -> bool {
        match object.get("enabled") {
            None | Some(Value::Bool(false) | Value::Null) => false,
            Some(Value::Bool(true)) => true,
            Some(auto) if *auto == "auto" => true,
            Some(other) => {
                let message = format!("expects true or false, not {}", text_of(other));
                self.problem(&format!("{path}.enabled"), message);
                false
            }
        }
    }

    /// Judges of a section that is off only that it says so.
    fn off(&mut self, path: &str, object: &Map<String, Value>, keys: Keys) {
        let rule = keys.iter().find(|(key, _)| *key == "enabled").map(|(_, rule)| rule);
        if let (Some(value @ Value::Bool(false)), Some(rule)) = (object.get("enabled"), rule) {
            self.judge(&format!("{path}.enabled"), value, rule);
        }
    }

    /// Adds the flag that `value` of the key at `path` is.
    fn flag(&mut self, path: &str, flag: &str, kind: Kind, value: &Value) {
        match kind.text(value) {
            Ok(text) => self.say(path, flag, &text),
            Err(expected) => {
                self.problem(path, format!("expects {expected}, not {}", text_of(value)));
            }
        }
    }

    /// Adds a setting that the key at `path` says.
    fn say(&mut self, path: &str, flag: &str, value: &str) {
        let setting = self.setting(flag, value);
        match self.said.iter().find(|said| said.setting.key == setting.key) {
            None => self.said.push(Said { path: path.to_string(), setting }),
            Some(said) if merge::same_value(&said.setting, &setting) => {}
            Some(said) => {
                let message = format!(
                    "says {value}, but {} says {}",
                    said.path,
                    merge::value_of(&said.setting)
                );
                self.problem(path, message);
            }
        }
    }

    /// Adds a setting that holds unless flags or run file say something about it or `unless`.
    fn otherwise(&mut self, path: &str, setting: Setting, unless: &[&'static str]) {
        let said = Said { path: path.to_string(), setting };
        self.otherwise.push(Otherwise { said, unless: unless.to_vec() });
    }

    fn setting(&self, flag: &str, value: &str) -> Setting {
        Setting::of(format!("--{flag}={value}"), 0)
    }

    fn problem(&mut self, path: &str, why: impl Into<String>) {
        self.problems.push((path.to_string(), why.into()));
    }

    /// How messages cite the key at `path`.
    fn origin(&self, path: &str) -> String {
        format!("{}: {path}", self.file)
    }
}

impl Kind {
    /// `value` as a flag's value.
    ///
    /// # Errors
    /// What is expected instead.
    fn text(self, value: &Value) -> std::result::Result<String, &'static str> {
        match (self, value) {
            (Self::Bool, Value::Bool(value)) => Ok(value.to_string()),
            (Self::Bool, _) => Err("true or false"),
            (Self::Whole, Value::Number(number)) => {
                // DeepSpeed's users write 1e9.
                let whole = number.as_u64().or_else(|| {
                    number
                        .as_f64()
                        .filter(|x| x.fract() == 0.0 && (0.0..2e18).contains(x))
                        .map(|x| x as u64)
                });
                whole.map(|whole| whole.to_string()).ok_or("a whole number of 0 or more")
            }
            (Self::Whole, _) => Err("a whole number"),
            (Self::Number, Value::Number(number)) => Ok(number.to_string()),
            (Self::Number, _) => Err("a number"),
            (Self::Text, Value::String(text)) => Ok(text.clone()),
            (Self::Text, _) => Err("a string"),
        }
    }
}

/// A value as it is shown: strings without quotes.
fn text_of(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}

#[cfg(test)]
mod tests;
