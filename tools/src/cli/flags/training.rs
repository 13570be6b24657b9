//! `[training]`: batch, length, seed, recompute.

use clap::{ArgAction, Args, ValueEnum};
use megatron::config::RecomputeMethod;

use super::choice;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Training: batch, length, memory, [training]")]
pub struct TrainingFlags {
    /// MBS: samples of one forward pass of one replica
    #[arg(long, value_name = "N")]
    pub micro_batch_size: Option<usize>,
    /// GBS: samples of one step over all replicas [default: MBS·dp]
    #[arg(long, value_name = "N")]
    pub global_batch_size: Option<usize>,
    /// Steps of the whole run
    #[arg(long, value_name = "N")]
    pub train_iters: Option<u64>,
    /// Samples of the whole run, instead of --train-iters; rounded down to whole steps
    #[arg(long, value_name = "N")]
    pub train_samples: Option<u64>,
    /// Save and stop after the first step that is a multiple of this
    #[arg(long, value_name = "N")]
    pub exit_interval: Option<u64>,
    /// Every random number of the run is a function of this
    #[arg(long, value_name = "N", default_value_t = 1234)]
    pub seed: u64,
    /// Save memory by computing activations again: of whole layers, or of attention and activation functions only
    #[arg(long, value_name = "GRANULARITY", value_enum)]
    pub recompute_granularity: Option<Granularity>,
    /// Layers of full recompute: all in groups (`uniform`), or the first of each stage (`block`) [default: uniform]
    #[arg(long, value_name = "METHOD", value_parser = choice::<RecomputeMethod>(&["uniform", "block"]))]
    pub recompute_method: Option<RecomputeMethod>,
    /// Layers per group (uniform) or per stage (block) of full recompute [default: 1]
    #[arg(long, value_name = "N")]
    pub recompute_num_layers: Option<usize>,
    /// 16-bit training, which this version does not have
    #[arg(long, action = ArgAction::Set, default_value_t = false, hide = true)]
    pub bf16: bool,
    /// 16-bit training, which this version does not have
    #[arg(long, action = ArgAction::Set, default_value_t = false, hide = true)]
    pub fp16: bool,
}

/// What is computed again in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Granularity {
    Full,
    Selective,
}
