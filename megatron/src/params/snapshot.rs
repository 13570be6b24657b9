//! Copies of a rank's elements in host memory. Later training steps do not change them.

use std::ops::Range;

use candle_core::{Device, Tensor};
use kernels::tensor::transfer::{Mark, fetch, mark};

use super::{Elements, LocalPart, ShardRef, on_threads};
use crate::{Error, Result};

/// Bytes that a thread copies at a time.
const BLOCK: usize = 256 << 10;
/// Elements that are copied from a GPU at a time, through page-locked memory.
const PART: usize = if cfg!(any(test, feature = "emulated")) { 1 << 10 } else { 1 << 22 };

/// Copies `shards`. On a GPU it waits until the copies are complete.
///
/// # Errors
/// If there is no memory for the copies, a shard cannot be copied, or a shard is kept in a file.
pub fn snapshot(shards: &[ShardRef]) -> Result<Vec<ShardRef>> {
    shards
        .iter()
        .map(|shard| Ok(ShardRef { data: shard.data.snapshot()?, ..shard.clone() }))
        .collect()
}

impl Elements {
    fn snapshot(&self) -> Result<Self> {
        Ok(match self {
            Self::Tensor(tensor) => Self::Tensor(copy(tensor)?),
            Self::Halves { high, low } => {
                let copied = |part: &LocalPart| match part {
                    LocalPart::Device(tensor) | LocalPart::Host(tensor) => {
                        Ok(LocalPart::Host(copy(tensor)?))
                    }
                    LocalPart::Files(_) => Err(in_files()),
                };
                Self::Halves { high: copied(high)?, low: low.as_ref().map(copied).transpose()? }
            }
            Self::FileBacked(_) => return Err(in_files()),
        })
    }
}

fn in_files() -> Error {
    Error::config("internal error: an in-memory copy of elements that are kept in files")
}

/// Copies a contiguous one-dimensional tensor to the host.
fn copy(tensor: &Tensor) -> Result<Tensor> {
    let copy = kernels::tensor::device::empty(tensor.shape(), tensor.dtype(), &Device::Cpu)?;
    match mark(tensor.device())? {
        None => copy_on_host(tensor, &copy)?,
        Some(mark) => {
            let len = tensor.elem_count();
            (0..len)
                .step_by(PART)
                .try_for_each(|at| copy_from_gpu(tensor, &copy, at..len.min(at + PART), &mark))?;
        }
    }
    Ok(copy)
}

fn copy_from_gpu(tensor: &Tensor, copy: &Tensor, part: Range<usize>, now: &Mark) -> Result<()> {
    let staged = fetch(&tensor.narrow(0, part.start, part.len())?, now)?;
    copy_on_host(staged.tensor(), &copy.narrow(0, part.start, part.len())?)
}

/// Copies between two tensors in host memory, of the same length and dtype, on all threads.
pub(crate) fn copy_on_host(from: &Tensor, to: &Tensor) -> Result<()> {
    const OP: &str = "copy";
    let copied = kernels::tensor::host::with_bytes(from, OP, |from| {
        kernels::tensor::host::with_bytes_mut(to, OP, |to| {
            on_threads(to.chunks_mut(BLOCK).zip(from.chunks(BLOCK)).collect(), |(to, from)| {
                to.copy_from_slice(from);
                Ok(())
            })
        })
    });
    Ok(copied?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{Piece, StateKind};

    #[test]
    fn what_is_trained_on_later_does_not_change_it() {
        let values = |len: usize| Tensor::arange(0f32, len as f32, &Device::Cpu).unwrap();
        let buffer = values(200_000);
        let (high, low) = (
            values(8).to_dtype(candle_core::DType::BF16).unwrap(),
            Tensor::new(&[7i16; 8], &Device::Cpu).unwrap(),
        );
        let shard = |data: Elements| ShardRef {
            name: "w".into(),
            kind: StateKind::Param,
            global_shape: vec![8],
            partition: None,
            pieces: vec![Piece { offset: vec![0], shape: vec![8], flat: 0..8, local: 0 }],
            data,
        };
        let shards = [
            shard(buffer.narrow(0, 100, 150_000).unwrap().into()),
            shard(Elements::Halves { high: high.clone().into(), low: Some(low.clone().into()) }),
        ];
        let before: Vec<_> = shards.iter().map(|shard| shard.data.to_f32().unwrap()).collect();
        let copies = snapshot(&shards).unwrap();
        buffer.slice_set(&buffer.zeros_like().unwrap(), 0, 0).unwrap();
        high.slice_set(&high.zeros_like().unwrap(), 0, 0).unwrap();
        low.slice_set(&low.zeros_like().unwrap(), 0, 0).unwrap();
        let after: Vec<_> = copies.iter().map(|shard| shard.data.to_f32().unwrap()).collect();
        assert!(after == before);
        assert_eq!((before[0][0], after[0].len()), (100.0, 150_000));
        assert_eq!((&copies[0].name, &copies[0].pieces), (&shards[0].name, &shards[0].pieces));
    }
}
