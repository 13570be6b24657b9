//! The memory of this process, and whether the machine has enough memory for a run.

use std::ops::Range;

use candle_core::Device;

use super::footprint::{Footprint, advice, of_ranks};
use super::memory_limit::{MemoryLimit, kib, memory_limit};
use super::model::ModelBuilder;
use crate::config::{Offload, RunConfig};
use crate::{Error, Result};

/// Largest resident set so far, in bytes (`VmHWM` of Linux's `/proc/self/status`); 0 if the system
/// does not report it.
pub fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    kib(&status, "VmHWM:").unwrap_or(0)
}

/// The peak memory of a rank so far, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    /// On a GPU, the memory that tensors held; on the CPU, the resident set.
    pub allocated: u64,
    /// On a GPU, the memory that the process reserved for tensors; `None` on the CPU.
    pub reserved: Option<u64>,
}

/// The peak memory so far of a rank that computes on `device`.
pub fn peak_memory_of(device: &Device) -> Peak {
    match kernels::tensor::device::memory(device) {
        Some(memory) => Peak { allocated: memory.peak_used, reserved: Some(memory.peak_reserved) },
        None => Peak { allocated: peak_memory(), reserved: None },
    }
}

/// One line with the peak memory of every rank, in bytes, labelled `what`. With many ranks it gives
/// only the smallest and the largest.
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

/// The ranks of a run that are on one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RanksHere {
    /// The ranks with known numbers.
    pub ranks: Range<usize>,
    /// Number of further ranks on this machine, whose numbers are not known.
    pub others: usize,
    /// Whether they compute on GPUs. Their memory is not known at this point.
    pub on_gpus: bool,
}

/// Upper limit of a plausible share of a model on one GPU. A larger share means a mistyped size.
const LARGEST_ON_GPU: f64 = (1u64 << 44) as f64;

/// Refuses a run that needs more memory on this machine than the machine has. The check runs before
/// anything is allocated, because otherwise the system would kill the run, or the machine would
/// fail, midway. `model` is called only after the sizes are known to be plausible.
///
/// # Errors
/// If memory does not suffice: the error lists the need by use, and the flags that would reduce it
/// for this run. Also if the model cannot be split by the layout.
pub fn require_memory<M: ModelBuilder>(
    config: &RunConfig,
    here: &RanksHere,
    model: impl FnOnce() -> Result<M>,
) -> Result<()> {
    let limit = match memory_limit() {
        _ if here.on_gpus => {
            MemoryLimit { bytes: LARGEST_ON_GPU as u64, by: "more than a GPU's memory" }
        }
        Some(limit) => limit,
        None => return Ok(()),
    };
    let rough = Footprint::rough(config);
    // A single rank exceeds the limit by far. With such sizes even the list of parameters may be
    // too large.
    if rough.total() > 64.0 * limit.bytes as f64 {
        return Err(too_little(config, &[rough], limit));
    }
    let model = model()?;
    let mut stages = Footprint::of_stages(config, &model)?;
    if here.on_gpus {
        // The GPU's own allocator reports a lack of GPU memory. This check covers what is offloaded
        // to host memory.
        let offloads = [
            &config.parallel.param_offload,
            &config.optimizer.offload,
            &config.training.activation_offload,
        ];
        let [weights, optimizer, inputs] =
            offloads.map(|offload| f64::from(u8::from(*offload == Offload::Cpu)));
        let Some(limit) = memory_limit().filter(|_| weights + optimizer + inputs > 0.0) else {
            return Ok(());
        };
        let saved = Footprint::saved_inputs(config, &model)?;
        stages.iter_mut().zip(saved).for_each(|(stage, saved)| {
            *stage = Footprint {
                weights: weights * stage.weights,
                masters: optimizer * stage.masters,
                moments: optimizer * stage.moments,
                activations: inputs * saved,
                ..Footprint::default()
            }
        });
        return require(config, here, &stages, limit);
    }
    require(config, here, &stages, limit)
}

fn require(
    config: &RunConfig,
    here: &RanksHere,
    stages: &[Footprint],
    limit: MemoryLimit,
) -> Result<()> {
    let mut ranks = of_ranks(config, stages, here.ranks.clone())?;
    let least =
        stages.iter().copied().min_by(|a, b| a.total().total_cmp(&b.total())).unwrap_or_default();
    ranks.extend(std::iter::repeat_n(least, here.others));
    let needed: f64 = ranks.iter().map(Footprint::total).sum();
    if needed > limit.bytes as f64 { Err(too_little(config, &ranks, limit)) } else { Ok(()) }
}

/// The error with a table of the need, and advice.
fn too_little(config: &RunConfig, ranks: &[Footprint], limit: MemoryLimit) -> Error {
    let (m, p) = (&config.model, &config.parallel);
    let gib = |bytes: f64| format!("{:.2}", bytes / f64::from(1 << 30));
    let all = ranks.iter().fold(Footprint::default(), |sum, rank| sum + *rank);
    let largest =
        ranks.iter().copied().max_by(|a, b| a.total().total_cmp(&b.total())).unwrap_or_default();
    let who =
        if ranks.len() == 1 { "one rank".to_string() } else { format!("{} ranks", ranks.len()) };
    let mut table = format!("  {:<12}{:>16}{:>16}\n", "GiB", "largest rank", who);
    let lines = largest.parts().into_iter().zip(all.parts());
    let lines = lines.map(|((what, largest), (_, all))| (what, largest, all));
    for (what, largest, all) in lines.chain([("in all", largest.total(), all.total())]) {
        table.push_str(&format!("  {what:<12}{:>16}{:>16}\n", gib(largest), gib(all)));
    }
    Error::config(format!(
        "num_layers = {}, hidden_size = {}, ffn_hidden_size = {}, {} heads of kv_channels = {}, a \
         vocabulary of {}, max_position_embeddings = {} and a microbatch of {} · {} tokens make \
         {who} on this machine (tp {} · cp {} · pp {} · dp {}) need at least {} GiB of memory, but \
         there are {} GiB ({}):\n{table}To reduce memory, use {}",
        m.num_layers,
        m.hidden_size,
        m.ffn_hidden_size,
        m.num_attention_heads,
        m.head_dim,
        m.vocab_size,
        m.max_position_embeddings,
        config.training.micro_batch_size,
        m.seq_length,
        p.tensor_model_parallel_size,
        p.context_parallel_size,
        p.pipeline_model_parallel_size,
        p.data_parallel_size,
        gib(all.total()),
        gib(limit.bytes as f64),
        limit.by,
        advice(config, &all).join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::valid;

    /// Two stages. The second needs twice the memory of the first.
    #[test]
    fn the_ranks_of_this_machine_are_counted_together_each_by_its_stage() {
        let gib = f64::from(1 << 30);
        let of = |weights: f64| Footprint { weights: weights * gib, ..Footprint::default() };
        let (config, stages) = (valid(), [of(1.0), of(2.0)]);
        let fits = |ranks: Range<usize>, others: usize, limit: u64| {
            let here = RanksHere { ranks, others, on_gpus: false };
            require(
                &config,
                &here,
                &stages,
                MemoryLimit { bytes: limit << 30, by: "physical memory" },
            )
            .is_ok()
        };
        // Ranks 0 to 3 are of the first stage, ranks 4 to 7 of the second.
        for (ranks, others, needed) in
            [(0..8, 0, 12), (0..4, 0, 4), (4..8, 0, 8), (3..5, 0, 3), (5..6, 3, 5)]
        {
            assert!(fits(ranks.clone(), others, needed), "{ranks:?}");
            assert!(!fits(ranks.clone(), others, needed - 1), "{ranks:?}");
        }
    }

    #[test]
    fn a_refusal_has_each_part_of_the_largest_rank_and_of_all() {
        let gib = f64::from(1 << 30);
        let (small, large) = (
            Footprint { moments: gib, ..Footprint::default() },
            Footprint { moments: 2.5 * gib, weights: gib, ..Footprint::default() },
        );
        let limit = MemoryLimit { bytes: 2 << 30, by: "the limit of the cgroup" };
        let mut config = valid();
        config.parallel.zero_stage = 0;
        let text = too_little(&config, &[small, large], limit).to_string();
        let words: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        for line in
            [["moments", "2.50", "3.50"], ["weights", "1.00", "1.00"], ["masters", "0.00", "0.00"]]
        {
            assert!(words.iter().any(|words| *words == line), "{line:?} is not in {text}");
        }
        for part in [
            "2 ranks on this machine (tp 2 · cp 1 · pp 2 · dp 2) need at least 4.50 GiB of memory, \
             but there are 2.00 GiB (the limit of the cgroup)",
            "--use-distributed-optimizer",
            "--bf16",
            "--offload-optimizer nvme",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        assert!(!text.contains("recompute"), "{text}");
    }

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
