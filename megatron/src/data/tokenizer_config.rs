//! The files beside a `tokenizer.json` with more information about its tokens.
//!
//! Source of the order of precedence: transformers 5, `tokenization_utils_base.py`,
//! `_from_pretrained`, and `TokenizersBackend.__init__`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tokenizers::{AddedToken, Tokenizer};

use crate::{Error, Result, files};

/// The file that names the end-of-document token.
pub(super) const CONFIG_FILE: &str = "tokenizer_config.json";
/// Enough for a vocabulary of all languages in its most verbose form.
pub(super) const MAX_FILE_BYTES: u64 = 256 << 20;
const SPECIAL_TOKENS_FILE: &str = "special_tokens_map.json";
const ADDED_TOKENS_FILE: &str = "added_tokens.json";
/// Added tokens by id, in the configuration. If present, the other two files are not read.
pub(super) const ADDED_TOKENS: &str = "added_tokens_decoder";

/// Tokens with a meaning, each under its name.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Lists of others; the first is the older name.
const MORE: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// A setting of a transformers class, and its place in `tokenizer.json`: the part of the pipeline,
/// and its key there.
type Twice = (&'static str, &'static str, &'static str);
/// Source: transformers 4, `__init__` of `PreTrainedTokenizerFast` and `BertTokenizerFast`, which
/// use the setting, as do some classes of version 5.
const SAID_TWICE: [Twice; 4] = [
    ("add_prefix_space", "pre_tokenizer", "add_prefix_space"),
    ("do_lower_case", "normalizer", "lowercase"),
    ("strip_accents", "normalizer", "strip_accents"),
    ("tokenize_chinese_chars", "normalizer", "handle_chinese_chars"),
];

/// The contents of the files beside a tokenizer.
#[derive(Debug, Default)]
pub(super) struct TokenizerConfig {
    /// The end-of-document token.
    pub eos: Option<String>,
    /// Special tokens that are spelled out in a text count as ordinary text.
    pub literal: bool,
    /// Settings for texts that `tokenizer.json` also has.
    said_twice: Vec<(&'static Twice, bool)>,
    /// Added tokens by their recorded id.
    added: BTreeMap<u64, AddedToken>,
    /// The file that records them.
    source: PathBuf,
    /// Tokens with a meaning, or special for another reason.
    special: Vec<AddedToken>,
}

impl TokenizerConfig {
    /// Reads the files beside `tokenizer`, if there are any.
    ///
    /// # Errors
    /// `Error::Data` if one of them is unusable.
    pub fn read(tokenizer: &Path) -> Result<Self> {
        let file = |name: &str| tokenizer.with_file_name(name);
        let mut config = object(&file(CONFIG_FILE))?;
        let mut found = Self { source: file(CONFIG_FILE), ..Self::default() };
        let listed = config.remove(ADDED_TOKENS);
        if listed.is_none() {
            for (key, value) in object(&file(SPECIAL_TOKENS_FILE))? {
                let more = |value: &Value| value.as_array().cloned().unwrap_or_default();
                match config.get_mut(&key) {
                    Some(there) if MORE.contains(&key.as_str()) => {
                        *there = [more(there), more(&value)].concat().into()
                    }
                    _ => drop(config.insert(key, value)),
                }
            }
        }
        let named = NAMED.iter().filter_map(|key| config.get(*key));
        let more = MORE.iter().filter_map(|key| config.get(*key)?.as_array()).flatten();
        found.special = named.chain(more).filter_map(|value| token(value, true)).collect();
        found.eos =
            config.get("eos_token").and_then(|value| token(value, true)).map(|token| token.content);
        found.literal = config.get("split_special_tokens").is_some_and(|value| value == true);
        let said = |twice: &'static Twice| Some((twice, config.get(twice.0)?.as_bool()?));
        found.said_twice = SAID_TWICE.iter().filter_map(said).collect();
        let unusable = |path: &Path, what: &str| {
            Error::data(
                path,
                format!("{what} is not a token with an id; copy the file again, or remove it"),
            )
        };
        match listed {
            Some(listed) => {
                for (id, value) in listed.as_object().into_iter().flatten() {
                    let entry =
                        id.parse().ok().zip(token(value, false).filter(|_| value.is_object()));
                    let (id, token) = entry
                        .ok_or_else(|| unusable(&found.source, &format!("{ADDED_TOKENS}.{id}")))?;
                    found.added.insert(id, token);
                }
            }
            None => {
                found.source = file(ADDED_TOKENS_FILE);
                for (content, id) in object(&found.source)? {
                    let id = id
                        .as_u64()
                        .ok_or_else(|| unusable(&found.source, &format!("{content:?}")))?;
                    let special = found.special.iter().any(|token| token.content == content);
                    found.added.insert(id, AddedToken::from(content, special));
                }
            }
        }
        Ok(found)
    }

    /// Adds missing tokens to `tokenizer`, and sets the properties of existing ones as recorded
    /// here. Returns the added tokens.
    ///
    /// A token with a meaning but without an id in any file is not added: transformers would append
    /// it to the vocabulary, where a model has no embedding for it. [`Self::notes`] reports it.
    ///
    /// # Errors
    /// `Error::Data` if a token would get another id than recorded.
    pub fn complete(&self, tokenizer: &mut Tokenizer) -> Result<Vec<(u32, AddedToken)>> {
        let unusable = |error: tokenizers::Error| {
            Error::data(
                &self.source,
                format!("cannot be added to the vocabulary: {error}; copy the file again"),
            )
        };
        let before = tokenizer.get_added_tokens_decoder();
        // The vocabulary's own properties take priority over those that added_tokens.json does not
        // record.
        let in_config = self.source.ends_with(CONFIG_FILE);
        let is_there = |id: Option<u32>| id.is_some_and(|id| before.contains_key(&id));
        let with_ids = self
            .added
            .iter()
            .map(|(&id, token)| (id, token, tokenizer.token_to_id(&token.content)));
        let added: Vec<_> = with_ids.filter(|(.., there)| in_config || !is_there(*there)).collect();
        tokenizer
            .add_tokens(added.iter().map(|(_, token, _)| (*token).clone()))
            .map_err(unusable)?;
        for (id, AddedToken { content, .. }, _) in
            added.iter().filter(|(.., there)| there.is_none())
        {
            let got = tokenizer.token_to_id(content);
            if got.map(u64::from) != Some(*id) {
                return Err(Error::data(
                    &self.source,
                    format!(
                        "gives the token {content:?} the id {id}, but the next free id after the \
                         vocabulary of tokenizer.json is {}; copy all files of the tokenizer \
                         again",
                        got.unwrap_or_default()
                    ),
                ));
            }
        }
        let there = tokenizer.get_added_tokens_decoder();
        let special = self.special.iter().filter_map(|token| {
            let id = tokenizer.token_to_id(&token.content)?;
            Some(there.get(&id).unwrap_or(token).clone().special(true))
        });
        let special: Vec<AddedToken> = special.collect();
        tokenizer.add_tokens(special).map_err(unusable)?;
        let mut given = super::added_tokens::added_tokens(tokenizer);
        given.retain(|(id, token)| before.get(id) != Some(token));
        Ok(given)
    }

    /// Notes on differences between these files and the completed `tokenizer` with the file `json`
    /// at `path`.
    pub fn notes(&self, path: &Path, json: &Value, tokenizer: &Tokenizer) -> Vec<String> {
        let mut notes = Vec::new();
        let special = self.special.iter().map(|token| &token.content);
        let absent: BTreeSet<_> =
            special.filter(|token| tokenizer.token_to_id(token).is_none()).collect();
        if !absent.is_empty() {
            let absent: Vec<String> =
                absent.into_iter().map(|token| format!("{token:?}")).collect();
            notes.push(format!(
                "note: {} lacks the special tokens {} that the file beside it names; they are left \
                 out, while transformers appends them to the vocabulary (its save_pretrained \
                 writes a tokenizer.json with them)",
                path.display(),
                absent.join(", ")
            ));
        }
        for ((setting, part, key), said) in &self.said_twice {
            if let Some(other) = step_says(&json[*part], key).filter(|other| other != said) {
                notes.push(format!(
                    "note: {} sets {setting} to {said}, but {} sets it to {other}, which is used; \
                     some classes of transformers use the first",
                    path.with_file_name(CONFIG_FILE).display(),
                    path.display()
                ));
            }
        }
        notes
    }
}

/// The value under `key` in a step of a part of a `tokenizer.json`, if any.
fn step_says(part: &Value, key: &str) -> Option<bool> {
    let steps =
        ["pretokenizers", "normalizers"].into_iter().find_map(|steps| part[steps].as_array());
    let mut steps = steps.map_or(std::slice::from_ref(part), Vec::as_slice).iter();
    steps.find_map(|step| match step.get(key)? {
        // Accent stripping follows lowercasing, unless it is set.
        Value::Null => step.get("lowercase")?.as_bool(),
        value => value.as_bool(),
    })
}

/// The JSON object in a file; empty if there is no file.
pub(super) fn object(path: &Path) -> Result<Map<String, Value>> {
    let bytes = match files::read(path, MAX_FILE_BYTES) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Map::new()),
        Err(error) => return Err(Error::io("read", path, error)),
    };
    serde_json::from_slice(&bytes).map_err(|error| {
        Error::data(path, format!("is not a JSON object: {error}; copy it again, or remove it"))
    })
}

/// A token that is written as its text or as an object.
fn token(value: &Value, special: bool) -> Option<AddedToken> {
    if let Some(content) = value.as_str() {
        return Some(AddedToken::from(content, special));
    }
    let set = |key: &str| value[key] == true;
    let special = special || set("special");
    let token = AddedToken::from(value["content"].as_str()?, special);
    let normalized = value["normalized"].as_bool().unwrap_or(!special);
    let token = token.single_word(set("single_word")).lstrip(set("lstrip")).rstrip(set("rstrip"));
    Some(token.normalized(normalized))
}

/// Added tokens as transformers writes them into a configuration.
pub(super) fn listed(tokens: impl IntoIterator<Item = (u32, AddedToken)>) -> Value {
    let entry = |(id, token): (u32, AddedToken)| {
        let fields = serde_json::json!({
            "content": token.content, "lstrip": token.lstrip, "normalized": token.normalized,
            "rstrip": token.rstrip, "single_word": token.single_word, "special": token.special,
        });
        (id.to_string(), fields)
    };
    Value::Object(tokens.into_iter().map(entry).collect())
}

/// Describes a path that names another kind of tokenizer than `tokenizer.json`, with advice.
pub(super) fn other_kind(path: &Path) -> Option<String> {
    const CONVERT: &str = "python -c 'from transformers import AutoTokenizer as T; T.from_pretrained(\"DIR\").save_pretrained(\"OUT\")'";
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let (there, place) = match path.is_dir() {
        true if path.join(super::TOKENIZER_FILE).exists() => return None,
        true => (
            ["tokenizer.model", "vocab.json", "vocab.txt"]
                .into_iter()
                .find(|name| path.join(name).is_file())?,
            "holds ",
        ),
        false => (name.as_str(), "is "),
    };
    Some(match there {
        "vocab.txt" => {
            format!(
                "{place}a WordPiece vocabulary without its tokenizer.json; create one: {CONVERT}"
            )
        }
        "vocab.json" => format!(
            "{place}a vocabulary without its merges; for GPT-2 give --vocab-file vocab.json \
             --merge-file merges.txt, for others let transformers create a tokenizer.json: \
             {CONVERT}"
        ),
        _ if there.ends_with(".model") => format!(
            "{place}a SentencePiece model, which is not supported; transformers converts it to a tokenizer.json: {CONVERT}"
        ),
        _ if there.ends_with(".tiktoken") => {
            format!(
                "{place}a tiktoken vocabulary, which is not supported; transformers converts it to a tokenizer.json: {CONVERT}"
            )
        }
        _ => return None,
    })
}
