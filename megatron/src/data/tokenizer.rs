//! Tokenizers: bytes, a Hugging Face `tokenizer.json`, or a byte-level BPE trained on the corpus at first start.
//!
//! Byte-level BPE after Radford et al. 2019 (GPT-2); training and `tokenizer.json` are the `tokenizers` crate's.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::bpe::train_bpe;
use super::cache::{AtomicFile, KeyHasher, open_or_build};
use super::text::Corpus;
use super::words::Words;
use crate::{Error, Result};

/// Token that ends a document in vocabularies trained here.
pub(super) const END_OF_TEXT: &str = "<|endoftext|>";
/// Tokens that end a document in well-known vocabularies; the first one present is taken where nothing says which.
const WELL_KNOWN_ENDS: [&str; 5] = [END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>"];
/// The byte tokenizer's end of a document; its vocabulary is one larger.
const BYTE_END: u32 = 256;
/// The bytes and the end of a document.
const SMALLEST_VOCABULARY: usize = BYTE_END as usize + 1;

/// Text to token ids and back. Special tokens spelled out in a text are text: only the data pipeline ends documents.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    kind: Kind,
    vocab_size: usize,
    eod: Option<u32>,
    name: String,
    key: String,
}

#[derive(Clone, Debug)]
enum Kind {
    Byte,
    HuggingFace {
        inner: Arc<tokenizers::Tokenizer>,
        words: Option<Arc<Words>>,
        json: Arc<[u8]>,
        /// What the file beside it called the end of a document.
        declared: Option<String>,
    },
}

/// A tokenizer's file beside checkpoints, as Hugging Face names it.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// What says which token ends a document, beside it.
const CONFIG_FILE: &str = "tokenizer_config.json";

impl Tokenizer {
    /// Opens what `--tokenizer` names: `byte`, `train:VOCAB`, or the path of a `tokenizer.json` or of its folder.
    ///
    /// A trained vocabulary is cached in `cache_dir` under the content of `corpus`; it is built by one process, for which
    /// others wait.
    ///
    /// # Errors
    /// `Error::Config` where the name makes no sense or `train:` is asked for without text, `Error::Data` where a file is unusable.
    pub fn open(spec: &str, corpus: Option<&Corpus>, cache_dir: &Path) -> Result<Self> {
        if spec == "byte" {
            return Ok(Self::byte());
        }
        match spec.strip_prefix("train:") {
            Some(vocab_size) => Self::train(spec, vocab_size, corpus, cache_dir),
            None => Self::hugging_face(Path::new(spec)),
        }
    }

    /// Bytes are tokens 0 to 255; 256 ends a document.
    pub fn byte() -> Self {
        Self {
            kind: Kind::Byte,
            vocab_size: BYTE_END as usize + 1,
            eod: Some(BYTE_END),
            name: "byte".into(),
            key: "byte".into(),
        }
    }

    fn train(spec: &str, vocab_size: &str, corpus: Option<&Corpus>, cache_dir: &Path) -> Result<Self> {
        let size: usize = vocab_size.parse().map_err(|_| {
            Error::config(format!(
                "tokenizer \"{spec}\": \"{vocab_size}\" is no vocabulary size; give train:VOCAB, such as train:4096"
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
        let path = cache_dir.join(format!("tokenizer-{size}-{}.json", corpus.key()));
        let open = || match path.exists() {
            // A damaged file is trained anew.
            true => Ok(Self::hugging_face(&path).ok().filter(|tokenizer| tokenizer.vocab_size <= size)),
            false => Ok(None),
        };
        let mut tokenizer = open_or_build(cache_dir, &[&path], open, || {
            let mut file = AtomicFile::create(&path)?;
            let texts = corpus.paragraphs().map(|paragraph| paragraph.map(|paragraph| paragraph.text));
            file.write(train_bpe(size, texts)?.as_bytes())?;
            file.commit()
        })?;
        tokenizer.name = spec.into();
        Ok(tokenizer)
    }

    /// Trains a byte-level BPE vocabulary of at most `vocab_size` tokens on `texts` and writes it to `path` as a
    /// `tokenizer.json`.
    ///
    /// # Errors
    /// `Error::Config` where the vocabulary is too small, those of `texts`, or if the file cannot be written.
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
        Self::hugging_face(path)
    }

    fn hugging_face(given: &Path) -> Result<Self> {
        let path = if given.is_dir() { given.join("tokenizer.json") } else { given.to_path_buf() };
        let bytes = fs::read(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::data(
                &path,
                "does not exist; a tokenizer is `byte`, `train:VOCAB`, or the path of a Hugging Face tokenizer.json",
            ),
            _ => Error::io("read the tokenizer", &path, error),
        })?;
        let unusable = |error: &dyn std::fmt::Display| {
            Error::data(
                &path,
                format!("is no usable tokenizer.json: {error}; copy it again, or give another tokenizer"),
            )
        };
        // The library panics on some texts that are no JSON at all, so that is ruled out first.
        serde_json::from_slice::<serde_json::Value>(&bytes).map_err(|error| unusable(&error))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| unusable(&error))?;
        // What a model's authors cut and pad for inference is not for training texts.
        inner.with_truncation(None).map_err(|error| unusable(&error))?;
        inner.with_padding(None);
        inner.set_encode_special_tokens(true);
        let largest = inner.get_vocab(true).into_values().max().ok_or_else(|| unusable(&"its vocabulary is empty"))?;
        let declared = declared_end(&path)?;
        let eod = end_of_document(&inner, declared.as_deref());
        let mut key = KeyHasher::default();
        key.field(&bytes).field(format!("{eod:?}").as_bytes());
        Ok(Self {
            kind: Kind::HuggingFace {
                words: Words::of(&inner).map(Arc::new),
                inner: Arc::new(inner),
                json: bytes.into(),
                declared,
            },
            vocab_size: largest as usize + 1,
            eod,
            name: path.display().to_string(),
            key: key.finish(),
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

    /// What the tokenizer was opened as.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A hash of all that encoding depends on.
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// Puts a copy of the tokenizer's file into `dir`, where a checkpoint's users find it, and says there which token ends a document,
    /// so that opening the copy gives this tokenizer; bytes need none.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_into(&self, dir: &Path) -> Result<()> {
        let Kind::HuggingFace { inner, json, declared, .. } = &self.kind else { return Ok(()) };
        let path = dir.join(TOKENIZER_FILE);
        if !self.lies_in(dir) {
            write_whole(&path, json)?;
        }
        let there = declared_end(&path);
        if there.is_ok_and(|there| end_of_document(inner, there.as_deref()) == self.eod) {
            return Ok(());
        }
        // Another tokenizer's, or none. What else it says, such as how a chat is written, stays.
        let path = path.with_file_name(CONFIG_FILE);
        let config = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let mut config: serde_json::Map<String, serde_json::Value> = config.unwrap_or_default();
        let end = declared.clone().or_else(|| inner.id_to_token(self.eod?));
        config.insert("eos_token".into(), end.into());
        let text = serde_json::to_vec_pretty(&config).map_err(|error| Error::data(&path, error.to_string()))?;
        write_whole(&path, &text)
    }

    /// Asserts that [`Tokenizer::save_into`] would replace no other tokenizer's file in `dir`.
    ///
    /// # Errors
    /// If it would.
    pub fn refuse_to_replace(&self, dir: &Path) -> Result<()> {
        let path = dir.join(TOKENIZER_FILE);
        if matches!(self.kind, Kind::Byte) || !path.exists() || self.lies_in(dir) {
            return Ok(());
        }
        let mine = &self.name;
        Err(Error::data(
            path,
            format!(
                "is another tokenizer than this run's, {mine}, whose file goes there; save elsewhere, or move it away \
                 (checkpoints beside it are of its tokens)"
            ),
        ))
    }

    /// Whether the file in `dir` is this tokenizer's.
    pub fn lies_in(&self, dir: &Path) -> bool {
        match &self.kind {
            Kind::Byte => false,
            Kind::HuggingFace { json, .. } => {
                fs::read(dir.join(TOKENIZER_FILE)).is_ok_and(|there| there[..] == json[..])
            }
        }
    }

    /// The tokens of a text, without any around it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.kind {
            Kind::Byte => Ok(text.bytes().map(u32::from).collect()),
            Kind::HuggingFace { inner, words, .. } => {
                let of_words = || words.as_ref().map_or(Ok(None), |words| words.encode(inner, text));
                let encode = || inner.encode_fast(text, false).map(|encoding| encoding.get_ids().to_vec());
                of_words().and_then(|tokens| tokens.map_or_else(encode, Ok)).map_err(|error| {
                    Error::data(&self.name, format!("cannot encode a text: {error}; give another tokenizer"))
                })
            }
        }
    }

    /// The text of tokens. Special tokens have none; bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// `Error::Data` where a token is not in the vocabulary.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= self.vocab_size) {
            let message = format!(
                "token {token} is not in the vocabulary of {}; give the tokenizer of the data",
                self.vocab_size
            );
            return Err(Error::data(&self.name, message));
        }
        match &self.kind {
            Kind::Byte => {
                let bytes: Vec<u8> = tokens.iter().filter_map(|&token| u8::try_from(token).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::HuggingFace { inner, .. } => inner.decode(tokens, true).map_err(|error| {
                Error::data(&self.name, format!("cannot decode tokens: {error}; give another tokenizer"))
            }),
        }
    }
}

/// Writes a file, which appears whole or not at all.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write(bytes)?;
    file.commit()
}

/// The token that ends a document: the one that is `declared`, else a well-known one.
fn end_of_document(vocabulary: &tokenizers::Tokenizer, declared: Option<&str>) -> Option<u32> {
    match declared {
        Some(token) => vocabulary.token_to_id(token),
        None => WELL_KNOWN_ENDS.iter().find_map(|token| vocabulary.token_to_id(token)),
    }
}

/// `eos_token` of the `tokenizer_config.json` beside a `tokenizer.json`.
fn declared_end(tokenizer: &Path) -> Result<Option<String>> {
    let path: PathBuf = tokenizer.with_file_name(CONFIG_FILE);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read", &path, error)),
    };
    let config: serde_json::Value = serde_json::from_slice(&bytes)
        .map_err(|error| Error::data(&path, format!("is no JSON: {error}; copy it again, or remove it")))?;
    let token = &config["eos_token"];
    Ok(token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned))
}
