//! `[optimizer]`: the update rule and the learning-rate schedule.

use std::fmt;
use std::path::PathBuf;

use candle_core::DType;
use serde::{Deserialize, Serialize};

use super::DeepSpeedSchedule;

/// The update rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// AdamW, decoupled weight decay (Loshchilov & Hutter 2019).
    Adam,
    /// SGD with momentum and L2 weight decay (not decoupled), as in PyTorch.
    Sgd,
}

/// How the learning rate falls after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DecayStyle {
    /// It stays at its peak.
    Constant,
    /// In a straight line to `min_lr`.
    Linear,
    /// Along half a cosine wave to `min_lr`.
    Cosine,
    /// With √(warm-up samples / samples), never below `min_lr`.
    InverseSquareRoot,
    /// Warm-up, stable, decay (Hu et al. 2024).
    #[serde(rename = "WSD")]
    Wsd,
}

/// How the last part of a WSD schedule anneals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WsdDecayStyle {
    /// At time t from 0 to 1, the fraction 2 · 2^(−t) − 1 of the fall from the peak to `min_lr` is
    /// left.
    Exponential,
    /// 1 − t is left.
    Linear,
    /// Half a cosine wave is left.
    Cosine,
    /// 1 − √t is left.
    MinusSqrt,
}

/// How a weight decay grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IncreaseStyle {
    /// In a straight line.
    Linear,
    /// Along half a cosine wave.
    Cosine,
}

/// A weight decay that grows from `start` to `end` over `samples` samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WeightDecayIncrease {
    /// At the run's first sample.
    pub start: f64,
    /// After `samples` samples and from then on.
    pub end: f64,
    /// The curve between the two.
    pub style: IncreaseStyle,
    /// Length of the growth.
    pub samples: u64,
}

/// The dtype in which a moment of AdamW is stored between steps; steps compute in fp32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MomentDtype {
    /// 4 bytes per element.
    #[default]
    Fp32,
    /// The first moment is rounded to nearest, the second stochastically, in the same way under
    /// every layout ([`kernels::ops::optimizer::StochasticRounding`]).
    Bf16,
}

impl MomentDtype {
    /// The dtype of the moment tensor, for gradients of dtype `grads`.
    pub fn dtype(self, grads: DType) -> DType {
        match self {
            Self::Fp32 => grads,
            Self::Bf16 => DType::BF16,
        }
    }
}

impl fmt::Display for MomentDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
        })
    }
}

/// Where something is kept between its uses: optimizer state, weights, or saved activations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// In the memory of the device that computes.
    #[default]
    None,
    /// In host memory. For a rank that computes on the CPU this is the same as `None`.
    Cpu,
    /// In unnamed files on the disk of this folder.
    Nvme(PathBuf),
}

impl Offload {
    /// Its name in settings.
    pub fn name(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cpu => "cpu",
            Self::Nvme(_) => "nvme",
        }
    }
}

/// The optimizer of a run. Schedule lengths are in samples, so that they do not depend on the batch
/// size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerConfig {
    /// AdamW or SGD.
    pub kind: OptimizerKind,
    /// Peak learning rate.
    pub lr: f64,
    /// Learning rate at the end of the decay.
    pub min_lr: f64,
    /// Applies from the end of the warm-up.
    pub decay_style: DecayStyle,
    /// Samples until `min_lr` is reached, warm-up included.
    pub decay_samples: u64,
    /// Samples over which the learning rate rises linearly from `warmup_init`.
    pub warmup_samples: u64,
    /// Learning rate at which the warm-up begins.
    #[serde(default)]
    pub warmup_init: f64,
    /// Samples of the final annealing of a WSD schedule.
    pub wsd_decay_samples: u64,
    /// Only used with [`DecayStyle::Wsd`].
    pub wsd_decay_style: WsdDecayStyle,
    /// A schedule of DeepSpeed. It replaces all settings above that begin with `min`, `decay`,
    /// `warmup` or `wsd`; of `lr` only [`DeepSpeedSchedule::WarmupCosineLr`] depends.
    #[serde(default)]
    pub lr_schedule: Option<DeepSpeedSchedule>,
    /// Decoupled weight decay of parameters with two or more dimensions.
    pub weight_decay: f64,
    /// A weight decay that grows during the run; replaces `weight_decay`.
    #[serde(default)]
    pub weight_decay_increase: Option<WeightDecayIncrease>,
    /// Decay of AdamW's first moment.
    pub adam_beta1: f64,
    /// Decay of AdamW's second moment.
    pub adam_beta2: f64,
    /// Added to the root of AdamW's second moment.
    pub adam_eps: f64,
    /// Dtype of the first moment.
    #[serde(default)]
    pub exp_avg_dtype: MomentDtype,
    /// Dtype of the second moment.
    #[serde(default)]
    pub exp_avg_sq_dtype: MomentDtype,
    /// Where moments (SGD's momentum) are kept.
    #[serde(default)]
    pub offload: Offload,
    /// Decay of SGD's momentum.
    pub sgd_momentum: f64,
    /// Largest gradient norm; larger gradients are scaled down to it. 0 turns clipping off.
    pub clip_grad: f64,
}

/// AdamW with a constant learning rate of 1e-3, as in PyTorch, and Megatron-LM's clipping.
impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            kind: OptimizerKind::Adam,
            lr: 1e-3,
            min_lr: 0.0,
            decay_style: DecayStyle::Constant,
            decay_samples: u64::MAX,
            warmup_samples: 0,
            warmup_init: 0.0,
            wsd_decay_samples: 0,
            wsd_decay_style: WsdDecayStyle::Exponential,
            lr_schedule: None,
            weight_decay: 0.01,
            weight_decay_increase: None,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_eps: 1e-8,
            exp_avg_dtype: MomentDtype::default(),
            exp_avg_sq_dtype: MomentDtype::default(),
            offload: Offload::default(),
            sgd_momentum: 0.9,
            clip_grad: 1.0,
        }
    }
}
