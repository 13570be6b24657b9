//! GPT-like models made of [`megatron`]'s layers, conversion from and to Hugging Face families, and
//! import of Megatron-LM's checkpoints. [`Gpt`] builds each rank's share of a model; a
//! [`Trainer`](megatron::train::Trainer) trains it under any layout.
//!
//! | item | what it is |
//! |---|---|
//! | [`Gpt`] | GPT-2- and Llama-style decoders, by settings |
//! | [`SavedGpt`] | a GPT's checkpoint, without its ranks |
//! | [`families`] | what tensors are called in Hugging Face files, family by family |
//! | [`hf`] | Hugging Face folders: reading, import, export |
//! | [`megatron_core`] | Megatron-LM's distributed checkpoints: reading, import |
//!
//! The package is `megatron-models`; [`megatron`]'s page explains how to depend on it.
//!
//! # A first program
//!
//! A small Llama learns a sequence of tokens: in one process, and over two ranks that share each
//! layer.
//!
//! ```
//! use candle_core::Device;
//! use megatron::Result;
//! use megatron::comm::{Group, solo, threads};
//! use megatron::config::{ModelConfig, Normalization, PositionEmbedding, RunConfig};
//! use megatron::data::SampleSource;
//! use megatron::train::{Sources, Trainer};
//! use models::Gpt;
//!
//! /// Each token is the one before plus 3.
//! struct Samples;
//!
//! impl SampleSource for Samples {
//!     fn seq_length(&self) -> usize {
//!         8
//!     }
//!     fn num_samples(&self) -> u64 {
//!         32
//!     }
//!     fn sample(&self, index: u64, out: &mut [u32]) -> Result<()> {
//!         (0..).zip(out).for_each(|(i, token)| *token = (index as u32 % 32 + 3 * i) % 32);
//!         Ok(())
//!     }
//! }
//!
//! fn train(config: &RunConfig, world: Group) -> Result<Vec<f64>> {
//!     let (gpt, sources) = (Gpt::of(config, &Device::Cpu)?, Sources::of(Samples));
//!     let mut trainer = Trainer::new(config, &gpt, world, &sources, &Device::Cpu)?;
//!     (0..3).map(|_| Ok(trainer.step()?.lm_loss)).collect()
//! }
//!
//! fn main() -> Result<()> {
//!     let mut config = RunConfig::default();
//!     config.model = ModelConfig {
//!         num_layers: 2,
//!         hidden_size: 16,
//!         ffn_hidden_size: 32,
//!         num_attention_heads: 2,
//!         num_query_groups: 2,
//!         head_dim: 8,
//!         seq_length: 8,
//!         vocab_size: 32,
//!         position_embedding: PositionEmbedding::Rope,
//!         normalization: Normalization::RMSNorm,
//!         swiglu: true,
//!         bias_linear: false,
//!         ..Default::default()
//!     };
//!     config.training.global_batch_size = 32;
//!     config.optimizer.lr = 1e-2;
//!     let losses = train(&config, solo())?;
//!     assert!(losses[2] < losses[0]);
//!
//!     config.parallel.tensor_model_parallel_size = 2;
//!     let ranks = threads::run(2, |world| train(&config, world))?;
//!     assert!(losses.iter().zip(&ranks[0]).all(|(one, two)| (one - two).abs() < 1e-5));
//!     Ok(())
//! }
//! ```

#![warn(missing_docs)]

mod bounds;
pub mod families;
mod gpt;
pub mod hf;
pub mod megatron_core;
mod saved;

pub use gpt::Gpt;
pub use saved::SavedGpt;
