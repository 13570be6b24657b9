//! Tests of the data pipeline, by concern.

mod documents;
mod indexed;
mod megatron_data;
mod open;
mod orders;
mod pretokenizer_cache;
mod sampler;
mod source;
mod text;
mod tokenizer;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{IndexedDataset, IndexedWriter, TokenType};

/// Writes a dataset of documents, each a list of sequences, and opens it.
fn dataset(
    prefix: &Path,
    token_type: TokenType,
    documents: &[Vec<Vec<u32>>],
) -> Arc<IndexedDataset> {
    let mut writer = IndexedWriter::create(prefix, token_type).unwrap();
    for document in documents {
        for sequence in document {
            writer.add_sequence(sequence).unwrap();
        }
        writer.end_document();
    }
    writer.finish().unwrap();
    Arc::new(IndexedDataset::open(prefix).unwrap())
}

/// A dataset of `lengths.len()` one-sequence documents that counts 0, 1, 2, …
fn counting(prefix: &Path, lengths: &[usize]) -> Arc<IndexedDataset> {
    let mut next = 0u32..;
    let documents: Vec<_> =
        lengths.iter().map(|&length| vec![next.by_ref().take(length).collect()]).collect();
    dataset(prefix, TokenType::I32, &documents)
}

/// Writes a file and the folders above it.
fn write(folder: &Path, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, content).unwrap();
    path
}

/// Names in a folder, in order.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Pseudorandom numbers for tests (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}
