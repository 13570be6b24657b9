//! What a stage is made of: an input, layers of the residual stream, an output.

use std::any::Any;

use candle_core::Tensor;

use super::context::Ctx;
use super::layout::Stream;
use crate::params::ParamId;
use crate::{Error, Result};

/// What a layer keeps from forward for its backward.
pub struct Saved(Box<dyn Any + Send>);

impl Saved {
    /// Keeps `value` until backward takes it.
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
///
/// Below, a feed-forward network with a backward of its own, cut over tp as Megatron-LM's.
/// [`AutogradLayer`](super::AutogradLayer) leaves backward to candle instead;
/// `examples/custom_layer.rs` puts one behind each layer of a GPT.
///
/// ```
/// use megatron::Result;
/// use megatron::params::{ParamId, ParamsBuilder};
/// use megatron::tensor_parallel::layout::{FeatureSharded, Stream};
/// use megatron::tensor_parallel::{
///     ColumnParallelLinear, Ctx, Layer, LinearSpec, RowParallelLinear, Saved,
/// };
///
/// /// `x + down(up(x)²)`
/// struct Squares {
///     up: ColumnParallelLinear,
///     down: RowParallelLinear,
/// }
///
/// impl Squares {
///     fn declare(name: &str, sequence_parallel: bool, params: &mut ParamsBuilder) -> Self {
///         let up = LinearSpec::new(format!("{name}.up"), 32, 48);
///         let down = LinearSpec::new(format!("{name}.down"), 48, 32);
///         Self {
///             up: ColumnParallelLinear::declare(&up, 1, params),
///             down: RowParallelLinear::declare(&down, sequence_parallel, params),
///         }
///     }
/// }
///
/// impl Layer for Squares {
///     fn forward(&self, x: Stream, ctx: &Ctx) -> Result<(Stream, Saved)> {
///         let h = self.up.forward(&ctx.tp.enter(&x)?, ctx)?;
///         let squares = FeatureSharded(h.0.sqr()?);
///         let y = Stream((&x.0 + self.down.project(&squares, ctx)?.0)?);
///         Ok((y, Saved::new((x, h, squares))))
///     }
///
///     fn backward(&self, dy: Stream, saved: Saved, ctx: &Ctx) -> Result<Stream> {
///         let (x, h, squares): (Stream, FeatureSharded, FeatureSharded) = saved.take()?;
///         let d_squares = self.down.project_backward(&dy, &squares, ctx)?;
///         let dh = FeatureSharded((2.0 * (d_squares.0 * h.0)?)?);
///         Ok(Stream((dy.0 + self.up.backward(&dh, &x, ctx)?.0)?))
///     }
///
///     fn params(&self) -> Vec<ParamId> {
///         self.up.params().chain(self.down.params()).collect()
///     }
/// }
///
/// let layer = Squares::declare("squares", false, &mut ParamsBuilder::default());
/// assert_eq!(layer.params().len(), 4, "two weights, two biases");
/// ```
pub trait Layer: Send + Sync {
    /// The layer's output and what its backward needs.
    fn forward(&self, x: Stream, ctx: &Ctx) -> Result<(Stream, Saved)>;
    /// What backward needs, bit for bit as `forward` made it, without the output, which nobody
    /// needs a second time. By default the whole forward.
    fn recompute(&self, x: Stream, ctx: &Ctx) -> Result<Saved> {
        Ok(self.forward(x, ctx)?.1)
    }
    /// The gradient of the layer's input.
    fn backward(&self, dy: Stream, saved: Saved, ctx: &Ctx) -> Result<Stream>;
    /// Room for what the layer remembers of `positions` tokens of `batch` samples while generating.
    ///
    /// # Errors
    /// By default: a layer that does not say how cannot generate.
    fn cache(&self, _positions: usize, _batch: usize, _ctx: &Ctx) -> Result<Tensor> {
        Err(no_generation("layers"))
    }
    /// The layer's output for the next tokens of each sample: sample i's first one has position
    /// `starts[i]` and sees those before it in the cache. Without sequence parallelism or dropout.
    ///
    /// # Errors
    /// By default, as [`cache`](Self::cache).
    fn decode(&self, _x: Stream, _cache: &Tensor, _starts: &[usize], _ctx: &Ctx) -> Result<Stream> {
        Err(no_generation("layers"))
    }
    /// Every parameter whose gradient is complete once `backward` returned and what it left to
    /// [`Ctx::later`] is computed.
    fn params(&self) -> Vec<ParamId>;
}

/// What makes the residual stream of a microbatch, on the first virtual stage: the embedding of a
/// language model, the first projection of features.
pub trait Input: Send + Sync {
    /// The stream, and what backward needs.
    fn forward(&self, ctx: &Ctx) -> Result<(Stream, Saved)>;
    /// Accumulates the gradients of the input's parameters, given the stream's.
    fn backward(&self, dy: Stream, saved: Saved, ctx: &Ctx) -> Result<()>;
    /// Every parameter whose gradient is complete once `backward` returned.
    fn params(&self) -> Vec<ParamId>;
    /// The stream of the next tokens of each sample, the first of which has position `starts[i]`.
    ///
    /// # Errors
    /// By default: an input that does not say how cannot generate.
    fn decode(&self, _starts: &[usize], _ctx: &Ctx) -> Result<Stream> {
        Err(no_generation("input"))
    }
}

/// What makes a loss of the residual stream, on the last virtual stage: a vocabulary head, a
/// classifier, a regression.
pub trait Output: Send + Sync {
    /// Σ of the microbatch's losses, each by its weight in `ctx.loss_mask`: f64 `[1]`, on the
    /// stream's device, the same on every tp rank; and what backward needs. Gradients are of the
    /// sum of each loss times its weight in `ctx.loss_weights`.
    fn forward(&self, x: Stream, ctx: &Ctx) -> Result<(Tensor, Saved)>;
    /// The gradient of the stream; the output's own parameters' are accumulated.
    fn backward(&self, saved: Saved, ctx: &Ctx) -> Result<Stream>;
    /// Every parameter whose gradient is complete once `backward` returned.
    fn params(&self) -> Vec<ParamId>;
    /// f32 `[b, vocab]`: for each sample the logits at row `rows[i]` of the stream, the same on
    /// every tp rank, without padding.
    ///
    /// # Errors
    /// By default: an output that has no logits cannot generate.
    fn logits_at(&self, _x: &Stream, _rows: &[usize], _ctx: &Ctx) -> Result<Tensor> {
        Err(no_generation("output"))
    }
}

fn no_generation(what: &str) -> Error {
    Error::config(format!("this model cannot generate text: its {what} do not say how"))
}
