//! GPT-like models assembled from megatron's layers, and their Hugging Face weight names.

pub mod gpt;
pub mod hf;

pub use gpt::Gpt;
