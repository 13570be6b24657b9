//! Turns indexed datasets into the samples of train, valid and test, in the requested order.
//!
//! Source of sizes: Megatron-LM `core/datasets/blended_megatron_dataset_builder.py` (0.16.1).

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Prepared;
use super::blend::{Blend, normalized};
use super::cyclic::Cyclic;
use super::gpt_dataset::GptDataset;
use super::indexed::IndexedDataset;
use super::source::{SampleSource, Sequential, Shuffled, TokenStream};
use super::split::{Split, split_sequences};
use crate::config::{DataConfig, DataloaderType, RunConfig};
use crate::{Error, Result};

/// Samples that a run reads from each split. Megatron's orders and blends are drawn for these
/// numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleCounts {
    /// Over all steps of the run.
    pub train: u64,
    /// Over all evaluations of the run.
    pub valid: u64,
    /// Of the evaluation at the end.
    pub test: u64,
}

impl SampleCounts {
    /// The numbers that Megatron uses: all steps, all evaluations on the validation data, one on
    /// the test data.
    pub fn of(run: &RunConfig) -> Self {
        let samples = |steps: u64| steps.saturating_mul(run.training.global_batch_size as u64);
        let (iters, eval) = (run.training.train_iters, &run.logging);
        let evaluations =
            1 + eval.eval_interval.and_then(|interval| iters.checked_div(interval)).unwrap_or(0);
        Self {
            train: run.training.samples(),
            valid: samples(evaluations.saturating_mul(eval.eval_iters)),
            test: samples(eval.eval_iters),
        }
    }
}

/// Megatron makes each dataset of a blend larger than its share by this fraction.
const SURPLUS: f64 = 0.005;

type Source = Arc<dyn SampleSource>;

/// Everything that the samples of a split depend on besides the split.
pub(super) struct Opener<'a> {
    pub datasets: &'a [Arc<IndexedDataset>],
    /// The name of each dataset in messages.
    pub names: &'a [PathBuf],
    pub weights: Option<&'a [f64]>,
    pub order: DataloaderType,
    pub split: [f64; 3],
    pub seq_length: usize,
    pub seed: u64,
    pub cache_dir: &'a Path,
}

/// A split's name, and its sequences of a divided dataset.
pub(super) type Part = (&'static str, fn(Split) -> Range<u64>);
pub(super) const TRAIN: Part = ("train", |split| split.train);
pub(super) const VALID: Part = ("valid", |split| split.valid);
pub(super) const TEST: Part = ("test", |split| split.test);

impl<'a> Opener<'a> {
    pub fn new(
        cfg: &'a DataConfig,
        prepared: &'a Prepared,
        split: [f64; 3],
        seq_length: usize,
        seed: u64,
    ) -> Self {
        Self {
            datasets: &prepared.datasets,
            names: &prepared.names,
            weights: prepared.weights.as_deref(),
            order: cfg.dataloader_type,
            split,
            seq_length,
            seed,
            cache_dir: &cfg.cache_dir,
        }
    }

    /// The samples of a split; `requested` of them will be read.
    ///
    /// # Errors
    /// `Error::Data` if one of the datasets is too short for a sample, `Error::Config` if an order
    /// cannot be drawn.
    pub fn source(&self, part: Part, requested: u64) -> Result<Source> {
        self.cut(part, requested).map_err(|error| match (error, self.too_short(part)) {
            (Error::Data { message, .. }, Ok(Some(name))) => {
                let dealt = if self.weights.is_none() {
                    format!(": --split {}", self.dealt())
                } else {
                    String::new()
                };
                Error::data(name, format!("{message}{dealt}"))
            }
            (error, _) => error,
        })
    }

    fn cut(&self, part: Part, requested: u64) -> Result<Source> {
        // Orders are drawn for at least one sample, so that a split that is not read yet can be
        // described.
        let requested = requested.max(1);
        let source = match (self.order, self.weights) {
            (DataloaderType::Sequential | DataloaderType::Shuffled, None) => {
                let all = self.datasets.iter().map(|dataset| dataset.num_sequences()).sum();
                self.in_order(
                    TokenStream::new(self.datasets, (part.1)(split_sequences(self.split, all)))?,
                    part,
                )?
            }
            (DataloaderType::Sequential | DataloaderType::Shuffled, Some(weights)) => {
                let open = |dataset: &Arc<IndexedDataset>, _| {
                    let stream = TokenStream::new(
                        std::slice::from_ref(dataset),
                        self.sequences(dataset, part),
                    )?;
                    self.in_order(stream, part)
                };
                self.blended(weights, requested, open)?
            }
            (DataloaderType::Single | DataloaderType::Cyclic, weights) => {
                let open = |dataset: &Arc<IndexedDataset>, requested| -> Result<Source> {
                    let (s, seed, sequences) =
                        (self.seq_length, self.seed, self.sequences(dataset, part));
                    let source = GptDataset::open(
                        dataset,
                        sequences,
                        s,
                        requested,
                        seed,
                        self.cache_dir,
                        part.0,
                    )?;
                    Ok(Arc::new(source))
                };
                match (self.datasets, weights) {
                    ([dataset], None) => open(dataset, Some(requested))?,
                    (datasets, None) => {
                        let sources = datasets
                            .iter()
                            .map(|dataset| open(dataset, None))
                            .collect::<Result<Vec<_>>>()?;
                        let sizes: Vec<u64> =
                            sources.iter().map(|source| source.num_samples()).collect();
                        let weights: Vec<f64> = sizes.iter().map(|&size| size as f64).collect();
                        let size = requested.min(sizes.iter().sum());
                        Arc::new(Blend::open(sources, &weights, size, self.cache_dir)?)
                    }
                    (_, Some(weights)) => self.blended(weights, requested, open)?,
                }
            }
        };
        Ok(match self.order {
            DataloaderType::Cyclic => Arc::new(Cyclic::new(source)?),
            _ => source,
        })
    }

    /// As [`Self::source`], but returns `Err` with the first dataset that is too short, for splits
    /// that a run does not need.
    pub fn held_out(
        &self,
        part: Part,
        requested: u64,
    ) -> Result<std::result::Result<Source, &'a Path>> {
        match self.cut(part, requested) {
            Ok(source) => Ok(Ok(source)),
            Err(error @ Error::Data { .. }) => Ok(Err(self.too_short(part)?.ok_or(error)?)),
            Err(error) => Err(error),
        }
    }

    fn too_short(&self, part: Part) -> Result<Option<&'a Path>> {
        let tokens = |dataset: &Arc<IndexedDataset>| -> Result<u64> {
            let stream =
                TokenStream::new(std::slice::from_ref(dataset), self.sequences(dataset, part))?;
            Ok(stream.num_tokens())
        };
        if self.concatenates() {
            let all = self.datasets.iter().map(|dataset| dataset.num_sequences()).sum();
            let stream =
                TokenStream::new(self.datasets, (part.1)(split_sequences(self.split, all)))?;
            let is_short = stream.num_tokens() <= self.seq_length as u64;
            return Ok(self.datasets.first().filter(|_| is_short).map(|_| self.name(0)));
        }
        for (index, dataset) in self.datasets.iter().enumerate() {
            if tokens(dataset)? <= self.seq_length as u64 {
                return Ok(Some(self.name(index)));
            }
        }
        Ok(None)
    }

    fn name(&self, index: usize) -> &'a Path {
        self.names.get(index).map_or_else(|| self.datasets[index].path(), PathBuf::as_path)
    }

    /// How the split divided the data, to explain why a part has little: the end of a sentence
    /// about the split.
    pub fn dealt(&self) -> String {
        let of = |number: fn(&IndexedDataset) -> u64| {
            self.datasets.iter().map(|dataset| number(dataset)).sum()
        };
        let (all, documents): (u64, u64) =
            (of(IndexedDataset::num_sequences), of(IndexedDataset::num_documents));
        let what = if all == documents { "documents" } else { "paragraphs (sequences)" };
        let count = |part: Part| -> u64 {
            let of = |all| (part.1)(split_sequences(self.split, all)).count() as u64;
            match self.concatenates() {
                true => of(all),
                false => self.datasets.iter().map(|dataset| of(dataset.num_sequences())).sum(),
            }
        };
        let counts = [TRAIN, VALID, TEST].map(|part| (part.0, count(part)));
        match counts.iter().find(|(_, count)| *count == all) {
            Some((part, _)) if all == 1 => {
                format!("does not cut {what}, and there is only 1: all of it goes to {part}")
            }
            Some((part, _)) => {
                format!("does not cut {what}: all {all} of them go to {part}")
            }
            None => {
                let [train, valid, test] = counts.map(|(part, count)| format!("{count} to {part}"));
                format!("does not cut {what}: of {all}, {train}, {valid}, {test}")
            }
        }
    }

    /// Whether the datasets are divided as one.
    fn concatenates(&self) -> bool {
        self.weights.is_none() && !self.is_megatrons()
    }

    fn is_megatrons(&self) -> bool {
        matches!(self.order, DataloaderType::Single | DataloaderType::Cyclic)
    }

    fn sequences(&self, dataset: &IndexedDataset, part: Part) -> Range<u64> {
        (part.1)(split_sequences(self.split, dataset.num_sequences()))
    }

    fn in_order(&self, stream: TokenStream, part: Part) -> Result<Source> {
        let source = Sequential::new(stream, self.seq_length, part.0)?;
        Ok(match self.order {
            DataloaderType::Shuffled => Arc::new(Shuffled::new(source, self.seed)),
            _ => Arc::new(source),
        })
    }

    /// Blends the results of `open`, which is called with each dataset and the number of its
    /// samples to prepare.
    fn blended(
        &self,
        weights: &[f64],
        requested: u64,
        open: impl Fn(&Arc<IndexedDataset>, Option<u64>) -> Result<Source>,
    ) -> Result<Source> {
        let weights = normalized(weights);
        let share = |weight: &f64| (requested as f64 * weight).ceil();
        let sources = self
            .datasets
            .iter()
            .zip(&weights)
            .map(|(dataset, weight)| {
                open(dataset, Some((share(weight) * (1.0 + SURPLUS)).ceil() as u64))
            })
            .collect::<Result<Vec<_>>>()?;
        let size = weights.iter().map(|weight| share(weight) as u64).sum();
        Ok(Arc::new(Blend::open(sources, &weights, size, self.cache_dir)?))
    }
}
