//! GPT-like models assembled from megatron's layers, the Hugging Face families they come from and
//! go to, and Megatron-LM's checkpoints.

#![warn(missing_docs)]

mod bounds;
pub mod families;
pub mod gpt;
pub mod hf;
pub mod megatron_core;
pub mod saved;

pub use gpt::Gpt;
pub use saved::SavedGpt;
