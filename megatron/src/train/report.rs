//! The interface through which a training loop reports its progress.
//!
//! ```
//! use std::path::Path;
//!
//! use megatron::train::{EvalMetrics, Profile, Reporter, StepMetrics};
//!
//! /// Remembers the losses of a run.
//! #[derive(Default)]
//! struct Losses(Vec<f64>);
//!
//! impl Reporter for Losses {
//!     fn start(&mut self, done: u64, train_iters: u64) {
//!         self.0.reserve((train_iters - done) as usize);
//!     }
//!     fn step(&mut self, metrics: &StepMetrics) {
//!         self.0.push(metrics.lm_loss);
//!     }
//!     fn eval(&mut self, _: &EvalMetrics) {}
//!     fn checkpoint(&mut self, _: u64, _: &Path) {}
//!     fn profile(&mut self, _: &Profile) {}
//!     fn message(&mut self, _: &str) {}
//! }
//! # use std::sync::atomic::AtomicBool;
//! # use candle_core::{Device, Tensor};
//! # use megatron::Result;
//! # use megatron::comm::solo;
//! # use megatron::config::{ModelConfig, RunConfig, TrainingConfig};
//! # use megatron::data::SampleSource;
//! # use megatron::train::{Sources, Trainer};
//! # use std::ops::Range;
//! # use megatron::config::Recompute;
//! # use megatron::params::ParamsBuilder;
//! # use megatron::pipeline::Chunk;
//! # use megatron::tensor_parallel::{Features, Linear, LinearSpec, MeanSquaredError};
//! # use megatron::train::{Ends, ModelBuilder};
//! # struct Negate;
//! # impl SampleSource for Negate {
//! #     fn seq_length(&self) -> usize {
//! #         1
//! #     }
//! #     fn num_samples(&self) -> u64 {
//! #         4
//! #     }
//! #     fn named(&self, index: u64) -> Result<Vec<(String, Tensor)>> {
//! #         let x = Tensor::new(&[(index % 4) as f32, 1.0, 0.5, -1.0], &Device::Cpu)?;
//! #         Ok(vec![("y".into(), x.neg()?), ("x".into(), x)])
//! #     }
//! # }
//! # struct OneLinear;
//! # impl ModelBuilder for OneLinear {
//! #     fn num_layers(&self) -> usize {
//! #         1
//! #     }
//! #     fn chunk(&self, _: Ends, _: Range<usize>, params: &mut ParamsBuilder) -> Result<Chunk> {
//! #         let spec = LinearSpec::new("layer", 4, 4);
//! #         Ok(Chunk {
//! #             input: Some(Box::new(Features { name: "x".into() })),
//! #             layers: vec![Box::new(Linear::declare(&spec, params))],
//! #             output: Some(Box::new(MeanSquaredError { targets: "y".into() })),
//! #             recompute: Recompute::None,
//! #         })
//! #     }
//! # }
//! # fn main() -> Result<()> {
//! # let config = RunConfig {
//! #     model: ModelConfig { num_layers: 1, hidden_size: 4, ..Default::default() },
//! #     training: TrainingConfig { global_batch_size: 4, train_iters: 20, ..Default::default() },
//! #     ..Default::default()
//! # };
//! # let sources = Sources::of(Negate);
//! # let mut trainer = Trainer::new(&config, &OneLinear, solo(), &sources, &Device::Cpu)?;
//!
//! let mut losses = Losses::default();
//! trainer.run(&mut losses, &AtomicBool::new(false))?; // 20 steps
//! assert_eq!(losses.0.len(), 20);
//! assert!(losses.0[19] < losses.0[0]);
//! # Ok(())
//! # }
//! ```

use std::path::Path;

use super::{EvalMetrics, Profile, StepMetrics};

/// Receives the progress of a run. Usually one rank has a reporter with output; the reporters of
/// other ranks may ignore all calls.
pub trait Reporter: Send {
    /// The run has `train_iters` steps; `done` of them were completed before it was resumed.
    fn start(&mut self, done: u64, train_iters: u64);
    /// A step ended.
    fn step(&mut self, metrics: &StepMetrics);
    /// An evaluation ended.
    fn eval(&mut self, metrics: &EvalMetrics);
    /// A checkpoint of `iteration` is complete in `path`.
    fn checkpoint(&mut self, iteration: u64, path: &Path);
    /// The profile of the recorded steps.
    fn profile(&mut self, profile: &Profile);
    /// Any other message to the user, in one line.
    fn message(&mut self, text: &str);
}

/// Shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Reporter for Silent {
    fn start(&mut self, _: u64, _: u64) {}
    fn step(&mut self, _: &StepMetrics) {}
    fn eval(&mut self, _: &EvalMetrics) {}
    fn checkpoint(&mut self, _: u64, _: &Path) {}
    fn profile(&mut self, _: &Profile) {}
    fn message(&mut self, _: &str) {}
}
