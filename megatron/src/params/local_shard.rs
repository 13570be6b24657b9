//! The elements of a bucket that a rank keeps, by their numbers in the bucket.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use super::{Elements, LocalPart, Residence, overlap};
use crate::Result;

/// What a rank keeps of one buffer of a bucket: weights, master weights, gradients, or a value of
/// the optimizer.
#[derive(Clone, Debug)]
pub struct LocalShard {
    /// The elements of the bucket.
    pub range: Range<usize>,
    /// As many values.
    pub values: LocalPart,
}

impl LocalShard {
    /// Zeros of `dtype` for each of `ranges`.
    ///
    /// # Errors
    /// As [`LocalPart::zeros`].
    pub fn zeros(
        what: &'static str,
        ranges: impl IntoIterator<Item = Range<usize>>,
        dtype: DType,
        residence: &Residence,
        device: &Device,
    ) -> Result<Vec<Self>> {
        let ranges: Vec<_> = ranges.into_iter().collect();
        let parts: Vec<_> = ranges.iter().map(|range| (range.len(), dtype)).collect();
        let values = LocalPart::zeros(what, &parts, residence, device)?;
        Ok(ranges.into_iter().zip(values).map(|(range, values)| Self { range, values }).collect())
    }

    /// Where the elements `part` of the bucket are in `values`. An empty part may lie anywhere.
    pub(crate) fn place(&self, part: &Range<usize>) -> Range<usize> {
        let start = if part.is_empty() { 0 } else { part.start.wrapping_sub(self.range.start) };
        start..start.wrapping_add(part.len())
    }

    /// The elements `part` of the bucket on `device`: a view of those that are there, else a copy.
    ///
    /// # Errors
    /// If they are not all kept here, or cannot be read.
    pub fn lend(&self, part: &Range<usize>, device: &Device) -> Result<Tensor> {
        self.values.lend(&self.place(part), device)
    }

    /// Keeps what `lent`, the elements `part`, holds now. A view already has it.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn give_back(&self, part: &Range<usize>, lent: &Tensor) -> Result<()> {
        self.values.give_back(&self.place(part), lent)
    }

    /// The elements `part` of the bucket alone.
    ///
    /// # Errors
    /// If they are not all kept here.
    pub fn narrow(&self, part: &Range<usize>) -> Result<LocalPart> {
        self.values.narrow(&self.place(part))
    }

    /// The elements `part` of the bucket as a checkpoint reads and fills them.
    ///
    /// # Errors
    /// If they are not all kept here.
    pub fn elements(&self, part: &Range<usize>) -> Result<Elements> {
        self.values.elements(&self.place(part))
    }

    /// Splits the elements `whole` of the bucket, in order, into parts that are kept here (true) and
    /// others (false). No part is empty.
    pub fn parts(&self, whole: Range<usize>) -> impl Iterator<Item = (Range<usize>, bool)> {
        let kept = overlap(whole.clone(), &self.range);
        let parts =
            [(whole.start..kept.start, false), (kept.clone(), true), (kept.end..whole.end, false)];
        parts.into_iter().filter(|(part, _)| !part.is_empty())
    }
}
