//! The configuration of a run: resolved values, one struct per section of the run file.
//!
//! These are the values *after* defaults, file and flags were merged; `tools` merges them.
//! Cross-checks between sections are in [`RunConfig::validate`], so that library users get the same
//! errors as users of the command line.
//!
//! ```
//! use megatron::config::{ModelConfig, ParallelConfig, RunConfig, Origins};
//!
//! let run = RunConfig {
//!     model: ModelConfig {
//!         hidden_size: 48,
//!         ffn_hidden_size: 192,
//!         head_dim: 8,
//!         num_attention_heads: 6,
//!         num_query_groups: 6,
//!         vocab_size: 256,
//!         ..Default::default()
//!     },
//!     parallel: ParallelConfig { tensor_model_parallel_size: 3, ..Default::default() },
//!     ..Default::default()
//! };
//! run.parallel.validate_with(&run.model, &Origins::default()).unwrap();
//!
//! let uneven = ParallelConfig { tensor_model_parallel_size: 4, ..run.parallel.clone() };
//! let error = uneven.validate_with(&run.model, &Origins::default()).unwrap_err().to_string();
//! assert!(error.contains("num_attention_heads"), "{error}");
//! ```

mod data;
mod deepspeed_schedule;
mod model;
mod optimizer;
mod origins;
mod parallel;
mod precision;
mod rampup;
mod tokenizer;
mod training;
mod validate;

pub use data::parse_split;
pub use data::{
    CheckpointConfig, DataConfig, DataloaderType, LoggingConfig, ProfileConfig, Retention,
    SchedulerOf, Takes, TensorboardConfig, TimingLogOption,
};
pub use deepspeed_schedule::{
    DeepSpeedSchedule, LrRangeTest, OneCycle, Warmup, WarmupCosine, WarmupDecay, WarmupType,
};
pub use model::{ModelConfig, Normalization, PositionEmbedding, RopeScaling, SlidingWindow};
pub use optimizer::{
    DecayStyle, IncreaseStyle, MomentDtype, Offload, OptimizerConfig, OptimizerKind,
    WeightDecayIncrease, WsdDecayStyle,
};
pub use origins::Origins;
pub(crate) use parallel::type_regex;
pub use parallel::{ParallelConfig, PartitionMethod, ScheduleKind};
pub use precision::{DynamicLossScale, LossScaling, Precision};
pub use rampup::BatchSizeRampup;
pub use tokenizer::TokenizerOptions;
pub use training::{Recompute, RecomputeMethod, TrainingConfig};
#[cfg(test)]
pub(crate) use validate::tests::valid;

use serde::{Deserialize, Serialize};

/// A whole run. Every part has a default, so that a program sets only what it changes:
///
/// ```
/// use megatron::config::{OptimizerConfig, RunConfig, TrainingConfig};
///
/// let config = RunConfig {
///     training: TrainingConfig { global_batch_size: 8, ..Default::default() },
///     optimizer: OptimizerConfig { lr: 3e-4, ..Default::default() },
///     ..Default::default()
/// };
/// assert_eq!(config.parallel.world_size(), 1);
/// ```
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RunConfig {
    /// The architecture.
    pub model: ModelConfig,
    /// How model and batch are split over ranks.
    pub parallel: ParallelConfig,
    /// The data, and how text becomes tokens.
    pub data: DataConfig,
    /// Batch sizes, length, seed, precision, recompute.
    pub training: TrainingConfig,
    /// The optimizer and its schedules.
    pub optimizer: OptimizerConfig,
    /// What is saved, where and when, and what a run starts from.
    pub checkpoint: CheckpointConfig,
    /// What a run reports.
    pub logging: LoggingConfig,
}
