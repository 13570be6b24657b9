//! The copies of [`crate::tensor::transfer`], and the pinned memory that they use.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};

use super::Gpu;
use super::backend::{Event, Locked};
use crate::tensor::host::{with_bytes, with_bytes_mut};
use crate::tensor::view::expect_elements;
use crate::{Error, Result};

/// Smallest block, in bytes.
const LEAST: usize = 64 << 10;

/// Bytes that are pinned at a time for smaller blocks. Every microbatch takes some small blocks,
/// and the host runs up to two steps ahead of the device. Pinning blocks one by one would therefore
/// delay steps long after the first ones.
const AT_ONCE: usize = 4 << 20;

/// Host memory for elements of one dtype.
struct Block {
    /// Keeps the memory pinned; dropped before the memory.
    _locked: Option<Locked>,
    /// Flat.
    elements: Tensor,
    /// Reached when the device has copied the block's contents.
    until: Option<Event>,
}

/// Unused blocks. Apart from [`AT_ONCE`], there are never more blocks than were in use at one time.
static FREE: Mutex<Vec<Block>> = Mutex::new(Vec::new());

impl Block {
    /// A block for `n` elements: the smallest free one that is not much too large, else a new one.
    fn take(gpu: &Gpu, n: usize, dtype: DType) -> Result<Self> {
        let room =
            (n * dtype.size_in_bytes()).next_power_of_two().max(LEAST) / dtype.size_in_bytes();
        {
            let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = |block: &Block| {
                let there = block.elements.elem_count();
                block.elements.dtype() == dtype && there >= n && there <= 4 * room
            };
            let copied = |block: &Block| block.until.as_ref().is_none_or(Event::is_reached);
            let mut fitting: Vec<usize> = (0..free.len()).filter(|&at| fits(&free[at])).collect();
            // Among blocks of one size, the one that has been free the longest comes first: its
            // copy is most likely done, and each query takes time.
            fitting.sort_by_key(|&at| free[at].elements.elem_count());
            if let Some(at) = fitting.into_iter().find(|&at| copied(&free[at])) {
                return Ok(Self { until: None, ..free.remove(at) });
            }
        }
        let size = room * dtype.size_in_bytes();
        let spare =
            (1..AT_ONCE / size).map(|_| Self::new(gpu, room, dtype)).collect::<Result<Vec<_>>>()?;
        FREE.lock().unwrap_or_else(PoisonError::into_inner).extend(spare);
        Self::new(gpu, room, dtype)
    }

    fn new(gpu: &Gpu, n: usize, dtype: DType) -> Result<Self> {
        let (elements, locked) = gpu.lock_memory(n, dtype)?;
        Ok(Self { elements, _locked: locked, until: None })
    }
}

pub struct Mark {
    event: Event,
    device: Device,
}

pub struct Staged {
    block: Option<Block>,
    /// The elements in use, in their tensor's shape.
    view: Tensor,
}

impl Staged {
    pub fn tensor(&self) -> &Tensor {
        &self.view
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        free.extend(self.block.take());
    }
}

pub fn mark(device: &Device) -> Result<Mark> {
    Ok(Mark { event: Gpu::on(device, "mark")?.mark()?, device: device.clone() })
}

/// Room for the elements of `t`.
pub fn room(t: &Tensor) -> Result<Staged> {
    let n = t.elem_count();
    let block = Block::take(&Gpu::of(t, "room")?, n, t.dtype())?;
    let view = block.elements.narrow(0, 0, n)?.reshape(t.shape())?;
    Ok(Staged { block: Some(block), view })
}

/// The GPU of `t`, if the mark is on the same device.
fn gpu_of(t: &Tensor, after: &Mark, op: &'static str) -> Result<Gpu> {
    if t.device().same_device(&after.device) {
        return Gpu::of(t, op);
    }
    Err(Error::Device { op, device: "another device than the mark's".into() })
}

pub fn fetch(t: &Tensor, after: &Mark) -> Result<Staged> {
    const OP: &str = "fetch";
    #[cfg(feature = "cuda")]
    super::graph::refuse(OP)?;
    let gpu = gpu_of(t, after, OP)?;
    let from = gpu.input(t, t.dtype(), OP, "tensor")?;
    let staged = room(t)?;
    with_bytes_mut(&staged.view, OP, |bytes| gpu.fetch(from, bytes, &after.event))?;
    Ok(staged)
}

pub fn put(mut from: Staged, t: &Tensor, after: &Mark) -> Result<()> {
    const OP: &str = "put";
    #[cfg(feature = "cuda")]
    super::graph::refuse(OP)?;
    let gpu = gpu_of(t, after, OP)?;
    expect_elements(OP, "source", &from.view, t.elem_count())?;
    let to = gpu.inplace(t, from.view.dtype(), OP, "destination")?;
    let done = with_bytes(&from.view, OP, |bytes| gpu.put(to, bytes, Some(&after.event)))?;
    if let Some(block) = &mut from.block {
        block.until = Some(done);
    }
    Ok(())
}

/// Copies `bytes` from the host to the device through pinned memory, in the order of the device's
/// stream. `bytes` may change once this returns.
#[cfg(feature = "cuda")]
pub fn upload(gpu: &Gpu, bytes: &[u8], to: super::DevicePointer) -> Result<()> {
    const OP: &str = "upload";
    super::graph::refuse(OP)?;
    let mut block = Block::take(gpu, bytes.len(), DType::U8)?;
    let view = block.elements.narrow(0, 0, bytes.len())?;
    with_bytes_mut(&view, OP, |room| {
        room.copy_from_slice(bytes);
        Ok(())
    })?;
    block.until = Some(with_bytes(&view, OP, |bytes| gpu.put(to, bytes, None))?);
    drop(Staged { block: Some(block), view });
    Ok(())
}
