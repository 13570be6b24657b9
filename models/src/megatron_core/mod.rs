//! Checkpoints of Megatron-LM and Megatron-Core in the format `torch_dist` (PyTorch's distributed
//! checkpoint), written under any layout: what they describe, their weights ([`MegatronModel`]),
//! and the way in ([`import`]).
//!
//! Files are not trusted: no pickle is executed, and memory has the order of what the files hold.

mod archive;
mod config;
mod folder;
mod import;
mod model;
mod pickle;
mod storage;
#[cfg(test)]
mod tests;

pub use config::Vocabulary;
pub use folder::is_megatron;
pub use import::{Imported, import};
pub use model::MegatronModel;
