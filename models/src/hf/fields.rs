//! The fields of a `config.json`, each read once, so that those nobody read can be refused by name.
//!
//! Fields that every configuration of `transformers` may carry and that no result depends on: `configuration_utils.py`.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

type Read<T> = std::result::Result<T, String>;

/// Names, bookkeeping, and settings of generation.
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

/// A JSON object whose fields are read by name.
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    seen: BTreeSet<String>,
}

impl<'a> Fields<'a> {
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, seen: HARMLESS.iter().map(|name| name.to_string()).collect() }
    }

    pub fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// A field of any type; read from here on.
    pub fn take(&mut self, name: &str) -> Option<&'a Value> {
        self.seen.insert(name.to_string());
        self.map.get(name)
    }

    fn value(&mut self, name: &str) -> Option<&'a Value> {
        self.take(name).filter(|value| !value.is_null())
    }

    /// Fields that no result depends on.
    pub fn ignore(&mut self, names: &[&str]) {
        self.seen.extend(names.iter().map(|name| name.to_string()));
    }

    pub fn optional_int(&mut self, name: &str) -> Read<Option<usize>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        // Larger numbers are no sizes of a model and would only overflow.
        let int = value.as_u64().and_then(|v| u32::try_from(v).ok()).filter(|v| *v < 1 << 31);
        int.map(|v| Some(v as usize)).ok_or_else(|| format!("{name} is {value}, not a whole number of a model's size"))
    }

    /// A number that goes by any of `names` and must be there.
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
        let Some(value) = self.value(name) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| format!("{name} is {value}, not a number"))
    }

    pub fn float(&mut self, name: &str, default: f64) -> Read<f64> {
        Ok(self.optional_float(name)?.unwrap_or(default))
    }

    pub fn bool(&mut self, name: &str, default: bool) -> Read<bool> {
        let Some(value) = self.value(name) else { return Ok(default) };
        value.as_bool().ok_or_else(|| format!("{name} is {value}, neither true nor false"))
    }

    pub fn must_be(&mut self, name: &str, default: bool, only: bool) -> Read<()> {
        match self.bool(name, default)? {
            value if value == only => Ok(()),
            value => Err(format!("{name} {value} is not available; only {only} is")),
        }
    }

    /// A name that must be one of `allowed`.
    pub fn must(&mut self, name: &str, default: Value, allowed: &[&str]) -> Read<()> {
        let value = self.value(name).unwrap_or(&default);
        match value.as_str() {
            Some(text) if allowed.contains(&text) => Ok(()),
            _ => Err(format!("{name} {value} is not available; available are {}", allowed.join(", "))),
        }
    }

    pub fn must_number(&mut self, name: &str, only: f64) -> Read<()> {
        match self.float(name, only)? {
            value if value == only => Ok(()),
            value => Err(format!("{name} {value} is not available; only {only} is")),
        }
    }

    /// The width of a head.
    pub fn divided(&self, hidden: usize, heads: usize) -> Read<usize> {
        match heads {
            0 => Err("describes attention without heads".into()),
            _ if !hidden.is_multiple_of(heads) => Err(format!("hidden size {hidden} is no multiple of {heads} heads")),
            _ => Ok(hidden / heads),
        }
    }

    /// Ends the reading. A field that says nothing (null, false, empty) may be there unread.
    ///
    /// # Errors
    /// Naming the fields that are not known.
    pub fn finish(self) -> Read<()> {
        let silent = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            _ => false,
        };
        let unread = self.map.iter().filter(|(name, value)| !self.seen.contains(*name) && !silent(value));
        let unread: Vec<String> = unread.map(|(name, value)| format!("{name} = {value}")).collect();
        if unread.is_empty() {
            return Ok(());
        }
        Err(format!("sets what is not known here: {}; remove fields that no result depends on", unread.join(", ")))
    }
}
