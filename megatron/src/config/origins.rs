//! Records where each setting of a run came from, for error messages.

use std::collections::BTreeMap;
use std::fmt::Display;

/// The origin of every setting by its key in the run file: a flag, a file and line, the
/// environment, a default.
///
/// A library user who fills [`RunConfig`](super::RunConfig) by hand passes `Origins::default()`;
/// messages then contain only values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins(BTreeMap<String, String>);

impl Origins {
    /// Records that `origin` set `key`, e.g. `--num-layers`, `run.toml:7`, `default`.
    pub fn record(&mut self, key: impl Into<String>, origin: impl Into<String>) {
        self.0.insert(key.into(), origin.into());
    }

    /// The origin of `key`, if it is known.
    pub fn of(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// `key = value (origin)`, the form in which errors cite a setting.
    pub fn cite(&self, key: &str, value: impl Display) -> String {
        match self.of(key) {
            Some(origin) => format!("{key} = {value} ({origin})"),
            None => format!("{key} = {value}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_citation_names_the_origin_if_it_is_known() {
        let mut origins = Origins::default();
        assert_eq!(origins.cite("num_layers", 4), "num_layers = 4");
        origins.record("num_layers", "run.toml:7");
        assert_eq!(origins.cite("num_layers", 4), "num_layers = 4 (run.toml:7)");
    }
}
