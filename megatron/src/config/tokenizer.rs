//! Options for opening a tokenizer, besides its name.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Further files of a tokenizer, and how it treats text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokenizerOptions {
    /// The `merges.txt` of GPT-2's `vocab.json`.
    pub merge_file: Option<PathBuf>,
    /// Do not add the tokens that the tokenizer puts around a text, such as beginning-of-text.
    pub no_special_tokens: bool,
    /// Special tokens that are spelled out in a text count as ordinary text.
    pub split_special_tokens: bool,
}
