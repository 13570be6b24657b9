//! `megatron inspect`: shows the contents of a checkpoint, a dataset or a Hugging Face model, and
//! checks that it is complete.

mod dataset;
mod hugging_face;
mod saved;

use std::path::{Path, PathBuf};

use clap::{ArgAction, Args};
use megatron::checkpoint;

use crate::error::{Error, Result};

/// Show the contents of a checkpoint, a dataset or a Hugging Face model, and check that it is
/// complete
///
/// A checkpoint: its iteration, tensors, model and layout, and the layouts it fits. An indexed
/// dataset: its sequences, documents and tokens. A Hugging Face folder or a .safetensors file: its
/// architecture and tensors.
///
/// All data are read and checked: checksums of checkpoints, the largest token of datasets. With
/// --verify=false only headers and manifests are read. If a file is damaged, the message names it
/// and the exit code is 1.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  megatron inspect checkpoints/quickstart
  megatron inspect checkpoints/quickstart/iter_0000100 --verify=false
  megatron inspect data/corpus_text_document
  megatron inspect ~/models/llama-3-8b")]
pub struct InspectArgs {
    /// A checkpoint folder, the prefix of a .bin and an .idx file, or a Hugging Face folder
    #[arg(value_name = "CKPT|DATASET_PREFIX|HF_DIR")]
    pub path: PathBuf,
    /// Iteration of the checkpoint in the folder [default: the latest]
    #[arg(long, value_name = "N")]
    pub iteration: Option<u64>,
    /// Read and check all data
    #[arg(long, action = ArgAction::Set, default_value_t = true)]
    pub verify: bool,
}

/// What a path is.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Checkpoint,
    /// With the prefix.
    Dataset(PathBuf),
    HuggingFace,
}

/// Prints the contents of the path, and returns the exit code.
///
/// # Errors
/// If the path is of no known kind, or is damaged.
pub fn run(args: &InspectArgs) -> Result<u8> {
    let kind = kind(&args.path)?;
    if args.iteration.is_some() && kind != Kind::Checkpoint {
        return Err(Error::usage(format!(
            "--iteration is for checkpoints, but {} is not a checkpoint",
            args.path.display()
        )));
    }
    match kind {
        Kind::Checkpoint => {
            saved::inspect(&checkpoint::locate(&args.path, args.iteration)?, args.verify)?
        }
        Kind::Dataset(prefix) => dataset::inspect(&prefix, args.verify)?,
        Kind::HuggingFace => hugging_face::inspect(&args.path, args.verify)?,
    }
    Ok(0)
}

fn kind(path: &Path) -> Result<Kind> {
    let has = |name: &str| path.join(name).exists();
    if path.is_dir() {
        if has("manifest.json") || has("latest_checkpointed_iteration.txt") {
            return Ok(Kind::Checkpoint);
        }
        if has("config.json") || !hugging_face::weight_files(path)?.is_empty() {
            return Ok(Kind::HuggingFace);
        }
        if checkpoint::holds_any(path)? {
            return Ok(Kind::Checkpoint);
        }
    } else if path.extension().is_some_and(|extension| extension == "safetensors") {
        return Ok(Kind::HuggingFace);
    }
    let prefixes = [path.to_path_buf(), path.with_extension("")];
    let is_pair = |prefix: &&PathBuf| {
        let with = |suffix: &str| {
            let mut file = prefix.as_os_str().to_owned();
            file.push(suffix);
            PathBuf::from(file)
        };
        let (bin, idx) = (with(".bin"), with(".idx"));
        // If one of the two files is missing, the reader reports it.
        (bin.exists() || idx.exists()) && (*prefix == path || path == bin || path == idx)
    };
    if let Some(prefix) = prefixes.iter().find(is_pair) {
        return Ok(Kind::Dataset(prefix.clone()));
    }
    if !path.exists() {
        return Err(Error::usage(format!(
            "{} does not exist, and no indexed dataset (a .bin and an .idx file) has this prefix",
            path.display()
        )));
    }
    let datasets = datasets_in(path);
    if !datasets.is_empty() {
        return Err(Error::usage(format!(
            "{} is a folder of indexed datasets; give the prefix of one: {}",
            path.display(),
            datasets.join(", ")
        )));
    }
    Err(Error::usage(format!(
        "{} is neither a checkpoint (manifest.json or latest_checkpointed_iteration.txt in a folder), nor an indexed dataset \
         (a .bin and an .idx file with this prefix), nor a Hugging Face model (config.json or .safetensors files in a folder)",
        path.display()
    )))
}

/// The prefixes of the indexed datasets in a folder, as many as fit into a message.
fn datasets_in(folder: &Path) -> Vec<String> {
    const MOST: usize = 10;
    let entries =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let indices =
        entries.filter(|path| path.extension().is_some_and(|extension| extension == "idx"));
    let pairs = indices.filter(|index| index.with_extension("bin").exists());
    let mut prefixes: Vec<String> =
        pairs.map(|index| index.with_extension("").display().to_string()).collect();
    prefixes.sort();
    if prefixes.len() > MOST {
        prefixes.truncate(MOST);
        prefixes.push("…".into());
    }
    prefixes
}

/// Prints one line: a name and its text.
fn fact(name: &str, text: impl std::fmt::Display) {
    crate::print_line(&format!("{name:<12}{text}"));
}

/// A number of parameters or tokens in short form.
fn short(count: u64) -> String {
    match count {
        0..10_000 => count.to_string(),
        10_000..1_000_000 => format!("{:.1} K", count as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", count as f64 / 1e6),
        _ => format!("{:.2} B", count as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_told_by_what_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for (name, file) in [
            ("ckpt", "latest_checkpointed_iteration.txt"),
            ("iter", "manifest.json"),
            ("hf", "config.json"),
        ] {
            std::fs::create_dir(at(name)).unwrap();
            std::fs::write(at(name).join(file), "").unwrap();
        }
        std::fs::write(at("a.b.bin"), "").unwrap();
        std::fs::write(at("a.b.idx"), "").unwrap();
        assert_eq!(kind(&at("ckpt")).unwrap(), Kind::Checkpoint);
        assert_eq!(kind(&at("iter")).unwrap(), Kind::Checkpoint);
        assert_eq!(kind(&at("hf")).unwrap(), Kind::HuggingFace);
        for given in ["a.b", "a.b.bin", "a.b.idx"] {
            assert_eq!(kind(&at(given)).unwrap(), Kind::Dataset(at("a.b")));
        }
        std::fs::create_dir(at("empty")).unwrap();
        let prefix = at("a.b").display().to_string();
        for (nothing, why) in [
            ("a", "does not exist"),
            ("a.c", "does not exist"),
            ("missing", "does not exist"),
            ("empty", "neither"),
            ("", &format!("give the prefix of one: {prefix}")),
        ] {
            let error = kind(&at(nothing)).unwrap_err().to_string();
            assert!(error.contains(why), "{nothing}: {error}");
        }
    }

    #[test]
    fn counts_are_short() {
        assert_eq!(
            [9_999, 12_345, 1_500_000, 8_030_000_000].map(short),
            ["9999", "12.3 K", "1.5 M", "8.03 B"]
        );
    }
}
