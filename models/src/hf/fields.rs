//! The fields of a `config.json`. Each is marked when it is read, so that unread fields can be
//! refused by name.
//!
//! Null and `{}` count as absent. Fields that do not affect the result are ignored: silently if any
//! `transformers` configuration may have them (`configuration_utils.py`), with a note if other
//! programs add them.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

type Read<T> = std::result::Result<T, String>;

/// Names, bookkeeping, and generation settings that transformers itself writes.
const HARMLESS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "model_type",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "pad_token_id",
    "prefix",
    "problem_type",
    "repetition_penalty",
    "return_dict",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "use_cache",
];

/// Fields of other programs and older versions: names, notes, and implementation choices with the
/// same result.
const INERT: &[&str] = &[
    "_commit_hash",
    "_flash_attn_2_enabled",
    "attn_implementation",
    "author",
    "base_model",
    "base_model_name_or_path",
    "classifier_dropout",
    "datasets",
    "description",
    "fused_mlp",
    "fused_rmsnorm",
    "is_decoder",
    "language",
    "library_name",
    "license",
    "low_cpu_mem_usage",
    "max_sequence_length",
    "max_seq_length",
    "model_max_length",
    "model_name",
    "multiple_of",
    "name",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pipeline_tag",
    "pretraining_tp",
    "remove_invalid_values",
    "return_dict_in_generate",
    "tags",
    "torchscript",
    "transformers.js_config",
    "use_bfloat16",
    "use_flash_attention",
    "use_flash_attention_2",
    "use_flash_attn",
    "use_return_dict",
];
/// Prefixes and suffixes of further such names: a tool's notes, heads that no language model has,
/// versions, tokens for generation.
const INERT_STARTS: [&str; 2] = ["unsloth_", "summary_"];
const INERT_ENDS: [&str; 2] = ["_version", "_token_id"];

/// Fields that would change the result, but not with this value.
const NEUTRAL: &[(&str, f64)] = &[
    ("attn_pdrop", 0.0),
    ("embd_pdrop", 0.0),
    ("embedding_multiplier", 1.0),
    ("hidden_dropout", 0.0),
    ("logit_scale", 1.0),
    ("logits_scaling", 1.0),
    ("num_experts", 0.0),
    ("num_local_experts", 0.0),
    ("num_nextn_predict_layers", 0.0),
    ("partial_rotary_factor", 1.0),
    ("resid_pdrop", 0.0),
    ("residual_multiplier", 1.0),
    ("rotary_pct", 1.0),
];

/// A JSON object whose fields are read by name.
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    seen: BTreeSet<String>,
}

impl<'a> Fields<'a> {
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, seen: HARMLESS.iter().map(|name| name.to_string()).collect() }
    }

    /// Whether the field exists and is null. Null and absence differ if a family's default is a
    /// value.
    pub fn is_null(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(Value::is_null)
    }

    /// A field of any type, unless it is null or `{}`. Marks it as read.
    pub fn take(&mut self, name: &str) -> Option<&'a Value> {
        self.seen.insert(name.to_string());
        self.map.get(name).filter(|value| !is_absent(value))
    }

    /// Marks fields that do not affect the result as read.
    pub fn ignore(&mut self, names: &[&str]) {
        self.seen.extend(names.iter().map(|name| name.to_string()));
    }

    pub fn optional_int(&mut self, name: &str) -> Read<Option<usize>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        // Larger numbers are not sizes of a model and would only overflow.
        let int = value.as_u64().and_then(|v| u32::try_from(v).ok()).filter(|v| *v < 1 << 31);
        int.map(|v| Some(v as usize))
            .ok_or_else(|| format!("{name} is {value}, not a whole number in the supported range"))
    }

    /// A required number with any of `names`.
    pub fn int(&mut self, names: &[&str]) -> Read<usize> {
        let mut found = None;
        for name in names {
            found = found.or(self.optional_int(name)?);
        }
        found.ok_or_else(|| format!("has no {}", names.join(" or ")))
    }

    pub fn int_or(&mut self, name: &str, default: usize) -> Read<usize> {
        Ok(self.optional_int(name)?.unwrap_or(default))
    }

    pub fn optional_float(&mut self, name: &str) -> Read<Option<f64>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| format!("{name} is {value}, not a number"))
    }

    pub fn float(&mut self, name: &str, default: f64) -> Read<f64> {
        Ok(self.optional_float(name)?.unwrap_or(default))
    }

    pub fn bool(&mut self, name: &str, default: bool) -> Read<bool> {
        let Some(value) = self.take(name) else { return Ok(default) };
        value.as_bool().ok_or_else(|| format!("{name} is {value}, neither true nor false"))
    }

    pub fn must_be(&mut self, name: &str, default: bool, only: bool) -> Read<()> {
        match self.bool(name, default)? {
            value if value == only => Ok(()),
            value => Err(format!("{name} {value} is not supported; only {only} is")),
        }
    }

    /// Checks that a name is one of `allowed`.
    pub fn must(&mut self, name: &str, default: Value, allowed: &[&str]) -> Read<()> {
        let value = self.take(name).unwrap_or(&default);
        match value.as_str() {
            Some(text) if allowed.contains(&text) => Ok(()),
            _ => Err(format!(
                "{name} {value} is not supported; supported are {}",
                allowed.join(", ")
            )),
        }
    }

    pub fn must_number(&mut self, name: &str, only: f64) -> Read<()> {
        match self.float(name, only)? {
            value if value == only => Ok(()),
            value => Err(format!("{name} {value} is not supported; only {only} is")),
        }
    }

    /// The width of a head.
    pub fn divided(&self, hidden: usize, heads: usize) -> Read<usize> {
        match heads {
            0 => Err("describes attention without heads".into()),
            _ if !hidden.is_multiple_of(heads) => {
                Err(format!("hidden size {hidden} is not a multiple of {heads} heads"))
            }
            _ => Ok(hidden / heads),
        }
    }

    /// Refuses quantized weights.
    pub fn refuse_quantized(&mut self) -> Read<()> {
        for name in ["quantization_config", "compression_config"] {
            let Some(value) = self.take(name) else { continue };
            let off = |key: &str| value.get(key).is_none_or(|on| *on == Value::Bool(false));
            let method = value.get("quant_method").and_then(Value::as_str).unwrap_or("unnamed");
            // bitsandbytes leaves this even if it did nothing.
            if !(method == "bitsandbytes" && off("load_in_4bit") && off("load_in_8bit")) {
                return Err(format!(
                    "has {name} (method {method}): its weights are quantized, which is not \
                     supported; use the original model, or dequantize it with transformers"
                ));
            }
        }
        Ok(())
    }

    /// Ends the reading. Returns the ignored fields that transformers itself does not write. An
    /// unread field is allowed if it has no content (null, false, empty).
    ///
    /// # Errors
    /// If unknown fields could change the result; the error names them.
    pub fn finish(self) -> Read<Vec<String>> {
        let silent = |value: &Value| match value {
            Value::Bool(false) => true,
            Value::Array(list) => list.is_empty(),
            value => is_absent(value),
        };
        let unread =
            self.map.iter().filter(|(name, value)| !self.seen.contains(*name) && !silent(value));
        let (inert, unknown): (Vec<_>, Vec<_>) =
            unread.partition(|(name, value)| is_inert(name, value));
        if unknown.is_empty() {
            return Ok(inert.into_iter().map(|(name, _)| name.clone()).collect());
        }
        let unknown: Vec<String> =
            unknown.into_iter().map(|(name, value)| format!("{name} = {value}")).collect();
        Err(format!(
            "has unknown settings that could change the result: {}; remove the fields that do not",
            unknown.join(", ")
        ))
    }
}

fn is_absent(value: &Value) -> bool {
    value.is_null() || value.as_object().is_some_and(Map::is_empty)
}

/// Whether an unread field does not affect the result.
fn is_inert(name: &str, value: &Value) -> bool {
    INERT.contains(&name)
        || INERT_STARTS.iter().any(|start| name.starts_with(start))
        || INERT_ENDS.iter().any(|end| name.ends_with(end))
        || NEUTRAL
            .iter()
            .any(|(neutral, number)| *neutral == name && value.as_f64() == Some(*number))
}
