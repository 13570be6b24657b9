//! Megatron-style parallel training of neural networks on candle's tensors: data × tensor × context
//! × pipeline parallelism in Rust, without Python. A rank is a process, or a thread of one;
//! [`train::Trainer`] is one rank of a run. Losses and checkpoints do not depend on the layout of a
//! run.
//!
//! # Crates
//!
//! | package | in code | what it holds |
//! |---|---|---|
//! | `megatron-kernels` | `kernels` | forward and backward of single operations, for CPUs and GPUs |
//! | `megatron-train` | `megatron` | this crate: everything between a rank's kernels and a whole run |
//! | `megatron-models` | `models` | GPTs of these layers; files of Hugging Face and Megatron-LM |
//! | `megatron-cli` | `tools` | the binary `megatron`: `pretrain`, `generate`, `export` and others |
//!
//! The packages are not on crates.io. Depend on a checkout by `path`, or on the repository by
//! `git`:
//!
//! ```toml
//! [dependencies]
//! megatron = { package = "megatron-train", path = "../megatron/megatron" }
//! models = { package = "megatron-models", path = "../megatron/models" }
//! candle-core = "0.11.1"
//! ```
//!
//! # Folders of this crate
//!
//! | folder | what it holds |
//! |---|---|
//! | [`topology`] | rank arithmetic: the place of each rank on tp × cp × ep × dp × pp |
//! | [`comm`] | communicators between ranks, rendezvous, deadlines, lost ranks |
//! | [`config`] | the settings of a run, resolved and validated |
//! | [`params`] | layout-independent descriptions of parameters; initial values; flat buffers |
//! | [`tensor_parallel`] | layers split over tp, and the layouts of their activations |
//! | [`context_parallel`] | sequences split over cp: tokens exchanged for heads around attention |
//! | [`pipeline`] | schedules as data, their simulator, the engine that runs them |
//! | [`data_parallel`] | reduction of gradients over dp (and cp) |
//! | [`optim`] | optimizers, clipping, learning-rate schedules |
//! | [`checkpoint`] | one logical state on disk, whatever the layout |
//! | [`data`] | text, tokens, datasets, samplers |
//! | [`train`] | the training loop |
//!
//! # A first program
//!
//! Two linear layers learn to change a sign: in one process, and as a pipeline of two stages.
//!
//! ```
//! use std::ops::Range;
//!
//! use candle_core::{Device, Tensor};
//! use megatron::Result;
//! use megatron::comm::{Group, solo, threads};
//! use megatron::config::{ModelConfig, ParallelConfig, Recompute, RunConfig};
//! use megatron::data::SampleSource;
//! use megatron::params::ParamsBuilder;
//! use megatron::pipeline::Chunk;
//! use megatron::tensor_parallel::{Features, Layer, Linear, LinearSpec, MeanSquaredError};
//! use megatron::train::{Ends, ModelBuilder, Sources, Trainer};
//!
//! struct Model;
//!
//! impl ModelBuilder for Model {
//!     fn num_layers(&self) -> usize {
//!         2
//!     }
//!     fn chunk(&self, ends: Ends, at: Range<usize>, params: &mut ParamsBuilder) -> Result<Chunk> {
//!         let (x, y) = (Features { name: "x".into() }, MeanSquaredError { targets: "y".into() });
//!         let layer = |i| {
//!             let spec = LinearSpec::new(format!("layers.{i}"), 8, 8);
//!             Box::new(Linear::declare(&spec, params)) as Box<dyn Layer>
//!         };
//!         Ok(Chunk {
//!             layers: at.map(layer).collect(),
//!             input: ends.first.then(|| Box::new(x) as _),
//!             output: ends.last.then(|| Box::new(y) as _),
//!             recompute: Recompute::None,
//!         })
//!     }
//! }
//!
//! struct Samples;
//!
//! impl SampleSource for Samples {
//!     fn seq_length(&self) -> usize {
//!         1
//!     }
//!     fn num_samples(&self) -> u64 {
//!         4
//!     }
//!     fn named(&self, index: u64) -> Result<Vec<(String, Tensor)>> {
//!         let x = Tensor::full((index % 4) as f32, 8, &Device::Cpu)?;
//!         Ok(vec![("y".into(), x.neg()?), ("x".into(), x)])
//!     }
//! }
//!
//! fn train(config: &RunConfig, world: Group) -> Result<Vec<f64>> {
//!     let sources = Sources::of(Samples);
//!     let mut trainer = Trainer::new(config, &Model, world, &sources, &Device::Cpu)?;
//!     (0..20).map(|_| Ok(trainer.step()?.lm_loss)).collect()
//! }
//!
//! fn main() -> Result<()> {
//!     let model = ModelConfig { num_layers: 2, hidden_size: 8, ..Default::default() };
//!     let mut config = RunConfig { model, ..Default::default() };
//!     config.training.global_batch_size = 4;
//!     let losses = train(&config, solo())?;
//!     assert!(losses[19] < losses[0]);
//!
//!     config.parallel = ParallelConfig { pipeline_model_parallel_size: 2, ..Default::default() };
//!     let stages = threads::run(2, |world| train(&config, world))?;
//!     assert_eq!(stages, [losses.clone(), losses], "a pipeline changes no bit");
//!     Ok(())
//! }
//! ```
//!
//! For several processes `main` calls [`comm::spawn`], or [`comm::World::from_env`] under a
//! launcher such as torchrun; `train` stays the same. The repository's `examples/` continue from
//! here: a custom layer, data parallelism around a candle model, process groups.

#![warn(missing_docs)]

pub mod checkpoint;
pub mod comm;
pub mod config;
pub mod context_parallel;
pub mod data;
pub mod data_parallel;
mod error;
#[doc(hidden)] // Opens files safely for the sibling crates; not part of training.
pub mod files;
pub mod optim;
pub mod params;
pub mod pipeline;
#[doc(hidden)] // Folders of this user alone, for the sibling crates; not part of training.
pub mod private;
pub mod tensor_parallel;
#[doc(hidden)] // Cleans text from other programs, for the sibling crates; not part of training.
pub mod text;
pub mod topology;
pub mod train;

pub use error::{Error, Result};
