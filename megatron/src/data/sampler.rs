//! Which samples a rank reads in a step, and their tensors.
//!
//! Source: Megatron-LM `legacy/data/data_samplers.py`: with c samples consumed, microbatch m of
//! data-parallel rank r takes the samples c + m·(MBS·dp) + r·MBS + i, i < MBS. The samples of a
//! step, c … c + GBS − 1, do not depend on the layout.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use kernels::tensor::device::upload;

use super::documents::{DocumentEnds, Documents, Tables};
use super::named::NamedTensors;
use super::source::SampleSource;
use crate::{Error, Result};

/// How a global batch is divided into microbatches and over replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalBatch {
    micro_batch_size: usize,
    global_batch_size: usize,
    dp_rank: usize,
    dp_size: usize,
}

impl GlobalBatch {
    /// # Errors
    /// `Error::Config` unless GBS is a positive multiple of MBS·dp and the rank is below dp.
    pub fn new(
        micro_batch_size: usize,
        global_batch_size: usize,
        dp_rank: usize,
        dp_size: usize,
    ) -> Result<Self> {
        let per_microbatch = micro_batch_size.checked_mul(dp_size).filter(|&product| product > 0);
        if global_batch_size == 0
            || per_microbatch.is_none_or(|product| !global_batch_size.is_multiple_of(product))
        {
            return Err(Error::config(format!(
                "global_batch_size {global_batch_size} is not a positive multiple of micro_batch_size {micro_batch_size} \
                 · data_parallel_size {dp_size}"
            )));
        }
        if dp_rank >= dp_size {
            return Err(Error::config(format!(
                "data-parallel rank {dp_rank} is not below data_parallel_size {dp_size}"
            )));
        }
        Ok(Self { micro_batch_size, global_batch_size, dp_rank, dp_size })
    }

    /// A global batch of `global_batch_size` samples, divided in the same way.
    ///
    /// # Errors
    /// As [`GlobalBatch::new`].
    pub fn resized(&self, global_batch_size: usize) -> Result<Self> {
        Self::new(self.micro_batch_size, global_batch_size, self.dp_rank, self.dp_size)
    }

    /// M: microbatches of one replica in one step.
    pub fn num_microbatches(&self) -> usize {
        self.global_batch_size / (self.micro_batch_size * self.dp_size)
    }

    /// Samples of this replica's microbatch `microbatch`, as indices in the step's global batch.
    pub fn samples(&self, microbatch: usize) -> impl Iterator<Item = u64> + use<> {
        let first = (microbatch * self.dp_size + self.dp_rank) * self.micro_batch_size;
        (first..first + self.micro_batch_size).map(|sample| sample as u64)
    }
}

/// The input of one forward pass of one replica.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// u32 `[s/cp, b]`, sequence first.
    pub tokens: Tensor,
    /// The token after each of `tokens`: u32 `[s/cp, b]`.
    pub labels: Tensor,
    /// 1 if a token's loss counts, else 0: f32 `[s/cp, b]`.
    pub loss_mask: Tensor,
    /// How many of the tokens' losses count.
    pub counted: f64,
    /// Index of each of the b samples within the step's global batch: 0 … GBS − 1.
    pub samples: Vec<u64>,
    /// [`kernels::ops::dropout::step_and_samples`], for a microbatch that a CUDA graph reads.
    pub step_and_samples: Option<Tensor>,
    /// Documents of whole sequences.
    pub documents: Documents,
    /// The source's tensors besides tokens, of whole samples.
    pub named: NamedTensors,
}

/// Reads the microbatches of one replica.
#[derive(Clone)]
pub struct Loader {
    source: Arc<dyn SampleSource>,
    batch: GlobalBatch,
    vocab_size: usize,
    device: Device,
    document_ends: Option<DocumentEnds>,
    /// Index of this rank's part of each sequence, and the number of equal parts.
    part: (usize, usize),
}

impl Loader {
    /// `vocab_size` is the model's, without padding: larger token ids are refused.
    pub fn new(
        source: Arc<dyn SampleSource>,
        batch: GlobalBatch,
        vocab_size: usize,
        device: Device,
    ) -> Self {
        Self { source, batch, vocab_size, device, document_ends: None, part: (0, 1) }
    }

    /// Applies the ends of documents within samples.
    pub fn with_documents(mut self, ends: Option<DocumentEnds>) -> Self {
        self.document_ends = ends;
        self
    }

    /// Returns only the tokens of context-parallel rank `rank` of `cp` from each sequence.
    pub fn with_part_of_sequences(mut self, rank: usize, cp: usize) -> Self {
        self.part = (rank, cp);
        self
    }

    /// How the global batch is divided.
    pub fn batch(&self) -> GlobalBatch {
        self.batch
    }

    /// The microbatches of the step that starts after `consumed_samples` samples.
    ///
    /// # Errors
    /// `Error::Data` if data cannot be read or contain a token outside the vocabulary.
    pub fn microbatches(&self, consumed_samples: u64) -> Result<Vec<MicroBatch>> {
        self.microbatches_of(&self.batch, consumed_samples)
    }

    /// As [`microbatches`](Self::microbatches), for a step with another global batch size.
    ///
    /// # Errors
    /// As [`microbatches`](Self::microbatches).
    pub fn microbatches_of(
        &self,
        batch: &GlobalBatch,
        consumed_samples: u64,
    ) -> Result<Vec<MicroBatch>> {
        let microbatch =
            |microbatch| self.read(consumed_samples, batch.samples(microbatch).collect());
        (0..batch.num_microbatches()).map(microbatch).collect()
    }

    /// The samples `consumed_samples + i` for each i of `samples`.
    ///
    /// # Errors
    /// As [`microbatches`](Self::microbatches).
    pub fn read(&self, consumed_samples: u64, samples: Vec<u64>) -> Result<MicroBatch> {
        let s = self.source.seq_length();
        let b = samples.len();
        let (mut tokens, mut labels, mut loss_mask) =
            (vec![0u32; s * b], vec![0u32; s * b], vec![1f32; s * b]);
        let mut documents = Tables::new(self.document_ends, s, b);
        let masked = self.document_ends.filter(|ends| ends.mask_loss).map(|ends| ends.token);
        let (mut row, mut weights) = (vec![0u32; s + 1], vec![1f32; s]);
        let mut named = Vec::with_capacity(b);
        for (column, sample) in samples.iter().enumerate() {
            let index = consumed_samples + sample;
            self.source.sample(index, &mut row)?;
            self.source.loss_mask(index, &mut weights)?;
            named.push(self.source.named(index)?);
            if let Some(position) = row.iter().position(|&token| token as usize >= self.vocab_size)
            {
                return Err(self.misfit(row[position], position, index));
            }
            for position in 0..s {
                tokens[position * b + column] = row[position];
                labels[position * b + column] = row[position + 1];
                loss_mask[position * b + column] = weights[position];
                if masked == Some(row[position]) {
                    loss_mask[position * b + column] = 0.0;
                }
            }
            if let Some(ends) = self.document_ends {
                documents.add(ends, &row[..s], column, b);
            }
        }
        let (rank, cp) = self.part;
        if !s.is_multiple_of(cp) {
            return Err(Error::config(format!(
                "context parallelism splits sequences evenly: {s} tokens are not a multiple of context_parallel_size {cp}"
            )));
        }
        let length = s / cp;
        let mine = rank * length * b..(rank + 1) * length * b;
        let (tokens, labels, loss_mask) =
            (only(tokens, &mine), only(labels, &mine), only(loss_mask, &mine));
        // Counted here, because reading the mask from a GPU would have to wait for it.
        let counted = loss_mask.iter().map(|&m| f64::from(m)).sum();
        Ok(MicroBatch {
            tokens: upload(tokens, (length, b), &self.device)?,
            labels: upload(labels, (length, b), &self.device)?,
            loss_mask: upload(loss_mask, (length, b), &self.device)?,
            counted,
            samples,
            step_and_samples: None,
            documents: documents.upload(s, b, &self.device)?,
            named: NamedTensors::stack(&named, &self.device)?,
        })
    }

    fn misfit(&self, token: u32, position: usize, sample: u64) -> Error {
        Error::data(
            self.source.path(),
            format!(
                "token id {token} at position {position} of sample {sample}, but the vocabulary \
                 has {} (ids 0 to {}); the dataset was made with another tokenizer: give that \
                 tokenizer, or rebuild the dataset",
                self.vocab_size,
                self.vocab_size.saturating_sub(1)
            ),
        )
    }
}

/// The elements `range` of `values`.
fn only<T>(mut values: Vec<T>, range: &Range<usize>) -> Vec<T> {
    values.truncate(range.end);
    values.drain(..range.start);
    values
}
