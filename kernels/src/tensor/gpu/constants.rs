//! Small lists of numbers that kernels read: copied to a device once, and found again by their values.
//!
//! Positions, slopes and samples are the same at every step, or at least in every layer of a microbatch.

use std::sync::{Mutex, PoisonError};

use candle_core::{Device, Shape, Tensor};

use crate::Result;

/// Most lists that are kept of each device: those of a step's microbatches. The one that nobody has asked for the longest goes first. Others' devices stay
/// as they are: what is given back there may be in the midst of a graph's recording.
const MOST: usize = 128;

struct Kept {
    values: Vec<u32>,
    /// Flat, on its device.
    tensor: Tensor,
}

/// The last that was asked for is last.
static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// A tensor of `values` on `device`, to be read only.
pub fn get(values: Vec<u32>, shape: Shape, device: &Device) -> Result<Tensor> {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let found = kept.iter().rposition(|k| k.values == values && k.tensor.device().same_device(device));
    let this = match found {
        Some(at) => kept.remove(at),
        None => {
            let tensor = crate::tensor::device::upload(values.clone(), values.len(), device)?;
            Kept { values, tensor }
        }
    };
    #[cfg(feature = "cuda")]
    super::graph::keep(&this.tensor);
    let tensor = this.tensor.reshape(shape)?;
    kept.push(this);
    let mut of_device =
        kept.iter().enumerate().filter(|(_, k)| k.tensor.device().same_device(device)).map(|(at, _)| at);
    if let Some(oldest) = of_device.next().filter(|_| of_device.count() >= MOST) {
        kept.remove(oldest);
    }
    Ok(tensor)
}
