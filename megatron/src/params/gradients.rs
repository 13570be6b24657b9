//! The main gradients of a step, from the first that is added to the last.
//!
//! On a CPU they are not cleared before a step: who adds first writes over what the step before has left, which spares memory the writing
//! and reading of all of them. On a GPU they are cleared, bucket by bucket: a CUDA graph adds to them for every microbatch alike.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::Tensor;
use kernels::device::computes_ahead;
use kernels::embedding::embedding_backward;

use super::{Param, ParamId, ParamStore, Role};
use crate::Result;
use crate::comm::lock;

/// Whether the gradient of a parameter still is that of the step before.
#[derive(Debug, Default)]
pub(super) struct Stale(AtomicBool);

impl Stale {
    /// Whether it was, until now.
    fn end(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
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
            let uses = self.iter().filter(|(_, p)| matches!(p.role, Role::TiedUse(_))).map(|(_, p)| &p.grad);
            for grads in self.buckets().iter().map(|bucket| &bucket.grads).chain(uses) {
                kernels::reduce::zero(grads)?;
            }
            return Ok(());
        }
        for (_, param) in self.iter() {
            param.stale.begin();
            if let Some(sums) = &param.first_use {
                lock(sums).clear()?;
            }
        }
        Ok(())
    }

    /// The parameter's main gradient, in local shape, for a kernel that adds to it; or for who reads what the step has added.
    ///
    /// # Errors
    /// If it cannot be cleared.
    pub fn grad(&self, id: ParamId) -> Result<&Tensor> {
        let param = self.param(id);
        if param.stale.end() {
            kernels::reduce::zero(&param.grad)?;
        }
        Ok(&param.grad)
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
        let param = self.param(id);
        let add = if param.stale.end() { kernels::linear::linear_wgrad_into } else { kernels::linear::linear_wgrad };
        Ok(add(dy, x, &param.grad)?)
    }

    /// Adds the gradient of an embedding, as [`embedding_backward`]; where another layer uses its matrix, too,
    /// [`add_first_use`](Self::add_first_use) is to follow.
    ///
    /// # Errors
    /// As there.
    pub fn add_embedding_grad(&self, id: ParamId, dy: &Tensor, ids: &Tensor, first_row: usize) -> Result<()> {
        match &self.param(id).first_use {
            Some(sums) => lock(sums).add(dy, ids, first_row, &self.param(id).grad),
            None => Ok(embedding_backward(dy, ids, first_row, self.grad(id)?)?),
        }
    }

    /// Adds up the gradients of a weight's two uses on this rank, where it has two.
    ///
    /// # Errors
    /// If a buffer cannot be written.
    pub fn add_first_use(&self, id: ParamId) -> Result<()> {
        if let Some(sums) = &self.param(id).first_use {
            return lock(sums).add_to(self.grad(id)?);
        }
        for (_, other) in self.iter().filter(|(_, p)| p.role == Role::TiedUse(id)) {
            kernels::reduce::add_inplace(self.grad(id)?, &other.grad)?;
        }
        Ok(())
    }

    /// Bytes of gradients outside of buckets.
    pub(super) fn bytes_of_other_uses(&self) -> usize {
        let of = |param: &Param| match (&param.first_use, param.role) {
            (Some(sums), _) => lock(sums).room(),
            (None, Role::TiedUse(primary)) if self.param(primary).first_use.is_none() => param.numel,
            _ => 0,
        };
        self.iter().map(|(_, param)| of(param) * param.grad.dtype().size_in_bytes()).sum()
    }
}
