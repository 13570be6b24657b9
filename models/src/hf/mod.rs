//! Hugging Face folders: what they describe ([`HfConfig`]), their weights ([`HfModel`]), and the
//! ways in and out ([`import`], [`export`]).

mod carry;
mod config;
mod export;
mod fields;
mod files;
mod import;
mod model;
mod tokenizer;

pub use carry::{carry_sidecar_files, copy_sidecar_files, copy_tokenizer};
pub use config::{CONFIG, HfConfig, family_of, to_json};
pub use export::{ExportOptions, Exported, export};
pub use files::HfFiles;
pub use import::{Imported, import, refuse_model_folder};
pub use model::{HfModel, Raw};

/// `config.json` of the folder that a checkpoint was imported from, beside the checkpoints.
pub const ORIGIN_CONFIG: &str = "hf_config.json";
/// Files about tokens and generation that go along with weights.
pub const SIDECAR_FILES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    GENERATION_CONFIG,
];
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";
