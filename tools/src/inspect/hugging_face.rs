//! What a Hugging Face model's folder holds. Only headers are read; nothing in the files is trusted.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use indicatif::{DecimalBytes, HumanCount};
use megatron::Error;
use megatron::checkpoint::{SafetensorsEntry, safetensors_entries};
use serde::Deserialize;
use serde_json::Value;

use super::{fact, short};
use crate::error::{Error as CliError, Result};

const INDEX: &str = "model.safetensors.index.json";
/// Longer JSON files are taken for something else.
const MAX_JSON_BYTES: u64 = 64 << 20;
/// Settings that are worth a line.
const SETTINGS: [&str; 8] = [
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
];
/// The same under GPT-2's and Bloom's names.
const OLD_SETTINGS: [&str; 6] = ["n_layer", "n_embd", "n_inner", "n_head", "n_positions", "rope_theta"];

#[derive(Deserialize)]
struct Index {
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
}

/// Prints what is in the folder, or in one safetensors file.
pub fn inspect(path: &Path) -> Result<()> {
    let (folder, files) = if path.is_dir() {
        (path, weight_files(path)?)
    } else {
        (path.parent().unwrap_or(path), vec![path.to_path_buf()])
    };
    fact("model", path.display());
    let config = folder.join("config.json");
    if config.is_file() {
        let config: Value = read_json(&config)?;
        let text = |key: &str| config.get(key).filter(|value| !value.is_null()).map(Value::to_string);
        let architecture = config.pointer("/architectures/0").and_then(Value::as_str).unwrap_or("not named");
        fact("family", format!("{architecture} ({})", text("model_type").unwrap_or_else(|| "no model_type".into())));
        let settings = SETTINGS.iter().chain(&OLD_SETTINGS).filter_map(|key| Some(format!("{key} {}", text(key)?)));
        fact("settings", settings.collect::<Vec<_>>().join(", "));
    } else {
        fact("family", "unknown: there is no config.json");
    }
    let index = folder.join(INDEX);
    let index: Option<Index> = if path.is_dir() && index.is_file() { Some(read_json(&index)?) } else { None };
    let files = match &index {
        Some(index) => indexed_files(folder, index)?,
        None => files,
    };
    if files.is_empty() {
        return Err(Error::checkpoint(path, "holds no .safetensors files").into());
    }
    let mut held: BTreeMap<String, (String, SafetensorsEntry)> = BTreeMap::new();
    for file in &files {
        let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        for entry in safetensors_entries(file)? {
            if let Some((other, _)) = held.insert(entry.name.clone(), (name.clone(), entry.clone())) {
                return Err(
                    Error::checkpoint(file, format!("holds tensor {:?}, and so does {other}", entry.name)).into()
                );
            }
        }
    }
    if let Some(index) = &index {
        compare(folder, index, &held)?;
    }
    tensors(&held);
    let whole = "headers describe every byte of the files";
    fact("whole", format!("{whole}{}", if index.is_some() { ", and the index every tensor" } else { "" }));
    Ok(())
}

/// The safetensors files in a folder.
pub fn weight_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |source| CliError::Io { action: format!("list {}", folder.display()), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The files that an index names, which must lie in its own folder.
fn indexed_files(folder: &Path, index: &Index) -> Result<Vec<PathBuf>> {
    let names: BTreeSet<&String> = index.weight_map.values().collect();
    let path = |name: &String| {
        let mut parts = Path::new(name).components();
        match (parts.next(), parts.next()) {
            (Some(Component::Normal(only)), None) if only == name.as_str() => Ok(folder.join(name)),
            _ => Err(Error::checkpoint(
                folder.join(INDEX),
                format!("names {name:?}, which is not a file in its own folder"),
            )
            .into()),
        }
    };
    names.into_iter().map(path).collect()
}

/// Checks that the index and the files name the same tensors.
fn compare(folder: &Path, index: &Index, held: &BTreeMap<String, (String, SafetensorsEntry)>) -> Result<()> {
    let refuse = |message: String| Err(Error::checkpoint(folder.join(INDEX), message).into());
    for (tensor, file) in &index.weight_map {
        match held.get(tensor) {
            Some((there, _)) if there == file => {}
            Some((there, _)) => return refuse(format!("says that {tensor:?} is in {file}, but it is in {there}")),
            None => return refuse(format!("says that {tensor:?} is in {file}, but it is not")),
        }
    }
    match held.keys().find(|tensor| !index.weight_map.contains_key(*tensor)) {
        Some(tensor) => refuse(format!("does not name {tensor:?}, which is in {}", held[tensor].0)),
        None => Ok(()),
    }
}

fn tensors(held: &BTreeMap<String, (String, SafetensorsEntry)>) {
    let files: BTreeSet<&String> = held.values().map(|(file, _)| file).collect();
    let numel = |entry: &SafetensorsEntry| entry.shape.iter().map(|&extent| extent as u64).product::<u64>();
    let parameters: u64 = held.values().map(|(_, entry)| numel(entry)).sum();
    let bytes: u64 = held.values().map(|(_, entry)| entry.bytes as u64).sum();
    fact(
        "tensors",
        format!(
            "{} with {} parameters, {} in {} files",
            HumanCount(held.len() as u64),
            short(parameters),
            DecimalBytes(bytes),
            files.len()
        ),
    );
    let mut dtypes: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for (_, entry) in held.values() {
        let (count, bytes) = dtypes.entry(format!("{:?}", entry.dtype)).or_default();
        *count += 1;
        *bytes += entry.bytes as u64;
    }
    for (dtype, (count, bytes)) in dtypes {
        fact("", format!("{dtype:<6}{count} tensors, {}", DecimalBytes(bytes)));
    }
    if let Some((_, (_, largest))) = held.iter().max_by_key(|(_, (_, entry))| entry.bytes) {
        fact("largest", format!("{} {:?}, {}", largest.name, largest.shape, DecimalBytes(largest.bytes as u64)));
    }
}

fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T> {
    let mut text = Vec::new();
    let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
    file.take(MAX_JSON_BYTES + 1).read_to_end(&mut text).map_err(|e| Error::io("read", path, e))?;
    if text.len() as u64 > MAX_JSON_BYTES {
        return Err(Error::checkpoint(path, format!("is longer than {}", DecimalBytes(MAX_JSON_BYTES))).into());
    }
    Ok(serde_json::from_slice(&text).map_err(|e| Error::checkpoint(path, format!("is not what it should be: {e}")))?)
}
