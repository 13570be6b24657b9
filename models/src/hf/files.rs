//! The safetensors files of a folder: one file, or several with an index. Only headers are kept in
//! memory; tensors are read on request.
//!
//! `transformers` `modeling_utils.py`: `model.safetensors`, or, where there is none,
//! `model.safetensors.index.json` with a `weight_map`.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use megatron::checkpoint::{Float, Found, ShardFile};
use megatron::{Error, Result, files};
use serde::Deserialize;

use crate::families::Tensors;

pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// Describes what a folder contains instead of safetensors files.
fn no_weights(folder: &Path) -> String {
    if let Some(found @ (Found::DeepSpeed | Found::Adapter | Found::MegatronLm | Found::Missing)) =
        Found::at(folder)
    {
        return found.advice(folder);
    }
    let names = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok());
    let mut names: Vec<String> = names.collect();
    names.sort();
    let with = |start: &str, end: &str| {
        names.iter().find(|name| name.starts_with(start) && name.ends_with(end))
    };
    if let Some(name) = with("pytorch_model", ".bin").or(with("pytorch_model", ".json")) {
        return format!(
            "has its weights in PyTorch's pickle format ({name}), which can run code and is not \
             read; write them as safetensors with transformers: \
             AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW), do the same with the \
             tokenizer, and give NEW"
        );
    }
    if let Some(name) = with("consolidated", "").or(with("", ".pth")).or(with("", ".gguf")) {
        return format!(
            "has its weights in a format that is not supported ({name}); use the model's folder in \
             the format of transformers, with {SINGLE}"
        );
    }
    format!("holds neither {SINGLE} nor {INDEX}")
}

/// A tensor with its bytes as stored in a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub dtype: Float,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// The tensors of a folder.
pub struct HfFiles {
    folder: PathBuf,
    files: Vec<ShardFile>,
    tensors: Tensors,
    /// For each tensor, the index of its file.
    homes: BTreeMap<String, usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl HfFiles {
    /// Opens the files of `folder` and reads their headers.
    ///
    /// # Errors
    /// If there are none, one is damaged, or the index and the files disagree.
    pub fn open(folder: &Path) -> Result<Self> {
        let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
        if single.exists() {
            return Self::of(folder, vec![ShardFile::open(&single)?]);
        }
        if index.exists() {
            return Self::sharded(folder, &index);
        }
        Err(Error::checkpoint(folder, no_weights(folder)))
    }

    fn sharded(folder: &Path, path: &Path) -> Result<Self> {
        let bytes = files::read(path, MAX_INDEX_BYTES).map_err(|e| Error::io("read", path, e))?;
        let index: Index = serde_json::from_slice(&bytes)
            .map_err(|e| Error::checkpoint(path, format!("is not an index: {e}")))?;
        let mut names: Vec<&String> = index.weight_map.values().collect();
        names.sort_unstable();
        names.dedup();
        for name in &names {
            let mut parts = Path::new(name).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name.as_str())
            {
                return Err(Error::checkpoint(
                    path,
                    format!("names {name:?}, which is not a file in its own folder"),
                ));
            }
        }
        let files = names
            .iter()
            .map(|name| ShardFile::open(&folder.join(name)))
            .collect::<Result<Vec<_>>>()?;
        let opened = Self::of(folder, files)?;
        for (tensor, file) in &index.weight_map {
            if opened.homes.get(tensor).is_none_or(|&home| names[home] != file) {
                return Err(Error::checkpoint(
                    path,
                    format!("places {tensor} in {file}, which does not hold it"),
                ));
            }
        }
        match opened.tensors.keys().find(|tensor| !index.weight_map.contains_key(*tensor)) {
            Some(tensor) => {
                Err(Error::checkpoint(path, format!("does not list {tensor}, which a file holds")))
            }
            None => Ok(opened),
        }
    }

    fn of(folder: &Path, files: Vec<ShardFile>) -> Result<Self> {
        let (mut tensors, mut homes) = (Tensors::new(), BTreeMap::new());
        for (home, file) in files.iter().enumerate() {
            for (name, info) in file.tensors() {
                if homes.insert(name.clone(), home).is_some() {
                    return Err(Error::checkpoint(
                        file.path(),
                        format!("holds {name}, as another file does"),
                    ));
                }
                tensors.insert(name, info);
            }
        }
        Ok(Self { folder: folder.to_path_buf(), files, tensors, homes })
    }

    /// The folder of the files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Dtypes and shapes by name.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// Reads a tensor.
    ///
    /// # Errors
    /// If there is no tensor with this name, its dtype is not a floating-point dtype, or reading
    /// fails.
    pub fn read(&self, name: &str) -> Result<Stored> {
        let (Some((Some(dtype), shape)), Some(&home)) =
            (self.tensors.get(name), self.homes.get(name))
        else {
            return Err(Error::checkpoint(
                &self.folder,
                format!("has no floating-point tensor {name}"),
            ));
        };
        let bytes = self.files[home].read(name, *dtype, 0..shape.iter().product())?;
        Ok(Stored { dtype: *dtype, shape: shape.clone(), bytes })
    }
}
