//! Shows the contents of a Hugging Face model's folder. Only headers are read; nothing in the files
//! is trusted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use indicatif::{DecimalBytes, HumanCount};
use megatron::checkpoint::{Float, ShardFile};
use megatron::{Error, files};
use models::hf::{CONFIG, HfConfig, HfFiles, HfModel, SIDECAR_FILES};
use serde_json::Value;

use super::{fact, short};
use crate::error::{Error as CliError, Result};

/// Longer files are not taken for configurations.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Settings to show, under their current names and those of GPT-2 and Bloom.
const SETTINGS: [&str; 13] = [
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "n_layer",
    "n_embd",
    "n_inner",
    "n_head",
    "n_positions",
    "vocab_size",
    "tie_word_embeddings",
];

type Tensors = BTreeMap<String, (Option<Float>, Vec<usize>)>;

/// Prints the contents of the folder or of one safetensors file. Data are read only with `verify`,
/// and only for the checks that import makes.
pub fn inspect(path: &Path, verify: bool) -> Result<()> {
    fact("model", path.display());
    if !path.is_dir() {
        tensors(&ShardFile::open(path)?.tensors());
        fact("whole", "the header describes every byte of the file");
        return Ok(());
    }
    let config = path.join(CONFIG);
    // A dangling link also counts: it exists, but cannot be read.
    let config = if is_listed(&config) {
        describe(&config)?
    } else {
        fact("family", format!("unknown: {CONFIG} is missing"));
        None
    };
    // Import copies these files.
    for file in SIDECAR_FILES.map(|name| path.join(name)).iter().filter(|file| is_listed(file)) {
        files::open_binary(file).map_err(|e| Error::io("open", file, e))?;
    }
    let files = HfFiles::open(path)?;
    let held = files.tensors().clone();
    if let Some(config) = config {
        let (family, note) = (config.family, config.note());
        let possible = if verify {
            HfModel::with(config, files).and_then(|model| model.verify())
        } else {
            HfModel::check(&config, &files)
        };
        if let Err(error) = possible {
            fact("import", format!("not possible: {error}"));
            tensors(&held);
            let why = format!("does not match the model in its {CONFIG}");
            return Err(Error::checkpoint(path, why).into());
        }
        fact("import", format!("possible, as {family:?}"));
        if let Some(note) = note {
            fact("", note);
        }
    }
    tensors(&held);
    fact(
        "whole",
        "headers describe every byte of the files, and the index, if present, every tensor",
    );
    Ok(())
}

/// Whether the name exists, even as a dangling link.
fn is_listed(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// The safetensors files in a folder.
pub fn weight_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |source| CliError::Io { action: format!("list {}", folder.display()), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") && !path.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Prints the family and the settings; returns the configuration if this program can import the
/// model.
fn describe(path: &Path) -> Result<Option<HfConfig>> {
    let text = files::read(path, MAX_CONFIG_BYTES).map_err(|e| Error::io("read", path, e))?;
    let refuse =
        |e: serde_json::Error| Error::checkpoint(path, format!("is not a configuration: {e}"));
    let config: serde_json::Map<String, Value> = serde_json::from_slice(&text).map_err(refuse)?;
    let setting =
        |key: &str| config.get(key).filter(|value| !value.is_null()).map(Value::to_string);
    let architecture =
        config.get("architectures").and_then(|names| names.get(0)).and_then(Value::as_str);
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or("no model_type");
    fact("family", format!("{} ({model_type})", architecture.unwrap_or("not named")));
    let settings: Vec<String> =
        SETTINGS.iter().filter_map(|key| Some(format!("{key} {}", setting(key)?))).collect();
    fact("settings", settings.join(", "));
    match HfConfig::from_json(path, config) {
        Ok(config) => Ok(Some(config)),
        Err(error) => {
            fact("import", format!("not possible: {error}"));
            Ok(None)
        }
    }
}

fn tensors(held: &Tensors) {
    let numel = |shape: &[usize]| shape.iter().map(|&extent| extent as u64).product::<u64>();
    let parameters: u64 = held.values().map(|(_, shape)| numel(shape)).sum();
    fact(
        "tensors",
        format!("{} with {} parameters", HumanCount(held.len() as u64), short(parameters)),
    );
    let mut dtypes: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for (dtype, shape) in held.values() {
        let (name, size) =
            dtype.map_or(("no floats".to_string(), 0), |dtype| (dtype.to_string(), dtype.size()));
        let (count, bytes) = dtypes.entry(name).or_default();
        *count += 1;
        *bytes += numel(shape) * size as u64;
    }
    for (dtype, (count, bytes)) in dtypes {
        let size = if bytes > 0 { format!(", {}", DecimalBytes(bytes)) } else { String::new() };
        fact("", format!("{dtype:<6}{count} tensors{size}"));
    }
    if let Some((name, (_, shape))) = held.iter().max_by_key(|(_, (_, shape))| numel(shape)) {
        fact("largest", format!("{name} {shape:?}"));
    }
}
