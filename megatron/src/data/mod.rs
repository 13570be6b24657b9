//! Data: from text or indexed datasets to the microbatches of a rank.
//!
//! ```text
//! text ── tokenizer ──▶ indexed dataset (cached) ─┐
//! PREFIX.bin, PREFIX.idx ─────────────────────────┴─▶ split ─▶ samples of S + 1 tokens ─▶ microbatches
//! ```
//! Everything is a function of (files, seed, consumed samples), so there is no state to save and any rank can be asked for any
//! sample.

mod bpe;
mod cache;
pub mod indexed;
pub mod indexed_writer;
pub mod sampler;
pub mod source;
pub mod split;
#[cfg(test)]
mod tests;
pub mod text;
pub mod tokenize;
pub mod tokenizer;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use indexed::{IndexedDataset, TokenType};
pub use indexed_writer::IndexedWriter;
pub use sampler::{GlobalBatch, Loader, MicroBatch};
pub use source::{SampleSource, Sequential, Shuffled, TokenStream};
pub use split::{Split, parse_split, split_sequences};
pub use text::Corpus;
pub use tokenizer::{TOKENIZER_FILE, Tokenizer};

use crate::config::{DataConfig, DataloaderType};
use crate::{Error, Result};

/// The data of a run, cut into splits.
#[derive(Clone)]
pub struct Datasets {
    pub train: Arc<dyn SampleSource>,
    /// `None` where the split gives it too little for one sample.
    pub valid: Option<Arc<dyn SampleSource>>,
    pub test: Option<Arc<dyn SampleSource>>,
    pub tokenizer: Option<Tokenizer>,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Equal on all ranks that read the same tokens; 32 hexadecimal digits.
    pub fingerprint: String,
    /// Lines that tell a user what was found.
    pub description: Vec<String>,
}

/// Everything [`open`] needs of the disk: tokenizer and indexed datasets, made and cached if need be.
#[derive(Clone, Debug)]
pub struct Prepared {
    pub tokenizer: Option<Tokenizer>,
    pub datasets: Vec<Arc<IndexedDataset>>,
    pub fingerprint: String,
    pub description: Vec<String>,
}

/// Trains the tokenizer and tokenizes the text, or finds both in the cache. Called before ranks start, so that they find
/// them; ranks that start without it agree on who does the work.
///
/// # Errors
/// `Error::Config` where the settings contradict the data, `Error::Data` where files are missing, empty, damaged or no text.
pub fn prepare(cfg: &DataConfig) -> Result<Prepared> {
    match classify(&cfg.data_path)? {
        Paths::Text(paths) => prepare_text(cfg, &paths),
        Paths::Indexed(prefixes) => prepare_indexed(cfg, &prefixes),
    }
}

/// Opens the data of a run. `vocab_size` is the model's; it may be absent where there is a tokenizer.
///
/// # Errors
/// Those of [`prepare`]; `Error::Data` where the train split is too short for one sample of `seq_length` tokens;
/// `Error::Config` where the tokenizer has more tokens than the model, or neither says how many there are.
pub fn open(cfg: &DataConfig, seq_length: usize, seed: u64, vocab_size: Option<usize>) -> Result<Datasets> {
    let weights = parse_split(&cfg.split)?;
    let prepared = prepare(cfg)?;
    let vocab_size = agreed_vocabulary(prepared.tokenizer.as_ref(), vocab_size)?;
    let mut description = prepared.description;
    let split = split_sequences(weights, prepared.datasets.iter().map(|dataset| dataset.num_sequences()).sum());
    let stream = |sequences| TokenStream::new(&prepared.datasets, sequences);
    let source = |stream, name: &str| -> Result<Arc<dyn SampleSource>> {
        let source = Sequential::new(stream, seq_length, name)?;
        Ok(match cfg.dataloader_type {
            DataloaderType::Sequential => Arc::new(source),
            DataloaderType::Shuffled => Arc::new(Shuffled::new(source, seed)),
        })
    };
    let held_out = |sequences, name: &str| -> Result<Option<Arc<dyn SampleSource>>> {
        let stream = stream(sequences)?;
        if stream.num_tokens() <= seq_length as u64 { Ok(None) } else { source(stream, name).map(Some) }
    };
    let train = source(stream(split.train)?, "train")?;
    let valid = held_out(split.valid, "valid")?;
    let test = held_out(split.test, "test")?;
    let count = |source: &Option<Arc<dyn SampleSource>>| source.as_ref().map_or(0, |source| source.num_samples());
    description.push(format!(
        "samples of {seq_length} tokens: {} to train, {} to validate, {} to test (split {})",
        train.num_samples(),
        count(&valid),
        count(&test),
        cfg.split
    ));
    let (tokenizer, fingerprint) = (prepared.tokenizer, prepared.fingerprint);
    Ok(Datasets { train, valid, test, tokenizer, vocab_size, fingerprint, description })
}

/// The tokenizer's vocabulary must fit the model's.
fn agreed_vocabulary(tokenizer: Option<&Tokenizer>, vocab_size: Option<usize>) -> Result<usize> {
    match (tokenizer.map(Tokenizer::vocab_size), vocab_size) {
        (Some(tokens), Some(model)) if tokens > model => Err(Error::config(format!(
            "the tokenizer has {tokens} tokens, but the model's vocabulary is {model}; give the tokenizer the model was made              for, or vocab_size {tokens}"
        ))),
        (_, Some(model)) => Ok(model),
        (Some(tokens), None) => Ok(tokens),
        (None, None) => Err(Error::config(
            "indexed datasets do not say how large their vocabulary is; give --vocab-size, or --tokenizer with the tokenizer \
             they were made with",
        )),
    }
}

#[derive(Debug)]
enum Paths {
    Text(Vec<PathBuf>),
    Indexed(Vec<PathBuf>),
}

/// Tells texts from prefixes of indexed datasets.
fn classify(entries: &[String]) -> Result<Paths> {
    let (mut texts, mut prefixes) = (Vec::new(), Vec::new());
    for entry in entries {
        let path = Path::new(entry);
        // Completing a name in a shell ends at one of the pair.
        let prefix = match path.extension() {
            Some(extension) if extension == "idx" || extension == "bin" => path.with_extension(""),
            _ => path.to_path_buf(),
        };
        let (bin, idx) = indexed::pair_paths(&prefix);
        if path.exists() && (prefix == path || !(bin.exists() && idx.exists())) {
            texts.push(path.to_path_buf());
        } else if bin.exists() || idx.exists() {
            prefixes.push(prefix);
        } else {
            return Err(Error::data(
                path,
                format!(
                    "does not exist, and neither does {}; give a text file, a folder of text, or the prefix of an indexed dataset",
                    idx.display()
                ),
            ));
        }
    }
    match (texts.first(), prefixes.first()) {
        (None, None) => Err(Error::config(
            "no data: give --data-path a text file, a folder of text, or the prefix of an indexed dataset",
        )),
        (Some(text), Some(prefix)) => Err(Error::config(format!(
            "the data path mixes text ({}) and indexed datasets ({}); preprocess the text, or give only one kind",
            text.display(),
            prefix.display()
        ))),
        (Some(_), None) => Ok(Paths::Text(texts)),
        (None, Some(_)) => Ok(Paths::Indexed(prefixes)),
    }
}

fn prepare_text(cfg: &DataConfig, paths: &[PathBuf]) -> Result<Prepared> {
    let spec = cfg.tokenizer.as_deref().ok_or_else(|| {
        Error::config(format!(
            "{} is text and needs a tokenizer; give --tokenizer byte, a tokenizer.json, or train:VOCAB",
            paths[0].display()
        ))
    })?;
    let corpus = Corpus::scan(paths, &cfg.cache_dir)?;
    let tokenizer = Tokenizer::open(spec, Some(&corpus), &cfg.cache_dir)?;
    let dataset = tokenize::tokenized(&corpus, &tokenizer, &cfg.cache_dir)?;
    let description = vec![
        format!(
            "{} files, {} paragraphs, {} bytes of text, {} tokens in {}",
            corpus.files().len(),
            dataset.num_sequences(),
            corpus.num_bytes(),
            dataset.num_tokens(),
            dataset.path().display()
        ),
        format!("tokenizer {} with {} tokens", tokenizer.name(), tokenizer.vocab_size()),
    ];
    let datasets = vec![Arc::new(dataset)];
    Ok(Prepared { fingerprint: fingerprint(&datasets)?, tokenizer: Some(tokenizer), datasets, description })
}

fn prepare_indexed(cfg: &DataConfig, prefixes: &[PathBuf]) -> Result<Prepared> {
    let tokenizer = match &cfg.tokenizer {
        Some(spec) => Some(Tokenizer::open(spec, None, &cfg.cache_dir)?),
        None => None,
    };
    let datasets =
        prefixes.iter().map(|prefix| Ok(Arc::new(IndexedDataset::open(prefix)?))).collect::<Result<Vec<_>>>()?;
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
        description.push(format!("tokenizer {} with {} tokens", tokenizer.name(), tokenizer.vocab_size()));
    }
    Ok(Prepared { fingerprint: fingerprint(&datasets)?, tokenizer, datasets, description })
}

/// A hash of sizes and of the ends of each dataset, enough to notice that a path holds other tokens than before.
fn fingerprint(datasets: &[Arc<IndexedDataset>]) -> Result<String> {
    let mut hasher = cache::KeyHasher::default();
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
