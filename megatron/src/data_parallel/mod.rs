//! Data parallelism. It reduces gradients over replicas, bucket by bucket (Li et al. 2020), with
//! all-reduce or reduce-scatter (ZeRO-1, Rajbhandari et al. 2020). It also wraps models that candle
//! trains.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear_no_bias};
//! use megatron::comm::{Communicator, threads};
//! use megatron::data_parallel::DataParallel;
//!
//! # fn main() -> megatron::Result<()> {
//! let weights = threads::run(2, |world| {
//!     let vars = VarMap::new();
//!     let model = linear_no_bias(1, 1, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
//!     // Each rank drew its own weight; now all ranks have that of rank 0.
//!     let mut replicas = DataParallel::new(&vars, world.clone(), Default::default())?;
//!     let mut sgd = SGD::new(replicas.vars(), 0.1)?;
//!     for step in 0..40 {
//!         // y = 3x, for this rank's samples.
//!         let x = Tensor::new(&[[1.0 + ((step + world.rank()) % 3) as f32]], &Device::Cpu)?;
//!         let loss = (model.forward(&x)? - (&x * 3.0)?)?.sqr()?.mean_all()?;
//!         sgd.step(&replicas.backward(&loss)?)?;
//!     }
//!     Ok(model.weight().flatten_all()?.to_vec1::<f32>()?[0])
//! })?;
//! assert_eq!(weights[0], weights[1], "replicas are equal to the bit");
//! assert!((weights[0] - 3.0).abs() < 1e-3);
//! # Ok(())
//! # }
//! ```

mod declarations;
mod module;
mod reducer;

pub use module::{DataParallel, DataParallelOptions};
pub use reducer::GradientReducer;
