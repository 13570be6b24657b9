//! Tokenizers: bytes, a Hugging Face `tokenizer.json`, or a byte-level BPE trained on the corpus at
//! the first start.
//!
//! Byte-level BPE as in Radford et al. 2019 (GPT-2); the `tokenizers` crate implements training and
//! `tokenizer.json`.

mod encoding;

use std::path::Path;
use std::sync::Arc;

use tokenizers::{Encoding, Token};

use super::added_tokens::added_tokens;
use super::bpe::train_bpe;
use super::cache::{AtomicFile, KeyHasher, open_or_build};
use super::gpt2;
use super::pretokenizer_cache::PretokenizerCache;
use super::split_points::{SplitPoints, steps};
use super::text::Corpus;
use super::tokenizer_config::{self, ADDED_TOKENS, CONFIG_FILE, TokenizerConfig};
use crate::config::TokenizerOptions;
use crate::files::could_be_of_the_hub;
use crate::{Error, Result};

/// End-of-document token in vocabularies trained here.
pub(super) const END_OF_TEXT: &str = "<|endoftext|>";
/// End-of-document tokens of well-known vocabularies; the first existing one is used if no file
/// names one.
const WELL_KNOWN_ENDS: [&str; 5] = [END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>"];
/// The byte tokenizer's end of a document; its vocabulary is one larger.
const BYTE_END: u32 = 256;
/// The bytes and the end of a document.
const SMALLEST_VOCABULARY: usize = BYTE_END as usize + 1;
/// Placeholder for a text, to find the tokens put around it; no vocabulary has so many tokens.
const A_TEXT: u32 = u32::MAX;
/// Version of how text is split for training a vocabulary; vocabularies of other versions are
/// trained again.
const VERSION: &str = "2";

/// Converts text to token ids and back, like transformers' `tokenizer(text)`. A tokenizer that adds
/// tokens around a text adds them around a document, and special tokens that are spelled out in a
/// text become those tokens, unless [`TokenizerOptions`] turn this off.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    kind: Kind,
    vocab_size: usize,
    eod: Option<u32>,
    /// Tokens before and after a document.
    around: [Vec<u32>; 2],
    name: String,
    key: String,
    /// Notes on unexpected properties.
    notes: Vec<String>,
}

#[derive(Clone, Debug)]
enum Kind {
    Byte,
    /// Texts are numbers, and these are the tokens.
    Numbers,
    HuggingFace {
        inner: Arc<tokenizers::Tokenizer>,
        words: Option<Arc<PretokenizerCache>>,
        json: Arc<[u8]>,
        /// The end-of-document token named by the files beside it.
        declared: Option<String>,
        /// Whether those files take text literally.
        declared_literal: bool,
        /// How this tokenizer treats text.
        options: TokenizerOptions,
    },
}

/// File name of a tokenizer beside checkpoints, as in Hugging Face.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// The largest supported token id; more than any vocabulary needs.
const MAX_ID: u64 = i32::MAX as u64;

/// The token ids in a tokenizer.json.
fn ids(json: &serde_json::Value) -> impl Iterator<Item = u64> {
    let vocabulary = json["model"]["vocab"].as_object();
    let added = json["added_tokens"].as_array();
    vocabulary
        .into_iter()
        .flat_map(|tokens| tokens.values())
        .chain(added.into_iter().flatten().map(|token| &token["id"]))
        .filter_map(serde_json::Value::as_u64)
}

impl Tokenizer {
    /// As [`open_with`](Self::open_with), with the tokenizer's own options.
    ///
    /// # Errors
    /// Those of `open_with`.
    pub fn open(spec: &str, corpus: Option<&Corpus>, cache_dir: &Path) -> Result<Self> {
        Self::open_with(spec, &TokenizerOptions::default(), corpus, cache_dir)
    }

    /// Opens the value of `--tokenizer`: `byte`, `train:VOCAB`, `null:VOCAB`, the path of a
    /// `tokenizer.json` or of its folder, or the path of GPT-2's `vocab.json` if the options name
    /// its merges.
    ///
    /// A trained vocabulary is cached in `cache_dir` under the content of `corpus`; one process
    /// builds it while others wait.
    ///
    /// # Errors
    /// `Error::Config` if the name is invalid or `train:` is used without text, `Error::Data` if a
    /// file is unusable.
    pub fn open_with(
        spec: &str,
        options: &TokenizerOptions,
        corpus: Option<&Corpus>,
        cache_dir: &Path,
    ) -> Result<Self> {
        if let Some(merges) = &options.merge_file {
            let vocab = Path::new(spec);
            return Self::from_json(
                vocab,
                gpt2::tokenizer_json(vocab, merges)?,
                &TokenizerConfig::default(),
                options,
            );
        }
        if spec == "byte" {
            return Ok(Self::byte());
        }
        match (spec.strip_prefix("train:"), spec.strip_prefix("null:")) {
            (Some(vocab_size), _) => Self::train(spec, vocab_size, options, corpus, cache_dir),
            (_, Some(vocab_size)) => Self::numbers(spec, vocab_size),
            _ => Self::hugging_face(Path::new(spec), options),
        }
    }

    /// Bytes are tokens 0 to 255; 256 ends a document.
    pub fn byte() -> Self {
        Self::plain(Kind::Byte, BYTE_END, "byte")
    }

    /// Megatron-LM's `NullTokenizer`: texts are numbers below the vocabulary size; that number
    /// itself ends a document.
    fn numbers(spec: &str, vocab_size: &str) -> Result<Self> {
        let size = vocab_size.parse().ok().filter(|size| (1..1 << 31).contains(size)).ok_or_else(|| {
            Error::config(format!(
                "tokenizer \"{spec}\": \"{vocab_size}\" is not a vocabulary size; give null:VOCAB, such as null:32000"
            ))
        })?;
        Ok(Self::plain(Kind::Numbers, size, spec))
    }

    fn plain(kind: Kind, eod: u32, name: &str) -> Self {
        let (vocab_size, around) = (eod as usize + 1, Default::default());
        Self {
            kind,
            vocab_size,
            eod: Some(eod),
            around,
            name: name.into(),
            key: name.into(),
            notes: Vec::new(),
        }
    }

    fn train(
        spec: &str,
        vocab_size: &str,
        options: &TokenizerOptions,
        corpus: Option<&Corpus>,
        cache_dir: &Path,
    ) -> Result<Self> {
        let size: usize = vocab_size.parse().map_err(|_| {
            Error::config(format!(
                "tokenizer \"{spec}\": \"{vocab_size}\" is not a vocabulary size; give train:VOCAB, such as train:4096"
            ))
        })?;
        if size < SMALLEST_VOCABULARY {
            return Err(Error::config(format!(
                "tokenizer \"{spec}\": a byte-level vocabulary has at least 257 tokens, the 256 bytes and {END_OF_TEXT}; \
                 give train:257 or more"
            )));
        }
        let corpus = corpus.ok_or_else(|| {
            Error::config(format!(
                "tokenizer \"{spec}\" needs text to train on, but the data path names indexed datasets; give text, or \
                 the tokenizer.json they were made with"
            ))
        })?;
        let mut key = KeyHasher::default();
        key.field(VERSION.as_bytes()).field(corpus.key().as_bytes());
        let path = cache_dir.join(format!("tokenizer-{size}-{}.json", key.finish()));
        let open = || match path.exists() {
            // A damaged vocabulary is trained again.
            true => Ok(Self::hugging_face(&path, options)
                .ok()
                .filter(|tokenizer| tokenizer.vocab_size <= size)),
            false => Ok(None),
        };
        let mut tokenizer = open_or_build(cache_dir, &[&path], open, || {
            let mut file = AtomicFile::create(&path)?;
            let parts = corpus.parts(Arc::new(SplitPoints::between_words()));
            file.write(train_bpe(size, parts.map(|part| part.map(|part| part.text)))?.as_bytes())?;
            file.commit()
        })?;
        tokenizer.name = spec.into();
        Ok(tokenizer)
    }

    /// Trains a byte-level BPE vocabulary of at most `vocab_size` tokens on `texts` and writes it
    /// to `path` as a `tokenizer.json`.
    ///
    /// # Errors
    /// `Error::Config` if the vocabulary is too small, those of `texts`, or if the file cannot be
    /// written.
    pub fn train_on(
        texts: impl Iterator<Item = Result<String>> + Send,
        vocab_size: usize,
        path: &Path,
    ) -> Result<Self> {
        if vocab_size < SMALLEST_VOCABULARY {
            return Err(Error::config(format!(
                "a byte-level vocabulary of {vocab_size} tokens is too small: the 256 bytes and {END_OF_TEXT} alone are \
                 {SMALLEST_VOCABULARY}; give a larger one"
            )));
        }
        let mut file = AtomicFile::create(path)?;
        file.write(train_bpe(vocab_size, texts)?.as_bytes())?;
        file.commit()?;
        Self::hugging_face(path, &TokenizerOptions::default())
    }

    fn hugging_face(given: &Path, options: &TokenizerOptions) -> Result<Self> {
        let path = if given.is_dir() { given.join(TOKENIZER_FILE) } else { given.to_path_buf() };
        if let Some(why) = tokenizer_config::other_kind(given) {
            return Err(Error::data(given, why));
        }
        let bytes = crate::files::read(&path, tokenizer_config::MAX_FILE_BYTES).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                let mut message =
                    "does not exist; a tokenizer is `byte`, `train:VOCAB`, or the path of a Hugging Face tokenizer.json".to_owned();
                if could_be_of_the_hub(given) && !given.exists() {
                    message += &format!(" (`hf download {} tokenizer.json tokenizer_config.json --local-dir DIR` fetches one)", given.display());
                }
                Error::data(&path, message)
            }
            _ => Error::io("read the tokenizer", &path, error),
        })?;
        Self::from_json(&path, bytes, &TokenizerConfig::read(&path)?, options)
    }

    fn from_json(
        path: &Path,
        bytes: Vec<u8>,
        beside: &TokenizerConfig,
        options: &TokenizerOptions,
    ) -> Result<Self> {
        let unusable = |error: &dyn std::fmt::Display| {
            Error::data(
                path,
                format!(
                    "is not a usable tokenizer.json: {error}; copy it again, or give another tokenizer"
                ),
            )
        };
        // The library panics on some inputs that are not JSON, so check that first.
        let json = serde_json::from_slice::<serde_json::Value>(&bytes)
            .map_err(|error| unusable(&error))?;
        // It also continues counting from the largest id.
        if let Some(id) = ids(&json).find(|&id| id > MAX_ID) {
            return Err(unusable(&format!(
                "it has the token id {id}, but the largest supported is {MAX_ID}"
            )));
        }
        let mut inner =
            tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| unusable(&error))?;
        // Truncation and padding set by a model's authors are for inference, not for training
        // texts.
        inner.with_truncation(None).map_err(|error| unusable(&error))?;
        inner.with_padding(None);
        let given = beside.complete(&mut inner)?;
        let notes = beside.notes(path, &json, &inner);
        let literal = options.split_special_tokens || beside.literal;
        inner.set_encode_special_tokens(literal);
        let largest = inner
            .get_vocab(true)
            .into_values()
            .max()
            .ok_or_else(|| unusable(&"its vocabulary is empty"))?;
        let around = match options.no_special_tokens {
            true => Default::default(),
            false => around(&inner).map_err(|error| unusable(&error))?,
        };
        let eod = end_of_document(&inner, beside.eos.as_deref());
        let mut key = KeyHasher::default();
        key.field(&bytes).field(format!("{eod:?} {given:?} {around:?} {literal}").as_bytes());
        Ok(Self {
            kind: Kind::HuggingFace {
                words: PretokenizerCache::of(&inner).map(Arc::new),
                inner: Arc::new(inner),
                json: bytes.into(),
                declared: beside.eos.clone(),
                declared_literal: beside.literal,
                options: TokenizerOptions { merge_file: None, ..options.clone() },
            },
            vocab_size: largest as usize + 1,
            eod,
            around,
            name: path.display().to_string(),
            key: key.finish(),
            notes,
        })
    }

    /// Largest token id plus one.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The token that ends a document, if the vocabulary has one.
    pub fn eod(&self) -> Option<u32> {
        self.eod
    }

    /// Why a setting that needs [`eod`](Self::eod) cannot be used without one, and what to do.
    pub fn lacks_eod(&self) -> String {
        let declared = match &self.kind {
            Kind::HuggingFace { declared, .. } => declared.as_deref(),
            Kind::Byte | Kind::Numbers => None,
        };
        let name = &self.name;
        match declared {
            Some(token) => format!(
                "the vocabulary of {name} has no {token:?}, but the file beside it names this \
                 token as eos_token, the end of documents; use a tokenizer.json that has it, such \
                 as transformers' save_pretrained writes, or name another token"
            ),
            None => format!(
                "the tokenizer {name} has no end-of-document token; name one as eos_token in the tokenizer_config.json beside it"
            ),
        }
    }

    /// Notes for the user on unexpected properties.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The name that the tokenizer was opened under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A hash of everything that encoding depends on.
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// Copies the tokenizer's file into `dir`, beside checkpoints, and records the end-of-document
    /// token there, so that opening the copy gives this tokenizer. The byte tokenizer needs no
    /// file.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_into(&self, dir: &Path) -> Result<()> {
        let Kind::HuggingFace { inner, json, declared, declared_literal, options, .. } = &self.kind
        else {
            return Ok(());
        };
        let path = dir.join(TOKENIZER_FILE);
        if !self.lies_in(dir) {
            write_whole(&path, json)?;
        }
        let there = Self::hugging_face(&path, options);
        if there.is_ok_and(|there| there.key == self.key) {
            return Ok(());
        }
        // Belongs to another tokenizer, or is missing. Other settings in it, such as the chat
        // template, stay.
        let path = path.with_file_name(CONFIG_FILE);
        let mut config = tokenizer_config::object(&path).unwrap_or_default();
        let end = declared.clone().or_else(|| inner.id_to_token(self.eod?));
        config.insert("eos_token".into(), end.into());
        match declared_literal {
            true => drop(config.insert("split_special_tokens".into(), true.into())),
            false => drop(config.remove("split_special_tokens")),
        }
        // With these, no other file beside it is read.
        config.insert(ADDED_TOKENS.into(), tokenizer_config::listed(added_tokens(inner)));
        let text = serde_json::to_vec_pretty(&config)
            .map_err(|error| Error::data(&path, error.to_string()))?;
        write_whole(&path, &text)
    }

    /// Checks that [`Tokenizer::save_into`] would not replace another tokenizer's file in `dir`.
    ///
    /// # Errors
    /// If it would.
    pub fn refuse_to_replace(&self, dir: &Path) -> Result<()> {
        let path = dir.join(TOKENIZER_FILE);
        if matches!(self.kind, Kind::Byte | Kind::Numbers) || !path.exists() || self.lies_in(dir) {
            return Ok(());
        }
        let mine = &self.name;
        Err(Error::data(
            path,
            format!(
                "differs from this run's tokenizer, {mine}, which would be written there; save \
                 elsewhere, or move this file away (the checkpoints beside it use its tokens)"
            ),
        ))
    }

    /// Whether the file in `dir` is this tokenizer's.
    pub fn lies_in(&self, dir: &Path) -> bool {
        match &self.kind {
            Kind::Byte | Kind::Numbers => false,
            Kind::HuggingFace { json, .. } => {
                crate::files::read(&dir.join(TOKENIZER_FILE), tokenizer_config::MAX_FILE_BYTES)
                    .is_ok_and(|there| there[..] == json[..])
            }
        }
    }
}

/// The tokens that a tokenizer puts before and after a text.
fn around(tokenizer: &tokenizers::Tokenizer) -> tokenizers::Result<[Vec<u32>; 2]> {
    // The library panics on templates with unlisted tokens or with a second text.
    for step in steps(tokenizer.get_post_processor()).unwrap_or_default() {
        for piece in step["single"].as_array().into_iter().flatten() {
            let token = piece["SpecialToken"]["id"].as_str();
            if token.is_some_and(|token| step["special_tokens"].get(token).is_none())
                || piece["Sequence"]["id"] == "B"
            {
                return Err(format!(
                    "its post_processor has a template with {piece}, which is not defined"
                )
                .into());
            }
        }
    }
    let text = Encoding::from_tokens(vec![Token::new(A_TEXT, String::new(), (0, 0))], 0);
    let all = tokenizer.post_process(text, None, true)?.get_ids().to_vec();
    match all.split(|&id| id == A_TEXT).collect::<Vec<_>>().as_slice() {
        [before, behind] => Ok([before.to_vec(), behind.to_vec()]),
        parts => Err(format!(
            "its post_processor repeats the text {} times instead of once",
            parts.len() - 1
        )
        .into()),
    }
}

/// Writes a file atomically.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write(bytes)?;
    file.commit()
}

/// The end-of-document token: the `declared` one, else a well-known one.
fn end_of_document(vocabulary: &tokenizers::Tokenizer, declared: Option<&str>) -> Option<u32> {
    match declared {
        Some(token) => vocabulary.token_to_id(token),
        None => WELL_KNOWN_ENDS.iter().find_map(|token| vocabulary.token_to_id(token)),
    }
}
