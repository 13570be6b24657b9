//! The training loop and its reports.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use megatron::Result;
//! use megatron::comm::{solo, threads};
//! use megatron::config::{ModelConfig, RunConfig, TrainingConfig};
//! use megatron::data::SampleSource;
//! use megatron::train::{Sources, Trainer};
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
//!
//! # fn main() -> Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let folder = folder.path();
//! // `OneLinear` is a `ModelBuilder`, `Negate` a `SampleSource`; see the crate's first page.
//! let mut config = RunConfig {
//!     model: ModelConfig { num_layers: 1, hidden_size: 4, ..Default::default() },
//!     training: TrainingConfig { global_batch_size: 4, ..Default::default() },
//!     ..Default::default()
//! };
//! let sources = Sources::of(Negate);
//! let mut trainer = Trainer::new(&config, &OneLinear, solo(), &sources, &Device::Cpu)?;
//! let first = trainer.step()?;
//! trainer.step()?;
//! let checkpoint = trainer.save(folder)?;
//! let third = trainer.step()?;
//! assert!(third.lm_loss < first.lm_loss);
//!
//! // Two ranks continue from there, each with half of every batch.
//! config.parallel.data_parallel_size = 2;
//! let resumed = threads::run(2, |world| {
//!     let mut trainer = Trainer::new(&config, &OneLinear, world, &sources, &Device::Cpu)?;
//!     trainer.load(&checkpoint)?;
//!     trainer.step()
//! })?;
//! assert_eq!(resumed[0].iteration, 3);
//! assert!((resumed[0].lm_loss - third.lm_loss).abs() < 1e-6);
//! # Ok(())
//! # }
//! ```

mod agreement;
mod communicators;
mod divergence;
mod evaluate_only;
mod flops;
mod footprint;
mod generate;
mod inference;
mod memory;
mod memory_limit;
mod metrics;
mod model;
mod out_of_memory;
mod profile;
mod progress;
mod recorded;
mod records;
pub mod report;
mod resume;
mod resume_notes;
mod retention;
mod run;
mod saving;
mod schedules;
mod skipping;
mod sources;
mod state;
mod step_plan;
mod stored;
mod tensorboard;
mod timers;
mod trainer;

pub use agreement::require as require_alike;
pub use communicators::most_communicators;
pub use flops::step_flops;
pub use footprint::Footprint;
pub use generate::{Length, Sampling};
pub use inference::Inference;
pub use memory::{Peak, RanksHere, peak_memory, peak_memory_of, require_memory};
pub use metrics::{EvalMetrics, MetricsWriter, StepMetrics};
pub use model::{Ends, Layout, ModelBuilder, SavedActivations};
pub use profile::{Ceilings, Profile, Profiler, SpanGroup, Summary, Total};
pub use progress::Progress;
pub use recorded::RecordedRun;
pub use report::{Reporter, Silent};
pub use resume::samples_to_read;
pub use run::{Outcome, preflight};
pub use sources::Sources;
pub use state::{GPT, SavedRun, saved_run, weights_only_state, with_parallel};
pub use step_plan::StepPlan;
pub use stored::reshard_tensors;
pub use timers::{StepTimers, TimerEntry};
pub use trainer::Trainer;
