//! The main gradients of a step, from the first that is added to the last.
//!
//! On a CPU they are not cleared before a step: who adds first writes over what the memory has
//! held, which spares memory the writing and reading of all of them. A bucket's have memory from
//! then on until the optimizer has used them: backward drops a layer's activations as it comes to
//! the layer's gradients, so what a step begins with they never have at once. On a GPU gradients
//! stay where they are; those of large weights are written over, too, and what lies between them is
//! cleared at once. All are cleared where a CUDA graph adds to them for every microbatch alike
//! ([`ParamStore::clear_all_grads`]).

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Tensor};
use kernels::ops::embedding::embedding_backward;
use kernels::tensor::arena::at_the_end;
use kernels::tensor::device::{computes_ahead, empty, zeros};

use super::{Param, ParamId, ParamStore, Role};
use crate::Result;
use crate::comm::lock;

/// The main gradients of a bucket, and their memory, as long as they have it.
#[derive(Debug)]
pub struct GradientBuffer {
    len: usize,
    dtype: DType,
    device: Device,
    /// Elements between parameters, which are always 0.
    gaps: Vec<Range<usize>>,
    memory: Mutex<Option<Tensor>>,
}

impl GradientBuffer {
    /// Of `len` elements, of which parameters take those `held`, in order.
    ///
    /// # Errors
    /// If a GPU cannot hold them.
    pub(super) fn new(
        len: usize,
        held: impl Iterator<Item = Range<usize>>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let mut gaps = Vec::new();
        let mut end = 0;
        for next in held.chain(std::iter::once(len..len)) {
            if next.start > end {
                gaps.push(end..next.start);
            }
            end = next.end;
        }
        let there = computes_ahead(device)
            .then(|| zeros("main gradients", len, dtype, device))
            .transpose()?;
        Ok(Self { len, dtype, device: device.clone(), gaps, memory: Mutex::new(there) })
    }

    /// All of them, `[len]`. A parameter's that nothing was added to, and that was not cleared, is
    /// whatever the memory held.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn all(&self) -> Result<Tensor> {
        let mut memory = lock(&self.memory);
        if let Some(grads) = &*memory {
            return Ok(grads.clone());
        }
        let grads = at_the_end(|| empty(self.len, self.dtype, &self.device))?;
        for gap in &self.gaps {
            kernels::ops::reduce::zero(&grads.narrow(0, gap.start, gap.len())?)?;
        }
        Ok(memory.insert(grads).clone())
    }

    /// Those in `range`, which begins and ends within the bucket; as [`GradientBuffer::all`].
    ///
    /// # Errors
    /// As there.
    pub fn narrow(&self, range: &Range<usize>) -> Result<Tensor> {
        Ok(self.all()?.narrow(0, range.start, range.len())?)
    }

    /// Of the sums: fp32, or f64 of f64 models.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the weights are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes, when they have memory.
    pub(super) fn bytes(&self) -> usize {
        self.len * self.dtype.size_in_bytes()
    }
}

/// Elements from which on a GPU's gradient is not cleared before a step: clearing one takes a
/// launch, which small ones share.
const LARGE: usize = 1 << 18;

/// Whether what is in the place of a parameter's gradient is none of this step's.
#[derive(Debug)]
pub(super) struct Stale(AtomicBool);

impl Stale {
    /// Of a gradient that has not been added to.
    pub fn new() -> Self {
        Self(AtomicBool::new(true))
    }

    /// Whether it was, until now.
    fn end(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }

    fn is(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl ParamStore {
    /// Begins a step: what gradients hold no longer counts.
    ///
    /// # Errors
    /// If a buffer cannot be written.
    pub fn begin_grads(&self) -> Result<()> {
        if computes_ahead(&self.options().device) {
            return self.begin_grads_on_gpu();
        }
        for (_, param) in self.iter() {
            param.stale.begin();
            if let Some(sums) = &param.first_use {
                lock(sums).clear()?;
            }
        }
        Ok(())
    }

    /// What is not written over is cleared.
    fn begin_grads_on_gpu(&self) -> Result<()> {
        for (_, param) in self.iter() {
            let written_over = !self.clears_all_grads() && param.numel >= LARGE;
            if written_over {
                param.stale.begin()
            } else {
                _ = param.stale.end()
            }
            if let Some(grad) = param.second_use.as_ref().filter(|_| !written_over) {
                kernels::ops::reduce::zero(grad)?;
            }
        }
        for bucket in self.buckets() {
            let large =
                bucket.params.iter().map(|id| self.param(*id)).filter(|param| param.stale.is());
            let mut end = 0;
            for next in large.map(Param::range).chain(std::iter::once(bucket.len..bucket.len)) {
                if next.start > end {
                    kernels::ops::reduce::zero(&bucket.grads.narrow(&(end..next.start))?)?;
                }
                end = next.end;
            }
        }
        Ok(())
    }

    /// Ends a step, whose gradients nobody needs any more: on a CPU their memory serves the next
    /// step's activations.
    pub fn release_grads(&self) {
        if !computes_ahead(&self.options().device) {
            self.buckets().iter().for_each(|bucket| *lock(&bucket.grads.memory) = None);
            self.iter().for_each(|(_, param)| param.stale.begin());
        }
    }

    /// The parameter's main gradient, in local shape, for a kernel that adds to it; or for who
    /// reads what the step has added.
    ///
    /// # Errors
    /// If it has no memory, or cannot be cleared.
    pub fn grad(&self, id: ParamId) -> Result<Tensor> {
        let grad = self.place_of_grad(id)?;
        if self.param(id).stale.end() {
            kernels::ops::reduce::zero(&grad)?;
        }
        Ok(grad)
    }

    /// As [`ParamStore::grad`], for who writes over what a stale one holds.
    fn place_of_grad(&self, id: ParamId) -> Result<Tensor> {
        let param = self.param(id);
        match &param.second_use {
            Some(grad) => Ok(grad.clone()),
            None => Ok(self.buckets()[param.bucket]
                .grads
                .narrow(&param.range())?
                .reshape(param.weight.shape())?),
        }
    }

    /// Clears the gradients of those parameters to which the step has added nothing.
    ///
    /// # Errors
    /// If one cannot be cleared.
    pub fn clear_stale(&self, ids: &[ParamId]) -> Result<()> {
        ids.iter().try_for_each(|id| self.grad(*id).map(drop))
    }

    /// Adds the product `dyᵀ·x` to a weight's main gradient.
    ///
    /// # Errors
    /// If a kernel fails.
    pub fn add_weight_grad(&self, id: ParamId, dy: &Tensor, x: &Tensor) -> Result<()> {
        let grad = self.place_of_grad(id)?;
        let is_first = self.param(id).stale.end();
        let add = if is_first {
            kernels::ops::linear::linear_wgrad_into
        } else {
            kernels::ops::linear::linear_wgrad
        };
        Ok(add(dy, x, &grad)?)
    }

    /// Adds the gradient of an embedding, as [`embedding_backward`]; where another layer uses its
    /// matrix, too, [`add_first_use`](Self::add_first_use) is to follow.
    ///
    /// # Errors
    /// As there.
    pub fn add_embedding_grad(
        &self,
        id: ParamId,
        dy: &Tensor,
        ids: &Tensor,
        first_row: usize,
    ) -> Result<()> {
        match &self.param(id).first_use {
            Some(sums) => lock(sums).add(dy, ids, first_row, &self.place_of_grad(id)?),
            None => Ok(embedding_backward(dy, ids, first_row, &self.grad(id)?)?),
        }
    }

    /// Adds up the gradients of a weight's two uses on this rank, where it has two.
    ///
    /// # Errors
    /// If a buffer cannot be written.
    pub fn add_first_use(&self, id: ParamId) -> Result<()> {
        if let Some(sums) = &self.param(id).first_use {
            return lock(sums).add_to(&self.grad(id)?);
        }
        for (other, _) in self.iter().filter(|(_, p)| p.role == Role::TiedUse(id)) {
            kernels::ops::reduce::add_inplace(&self.grad(id)?, &self.grad(other)?)?;
        }
        Ok(())
    }

    /// Bytes of gradients outside of buckets.
    pub(super) fn bytes_of_other_uses(&self) -> usize {
        let of = |(_, param): (ParamId, &Param)| {
            let first = param.first_use.as_ref().map_or(0, |sums| lock(sums).room());
            let second = param.second_use.as_ref().map_or(0, Tensor::elem_count);
            (first + second) * self.buckets()[param.bucket].grads.dtype().size_in_bytes()
        };
        self.iter().map(of).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that held something else, as that of activations has.
    #[test]
    fn what_lies_between_parameters_is_zero_in_any_memory() {
        let (held, len) = ([0..100, 128..200, 256..(1 << 16)], (1 << 16) + 64);
        let buffer =
            GradientBuffer::new(len, held.clone().into_iter(), DType::F32, &Device::Cpu).unwrap();
        for _ in 0..3 {
            drop(Tensor::full(f32::NAN, len, &Device::Cpu).unwrap());
            let all = buffer.all().unwrap();
            assert!(
                kernels::tensor::device::same_elements(&all, &buffer.all().unwrap()),
                "one memory until it is released"
            );
            let mut values = all.to_vec1::<f32>().unwrap();
            held.iter().for_each(|range| values[range.clone()].fill(0.0));
            assert_eq!(values, vec![0.0; len]);
            *lock(&buffer.memory) = None;
        }
    }
}
