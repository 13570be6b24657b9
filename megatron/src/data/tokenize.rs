//! Text into a cached indexed dataset.
//!
//! The cache is keyed by the content of the text and by the tokenizer, so it cannot be stale; it is built by one process, for
//! which others wait.

use std::path::Path;

use rayon::prelude::*;

use super::cache::{KeyHasher, open_or_build};
use super::indexed::{IndexedDataset, TokenType, pair_paths};
use super::indexed_writer::IndexedWriter;
use super::text::{Corpus, Paragraph};
use super::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Bytes of text tokenized at a time.
const BATCH: usize = 1 << 22;

/// The tokens of a corpus: a document per file, a sequence per paragraph, and the tokenizer's end of a document, if it has
/// one, at the end of each last sequence.
pub fn tokenized(corpus: &Corpus, tokenizer: &Tokenizer, cache_dir: &Path) -> Result<IndexedDataset> {
    let mut key = KeyHasher::default();
    key.field(corpus.key().as_bytes()).field(tokenizer.key().as_bytes());
    let prefix = cache_dir.join(format!("text-{}", key.finish()));
    let open = || match IndexedDataset::open(&prefix) {
        Ok(dataset) => Ok(Some(dataset)),
        // Missing or damaged: built anew.
        Err(Error::Data { .. }) => Ok(None),
        Err(error) => Err(error),
    };
    let (bin, idx) = pair_paths(&prefix);
    open_or_build(cache_dir, &[&idx, &bin], open, || build(corpus, tokenizer, &prefix))
}

fn build(corpus: &Corpus, tokenizer: &Tokenizer, prefix: &Path) -> Result<()> {
    let mut writer = IndexedWriter::create(prefix, TokenType::for_vocabulary(tokenizer.vocab_size()))?;
    let mut batch: Vec<Paragraph> = Vec::new();
    let mut batch_bytes = 0;
    for paragraph in corpus.paragraphs() {
        let paragraph = paragraph?;
        batch_bytes += paragraph.text.len();
        batch.push(paragraph);
        if batch_bytes >= BATCH {
            add(&mut writer, tokenizer, &batch)?;
            batch.clear();
            batch_bytes = 0;
        }
    }
    add(&mut writer, tokenizer, &batch)?;
    writer.finish()
}

fn add(writer: &mut IndexedWriter, tokenizer: &Tokenizer, batch: &[Paragraph]) -> Result<()> {
    let encoded: Vec<Result<Vec<u32>>> = batch.par_iter().map(|paragraph| tokenizer.encode(&paragraph.text)).collect();
    for (paragraph, tokens) in batch.iter().zip(encoded) {
        let mut tokens = tokens?;
        if paragraph.last {
            tokens.extend(tokenizer.eod());
        }
        writer.add_sequence(&tokens)?;
        if paragraph.last {
            writer.end_document();
        }
    }
    Ok(())
}
