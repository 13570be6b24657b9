//! The parts of a stage: an input, layers of the residual stream, and an output.

use std::any::Any;

use candle_core::Tensor;

use super::context::Ctx;
use super::layout::Stream;
use crate::params::ParamId;
use crate::{Error, Result};

/// The values that a layer saves in forward for its backward.
pub struct Saved(Box<dyn Any + Send>);

impl Saved {
    /// Keeps `value` until backward takes it.
    pub fn new<T: Send + 'static>(value: T) -> Self {
        Self(Box::new(value))
    }

    /// The value that was given to `new`.
    ///
    /// # Errors
    /// If it has another type: the engine then paired a layer with the activations of another one.
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
/// `backward` consumes what `forward` saved. It accumulates parameter gradients into the store's
/// main gradients, or leaves this to [`Ctx::weight_grad`].
///
/// The example is a feed-forward network with its own backward, split over tp as in Megatron-LM.
/// [`AutogradLayer`](super::AutogradLayer) uses candle's backward instead;
/// `examples/custom_layer.rs` adds one after each layer of a GPT, `examples/sharded_layer.rs` a layer
/// like this one.
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
    /// Returns the layer's output and the values for its backward.
    fn forward(&self, x: Stream, ctx: &Ctx) -> Result<(Stream, Saved)>;
    /// Recomputes the values for backward, bitwise as `forward` computed them, without the output,
    /// which is not needed again. By default it runs the whole forward.
    fn recompute(&self, x: Stream, ctx: &Ctx) -> Result<Saved> {
        Ok(self.forward(x, ctx)?.1)
    }
    /// Returns the gradient of the layer's input.
    fn backward(&self, dy: Stream, saved: Saved, ctx: &Ctx) -> Result<Stream>;
    /// Allocates the cache for `positions` tokens of `batch` samples in generation.
    ///
    /// # Errors
    /// By default: a layer without an implementation cannot generate.
    fn cache(&self, _positions: usize, _batch: usize, _ctx: &Ctx) -> Result<Tensor> {
        Err(no_generation("layers"))
    }
    /// The layer's output for the next tokens of each sample. Sample i's first token has position
    /// `starts[i]` and sees the tokens before it in the cache. Runs without sequence parallelism
    /// and dropout.
    ///
    /// # Errors
    /// By default, as [`cache`](Self::cache).
    fn decode(&self, _x: Stream, _cache: &Tensor, _starts: &[usize], _ctx: &Ctx) -> Result<Stream> {
        Err(no_generation("layers"))
    }
    /// Every parameter whose gradient is complete after `backward` has returned and its products in
    /// [`Ctx::later`] are computed.
    fn params(&self) -> Vec<ParamId>;
    /// The name of its type, for a partition
    /// [by types](crate::config::PartitionMethod::Type). By default that of the Rust type, without
    /// modules and parameters.
    fn type_name(&self) -> &'static str {
        short(std::any::type_name::<Self>())
    }
}

/// Produces the residual stream of a microbatch on the first virtual stage: the embedding of a
/// language model, or the first projection of features.
pub trait Input: Send + Sync {
    /// Returns the stream and the values for backward.
    fn forward(&self, ctx: &Ctx) -> Result<(Stream, Saved)>;
    /// Accumulates the gradients of the input's parameters, given the stream's gradient.
    fn backward(&self, dy: Stream, saved: Saved, ctx: &Ctx) -> Result<()>;
    /// Every parameter whose gradient is complete after `backward` has returned.
    fn params(&self) -> Vec<ParamId>;
    /// Parameters whose weights `backward` reads. Under ZeRO-3 they are gathered for it.
    fn weights_in_backward(&self) -> Vec<ParamId> {
        self.params()
    }
    /// The stream of the next tokens of each sample; sample i's first token has position
    /// `starts[i]`.
    ///
    /// # Errors
    /// By default: an input without an implementation cannot generate.
    fn decode(&self, _starts: &[usize], _ctx: &Ctx) -> Result<Stream> {
        Err(no_generation("input"))
    }
    /// As [`Layer::type_name`].
    fn type_name(&self) -> &'static str {
        short(std::any::type_name::<Self>())
    }
}

/// Computes a loss from the residual stream on the last virtual stage: a vocabulary head, a
/// classifier, or a regression.
pub trait Output: Send + Sync {
    /// Returns Σ of the microbatch's losses, each weighted by `ctx.loss_mask`: f64 `[1]`, on the
    /// stream's device, the same on every tp rank. Also returns the values for backward. Gradients
    /// are those of the sum weighted by `ctx.loss_weights` instead.
    fn forward(&self, x: Stream, ctx: &Ctx) -> Result<(Tensor, Saved)>;
    /// Returns the gradient of the stream, and accumulates the gradients of the output's
    /// parameters.
    fn backward(&self, saved: Saved, ctx: &Ctx) -> Result<Stream>;
    /// Every parameter whose gradient is complete after `backward` has returned.
    fn params(&self) -> Vec<ParamId>;
    /// Parameters whose weights `backward` reads. Under ZeRO-3 they are gathered for it.
    fn weights_in_backward(&self) -> Vec<ParamId> {
        self.params()
    }
    /// Whether `forward` in training has already accumulated the gradients of the output's
    /// parameters. ZeRO-2 and 3 then reduce them before `backward`.
    fn makes_gradients_in_forward(&self) -> bool {
        false
    }
    /// f32 `[b, vocab]`: for each sample the logits at row `rows[i]` of the stream, the same on
    /// every tp rank, without padding.
    ///
    /// # Errors
    /// By default: an output without logits cannot generate.
    fn logits_at(&self, _x: &Stream, _rows: &[usize], _ctx: &Ctx) -> Result<Tensor> {
        Err(no_generation("output"))
    }
    /// As [`Layer::type_name`].
    fn type_name(&self) -> &'static str {
        short(std::any::type_name::<Self>())
    }
}

/// `Layer` of `library::module::Layer<library::Parameter>`.
fn short(name: &str) -> &str {
    let plain = name.split_once('<').map_or(name, |(plain, _)| plain);
    plain.rsplit_once("::").map_or(plain, |(_, short)| short)
}

fn no_generation(what: &str) -> Error {
    Error::config(format!("this model cannot generate text: its {what} do not say how"))
}

#[cfg(test)]
mod tests {
    use super::short;

    #[test]
    fn names_of_types_have_neither_modules_nor_parameters() {
        assert_eq!(short("Head"), "Head");
        assert_eq!(short("megatron::tensor_parallel::head::Head"), "Head");
        assert_eq!(short("mine::Layer<alloc::vec::Vec<f32>>"), "Layer");
    }
}
