//! The interface of everything between embedding and head.

use std::any::Any;

use candle_core::Tensor;

use super::context::Ctx;
use super::layout::Stream;
use crate::params::ParamId;
use crate::{Error, Result};

/// What a layer keeps from forward for its backward.
pub struct Saved(Box<dyn Any + Send>);

impl Saved {
    pub fn new<T: Send + 'static>(value: T) -> Self {
        Self(Box::new(value))
    }

    /// The value that `new` was given.
    ///
    /// # Errors
    /// If it is of another type: the engine paired a layer with another layer's activations.
    pub fn take<T: 'static>(self) -> Result<T> {
        match self.0.downcast() {
            Ok(value) => Ok(*value),
            Err(_) => {
                Err(Error::config("internal error: a layer was given another layer's activations"))
            }
        }
    }
}

/// A layer of the residual stream with an explicit backward.
///
/// `backward` consumes what `forward` saved and accumulates parameter gradients into the store's
/// main gradients, or has [`Ctx::weight_grad`] do so later.
pub trait Layer: Send + Sync {
    /// The layer's output and what its backward needs.
    fn forward(&self, x: Stream, ctx: &Ctx) -> Result<(Stream, Saved)>;
    /// What backward needs, bit for bit as `forward` made it, without the output, which nobody
    /// needs a second time.
    fn recompute(&self, x: Stream, ctx: &Ctx) -> Result<Saved>;
    /// The gradient of the layer's input.
    fn backward(&self, dy: Stream, saved: Saved, ctx: &Ctx) -> Result<Stream>;
    /// Room for what the layer remembers of `positions` tokens of `batch` samples while generating.
    fn cache(&self, positions: usize, batch: usize, ctx: &Ctx) -> Result<Tensor>;
    /// The layer's output for the next tokens of each sample: sample i's first one has position
    /// `starts[i]` and sees those before it in the cache. Without sequence parallelism or dropout.
    fn decode(&self, x: Stream, cache: &Tensor, starts: &[usize], ctx: &Ctx) -> Result<Stream>;
    /// Every parameter whose gradient is complete once `backward` returned and what it left to
    /// [`Ctx::later`] is computed.
    fn params(&self) -> Vec<ParamId>;
}
