//! Made-up tokens (`--mock-data`), for testing and timing runs without data.
//!
//! Source: Megatron-LM `core/datasets/gpt_dataset.py`, `MockGPTLowLevelDataset`: documents of
//! random lengths below 4096 that count up from 1 and end with the end-of-document token. Here they
//! are an indexed dataset in the cache, so that every order and setting of real data works on them.
//! It has fewer documents, with lengths from another random generator.

use std::path::Path;
use std::sync::Arc;

use super::cache::{KeyHasher, open_or_build};
use super::indexed::{IndexedDataset, TokenType, pair_paths};
use super::indexed_writer::IndexedWriter;
use super::source::mix;
use super::tokenizer::Tokenizer;
use super::{Prepared, fingerprint};
use crate::config::DataConfig;
use crate::{Error, Result};

const DOCUMENTS: u64 = 4096;
/// A document has fewer tokens than this, its end included.
const LENGTHS: u64 = 4096;

/// The tokenizer, if one is given, and the dataset for its vocabulary; otherwise for a vocabulary
/// of `vocab_size` tokens, where the last one ends documents.
///
/// # Errors
/// `Error::Config` if the size of the vocabulary is not given, or the tokenizer would have to be
/// trained on the data.
pub(super) fn prepare(cfg: &DataConfig, vocab_size: Option<usize>) -> Result<Prepared> {
    if let Some(spec) = cfg.tokenizer.as_deref().filter(|spec| spec.starts_with("train:")) {
        return Err(Error::config(format!(
            "tokenizer \"{spec}\" needs text to train on, and --mock-data has none; give --vocab-size instead, or another tokenizer"
        )));
    }
    let tokenizer = cfg.tokenizer.as_deref();
    let tokenizer = tokenizer
        .map(|spec| Tokenizer::open_with(spec, &cfg.tokenizer_options, None, &cfg.cache_dir));
    let tokenizer = tokenizer.transpose()?;
    let vocab_size =
        tokenizer.as_ref().map(Tokenizer::vocab_size).or(vocab_size).ok_or_else(|| {
            Error::config("--mock-data needs a vocabulary size; give --vocab-size or --tokenizer")
        })?;
    let eod = end_of_documents(tokenizer.as_ref(), vocab_size);
    let dataset = Arc::new(dataset(vocab_size, eod, &cfg.cache_dir)?);
    let mut description = vec![format!(
        "made-up data: {} documents, {} tokens, vocabulary {vocab_size}",
        dataset.num_documents(),
        dataset.num_tokens()
    )];
    description.extend(tokenizer.iter().flat_map(Tokenizer::notes).cloned());
    let (datasets, names) = (vec![dataset], vec!["--mock-data".into()]);
    Ok(Prepared {
        fingerprint: fingerprint(&datasets, None)?,
        tokenizer,
        datasets,
        names,
        weights: None,
        description,
    })
}

/// The token that ends made-up documents.
pub(super) fn end_of_documents(tokenizer: Option<&Tokenizer>, vocab_size: usize) -> u32 {
    tokenizer
        .and_then(Tokenizer::eod)
        .unwrap_or(u32::try_from(vocab_size.saturating_sub(1)).unwrap_or(u32::MAX))
}

fn dataset(vocab_size: usize, eod: u32, cache_dir: &Path) -> Result<IndexedDataset> {
    let mut key = KeyHasher::default();
    key.field(b"mock").field(&(vocab_size as u64).to_le_bytes()).field(&eod.to_le_bytes());
    let prefix = cache_dir.join(format!("mock-{}", key.finish()));
    let open = || match IndexedDataset::open(&prefix) {
        Ok(dataset) => Ok(Some(dataset)),
        // Missing or damaged: build it again.
        Err(Error::Data { .. }) => Ok(None),
        Err(error) => Err(error),
    };
    let (bin, idx) = pair_paths(&prefix);
    open_or_build(cache_dir, &[&idx, &bin], open, || build(vocab_size, eod, &prefix))
}

fn build(vocab_size: usize, eod: u32, prefix: &Path) -> Result<()> {
    let mut writer = IndexedWriter::create(prefix, TokenType::for_vocabulary(vocab_size))?;
    for document in 0..DOCUMENTS {
        let length = 1 + mix(document) % (LENGTHS - 1);
        let count = (1..length).map(|token| (token % vocab_size.max(1) as u64) as u32);
        writer.add_sequence(&count.chain([eod]).collect::<Vec<_>>())?;
        writer.end_document();
    }
    writer.finish()
}
