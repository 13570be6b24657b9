//! How an activation lies over tp, as types: a forgotten or doubled all-reduce does not compile.
//!
//! The only ways from one to another are the operators in [`super::mappings`].
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
//!     // One token's two features: the first is rank 0's, the second rank 1's.
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

/// `[s, b, h]`, a term of a sum over tp that is still owed.
#[derive(Clone, Debug)]
pub struct Partial(pub Tensor);

/// `[s, b, h/tp]`, this rank's features (heads, MLP columns, vocabulary).
#[derive(Clone, Debug)]
pub struct FeatureSharded(pub Tensor);

/// The residual stream: `[s/tp, b, h]`, this rank's part of the sequence, under sequence
/// parallelism; `[s, b, h]`, the same on every rank, without.
#[derive(Clone, Debug)]
pub struct Stream(pub Tensor);
