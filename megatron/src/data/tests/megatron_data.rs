//! Compares orders of samples with those of megatron-core, from `tests/fixtures/megatron_data.py`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::dataset;
use crate::config::DataloaderType;
use crate::config::parse_split;
use crate::data::blend::Blend;
use crate::data::mt19937::torch_permutation;
use crate::data::splits::{Opener, TEST, TRAIN, VALID};
use crate::data::{GptDataset, IndexedDataset, SampleSource, TokenType, split_sequences};

#[derive(Deserialize)]
struct Fixture {
    seq_length: usize,
    seed: u64,
    split: String,
    samples: BTreeMap<String, u64>,
    /// Start of the second dataset of the blends.
    cut: usize,
    lengths: Vec<usize>,
    splits: BTreeMap<String, Indices>,
    blends: Vec<Blended>,
    permutations: Vec<Permutation>,
    /// Text of the documents in the samples here.
    documents: BTreeMap<usize, String>,
}

#[derive(Deserialize)]
struct Indices {
    document_index: Summary,
    sample_index: Summary,
    shuffle_index: Summary,
    tokens: Vec<Vec<u32>>,
}

#[derive(Deserialize)]
struct Blended {
    weights: Option<Vec<f64>>,
    dataset_index: Summary,
    dataset_sample_index: Summary,
    tokens: Vec<Vec<u32>>,
}

#[derive(Deserialize)]
struct Permutation {
    n: u32,
    epoch: u32,
    order: Summary,
}

/// An array: its length, its ends, and the SHA-256 of the whole array as little-endian 32-bit
/// numbers.
#[derive(Deserialize, Debug, PartialEq)]
struct Summary {
    length: usize,
    sha256: String,
    first: Vec<u32>,
    last: Vec<u32>,
}

impl Summary {
    fn of(values: &[u32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self {
            length: values.len(),
            sha256: Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect(),
            first: values.iter().take(16).copied().collect(),
            last: values[values.len().saturating_sub(16)..].to_vec(),
        }
    }
}

impl Fixture {
    fn read() -> Self {
        serde_json::from_str(include_str!("../../../tests/fixtures/megatron_data.json")).unwrap()
    }

    /// The documents `range` as a dataset; documents with unknown text are zeros.
    fn dataset(&self, prefix: &Path, range: std::ops::Range<usize>) -> Arc<IndexedDataset> {
        let document = |at: usize| match self.documents.get(&at) {
            Some(text) => vec![text.bytes().map(u32::from).chain([256]).collect()],
            None => vec![vec![0; self.lengths[at]]],
        };
        dataset(prefix, TokenType::U16, &range.map(document).collect::<Vec<_>>())
    }

    fn open(&self, folder: &Path, name: &str) -> GptDataset {
        let dataset = self.dataset(&folder.join("all"), 0..self.lengths.len());
        let split = split_sequences(parse_split(&self.split).unwrap(), dataset.num_sequences());
        let range = match name {
            "train" => split.train,
            "valid" => split.valid,
            _ => split.test,
        };
        let requested = Some(self.samples[name]);
        GptDataset::open(&dataset, range, self.seq_length, requested, self.seed, folder, name)
            .unwrap()
    }
}

fn samples(source: &dyn SampleSource, count: usize) -> Vec<Vec<u32>> {
    let sample = |i| {
        let mut out = vec![0; source.seq_length() + 1];
        source.sample(i, &mut out).unwrap();
        out
    };
    (0..count as u64).map(sample).collect()
}

#[test]
fn documents_samples_and_their_order_are_megatrons_to_the_last_element() {
    let (fixture, folder) = (Fixture::read(), tempfile::tempdir().unwrap());
    for (name, expected) in &fixture.splits {
        let found = fixture.open(folder.path(), name);
        let [documents, starts, order] = [0, 1, 2].map(|array| Summary::of(&found.array(array)));
        assert_eq!(documents, expected.document_index, "document index of {name}");
        assert_eq!(starts, expected.sample_index, "sample index of {name}");
        assert_eq!(order, expected.shuffle_index, "shuffle index of {name}");
    }
    assert_eq!(fixture.splits.len(), 3);
}

#[test]
fn the_first_samples_are_megatrons() {
    let (fixture, folder) = (Fixture::read(), tempfile::tempdir().unwrap());
    for (name, expected) in &fixture.splits {
        let found = samples(&fixture.open(folder.path(), name), expected.tokens.len());
        assert_eq!(found, expected.tokens, "{name}");
    }
}

#[test]
fn blends_are_megatrons() {
    let (fixture, folder) = (Fixture::read(), tempfile::tempdir().unwrap());
    let datasets = [
        fixture.dataset(&folder.path().join("a"), 0..fixture.cut),
        fixture.dataset(&folder.path().join("b"), fixture.cut..fixture.lengths.len()),
    ];
    for expected in &fixture.blends {
        let opener = Opener {
            datasets: &datasets,
            names: &[],
            weights: expected.weights.as_deref(),
            order: DataloaderType::Single,
            split: parse_split(&fixture.split).unwrap(),
            seq_length: fixture.seq_length,
            seed: fixture.seed,
            cache_dir: folder.path(),
        };
        let found = opener.source(TRAIN, fixture.samples["train"]).unwrap();
        assert_eq!(
            samples(&*found, expected.tokens.len()),
            expected.tokens,
            "weights {:?}",
            expected.weights
        );
        assert!(
            opener.source(VALID, fixture.samples["valid"]).is_ok()
                && opener.source(TEST, 1).is_ok()
        );
        // The order of a blend depends only on weights and size.
        let sizes: Vec<f64> =
            datasets.iter().map(|dataset| one_epoch(&fixture, dataset, folder.path())).collect();
        let weights = expected.weights.clone().unwrap_or(sizes);
        let sources = vec![found.clone(), found.clone()];
        let blend =
            Blend::open(sources, &weights, expected.dataset_index.length as u64, folder.path())
                .unwrap();
        assert_eq!(found.num_samples(), blend.num_samples());
        let origins: Vec<(usize, u64)> =
            (0..blend.num_samples()).map(|i| blend.origin(i).unwrap()).collect();
        let parts: Vec<u32> = origins.iter().map(|&(part, _)| part as u32).collect();
        let numbers: Vec<u32> = origins.iter().map(|&(_, number)| number as u32).collect();
        assert_eq!(Summary::of(&parts), expected.dataset_index, "weights {:?}", expected.weights);
        assert_eq!(
            Summary::of(&numbers),
            expected.dataset_sample_index,
            "weights {:?}",
            expected.weights
        );
    }
    assert_eq!(fixture.blends.len(), 3);
}

/// Samples of one epoch of the train split.
fn one_epoch(fixture: &Fixture, dataset: &Arc<IndexedDataset>, folder: &Path) -> f64 {
    let train =
        split_sequences(parse_split(&fixture.split).unwrap(), dataset.num_sequences()).train;
    let source =
        GptDataset::open(dataset, train, fixture.seq_length, None, fixture.seed, folder, "train")
            .unwrap();
    source.num_samples() as f64
}

#[test]
fn orders_of_epochs_are_pytorchs() {
    for Permutation { n, epoch, order } in Fixture::read().permutations {
        assert_eq!(Summary::of(&torch_permutation(n, epoch)), order, "{n} samples, epoch {epoch}");
    }
}
