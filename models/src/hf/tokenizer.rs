//! The tokenizer files of an exported model, from which transformers' `AutoTokenizer` produces the
//! tokens of training.
//!
//! Files that came with the model are copied unchanged. Files created here, and incomplete ones,
//! are completed: without a `tokenizer_class`, `AutoTokenizer` uses the class of the model's type,
//! and several of these build their own pipeline around the vocabulary (`transformers` 5:
//! `models/auto/tokenization_auto.py`, `tokenization_{gpt2,qwen2,llama}.py`).

use std::path::Path;

use megatron::checkpoint::SidecarFiles;
use megatron::config::ModelConfig;
use megatron::data::{TOKENIZER_FILE, Tokenizer};
use megatron::{Error, Result, files};
use serde_json::{Map, Value, json};

use super::export::write_json;
use super::{GENERATION_CONFIG, SIDECAR_FILES};
use crate::families::Family;

const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
/// Maximum size of a tokenizer file, enough for a vocabulary of all languages in its longest
/// spelling.
const MAX_BYTES: u64 = 256 << 20;
/// The class that uses a `tokenizer.json` unchanged, in versions 4 and 5.
const AS_IT_IS: &str = "PreTrainedTokenizerFast";
/// The end of a document of bytes, as spelled in vocabularies trained here.
const END_OF_TEXT: &str = "<|endoftext|>";
/// Tokens for the beginning of a text and for padding in well-known vocabularies.
const WELL_KNOWN_BEGINNINGS: [&str; 3] = ["<|begin_of_text|>", "<s>", "<bos>"];
const WELL_KNOWN_PADDINGS: [&str; 4] = ["<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>"];
/// The pattern with which `Qwen2Tokenizer` splits words.
const QWEN2_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The special tokens that the files name.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    pub eos: Option<u32>,
    pub bos: Option<u32>,
    pub pad: Option<u32>,
    /// The reason why `AutoTokenizer` nevertheless produces other tokens, and what works instead.
    pub note: Option<String>,
}

/// How a run tokenized text, according to a checkpoint's state.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Taken {
    /// Whether bytes were the tokens.
    pub bytes: bool,
    /// Whether special tokens spelled out in a text were treated as text.
    literal: bool,
    /// Whether no tokens were added around a text.
    bare: bool,
}

impl Taken {
    pub fn of(state: &Value) -> Self {
        let is = |option: &str| {
            state.pointer(&format!("/config/data/tokenizer_options/{option}")) == Some(&true.into())
        };
        let bytes = state.pointer("/config/data/tokenizer").is_some_and(|spec| spec == "byte");
        Self { bytes, literal: bytes || is("split_special_tokens"), bare: is("no_special_tokens") }
    }
}

/// Copies the tokenizer files next to the checkpoint in `beside` to `folder`, or writes those of a
/// byte tokenizer.
///
/// # Errors
/// If a file cannot be read or written, or is not JSON.
pub(super) fn write(
    taken: Taken,
    beside: &Path,
    folder: &Path,
    family: Family,
    model: &ModelConfig,
) -> Result<Tokens> {
    if taken.bytes {
        // The files next to the checkpoint belong to another tokenizer.
        write_json(&folder.join(TOKENIZER_FILE), &bytes_json())?;
    } else {
        let names = SIDECAR_FILES.into_iter().filter(|name| *name != GENERATION_CONFIG);
        SidecarFiles::read(names.map(|name| (beside.join(name), folder.join(name))))?.place()?;
    }
    let path = folder.join(TOKENIZER_FILE);
    if !path.exists() {
        return Ok(Tokens::default());
    }
    let mut json = object(&path)?;
    let around = json.get("post_processor").unwrap_or(&Value::Null);
    let alone = without_tokens(around);
    let removes = taken.bare && alone != *around;
    if removes {
        json.insert("post_processor".into(), alone);
        write_json(&path, &json.clone().into())?;
    }
    let eod = Tokenizer::open(&path.display().to_string(), None, Path::new(""))?.eod();
    let vocabulary = Vocabulary(&json);
    let config_path = folder.join(TOKENIZER_CONFIG);
    let (came, map) = (object(&config_path)?, object(&folder.join(SPECIAL_TOKENS))?);
    let mut config = came.clone();
    if taken.literal {
        config.insert("split_special_tokens".into(), true.into());
    }
    if removes {
        // Some classes of transformers build a post-processor from these settings.
        config.extend(["add_bos_token", "add_eos_token"].map(|key| (key.into(), false.into())));
    }
    complete(&mut config, &map, &vocabulary, eod, model);
    let note = choose_class(&mut config, family, &json);
    if config != came {
        write_json(&config_path, &config.clone().into())?;
    }
    let bare = removes.then(|| {
        format!(
            "training added no tokens around texts, so {TOKENIZER_FILE} was written without the template that adds them"
        )
    });
    let notes: Vec<String> = note.into_iter().chain(bare).collect();
    let id = |name: &str| vocabulary.id(&spelling(config.get(name).or(map.get(name))?)?);
    let note = (!notes.is_empty()).then(|| notes.join("; "));
    Ok(Tokens { eos: eod.or(id("eos_token")), bos: id("bos_token"), pad: id("pad_token"), note })
}

/// A post-processor without the steps that add tokens around a text.
fn without_tokens(processor: &Value) -> Value {
    let keeps = |step: &Value| step["type"] == "ByteLevel";
    match processor["processors"].as_array() {
        Some(steps) => {
            let kept: Vec<Value> = steps.iter().filter(|step| keeps(step)).cloned().collect();
            if kept.len() == steps.len() {
                return processor.clone();
            }
            if kept.is_empty() {
                Value::Null
            } else {
                json!({"type": "Sequence", "processors": kept})
            }
        }
        None if keeps(processor) => processor.clone(),
        None => Value::Null,
    }
}

/// Names the tokens for beginning, end and padding, if no file names them.
fn complete(
    config: &mut Map<String, Value>,
    map: &Map<String, Value>,
    vocabulary: &Vocabulary,
    eod: Option<u32>,
    model: &ModelConfig,
) {
    let bare = config.get("tokenizer_class").is_none();
    let says = |config: &Map<String, Value>, name: &str| {
        config.contains_key(name) || map.contains_key(name)
    };
    let end = eod.and_then(|id| vocabulary.spelling(id));
    if let Some(end) = &end
        && !says(config, "eos_token")
    {
        config.insert("eos_token".into(), end.clone().into());
    }
    if !bare {
        return;
    }
    let known = |names: &[&str]| {
        names.iter().find(|name| vocabulary.id(name).is_some()).map(|name| (*name).to_string())
    };
    let others =
        [("bos_token", known(&WELL_KNOWN_BEGINNINGS)), ("pad_token", known(&WELL_KNOWN_PADDINGS))];
    for (name, token) in others {
        // The token that ends a document also stands before the next one.
        if let Some(token) = token.or(end.clone())
            && !says(config, name)
        {
            config.insert(name.into(), token.into());
        }
    }
    let unknown = vocabulary
        .0
        .get("model")
        .and_then(|model| model.get("unk_token"))
        .cloned()
        .unwrap_or_default();
    for (name, value) in [
        ("unk_token", unknown),
        ("model_max_length", model.max_position_embeddings.into()),
        ("clean_up_tokenization_spaces", false.into()),
    ] {
        if !says(config, name) {
            config.insert(name.into(), value);
        }
    }
}

/// Makes `AutoTokenizer` use the `tokenizer.json` unchanged, if a class of the model's type, or the
/// named one, would build another pipeline. Returns a note if no class can be named for this.
fn choose_class(
    config: &mut Map<String, Value>,
    family: Family,
    json: &Map<String, Value>,
) -> Option<String> {
    let named = config
        .get("tokenizer_class")
        .and_then(Value::as_str)
        .map(|class| class.trim_end_matches("Fast").to_owned());
    if named.is_none_or(|class| !builds(&class, json)) {
        config.insert("tokenizer_class".into(), AS_IT_IS.into());
    }
    // Whatever class is named.
    (family == Family::Qwen2 && !builds("Qwen2Tokenizer", json)).then(|| {
        format!(
            "AutoTokenizer of transformers 5 builds Qwen2's own tokenizer for every model of type qwen2, which gives other tokens than \
             this model's; {AS_IT_IS}.from_pretrained(DIR) gives the right ones, as AutoTokenizer of version 4 does"
        )
    })
}

/// Whether a class of transformers that builds its own pipeline builds the same pipeline as `json`.
fn builds(class: &str, json: &Map<String, Value>) -> bool {
    let part = |name: &str| json.get(name).unwrap_or(&Value::Null);
    let normalizer = part("normalizer").get("type").and_then(Value::as_str);
    let words = part("pre_tokenizer");
    let model = part("model");
    let plain = |name: &str| {
        model.get(name).is_none_or(|value| [Value::Null, json!(false), json!("")].contains(value))
    };
    let is_bpe = model.get("type").and_then(Value::as_str) == Some("BPE");
    let byte_level = is_bpe
        && ["byte_fallback", "ignore_merges", "fuse_unk", "continuing_subword_prefix"]
            .iter()
            .all(|name| plain(name));
    let cuts = |words: &Value, by_regex: bool| {
        let is =
            |name: &str, default: bool| words.get(name).and_then(Value::as_bool).unwrap_or(default);
        words["type"] == "ByteLevel"
            && is("use_regex", true) == by_regex
            && !is("add_prefix_space", true)
    };
    match class {
        "GPT2Tokenizer" => byte_level && normalizer.is_none() && cuts(words, true),
        "Qwen2Tokenizer" => {
            let parts = words["pretokenizers"].as_array().map_or(&[][..], Vec::as_slice);
            let in_two = |parts: &[Value]| {
                let [split, bytes] = parts else { return false };
                split["type"] == "Split"
                    && split["pattern"]["Regex"] == QWEN2_WORDS
                    && split["behavior"] == "Isolated"
                    && split["invert"] != true
                    && cuts(bytes, false)
            };
            byte_level && normalizer == Some("NFC") && in_two(parts)
        }
        // With ▁ for spaces, in either of the two forms.
        "LlamaTokenizer" => {
            is_bpe
                && (words["type"] == "Metaspace"
                    || words.is_null() && normalizer == Some("Sequence"))
        }
        _ => true,
    }
}

/// The tokens in a `tokenizer.json`.
struct Vocabulary<'a>(&'a Map<String, Value>);

impl Vocabulary<'_> {
    fn added(&self) -> impl Iterator<Item = (u32, &str)> {
        let added = self.0.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
        added.filter_map(|token| {
            Some((u32::try_from(token["id"].as_u64()?).ok()?, token["content"].as_str()?))
        })
    }

    fn id(&self, spelling: &str) -> Option<u32> {
        let added = self.added().find(|(_, content)| *content == spelling).map(|(id, _)| id);
        added.or_else(|| match self.0.get("model")?.get("vocab")? {
            Value::Object(ids) => u32::try_from(ids.get(spelling)?.as_u64()?).ok(),
            // The form of Unigram vocabularies.
            Value::Array(pieces) => {
                pieces.iter().position(|piece| piece[0] == spelling).map(|id| id as u32)
            }
            _ => None,
        })
    }

    fn spelling(&self, id: u32) -> Option<String> {
        let added =
            self.added().find(|(added, _)| *added == id).map(|(_, content)| content.to_owned());
        added.or_else(|| match self.0.get("model")?.get("vocab")? {
            Value::Object(ids) => ids
                .iter()
                .find(|(_, value)| value.as_u64() == Some(id.into()))
                .map(|(token, _)| token.clone()),
            Value::Array(pieces) => pieces.get(id as usize)?[0].as_str().map(str::to_owned),
            _ => None,
        })
    }
}

/// A token in a configuration: its spelling, or an object with the spelling.
fn spelling(token: &Value) -> Option<String> {
    token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
}

/// The object in a file; empty if there is no file.
fn object(path: &Path) -> Result<Map<String, Value>> {
    match files::read(path, MAX_BYTES) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
            Error::data(path, format!("is not a JSON object: {error}; copy it again, or remove it"))
        }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Map::new()),
        Err(error) => Err(Error::io("read", path, error)),
    }
}

/// A `tokenizer.json` of bytes: each byte is the token with its own number, and the last token ends
/// a document.
fn bytes_json() -> Value {
    // The characters for bytes in byte-level vocabularies: printable bytes stand for themselves,
    // others are numbered from 256 on.
    let seen = |byte: &u32| matches!(*byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut unseen = 256..;
    let written =
        (0u32..256).map(|byte| if seen(&byte) { byte } else { unseen.next().unwrap_or(byte) });
    let vocab: Map<String, Value> = written
        .enumerate()
        .filter_map(|(id, code)| Some((char::from_u32(code)?.to_string(), id.into())))
        .collect();
    let words = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": vocab.len(), "content": END_OF_TEXT, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true
        }],
        "normalizer": null,
        "pre_tokenizer": words,
        "post_processor": null,
        "decoder": words,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": []
        }
    })
}

/// The one or several ids under `name` in a configuration.
fn ids(config: &Map<String, Value>, name: &str) -> Vec<u64> {
    match config.get(name) {
        Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_u64).collect(),
        Some(value) => value.as_u64().into_iter().collect(),
        None => Vec::new(),
    }
}

impl Tokens {
    /// Writes the ids to a `config.json` or `generation_config.json` that has none, or those of
    /// another tokenizer.
    pub fn name_in(&self, config: &mut Map<String, Value>) {
        let is_anothers =
            self.eos.is_some_and(|eos| !ids(config, "eos_token_id").contains(&eos.into()));
        if let (true, Some(eos)) = (is_anothers, self.eos) {
            config.insert("eos_token_id".into(), eos.into());
        }
        for (name, id) in [
            ("bos_token_id", self.bos),
            ("pad_token_id", self.pad.filter(|pad| Some(*pad) != self.eos)),
        ] {
            if let Some(id) = id
                && (is_anothers || ids(config, name).is_empty())
            {
                config.insert(name.into(), id.into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files of an exported model that had `files` next to its checkpoint.
    fn exported(
        family: Family,
        state: Value,
        given: &[(&str, &Value)],
    ) -> (tempfile::TempDir, Tokens) {
        let (beside, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for (name, value) in given {
            write_json(&beside.path().join(name), value).unwrap();
        }
        let json = json!({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 300});
        let config = super::super::HfConfig::from_json(
            Path::new("config.json"),
            json.as_object().unwrap().clone(),
        )
        .unwrap();
        let tokens =
            write(Taken::of(&state), beside.path(), folder.path(), family, &config.model).unwrap();
        (folder, tokens)
    }

    fn config(folder: &tempfile::TempDir) -> Value {
        object(&folder.path().join(TOKENIZER_CONFIG)).unwrap().into()
    }

    #[test]
    fn bytes_get_a_tokenizer_of_bytes_whatever_lies_beside() {
        let (folder, tokens) = exported(
            Family::Llama,
            json!({"config": {"data": {"tokenizer": "byte"}}}),
            &[("chat_template.jinja", &json!("x")), (TOKENIZER_FILE, &json!({}))],
        );
        assert_eq!((tokens.eos, tokens.bos, tokens.pad), (Some(256), Some(256), Some(256)));
        let tokenizer =
            Tokenizer::open(folder.path().to_str().unwrap(), None, Path::new("")).unwrap();
        let text = "Bytes\n\n of é, 漢 \u{0}\u{1f600}\tand  spaces.";
        assert_eq!(tokenizer.encode(text).unwrap(), Tokenizer::byte().encode(text).unwrap());
        let config = config(&folder);
        assert_eq!(
            (&config["tokenizer_class"], &config["eos_token"]),
            (&json!(AS_IT_IS), &json!(END_OF_TEXT))
        );
        // No spelling in a text becomes a special token.
        assert_eq!(
            (&config["split_special_tokens"], &config["model_max_length"]),
            (&json!(true), &json!(32))
        );
        assert!(!folder.path().join("chat_template.jinja").exists());
    }

    #[test]
    fn a_bare_tokenizer_is_taken_as_it_is_and_gets_its_special_tokens() {
        let mut json = bytes_json();
        json["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": 257, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true
        }));
        let (folder, tokens) = exported(Family::Gpt2, json!({}), &[(TOKENIZER_FILE, &json)]);
        assert_eq!(
            (tokens.eos, tokens.bos, tokens.pad, tokens.note),
            (Some(256), Some(257), Some(256), None)
        );
        let config = config(&folder);
        assert_eq!(
            (&config["tokenizer_class"], &config["bos_token"]),
            (&json!(AS_IT_IS), &json!("<s>"))
        );
        // Qwen2's class builds another pipeline and ignores the setting.
        let (_, tokens) = exported(Family::Qwen2, json!({}), &[(TOKENIZER_FILE, &json)]);
        assert!(tokens.note.unwrap().contains("PreTrainedTokenizerFast.from_pretrained"));
    }

    #[test]
    fn what_came_whole_is_carried_as_it_is_and_a_class_that_builds_another_pipeline_is_replaced() {
        let whole = json!({"tokenizer_class": "GPT2Tokenizer", "eos_token": {"content": END_OF_TEXT}, "bos_token": null, "chat_template": "{{ x }}"});
        let given = [(TOKENIZER_FILE, &bytes_json()), (TOKENIZER_CONFIG, &whole)];
        let (folder, tokens) = exported(Family::Llama, json!({}), &given);
        assert_eq!((config(&folder), tokens.eos, tokens.bos), (whole.clone(), Some(256), None));
        let mut other = bytes_json();
        other["pre_tokenizer"]["use_regex"] = false.into();
        let (folder, _) = exported(
            Family::Gpt2,
            json!({}),
            &[(TOKENIZER_FILE, &other), (TOKENIZER_CONFIG, &whole)],
        );
        assert_eq!(
            (&config(&folder)["tokenizer_class"], &config(&folder)["chat_template"]),
            (&json!(AS_IT_IS), &json!("{{ x }}"))
        );
        // Another file may name the end of a document.
        let map = json!({"eos_token": "a"});
        let (folder, tokens) =
            exported(Family::Gpt2, json!({}), &[(TOKENIZER_FILE, &other), (SPECIAL_TOKENS, &map)]);
        assert_eq!(config(&folder).get("eos_token"), None);
        assert!(tokens.eos.is_some());
    }

    #[test]
    fn how_a_run_took_text_is_said() {
        let mut json = bytes_json();
        let (end, text) = (
            json!({"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}),
            json!({"Sequence": {"id": "A", "type_id": 0}}),
        );
        let template = json!({"type": "TemplateProcessing", "single": [end, text], "pair": [],
            "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [256], "tokens": [END_OF_TEXT]}}});
        let offsets = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let all = json!({"type": "Sequence", "processors": [offsets, template]});
        let mut of = |options: Value, processor: &Value| {
            json["post_processor"] = processor.clone();
            let state =
                json!({"config": {"data": {"tokenizer": "x", "tokenizer_options": options}}});
            let (folder, tokens) = exported(Family::Gpt2, state, &[(TOKENIZER_FILE, &json)]);
            let tokenizer =
                Tokenizer::open(folder.path().to_str().unwrap(), None, Path::new("")).unwrap();
            (config(&folder), tokens.note, tokenizer.encode_prompt("a<|endoftext|>").unwrap())
        };
        let literal: Vec<u32> = b"a<|endoftext|>".iter().map(|&byte| byte.into()).collect();
        for processor in [&template, &all] {
            let (config, note, tokens) =
                of(json!({"split_special_tokens": true, "no_special_tokens": true}), processor);
            assert_eq!(
                (&config["split_special_tokens"], &config["add_bos_token"]),
                (&json!(true), &json!(false))
            );
            assert!(note.unwrap().contains("without the template"));
            assert_eq!(tokens, literal, "as in training");
            let (config, note, tokens) = of(json!({}), processor);
            assert_eq!(
                (config.get("add_bos_token"), note, tokens),
                (None, None, vec![256, 97, 256])
            );
        }
        // There is nothing to leave out.
        let (config, note, tokens) = of(json!({"no_special_tokens": true}), &offsets);
        assert_eq!((config.get("add_bos_token"), note, tokens), (None, None, vec![97, 256]));
    }

    #[test]
    fn qwen2s_own_pipeline_is_known() {
        let mut json = bytes_json();
        json["normalizer"] = json!({"type": "NFC"});
        json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": QWEN2_WORDS}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}]});
        let (_, tokens) = exported(Family::Qwen2, json!({}), &[(TOKENIZER_FILE, &json)]);
        assert_eq!(tokens.note, None);
    }

    #[test]
    fn configurations_name_the_tokenizers_tokens_unless_they_do() {
        let tokens = Tokens { eos: Some(7), bos: Some(1), pad: Some(7), note: None };
        let named = |config: Value| {
            let mut config = config.as_object().unwrap().clone();
            tokens.name_in(&mut config);
            Value::from(config)
        };
        assert_eq!(
            named(json!({"eos_token_id": null})),
            json!({"eos_token_id": 7, "bos_token_id": 1})
        );
        let several = json!({"eos_token_id": [5, 7], "bos_token_id": 2, "pad_token_id": 0});
        assert_eq!(named(several.clone()), several);
        assert_eq!(
            named(json!({"eos_token_id": 9, "bos_token_id": 2})),
            json!({"eos_token_id": 7, "bos_token_id": 1})
        );
    }
}
