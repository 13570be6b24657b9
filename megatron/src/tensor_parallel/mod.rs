//! Layers split over tp (Megatron-LM, Shoeybi et al. 2019; sequence parallelism, Korthikanti et al.
//! 2022).
//!
//! [`layout`] defines types for the distribution of an activation over tp. [`mappings`] holds the
//! conjugate operators, the only conversions between layouts. The other files hold layers made of
//! kernels and mappings.
//!
//! ```
//! use candle_core::Tensor;
//! use candle_nn::Module;
//! use megatron::params::{ParamSpec, ParamsBuilder};
//! use megatron::tensor_parallel::{AutogradLayer, Layer, Linear, LinearSpec};
//!
//! # fn main() -> megatron::Result<()> {
//! let mut params = ParamsBuilder::default();
//! // A layer of the library, split over tp …
//! let linear = Linear::declare(&LinearSpec::new("up", 64, 64), &mut params);
//! // … and one written in candle, whole on every rank.
//! let gate = AutogradLayer::declare("gate", &mut params, |vb| {
//!     let gate = candle_nn::linear_no_bias(64, 64, vb)?;
//!     Ok(move |x: &Tensor| x * gate.forward(x)?.tanh()?)
//! })?;
//! assert_eq!((linear.params().len(), gate.params().len()), (2, 1));
//!
//! // The shapes on one rank of tp 2.
//! let held = |spec: &ParamSpec| (spec.name.clone(), spec.local_shape(2));
//! let shapes: Vec<_> = params.specs().map(held).collect();
//! assert_eq!(shapes[0], ("up.weight".into(), vec![32, 64]));
//! assert_eq!(shapes[1], ("up.bias".into(), vec![32]));
//! assert_eq!(shapes[2], ("gate.weight".into(), vec![64, 64]));
//! # Ok(())
//! # }
//! ```

mod attention;
mod autograd;
mod block;
mod context;
mod cross_entropy;
mod dense;
mod embedding;
mod head;
mod layer;
pub mod layout;
mod linear;
pub mod mappings;
mod mlp;
mod norm;
mod regression;

pub use attention::{AttentionSpec, SelfAttention};
pub use autograd::AutogradLayer;
pub use block::{BlockSpec, TransformerLayer};
pub use context::{Ctx, DropoutSite, Phase, WeightGradients};
pub use cross_entropy::{RowStats, Targets, VocabParallelCrossEntropy};
pub use dense::{Activation, Linear};
pub use embedding::{Embedding, VocabSpec};
pub use head::{Head, logits_room};
pub use kernels::ops::norm::NormStats;
pub use layer::{Input, Layer, Output, Saved};
pub use linear::{ColumnParallelLinear, Join, LinearSpec, RowParallelLinear};
pub use mappings::TensorParallel;
pub use mlp::{Mlp, MlpSpec};
pub use norm::{Norm, NormSpec};
pub use regression::{Features, MeanSquaredError};
