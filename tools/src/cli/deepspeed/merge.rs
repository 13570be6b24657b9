//! Puts a configuration's settings beside those of flags and run file.

use std::collections::BTreeMap;

use super::{Configuration, Said};
use crate::cli::run_file::Setting;

/// What flags and run file say of a key.
#[derive(Clone, Debug)]
pub struct Given {
    /// Where it is said, e.g. `--lr` or `run.toml:7`.
    pub origin: String,
    pub value: String,
}

/// The settings that a configuration adds, each with its origin, and what a run prints.
#[derive(Debug, Default)]
pub struct Added {
    pub settings: Vec<(String, Setting)>,
    pub notes: Vec<String>,
    /// Each contradiction, with its place.
    pub problems: Vec<(String, String)>,
}

impl Configuration {
    /// The settings that `given` lacks, by key.
    pub fn beneath(mut self, given: &BTreeMap<String, Given>) -> Added {
        self.drop_partition(given);
        let mut added = Added::default();
        for Said { path, setting } in &self.said {
            match given.get(&setting.key) {
                None => added.settings.push((self.origin(path), setting.clone())),
                Some(other) if same(value_of(setting), &other.value) => {}
                Some(other) => {
                    let message = format!(
                        "{} = {} contradicts {}, which says {}; change one of them, or write \"auto\" in the file",
                        setting.key,
                        value_of(setting),
                        other.origin,
                        other.value
                    );
                    added.problems.push((self.origin(path), message));
                }
            }
        }
        for other in &self.otherwise {
            let key = &other.said.setting.key;
            let is_said = given.contains_key(key)
                || self.said.iter().any(|said| said.setting.key == *key)
                || other.unless.iter().any(|key| given.contains_key(*key))
                || added.settings.iter().any(|(_, setting)| setting.key == *key);
            if !is_said {
                added.settings.push((self.origin(&other.said.path), other.said.setting.clone()));
            }
        }
        if !self.without_effect.is_empty() {
            added.notes.push(format!(
                "{}: without effect here: {}",
                self.file,
                self.without_effect.join(", ")
            ));
        }
        added.notes.extend(self.notes);
        added
    }

    /// Without tensor parallelism there is nothing to cut saved activations over, in DeepSpeed, too.
    fn drop_partition(&mut self, given: &BTreeMap<String, Given>) {
        const TP: &str = "tensor_model_parallel_size";
        let said = self.said.iter().find(|said| said.setting.key == TP);
        let tp = said.map(|said| value_of(&said.setting));
        let tp = tp.or_else(|| given.get(TP).map(|given| given.value.as_str())).unwrap_or("1");
        if tp == "1"
            && let Some(at) =
                self.said.iter().position(|said| said.setting.key == "distribute_saved_activations")
        {
            self.without_effect.push(self.said.remove(at).path);
        }
    }
}

/// The value of a setting that is one word, `--key=value`.
pub(super) fn value_of(setting: &Setting) -> &str {
    let word = setting.words.first().map_or("", String::as_str);
    word.split_once('=').map_or("", |(_, value)| value)
}

pub(super) fn same_value(a: &Setting, b: &Setting) -> bool {
    same(value_of(a), value_of(b))
}

/// Whether two values are equal: as numbers, if they are numbers.
fn same(a: &str, b: &str) -> bool {
    match (a.parse::<f64>(), b.parse::<f64>()) {
        (Ok(a), Ok(b)) => a == b,
        _ => a.eq_ignore_ascii_case(b),
    }
}
