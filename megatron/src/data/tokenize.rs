//! Tokenizes text into a cached indexed dataset.
//!
//! The cache key covers the content of the text and the tokenizer, so the cache cannot be stale.
//! One process builds it while others wait.

use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use super::cache::{KeyHasher, open_or_build};
use super::indexed::{IndexedDataset, TokenType, pair_paths};
use super::indexed_writer::IndexedWriter;
use super::parts::Part;
use super::text::Corpus;
use super::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Bytes of text to tokenize at a time.
const BATCH: usize = 1 << 22;
/// Version of the conversion of text to sequences; caches of other versions are rebuilt. 2: the ids
/// are those of whole documents.
const VERSION: &str = "2";

/// The tokens of a corpus: a document per file, a sequence per paragraph as closely as tokens can
/// be split there, and the tokenizer's end-of-document token, if it has one, at the end of each
/// document.
pub fn tokenized(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    cache_dir: &Path,
) -> Result<IndexedDataset> {
    let mut key = KeyHasher::default();
    key.field(VERSION.as_bytes()).field(corpus.key().as_bytes()).field(tokenizer.key().as_bytes());
    let prefix = cache_dir.join(format!("text-{}", key.finish()));
    let open = || match IndexedDataset::open(&prefix) {
        Ok(dataset) => Ok(Some(dataset)),
        // Missing or damaged: build it again.
        Err(Error::Data { .. }) => Ok(None),
        Err(error) => Err(error),
    };
    let (bin, idx) = pair_paths(&prefix);
    open_or_build(cache_dir, &[&idx, &bin], open, || build(corpus, tokenizer, &prefix))
}

fn build(corpus: &Corpus, tokenizer: &Tokenizer, prefix: &Path) -> Result<()> {
    let mut writer =
        IndexedWriter::create(prefix, TokenType::for_vocabulary(tokenizer.vocab_size()))?;
    let mut batch: Vec<Part> = Vec::new();
    let mut batch_bytes = 0;
    for part in corpus.parts(Arc::new(tokenizer.split_points())) {
        let part = part?;
        batch_bytes += part.text.len();
        batch.push(part);
        if batch_bytes >= BATCH {
            add(&mut writer, tokenizer, &batch)?;
            batch.clear();
            batch_bytes = 0;
        }
    }
    add(&mut writer, tokenizer, &batch)?;
    writer.finish()
}

fn add(writer: &mut IndexedWriter, tokenizer: &Tokenizer, batch: &[Part]) -> Result<()> {
    let eod = tokenizer.eod().filter(|_| !tokenizer.ends_documents());
    let encoded: Vec<Result<Vec<Vec<u32>>>> =
        batch.par_iter().map(|part| tokenizer.encode_part(part)).collect();
    for (part, sequences) in batch.iter().zip(encoded) {
        let mut sequences = sequences?;
        if part.last
            && let Some(last) = sequences.last_mut()
        {
            last.extend(eod);
        }
        // White space that a tokenizer drops leaves an empty sequence.
        for tokens in sequences.iter().filter(|tokens| !tokens.is_empty()) {
            writer.add_sequence(tokens)?;
        }
        if part.last {
            writer.end_document();
        }
    }
    Ok(())
}
