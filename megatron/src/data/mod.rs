//! Data: from text or indexed datasets to the microbatches of a rank.
//!
//! ```text
//! text ── tokenizer ──▶ indexed dataset (cached) ─┐
//! PREFIX.bin, PREFIX.idx ─────────────────────────┴─▶ split ─▶ samples of S + 1 tokens ─▶ blend ─▶ microbatches
//! ```
//! Everything is a function of (files, seed, consumed samples), so there is no state to save, and
//! any rank can compute any sample.
//!
//! ```
//! use megatron::config::DataConfig;
//! use megatron::data::{IndexedDataset, IndexedWriter, SampleCounts, TokenType, open};
//!
//! # fn main() -> megatron::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let folder = folder.path();
//! # let text = folder.join("corpus.txt");
//! # std::fs::write(&text, "What is read is what was written.\n").unwrap();
//! // Text; here every byte is a token.
//! let config = DataConfig {
//!     data_path: vec![text.display().to_string()],
//!     tokenizer: Some("byte".into()),
//!     split: "1,0,0".into(),
//!     cache_dir: folder.join("cache"),
//!     ..Default::default()
//! };
//! let asked = SampleCounts { train: 2, valid: 0, test: 0 };
//! let data = open(&config, 4, 1234, None, asked)?;
//! let mut sample = [0; 5]; // 4 inputs, each with the next token as its label
//! data.train.sample(1, &mut sample)?;
//! assert_eq!(sample.map(|token| token as u8), *b" is r");
//!
//! // An indexed dataset in Megatron-LM's format.
//! let mut writer = IndexedWriter::create(folder.join("tokens"), TokenType::for_vocabulary(1000))?;
//! writer.add_sequence(&[3, 1, 4, 1, 5])?;
//! writer.end_document();
//! writer.finish()?;
//! let dataset = IndexedDataset::open(folder.join("tokens"))?;
//! assert_eq!(dataset.read_sequence(0)?, [3, 1, 4, 1, 5]);
//! # Ok(())
//! # }
//! ```

mod added_tokens;
mod blend;
mod bpe;
mod cache;
mod checksums;
mod cyclic;
mod documents;
#[doc(hidden)]
pub mod fuzz;
mod gpt2;
mod gpt_dataset;
mod index_file;
mod indexed;
mod indexed_writer;
mod mock;
mod mt19937;
mod named;
mod parts;
mod paths;
mod pretokenizer_cache;
mod sampler;
mod source;
mod split;
mod split_points;
mod splits;
#[cfg(test)]
mod tests;
mod text;
mod tokenize;
mod tokenizer;
mod tokenizer_config;

use std::path::PathBuf;
use std::sync::Arc;

pub use blend::Blend;
pub use cache::unfinished;
pub use cyclic::Cyclic;
pub use documents::{DocumentEnds, Documents};
pub use gpt_dataset::GptDataset;
pub use indexed::{IndexedDataset, TokenType};
pub use indexed_writer::IndexedWriter;
pub use named::NamedTensors;
pub use parts::{Part, Parts};
pub use sampler::{GlobalBatch, Loader, MicroBatch};
pub use source::{SampleSource, Sequential, Shuffled, TokenStream};
pub use split::{Split, split_sequences};
pub use split_points::SplitPoints;
pub use splits::SampleCounts;
pub use text::{Corpus, CorpusParts, TEXT_EXTENSIONS};
pub use tokenizer::{TOKENIZER_FILE, Tokenizer};

use crate::config::{DataConfig, DataloaderType, parse_split};
use crate::{Error, Result};
use paths::{DataPaths, Kind};
use splits::{Opener, TEST, TRAIN, VALID};

/// The data of a run, divided into splits.
#[derive(Clone)]
pub struct Datasets {
    /// At least one sample.
    pub train: Arc<dyn SampleSource>,
    /// `None` if the split leaves it less than one sample.
    pub valid: Option<Arc<dyn SampleSource>>,
    /// As `valid`.
    pub test: Option<Arc<dyn SampleSource>>,
    /// `None` if the data are tokens and no tokenizer was given.
    pub tokenizer: Option<Tokenizer>,
    /// The end of documents, if a setting uses it (`eod_mask_loss`, `reset_position_ids`,
    /// `reset_attention_mask`).
    pub document_ends: Option<DocumentEnds>,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Equal on all ranks with the same tokens; 32 hexadecimal digits.
    pub fingerprint: String,
    /// Lines that describe the data to the user.
    pub description: Vec<String>,
}

/// Everything that [`open`] needs from disk: tokenizer and indexed datasets, built and cached if
/// needed.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// `None` if the data are tokens and no tokenizer was given.
    pub tokenizer: Option<Tokenizer>,
    /// One per weighted path or indexed dataset; one for all text without weights.
    pub datasets: Vec<Arc<IndexedDataset>>,
    /// The user's path for each dataset, or a part of it.
    pub names: Vec<PathBuf>,
    /// The datasets' shares of the samples, if the data path gave any.
    pub weights: Option<Vec<f64>>,
    /// As [`Datasets::fingerprint`].
    pub fingerprint: String,
    /// As [`Datasets::description`].
    pub description: Vec<String>,
}

/// Trains the tokenizer and tokenizes the text, or finds both in the cache. Called before ranks
/// start, so that they find the results. Without this call, the ranks agree on which one does the
/// work.
///
/// # Errors
/// `Error::Config` if the settings contradict the data, `Error::Data` if files are missing, empty,
/// damaged or not text.
pub fn prepare(cfg: &DataConfig) -> Result<Prepared> {
    let DataPaths { kind, paths, weights } = DataPaths::parse(&cfg.data_path)?;
    match kind {
        Kind::Text => prepare_text(cfg, &paths, weights),
        Kind::Indexed => prepare_indexed(cfg, &paths, weights),
    }
}

/// Opens the data of a run that reads `requested` samples. `vocab_size` is the model's; it may be
/// absent if there is a tokenizer.
///
/// # Errors
/// Those of [`prepare`]; `Error::Data` if the train split is too short for one sample of
/// `seq_length` tokens; `Error::Config` if the tokenizer has more tokens than the model, neither
/// gives the vocabulary size, a setting needs an end-of-document token that does not exist, or
/// there are weights but no samples are requested.
pub fn open(
    cfg: &DataConfig,
    seq_length: usize,
    seed: u64,
    vocab_size: Option<usize>,
    requested: SampleCounts,
) -> Result<Datasets> {
    let split = parse_split(&cfg.split)?;
    let prepared = if cfg.mock { mock::prepare(cfg, vocab_size)? } else { prepare(cfg)? };
    let vocab_size = agreed_vocabulary(prepared.tokenizer.as_ref(), vocab_size)?;
    let document_ends = document_ends(cfg, prepared.tokenizer.as_ref(), vocab_size)?;
    if prepared.weights.is_some() && requested.train == 0 {
        return Err(weights_without_samples());
    }
    let opener = Opener::new(cfg, &prepared, split, seq_length, seed);
    let train = opener.source(TRAIN, requested.train)?;
    let mut notes = Vec::new();
    let mut held_out =
        |part: splits::Part, share: f64, requested: u64| -> Result<Option<Arc<dyn SampleSource>>> {
            let source = opener.held_out(part, requested)?;
            if let Err(path) = source
                && prepared.weights.is_some()
                && share > 0.0
                && requested > 0
            {
                // In a blend, one dataset that is too short is enough to prevent evaluation.
                notes.push(format!(
                    "note: nothing is evaluated on {} data: the part of {} has fewer tokens than a \
                 sample; leave it out of the blend, or give it a larger split",
                    part.0,
                    path.display()
                ));
            }
            Ok(source.ok())
        };
    let valid = held_out(VALID, split[1], requested.valid)?;
    let test = held_out(TEST, split[2], requested.test)?;
    let count = |source: &Option<Arc<dyn SampleSource>>| {
        source.as_ref().map_or(0, |source| source.num_samples())
    };
    let lacks = |share: f64, source: &Option<_>| {
        share > 0.0 && source.is_none() && prepared.weights.is_none()
    };
    let (no_valid, no_test) = (lacks(split[1], &valid), lacks(split[2], &test));
    // Missing test data alone does not deserve a note.
    let why = if no_test && !no_valid { format!(" {}", opener.dealt()) } else { String::new() };
    if no_valid {
        let dealt = opener.dealt();
        notes.push(format!(
            "note: too little for a sample of validation data: --split {} {dealt}",
            cfg.split
        ));
    }
    let mut description = prepared.description;
    description.push(format!(
        "samples of {seq_length} tokens: {} to train, {} to validate, {} to test (split {}{why})",
        train.num_samples(),
        count(&valid),
        count(&test),
        cfg.split
    ));
    description.append(&mut notes);
    let (tokenizer, fingerprint) = (prepared.tokenizer, prepared.fingerprint);
    Ok(Datasets {
        train,
        valid,
        test,
        tokenizer,
        document_ends,
        vocab_size,
        fingerprint,
        description,
    })
}

/// Opens one part of the split, `train`, `valid` or `test`, to read every sample once, in order;
/// the other parts may be empty. Otherwise like [`open`]. Also returns notes on unexpected
/// properties of the tokenizer.
///
/// # Errors
/// Those of [`open`], for this part.
pub fn open_part(
    cfg: &DataConfig,
    seq_length: usize,
    vocab_size: usize,
    part: &str,
) -> Result<(Arc<dyn SampleSource>, Vec<String>)> {
    let split = parse_split(&cfg.split)?;
    let prepared = prepare(cfg)?;
    agreed_vocabulary(prepared.tokenizer.as_ref(), Some(vocab_size))?;
    if prepared.weights.is_some() {
        return Err(weights_without_samples());
    }
    let part =
        [TRAIN, VALID, TEST].into_iter().find(|(name, _)| *name == part).ok_or_else(|| {
            Error::config(format!(
                "a split has no part {part}; the parts are train, valid and test"
            ))
        })?;
    let cfg = DataConfig { dataloader_type: DataloaderType::Sequential, ..cfg.clone() };
    let opener = Opener::new(&cfg, &prepared, split, seq_length, 0);
    let notes =
        prepared.tokenizer.as_ref().map_or(Vec::new(), |tokenizer| tokenizer.notes().to_vec());
    Ok((opener.source(part, 0)?, notes))
}

fn weights_without_samples() -> Error {
    Error::config(
        "the data path has weights, but every sample is read once here; leave the weights out",
    )
}

/// The end of documents, if a setting needs it.
fn document_ends(
    cfg: &DataConfig,
    tokenizer: Option<&Tokenizer>,
    vocab_size: usize,
) -> Result<Option<DocumentEnds>> {
    let settings = [
        ("eod_mask_loss", cfg.eod_mask_loss),
        ("reset_position_ids", cfg.reset_position_ids),
        ("reset_attention_mask", cfg.reset_attention_mask),
    ];
    let Some((setting, _)) = settings.into_iter().find(|(_, set)| *set) else { return Ok(None) };
    let made_up = cfg.mock.then(|| mock::end_of_documents(tokenizer, vocab_size));
    let token = tokenizer.and_then(Tokenizer::eod).or(made_up).ok_or_else(|| {
        Error::config(match tokenizer {
            Some(tokenizer) => {
                format!("{setting}: {}, or leave {setting} out", tokenizer.lacks_eod())
            }
            None => format!(
                "{setting}: indexed datasets do not record the end-of-document token; give \
                 --tokenizer with the tokenizer they were made with"
            ),
        })
    })?;
    Ok(Some(DocumentEnds {
        token,
        mask_loss: cfg.eod_mask_loss,
        reset_positions: cfg.reset_position_ids,
        reset_attention: cfg.reset_attention_mask,
    }))
}

/// The tokenizer's vocabulary must fit the model's.
fn agreed_vocabulary(tokenizer: Option<&Tokenizer>, vocab_size: Option<usize>) -> Result<usize> {
    match (tokenizer.map(Tokenizer::vocab_size), vocab_size) {
        (Some(tokens), Some(model)) if tokens > model => Err(Error::config(format!(
            "the tokenizer has {tokens} tokens, but the model's vocabulary is {model}; give the \
             model's own tokenizer, or vocab_size {tokens}"
        ))),
        (_, Some(model)) => Ok(model),
        (Some(tokens), None) => Ok(tokens),
        (None, None) => Err(Error::config(
            "indexed datasets do not record their vocabulary size; give --vocab-size, or \
             --tokenizer with the tokenizer they were made with",
        )),
    }
}

fn prepare_text(
    cfg: &DataConfig,
    paths: &[PathBuf],
    weights: Option<Vec<f64>>,
) -> Result<Prepared> {
    let spec = cfg.tokenizer.as_deref().ok_or_else(|| {
        Error::config(format!(
            "{} is text and needs a tokenizer; give --tokenizer byte, a tokenizer.json, or train:VOCAB",
            paths[0].display()
        ))
    })?;
    let corpus = Corpus::scan(paths, &cfg.cache_dir)?;
    let tokenizer =
        Tokenizer::open_with(spec, &cfg.tokenizer_options, Some(&corpus), &cfg.cache_dir)?;
    // Paths with weights are separate datasets; without weights, all text is one dataset.
    let corpora = match &weights {
        None => vec![corpus],
        Some(_) => {
            let scan = |path| Corpus::scan(std::slice::from_ref(path), &cfg.cache_dir);
            paths.iter().map(scan).collect::<Result<Vec<_>>>()?
        }
    };
    let (mut datasets, mut description) = (Vec::new(), Vec::new());
    for corpus in &corpora {
        let dataset = tokenize::tokenized(corpus, &tokenizer, &cfg.cache_dir)?;
        let files = match corpus.files().len() {
            1 => "1 file".to_string(),
            files => format!("{files} files"),
        };
        description.push(format!(
            "{files}, {} paragraphs, {} bytes of text, {} tokens in {}",
            dataset.num_sequences(),
            corpus.num_bytes(),
            dataset.num_tokens(),
            dataset.path().display()
        ));
        datasets.push(Arc::new(dataset));
    }
    description.extend(describe(&tokenizer));
    let fingerprint = fingerprint(&datasets, weights.as_deref())?;
    let names = paths[..datasets.len()].to_vec();
    Ok(Prepared { fingerprint, tokenizer: Some(tokenizer), datasets, names, weights, description })
}

fn prepare_indexed(
    cfg: &DataConfig,
    prefixes: &[PathBuf],
    weights: Option<Vec<f64>>,
) -> Result<Prepared> {
    let tokenizer = match &cfg.tokenizer {
        Some(spec) => {
            Some(Tokenizer::open_with(spec, &cfg.tokenizer_options, None, &cfg.cache_dir)?)
        }
        None => None,
    };
    let datasets = prefixes
        .iter()
        .map(|prefix| Ok(Arc::new(IndexedDataset::open(prefix)?)))
        .collect::<Result<Vec<_>>>()?;
    let mut description: Vec<_> = datasets
        .iter()
        .map(|dataset| {
            format!(
                "{}: {} documents, {} sequences, {} tokens",
                dataset.path().display(),
                dataset.num_documents(),
                dataset.num_sequences(),
                dataset.num_tokens()
            )
        })
        .collect();
    if let Some(tokenizer) = &tokenizer {
        description.extend(describe(tokenizer));
    }
    let (fingerprint, names) = (fingerprint(&datasets, weights.as_deref())?, prefixes.to_vec());
    Ok(Prepared { fingerprint, tokenizer, datasets, names, weights, description })
}

fn describe(tokenizer: &Tokenizer) -> impl Iterator<Item = String> {
    let line = format!("tokenizer {} with {} tokens", tokenizer.name(), tokenizer.vocab_size());
    std::iter::once(line).chain(tokenizer.notes().to_vec())
}

/// A hash of the sizes and of both ends of each dataset, enough to notice that a path holds
/// different tokens than before.
fn fingerprint(datasets: &[Arc<IndexedDataset>], weights: Option<&[f64]>) -> Result<String> {
    let mut hasher = cache::KeyHasher::default();
    weights.into_iter().flatten().for_each(|weight| hasher.update(&weight.to_bits().to_le_bytes()));
    for dataset in datasets {
        let tokens = dataset.num_tokens();
        hasher.field(&dataset.num_sequences().to_le_bytes()).field(&tokens.to_le_bytes());
        let stream = TokenStream::new(std::slice::from_ref(dataset), 0..dataset.num_sequences())?;
        let mut sample = vec![0; tokens.min(1024) as usize];
        for start in [0, (tokens - sample.len() as u64) / 2, tokens - sample.len() as u64] {
            stream.read(start, &mut sample)?;
            sample.iter().for_each(|token| hasher.update(&token.to_le_bytes()));
        }
    }
    Ok(hasher.finish())
}
