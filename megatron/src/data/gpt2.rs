//! GPT-2's byte-level BPE from its two files, Megatron-LM's `--vocab-file` and `--merge-file`.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::tokenizer::END_OF_TEXT;
use super::tokenizer_config::object;
use crate::{Error, Result};

/// The `tokenizer.json` equivalent to `vocab.json` and `merges.txt`. Its `<|endoftext|>`, if there
/// is one, ends documents.
///
/// # Errors
/// If a file cannot be read or has another format.
pub(super) fn tokenizer_json(vocab: &Path, merges: &Path) -> Result<Vec<u8>> {
    if !vocab.exists() {
        return Err(Error::data(vocab, "does not exist; give GPT-2's vocab.json (--vocab-file)"));
    }
    let tokens = object(vocab)?;
    if tokens.is_empty() || !tokens.values().all(Value::is_u64) {
        return Err(Error::data(
            vocab,
            "is not a vocabulary, an object of tokens and their ids; give GPT-2's vocab.json",
        ));
    }
    let text = crate::files::read_text(merges, super::tokenizer_config::MAX_FILE_BYTES).map_err(
        |error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                Error::data(merges, "does not exist; give GPT-2's merges.txt (--merge-file)")
            }
            _ => Error::io("read", merges, error),
        },
    )?;
    let lines = text
        .lines()
        .enumerate()
        .filter(|(i, line)| !(line.is_empty() || *i == 0 && line.starts_with("#version")));
    let pair = |(i, line): (usize, &str)| match line.split_once(' ') {
        Some((a, b)) if ![a, b].contains(&"") && !b.contains(' ') => Ok(json!([a, b])),
        _ => Err(Error::data(
            merges,
            format!(
                "line {} is not a pair of tokens separated by a space; give GPT-2's merges.txt",
                i + 1
            ),
        )),
    };
    let merges = lines.map(pair).collect::<Result<Vec<_>>>()?;
    let end = tokens.get(END_OF_TEXT).map(|id| {
        json!({"id": id, "content": END_OF_TEXT, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    });
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let mut model: Map<String, Value> = Map::new();
    model.insert("type".into(), "BPE".into());
    model.insert("vocab".into(), Value::Object(tokens));
    model.insert("merges".into(), merges.into());
    let tokenizer = json!({"version": "1.0", "added_tokens": end.into_iter().collect::<Vec<_>>(),
        "pre_tokenizer": byte_level, "decoder": byte_level, "model": model});
    serde_json::to_vec(&tokenizer).map_err(|error| Error::data(vocab, error.to_string()))
}
