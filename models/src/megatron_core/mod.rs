//! Checkpoints of Megatron-LM and Megatron-Core in the format `torch_dist` (PyTorch's distributed
//! checkpoint), written under any layout: their description, their weights ([`MegatronModel`]), and
//! the conversion ([`import`]).
//!
//! Files are not trusted: no pickle is executed, and the memory used is proportional to the content
//! of the files.
//!
//! ```
//! use megatron::checkpoint::{Manifest, locate};
//! use models::megatron_core::{MegatronModel, Vocabulary, import};
//!
//! # fn main() -> megatron::Result<()> {
//! # let theirs = std::path::Path::new("../tests/fixtures/megatron-core/llama-tp2-pp2");
//! # let folder = tempfile::tempdir().unwrap();
//! # let ours = folder.path();
//! // A Llama that Megatron-LM saved under tp 2 × pp 2.
//! let model = MegatronModel::open(theirs, None)?;
//! assert!(model.model().swiglu);
//! assert!(matches!(model.vocabulary(), Vocabulary::Padded(_)));
//!
//! // The same as a checkpoint of this library, for any layout.
//! let imported = import(theirs, ours, None, |_done, _total| {})?;
//! assert_eq!(imported.iteration, Some(5));
//! let manifest = Manifest::read(&locate(ours, None)?)?;
//! assert_eq!(manifest.tensors.len(), model.parameters().count());
//! # Ok(())
//! # }
//! ```

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
