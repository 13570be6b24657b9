//! Elements of checkpoints: their dtypes, and the way between tensors and bytes.

use std::fmt;
use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::block::{Block, Run, misfit};
use crate::params::ShardRef;
use crate::{Error, Result};

/// Elements moved between a tensor and bytes at a time where they are not in host memory.
const STAGING_ELEMENTS: usize = 1 << 22;

/// The dtype of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Float {
    F32,
    Bf16,
    F16,
    F64,
}

impl Float {
    /// The stored dtype for tensors of `dtype`, if checkpoints can hold them.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::BF16 => Some(Self::Bf16),
            DType::F16 => Some(Self::F16),
            DType::F64 => Some(Self::F64),
            _ => None,
        }
    }

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// The same dtype as safetensors calls it.
    pub(super) fn safetensors(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
            Self::F64 => Dtype::F64,
        }
    }

    fn read(self, bytes: &[u8]) -> f64 {
        // Callers pass exactly one element; anything else would be a bug that NaN makes visible.
        let value = match self {
            Self::F32 => bytes.try_into().map(|b| f64::from(f32::from_le_bytes(b))),
            Self::Bf16 => bytes.try_into().map(|b| bf16::from_le_bytes(b).to_f64()),
            Self::F16 => bytes.try_into().map(|b| f16::from_le_bytes(b).to_f64()),
            Self::F64 => bytes.try_into().map(f64::from_le_bytes),
        };
        value.unwrap_or(f64::NAN)
    }

    fn write(self, value: f64, bytes: &mut [u8]) {
        match self {
            Self::F32 => bytes.copy_from_slice(&(value as f32).to_le_bytes()),
            // Through f32: `half` drops the low bits of an f64 before it looks for ties.
            Self::Bf16 => bytes.copy_from_slice(&bf16::from_f32(value as f32).to_le_bytes()),
            Self::F16 => bytes.copy_from_slice(&f16::from_f32(value as f32).to_le_bytes()),
            Self::F64 => bytes.copy_from_slice(&value.to_le_bytes()),
        }
    }
}

impl fmt::Display for Float {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F64 => "f64",
        })
    }
}

/// Calls `f` with the bytes of the elements `range` of a flat tensor, in order, in as many calls as it takes: one where
/// the tensor is in host memory, bounded parts where it is copied from a device.
pub(super) fn read_bytes(data: &Tensor, range: Range<usize>, mut f: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    const OP: &str = "checkpoint-read";
    if data.device().is_cpu() {
        if range.is_empty() {
            return Ok(());
        }
        let part = data.narrow(0, range.start, range.len())?;
        return kernels::host::with_bytes(&part, OP, |bytes| Ok(f(bytes)))?;
    }
    for start in range.clone().step_by(STAGING_ELEMENTS) {
        let len = STAGING_ELEMENTS.min(range.end - start);
        // A view would drag its whole storage across; its own copy is only as large as it looks.
        let part = data.narrow(0, start, len)?.force_contiguous()?.to_device(&Device::Cpu)?;
        kernels::host::with_bytes(&part, OP, |bytes| Ok(f(bytes)))??;
    }
    Ok(())
}

/// A block of stored elements and a block of wanted ones of the same logical tensor.
pub(super) type Pair = (Block, Block);

/// Copies what the blocks of each of `pairs` share from `stored` (bytes of elements of dtype `from`) into a flat tensor,
/// converting to its dtype.
pub(super) fn write_shared(data: &Tensor, stored: &[u8], from: Float, pairs: &[Pair]) -> Result<()> {
    const OP: &str = "checkpoint-load";
    let to = float_of(data)?;
    let copy_all = |bytes: &mut [u8], first: usize| {
        for_each_run(pairs, |run| copy_run(stored, from, bytes, to, Run { dst: run.dst - first, ..run }));
        Ok(())
    };
    if data.device().is_cpu() {
        return Ok(kernels::host::with_bytes_mut(data, OP, |bytes| copy_all(bytes, 0))?);
    }
    // Elsewhere the elements between the first and the last written one take a detour over host memory.
    let mut hull = Range { start: usize::MAX, end: 0 };
    for_each_run(pairs, |run| hull = hull.start.min(run.dst)..hull.end.max(run.dst + run.len));
    if hull.is_empty() {
        return Ok(());
    }
    let host = data.narrow(0, hull.start, hull.len())?.force_contiguous()?.to_device(&Device::Cpu)?;
    kernels::host::with_bytes_mut(&host, OP, |bytes| copy_all(bytes, hull.start))?;
    Ok(data.slice_set(&host.to_device(data.device())?, 0, hull.start)?)
}

fn for_each_run(pairs: &[Pair], mut f: impl FnMut(Run)) {
    for (stored, wanted) in pairs {
        stored.for_each_run(wanted, &mut f);
    }
}

/// Copies a run of elements between bytes, converting where the dtypes differ.
pub(super) fn copy_run(src: &[u8], from: Float, dst: &mut [u8], to: Float, run: Run) {
    let src = &src[run.src * from.size()..][..run.len * from.size()];
    let dst = &mut dst[run.dst * to.size()..][..run.len * to.size()];
    if from == to {
        dst.copy_from_slice(src);
    } else {
        for (src, dst) in src.chunks_exact(from.size()).zip(dst.chunks_exact_mut(to.size())) {
            to.write(from.read(src), dst);
        }
    }
}

/// The stored dtype of a tensor.
///
/// # Errors
/// If checkpoints do not hold its dtype.
pub(super) fn float_of(data: &Tensor) -> Result<Float> {
    Float::of(data.dtype()).ok_or_else(|| {
        Error::config(format!(
            "checkpoints hold f32, bf16, f16 and f64, not tensors of dtype {}",
            data.dtype().as_str()
        ))
    })
}

/// Checks that a shard's pieces lie in its logical tensor and in its data.
///
/// # Errors
/// Naming the tensor, if they do not, or if its data is not flat and contiguous or of another kind of dtype.
pub(super) fn check_shard(shard: &ShardRef) -> Result<Float> {
    let refuse = |message: String| Error::config(format!("{} ({}): {message}", shard.name, shard.kind));
    let dtype = float_of(&shard.data).map_err(|error| refuse(error.to_string()))?;
    if shard.data.rank() != 1 || !shard.data.is_contiguous() {
        return Err(refuse(format!("a shard's data is flat and contiguous, not of shape {:?}", shard.data.dims())));
    }
    let elements = shard.data.elem_count();
    for piece in &shard.pieces {
        if let Some(why) = misfit(&shard.global_shape, &piece.offset, &piece.shape, &piece.flat) {
            return Err(refuse(why));
        }
        if piece.local.checked_add(piece.flat.len()).is_none_or(|end| end > elements) {
            let (len, local) = (piece.flat.len(), piece.local);
            return Err(refuse(format!("{len} elements from {local} on are not in data of {elements}")));
        }
    }
    Ok(dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(len: usize) -> Block {
        Block { offset: vec![0], shape: vec![len], start: 0 }
    }

    fn converted(values: &[f32], from: Float, to: DType) -> Vec<f64> {
        let mut stored = vec![0; values.len() * from.size()];
        for (value, bytes) in values.iter().zip(stored.chunks_exact_mut(from.size())) {
            from.write(f64::from(*value), bytes);
        }
        let data = Tensor::zeros(values.len(), to, &Device::Cpu).unwrap();
        write_shared(&data, &stored, from, &[(line(values.len()), line(values.len()))]).unwrap();
        data.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
    }

    #[test]
    fn widening_changes_no_value() {
        for from in [Float::Bf16, Float::F16] {
            assert_eq!(converted(&[1.5, -0.25, 0.0], from, DType::F32), [1.5, -0.25, 0.0]);
        }
    }

    #[test]
    fn narrowing_rounds_to_the_nearest_even() {
        // 1 + 2⁻⁸ and 1 + 3·2⁻⁸ lie midway between neighbours of bf16
        let midway = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0];
        assert_eq!(converted(&midway, Float::F32, DType::BF16), [1.0, 1.0 + 4.0 / 256.0]);
        let above = f32::from_bits(midway[0].to_bits() + 1);
        assert_eq!(converted(&[above], Float::F32, DType::BF16), [1.0 + 2.0 / 256.0]);
    }

    #[test]
    fn non_finite_values_survive_conversion() {
        let values = converted(&[f32::NAN, f32::INFINITY], Float::F32, DType::F16);
        assert!(values[0].is_nan() && values[1] == f64::INFINITY);
    }

    #[test]
    fn the_same_dtype_keeps_every_bit() {
        let bits = 0x7fa0_0001u32; // a signalling NaN with a payload
        let data = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
        write_shared(&data, &bits.to_le_bytes(), Float::F32, &[(line(1), line(1))]).unwrap();
        assert_eq!(data.to_vec1::<f32>().unwrap()[0].to_bits(), bits);
    }
}
