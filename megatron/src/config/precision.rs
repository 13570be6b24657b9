//! The dtypes of stored numbers, and the loss scale that keeps small fp16 gradients from vanishing.

use std::fmt;

use candle_core::DType;
use serde::{Deserialize, Serialize};

/// The dtype of weights, activations and their gradients. Sums, statistics, main gradients, master
/// weights and optimizer state are fp32 in all but fp64 (Micikevicius et al. 2018; Kalamkar et al.
/// 2019).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in f64: for tests of gradients.
    Fp64,
    /// Everything in fp32.
    #[default]
    Fp32,
    /// Weights and activations in bf16. Gradients are summed in fp32, and the low halves of fp32
    /// weights are stored separately.
    Bf16,
    /// Weights and activations in fp16, with separate fp32 weights and a scaled loss.
    Fp16(LossScaling),
}

impl Precision {
    /// Dtype of weights and activations.
    pub fn dtype(self) -> DType {
        match self {
            Self::Fp64 => DType::F64,
            Self::Fp32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::Fp16(_) => DType::F16,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Fp64 => "fp64",
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
            Self::Fp16(_) => "fp16",
        })
    }
}

/// The factor on the loss that keeps fp16 gradients from vanishing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossScaling {
    /// Constant.
    Static(f64),
    /// Halved when gradients overflow, doubled after a while without overflow; see
    /// [`crate::optim::LossScaler`].
    Dynamic(DynamicLossScale),
}

/// Settings of a dynamic loss scale, with DeepSpeed's defaults.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DynamicLossScale {
    /// The scale at the first step.
    pub initial: f64,
    /// An overflow at this scale ends the run.
    pub min: f64,
    /// Steps without overflow after which the scale is doubled.
    pub window: u64,
    /// Overflows before the scale is halved.
    pub hysteresis: u64,
    /// Every step without overflow resets the count of overflows; otherwise only a doubling does.
    pub consecutive_hysteresis: bool,
}

impl Default for DynamicLossScale {
    fn default() -> Self {
        Self {
            initial: 65_536.0,
            min: 1.0,
            window: 1000,
            hysteresis: 2,
            consecutive_hysteresis: false,
        }
    }
}
