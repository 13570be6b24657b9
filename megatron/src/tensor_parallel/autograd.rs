//! Layers with a forward written in candle and the backward of candle's graph. Any candle-nn module
//! thus trains under every layout, but slower than a layer with its own backward.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use candle_core::{DType, Device, Module, Result as Candle, Shape, Tensor, Var};
use candle_nn::VarBuilder;
use candle_nn::init::{Init as CandleInit, NormalOrUniform};
use candle_nn::var_builder::SimpleBackend;

use super::context::{Ctx, Phase};
use super::layer::{Layer, Saved};
use super::layout::{Replicated, Stream};
use crate::comm::lock;
use crate::params::{Init, ParamId, ParamSpec, ParamsBuilder, Partition};
use crate::{Error, Result};

type AnyModule = Box<dyn Module + Send + Sync>;
type Build = dyn Fn(VarBuilder) -> Candle<AnyModule> + Send + Sync;

/// A candle module as a [`Layer`].
///
/// The module receives `[b, s, h]`, the shape of candle-nn's own modules, and returns the same
/// shape. Every rank of a tp group holds all its parameters and computes the same; under sequence
/// parallelism the sequence is gathered first.
///
/// The module reads copies of the weights, which are refreshed before each forward. Candle does not
/// draw dropout and other random numbers by (seed, step, token), so a module with them has a
/// different loss on every layout.
///
/// ```
/// use candle_nn::{Module, linear};
/// use megatron::params::ParamsBuilder;
/// use megatron::tensor_parallel::{AutogradLayer, Layer};
///
/// let mut params = ParamsBuilder::default();
/// let layer = AutogradLayer::declare("layers.0", &mut params, |vb| {
///     let (up, down) = (linear(64, 256, vb.pp("up"))?, linear(256, 64, vb.pp("down"))?);
///     Ok(move |x: &candle_core::Tensor| x + down.forward(&up.forward(x)?.gelu()?)?)
/// })
/// .unwrap();
/// assert_eq!(layer.params().len(), 4);
/// ```
pub struct AutogradLayer {
    name: String,
    build: Box<Build>,
    /// Names in the module and ids, in the order of the module's requests.
    params: Vec<(String, ParamId)>,
    each_token: bool,
    /// Built in the first forward, when the device and the dtype are known.
    built: OnceLock<Built>,
}

struct Built {
    module: AnyModule,
    /// A copy of each parameter.
    vars: Vec<Var>,
}

impl AutogradLayer {
    /// Declares the parameters that `build` requests, named `{name}.{requested name}`, with the
    /// requested initial distribution. Matrices have weight decay, vectors have none.
    ///
    /// # Errors
    /// If the module cannot be built, or requests a normal distribution with a mean other than 0.
    pub fn declare<M: Module + Send + Sync + 'static>(
        name: &str,
        params: &mut ParamsBuilder,
        build: impl Fn(VarBuilder) -> Candle<M> + Send + Sync + 'static,
    ) -> Result<Self> {
        let build: Box<Build> = Box::new(move |vb| Ok(Box::new(build(vb)?) as AnyModule));
        let asked = Arc::new(Asked::default());
        build(VarBuilder::from_backend(
            Box::new(Recorder(asked.clone())),
            DType::F32,
            Device::Cpu,
        ))?;
        let asked = std::mem::take(&mut *lock(&asked));
        let declared = asked.into_iter().map(|(of_module, shape, init)| {
            let spec = ParamSpec {
                name: format!("{name}.{of_module}"),
                partition: Partition::Replicated,
                padded_dim0: shape.dims().first().copied().unwrap_or(1),
                init: initial(&of_module, init, &shape)?,
                weight_decay: shape.rank() > 1,
                tie_group: None,
                grad_partial_over_tp: false,
                shape: shape.into_dims(),
            };
            Ok((of_module, params.declare(spec)))
        });
        let declared = declared.collect::<Result<_>>()?;
        let built = OnceLock::new();
        Ok(Self { name: name.into(), build, params: declared, each_token: false, built })
    }

    /// Declares that the module computes every token independently, as a feed-forward layer does.
    /// It can then be given parts of sequences, as context parallelism needs.
    pub fn each_token_by_itself(self) -> Self {
        Self { each_token: true, ..self }
    }

    fn built(&self, ctx: &Ctx) -> Result<&Built> {
        if let Some(built) = self.built.get() {
            return Ok(built);
        }
        let mut vars = Vec::with_capacity(self.params.len());
        let mut by_name = HashMap::new();
        for (name, id) in &self.params {
            let var = Var::from_tensor(&ctx.weight(*id)?)?;
            by_name.insert(name.clone(), var.as_tensor().clone());
            vars.push(var);
        }
        let options = ctx.params.options();
        let copies = Box::new(Copies(by_name));
        let vb = VarBuilder::from_backend(copies, options.dtype, options.device.clone());
        let built = Built { module: (self.build)(vb)?, vars };
        Ok(self.built.get_or_init(|| built))
    }

    fn refuse(&self, what: String) -> Error {
        Error::config(format!("layer {}: {what}", self.name))
    }
}

/// The input and output of a module: the root of candle's graph.
struct Graph {
    x: Var,
    y: Tensor,
}

impl Layer for AutogradLayer {
    fn forward(&self, x: Stream, ctx: &Ctx) -> Result<(Stream, Saved)> {
        if ctx.cp.size() > 1 && !self.each_token {
            return Err(self.refuse(format!(
                "context parallelism gives it a part of each sequence (cp {}); call `each_token_by_itself` if it mixes no tokens, or leave cp out",
                ctx.cp.size()
            )));
        }
        let built = self.built(ctx)?;
        for (var, (_, id)) in built.vars.iter().zip(&self.params) {
            var.set(&ctx.weight(*id)?)?;
        }
        let x = batch_first(&ctx.tp.enter(&x)?.0)?;
        let x = Var::from_tensor(&x)?;
        let y = built.module.forward(&x)?;
        if y.dims() != x.dims() || y.dtype() != x.dtype() {
            return Err(self.refuse(format!(
                "its module makes {:?} ({:?}) of {:?} ({:?}); a layer of the stream keeps both",
                y.dims(),
                y.dtype(),
                x.dims(),
                x.dtype()
            )));
        }
        let stream = ctx.tp.own_positions(&Replicated(batch_first(&y.detach())?))?;
        let keeps = matches!(ctx.phase, Phase::Train { .. });
        Ok((stream, Saved::new(keeps.then_some(Graph { x, y }))))
    }

    fn backward(&self, dy: Stream, saved: Saved, ctx: &Ctx) -> Result<Stream> {
        let saved: Option<Graph> = saved.take()?;
        let Some(Graph { x, y }) = saved else {
            return Err(Error::config("internal error: backward of an evaluation"));
        };
        let built = self.built(ctx)?;
        let dy = batch_first(&ctx.tp.exit_backward(&dy)?.0)?;
        // candle's backward starts with a gradient of ones, and the gradient of this sum is dy.
        let grads = (&y * &dy)?.sum_all()?.backward()?;
        for (var, (name, id)) in built.vars.iter().zip(&self.params) {
            let grad = grads.get(var).ok_or_else(|| self.refuse(no_gradient(name)))?;
            let total = ctx.params.grad(*id)?;
            let grad = grad.to_dtype(total.dtype())?.contiguous()?;
            kernels::ops::reduce::add_inplace(&total, &grad)?;
        }
        let dx = grads.get(&x).ok_or_else(|| self.refuse(no_gradient("its input")))?;
        ctx.tp.own_positions(&Replicated(batch_first(dx)?))
    }

    fn params(&self) -> Vec<ParamId> {
        self.params.iter().map(|(_, id)| *id).collect()
    }
}

fn no_gradient(of: &str) -> String {
    format!(
        "candle's graph has no gradient of {of}: the module does not use it, or an operation without backward cuts the graph without a word, \
         as candle_nn's LayerNorm, RmsNorm, rope and softmax_last_dim do; write these with plain tensor operations (candle_nn::ops::softmax, \
         LayerNorm's `forward` of a tensor that is not contiguous, RmsNorm::forward_diff)"
    )
}

/// Converts `[s, b, h]` to `[b, s, h]`, and back.
fn batch_first(x: &Tensor) -> Result<Tensor> {
    Ok(x.transpose(0, 1)?.contiguous()?)
}

/// The same distributions as candle's [`CandleInit::var`], drawn by element index.
fn initial(name: &str, init: CandleInit, shape: &Shape) -> Result<Init> {
    Ok(match init {
        CandleInit::Const(0.0) => Init::Zeros,
        CandleInit::Const(1.0) => Init::Ones,
        CandleInit::Const(value) => Init::Constant { value },
        CandleInit::Randn { mean: 0.0, stdev } => Init::Normal { std: stdev },
        CandleInit::Randn { mean, .. } => {
            return Err(Error::config(format!(
                "{name}: initial values are drawn around 0, not around {mean}; use a constant or a uniform range"
            )));
        }
        CandleInit::Uniform { lo, up } => Init::Uniform { low: lo, high: up },
        CandleInit::Kaiming { dist, fan, non_linearity } => {
            let std = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            match dist {
                NormalOrUniform::Normal => Init::Normal { std },
                NormalOrUniform::Uniform => {
                    let bound = 3f64.sqrt() * std;
                    Init::Uniform { low: -bound, high: bound }
                }
            }
        }
    })
}

/// The parameters that a module requested.
type Asked = Mutex<Vec<(String, Shape, CandleInit)>>;

/// Records the requests of a module, and returns zeros.
struct Recorder(Arc<Asked>);

impl SimpleBackend for Recorder {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: CandleInit,
        dtype: DType,
        device: &Device,
    ) -> Candle<Tensor> {
        let mut asked = lock(&self.0);
        if !asked.iter().any(|(other, ..)| other == name) {
            asked.push((name.into(), shape.clone(), init));
        }
        Tensor::zeros(shape, dtype, device)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Candle<Tensor> {
        candle_core::bail!("parameter {name} is asked for without a shape: use `get` with one")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        lock(&self.0).iter().any(|(other, ..)| other == name)
    }
}

/// Gives a module the copies of its parameters.
struct Copies(HashMap<String, Tensor>);

impl SimpleBackend for Copies {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: CandleInit,
        dtype: DType,
        device: &Device,
    ) -> Candle<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if tensor.shape() != &shape {
            candle_core::bail!("parameter {name} has shape {:?}, not {shape:?}", tensor.shape())
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Candle<Tensor> {
        match self.0.get(name) {
            Some(tensor) => Ok(tensor.clone()),
            None => candle_core::bail!("the module did not ask for {name} when it was declared"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}
