//! `[training]`: batch, length, seed, recompute, precision.

use std::ops::Range;

use candle_core::DType;
use serde::{Deserialize, Serialize};

use super::{BatchSizeRampup, Offload, Precision};

/// How layers are grouped for full recompute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecomputeMethod {
    /// Every group of N layers keeps only its input.
    Uniform,
    /// The first N layers of every chunk keep only their input, the rest keep everything.
    Block,
}

/// Which activations are recomputed in backward instead of kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Everything is kept.
    None,
    /// The attention core and the MLP's activation are recomputed.
    Selective,
    /// Whole layers are recomputed.
    Full {
        /// Selects the layers.
        method: RecomputeMethod,
        /// The N of the method.
        num_layers: usize,
    },
}

impl Recompute {
    /// The segments of a chunk of `layers` layers, in order, and whether each keeps only its input
    /// and is recomputed in backward.
    pub fn segments(self, layers: usize) -> Vec<(Range<usize>, bool)> {
        match self {
            Self::Full { method: RecomputeMethod::Uniform, num_layers } => {
                let length = num_layers.max(1);
                (0..layers)
                    .step_by(length)
                    .map(|at| (at..(at + length).min(layers), true))
                    .collect()
            }
            Self::Full { method: RecomputeMethod::Block, num_layers } => {
                (0..layers).map(|at| (at..at + 1, at < num_layers)).collect()
            }
            Self::None | Self::Selective => vec![(0..layers, false)],
        }
    }

    /// How many segments of a chunk of `layers` layers keep only their input.
    pub fn num_inputs(self, layers: usize) -> usize {
        self.segments(layers).iter().filter(|(_, again)| *again).count()
    }
}

/// Batch and length of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingConfig {
    /// MBS: samples per forward pass of one replica.
    pub micro_batch_size: usize,
    /// GBS: samples per step over all replicas, after any ramp-up.
    pub global_batch_size: usize,
    /// How the batch grows until then.
    #[serde(default)]
    pub rampup: Option<BatchSizeRampup>,
    /// Steps of the whole run.
    pub train_iters: u64,
    /// Samples of the whole run, if its length was given in samples. A resumed run with another
    /// global batch size runs the remaining samples.
    #[serde(default)]
    pub train_samples: Option<u64>,
    /// Save and stop after the first step that is a multiple of this.
    pub exit_interval: Option<u64>,
    /// The run ends with an error after this many steps in a row with a loss or gradient that is
    /// not finite; 0: never.
    #[serde(default)]
    pub max_nonfinite_steps: u64,
    /// Save and stop after the first step that ends this many minutes or more after the program's
    /// start.
    #[serde(default)]
    pub exit_duration_in_mins: Option<f64>,
    /// Steps, from 1, with samples to skip: nothing is computed or updated.
    #[serde(default)]
    pub iterations_to_skip: Vec<u64>,
    /// Only evaluate, without training steps.
    #[serde(default)]
    pub skip_train: bool,
    /// Seed of every random number of the run.
    pub seed: u64,
    /// Trades computation for memory.
    pub recompute: Recompute,
    /// Full recompute: the saved inputs are cut over tp, and gathered in backward.
    #[serde(default)]
    pub distribute_saved_activations: bool,
    /// Full recompute: where the saved inputs are kept until backward.
    #[serde(default)]
    pub activation_offload: Offload,
    /// Dtype of weights and activations.
    pub precision: Precision,
    /// Gradients are summed over dp with bf16 messages (each sum in fp32, rounded once) instead of
    /// fp32.
    pub grad_reduce_in_bf16: bool,
    /// The same with fp16 messages.
    #[serde(default)]
    pub grad_reduce_in_fp16: bool,
    /// Forward and backward of a microbatch are recorded as a CUDA graph, which is launched instead
    /// of single kernels.
    #[serde(default)]
    pub enable_cuda_graph: bool,
}

impl TrainingConfig {
    /// Dtype of messages that carry gradients over dp, if it is not that of the sums.
    pub fn grad_reduce_dtype(&self) -> Option<DType> {
        match (self.grad_reduce_in_bf16, self.grad_reduce_in_fp16) {
            (true, _) => Some(DType::BF16),
            (false, true) => Some(DType::F16),
            (false, false) => None,
        }
    }

    /// Samples that the whole run reads.
    pub fn samples(&self) -> u64 {
        self.train_samples
            .unwrap_or_else(|| self.train_iters.saturating_mul(self.global_batch_size as u64))
    }
}

/// One sample per step, a hundred steps, in fp32.
impl Default for TrainingConfig {
    fn default() -> Self {
        Self {
            micro_batch_size: 1,
            global_batch_size: 1,
            rampup: None,
            train_iters: 100,
            train_samples: None,
            exit_interval: None,
            max_nonfinite_steps: 10,
            exit_duration_in_mins: None,
            iterations_to_skip: Vec::new(),
            skip_train: false,
            seed: 1234,
            recompute: Recompute::None,
            distribute_saved_activations: false,
            activation_offload: Offload::None,
            precision: Precision::Fp32,
            grad_reduce_in_bf16: false,
            grad_reduce_in_fp16: false,
            enable_cuda_graph: false,
        }
    }
}
