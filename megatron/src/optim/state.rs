//! What an optimizer keeps of every element that it steps: in memory, or in a file, from which it comes a part at a time while a step is made.

use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Device, Tensor};

use crate::Result;
use crate::params::{Elements, Filed};

/// Elements that come from a file at a time: with both moments in f32 2 MiB, which stay in caches until they are written back.
const PART: usize = if cfg!(test) { 1 << 10 } else { 1 << 19 };
/// Parts ahead of the one at hand that the system is asked to read.
const PARTS_AHEAD: usize = 16;

/// Optimizer state of one bucket, over the range of it that this rank steps.
pub(super) struct BucketState {
    pub range: Range<usize>,
    /// Adam's first moment, or SGD's momentum.
    pub first: Kept,
    /// Adam's second moment.
    pub second: Option<Kept>,
}

/// One value of each element of the range.
pub(super) enum Kept {
    Memory(Tensor),
    File(Filed),
}

/// The first moment's dtype, or the momentum's, and the second moment's.
pub(super) type Dtypes = (DType, Option<DType>);

impl BucketState {
    /// Zeros on `device`, for each of `ranges`.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn in_memory(ranges: Vec<Range<usize>>, (first, second): Dtypes, device: &Device) -> Result<Vec<Self>> {
        let state = |range: Range<usize>| {
            let zeros = |dtype| {
                let zeros = kernels::device::zeros("optimizer state", range.len(), dtype, device)?;
                Ok::<_, crate::Error>(Kept::Memory(zeros))
            };
            let (first, second) = (zeros(first)?, second.map(zeros).transpose()?);
            Ok(Self { range, first, second })
        };
        ranges.into_iter().map(state).collect()
    }

    /// Zeros in a file on the disk of `folder`, for each of `ranges`.
    ///
    /// # Errors
    /// As [`Filed::zeros`].
    pub fn in_file(ranges: Vec<Range<usize>>, (first, second): Dtypes, folder: &Path) -> Result<Vec<Self>> {
        let of_range = |range: &Range<usize>| {
            let len = range.len();
            [Some(first), second].into_iter().flatten().map(move |dtype| (len, dtype))
        };
        let mut filed = Filed::zeros(folder, &ranges.iter().flat_map(of_range).collect::<Vec<_>>())?.into_iter();
        let mut next = || filed.next().map(Kept::File);
        let state = |range| Some(Self { range, first: next()?, second: second.and_then(|_| next()) });
        Ok(ranges.into_iter().filter_map(state).collect())
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        let bytes = |kept: &Kept| match kept {
            Kept::Memory(t) => t.elem_count() * t.dtype().size_in_bytes(),
            Kept::File(_) => 0,
        };
        bytes(&self.first) + self.second.as_ref().map_or(0, bytes)
    }

    /// Calls `step` with parts of the range, which together are all of it, and what is kept of them, which it changes.
    ///
    /// # Errors
    /// What `step` returns, or if what is kept cannot be read or written.
    pub fn change(&self, mut step: impl FnMut(&Range<usize>, &Tensor, Option<&Tensor>) -> Result<()>) -> Result<()> {
        let (first, second) = match (&self.first, &self.second) {
            (Kept::Memory(first), None) => return step(&self.range, first, None),
            (Kept::Memory(first), Some(Kept::Memory(second))) => return step(&self.range, first, Some(second)),
            (Kept::File(first), None) => (first, None),
            (Kept::File(first), Some(Kept::File(second))) => (first, Some(second)),
            _ => return Err(crate::Error::config("internal error: optimizer state in memory and in a file")),
        };
        let filed = || [Some(first), second].into_iter().flatten();
        let room = |filed: &Filed| Tensor::zeros(PART.min(self.range.len()), filed.dtype(), &Device::Cpu);
        let places = filed().map(room).collect::<candle_core::Result<Vec<_>>>()?;
        filed().for_each(|filed| filed.ask_for(0..PARTS_AHEAD * PART));
        for start in (0..self.range.len()).step_by(PART) {
            let part = start..self.range.len().min(start + PART);
            let later = start + PARTS_AHEAD * PART;
            let here = places.iter().map(|place| place.narrow(0, 0, part.len()));
            let here = here.collect::<candle_core::Result<Vec<_>>>()?;
            for (filed, here) in filed().zip(&here) {
                filed.ask_for(later..later + PART);
                filed.narrow(&part)?.read(here)?;
            }
            step(&(self.range.start + part.start..self.range.start + part.end), &here[0], here.get(1))?;
            for (filed, here) in filed().zip(&here) {
                filed.narrow(&part)?.write(here)?;
            }
        }
        Ok(())
    }
}

impl Kept {
    /// The elements `part` of them.
    ///
    /// # Errors
    /// If they are not among them.
    pub fn part(&self, part: &Range<usize>) -> Result<Elements> {
        Ok(match self {
            Self::Memory(tensor) => tensor.narrow(0, part.start, part.len())?.into(),
            Self::File(filed) => filed.narrow(part)?.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(kept: &Kept, n: usize) -> Vec<f32> {
        kept.part(&(0..n)).unwrap().to_f32().unwrap()
    }

    /// Adds an element's number to its first state, and doubles and increases the second.
    fn step(state: &BucketState) -> Vec<Range<usize>> {
        let mut parts = Vec::new();
        let change = |part: &Range<usize>, first: &Tensor, second: Option<&Tensor>| {
            parts.push(part.clone());
            if part.is_empty() {
                return Ok(());
            }
            let numbers = Tensor::arange(part.start as f32, part.end as f32, first.device())?;
            first.slice_set(&(first.copy()? + numbers)?, 0, 0)?;
            if let Some(second) = second {
                second.slice_set(&second.affine(2.0, 1.0)?, 0, 0)?;
            }
            Ok(())
        };
        state.change(change).unwrap();
        parts
    }

    #[test]
    fn what_is_in_a_file_changes_part_by_part_as_what_is_in_memory_does_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let ranges = vec![100..100 + 3 * PART + 7, 5..6, 9..9, PART..2 * PART];
        for second in [None, Some(DType::F32), Some(DType::BF16)] {
            let dtypes = (DType::F32, second);
            let kept = BucketState::in_memory(ranges.clone(), dtypes, &Device::Cpu).unwrap();
            let filed = BucketState::in_file(ranges.clone(), dtypes, folder.path()).unwrap();
            assert_eq!(filed.len(), ranges.len());
            for _ in 0..3 {
                for (kept, filed) in kept.iter().zip(&filed) {
                    let (whole, parts) = (step(kept), step(filed));
                    assert_eq!(whole, std::slice::from_ref(&kept.range));
                    assert_eq!(parts.len(), kept.range.len().div_ceil(PART));
                    assert_eq!(parts.iter().map(Range::len).sum::<usize>(), kept.range.len());
                    let n = kept.range.len();
                    assert_eq!(values(&filed.first, n), values(&kept.first, n));
                    let seconds = [filed, kept].map(|state| state.second.as_ref().map(|second| values(second, n)));
                    assert!(seconds[0] == seconds[1] && seconds[0].is_some() == second.is_some());
                }
            }
            let bytes: usize = kept.iter().map(BucketState::bytes).sum();
            let elements: usize = ranges.iter().map(Range::len).sum();
            assert_eq!(bytes, elements * (4 + second.map_or(0, |dtype| dtype.size_in_bytes())));
            assert_eq!(filed.iter().map(BucketState::bytes).sum::<usize>(), 0);
        }
    }
}
