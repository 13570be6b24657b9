//! What an optimizer keeps of every element that it updates, and updates of elements that are
//! partly elsewhere: in host memory or files, from which they come a part at a time (Ren et al.
//! 2021, "ZeRO-Offload"; Rajbhandari et al. 2021, "ZeRO-Infinity").

use std::collections::VecDeque;
use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use kernels::tensor::transfer::{Mark, mark, put, room};

use crate::params::{Elements, LocalShard, Residence};
use crate::{Error, Result};

/// Elements that come from a file at a time: with both moments in f32 4 MiB, which stay in caches
/// until they are written back.
const PART: usize = if cfg!(test) { 1 << 10 } else { 1 << 19 };
/// Elements that go to a GPU at a time.
const PART_ON_GPU: usize = if cfg!(any(test, feature = "emulated")) { 1 << 12 } else { 1 << 22 };
/// Parts on a GPU at a time: while one is updated, another is copied in or out.
const LANES: usize = 2;
/// Parts ahead of the current one that the system is asked to read.
const PARTS_AHEAD: usize = 16;

/// Optimizer state of one bucket, over the range of it that this rank updates.
pub(super) struct BucketState {
    pub range: Range<usize>,
    /// The values of each element of the range: Adam's first and second moment, or SGD's momentum.
    pub values: Vec<LocalShard>,
}

impl BucketState {
    /// Zeros of each of `dtypes` for each of `ranges` of parameters on `device`.
    ///
    /// # Errors
    /// If there is no room, or state is to be moved to the host's memory from there.
    pub fn zeros(
        ranges: Vec<Range<usize>>,
        dtypes: &[DType],
        residence: &Residence,
        device: &Device,
    ) -> Result<Vec<Self>> {
        let mut states: Vec<_> =
            ranges.iter().map(|range| Self { range: range.clone(), values: Vec::new() }).collect();
        for &dtype in dtypes {
            let shards =
                LocalShard::zeros("optimizer state", ranges.clone(), dtype, residence, device)?;
            states.iter_mut().zip(shards).for_each(|(state, shard)| state.values.push(shard));
        }
        Ok(states)
    }

    /// Bytes of the parameters' device.
    pub fn bytes(&self) -> usize {
        self.values.iter().map(|shard| shard.values.bytes_on_device()).sum()
    }

    /// Value number `which` of the elements `part` of the bucket.
    ///
    /// # Errors
    /// If they are not in the range, or have no such value.
    pub fn part(&self, which: usize, part: &Range<usize>) -> Result<Elements> {
        let none =
            || Error::config(format!("internal error: optimizer state has no value {which}"));
        self.values.get(which).ok_or_else(none)?.elements(part)
    }
}

/// One kind of elements that an update reads or changes.
pub(super) struct Column {
    pub shard: LocalShard,
    /// Whether the update changes them.
    pub changes: bool,
}

impl Column {
    fn is_here(&self) -> bool {
        self.shard.values.on_device().is_some()
    }

    fn prefetch(&self, part: &Range<usize>) {
        self.shard.values.prefetch(self.shard.place(part));
    }
}

/// Updates some elements, given their numbers and each column's values of them.
pub(super) type Step<'a> = dyn FnMut(&Range<usize>, &[Tensor]) -> Result<()> + 'a;

/// Calls `step` with parts of `range` of a bucket, which together are all of it, and what each of
/// `columns` has of them on `device`. On a GPU it is queued; where columns are elsewhere, the host waits
/// until all but the last parts are back.
///
/// # Errors
/// What `step` returns, or if elements cannot be read, written or copied.
pub(super) fn update(
    range: &Range<usize>,
    columns: &[Column],
    device: &Device,
    step: &mut Step,
) -> Result<()> {
    if columns.iter().all(Column::is_here) {
        let here: Result<Vec<_>> =
            columns.iter().map(|column| column.shard.lend(range, device)).collect();
        return step(range, &here?);
    }
    if mark(device)?.is_some() {
        update_on_gpu(range, columns, device, step)
    } else {
        update_on_cpu(range, columns, step)
    }
}

fn update_on_cpu(range: &Range<usize>, columns: &[Column], step: &mut Step) -> Result<()> {
    let places = room_for(columns, PART.min(range.len()), &Device::Cpu)?;
    let prefetch = |first: usize, len: usize| {
        let part = first.min(range.end)..(first + len).min(range.end);
        columns.iter().for_each(|column| column.prefetch(&part));
    };
    prefetch(range.start, PARTS_AHEAD * PART);
    for part in parts(range, PART) {
        let here = first_of(columns, &places, &part)?;
        prefetch(part.start + PARTS_AHEAD * PART, PART);
        for (column, here) in elsewhere(columns, &here) {
            column.shard.values.read(&column.shard.place(&part), here)?;
        }
        step(&part, &here)?;
        for (column, here) in elsewhere(columns, &here).filter(|(column, _)| column.changes) {
            column.shard.values.write(&column.shard.place(&part), here)?;
        }
    }
    Ok(())
}

fn update_on_gpu(
    range: &Range<usize>,
    columns: &[Column],
    device: &Device,
    step: &mut Step,
) -> Result<()> {
    let now = || {
        let mark = mark(device)?;
        mark.ok_or_else(|| Error::config("internal error: a GPU whose work has no order"))
    };
    let back = |(part, here, done): (Range<usize>, Vec<Tensor>, Mark)| {
        for (column, here) in elsewhere(columns, &here).filter(|(column, _)| column.changes) {
            column.shard.values.write_from_gpu(&column.shard.place(&part), here, &done)?;
        }
        Ok::<_, Error>(done)
    };
    let lanes = (0..LANES).map(|_| room_for(columns, PART_ON_GPU.min(range.len()), device));
    let lanes = lanes.collect::<Result<Vec<_>>>()?;
    let prefetch = |first: usize, len: usize| {
        let part = first.min(range.end)..(first + len).min(range.end);
        columns.iter().for_each(|column| column.prefetch(&part));
    };
    prefetch(range.start, LANES * PART_ON_GPU);
    // The point after which a lane may be overwritten: at first whatever made its memory, then the
    // update of its previous part. Copies overlap with later updates.
    let (mut free, mut under_way) = (now()?, VecDeque::new());
    for (part, lane) in parts(range, PART_ON_GPU).zip(lanes.iter().cycle()) {
        if under_way.len() == LANES
            && let Some(first) = under_way.pop_front()
        {
            free = back(first)?;
        }
        let here = first_of(columns, lane, &part)?;
        prefetch(part.start + LANES * PART_ON_GPU, PART_ON_GPU);
        for (column, here) in elsewhere(columns, &here) {
            let staged = room(here, &free)?;
            column.shard.values.read(&column.shard.place(&part), staged.tensor())?;
            put(staged, here, &free)?;
        }
        step(&part, &here)?;
        under_way.push_back((part, here, now()?));
    }
    under_way.into_iter().try_for_each(|part| back(part).map(drop))
}

/// Parts of `range`, of `each` elements at most.
fn parts(range: &Range<usize>, each: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.clone().step_by(each).map(move |start| start..end.min(start + each))
}

/// A tensor of `len` elements for each column that is elsewhere.
fn room_for(columns: &[Column], len: usize, device: &Device) -> Result<Vec<Option<Tensor>>> {
    let room = |column: &Column| {
        let dtype = column.shard.values.dtype();
        (!column.is_here())
            .then(|| Ok(kernels::tensor::device::zeros("parts of an update", len, dtype, device)?))
            .transpose()
    };
    columns.iter().map(room).collect()
}

/// Where the elements `part` of each column are on the device, or will be: in its place if it has
/// one.
fn first_of(
    columns: &[Column],
    places: &[Option<Tensor>],
    part: &Range<usize>,
) -> Result<Vec<Tensor>> {
    let one = |(column, place): (&Column, &Option<Tensor>)| match place {
        Some(place) => Ok(place.narrow(0, 0, part.len())?),
        None => column.shard.lend(part, &Device::Cpu),
    };
    columns.iter().zip(places).map(one).collect()
}

/// The columns that are elsewhere, with their places on the device.
fn elsewhere<'a>(
    columns: &'a [Column],
    here: &'a [Tensor],
) -> impl Iterator<Item = (&'a Column, &'a Tensor)> {
    columns.iter().zip(here).filter(|(column, _)| !column.is_here())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(state: &BucketState, which: usize) -> Vec<f32> {
        state.part(which, &state.range).unwrap().to_f32().unwrap()
    }

    /// Adds the element's index to its first value; doubles and increments the second.
    fn step(state: &BucketState) -> Vec<Range<usize>> {
        let mut parts = Vec::new();
        let mut change = |part: &Range<usize>, kept: &[Tensor]| {
            let (first, second) = (&kept[0], kept.get(1));
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
        let columns =
            state.values.iter().map(|shard| Column { shard: shard.clone(), changes: true });
        let columns: Vec<_> = columns.collect();
        update(&state.range, &columns, &Device::Cpu, &mut change).unwrap();
        parts
    }

    #[test]
    fn what_is_in_a_file_changes_part_by_part_as_what_is_in_memory_does_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let ranges = vec![100..100 + 3 * PART + 7, 5..6, 9..9, PART..2 * PART];
        for dtypes in [&[DType::F32][..], &[DType::F32, DType::F32], &[DType::F32, DType::BF16]] {
            let zeros = |residence| {
                BucketState::zeros(ranges.clone(), dtypes, &residence, &Device::Cpu).unwrap()
            };
            let kept = zeros(Residence::Device);
            let file_backed = zeros(Residence::Files(folder.path().to_path_buf()));
            assert_eq!(file_backed.len(), ranges.len());
            for _ in 0..3 {
                for (kept, file_backed) in kept.iter().zip(&file_backed) {
                    let (whole, parts) = (step(kept), step(file_backed));
                    assert_eq!(whole, std::slice::from_ref(&kept.range));
                    assert_eq!(parts.len(), kept.range.len().div_ceil(PART));
                    assert_eq!(parts.iter().map(Range::len).sum::<usize>(), kept.range.len());
                    for which in 0..dtypes.len() {
                        assert_eq!(values(file_backed, which), values(kept, which));
                    }
                    assert!(
                        [kept, file_backed]
                            .iter()
                            .all(|state| state.part(dtypes.len(), &state.range).is_err())
                    );
                }
            }
            let bytes: usize = kept.iter().map(BucketState::bytes).sum();
            let elements: usize = ranges.iter().map(Range::len).sum();
            assert_eq!(
                bytes,
                elements * dtypes.iter().map(|dtype| dtype.size_in_bytes()).sum::<usize>()
            );
            assert_eq!(file_backed.iter().map(BucketState::bytes).sum::<usize>(), 0);
        }
    }

    #[test]
    fn state_on_the_host_is_moved_nowhere_else_on_the_host() {
        let zeros =
            BucketState::zeros(vec![0..4, 4..9], &[DType::F32], &Residence::Host, &Device::Cpu);
        let refused = zeros.map(drop).unwrap_err().to_string();
        assert!(refused.contains("are in the host's memory already"), "{refused}");
    }
}
