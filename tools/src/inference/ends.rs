//! The tokens at which a continuation ends: the tokenizer's end-of-document token, and those that a
//! Hugging Face model's files name.

use std::path::Path;

use megatron::data::Tokenizer;
use serde_json::Value;

use crate::error::Result;

/// Largest file of settings, in bytes.
const MAX_BYTES: u64 = 16 << 20;
/// Files that name them; as in transformers, only the first existing file counts.
const FILES: [&str; 3] = ["generation_config.json", "hf_config.json", "config.json"];

/// The end tokens of a model with files in `folder`, if any.
///
/// # Errors
/// If a file is damaged.
pub fn ends(tokenizer: &Tokenizer, folder: Option<&Path>) -> Result<Vec<u32>> {
    let mut ends: Vec<u32> = tokenizer.eod().into_iter().collect();
    let files = FILES.iter().filter_map(|name| Some(folder?.join(name)));
    let Some(file) = files.into_iter().find(|file| file.exists()) else { return Ok(ends) };
    let bytes = megatron::files::read(&file, MAX_BYTES)
        .map_err(|error| megatron::Error::io("read", &file, error))?;
    let config: Value = serde_json::from_slice(&bytes).map_err(|error| {
        megatron::Error::data(&file, format!("is not JSON: {error}; copy it again, or remove it"))
    })?;
    let named = match &config["eos_token_id"] {
        Value::Null => &[][..],
        Value::Array(several) => several,
        one => std::slice::from_ref(one),
    };
    for id in named {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
            megatron::Error::data(
                &file,
                format!("eos_token_id: {id} is not a token; copy the file again"),
            )
        })?;
        if !ends.contains(&id) {
            ends.push(id);
        }
    }
    Ok(ends)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_continuation_ends_at_each_token_that_a_models_files_name() {
        let folder = tempfile::tempdir().unwrap();
        let found =
            || ends(&Tokenizer::byte(), Some(folder.path())).map_err(|error| error.to_string());
        let write =
            |name: &str, content: &str| std::fs::write(folder.path().join(name), content).unwrap();
        assert_eq!(found().unwrap(), [256]);
        write("config.json", r#"{"eos_token_id": 7}"#);
        assert_eq!(found().unwrap(), [256, 7]);
        write("generation_config.json", r#"{"eos_token_id": [9, 8, 256]}"#);
        assert_eq!(found().unwrap(), [256, 9, 8]);
        write("generation_config.json", r#"{"eos_token_id": null}"#);
        assert_eq!(found().unwrap(), [256]);
        for (damaged, part) in
            [("{", "is not JSON"), (r#"{"eos_token_id": [-1]}"#, "-1 is not a token")]
        {
            write("generation_config.json", damaged);
            assert!(found().unwrap_err().contains(part));
        }
    }
}
