//! Explains errors about exhausted device memory.

use candle_core::Device;
use kernels::tensor::device::{Memory, memory};

use super::footprint::distributed_inputs;
use crate::Error;
use crate::config::{MomentDtype, Offload, OptimizerKind, Precision, Recompute, RunConfig};

/// The memory that a rank keeps from step to step: uses and their bytes.
pub(super) type MemoryByUse = Vec<(&'static str, usize)>;

/// If `error` reports exhausted device memory, adds what holds the rest of it and which flags
/// reduce the need. Returns other errors unchanged. `kept` is empty while the rank is being built.
pub(super) fn explain(
    error: Error,
    config: &RunConfig,
    device: &Device,
    kept: &MemoryByUse,
) -> Error {
    let (known, told) = match &error {
        Error::Kernel(kernels::Error::OutOfMemory { memory, .. }) => (*memory, memory.is_some()),
        Error::Kernel(error) if error.is_out_of_memory() => (None, false),
        Error::Candle(error) if kernels::tensor::error::names_out_of_memory(error) => (None, false),
        _ => return error,
    };
    let mut text = error.to_string();
    let known = known.or_else(|| memory(device));
    if let Some(memory) = known.filter(|_| !told) {
        text.push_str(&format!(": {memory}"));
    }
    if !kept.is_empty() {
        text.push_str(&format!(". {}", holders(kept, known)));
    }
    text.push_str(&format!(
        ". To reduce memory, use {}",
        advice(config, kept.is_empty()).join(", ")
    ));
    Error::OutOfMemory(text)
}

fn gib(bytes: usize) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

/// Describes the uses of a rank's memory.
fn holders(kept: &MemoryByUse, memory: Option<Memory>) -> String {
    let mut parts: Vec<String> = kept
        .iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(what, bytes)| format!("{what} {}", gib(*bytes)))
        .collect();
    if let Some(memory) = memory {
        let rest = (memory.used as usize).saturating_sub(kept.iter().map(|(_, bytes)| bytes).sum());
        parts.push(format!("activations and results of operations {}", gib(rest)));
    }
    format!("Held by: {}", parts.join(", "))
}

/// Flags that reduce a rank's memory, cheapest first. While the rank is being built (`states`),
/// there are no activations yet.
fn advice(config: &RunConfig, states: bool) -> Vec<String> {
    let (p, t) = (&config.parallel, &config.training);
    let mut flags = Vec::new();
    let (dp, cp) = (p.data_parallel_size, p.context_parallel_size);
    if dp * cp > 1 && p.zero_stage == 0 {
        let over = if cp > 1 { format!("dp · cp = {dp} · {cp}") } else { format!("dp = {dp}") };
        flags.push(format!("--use-distributed-optimizer (shards the optimizer state over {over})"));
    }
    if dp * cp > 1 && p.zero_stage < 3 {
        flags.push("--zero-stage 3 (cuts weights and gradients over them, too)".into());
    }
    if !states {
        if p.tensor_model_parallel_size > 1 && !p.sequence_parallel {
            let tp = p.tensor_model_parallel_size;
            flags.push(format!(
                "--sequence-parallel (splits the activations between layers over tp = {tp})"
            ));
        }
        if t.micro_batch_size > 1 {
            flags.push(format!("a smaller --micro-batch-size (now {})", t.micro_batch_size));
        }
        match t.recompute {
            Recompute::None => flags.push("--recompute-granularity selective or full".into()),
            Recompute::Selective => {
                flags.push("--recompute-granularity full (now selective)".into())
            }
            Recompute::Full { .. } => {
                flags.extend(distributed_inputs(config));
                if t.activation_offload == Offload::None && !t.enable_cuda_graph {
                    flags.push(
                        "--offload-activations cpu (saved activations in host memory; longer steps)"
                            .into(),
                    );
                }
            }
        }
        let heads = config.model.num_query_groups / p.tensor_model_parallel_size.max(1);
        // The next larger layout that divides evenly has twice as many ranks.
        let divide = heads.is_multiple_of(2 * cp) && config.model.seq_length.is_multiple_of(2 * cp);
        if divide && !t.enable_cuda_graph {
            flags.push(format!(
                "a larger --context-parallel-size (now {cp}; splits sequences over more GPUs)"
            ));
        }
    }
    if matches!(t.precision, Precision::Fp32) {
        flags.push("--bf16".into());
    }
    let o = &config.optimizer;
    if o.kind == OptimizerKind::Adam
        && [o.exp_avg_dtype, o.exp_avg_sq_dtype].contains(&MomentDtype::Fp32)
    {
        flags.push("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16".into());
    }
    if o.offload == Offload::None {
        flags.push("--offload-optimizer cpu (moments in host memory; longer steps)".into());
    }
    flags.push(format!(
        "a larger --tensor-model-parallel-size (now {}) or --pipeline-model-parallel-size (now {}) on more GPUs",
        p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    ));
    flags
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::valid;

    fn exhausted() -> Error {
        let memory = Memory {
            used: 5 << 30,
            reserved: 6 << 30,
            free: 1 << 29,
            total: 8 << 30,
            ..Memory::default()
        };
        Error::Kernel(kernels::Error::OutOfMemory {
            op: "linear",
            bytes: 1 << 30,
            shape: vec![4096, 65536],
            dtype: candle_core::DType::F32,
            memory: Some(memory),
        })
    }

    #[test]
    fn the_error_says_what_was_wanted_what_holds_the_rest_and_what_helps() {
        let mut config = valid();
        let parallel = &mut config.parallel;
        (parallel.sequence_parallel, parallel.zero_stage) = (false, 0);
        (parallel.tensor_model_parallel_size, config.training.micro_batch_size) = (4, 8);
        let kept = vec![("weights", 1 << 30), ("main gradients", 2 << 30), ("master weights", 0)];
        let text = explain(exhausted(), &config, &Device::Cpu, &kept).to_string();
        for part in [
            "linear: no memory on the GPU for 1073741824 bytes (a tensor [4096, 65536] of F32)",
            "0.50 GiB of 8.00 GiB are free, tensors of this process hold 5.00 GiB, its pool keeps 1.00 GiB more",
            "Held by: weights 1.00 GiB, main gradients 2.00 GiB, activations and results of operations 2.00 GiB",
            "--use-distributed-optimizer (shards the optimizer state over dp = 2)",
            "--sequence-parallel",
            "--micro-batch-size (now 8)",
            "--recompute-granularity selective or full",
            "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
            "--offload-optimizer cpu (moments in host memory",
            "--tensor-model-parallel-size (now 4)",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
    }

    #[test]
    fn flags_that_are_set_or_do_not_apply_are_not_advised() {
        let mut config = valid();
        config.parallel.zero_stage = 3;
        config.training.micro_batch_size = 1;
        config.training.recompute = Recompute::Selective;
        config.training.precision = Precision::Bf16;
        (config.optimizer.exp_avg_dtype, config.optimizer.exp_avg_sq_dtype) =
            (MomentDtype::Bf16, MomentDtype::Bf16);
        config.optimizer.offload = Offload::Cpu;
        let flags = advice(&config, false);
        assert_eq!(flags.len(), 3, "{flags:?}");
        assert!(flags[0].contains("full (now selective)"));
        assert!(flags[1].contains("--context-parallel-size (now 1;"), "{flags:?}");
        config.parallel.context_parallel_size =
            config.model.num_query_groups / config.parallel.tensor_model_parallel_size;
        assert_eq!(advice(&config, false).len(), 2, "there are no more heads to deal");
        config.training.recompute =
            Recompute::Full { method: crate::config::RecomputeMethod::Uniform, num_layers: 1 };
        let flags = advice(&config, false);
        assert!(flags[0].contains("--offload-activations cpu"), "{flags:?}");
        config.parallel.sequence_parallel = false;
        let flags = advice(&config, false);
        assert!(
            flags[1]
                .contains("--distribute-saved-activations (splits saved activations over tp = 2)"),
            "{flags:?}"
        );
        config.training.distribute_saved_activations = true;
        config.training.activation_offload = Offload::Cpu;
        assert_eq!(advice(&config, false).len(), 2, "sequence parallelism, and more GPUs");
        config.parallel.sequence_parallel = true;
        // While the rank is being built, activations take no memory.
        assert_eq!(advice(&config, true).len(), 1);
    }

    #[test]
    fn other_errors_stay_as_they_are() {
        let error = explain(Error::config("x"), &valid(), &Device::Cpu, &Vec::new());
        assert!(matches!(error, Error::Config(text) if text == "x"));
    }
}
