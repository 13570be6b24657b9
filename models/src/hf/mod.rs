//! Hugging Face folders: their configuration ([`HfConfig`]), their weights ([`HfModel`]), and
//! conversion in both directions ([`import`], [`export`]).
//!
//! ```
//! use megatron::checkpoint::Float;
//! use models::hf::{ExportOptions, HfModel, export, import};
//! # use candle_core::Device;
//! # use megatron::comm::solo;
//! # use megatron::config::{ModelConfig, RunConfig};
//! # use megatron::data::SampleSource;
//! # use megatron::train::{Sources, Trainer};
//! # use models::Gpt;
//! # struct Zeros;
//! # impl SampleSource for Zeros {
//! #     fn seq_length(&self) -> usize {
//! #         8
//! #     }
//! #     fn num_samples(&self) -> u64 {
//! #         1
//! #     }
//! # }
//! # fn main() -> megatron::Result<()> {
//! # let model = ModelConfig {
//! #     hidden_size: 16,
//! #     head_dim: 8,
//! #     num_attention_heads: 2,
//! #     num_query_groups: 2,
//! #     ffn_hidden_size: 64,
//! #     seq_length: 8,
//! #     max_position_embeddings: 8,
//! #     vocab_size: 32,
//! #     ..Default::default()
//! # };
//! # let run = RunConfig { model, ..Default::default() };
//! # let (gpt, cpu) = (Gpt::of(&run, &Device::Cpu)?, Device::Cpu);
//! # let mut trainer = Trainer::new(&run, &gpt, solo(), &Sources::of(Zeros), &cpu)?;
//! # trainer.step()?;
//! # let folder = tempfile::tempdir().unwrap();
//! # let folder = folder.path();
//! // A checkpoint of a small GPT-2 …
//! trainer.save(&folder.join("run"))?;
//!
//! // … becomes a folder that `transformers` reads …
//! let options = ExportOptions { max_shard_size: 1 << 30, dtype: Some(Float::Bf16) };
//! let exported = export(&folder.join("run"), &folder.join("gpt2"), &options)?;
//! assert_eq!((exported.family.model_type(), exported.files), ("gpt2", 1));
//!
//! let written = HfModel::open(&folder.join("gpt2"))?;
//! assert_eq!(written.model().num_layers, 1);
//! let (name, shape, dtype) = written.parameters().next().unwrap();
//! assert_eq!((name, shape), ("embedding.word_embeddings.weight", &[32, 16][..]));
//! assert_eq!(dtype, Float::Bf16);
//!
//! // … and a checkpoint again, to continue from.
//! let imported = import(&folder.join("gpt2"), &folder.join("fine-tuned"), |_done, _total| {})?;
//! assert_eq!(imported.elements * 2, exported.bytes);
//! # Ok(())
//! # }
//! ```

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

/// `config.json` of the folder that a checkpoint was imported from, stored next to the checkpoints.
pub const ORIGIN_CONFIG: &str = "hf_config.json";
/// Files about tokens and generation that accompany weights.
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
