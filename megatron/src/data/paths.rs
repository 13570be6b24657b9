//! Parses `--data-path`: text or indexed datasets, with or without weights.

use std::path::{Path, PathBuf};

use super::indexed;
use crate::{Error, Result};

/// The entries of a data path.
#[derive(Debug)]
pub(super) struct DataPaths {
    pub kind: Kind,
    pub paths: Vec<PathBuf>,
    /// One weight for each path, positive and finite.
    pub weights: Option<Vec<f64>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    /// The paths are prefixes.
    Indexed,
}

impl DataPaths {
    /// # Errors
    /// `Error::Config` if there is no path, weights and paths do not alternate, or text and
    /// datasets are mixed; `Error::Data` if a path does not exist.
    pub fn parse(entries: &[String]) -> Result<Self> {
        let (weights, paths) = take_weights(entries)?;
        let (kind, paths) = classify(&paths)?;
        Ok(Self { kind, paths, weights })
    }
}

/// Splits `0.7 A 0.3 B` into weights and paths. If the first entry is a number, it is a weight
/// unless a file has that name.
fn take_weights(entries: &[String]) -> Result<(Option<Vec<f64>>, Vec<&str>)> {
    let number = |entry: &str| entry.parse::<f64>().ok();
    let plain = || Ok((None, entries.iter().map(String::as_str).collect()));
    match entries.first() {
        Some(first) if number(first).is_some() && !Path::new(first).exists() => {}
        _ => return plain(),
    }
    let (mut weights, mut paths) = (Vec::new(), Vec::new());
    for pair in entries.chunks(2) {
        let [weight, path] = pair else {
            return Err(Error::config(format!(
                "the data path starts with a weight, but the last weight, \"{}\", has no path \
                 after it; alternate weights and paths: 0.7 A 0.3 B",
                pair[0]
            )));
        };
        let weight = number(weight).filter(|weight| *weight > 0.0 && weight.is_finite()).ok_or_else(|| {
            Error::config(format!(
                "the data path has \"{weight}\" as the weight of {path}, which must be a number \
                 above 0; alternate weights and paths: 0.7 A 0.3 B"
            ))
        })?;
        weights.push(weight);
        paths.push(path.as_str());
    }
    Ok((Some(weights), paths))
}

/// Distinguishes text from prefixes of indexed datasets.
fn classify(entries: &[&str]) -> Result<(Kind, Vec<PathBuf>)> {
    let (mut texts, mut prefixes) = (Vec::new(), Vec::new());
    for entry in entries {
        let path = Path::new(entry);
        // Shell completion gives the name of one file of the pair.
        let prefix = match path.extension() {
            Some(extension) if extension == "idx" || extension == "bin" => path.with_extension(""),
            _ => path.to_path_buf(),
        };
        let (bin, idx) = indexed::pair_paths(&prefix);
        if path.exists() && (prefix == path || !(bin.exists() && idx.exists())) {
            texts.push(path.to_path_buf());
        } else if bin.exists() || idx.exists() {
            prefixes.push(prefix);
        } else {
            let advice = match of_preprocess(&prefix) {
                Some(meant) => format!("did you mean {}?", meant.display()),
                None => "give a text file, a folder of text, or the prefix of an indexed dataset"
                    .to_string(),
            };
            let idx = idx.display();
            return Err(Error::data(
                path,
                format!("does not exist, and neither does {idx}; {advice}"),
            ));
        }
    }
    match (texts.first(), prefixes.first()) {
        (None, None) => Err(Error::config(
            "no data: give --data-path a text file, a folder of text, or the prefix of an indexed dataset",
        )),
        (Some(text), Some(prefix)) => Err(Error::config(format!(
            "the data path mixes text ({}) and indexed datasets ({}); preprocess the text, or give only one kind",
            text.display(),
            prefix.display()
        ))),
        (Some(_), None) => Ok((Kind::Text, texts)),
        (None, Some(_)) => Ok((Kind::Indexed, prefixes)),
    }
}

/// The dataset that `megatron preprocess` writes for the output prefix `prefix`, if it exists.
fn of_preprocess(prefix: &Path) -> Option<PathBuf> {
    let mut name = prefix.as_os_str().to_owned();
    name.push("_text_document");
    let meant = PathBuf::from(name);
    let (bin, idx) = indexed::pair_paths(&meant);
    (bin.exists() && idx.exists()).then_some(meant)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(entries: &[&str]) -> Result<(Option<Vec<f64>>, Vec<String>)> {
        let entries: Vec<String> = entries.iter().map(|entry| entry.to_string()).collect();
        take_weights(&entries)
            .map(|(weights, paths)| (weights, paths.into_iter().map(str::to_owned).collect()))
    }

    #[test]
    fn weights_and_paths_alternate() {
        assert_eq!(
            taken(&["0.7", "A", "3", "B"]).unwrap(),
            (Some(vec![0.7, 3.0]), vec!["A".into(), "B".into()])
        );
        assert_eq!(taken(&["A", "B"]).unwrap(), (None, vec!["A".into(), "B".into()]));
        // A path may look like a number if a weight precedes it.
        assert_eq!(taken(&["1", "2"]).unwrap(), (Some(vec![1.0]), vec!["2".into()]));
    }

    #[test]
    fn weights_that_cannot_be_meant_are_refused_by_name() {
        for (entries, part) in [
            (&["0.7", "A", "0.3"][..], "\"0.3\", has no path"),
            (&["0.7", "A", "B", "C"], "\"B\" as the weight of C"),
            (&["0.7", "A", "0", "B"], "\"0\" as the weight of B"),
            (&["-1", "A"], "\"-1\" as"),
            (&["inf", "A"], "\"inf\" as"),
        ] {
            let message = taken(entries).unwrap_err().to_string();
            assert!(message.contains(part) && message.contains("0.7 A 0.3 B"), "{message}");
        }
    }
}
