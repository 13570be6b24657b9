//! `[training]`: batch, length, seed, recompute, precision.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{BatchSizeRampup, Precision};

/// How layers are grouped for full recompute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecomputeMethod {
    /// Every group of N layers keeps only its input.
    Uniform,
    /// The first N layers of every chunk keep only their input, the rest keep everything.
    Block,
}

/// Which activations are computed again in backward rather than kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Everything is kept.
    None,
    /// The attention core and the MLP's activation are computed again.
    Selective,
    /// Whole layers are computed again.
    Full {
        /// Which layers.
        method: RecomputeMethod,
        /// The N of the method.
        num_layers: usize,
    },
}

impl Recompute {
    /// The segments of a chunk of `layers` layers, in order, and whether each keeps its input alone
    /// and is computed again in backward.
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
}

/// Batch and length of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingConfig {
    /// MBS: samples of one forward pass of one replica.
    pub micro_batch_size: usize,
    /// GBS: samples of one step over all replicas, once a ramp-up is over.
    pub global_batch_size: usize,
    /// How it grows until then.
    #[serde(default)]
    pub rampup: Option<BatchSizeRampup>,
    /// Steps of the whole run.
    pub train_iters: u64,
    /// Samples of the whole run, where its length was given so: a run that goes on with another
    /// global batch makes the steps that are left of them.
    #[serde(default)]
    pub train_samples: Option<u64>,
    /// Stop after the step that is a multiple of this, after saving.
    pub exit_interval: Option<u64>,
    /// The run ends with an error after so many steps in a row whose loss or gradient is not
    /// finite; 0: it goes on.
    #[serde(default)]
    pub max_nonfinite_steps: u64,
    /// Stop after the step in which so many minutes since the program's start have passed, after
    /// saving.
    #[serde(default)]
    pub exit_duration_in_mins: Option<f64>,
    /// Steps, from 1, whose samples are passed over: nothing is computed and nothing updated.
    #[serde(default)]
    pub iterations_to_skip: Vec<u64>,
    /// Evaluate, and make no step.
    #[serde(default)]
    pub skip_train: bool,
    /// Every random number of the run is a function of this.
    pub seed: u64,
    /// Less memory for more computation.
    pub recompute: Recompute,
    /// Of weights and activations.
    pub precision: Precision,
    /// Gradients are summed over dp in messages of bf16 (each sum in fp32, rounded once) rather
    /// than of fp32.
    pub grad_reduce_in_bf16: bool,
    /// Forward and backward of a microbatch are recorded as a CUDA graph, which is launched instead
    /// of their kernels.
    #[serde(default)]
    pub enable_cuda_graph: bool,
}

impl TrainingConfig {
    /// Samples that the whole run reads.
    pub fn samples(&self) -> u64 {
        self.train_samples
            .unwrap_or_else(|| self.train_iters.saturating_mul(self.global_batch_size as u64))
    }
}

/// One sample a step, a hundred steps, in fp32.
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
            precision: Precision::Fp32,
            grad_reduce_in_bf16: false,
            enable_cuda_graph: false,
        }
    }
}
