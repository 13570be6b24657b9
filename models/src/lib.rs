//! GPT-like models assembled from megatron's layers, and the Hugging Face families they come from and go to.

pub mod families;
pub mod gpt;
pub mod hf;
pub mod saved;

pub use gpt::Gpt;
pub use saved::SavedGpt;
