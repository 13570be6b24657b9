//! `config.json` ↔ [`ModelConfig`]. A setting that would change the result but is not supported is
//! refused by name, never dropped.
//!
//! Fields and their defaults: `transformers` `configuration_{gpt2,llama,mistral,qwen2,bloom}.py`,
//! versions 4 and 5.

mod read;
#[cfg(test)]
mod tests;
mod write;

use std::path::{Path, PathBuf};

use megatron::checkpoint::Found;
use megatron::config::{ModelConfig, Origins, ParallelConfig};
use megatron::{Error, Result, files};
use serde_json::{Map, Value};

pub use self::write::{family_of, to_json};
use super::fields::Fields;
use crate::families::Family;

/// Name of the file in a Hugging Face folder.
pub const CONFIG: &str = "config.json";
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// The architecture in a `config.json`.
#[derive(Clone, Debug)]
pub struct HfConfig {
    /// The family that `model_type` names.
    pub family: Family,
    /// `seq_length` is the longest sequence the model accepts.
    pub model: ModelConfig,
    /// The unchanged content of the file.
    pub json: Map<String, Value>,
    /// Ignored fields of other programs, which do not affect the result.
    passed_over: Vec<String>,
    path: PathBuf,
}

impl HfConfig {
    /// Reads `folder/config.json`.
    ///
    /// # Errors
    /// If it cannot be read, or describes an unsupported model; the message names the field.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG);
        match Found::at(folder).filter(|_| !path.exists()) {
            // A Hugging Face folder without a configuration gives the error that the file is
            // missing.
            None | Some(Found::HuggingFace) => Self::read_file(&path),
            Some(found) => Err(Error::checkpoint(folder, found.advice(folder))),
        }
    }

    /// Reads a file with the content of a `config.json`.
    ///
    /// # Errors
    /// As [`HfConfig::read`].
    pub fn read_file(path: &Path) -> Result<Self> {
        let bytes = files::read(path, MAX_CONFIG_BYTES).map_err(|e| Error::io("read", path, e))?;
        let json = serde_json::from_slice(&bytes)
            .map_err(|e| Error::checkpoint(path, format!("is not a config: {e}")))?;
        Self::from_json(path, json)
    }

    /// Interprets `json`, which was read from `path`.
    ///
    /// # Errors
    /// As [`HfConfig::read`].
    pub fn from_json(path: &Path, json: Map<String, Value>) -> Result<Self> {
        let (family, model, passed_over) =
            understand(&json).map_err(|why| Error::checkpoint(path, why))?;
        ParallelConfig::default()
            .validate_with(&model, &names(family))
            .map_err(|e| Error::checkpoint(path, format!("describes an impossible model: {e}")))?;
        Ok(Self { family, model, json, passed_over, path: path.to_path_buf() })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A note about ignored fields, if there are any.
    pub fn note(&self) -> Option<String> {
        let passed_over = self.passed_over.join(", ");
        (!passed_over.is_empty()).then(|| {
            format!(
                "{} has settings that change no result here: {passed_over}",
                self.path.display()
            )
        })
    }
}

/// The names of the checked settings in a family's file.
fn names(family: Family) -> Origins {
    let pairs: &[(&str, &str)] = match family {
        Family::Gpt2 => &[
            ("num_layers", "n_layer"),
            ("hidden_size", "n_embd"),
            ("ffn_hidden_size", "n_inner"),
            ("seq_length", "n_positions"),
            ("norm_epsilon", "layer_norm_epsilon"),
            ("attention_dropout", "attn_pdrop"),
            ("hidden_dropout", "resid_pdrop"),
        ],
        Family::Llama | Family::Mistral | Family::Qwen2 => &[
            ("num_layers", "num_hidden_layers"),
            ("ffn_hidden_size", "intermediate_size"),
            ("kv_channels", "head_dim"),
            ("seq_length", "max_position_embeddings"),
            ("rotary_base", "rope_theta"),
            ("rope_scaling_factor", "factor in rope_scaling"),
            ("norm_epsilon", "rms_norm_eps"),
        ],
        Family::Bloom => &[("num_layers", "n_layer"), ("norm_epsilon", "layer_norm_epsilon")],
    };
    let mut names = Origins::default();
    let pairs = pairs.iter().chain(&[("init_method_std", "initializer_range")]);
    pairs.for_each(|(key, name)| names.record(*key, *name));
    names
}

/// The family, the model, and the ignored fields.
fn understand(
    json: &Map<String, Value>,
) -> std::result::Result<(Family, ModelConfig, Vec<String>), String> {
    let known = || Family::ALL.map(Family::architecture).join(", ");
    let model_type = json.get("model_type").and_then(Value::as_str).ok_or("has no model_type")?;
    let family = Family::ALL.into_iter().find(|family| family.model_type() == model_type);
    let family = family.ok_or_else(|| {
        format!("model_type {model_type:?} is not supported; supported are {}", known())
    })?;
    if let Some(Value::Array(names)) = json.get("architectures") {
        let bare =
            family.architecture().replace("LMHeadModel", "Model").replace("ForCausalLM", "Model");
        if let Some(other) =
            names.iter().find(|name| **name != family.architecture() && **name != bare.as_str())
        {
            return Err(format!(
                "architecture {other} is not supported; supported are {}",
                known()
            ));
        }
    }
    let mut fields = Fields::new(json);
    fields.refuse_quantized()?;
    let model = match family {
        Family::Gpt2 => read::gpt2(&mut fields)?,
        Family::Llama | Family::Mistral | Family::Qwen2 => read::llama(&mut fields, family)?,
        Family::Bloom => read::bloom(&mut fields)?,
    };
    let passed_over = fields.finish()?;
    if model.vocab_size == 0 {
        return Err("describes a vocabulary without tokens".into());
    }
    if model.num_attention_heads == 0 || model.num_query_groups == 0 || model.head_dim == 0 {
        return Err("describes attention without heads".into());
    }
    if !model.num_attention_heads.is_multiple_of(model.num_query_groups) {
        return Err(format!(
            "num_attention_heads {} is not a multiple of num_key_value_heads {}",
            model.num_attention_heads, model.num_query_groups
        ));
    }
    Ok((family, model, passed_over))
}
