//! The optimizer's state of each element. It is stored on the device of the parameters, in host
//! memory, or in a file. From host memory or a file it is brought to the device in parts while a
//! step is made (Ren et al. 2021, "ZeRO-Offload"; Rajbhandari et al. 2021, "ZeRO-Infinity").

use std::collections::VecDeque;
use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use kernels::tensor::transfer::{Mark, fetch, mark, put, room};

use crate::config::OptimizerOffload;
use crate::params::{Elements, FileBacked, copy_on_host};
use crate::{Error, Result};

/// Elements that are read from a file at a time. Both moments in f32 take 4 MiB, which stays in
/// caches until it is written back.
const PART: usize = if cfg!(test) { 1 << 10 } else { 1 << 19 };
/// Elements that are copied to a GPU at a time.
const PART_ON_GPU: usize = if cfg!(any(test, feature = "emulated")) { 1 << 12 } else { 1 << 22 };
/// Parts on a GPU at a time: one is copied in while the previous one is updated or copied back.
const LANES: usize = 2;
/// Number of parts to prefetch beyond the current one.
const PARTS_AHEAD: usize = 16;

/// Optimizer state of one bucket, over the range that this rank updates.
pub(super) struct BucketState {
    pub range: Range<usize>,
    storage: Storage,
}

/// The values of each element in the range: Adam's first and second moment, or SGD's momentum.
enum Storage {
    /// On the device of the parameters.
    OnDevice(Vec<Tensor>),
    Offloaded(Vec<Offloaded>),
}

/// Values that are brought to the parameters' device in parts.
enum Offloaded {
    Host(Tensor),
    File(FileBacked),
}

/// Updates the state of one part of a bucket.
pub(super) type Step<'a> = dyn FnMut(&Range<usize>, &[Tensor]) -> Result<()> + 'a;

impl BucketState {
    /// Creates zeros: for each of `ranges` one state with a tensor of each of `dtypes`. The
    /// parameters are on `device`.
    ///
    /// # Errors
    /// If there is no room, or if state is to be offloaded to host memory while the parameters are
    /// already there.
    pub fn zeros(
        ranges: Vec<Range<usize>>,
        dtypes: &[DType],
        offload: &OptimizerOffload,
        device: &Device,
    ) -> Result<Vec<Self>> {
        if *offload == OptimizerOffload::Cpu && mark(device)?.is_none() {
            let device = kernels::tensor::device::name(device);
            return Err(Error::config(format!(
                "optimizer_cpu_offload moves state from a GPU to host memory, but this run \
                 computes on {device}; leave it out, or keep the state in files: \
                 offload_optimizer_nvme_path"
            )));
        }
        let zeros = |range: &Range<usize>, device: &Device| {
            let zeros = |&dtype| {
                Ok(kernels::tensor::device::zeros("optimizer state", range.len(), dtype, device)?)
            };
            dtypes.iter().map(zeros).collect::<Result<Vec<_>>>()
        };
        let file_backed = match offload {
            OptimizerOffload::Nvme(folder) => {
                let parts = ranges
                    .iter()
                    .flat_map(|range| dtypes.iter().map(|&dtype| (range.len(), dtype)));
                FileBacked::zeros(folder, &parts.collect::<Vec<_>>())?
            }
            OptimizerOffload::None | OptimizerOffload::Cpu => Vec::new(),
        };
        let mut file_backed = file_backed.into_iter().map(Offloaded::File);
        let state = |range| {
            let storage = match offload {
                OptimizerOffload::None => Storage::OnDevice(zeros(&range, device)?),
                OptimizerOffload::Cpu => Storage::Offloaded(
                    zeros(&range, &Device::Cpu)?.into_iter().map(Offloaded::Host).collect(),
                ),
                OptimizerOffload::Nvme(_) => {
                    Storage::Offloaded(file_backed.by_ref().take(dtypes.len()).collect())
                }
            };
            Ok(Self { range, storage })
        };
        ranges.into_iter().map(state).collect()
    }

    /// Bytes on the parameters' device.
    pub fn bytes(&self) -> usize {
        match &self.storage {
            Storage::OnDevice(values) => {
                values.iter().map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum()
            }
            Storage::Offloaded(_) => 0,
        }
    }

    /// Value number `which` of the elements `part` of the bucket.
    ///
    /// # Errors
    /// If `part` exceeds the range, or there is no value with this number.
    pub fn part(&self, which: usize, part: &Range<usize>) -> Result<Elements> {
        let part =
            part.start.wrapping_sub(self.range.start)..part.end.wrapping_sub(self.range.start);
        let none =
            || Error::config(format!("internal error: optimizer state has no value {which}"));
        match &self.storage {
            Storage::OnDevice(values) => {
                narrowed(values.get(which).ok_or_else(none)?, &part).map(Elements::from)
            }
            Storage::Offloaded(offloaded) => match offloaded.get(which).ok_or_else(none)? {
                Offloaded::Host(tensor) => narrowed(tensor, &part).map(Elements::from),
                Offloaded::File(file_backed) => file_backed.narrow(&part).map(Elements::from),
            },
        }
    }

    /// Calls `step` with consecutive parts of the range, together all of it, and the state of each
    /// part on `device`, the parameters' device. `step` changes the state in place. On a GPU the
    /// work is queued; if the state is offloaded, the host waits until all but the last parts are
    /// copied back.
    ///
    /// # Errors
    /// Those of `step`, or if state cannot be read, written or copied.
    pub fn change(&self, device: &Device, step: &mut Step) -> Result<()> {
        let offloaded = match &self.storage {
            Storage::OnDevice(values) => return step(&self.range, values),
            Storage::Offloaded(offloaded) => offloaded,
        };
        let first = self.range.start;
        let mut step = |part: &Range<usize>, here: &[Tensor]| {
            step(&(first + part.start..first + part.end), here)
        };
        if mark(device)?.is_some() {
            self.change_on_gpu(device, offloaded, &mut step)
        } else {
            self.change_on_cpu(offloaded, &mut step)
        }
    }

    fn change_on_cpu(&self, offloaded: &[Offloaded], step: &mut Step) -> Result<()> {
        let places = room_for(offloaded, PART.min(self.range.len()), &Device::Cpu)?;
        offloaded.iter().for_each(|kept| kept.prefetch(0..PARTS_AHEAD * PART));
        for part in parts(self.range.len(), PART) {
            let here = first_of(&places, part.len())?;
            let later = part.start + PARTS_AHEAD * PART;
            for (kept, here) in offloaded.iter().zip(&here) {
                kept.prefetch(later..later + PART);
                kept.read(&part, here)?;
            }
            step(&part, &here)?;
            for (kept, here) in offloaded.iter().zip(&here) {
                kept.write(&part, here)?;
            }
        }
        Ok(())
    }

    fn change_on_gpu(
        &self,
        device: &Device,
        offloaded: &[Offloaded],
        step: &mut Step,
    ) -> Result<()> {
        let now = || {
            let mark = mark(device)?;
            mark.ok_or_else(|| Error::config("internal error: a GPU whose work has no order"))
        };
        let back = |(part, here, done): (Range<usize>, Vec<Tensor>, Mark)| {
            for (kept, here) in offloaded.iter().zip(&here) {
                kept.write(&part, fetch(here, &done)?.tensor())?;
            }
            Ok::<_, Error>(done)
        };
        let lanes =
            (0..LANES).map(|_| room_for(offloaded, PART_ON_GPU.min(self.range.len()), device));
        let lanes = lanes.collect::<Result<Vec<_>>>()?;
        offloaded.iter().for_each(|kept| kept.prefetch(0..LANES * PART_ON_GPU));
        // A lane may be overwritten after its allocation and after the update of its previous part.
        // Waiting for these events only lets copies overlap with later updates.
        let (mut free, mut under_way) = (now()?, VecDeque::new());
        for (part, lane) in parts(self.range.len(), PART_ON_GPU).zip(lanes.iter().cycle()) {
            if under_way.len() == LANES
                && let Some(first) = under_way.pop_front()
            {
                free = back(first)?;
            }
            let here = first_of(lane, part.len())?;
            let later = part.start + LANES * PART_ON_GPU;
            for (kept, here) in offloaded.iter().zip(&here) {
                kept.prefetch(later..later + PART_ON_GPU);
                let staged = room(here, &free)?;
                kept.read(&part, staged.tensor())?;
                put(staged, here, &free)?;
            }
            step(&part, &here)?;
            under_way.push_back((part, here, now()?));
        }
        under_way.into_iter().try_for_each(|part| back(part).map(drop))
    }
}

/// Splits `len` elements into parts of at most `each`.
fn parts(len: usize, each: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(each).map(move |start| start..len.min(start + each))
}

/// A tensor of `len` elements for each of `offloaded`.
fn room_for(offloaded: &[Offloaded], len: usize, device: &Device) -> Result<Vec<Tensor>> {
    let room = |kept: &Offloaded| {
        Ok(kernels::tensor::device::zeros("parts of optimizer state", len, kept.dtype(), device)?)
    };
    offloaded.iter().map(room).collect()
}

fn first_of(places: &[Tensor], len: usize) -> Result<Vec<Tensor>> {
    places.iter().map(|place| Ok(place.narrow(0, 0, len)?)).collect()
}

fn narrowed(tensor: &Tensor, part: &Range<usize>) -> Result<Tensor> {
    Ok(tensor.narrow(0, part.start, part.len())?)
}

impl Offloaded {
    fn dtype(&self) -> DType {
        match self {
            Self::Host(tensor) => tensor.dtype(),
            Self::File(file_backed) => file_backed.dtype(),
        }
    }

    /// Asks the system to read a part that is in a file, without waiting.
    fn prefetch(&self, part: Range<usize>) {
        if let Self::File(file_backed) = self {
            file_backed.prefetch(part);
        }
    }

    /// Copies the elements `part` to `to`, on the host.
    fn read(&self, part: &Range<usize>, to: &Tensor) -> Result<()> {
        match self {
            Self::Host(tensor) => copy_on_host(&narrowed(tensor, part)?, to),
            Self::File(file_backed) => file_backed.narrow(part)?.read(to),
        }
    }

    /// Copies `from`, on the host, to the elements `part`.
    fn write(&self, part: &Range<usize>, from: &Tensor) -> Result<()> {
        match self {
            Self::Host(tensor) => copy_on_host(from, &narrowed(tensor, part)?),
            Self::File(file_backed) => file_backed.narrow(part)?.write(from),
        }
    }
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
        state.change(&Device::Cpu, &mut change).unwrap();
        parts
    }

    #[test]
    fn what_is_in_a_file_changes_part_by_part_as_what_is_in_memory_does_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let ranges = vec![100..100 + 3 * PART + 7, 5..6, 9..9, PART..2 * PART];
        for dtypes in [&[DType::F32][..], &[DType::F32, DType::F32], &[DType::F32, DType::BF16]] {
            let zeros = |offload| {
                BucketState::zeros(ranges.clone(), dtypes, &offload, &Device::Cpu).unwrap()
            };
            let kept = zeros(OptimizerOffload::None);
            let file_backed = zeros(OptimizerOffload::Nvme(folder.path().to_path_buf()));
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
        let zeros = BucketState::zeros(
            vec![0..4, 4..9],
            &[DType::F32],
            &OptimizerOffload::Cpu,
            &Device::Cpu,
        );
        let refused = zeros.map(drop).unwrap_err().to_string();
        assert!(refused.contains("optimizer_cpu_offload moves state from a GPU"), "{refused}");
    }
}
