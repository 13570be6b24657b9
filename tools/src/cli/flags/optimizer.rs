//! `[optimizer]`: the update rule and the learning-rate schedule.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{ArgAction, Args, ValueEnum};
use megatron::config::{DecayStyle, MomentDtype, OptimizerKind, WsdDecayStyle};

use super::{DeepSpeedScheduleFlags, choice};

/// Where something may be kept, by DeepSpeed's names.
pub(super) const OFFLOADS: [&str; 3] = ["none", "cpu", "nvme"];

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Optimizer and learning rate, [optimizer]")]
pub struct OptimizerFlags {
    /// Update rule: AdamW, or SGD with momentum
    #[arg(long, value_name = "KIND", default_value = "adam", value_parser = choice::<OptimizerKind>(&["adam", "sgd"]))]
    pub optimizer: OptimizerKind,
    /// Peak learning rate. With --lr-schedule: WarmupCosineLR multiplies it by its ratios; for
    /// WarmupLR and WarmupDecayLR it is the default of --warmup-max-lr; OneCycle and LRRangeTest do
    /// not need it. A value other than the schedule's own rate is refused
    #[arg(long, value_name = "X")]
    pub lr: Option<f64>,
    /// Learning rate at the end of the decay
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub min_lr: f64,
    /// How the learning rate falls after warm-up
    #[arg(long, value_name = "STYLE", default_value = "linear",
          value_parser = choice::<DecayStyle>(&["constant", "linear", "cosine", "inverse-square-root", "WSD"]))]
    pub lr_decay_style: DecayStyle,
    /// Steps until the decay ends, warm-up included [default: the whole run]
    #[arg(long, value_name = "N")]
    pub lr_decay_iters: Option<u64>,
    /// The same in samples
    #[arg(long, value_name = "N")]
    pub lr_decay_samples: Option<u64>,
    /// Steps over which the learning rate rises, from 0 or --lr-warmup-init [default: 0]
    #[arg(long, value_name = "N")]
    pub lr_warmup_iters: Option<u64>,
    /// The same in samples
    #[arg(long, value_name = "N")]
    pub lr_warmup_samples: Option<u64>,
    /// The same as a fraction of the decay's length
    #[arg(long, value_name = "X")]
    pub lr_warmup_fraction: Option<f64>,
    /// Learning rate at which the warm-up begins
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub lr_warmup_init: f64,
    /// Steps of the final annealing of a WSD schedule
    #[arg(long, value_name = "N")]
    pub lr_wsd_decay_iters: Option<u64>,
    /// The same in samples
    #[arg(long, value_name = "N")]
    pub lr_wsd_decay_samples: Option<u64>,
    /// Shape of the final annealing of a WSD schedule
    #[arg(long, value_name = "STYLE", default_value = "exponential",
          value_parser = choice::<WsdDecayStyle>(&["exponential", "linear", "cosine", "minus_sqrt"]))]
    pub lr_wsd_decay_style: WsdDecayStyle,
    #[command(flatten)]
    pub deepspeed: DeepSpeedScheduleFlags,
    /// Decoupled weight decay of parameters with two or more dimensions
    #[arg(long, value_name = "X", default_value_t = 0.01)]
    pub weight_decay: f64,
    /// Weight decay at the start of the run, if --weight-decay-incr-style is not constant
    #[arg(long, value_name = "X")]
    pub start_weight_decay: Option<f64>,
    /// Weight decay at the end of the run, likewise
    #[arg(long, value_name = "X")]
    pub end_weight_decay: Option<f64>,
    /// How weight decay grows over the run, from --start-weight-decay to --end-weight-decay;
    /// `constant` uses --weight-decay
    #[arg(long, value_name = "STYLE", value_enum, default_value = "constant")]
    pub weight_decay_incr_style: IncreaseStyle,
    /// Decay of the first moment
    #[arg(long, value_name = "X", default_value_t = 0.9)]
    pub adam_beta1: f64,
    /// Decay of the second moment
    #[arg(long, value_name = "X", default_value_t = 0.999)]
    pub adam_beta2: f64,
    /// Added to the root of the second moment
    #[arg(long, value_name = "X", default_value_t = 1e-8)]
    pub adam_eps: f64,
    /// In a resumed run, confirm that this run's learning rate, schedule and weight decay override
    /// the checkpoint's; without this flag they do so too, with a note for each difference
    #[arg(long, alias = "override-opt_param-scheduler", action = ArgAction::Set, default_value_t = false)]
    pub override_opt_param_scheduler: bool,
    /// In a resumed run, use the checkpoint's learning rate, schedule and weight decay instead of
    /// this run's
    #[arg(long, alias = "use-checkpoint-opt_param-scheduler", action = ArgAction::Set, default_value_t = false)]
    pub use_checkpoint_opt_param_scheduler: bool,
    #[command(flatten)]
    pub moments: MomentFlags,
    /// Momentum of SGD
    #[arg(long, value_name = "X", default_value_t = 0.9)]
    pub sgd_momentum: f64,
    /// Largest gradient norm; larger gradients are scaled down to it. 0 turns clipping off
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub clip_grad: f64,
}

/// How the weight decay grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IncreaseStyle {
    Constant,
    Linear,
    Cosine,
}

/// How optimizer state is stored.
#[derive(Args, Clone, Debug)]
pub struct MomentFlags {
    /// Dtype of Adam's first moment; bf16 takes half the memory
    #[arg(long, value_name = "DTYPE", default_value = "fp32", value_parser = choice::<MomentDtype>(&["fp32", "bf16"]))]
    pub exp_avg_dtype: MomentDtype,
    /// Dtype of Adam's second moment; bf16 takes half the memory and uses stochastic rounding
    #[arg(long, value_name = "DTYPE", default_value = "fp32", value_parser = choice::<MomentDtype>(&["fp32", "bf16"]))]
    pub exp_avg_sq_dtype: MomentDtype,
    /// Where optimizer state is kept between steps: moments, master weights and, under ZeRO-2 and 3,
    /// gradients. On the device (`none`), for GPUs in host memory (`cpu`), or in files (`nvme`)
    /// [default: none]
    #[arg(long, value_name = "none|cpu|nvme", value_parser = PossibleValuesParser::new(OFFLOADS))]
    pub offload_optimizer: Option<String>,
    /// ZeRO-3: where weights are kept between their uses, like --offload-optimizer [default: none]
    #[arg(long, value_name = "none|cpu|nvme", value_parser = PossibleValuesParser::new(OFFLOADS))]
    pub offload_param: Option<String>,
    /// Folder whose disk gets the unnamed files of `nvme`
    #[arg(long, value_name = "DIR")]
    pub nvme_path: Option<PathBuf>,
    /// The same as --offload-optimizer cpu
    #[arg(long)]
    pub optimizer_cpu_offload: bool,
    /// The same as --offload-optimizer nvme, in files on the disk of this folder
    #[arg(long, value_name = "DIR")]
    pub offload_optimizer_nvme_path: Option<PathBuf>,
}
