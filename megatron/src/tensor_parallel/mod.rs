//! Layers cut over tp (Megatron-LM, Shoeybi et al. 2019; sequence parallelism, Korthikanti et al.
//! 2022).
//!
//! [`layout`] names how an activation lies over tp; [`mappings`] holds the conjugate operators, the
//! only ways from one layout to another; the other files hold layers made of kernels and mappings.

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
pub use layer::{Input, Layer, Output, Saved};
pub use linear::{ColumnParallelLinear, Join, LinearSpec, RowParallelLinear};
pub use mappings::TensorParallel;
pub use mlp::{Mlp, MlpSpec};
pub use norm::{Norm, NormSpec};
pub use regression::{Features, MeanSquaredError};
