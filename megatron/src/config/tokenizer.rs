//! How a tokenizer is opened, beside its name.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What a tokenizer is made of beside the file that names it, and how it takes text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokenizerOptions {
    /// The `merges.txt` of GPT-2's `vocab.json`.
    pub merge_file: Option<PathBuf>,
    /// Put no tokens around a text, such as one that begins it, whatever the tokenizer does by
    /// itself.
    pub no_special_tokens: bool,
    /// Special tokens spelled out in a text are text.
    pub split_special_tokens: bool,
}
