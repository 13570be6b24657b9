//! Writes Megatron's indexed datasets, byte for byte as its `IndexedDatasetBuilder`.
//!
//! Source: Megatron-LM `core/datasets/indexed_dataset.py`; the layout is described in
//! [`super::indexed`].

use std::path::{Path, PathBuf};

use super::cache::AtomicFile;
use super::indexed::{HEADER, MAGIC, TokenType, VERSION, pair_paths};
use crate::{Error, Result};

/// Writes `PREFIX.bin` and `PREFIX.idx`. Neither exists before [`Self::finish`]. The index appears
/// last, so a pair with an index is complete. If dropped before, the writer leaves nothing behind.
#[derive(Debug)]
pub struct IndexedWriter {
    bin: AtomicFile,
    bin_path: PathBuf,
    idx_path: PathBuf,
    token_type: TokenType,
    lengths: Vec<i32>,
    boundaries: Vec<u64>,
    buffer: Vec<u8>,
}

impl IndexedWriter {
    /// Starts a dataset. The folder of `prefix` must exist.
    pub fn create(prefix: impl AsRef<Path>, token_type: TokenType) -> Result<Self> {
        let (bin_path, idx_path) = pair_paths(prefix.as_ref());
        let bin = AtomicFile::create(&bin_path)?;
        Ok(Self {
            bin,
            bin_path,
            idx_path,
            token_type,
            lengths: Vec::new(),
            boundaries: vec![0],
            buffer: Vec::new(),
        })
    }

    /// Appends a sequence to the current document.
    ///
    /// # Errors
    /// `Error::Data` if a token does not fit the type or the sequence is longer than 2³¹ − 1.
    pub fn add_sequence(&mut self, tokens: &[u32]) -> Result<()> {
        let length = i32::try_from(tokens.len()).map_err(|_| {
            let count = tokens.len();
            Error::data(
                &self.bin_path,
                format!("a sequence of {count} tokens is too long for the format; split the text"),
            )
        })?;
        if let Some(token) = tokens.iter().find(|&&token| token > self.token_type.max()) {
            return Err(Error::data(
                &self.bin_path,
                format!(
                    "token {token} does not fit the type {:?}; choose a wider type",
                    self.token_type
                ),
            ));
        }
        self.buffer.clear();
        for &token in tokens {
            // A token fits its type, so the low bytes are the whole number.
            self.buffer
                .extend_from_slice(&u64::from(token).to_le_bytes()[..self.token_type.size()]);
        }
        self.bin.write(&self.buffer)?;
        self.lengths.push(length);
        Ok(())
    }

    /// Ends the current document. A document without sequences adds its own boundary, as in
    /// Megatron.
    pub fn end_document(&mut self) {
        self.boundaries.push(self.lengths.len() as u64);
    }

    /// Makes the dataset appear. Sequences after the last end of a document become one.
    pub fn finish(mut self) -> Result<()> {
        if self.boundaries.last() != Some(&(self.lengths.len() as u64)) {
            self.end_document();
        }
        let mut idx = AtomicFile::create(&self.idx_path)?;
        let mut header = Vec::with_capacity(HEADER as usize);
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        header.push(self.token_type.code());
        header.extend_from_slice(&(self.lengths.len() as u64).to_le_bytes());
        header.extend_from_slice(&(self.boundaries.len() as u64).to_le_bytes());
        idx.write(&header)?;
        for length in &self.lengths {
            idx.write(&length.to_le_bytes())?;
        }
        let mut offset = 0u64;
        for &length in &self.lengths {
            idx.write(&offset.to_le_bytes())?;
            offset += length as u64 * self.token_type.size() as u64;
        }
        for boundary in &self.boundaries {
            idx.write(&boundary.to_le_bytes())?;
        }
        idx.sync()?;
        self.bin.commit()?;
        idx.commit()
    }
}
