//! Samples of S + 1 tokens, in order or shuffled again every epoch.
//!
//! Sample i of a split is tokens [i·S, i·S + S] of its token stream: the last token of a sample is
//! the first of the next. The shuffle is a Feistel network over the sample numbers with cycle
//! walking (Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains"): a permutation in
//! constant memory, so that any rank can compute any sample at any time.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use candle_core::Tensor;

use super::indexed::IndexedDataset;

use crate::{Error, Result};

/// An infinite sequence of training samples; each depends only on its index.
pub trait SampleSource: Send + Sync {
    /// S: a sample has S + 1 tokens; the first S are inputs and the last S are labels.
    fn seq_length(&self) -> usize;

    /// Distinct samples, that is, those of one epoch.
    fn num_samples(&self) -> u64;

    /// Writes sample `index` to `out`, of S + 1 tokens. Indices of `num_samples` and above are in
    /// further epochs. For samples that are not text, `out` stays zero.
    fn sample(&self, _index: u64, _out: &mut [u32]) -> Result<()> {
        Ok(())
    }

    /// Tensors of sample `index` besides its tokens, by name: `[…]` each, on the CPU, with the same
    /// names, shapes and dtypes for all samples. Every rank of a replica gets the whole tensors.
    fn named(&self, _index: u64) -> Result<Vec<(String, Tensor)>> {
        Ok(Vec::new())
    }

    /// Writes the weight of each of sample `index`'s S losses to `out`, ones by default. A step's
    /// loss is their weighted sum over the global batch, divided by the sum of the weights.
    fn loss_mask(&self, _index: u64, out: &mut [f32]) -> Result<()> {
        out.fill(1.0);
        Ok(())
    }

    /// The path that errors about this data name.
    fn path(&self) -> &Path {
        Path::new("dataset")
    }
}

/// A run of sequences of one dataset, as one stream of tokens.
#[derive(Debug)]
struct Segment {
    dataset: Arc<IndexedDataset>,
    num_tokens: u64,
    /// First byte of the first sequence.
    first_byte: u64,
    /// If sequences are not contiguous: their first tokens within the segment, and the first
    /// sequence.
    scattered: Option<(Vec<u64>, u64)>,
}

impl Segment {
    fn new(dataset: Arc<IndexedDataset>, sequences: Range<u64>) -> Result<Self> {
        let first_byte =
            if sequences.is_empty() { 0 } else { dataset.sequence(sequences.start)?.1 };
        let mut num_tokens = 0u64;
        let mut starts = Vec::new();
        let contiguous = dataset.is_contiguous();
        dataset.for_each_length(sequences.clone(), |length| {
            if !contiguous {
                starts.push(num_tokens);
            }
            num_tokens = num_tokens.saturating_add(length);
        })?;
        let scattered = (!contiguous).then_some((starts, sequences.start));
        Ok(Self { dataset, num_tokens, first_byte, scattered })
    }

    /// Reads tokens that are all within the segment.
    fn read(&self, mut start: u64, mut out: &mut [u32]) -> Result<()> {
        let size = self.dataset.token_type().size() as u64;
        let Some((starts, first_sequence)) = &self.scattered else {
            return self.dataset.read_tokens(self.first_byte + start * size, out);
        };
        while !out.is_empty() {
            let at = starts.partition_point(|&first| first <= start) - 1;
            let (length, offset) = self.dataset.sequence(first_sequence + at as u64)?;
            let skip = start - starts[at];
            let count = length.saturating_sub(skip).min(out.len() as u64);
            if count == 0 {
                return Err(Error::data(
                    self.dataset.path(),
                    "changed while it was read; start the run again",
                ));
            }
            let (head, tail) = out.split_at_mut(count as usize);
            self.dataset.read_tokens(offset + skip * size, head)?;
            start += count;
            out = tail;
        }
        Ok(())
    }
}

/// A range of the concatenated sequences of several datasets, read as one stream of tokens.
#[derive(Debug)]
pub struct TokenStream {
    segments: Vec<Segment>,
    num_tokens: u64,
}

impl TokenStream {
    /// The sequences `sequences` of the concatenation of `datasets`.
    pub fn new(datasets: &[Arc<IndexedDataset>], sequences: Range<u64>) -> Result<Self> {
        let mut segments = Vec::new();
        let mut first = 0;
        for dataset in datasets {
            let end = first + dataset.num_sequences();
            let (from, to) = (
                sequences.start.clamp(first, end) - first,
                sequences.end.clamp(first, end) - first,
            );
            if from < to {
                segments.push(Segment::new(dataset.clone(), from..to)?);
            }
            first = end;
        }
        let num_tokens = segments.iter().map(|segment| segment.num_tokens).sum();
        Ok(Self { segments, num_tokens })
    }

    /// Tokens in the stream.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Reads tokens from token `start` of the stream on.
    pub fn read(&self, start: u64, mut out: &mut [u32]) -> Result<()> {
        if start.checked_add(out.len() as u64).is_none_or(|end| end > self.num_tokens) {
            let message =
                format!("tokens from {start} on were asked for, but there are {}", self.num_tokens);
            return Err(Error::data(self.path(), message));
        }
        let mut first = 0;
        for segment in &self.segments {
            let end = first + segment.num_tokens;
            let at = start.max(first);
            if at < end && !out.is_empty() {
                let (head, tail) = out.split_at_mut((end - at).min(out.len() as u64) as usize);
                segment.read(at - first, head)?;
                out = tail;
            }
            first = end;
        }
        Ok(())
    }

    fn path(&self) -> &Path {
        self.segments.first().map_or(Path::new("dataset"), |segment| segment.dataset.path())
    }
}

/// Sample i is tokens [i·S, i·S + S] of the stream, in order; every epoch is the same.
#[derive(Debug)]
pub struct Sequential {
    stream: TokenStream,
    seq_length: usize,
    num_samples: u64,
}

impl Sequential {
    /// `name` identifies the split in errors.
    ///
    /// # Errors
    /// `Error::Data` if the stream is too short for one sample.
    pub fn new(stream: TokenStream, seq_length: usize, name: &str) -> Result<Self> {
        if seq_length == 0 {
            return Err(Error::config("seq_length is 0; a sample needs at least one token"));
        }
        let num_samples = stream.num_tokens().saturating_sub(1) / seq_length as u64;
        if num_samples == 0 {
            return Err(Error::data(
                stream.path(),
                format!(
                    "the {name} split has {} tokens, but one sample takes {} (seq_length {seq_length} and one label); \
                     give more data, a shorter seq_length, or another split",
                    stream.num_tokens(),
                    seq_length + 1
                ),
            ));
        }
        Ok(Self { stream, seq_length, num_samples })
    }
}

impl SampleSource for Sequential {
    fn seq_length(&self) -> usize {
        self.seq_length
    }

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
        self.stream.read(index % self.num_samples * self.seq_length as u64, out)
    }

    fn path(&self) -> &Path {
        self.stream.path()
    }
}

/// The samples of another source in an order drawn every epoch from (seed, epoch).
#[derive(Debug)]
pub struct Shuffled<S> {
    source: S,
    seed: u64,
}

impl<S: SampleSource> Shuffled<S> {
    /// Shuffles `source`; equal seeds give equal orders.
    pub fn new(source: S, seed: u64) -> Self {
        Self { source, seed }
    }

    /// The index in the source of this sampler's sample `index`.
    fn origin(&self, index: u64) -> u64 {
        let n = self.source.num_samples();
        permute(index % n, n, self.seed, index / n)
    }
}

impl<S: SampleSource> SampleSource for Shuffled<S> {
    fn seq_length(&self) -> usize {
        self.source.seq_length()
    }

    fn num_samples(&self) -> u64 {
        self.source.num_samples()
    }

    fn sample(&self, index: u64, out: &mut [u32]) -> Result<()> {
        self.source.sample(self.origin(index), out)
    }

    fn named(&self, index: u64) -> Result<Vec<(String, Tensor)>> {
        self.source.named(self.origin(index))
    }

    fn loss_mask(&self, index: u64, out: &mut [f32]) -> Result<()> {
        self.source.loss_mask(self.origin(index), out)
    }

    fn path(&self) -> &Path {
        self.source.path()
    }
}

/// The image of `index` < `n` under the permutation of 0..n drawn from (seed, epoch).
pub fn permute(index: u64, n: u64, seed: u64, epoch: u64) -> u64 {
    debug_assert!(index < n);
    if n <= 1 {
        return index;
    }
    // Two halves of equal width, over the smallest even number of bits that holds n: at most four
    // times n values, so that the walk back into 0..n takes fewer than four steps on average.
    let half = (64 - (n - 1).leading_zeros()).div_ceil(2);
    let mask = (1u64 << half) - 1;
    let key = mix(mix(seed) ^ epoch);
    let mut value = index;
    loop {
        let (mut left, mut right) = (value >> half, value & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mix(key ^ mix(round << 32 ^ right)) & mask));
        }
        value = left << half | right;
        if value < n {
            return value;
        }
    }
}

/// Four rounds give a pseudorandom permutation of large domains (Luby & Rackoff 1988); small
/// domains need more.
const ROUNDS: u64 = 10;

/// SplitMix64 (Steele, Lea & Flood 2014).
pub(super) fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
