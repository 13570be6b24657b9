//! Several sources mixed by weights.
//!
//! Source: Megatron-LM `core/datasets/blended_dataset.py` and `helpers.cpp` (0.16.1): sample i
//! comes from the source that lags most behind its share so far, argmax of weight·max(i, 1) −
//! count, ties to the first.

use std::path::Path;
use std::sync::Arc;

use candle_core::Tensor;

use super::cache::{KeyHasher, open_or_build};
use super::index_file::{IndexFile, IndexWriter, Shape};
use super::source::SampleSource;
use crate::{Error, Result};

/// Arrays of the cached file.
const SOURCE: usize = 0;
const SAMPLE: usize = 1;

/// Megatron numbers the sources of a blend with 16 bits.
pub(super) const MOST_SOURCES: usize = i16::MAX as usize - 1;

/// A fixed number of samples from several sources; indices beyond it start again.
pub struct Blend {
    sources: Vec<Arc<dyn SampleSource>>,
    index: IndexFile,
}

impl Blend {
    /// `size` samples of `sources`, blended by the normalized `weights`. The order is cached in
    /// `cache_dir`.
    pub fn open(
        sources: Vec<Arc<dyn SampleSource>>,
        weights: &[f64],
        size: u64,
        cache_dir: &Path,
    ) -> Result<Self> {
        if sources.is_empty()
            || sources.len() != weights.len()
            || sources.len() > MOST_SOURCES
            || size == 0
        {
            let (sources, weights) = (sources.len(), weights.len());
            return Err(Error::config(format!(
                "cannot blend {size} samples of {sources} sources with {weights} weights; give up \
                 to {MOST_SOURCES} sources that are not empty, with one weight for each"
            )));
        }
        let weights = normalized(weights);
        let mut key = KeyHasher::default();
        key.field(&size.to_le_bytes());
        weights.iter().for_each(|weight| key.update(&weight.to_bits().to_le_bytes()));
        let path = cache_dir.join(format!("blend-{}.index", key.finish()));
        let open = || {
            Ok(IndexFile::open(&path, 2)?
                .filter(|index| index.len(SOURCE) == size && index.len(SAMPLE) == size))
        };
        let index = open_or_build(cache_dir, &[&path], open, || build(&weights, size, &path))?;
        Ok(Self { sources, index })
    }

    /// The source of sample `index`, and the index within that source.
    pub(super) fn origin(&self, index: u64) -> Result<(usize, u64)> {
        let index = index % self.num_samples();
        let ([source], [sample]) = (self.index.get(SOURCE, index)?, self.index.get(SAMPLE, index)?);
        match usize::try_from(source) {
            Ok(source) if source < self.sources.len() => Ok((source, sample)),
            _ => Err(self.index.damaged()),
        }
    }
}

impl SampleSource for Blend {
    fn seq_length(&self) -> usize {
        self.sources[0].seq_length()
    }

    fn num_samples(&self) -> u64 {
        self.index.len(SOURCE)
    }

    fn sample(&self, index: u64, out: &mut [u32]) -> Result<()> {
        let (source, sample) = self.origin(index)?;
        self.sources[source].sample(sample, out)
    }

    fn named(&self, index: u64) -> Result<Vec<(String, Tensor)>> {
        let (source, sample) = self.origin(index)?;
        self.sources[source].named(sample)
    }

    fn loss_mask(&self, index: u64, out: &mut [f32]) -> Result<()> {
        let (source, sample) = self.origin(index)?;
        self.sources[source].loss_mask(sample, out)
    }

    fn path(&self) -> &Path {
        self.sources[0].path()
    }
}

fn build(weights: &[f64], size: u64, path: &Path) -> Result<()> {
    // The source numbers come first in the file, so the draw runs twice instead of being kept in
    // memory.
    let shapes = [Shape { width: 2, len: size }, Shape::of_values_below(size, size)];
    let mut writer = IndexWriter::create(path, &shapes)?;
    draw(weights, size, |source, _| writer.push(source as u64))?;
    draw(weights, size, |_, sample| writer.push(sample))?;
    writer.finish()
}

/// Calls `each` with the source of every sample and its index within the source.
fn draw(weights: &[f64], size: u64, mut each: impl FnMut(usize, u64) -> Result<()>) -> Result<()> {
    let mut counts = vec![0u64; weights.len()];
    for i in 0..size {
        let i = i.max(1) as f64;
        let (mut most, mut lag) = (0, f64::NEG_INFINITY);
        for (source, (weight, &count)) in weights.iter().zip(&counts).enumerate() {
            let lags = weight * i - count as f64;
            if lags > lag {
                (most, lag) = (source, lags);
            }
        }
        each(most, counts[most])?;
        counts[most] += 1;
    }
    Ok(())
}

/// Weights divided by their sum.
pub(super) fn normalized(weights: &[f64]) -> Vec<f64> {
    let sum = pairwise_sum(weights);
    weights.iter().map(|weight| weight / sum).collect()
}

/// The sum with the rounding of `numpy.sum`: eight partial sums, and recursive halving above 128
/// numbers. A weight that is one bit off would change ties.
fn pairwise_sum(values: &[f64]) -> f64 {
    match values.len() {
        0..8 => values.iter().sum(),
        8..=128 => {
            let (eights, rest) = values.as_chunks::<8>();
            let mut r = eights[0];
            for eight in &eights[1..] {
                r.iter_mut().zip(eight).for_each(|(sum, value)| *sum += value);
            }
            let sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
            rest.iter().fold(sum, |sum, value| sum + value)
        }
        n => {
            let half = n / 2 - (n / 2) % 8;
            pairwise_sum(&values[..half]) + pairwise_sum(&values[half..])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(weights: &[f64], size: u64) -> Vec<usize> {
        let mut found = Vec::new();
        draw(weights, size, |source, _| {
            found.push(source);
            Ok(())
        })
        .unwrap();
        found
    }

    #[test]
    fn whoever_lags_most_is_next_and_ties_go_to_the_first() {
        assert_eq!(sources(&[0.5, 0.5], 6), [0, 1, 0, 1, 0, 1]);
        assert_eq!(sources(&[0.25, 0.75], 8), [1, 0, 1, 1, 0, 1, 1, 1]);
    }

    #[test]
    fn counts_stay_within_one_of_their_share() {
        let weights = normalized(&[3.0, 1.0, 0.1, 5.7]);
        let mut counts = [0.0; 4];
        for (i, source) in sources(&weights, 5000).into_iter().enumerate() {
            counts[source] += 1.0;
            let share = |(count, weight): (&f64, &f64)| (count - weight * (i + 1) as f64).abs();
            assert!(
                counts.iter().zip(&weights).map(share).all(|off| off < 2.0),
                "after {i}: {counts:?}"
            );
        }
    }

    /// `numpy.sum(1.0 / numpy.arange(1, n + 1))`, as bits.
    const NUMPY_SUMS: [(usize, u64); 5] = [
        (8, 0x4005be2be2be2be2),
        (15, 0x400a8bbba47475d4),
        (128, 0x4015bb8ae9541ca7),
        (129, 0x4015c37b09149ba9),
        (300, 0x40192172a3e6965a),
    ];

    #[test]
    fn sums_are_rounded_as_numpys() {
        assert_eq!(pairwise_sum(&[0.1; 7]), [0.1; 7].iter().sum::<f64>());
        let values: Vec<f64> = (0..300).map(|i| 1.0 / (i + 1) as f64).collect();
        for (n, bits) in NUMPY_SUMS {
            assert_eq!(pairwise_sum(&values[..n]).to_bits(), bits, "{n} values");
        }
    }
}
