//! `[training]`: batch, length, seed, recompute, precision.

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
    /// Begin with START samples a step and add INCREMENT at a time, evenly over the first SAMPLES
    /// samples, up to --global-batch-size; the run's length is then given by --train-samples
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
    /// End the run with an error after N steps in a row whose loss or gradient is not finite; 0
    /// lets it go on. Overflows of --fp16 count once its loss scale cannot fall any more
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub max_nonfinite_steps: u64,
    /// End the run with an error at the first such step
    #[arg(long, action = ArgAction::Set, default_value_t = false, overrides_with = "no_check_for_nan_in_loss_and_grad")]
    pub check_for_nan_in_loss_and_grad: bool,
    /// Go on after such a step, up to --max-nonfinite-steps in a row, as is the default
    #[arg(long, action = ArgAction::Set, default_value_t = false, overrides_with = "check_for_nan_in_loss_and_grad")]
    pub no_check_for_nan_in_loss_and_grad: bool,
    #[command(flatten)]
    pub ends: EndFlags,
    /// Pass over the samples of these steps, counted from 1: nothing is updated, and schedules do
    /// not advance
    #[arg(long, value_name = "STEP", num_args = 1..)]
    pub iterations_to_skip: Vec<u64>,
    /// Evaluate on the validation and test data, and make no step; nothing is saved
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub skip_train: bool,
    /// Every random number of the run is a function of this
    #[arg(long, value_name = "N", default_value_t = 1234)]
    pub seed: u64,
    #[command(flatten)]
    pub recompute: RecomputeFlags,
    /// Record forward and backward of a microbatch as a CUDA graph, and launch that instead of
    /// their kernels one by one
    #[arg(long)]
    pub enable_cuda_graph: bool,
    #[command(flatten)]
    pub precision: PrecisionFlags,
}

/// When a run ends before its last step.
#[derive(Args, Clone, Debug)]
pub struct EndFlags {
    /// Save and stop after the step in which this many minutes since the program's start have
    /// passed
    #[arg(long, value_name = "MINUTES")]
    pub exit_duration_in_mins: Option<f64>,
    /// Save and stop on signals. It is always so: SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2, to
    /// any rank or to who started them, end a run that way
    #[arg(long, action = ArgAction::Set, default_value_t = true)]
    pub exit_signal_handler: bool,
    /// The signal to save and stop on, one of those that always do
    #[arg(long, value_name = "SIGNAL", value_parser = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])]
    pub exit_signal: Option<String>,
}

/// What is computed again in backward.
#[derive(Args, Clone, Debug)]
pub struct RecomputeFlags {
    /// Save memory by computing activations again: of whole layers, or of attention and activation
    /// functions only
    #[arg(long, value_name = "GRANULARITY", value_enum)]
    pub recompute_granularity: Option<Granularity>,
    /// Layers of full recompute: all in groups (`uniform`), or the first of each stage (`block`)
    /// [default: uniform]
    #[arg(long, value_name = "METHOD", value_parser = choice::<RecomputeMethod>(&["uniform", "block"]))]
    pub recompute_method: Option<RecomputeMethod>,
    /// Layers per group (uniform) or per stage (block) of full recompute [default: 1]
    #[arg(long, value_name = "N")]
    pub recompute_num_layers: Option<usize>,
}

/// What numbers are stored in.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Precision, [training]")]
pub struct PrecisionFlags {
    /// Weights and activations in bf16; sums, master weights and optimizer state in fp32
    #[arg(long)]
    pub bf16: bool,
    /// Weights and activations in fp16, with a loss scale that follows the gradients
    #[arg(long)]
    pub fp16: bool,
    /// Fixed factor on the loss of --fp16, instead of one that adapts itself
    #[arg(long, value_name = "X")]
    pub loss_scale: Option<f64>,
    /// First loss scale of --fp16 [default: 65536]
    #[arg(long, value_name = "X")]
    pub initial_loss_scale: Option<f64>,
    /// Least loss scale of --fp16: an overflow there ends the run [default: 1]
    #[arg(long, value_name = "X")]
    pub min_loss_scale: Option<f64>,
    /// Steps without overflow after which the loss scale of --fp16 is doubled [default: 1000]
    #[arg(long, value_name = "N")]
    pub loss_scale_window: Option<u64>,
    /// Overflows that it takes to halve the loss scale of --fp16 [default: 2]
    #[arg(long, value_name = "N")]
    pub hysteresis: Option<u64>,
    /// Count these overflows anew after every step without one, rather than when the loss scale is
    /// doubled
    #[arg(long)]
    pub consecutive_hysteresis: bool,
    /// Sum the gradients of replicas in messages of bf16, half the size, instead of fp32; with
    /// --bf16
    #[arg(long)]
    pub grad_reduce_in_bf16: bool,
}

/// How much is computed again in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Granularity {
    Full,
    Selective,
}
