//! `[training]`: batch, length, seed, recompute, precision.

use serde::{Deserialize, Serialize};

use super::Precision;

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
    Full { method: RecomputeMethod, num_layers: usize },
}

/// Batch and length of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingConfig {
    /// MBS: samples of one forward pass of one replica.
    pub micro_batch_size: usize,
    /// GBS: samples of one step over all replicas.
    pub global_batch_size: usize,
    /// Steps of the whole run.
    pub train_iters: u64,
    /// Stop after the step that is a multiple of this, after saving.
    pub exit_interval: Option<u64>,
    /// Every random number of the run is a function of this.
    pub seed: u64,
    pub recompute: Recompute,
    pub precision: Precision,
    /// Gradients are summed over dp in messages of bf16 (each sum in fp32, rounded once) rather than of fp32.
    pub grad_reduce_in_bf16: bool,
    /// Forward and backward of a microbatch are recorded as a CUDA graph, which is launched instead of their kernels.
    #[serde(default)]
    pub enable_cuda_graph: bool,
}
