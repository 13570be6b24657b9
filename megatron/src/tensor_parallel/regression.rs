//! Input and output of a model on features: features enter unchanged, and the result is compared
//! with targets.

use candle_core::{DType, Tensor};

use super::context::{Ctx, Phase};
use super::layer::{Input, Output, Saved};
use super::layout::Stream;
use crate::params::ParamId;
use crate::{Error, Result};

/// The microbatch's tensor with this name, `[b, h]`, as a stream of one position, `[1, b, h]`.
#[derive(Clone, Debug)]
pub struct Features {
    /// Name in [`SampleSource::named`](crate::data::SampleSource::named).
    pub name: String,
}

impl Input for Features {
    fn forward(&self, ctx: &Ctx) -> Result<(Stream, Saved)> {
        let x = one_position(ctx.tensor(&self.name)?, &self.name)?;
        Ok((Stream(x), Saved::new(())))
    }

    fn backward(&self, _: Stream, _: Saved, _: &Ctx) -> Result<()> {
        Ok(())
    }

    fn params(&self) -> Vec<ParamId> {
        Vec::new()
    }
}

/// The mean over features of the squared difference from the microbatch's tensor with this name,
/// `[b, h]`: torch's `MSELoss`. The stream must have one position.
#[derive(Clone, Debug)]
pub struct MeanSquaredError {
    /// Name in [`SampleSource::named`](crate::data::SampleSource::named).
    pub targets: String,
}

impl Output for MeanSquaredError {
    fn forward(&self, x: Stream, ctx: &Ctx) -> Result<(Tensor, Saved)> {
        let targets = one_position(ctx.tensor(&self.targets)?, &self.targets)?;
        if targets.dims() != x.0.dims() {
            return Err(Error::config(format!(
                "'{}' has shape {:?} for outputs of shape {:?}",
                self.targets,
                targets.dims(),
                x.0.dims()
            )));
        }
        let width = x.0.dim(2)? as f64;
        let difference = (&x.0 - targets.to_dtype(x.0.dtype())?)?;
        // [1, b]
        let losses = (difference.sqr()?.to_dtype(DType::F64)?.sum(2)? / width)?;
        let weighted = (losses * ctx.loss_mask.to_dtype(DType::F64)?)?;
        let sum = weighted.sum_all()?.reshape(1)?;
        let dx = match (ctx.phase, ctx.loss_weights) {
            (Phase::Train { .. }, Some(weights)) => {
                let weights = (weights.to_dtype(x.0.dtype())?.unsqueeze(2)? * (2.0 / width))?;
                Some(Stream(difference.broadcast_mul(&weights)?))
            }
            _ => None,
        };
        Ok((sum, Saved::new(dx)))
    }

    fn backward(&self, saved: Saved, _: &Ctx) -> Result<Stream> {
        let dx: Option<Stream> = saved.take()?;
        dx.ok_or_else(|| Error::config("internal error: backward of an evaluation"))
    }

    fn params(&self) -> Vec<ParamId> {
        Vec::new()
    }
}

/// `[b, h]` as `[1, b, h]`.
fn one_position(t: &Tensor, name: &str) -> Result<Tensor> {
    match t.dims() {
        [_, _] => Ok(t.unsqueeze(0)?.contiguous()?),
        dims => Err(Error::config(format!("'{name}' has shape {dims:?} where [b, h] is needed"))),
    }
}
