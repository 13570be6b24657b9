//! Layers of multi-layer perceptrons: a linear layer with its output on every rank, and
//! activations.

use candle_core::Tensor;
use kernels::ops::activation::{
    gelu, gelu_backward, relu, relu_backward, squared_relu, squared_relu_backward,
};

use super::context::Ctx;
use super::layer::{Layer, Saved};
use super::layout::Stream;
use super::linear::{ColumnParallelLinear, LinearSpec};
use crate::Result;
use crate::params::{ParamId, ParamsBuilder};

/// `y = x·Wᵀ + b`, split over tp by output features, which are then gathered. It serves as torch's
/// `Linear` between layers of any kind. Input and output have the width of the stream.
pub struct Linear {
    inner: ColumnParallelLinear,
}

impl Linear {
    /// Declares the layer's parameters, `{spec.name}.weight` and `.bias`.
    pub fn declare(spec: &LinearSpec, params: &mut ParamsBuilder) -> Self {
        Self { inner: ColumnParallelLinear::declare(spec, 1, params) }
    }
}

impl Layer for Linear {
    fn forward(&self, x: Stream, ctx: &Ctx) -> Result<(Stream, Saved)> {
        let y = self.inner.forward(&ctx.tp.enter(&x)?, ctx)?;
        Ok((ctx.tp.gather_features(&y)?, Saved::new(x)))
    }

    fn backward(&self, dy: Stream, saved: Saved, ctx: &Ctx) -> Result<Stream> {
        let x: Stream = saved.take()?;
        self.inner.backward(&ctx.tp.gather_features_backward(&dy)?, &x, ctx)
    }

    fn params(&self) -> Vec<ParamId> {
        self.inner.params().collect()
    }
}

/// An elementwise activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// GELU, tanh approximation.
    Gelu,
    /// max(x, 0).
    Relu,
    /// max(x, 0)².
    SquaredRelu,
}

impl Layer for Activation {
    fn forward(&self, x: Stream, _: &Ctx) -> Result<(Stream, Saved)> {
        let f: fn(&Tensor) -> kernels::Result<Tensor> = match self {
            Self::Gelu => gelu,
            Self::Relu => relu,
            Self::SquaredRelu => squared_relu,
        };
        let y = f(&x.0)?.contiguous()?;
        Ok((Stream(y), Saved::new(x)))
    }

    fn backward(&self, dy: Stream, saved: Saved, _: &Ctx) -> Result<Stream> {
        let x: Stream = saved.take()?;
        let f: fn(&Tensor, &Tensor) -> kernels::Result<Tensor> = match self {
            Self::Gelu => gelu_backward,
            Self::Relu => relu_backward,
            Self::SquaredRelu => squared_relu_backward,
        };
        Ok(Stream(f(&dy.0, &x.0)?.contiguous()?))
    }

    fn params(&self) -> Vec<ParamId> {
        Vec::new()
    }
}
