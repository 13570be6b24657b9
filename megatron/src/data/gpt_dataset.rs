//! The samples of Megatron's `GPTDataset`, element by element.
//!
//! Source: Megatron-LM `core/datasets/gpt_dataset.py` and `helpers.cpp` (0.16.1). Three indices
//! define sample i. The *document index* puts the documents (sequences of the indexed dataset) of
//! all epochs in a random order. The *sample index* gives the start of each run of S + 1 tokens in
//! that order; the last token of one run is the first of the next. The *shuffle index* gives the
//! run that is sample i. The indices are built once, cached, and read from the cache one element at
//! a time, so that a rank's memory does not grow with the data.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::cache::{KeyHasher, open_or_build};
use super::index_file::{IndexFile, IndexWriter, Shape};
use super::indexed::IndexedDataset;
use super::mt19937::Mt19937;
use super::source::SampleSource;
use crate::{Error, Result};

/// Arrays of the cached file. The sample index consists of pairs, from the first sample to the end
/// of the last.
const DOCUMENTS: usize = 0;
const SAMPLES: usize = 1;
const SHUFFLE: usize = 2;

/// A last epoch that gives less than this share of its samples is shuffled separately.
const SEPARATE_BELOW: f64 = 0.8;

/// The samples of a range of sequences.
#[derive(Debug)]
pub struct GptDataset {
    dataset: Arc<IndexedDataset>,
    seq_length: usize,
    num_samples: u64,
    index: IndexFile,
}

impl GptDataset {
    /// Opens at least `requested` samples (`None`: one epoch) of `seq_length` tokens from
    /// `sequences` of `dataset`.
    ///
    /// The indices are found in `cache_dir`, or one process builds them while others wait. `name`
    /// identifies the split in errors.
    ///
    /// # Errors
    /// `Error::Config` if the seed has more than 32 bits or the samples are too many to count,
    /// `Error::Data` if the sequences hold too few tokens or cannot be read.
    pub fn open(
        dataset: &Arc<IndexedDataset>,
        sequences: Range<u64>,
        seq_length: usize,
        requested: Option<u64>,
        seed: u64,
        cache_dir: &Path,
        name: &str,
    ) -> Result<Self> {
        let seed = u32::try_from(seed).map_err(|_| {
            Error::config(format!(
                "seed {seed}: Megatron's order of samples needs a seed below 2^32; give a smaller seed"
            ))
        })?;
        let mut key = KeyHasher::default();
        let mut num_tokens = 0u64;
        dataset.for_each_length(sequences.clone(), |length| {
            key.update(&(length as u32).to_le_bytes());
            num_tokens = num_tokens.saturating_add(length);
        })?;
        let plan = Plan::new(num_tokens, seq_length, requested).map_err(|message| {
            Error::data(dataset.path(), format!("the {name} split {message}"))
        })?;
        for word in [
            sequences.start,
            sequences.end,
            seq_length as u64,
            plan.epochs,
            seed.into(),
            plan.separate.into(),
        ] {
            key.field(&word.to_le_bytes());
        }
        let path = cache_dir.join(format!("gpt-{}.index", key.finish()));
        let num_documents = plan.epochs.checked_mul(sequences.end - sequences.start);
        let open = || {
            Ok(IndexFile::open(&path, 3)?.filter(|index| {
                Some(index.len(DOCUMENTS)) == num_documents
                    && index.len(SAMPLES) == 2 * (plan.num_samples + 1)
                    && index.len(SHUFFLE) == plan.num_samples
            }))
        };
        let build = || build(dataset, &sequences, &plan, seq_length, seed, &path);
        let index = open_or_build(cache_dir, &[&path], open, build)?;
        Ok(Self { dataset: dataset.clone(), seq_length, num_samples: plan.num_samples, index })
    }

    /// One complete index of the three.
    #[cfg(test)]
    pub(super) fn array(&self, array: usize) -> Vec<u32> {
        let element = |i| self.index.get::<1>(array, i).unwrap()[0].try_into().unwrap();
        (0..self.index.len(array)).map(element).collect()
    }

    /// Reads the piece of a sample in document `document` of the document index, from token `from`
    /// to `to` or the document's end.
    fn piece(&self, document: u64, from: u64, to: Option<u64>, out: &mut [u32]) -> Result<usize> {
        let [sequence] = self.index.get(DOCUMENTS, document)?;
        let (length, byte) = self.dataset.sequence(sequence)?;
        let to = to.unwrap_or(length);
        let count = to.checked_sub(from).filter(|&count| to <= length && count <= out.len() as u64);
        let count = count.ok_or_else(|| self.index.damaged())? as usize;
        self.dataset.read_tokens(
            byte + from * self.dataset.token_type().size() as u64,
            &mut out[..count],
        )?;
        Ok(count)
    }
}

impl SampleSource for GptDataset {
    fn seq_length(&self) -> usize {
        self.seq_length
    }

    /// The samples of all epochs that were built.
    fn num_samples(&self) -> u64 {
        self.num_samples
    }

    fn sample(&self, index: u64, out: &mut [u32]) -> Result<()> {
        if out.len() != self.seq_length + 1 {
            let (given, needed) = (out.len(), self.seq_length + 1);
            return Err(Error::config(format!(
                "a buffer of {given} tokens was given for a sample of {needed}"
            )));
        }
        let [run] = self.index.get(SHUFFLE, index % self.num_samples)?;
        let [first, mut from, last, end] = match run < self.num_samples {
            true => self.index.get(SAMPLES, 2 * run)?,
            false => return Err(self.index.damaged()),
        };
        let mut filled = 0;
        for document in first..=last {
            // The token at `end` is the last of this sample and the first of the next.
            let to = if document == last { end.checked_add(1) } else { None };
            filled += self.piece(document, from, to, &mut out[filled..])?;
            from = 0;
        }
        if filled == out.len() { Ok(()) } else { Err(self.index.damaged()) }
    }

    fn path(&self) -> &Path {
        self.dataset.path()
    }
}

/// How many epochs give the requested samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    epochs: u64,
    num_samples: u64,
    /// Samples before the last epoch.
    num_before_last: u64,
    /// The last epoch is shuffled separately.
    separate: bool,
}

impl Plan {
    fn new(
        tokens: u64,
        seq_length: usize,
        requested: Option<u64>,
    ) -> std::result::Result<Self, String> {
        let s = seq_length as u64;
        if s == 0 || tokens == 0 {
            return Err(format!(
                "has {tokens} tokens for samples of seq_length {seq_length}; give more data, or another split"
            ));
        }
        let requested = requested.unwrap_or(0);
        let too_many =
            || format!("cannot count {requested} samples of {seq_length} tokens; ask for fewer");
        let needed =
            requested.checked_mul(s).and_then(|n| n.checked_add(1)).ok_or_else(too_many)?;
        let epochs = needed.div_ceil(tokens);
        let total = epochs.checked_mul(tokens).ok_or_else(too_many)?;
        let num_samples = (total - 1) / s;
        if num_samples == 0 {
            return Err(format!(
                "has {tokens} tokens, but one sample takes {} (seq_length {seq_length} and one label); give more data, a \
                 shorter seq_length, or another split",
                s + 1
            ));
        }
        let num_before_last = (total - tokens).saturating_sub(1) / s;
        let from_last = requested.saturating_sub(num_before_last);
        let threshold = (SEPARATE_BELOW * ((tokens - 1) / s) as f64) as u64;
        Ok(Self {
            epochs,
            num_samples,
            num_before_last,
            separate: epochs > 1 && from_last < threshold,
        })
    }
}

/// Builds the three indices; peak memory is 4 bytes per document of every epoch and per sample.
fn build(
    dataset: &IndexedDataset,
    sequences: &Range<u64>,
    plan: &Plan,
    seq_length: usize,
    seed: u32,
    path: &Path,
) -> Result<()> {
    let mut lengths = Vec::new();
    dataset.for_each_length(sequences.clone(), |length| lengths.push(length))?;
    let mut random = Mt19937::new(seed);
    let documents = document_index(sequences, plan, &mut random).ok_or_else(|| {
        Error::data(dataset.path(), beyond_memory(plan, sequences.end - sequences.start))
    })?;
    let count = documents.len() as u64;
    let largest_length = lengths.iter().copied().max().unwrap_or(0);
    let mut writer = IndexWriter::create(
        path,
        &[
            Shape::of_values_below(sequences.end, count),
            Shape::of_values_below(count.max(largest_length), 2 * (plan.num_samples + 1)),
            Shape::of_values_below(plan.num_samples, plan.num_samples),
        ],
    )?;
    for &document in &documents {
        writer.push(document.into())?;
    }
    let first = sequences.start;
    let length_at = |at: usize| {
        documents.get(at).map(|&document| lengths[(u64::from(document) - first) as usize])
    };
    for_each_start(length_at, seq_length as u64, plan.num_samples, |document, offset| {
        writer.push(document)?;
        writer.push(offset)
    })?;
    drop(documents);
    let cut = if plan.separate { plan.num_before_last } else { plan.num_samples };
    let mut order = Vec::new();
    let shuffled = |range: Range<u64>, order: &mut Vec<u32>, random: &mut Mt19937| {
        order.clear();
        let (start, end) = (u32::try_from(range.start).ok()?, u32::try_from(range.end).ok()?);
        order.try_reserve((end - start) as usize).ok()?;
        order.extend(start..end);
        random.shuffle(order);
        Some(())
    };
    for range in [0..cut, cut..plan.num_samples] {
        shuffled(range, &mut order, &mut random).ok_or_else(|| {
            Error::data(dataset.path(), beyond_memory(plan, sequences.end - sequences.start))
        })?;
        for &run in &order {
            writer.push(run.into())?;
        }
    }
    writer.finish()
}

fn beyond_memory(plan: &Plan, documents: u64) -> String {
    format!(
        "{} epochs of {documents} documents and {} samples are too many for one index; train on fewer samples, or give more data",
        plan.epochs, plan.num_samples
    )
}

/// The documents of all epochs in a random order; a separate last epoch stays at the end. `None` if
/// there are too many.
fn document_index(documents: &Range<u64>, plan: &Plan, random: &mut Mt19937) -> Option<Vec<u32>> {
    let (start, end) = (u32::try_from(documents.start).ok()?, u32::try_from(documents.end).ok()?);
    let count = plan.epochs.checked_mul((end - start).into())?;
    let mut order = Vec::new();
    order.try_reserve(usize::try_from(count).ok()?).ok()?;
    for _ in 0..plan.epochs {
        order.extend(start..end);
    }
    let cut = if plan.separate { order.len() - (end - start) as usize } else { order.len() };
    let (together, apart) = order.split_at_mut(cut);
    random.shuffle(together);
    random.shuffle(apart);
    Some(order)
}

/// Walks the documents in the order of the index; passes on the start of each sample, then the end
/// of the last one.
fn for_each_start(
    length_at: impl Fn(usize) -> Option<u64>,
    seq_length: u64,
    num_samples: u64,
    mut each: impl FnMut(u64, u64) -> Result<()>,
) -> Result<()> {
    let (mut document, mut offset) = (0usize, 0u64);
    each(0, 0)?;
    for _ in 0..num_samples {
        let mut remaining = seq_length + 1;
        // The documents hold num_samples·S + 1 tokens or more, so the walk ends before they do.
        while let Some(length) = length_at(document) {
            let left = length - offset;
            if left >= remaining {
                offset += remaining - 1;
                break;
            }
            remaining -= left;
            document += 1;
            offset = 0;
        }
        each(document as u64, offset)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn starts(lengths: &[u64], documents: &[usize], s: u64) -> Vec<(u64, u64)> {
        let total: u64 = documents.iter().map(|&document| lengths[document]).sum();
        let mut found = Vec::new();
        let length_at = |at: usize| documents.get(at).map(|&document| lengths[document]);
        for_each_start(length_at, s, (total - 1) / s, |document, offset| {
            found.push((document, offset));
            Ok(())
        })
        .unwrap();
        found
    }

    /// Test vectors of Megatron's `helpers.build_sample_idx`.
    #[test]
    fn samples_begin_where_megatrons_do() {
        assert_eq!(
            starts(&[5, 3, 9, 4], &[0, 1, 2, 3], 4),
            [(0, 0), (0, 4), (2, 0), (2, 4), (2, 8), (3, 3)]
        );
        assert_eq!(
            starts(&[5, 3, 9, 4], &[2, 0, 3, 1], 4),
            [(0, 0), (0, 4), (0, 8), (1, 3), (2, 2), (3, 2)]
        );
        assert_eq!(
            starts(&[5, 3, 9, 2], &[2, 0, 3, 1], 4),
            [(0, 0), (0, 4), (0, 8), (1, 3), (3, 0)]
        );
        assert_eq!(starts(&[5, 3], &[1, 0, 0, 1], 4), [(0, 0), (1, 1), (2, 0), (2, 4)]);
    }

    #[test]
    fn empty_documents_are_passed_over() {
        assert_eq!(starts(&[0, 2, 3], &[0, 1, 0, 0, 2, 0], 2), [(0, 0), (4, 0), (4, 2)]);
    }

    #[test]
    fn epochs_are_the_fewest_that_give_the_samples_and_one_label() {
        let epochs = |requested| Plan::new(100, 10, requested).unwrap().epochs;
        assert_eq!(
            (epochs(None), epochs(Some(0)), epochs(Some(9)), epochs(Some(10))),
            (1, 1, 1, 2)
        );
        assert_eq!((epochs(Some(19)), epochs(Some(20))), (2, 3));
    }

    /// 401 tokens give 40 samples an epoch; the first of two epochs gives 40, and the threshold is
    /// 32.
    #[test]
    fn a_last_epoch_is_separate_if_it_gives_less_than_four_fifths_of_its_samples() {
        let separate = |requested| Plan::new(401, 10, Some(requested)).unwrap().separate;
        assert!(!separate(40) && separate(41) && separate(71) && !separate(72) && !separate(80));
    }

    #[test]
    fn too_little_and_too_much_are_refused() {
        assert!(
            Plan::new(10, 10, None).unwrap_err().contains("has 10 tokens, but one sample takes 11")
        );
        assert!(Plan::new(0, 10, Some(5)).unwrap_err().contains("has 0 tokens"));
        assert!(Plan::new(10, 10, Some(1)).is_ok());
        assert!(Plan::new(1 << 40, 1 << 20, Some(1 << 60)).unwrap_err().contains("cannot count"));
        assert!(
            Plan::new(u64::MAX - 1, 1, Some(u64::MAX - 1)).unwrap_err().contains("cannot count")
        );
    }
}
