//! The distribution of an activation over tp, as types: a forgotten or doubled all-reduce does not
//! compile.
//!
//! Only the operators in [`super::mappings`] convert one type to another.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use megatron::comm::threads;
//! use megatron::tensor_parallel::TensorParallel;
//! use megatron::tensor_parallel::layout::{FeatureSharded, Stream};
//!
//! # fn main() -> megatron::Result<()> {
//! let whole = threads::run(2, |group| {
//!     let tp = TensorParallel::new(group, false);
//!     // One token's two features: the first is on rank 0, the second on rank 1.
//!     let own = Tensor::new(&[[[10.0 + tp.rank() as f32]]], &Device::Cpu)?;
//!     let Stream(all) = tp.gather_features(&FeatureSharded(own))?;
//!     Ok(all.flatten_all()?.to_vec1::<f32>()?)
//! })?;
//! assert_eq!(whole, [[10.0, 11.0], [10.0, 11.0]]);
//! # Ok(())
//! # }
//! ```

use candle_core::Tensor;

/// `[s, b, h]`, the same on every tp rank.
#[derive(Clone, Debug)]
pub struct Replicated(pub Tensor);

/// `[s, b, h]`, one term of a sum over tp that is not computed yet.
#[derive(Clone, Debug)]
pub struct Partial(pub Tensor);

/// `[s, b, h/tp]`, this rank's features (heads, MLP columns, vocabulary).
#[derive(Clone, Debug)]
pub struct FeatureSharded(pub Tensor);

/// The residual stream. With sequence parallelism: `[s/tp, b, h]`, this rank's part of the
/// sequence. Without: `[s, b, h]`, the same on every rank.
#[derive(Clone, Debug)]
pub struct Stream(pub Tensor);
