//! The main gradients of a step, from the first addition to the last.
//!
//! On a CPU the gradients are not cleared before a step. The first addition overwrites the old
//! content, which saves one pass of reads and writes over all of them. A bucket's gradients have
//! memory only from the first addition until the optimizer has used them. Backward frees a layer's
//! activations when it comes to the layer's gradients, so the activations at the start of backward
//! and all gradients never need memory at the same time.
//!
//! On a GPU the gradients keep their memory. Gradients of large weights are overwritten, too; the
//! ranges between them are cleared with one launch each. All gradients are cleared where a CUDA
//! graph does the same additions for every microbatch ([`ParamStore::clear_all_grads`]).

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Tensor};
use kernels::ops::embedding::embedding_backward;
use kernels::tensor::arena::at_the_end;
use kernels::tensor::device::{computes_ahead, empty, zeros};

use super::{Bucket, LocalShard, Param, ParamId, ParamStore, Placement, Role};
use crate::comm::lock;
use crate::{Error, Result};

/// The main gradients of a bucket, and their memory while it is allocated.
#[derive(Debug)]
pub struct GradientBuffer {
    len: usize,
    dtype: DType,
    device: Device,
    /// Ranges between parameters. Their elements are always 0.
    gaps: Vec<Range<usize>>,
    memory: Mutex<Option<Tensor>>,
}

impl GradientBuffer {
    /// Gradients of `len` elements. `held` are the ranges of the parameters, in order.
    ///
    /// # Errors
    /// If a GPU cannot hold them.
    pub(super) fn new(
        len: usize,
        held: impl Iterator<Item = Range<usize>>,
        dtype: DType,
        device: &Device,
        keeps: bool,
    ) -> Result<Self> {
        let mut gaps = Vec::new();
        let mut end = 0;
        for next in held.chain(std::iter::once(len..len)) {
            if next.start > end {
                gaps.push(end..next.start);
            }
            end = next.end;
        }
        let there = keeps.then(|| zeros("main gradients", len, dtype, device)).transpose()?;
        Ok(Self { len, dtype, device: device.clone(), gaps, memory: Mutex::new(there) })
    }

    /// All gradients of the bucket, `[len]`. Allocates them if they have no memory. The gradient of
    /// a parameter that was neither added to nor cleared holds arbitrary values.
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

    /// The gradients in `range`, which lies within the bucket; see [`GradientBuffer::all`].
    ///
    /// # Errors
    /// As [`GradientBuffer::all`].
    pub fn narrow(&self, range: &Range<usize>) -> Result<Tensor> {
        Ok(self.all()?.narrow(0, range.start, range.len())?)
    }

    /// Dtype of the sums: fp32, or f64 for f64 models.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device of the gradients, which is that of the weights.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether they have memory now.
    pub fn is_there(&self) -> bool {
        lock(&self.memory).is_some()
    }
}

/// Where gradients are sharded (ZeRO-2 and 3), this rank's shard of the sums over ranks. On the
/// device it has memory from a step's first sum until the optimizer has used it.
#[derive(Debug)]
pub struct GradientShard {
    /// Elements of the bucket.
    range: Range<usize>,
    /// Where the sums are kept, if that is not the device.
    home: Option<LocalShard>,
    device: Device,
    sums: Mutex<Sums>,
}

#[derive(Debug, Default)]
enum Sums {
    #[default]
    None,
    Here(Tensor),
    AtHome,
}

/// Elements that are added at a time to sums that are kept elsewhere.
const PART: usize = if cfg!(test) { 1 << 10 } else { 1 << 21 };

impl GradientShard {
    /// Sums that stay on `device`.
    pub(super) fn on(device: &Device, range: Range<usize>) -> Self {
        Self { range, home: None, device: device.clone(), sums: Mutex::default() }
    }

    /// Sums that are made on `device` and kept in `home`.
    pub(super) fn at(home: LocalShard, device: &Device) -> Self {
        Self { home: Some(home.clone()), ..Self::on(device, home.range) }
    }

    /// The elements of the bucket in this shard.
    pub fn range(&self) -> &Range<usize> {
        &self.range
    }

    /// Adds `sums`, `[range.len()]` in the dtype of main gradients. The first ones of a step are
    /// taken over as they are.
    ///
    /// # Errors
    /// If they cannot be added.
    pub fn add(&self, sums: Tensor) -> Result<()> {
        let mut there = lock(&self.sums);
        match (&*there, &self.home) {
            (Sums::Here(there), _) => kernels::ops::reduce::add_inplace(there, &sums)?,
            (_, None) => *there = Sums::Here(sums),
            (Sums::AtHome, Some(home)) => {
                for start in self.range.clone().step_by(PART) {
                    let part = start..self.range.end.min(start + PART);
                    let so_far = home.lend(&part, &self.device)?;
                    let more = sums.narrow(0, part.start - self.range.start, part.len())?;
                    kernels::ops::reduce::add_inplace(&so_far, &more)?;
                    home.give_back(&part, &so_far)?;
                }
            }
            (Sums::None, Some(home)) => {
                home.give_back(&self.range, &sums)?;
                *there = Sums::AtHome;
            }
        }
        Ok(())
    }

    /// The sums so far, if there are any in this step.
    pub fn sums(&self) -> Option<LocalShard> {
        match &*lock(&self.sums) {
            Sums::None => None,
            Sums::Here(sums) => {
                Some(LocalShard { range: self.range.clone(), values: sums.clone().into() })
            }
            Sums::AtHome => self.home.clone(),
        }
    }

    /// Puts `sums` of the shard in place of those so far.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn set(&self, sums: &Tensor) -> Result<()> {
        self.home.as_ref().map_or(Ok(()), |home| home.give_back(&self.range, sums))
    }
}

impl Bucket {
    /// The final gradients that this rank has.
    ///
    /// # Errors
    /// If no gradient was reduced.
    pub fn reduced_shard(&self) -> Result<LocalShard> {
        match &self.reduced {
            None => Ok(LocalShard { range: 0..self.len, values: self.grads.all()?.into() }),
            Some(shard) => shard
                .sums()
                .ok_or_else(|| Error::config("internal error: a step without reduced gradients")),
        }
    }

    /// The final gradients of the elements `part` on the device: a view if they are kept there.
    ///
    /// # Errors
    /// As [`reduced_shard`](Self::reduced_shard), or if this rank does not have them.
    pub fn reduced(&self, part: &Range<usize>) -> Result<Tensor> {
        self.reduced_shard()?.lend(part, self.grads.device())
    }
}

/// On a GPU, gradients of at least this many elements are not cleared before a step. Clearing one
/// alone takes a launch; neighbouring small gradients share one.
const LARGE: usize = 1 << 18;

/// True while a gradient's memory holds nothing of this step yet.
#[derive(Debug)]
pub(super) struct Stale(AtomicBool);

impl Stale {
    /// The state of a gradient that nothing was added to.
    pub fn new() -> Self {
        Self(AtomicBool::new(true))
    }

    /// Ends the stale state. Returns whether the gradient was stale.
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
    /// Begins a step: the present content of the gradients becomes invalid.
    ///
    /// # Errors
    /// If a buffer cannot be written.
    pub fn begin_grads(&self) -> Result<()> {
        if self.keeps_memory() {
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

    /// Clears all gradients that the first addition does not overwrite.
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

    /// Whether whole gradients keep their memory from step to step, as a GPU's do unless they are
    /// sharded.
    fn keeps_memory(&self) -> bool {
        let sharded = self.options().placements.gradients == Placement::Sharded;
        computes_ahead(&self.options().device) && !sharded
    }

    /// Ends a step after the last use of its gradients, and frees their memory unless it is kept.
    pub fn release_grads(&self) {
        for bucket in self.buckets() {
            if let Some(shard) = &bucket.reduced {
                *lock(&shard.sums) = Sums::None;
            }
        }
        if !self.keeps_memory() {
            self.buckets().iter().for_each(|bucket| self.release_grads_of(bucket));
        }
    }

    /// Frees the whole gradients of a bucket: what is added from here on is a sum of its own.
    pub fn release_grads_of(&self, bucket: &Bucket) {
        *lock(&bucket.grads.memory) = None;
        bucket.params.iter().for_each(|id| self.param(*id).stale.begin());
    }

    /// The parameter's main gradient, in local shape, for kernels that add to it and for readers of
    /// the sum so far. Clears it if the step has added nothing yet.
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

    /// As [`ParamStore::grad`], but without clearing, for kernels that overwrite a stale gradient.
    fn place_of_grad(&self, id: ParamId) -> Result<Tensor> {
        let param = self.param(id);
        match &param.second_use {
            Some(grad) => Ok(grad.clone()),
            None => Ok(self.buckets()[param.bucket]
                .grads
                .narrow(&param.range())?
                .reshape(param.shape.as_slice())?),
        }
    }

    /// Clears those of the gradients to which the step has added nothing.
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

    /// Adds the gradient of an embedding, as [`embedding_backward`]. If another layer of this rank
    /// uses the same matrix, call [`add_first_use`](Self::add_first_use) afterwards.
    ///
    /// # Errors
    /// As [`embedding_backward`].
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

    /// Adds the gradients of a weight's two uses on this rank. Does nothing for a weight with one
    /// use.
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

    /// Bytes of gradients outside buckets.
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

    /// Uses memory that held other values before, as memory freed by activations does.
    #[test]
    fn what_lies_between_parameters_is_zero_in_any_memory() {
        let (held, len) = ([0..100, 128..200, 256..(1 << 16)], (1 << 16) + 64);
        let buffer =
            GradientBuffer::new(len, held.clone().into_iter(), DType::F32, &Device::Cpu, false)
                .unwrap();
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
