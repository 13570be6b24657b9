//! Elements of checkpoints: their dtypes, and conversion between tensors and bytes.

use std::fmt;
use std::ops::Range;

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use kernels::ops::remainders::{join_value, split_value};
use kernels::tensor::host::{with_slice, with_slice_mut};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::block::{Block, Run, misfit};
use crate::params::{Elements, LocalPart, ShardRef};
use crate::{Error, Result};

/// Elements to move at a time between bytes and a tensor that is not in host memory.
const STAGING_ELEMENTS: usize = 1 << 22;
/// Values to join from their halves at a time.
const JOINED_ELEMENTS: usize = 1 << 14;

/// The dtype of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Float {
    /// IEEE single precision.
    F32,
    /// bfloat16: the high half of an fp32 value.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE double precision.
    F64,
}

/// The largest element by the order of `of`.
fn magnitude<const N: usize, T: Ord + Default>(bytes: &[u8], of: impl Fn([u8; N]) -> T) -> T {
    bytes.as_chunks().0.iter().map(|element| of(*element)).max().unwrap_or_default()
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

    /// The kind of non-finite element in `bytes` (little-endian): "NaN" or "infinity", if there is
    /// any.
    pub fn non_number(self, bytes: &[u8]) -> Option<&'static str> {
        // The largest magnitude; magnitudes have the same order as their bits.
        let (largest, infinity) = match self {
            Self::F16 => (magnitude(bytes, |b| u16::from_le_bytes(b) & 0x7fff).into(), 0x7c00),
            Self::Bf16 => (magnitude(bytes, |b| u16::from_le_bytes(b) & 0x7fff).into(), 0x7f80),
            Self::F32 => {
                (magnitude(bytes, |b| u32::from_le_bytes(b) & (u32::MAX >> 1)).into(), 0x7f80_0000)
            }
            Self::F64 => {
                (magnitude(bytes, |b| u64::from_le_bytes(b) & (u64::MAX >> 1)), 0x7ff << 52)
            }
        };
        match largest {
            _ if largest < infinity => None,
            _ if largest == infinity => Some("infinity"),
            _ => Some("NaN"),
        }
    }

    /// The same dtype in safetensors.
    pub(super) fn safetensors(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
            Self::F64 => Dtype::F64,
        }
    }

    fn read(self, bytes: &[u8]) -> f64 {
        // Callers pass exactly one element; anything else is a bug, which NaN makes visible.
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

/// Calls `f` with the bytes of the elements `range` of a shard, in order: one call for a tensor in
/// host memory, several bounded parts if elements are copied from a device or a file, or joined
/// from halves.
///
/// # Errors
/// If they cannot be read, or what `f` returns.
pub(super) fn read_bytes(
    data: &Elements,
    range: Range<usize>,
    mut f: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    const OP: &str = "checkpoint-read";
    let whole = range.len().max(1);
    let step = match data {
        Elements::Tensor(tensor) if tensor.device().is_cpu() => whole,
        Elements::Halves { high: LocalPart::Device(tensor), low: Some(LocalPart::Device(_)) }
            if tensor.device().is_cpu() =>
        {
            whole
        }
        _ => STAGING_ELEMENTS,
    };
    for start in range.clone().step_by(step) {
        let part = start..range.end.min(start + step);
        match data {
            Elements::Tensor(data) => {
                kernels::tensor::host::with_bytes(&on_host(data, &part)?, OP, |bytes| {
                    Ok(f(bytes))
                })??;
            }
            Elements::Halves { high, low: Some(low) } => {
                let (high, low) = (high.on_host(&part)?, low.on_host(&part)?);
                with_slice::<bf16, _>(&high, OP, |high| {
                    with_slice(&low, OP, |low| Ok(read_joined(high, low, &mut f)))
                })??;
            }
            Elements::Halves { low: None, .. } => {
                return Err(Error::config(
                    "internal error: only half of a tensor's values would be saved",
                ));
            }
            Elements::FileBacked(file_backed) => f(&file_backed.read_bytes(&part)?)?,
        }
    }
    Ok(())
}

/// The elements `part` of a tensor in host memory, without a copy if it is already there.
fn on_host(data: &Tensor, part: &Range<usize>) -> Result<Tensor> {
    LocalPart::from(data.clone()).on_host(part)
}

/// Calls `f` with the bytes of values joined from halves, in bounded parts.
fn read_joined(high: &[bf16], low: &[i16], f: &mut impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let mut bytes = Vec::new();
    for (high, low) in high.chunks(JOINED_ELEMENTS).zip(low.chunks(JOINED_ELEMENTS)) {
        bytes.clear();
        bytes.extend(
            high.iter().zip(low).flat_map(|(high, low)| join_value(*high, *low).to_le_bytes()),
        );
        f(&bytes)?;
    }
    Ok(())
}

/// A block of stored elements and a block of requested ones of the same logical tensor.
pub(super) type Pair = (Block, Block);

/// Copies the shared elements of each of `pairs` from `stored` (bytes of elements of dtype `from`)
/// into a shard's elements, with conversion.
///
/// # Errors
/// If they cannot be written.
pub(super) fn write_shared(
    data: &Elements,
    stored: &[u8],
    from: Float,
    pairs: &[Pair],
) -> Result<()> {
    const OP: &str = "checkpoint-load";
    // The elements between the first and the last written one.
    let mut hull = Range { start: usize::MAX, end: 0 };
    for_each_run(pairs, 0, |run| hull = hull.start.min(run.dst)..hull.end.max(run.dst + run.len));
    if hull.is_empty() {
        return Ok(());
    }
    match data {
        Elements::Tensor(data) => {
            let (to, host) = (float_of(data.dtype())?, on_host(data, &hull)?);
            kernels::tensor::host::with_bytes_mut(&host, OP, |bytes| {
                for_each_run(pairs, hull.start, |run| copy_run(stored, from, bytes, to, run));
                Ok(())
            })?;
            LocalPart::from(data.clone()).put_back(&host, hull.start)
        }
        Elements::Halves { high, low } => {
            let split = |high: &mut [bf16], mut low: Option<&mut [i16]>| {
                for_each_run(pairs, hull.start, |run| {
                    let to = run.dst..run.dst + run.len;
                    let low = low.as_deref_mut().map(|low| &mut low[to.clone()]);
                    split_run(
                        &stored[run.src * from.size()..][..run.len * from.size()],
                        from,
                        &mut high[to],
                        low,
                    );
                });
                Ok(())
            };
            let (high_host, low_host) =
                (high.on_host(&hull)?, low.as_ref().map(|low| low.on_host(&hull)).transpose()?);
            with_slice_mut::<bf16, _>(&high_host, OP, |high| match &low_host {
                Some(low) => with_slice_mut::<i16, _>(low, OP, |low| split(high, Some(low))),
                None => split(high, None),
            })?;
            high.put_back(&high_host, hull.start)?;
            let lows = low.as_ref().zip(low_host.as_ref());
            lows.map_or(Ok(()), |(low, host)| low.put_back(host, hull.start))
        }
        Elements::FileBacked(file_backed) => {
            let (to, mut done) = (float_of(file_backed.dtype())?, Ok(()));
            let mut bytes = Vec::new();
            for_each_run(pairs, 0, |run| {
                bytes.resize(run.len * to.size(), 0);
                copy_run(stored, from, &mut bytes, to, Run { dst: 0, ..run });
                if done.is_ok() {
                    done = file_backed.write_bytes(run.dst, &bytes);
                }
            });
            done
        }
    }
}

/// Splits stored values into halves.
fn split_run(stored: &[u8], from: Float, high: &mut [bf16], low: Option<&mut [i16]>) {
    let values = stored.chunks_exact(from.size()).map(|bytes| match from {
        // The common case, bit for bit and fast: checkpoints hold fp32 masters.
        Float::F32 => f32::from_le_bytes(bytes.try_into().unwrap_or_default()),
        _ => from.read(bytes) as f32,
    });
    let mut halves = values.map(split_value);
    match low {
        Some(low) => high
            .iter_mut()
            .zip(low)
            .zip(halves)
            .for_each(|((high, low), halves)| (*high, *low) = halves),
        None => high.iter_mut().zip(&mut halves).for_each(|(high, halves)| *high = halves.0),
    }
}

/// Calls `f` with every shared run of each of `pairs`; destinations count from element `first`.
fn for_each_run(pairs: &[Pair], first: usize, mut f: impl FnMut(Run)) {
    for (stored, wanted) in pairs {
        stored.for_each_run(wanted, |run| f(Run { dst: run.dst - first, ..run }));
    }
}

/// Copies a run of elements between bytes, with conversion if the dtypes differ.
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

/// The stored dtype of tensors of `dtype`.
///
/// # Errors
/// If checkpoints do not support it.
fn float_of(dtype: DType) -> Result<Float> {
    Float::of(dtype).ok_or_else(|| {
        Error::config(format!(
            "checkpoints hold f32, bf16, f16 and f64, not tensors of dtype {}",
            dtype.as_str()
        ))
    })
}

/// Checks that a shard's pieces are within its logical tensor and its data; returns the dtype that
/// the data are stored in.
///
/// # Errors
/// If they are not, or if the data are not flat and contiguous, or have an unsupported dtype. The
/// error names the tensor.
pub(super) fn check_shard(shard: &ShardRef) -> Result<Float> {
    let refuse =
        |message: String| Error::config(format!("{} ({}): {message}", shard.name, shard.kind));
    let stored = |dtype| float_of(dtype).map_err(|error| refuse(error.to_string()));
    let (dtype, elements, tensors) = match &shard.data {
        Elements::Tensor(tensor) => {
            (stored(tensor.dtype())?, tensor.elem_count(), [Some(tensor), None])
        }
        Elements::Halves { high, low } => {
            let dtypes = (high.dtype(), low.as_ref().map_or(DType::I16, LocalPart::dtype));
            if dtypes != (DType::BF16, DType::I16) {
                return Err(refuse(format!("halves of values are bf16 and i16, not {dtypes:?}")));
            }
            let elements = low.as_ref().map_or(usize::MAX, LocalPart::len).min(high.len());
            let tensors = [high.in_memory(), low.as_ref().and_then(LocalPart::in_memory)];
            (Float::F32, elements, tensors)
        }
        Elements::FileBacked(file_backed) => {
            (stored(file_backed.dtype())?, file_backed.len(), [None, None])
        }
    };
    for tensor in tensors.into_iter().flatten() {
        if tensor.rank() != 1 || !tensor.is_contiguous() {
            return Err(refuse(format!(
                "a shard's data is flat and contiguous, not of shape {:?}",
                tensor.dims()
            )));
        }
    }
    for piece in &shard.pieces {
        if let Some(why) = misfit(&shard.global_shape, &piece.offset, &piece.shape, &piece.flat) {
            return Err(refuse(why));
        }
        if piece.local.checked_add(piece.flat.len()).is_none_or(|end| end > elements) {
            let (len, local) = (piece.flat.len(), piece.local);
            return Err(refuse(format!(
                "{len} elements from {local} on are not in data of {elements}"
            )));
        }
    }
    Ok(dtype)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

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
        write_shared(
            &data.clone().into(),
            &stored,
            from,
            &[(line(values.len()), line(values.len()))],
        )
        .unwrap();
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
        // 1 + 2⁻⁸ and 1 + 3·2⁻⁸ are midway between neighbouring bf16 values
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
        write_shared(&data.clone().into(), &bits.to_le_bytes(), Float::F32, &[(line(1), line(1))])
            .unwrap();
        assert_eq!(data.to_vec1::<f32>().unwrap()[0].to_bits(), bits);
    }
}
