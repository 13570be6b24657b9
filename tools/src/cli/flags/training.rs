//! `[training]`: batch, length, seed, recompute, precision.

use clap::builder::PossibleValuesParser;
use clap::{ArgAction, Args, ValueEnum};
use megatron::config::RecomputeMethod;

use super::choice;
use super::optimizer::OFFLOADS;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Training: batch, length, memory, [training]")]
pub struct TrainingFlags {
    /// MBS: samples per forward pass of one replica
    #[arg(long, value_name = "N")]
    pub micro_batch_size: Option<usize>,
    /// GBS: samples per step over all replicas [default: MBS·dp]
    #[arg(long, value_name = "N")]
    pub global_batch_size: Option<usize>,
    /// Microbatches of a replica per step: GBS / (MBS·dp). Any two of the three give the third
    #[arg(long, value_name = "N", alias = "gas")]
    pub gradient_accumulation_steps: Option<usize>,
    /// Start with START samples per step and add INCREMENT at a time, evenly over the first SAMPLES
    /// samples, up to --global-batch-size; needs --train-samples for the run's length
    #[arg(long, num_args = 3, value_names = ["START", "INCREMENT", "SAMPLES"])]
    pub rampup_batch_size: Vec<u64>,
    /// Steps of the whole run
    #[arg(long, value_name = "N")]
    pub train_iters: Option<u64>,
    /// Samples of the whole run, instead of --train-iters; rounded down to whole steps
    #[arg(long, value_name = "N")]
    pub train_samples: Option<u64>,
    /// Save and stop after the first step that is a multiple of this
    #[arg(long, value_name = "N")]
    pub exit_interval: Option<u64>,
    /// End the run with an error after N steps in a row with a loss or gradient that is not finite;
    /// 0 never does. Overflows of --fp16 count once its loss scale is at the minimum
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub max_nonfinite_steps: u64,
    /// End the run with an error at the first such step
    #[arg(long, action = ArgAction::Set, default_value_t = false, overrides_with = "no_check_for_nan_in_loss_and_grad")]
    pub check_for_nan_in_loss_and_grad: bool,
    /// Continue after such a step, up to --max-nonfinite-steps in a row (the default)
    #[arg(long, action = ArgAction::Set, default_value_t = false, overrides_with = "check_for_nan_in_loss_and_grad")]
    pub no_check_for_nan_in_loss_and_grad: bool,
    #[command(flatten)]
    pub ends: EndFlags,
    /// Skip the samples of these steps, counted from 1: nothing is updated, and schedules do not
    /// advance
    #[arg(long, value_name = "STEP", num_args = 1..)]
    pub iterations_to_skip: Vec<u64>,
    /// Only evaluate on the validation and test data; nothing is trained or saved
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub skip_train: bool,
    /// Seed of every random number of the run
    #[arg(long, value_name = "N", default_value_t = 1234)]
    pub seed: u64,
    #[command(flatten)]
    pub recompute: RecomputeFlags,
    /// Record forward and backward of a microbatch as a CUDA graph, and launch the graph instead of
    /// single kernels
    #[arg(long)]
    pub enable_cuda_graph: bool,
    #[command(flatten)]
    pub precision: PrecisionFlags,
}

/// When a run ends before its last step.
#[derive(Args, Clone, Debug)]
pub struct EndFlags {
    /// Save and stop after the first step that ends this many minutes or more after the program's
    /// start
    #[arg(long, value_name = "MINUTES")]
    pub exit_duration_in_mins: Option<f64>,
    /// Save and stop on signals; always on. SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 do this,
    /// sent to any rank or to the process that started the ranks
    #[arg(long, action = ArgAction::Set, default_value_t = true)]
    pub exit_signal_handler: bool,
    /// The signal to save and stop on; all of those listed always do
    #[arg(long, value_name = "SIGNAL", value_parser = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])]
    pub exit_signal: Option<String>,
}

/// What is recomputed in backward.
#[derive(Args, Clone, Debug)]
pub struct RecomputeFlags {
    /// Save memory by recomputing activations in backward: of whole layers (`full`), or only of
    /// attention and activation functions (`selective`)
    #[arg(long, value_name = "GRANULARITY", value_enum)]
    pub recompute_granularity: Option<Granularity>,
    /// Layers of full recompute: all, in groups (`uniform`), or the first ones of each stage
    /// (`block`) [default: uniform]
    #[arg(long, value_name = "METHOD", value_parser = choice::<RecomputeMethod>(&["uniform", "block"]))]
    pub recompute_method: Option<RecomputeMethod>,
    /// Layers per group (uniform) or per stage (block) of full recompute [default: 1]
    #[arg(long, value_name = "N")]
    pub recompute_num_layers: Option<usize>,
    /// Full recompute: split the saved input of every recomputed layer over the tensor-parallel
    /// ranks, and gather it in backward
    #[arg(long, alias = "partition-activations", action = ArgAction::Set, default_value_t = false)]
    pub distribute_saved_activations: bool,
    /// Full recompute: where these inputs are kept until backward, like --offload-optimizer
    /// [default: none]
    #[arg(long, value_name = "none|cpu|nvme", value_parser = PossibleValuesParser::new(OFFLOADS))]
    pub offload_activations: Option<String>,
}

/// Dtypes of stored numbers.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Precision, [training]")]
pub struct PrecisionFlags {
    /// Keep weights and activations in bf16; sums, master weights and optimizer state in fp32
    #[arg(long)]
    pub bf16: bool,
    /// Keep weights and activations in fp16, with a dynamic loss scale
    #[arg(long)]
    pub fp16: bool,
    /// Fixed loss scale of --fp16 instead of the dynamic one
    #[arg(long, value_name = "X")]
    pub loss_scale: Option<f64>,
    /// Initial loss scale of --fp16 [default: 65536]
    #[arg(long, value_name = "X")]
    pub initial_loss_scale: Option<f64>,
    /// Smallest loss scale of --fp16: an overflow at this scale ends the run [default: 1]
    #[arg(long, value_name = "X")]
    pub min_loss_scale: Option<f64>,
    /// Steps without overflow after which the loss scale of --fp16 is doubled [default: 1000]
    #[arg(long, value_name = "N")]
    pub loss_scale_window: Option<u64>,
    /// Overflows before the loss scale of --fp16 is halved [default: 2]
    #[arg(long, value_name = "N")]
    pub hysteresis: Option<u64>,
    /// Reset the count of --hysteresis after every step without an overflow, not only when the loss
    /// scale is doubled
    #[arg(long)]
    pub consecutive_hysteresis: bool,
    /// Send gradients between replicas in bf16 instead of fp32, which halves the traffic; needs
    /// --bf16
    #[arg(long)]
    pub grad_reduce_in_bf16: bool,
    /// The same in fp16; needs --fp16
    #[arg(long)]
    pub grad_reduce_in_fp16: bool,
}

/// How much is recomputed in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Granularity {
    Full,
    Selective,
}
