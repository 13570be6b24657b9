//! Memory of this process.

use candle_core::{DType, Device};

use crate::config::{PositionEmbedding, RunConfig};
use crate::{Error, Result};

/// Largest resident set so far, in bytes (`VmHWM` of Linux's `/proc/self/status`); 0 where the system does not tell.
pub fn peak_memory() -> u64 {
    bytes("/proc/self/status", "VmHWM:")
}

/// The largest amounts of memory of a rank so far, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    /// Of its GPU, what its tensors held; of the host's, where it computes there, its resident set.
    pub allocated: u64,
    /// Of its GPU, what the process had taken for tensors; none on the CPU.
    pub reserved: Option<u64>,
}

/// The largest amounts so far of a rank that computes on `device`.
pub fn peak_memory_of(device: &Device) -> Peak {
    match kernels::device::memory(device) {
        Some(memory) => Peak { allocated: memory.peak_used, reserved: Some(memory.peak_reserved) },
        None => Peak { allocated: peak_memory(), reserved: None },
    }
}

/// One line on the largest memory of every rank, in bytes, `what` it is of; of many ranks only the extremes.
pub fn describe_memory(what: &str, by_rank: &[u64]) -> String {
    const MOST_RANKS: usize = 16;
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30));
    let of = |rank: usize| format!("{} on rank {rank}", gib(by_rank[rank]));
    let ranks = 0..by_rank.len();
    match (ranks.clone().max_by_key(|&r| by_rank[r]), ranks.clone().min_by_key(|&r| by_rank[r])) {
        (Some(largest), Some(least)) if by_rank.len() > MOST_RANKS => {
            format!("peak {what} of {} ranks: from {} to {}", by_rank.len(), of(least), of(largest))
        }
        _ => format!("peak {what}: {}", ranks.map(of).collect::<Vec<_>>().join(", ")),
    }
}

/// The value of a line such as `VmHWM:    1234 kB`; 0 if there is none.
fn bytes(file: &str, key: &str) -> u64 {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let kib = line.and_then(|rest| rest.trim().strip_suffix("kB")).and_then(|kib| kib.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Refuses models of which one rank's weights and gradients alone exceed the machine's memory, before anything is
/// allocated: the system would otherwise kill the run, or the machine, midway.
///
/// # Errors
/// Naming both numbers.
pub fn require_memory(config: &RunConfig) -> Result<()> {
    let (m, p) = (&config.model, &config.parallel);
    // A lower bound, in floating point because sizes that are wrong by typing overflow integers.
    let [layers, hidden, ffn] = [m.num_layers, m.hidden_size, m.ffn_hidden_size].map(|size| size as f64);
    let [heads, groups, head_dim] = [m.num_attention_heads, m.num_query_groups, m.head_dim].map(|size| size as f64);
    let positions = match m.position_embedding {
        PositionEmbedding::LearnedAbsolute => m.max_position_embeddings as f64,
        _ => 0.0,
    };
    let attention = 2.0 * (heads + groups) * head_dim * hidden;
    let multiple = m.make_vocab_size_divisible_by as f64 * p.tensor_model_parallel_size as f64;
    let vocab = (m.vocab_size as f64 / multiple).ceil() * multiple;
    let params = layers * (2.0 * hidden * ffn + attention) + vocab * hidden;
    let ranks = (p.tensor_model_parallel_size * p.pipeline_model_parallel_size) as f64;
    // Weights, fp32 gradients, and the masters of 16-bit weights (what they lack of fp32, of bf16 ones), which ZeRO-1 cuts over dp and cp.
    let weight = config.training.precision.dtype().size_in_bytes() as f64;
    let master = match config.training.precision.dtype() {
        DType::BF16 => 2.0,
        DType::F16 => 4.0,
        _ => 0.0,
    };
    let (dp, cp) = (p.data_parallel_size as f64, p.context_parallel_size as f64);
    let replicas = if p.use_distributed_optimizer { dp * cp } else { 1.0 };
    // Positions are on every rank of a stage; and what a microbatch's first layer reads is there at once.
    let params = params / ranks + positions * hidden / p.pipeline_model_parallel_size as f64;
    let tokens = config.training.micro_batch_size as f64 * m.seq_length as f64 / cp;
    let activations =
        tokens * hidden * weight / if p.sequence_parallel { p.tensor_model_parallel_size as f64 } else { 1.0 };
    let needed = params * (weight + 4.0 + master / replicas) + activations;
    let there = bytes("/proc/meminfo", "MemTotal:") as f64;
    if there > 0.0 && needed > there {
        let gib = |bytes: f64| bytes / f64::from(1 << 30);
        return Err(Error::config(format!(
            "num_layers = {}, hidden_size = {}, ffn_hidden_size = {}, {} heads of kv_channels = {}, a vocabulary of {vocab} with its \
             padding and max_position_embeddings = {} make weights and gradients, with a microbatch of {} · {} tokens, of at least \
             {:.1} GiB per rank (tensor_model_parallel_size = {} · context_parallel_size = {cp} · pipeline_model_parallel_size = {}), and this machine \
             has {:.1} GiB of memory; make the model or the microbatch smaller, or cut the model over more machines",
            m.num_layers,
            m.hidden_size,
            m.ffn_hidden_size,
            m.num_attention_heads,
            m.head_dim,
            m.max_position_embeddings,
            config.training.micro_batch_size,
            m.seq_length,
            gib(needed),
            p.tensor_model_parallel_size,
            p.pipeline_model_parallel_size,
            gib(there)
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::describe_memory;

    #[test]
    fn the_memory_of_every_rank_is_named_and_of_many_the_extremes() {
        let gib = 1u64 << 30;
        assert_eq!(
            describe_memory("memory", &[gib, 3 * gib / 2]),
            "peak memory: 1.00 GiB on rank 0, 1.50 GiB on rank 1"
        );
        let many: Vec<u64> = (1..=20).map(|n| n * gib).collect();
        assert_eq!(
            describe_memory("GPU memory", &many),
            "peak GPU memory of 20 ranks: from 1.00 GiB on rank 0 to 20.00 GiB on rank 19"
        );
    }
}
