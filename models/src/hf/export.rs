//! Exports a checkpoint as a folder that `transformers` loads directly: config, weights (in shards,
//! with an index), tokenizer files, generation settings. Only one parameter is in memory at a time.
//!
//! Names and shard rules: `huggingface_hub` `serialization`.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use megatron::checkpoint::{self, Float, Manifest, SafetensorsWriter};
use megatron::config::{ModelConfig, PositionEmbedding};
use megatron::data::unfinished;
use megatron::params::{Piece, ShardRef, StateKind};
use megatron::{Error, Result, files};
use serde_json::{Map, Value, json};

use super::config::{CONFIG, HfConfig, family_of, to_json};
use super::files::{INDEX, SINGLE};
use super::model::candle_dtype;
use super::tokenizer::{self, Taken};
use super::{GENERATION_CONFIG, ORIGIN_CONFIG};
use crate::families::{Family, Planned, QkvShape};
use crate::{Gpt, SavedGpt};

/// Suffix of the name of an unfinished folder.
const TEMPORARY: &str = ".tmp";

const MAX_GENERATION_CONFIG: u64 = 16 << 20;

/// Options of an export.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    /// Maximum bytes of weights in one file; a single larger parameter has its own file.
    pub max_shard_size: u64,
    /// Dtype of all tensors; `None` keeps the stored dtypes.
    pub dtype: Option<Float>,
}

/// The result of an export.
#[derive(Debug)]
pub struct Exported {
    /// The family that the model was written as.
    pub family: Family,
    /// Number of safetensors files.
    pub files: usize,
    /// Bytes of weights in them.
    pub bytes: u64,
    /// A note about what does not work with the folder, and what works instead.
    pub note: Option<String>,
}

/// One parameter to export.
struct Leaving<'a> {
    planned: &'a Planned,
    dtype: Float,
    bytes: u64,
}

/// Exports the checkpoint in `path` (one `iter_…`, or a folder of checkpoints, whose latest is
/// used) to the new folder `out`.
///
/// # Errors
/// If no Hugging Face family has the checkpoint's architecture, `out` is not empty, the checkpoint
/// is damaged, or the system refuses. `out` appears complete or not at all.
pub fn export(path: &Path, out: &Path, options: &ExportOptions) -> Result<Exported> {
    // A link to an empty folder stays a link, now to the model.
    let link = out
        .is_symlink()
        .then(|| fs::canonicalize(out))
        .transpose()
        .map_err(|e| Error::io("follow", out, e))?;
    let out = link.as_deref().unwrap_or(out);
    let manifest = Manifest::read(&checkpoint::locate(path, None)?)?;
    let beside = checkpoint::checkpoints_folder(manifest.folder())?;
    let SavedGpt { manifest, run } = SavedGpt::new(manifest)?;
    let model = run.model;
    let origin = origin(&beside, &model)?;
    let family = origin.as_ref().map_or_else(|| family_of(&model), |origin| Ok(origin.family))?;
    let plan = family
        .plan(&Gpt::specs(&model)?)
        .map_err(|why| Error::checkpoint(manifest.folder(), why))?;

    let leaving: Vec<Leaving> = plan
        .iter()
        .map(|planned| {
            let entry = manifest
                .tensors
                .iter()
                .find(|t| t.name == planned.spec.name && t.kind == StateKind::Param);
            let dtype = options.dtype.or(entry.map(|entry| entry.dtype)).unwrap_or(Float::F32);
            let bytes = (planned.spec.shape.iter().product::<usize>() * dtype.size()) as u64;
            Leaving { planned, dtype, bytes }
        })
        .collect();
    let shards = shards(&leaving, options.max_shard_size);

    let (temp, _lock) = temporary(out)?;
    let result: Result<Option<String>> = (|| {
        write_weights(&manifest, &model, &shards, &temp)?;
        let dtype = leaving
            .iter()
            .max_by_key(|leaving| leaving.bytes)
            .map_or(Float::F32, |leaving| leaving.dtype);
        let note =
            write_descriptions(&manifest.state, &beside, &model, family, origin, dtype, &temp)?;
        // An empty folder may exist in place of the new one.
        let _ = fs::remove_dir(out);
        fs::rename(&temp, out).map_err(|e| Error::io("create", out, e))?;
        Ok(note)
    })();
    if result.is_err() {
        let _ = fs::remove_dir_all(&temp);
    }
    let bytes = leaving.iter().map(|leaving| leaving.bytes).sum();
    Ok(Exported { family, files: shards.len(), bytes, note: result? })
}

/// The configuration of the folder that the weights were imported from, if it still matches the
/// model.
fn origin(beside: &Path, model: &ModelConfig) -> Result<Option<HfConfig>> {
    let path = beside.join(ORIGIN_CONFIG);
    if !path.exists() {
        return Ok(None);
    }
    let origin = HfConfig::read_file(&path)?;
    // Training settings, and the context length of relative positions, do not affect the meaning of
    // the weights.
    let learned = model.position_embedding == PositionEmbedding::LearnedAbsolute;
    let meaning = |m: &ModelConfig| ModelConfig {
        seq_length: 0,
        // Settings that the user may choose together with --init-from-hf.
        vocab_size: 0,
        rotary_base: 0.0,
        max_position_embeddings: if learned { m.max_position_embeddings } else { 0 },
        make_vocab_size_divisible_by: 0,
        attention_dropout: 0.0,
        hidden_dropout: 0.0,
        init_method_std: 0.0,
        ..m.clone()
    };
    Ok((meaning(&origin.model) == meaning(model)).then_some(origin))
}

/// Creates a hidden folder next to `out`, which must be empty so far. A lock on it tells other
/// processes that it is in use.
fn temporary(out: &Path) -> Result<(PathBuf, Option<File>)> {
    if fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_some()) || out.is_file() {
        return Err(Error::checkpoint(
            out,
            "already exists and is not empty; export to another folder",
        ));
    }
    let name = out
        .file_name()
        .ok_or_else(|| Error::checkpoint(out, "is not a valid name for a new folder"))?;
    let parent =
        out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(|e| Error::io("create", parent, e))?;
    let (name, pid) = (name.to_string_lossy(), std::process::id());
    remove_leftovers(parent, &name);
    for attempt in 0.. {
        let temp = parent.join(format!(".{name}.{pid}.{attempt}{TEMPORARY}"));
        match fs::create_dir(&temp) {
            Ok(()) => {}
            // Of another process, or of a killed process with the same number.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
            Err(error) => return Err(Error::io("create", &temp, error)),
        }
        let folder = File::open(&temp).map_err(|e| Error::io("open", &temp, e))?;
        match folder.try_lock() {
            // A process that found it before it was locked may have removed it.
            Ok(()) if temp.is_dir() => return Ok((temp, Some(folder))),
            Ok(()) | Err(TryLockError::WouldBlock) => {}
            // The file system has no locks on folders. There no process removes unlocked folders.
            Err(TryLockError::Error(_)) => return Ok((temp, None)),
        }
    }
    Err(Error::checkpoint(out, "no free name for a folder beside it"))
}

/// Removes the folders of [`temporary`] in `parent` that killed exports to `name` left behind:
/// those without a lock.
fn remove_leftovers(parent: &Path, name: &str) {
    let is_leftover = |entry: &str| entry.strip_prefix('.').and_then(unfinished) == Some(name);
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(is_leftover)
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
            && let Ok(folder) = File::open(entry.path())
            && folder.try_lock().is_ok()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Distributes parameters, in order, over files of at most `limit` bytes.
fn shards<'a, 'b>(leaving: &'b [Leaving<'a>], limit: u64) -> Vec<Vec<&'b Leaving<'a>>> {
    let mut shards: Vec<Vec<&Leaving>> = Vec::new();
    let mut size = 0;
    for one in leaving {
        match shards.last_mut() {
            Some(shard) if size + one.bytes <= limit => shard.push(one),
            _ => {
                shards.push(vec![one]);
                size = 0;
            }
        }
        size += one.bytes;
    }
    shards
}

fn write_weights(
    manifest: &Manifest,
    model: &ModelConfig,
    shards: &[Vec<&Leaving>],
    folder: &Path,
) -> Result<()> {
    let qkv = QkvShape::of(model);
    let mut weight_map = Map::new();
    let mut total = 0;
    for (at, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => SINGLE.to_string(),
            count => format!("model-{:05}-of-{count:05}.safetensors", at + 1),
        };
        let mut tensors = Vec::new();
        for Leaving { planned, dtype, .. } in shard {
            let shapes = planned.transform.their_shapes(&planned.spec.shape, &qkv);
            tensors.extend(
                planned.theirs.iter().zip(shapes).map(|(name, shape)| (name, *dtype, shape)),
            );
        }
        weight_map.extend(tensors.iter().map(|(tensor, ..)| (tensor.to_string(), json!(name))));
        let stored =
            tensors.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.as_slice()));
        let mut out = SafetensorsWriter::create(&folder.join(&name), stored)?;
        for Leaving { planned, dtype, bytes } in shard {
            let value = read(manifest, planned, *dtype)?;
            refuse_overflow(&value, *dtype, &planned.theirs.join(", "))?;
            for part in planned.transform.to_theirs(value, &planned.spec.shape, dtype.size(), &qkv)
            {
                out.write(&part)?;
            }
            total += bytes;
        }
        out.finish()?;
    }
    if shards.len() > 1 {
        write_json(
            &folder.join(INDEX),
            &json!({"metadata": {"total_size": total}, "weight_map": weight_map}),
        )?;
    }
    Ok(())
}

/// Refuses values that f16 cannot represent (beyond 65504).
fn refuse_overflow(value: &[u8], dtype: Float, name: &str) -> Result<()> {
    let is_infinite = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]) & 0x7fff == 0x7c00;
    if dtype == Float::F16 && value.chunks_exact(2).any(is_infinite) {
        return Err(Error::config(format!(
            "{name} has values beyond 65504, the largest in fp16; export with --dtype bf16 or fp32"
        )));
    }
    Ok(())
}

/// A parameter's bytes in `dtype`.
fn read(manifest: &Manifest, planned: &Planned, dtype: Float) -> Result<Vec<u8>> {
    let shape = &planned.spec.shape;
    let numel = shape.iter().product();
    let data = Tensor::zeros(numel, candle_dtype(dtype), &Device::Cpu)?;
    let piece =
        Piece { offset: vec![0; shape.len()], shape: shape.clone(), flat: 0..numel, local: 0 };
    manifest.load(&[ShardRef {
        name: planned.spec.name.clone(),
        kind: StateKind::Param,
        global_shape: shape.clone(),
        partition: None,
        pieces: vec![piece],
        data: data.clone().into(),
    }])?;
    Ok(kernels::tensor::host::with_bytes(&data, "export", |bytes| Ok(bytes.to_vec()))?)
}

/// Writes everything except the weights. Returns a note about it, if any.
fn write_descriptions(
    state: &Value,
    beside: &Path,
    model: &ModelConfig,
    family: Family,
    origin: Option<HfConfig>,
    dtype: Float,
    folder: &Path,
) -> Result<Option<String>> {
    let mut config = match origin {
        Some(HfConfig { model: original, mut json, .. }) => {
            // The context was extended in training.
            if model.max_position_embeddings > original.max_position_embeddings {
                let name =
                    if family == Family::Bloom { "seq_length" } else { "max_position_embeddings" };
                json.insert(name.into(), model.max_position_embeddings.into());
            }
            json.insert("vocab_size".into(), model.vocab_size.into());
            if model.rotary_base != original.rotary_base {
                json.insert("rope_theta".into(), model.rotary_base.into());
                for name in ["rope_parameters", "rope_scaling"] {
                    // If it exists, it takes precedence over the other.
                    if let Some(theta) =
                        json.get_mut(name).and_then(|rope| rope.get_mut("rope_theta"))
                    {
                        *theta = model.rotary_base.into();
                    }
                }
            }
            json
        }
        None => {
            let mut config = to_json(model, family);
            // Null instead of absent: an absent field would get the family's default, a token of
            // another vocabulary.
            for token in ["bos_token_id", "eos_token_id", "pad_token_id"] {
                config.insert(token.into(), Value::Null);
            }
            config
        }
    };
    config.insert("architectures".into(), json!([family.architecture()]));
    let name = if config.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    let dtype = match dtype {
        Float::F32 => "float32",
        Float::Bf16 => "bfloat16",
        Float::F16 => "float16",
        Float::F64 => "float64",
    };
    config.insert(name.into(), dtype.into());
    let taken = Taken::of(state);
    let tokens = tokenizer::write(taken, beside, folder, family, model)?;
    tokens.name_in(&mut config);
    // If there are no settings, or they belong to another tokenizer than bytes, they are derived
    // from the rest.
    let came = if taken.bytes { None } else { generation_config(beside)? };
    let mut generation = came.unwrap_or_else(|| {
        let names = ["bos_token_id", "eos_token_id", "pad_token_id"].into_iter();
        let ids = names.filter_map(|name| {
            Some((name.to_string(), config.get(name).filter(|id| !id.is_null())?.clone()))
        });
        ids.chain([("_from_model_config".to_string(), true.into())]).collect()
    });
    tokens.name_in(&mut generation);
    write_json(&folder.join(CONFIG), &config.into())?;
    write_json(&folder.join(GENERATION_CONFIG), &generation.into())?;
    Ok(tokens.note)
}

/// The generation settings that came with the weights or the tokenizer.
fn generation_config(beside: &Path) -> Result<Option<Map<String, Value>>> {
    let path = beside.join(GENERATION_CONFIG);
    match files::read(&path, MAX_GENERATION_CONFIG) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|e| {
            Error::checkpoint(
                &path,
                format!("is not a JSON object: {e}; copy it again, or remove it"),
            )
        }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("read", &path, error)),
    }
}

pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    let mut text =
        serde_json::to_string_pretty(value).map_err(|e| Error::checkpoint(path, e.to_string()))?;
    text.push('\n');
    fs::write(path, text).map_err(|e| Error::io("write", path, e))
}
