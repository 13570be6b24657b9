//! Small lists of numbers for kernels: copied to a device once, and found again by their values.
//!
//! Positions, slopes and samples are the same at every step, or at least in every layer of a
//! microbatch.

use candle_core::{Device, Shape, Tensor};

use crate::Result;
use crate::tensor::device::upload;

/// A read-only tensor of `values` on `device`. On a GPU, a later call with the same values returns
/// the same tensor.
///
/// # Errors
/// As [`upload`].
pub fn constant(values: Vec<u32>, shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    #[cfg(gpu)]
    if crate::tensor::gpu::computes(device) {
        return kept::get(values, shape.into(), device);
    }
    upload(values, shape, device)
}

#[cfg(gpu)]
mod kept {
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// Most lists kept per device: those of a step's microbatches. The least recently used list is
    /// dropped first. Lists of other devices stay: their device may be recording a graph, where
    /// memory must not be freed.
    const MOST: usize = 128;

    struct Kept {
        values: Vec<u32>,
        /// Flat, on its device.
        tensor: Tensor,
    }

    /// Ordered from least to most recently used.
    static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

    pub fn get(values: Vec<u32>, shape: Shape, device: &Device) -> Result<Tensor> {
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        let found =
            kept.iter().rposition(|k| k.values == values && k.tensor.device().same_device(device));
        let this = match found {
            Some(at) => kept.remove(at),
            None => {
                let tensor = upload(values.clone(), values.len(), device)?;
                Kept { values, tensor }
            }
        };
        #[cfg(feature = "cuda")]
        crate::tensor::gpu::graph::keep(&this.tensor);
        let tensor = this.tensor.reshape(shape)?;
        kept.push(this);
        let mut of_device = kept
            .iter()
            .enumerate()
            .filter(|(_, k)| k.tensor.device().same_device(device))
            .map(|(at, _)| at);
        if let Some(oldest) = of_device.next().filter(|_| of_device.count() >= MOST) {
            kept.remove(oldest);
        }
        Ok(tensor)
    }
}
