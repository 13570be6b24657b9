//! Flags of Megatron-LM's and DeepSpeed's that have another name here, need none, or have nothing here that does the same: what to do instead.

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Names without dashes, and what is to be done. docs/migrating.md tells the same.
const OTHER_NAMES: [(&[&str], &str); 20] = [
    (
        &["tokenizer-type", "tokenizer-model", "vocab-file", "merge-file"],
        "use --tokenizer FILE, a Hugging Face tokenizer.json (no SentencePiece .model), byte, or train:VOCAB",
    ),
    (&["data-cache-path"], "use --cache-dir"),
    (&["train-data-path", "valid-data-path", "test-data-path"], "use --data-path and --split"),
    (&["ddp-bucket-size"], "use --bucket-size"),
    (&["recompute-activations", "checkpoint-activations"], "use --recompute-granularity selective"),
    (&["use-rotary-position-embeddings"], "use --position-embedding-type rope"),
    (&["cuda-graph-impl", "external-cuda-graph"], "use --enable-cuda-graph"),
    (&["no-data-sharding"], "use --dataloader-type cyclic"),
    (&["save-total-limit"], "use --most-recent-k"),
    (&["wandb-project", "wandb-exp-name"], "use --metrics FILE, which gets JSON lines, or --tensorboard-dir"),
    (
        &["tensorboard-queue-size", "log-batch-size-to-tensorboard"],
        "leave it out: the batch size is among the curves, which follow the run within a second",
    ),
    (
        &["no-log-loss-scale-to-tensorboard", "no-log-learnig-rate-to-tensorboard"],
        "leave it out: the learning rate is among the curves, and in fp16 the loss scale",
    ),
    (&["log-world-size-to-tensorboard", "log-params-norm", "log-num-zeros-in-grad"], "this is not there"),
    (
        &[
            "use-flash-attn",
            "transformer-impl",
            "use-mcore-models",
            "accumulate-allreduce-grads-in-fp32",
            "ckpt-format",
            "num-workers",
            "log-throughput",
            "calculate-per-token-loss",
            "use-legacy-models",
            "attention-softmax-in-fp32",
        ],
        "leave it out: it is so here, or there is no choice",
    ),
    (
        &["deepspeed", "deepspeed-config", "zero-stage"],
        "DeepSpeed's settings have flags here, --use-distributed-optimizer for ZeRO-1",
    ),
    (
        &["cp-comm-type", "hierarchical-context-parallel-sizes"],
        "leave it out: context parallelism exchanges tokens for heads by all-to-all, which is Megatron's a2a",
    ),
    (&["num-experts", "expert-model-parallel-size", "moe-router-topk"], "mixtures of experts are not there"),
    (&["fp8-format", "fp8-recipe"], "FP8 is not there; use --bf16"),
    (
        &["no-load-rng", "no-save-rng"],
        "leave it out: random numbers are made of the seed and the step, and have no state",
    ),
    (&["no-save-optim"], "this is not there"),
];

/// The same of DeepSpeed's runner and torchrun, for `megatron launch`.
const OTHER_LAUNCHERS: [(&[&str], &str); 10] = [
    (&["num-gpus", "num-accelerators"], "use --nproc-per-node, or --include with a --hostfile"),
    (&["num-nodes"], "use --include with the hosts of the --hostfile to take, or --nnodes"),
    (
        &["launcher"],
        "leave it out: a --hostfile's ranks are started over ssh. Slurm and MPI start `megatron pretrain` itself: `srun megatron pretrain …`",
    ),
    (&["launcher-args"], "use --ssh-args"),
    (&["no-ssh"], "start `megatron launch --nnodes N --node-rank I --master-addr HOST` on every machine"),
    (
        &["no-ssh-check", "force-multi", "no-python", "no-local-rank"],
        "leave it out: it is so here, or there is no choice",
    ),
    (&["module"], "put the whole command after `--`: -- python -m MODULE"),
    (&["rdzv-backend", "rdzv-endpoint", "rdzv-id", "standalone"], "use --master-addr and --master-port"),
    (
        &["elastic-training", "min-elastic-nodes", "max-elastic-nodes"],
        "the number of machines is fixed; --max-restarts starts ranks again",
    ),
    (&["bind-cores-to-rank", "bind-core-list", "enable-each-rank-log", "save-pid", "autotuning"], "this is not there"),
];

/// What to do instead of a flag of another launcher.
pub fn instead_of_launchers(name: &str) -> Option<&'static str> {
    find(&OTHER_LAUNCHERS, &bare(name))
}

/// A name with dashes inside, and without a value.
fn bare(name: &str) -> String {
    let name = name.trim_start_matches('-').replace('_', "-");
    name.split('=').next().unwrap_or_default().to_string()
}

fn find(table: &[(&[&str], &'static str)], name: &str) -> Option<&'static str> {
    table.iter().find(|(names, _)| names.contains(&name)).map(|(_, instead)| *instead)
}

/// What to do instead of a flag, or key of a run file, that is not there.
pub fn instead_of(name: &str) -> Option<&'static str> {
    let name = bare(name);
    if name.starts_with("no-") && name.ends_with("-fusion") {
        return Some("leave it out: kernels are fused where they can be");
    }
    find(&OTHER_NAMES, &name)
}

/// `error` with what to do instead, where it is about a flag that `instead_of` knows.
pub fn explain(mut error: clap::Error, instead_of: fn(&str) -> Option<&'static str>) -> clap::Error {
    let unknown = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(name)) if error.kind() == ErrorKind::UnknownArgument => name,
        _ => return error,
    };
    let Some(instead) = instead_of(unknown) else { return error };
    let tip = StyledStr::from(format!("{instead} (docs/migrating.md)"));
    for misleading in [ContextKind::SuggestedArg, ContextKind::SuggestedValue, ContextKind::TrailingArg] {
        error.remove(misleading);
    }
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    error
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;
    use crate::cli::flags::sections;

    #[test]
    fn no_flag_of_ours_is_among_them() {
        for (_, args) in sections() {
            for arg in args {
                let name = arg.get_id().as_str();
                assert_eq!(instead_of(name), None, "{name}");
            }
        }
    }

    /// In docs/migrating.md's first column; `--no-…-fusion` and values aside.
    #[test]
    fn the_documentation_has_no_others() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/migrating.md");
        let text = std::fs::read_to_string(path).unwrap();
        let flags_of = |title: &str| -> Vec<String> {
            let table = text.split("## ").find(|part| part.starts_with(title)).unwrap();
            let lines = table.lines().filter(|line| line.starts_with("| `--"));
            let names = lines.flat_map(|line| line.split('|').nth(1).unwrap().split('`').skip(1).step_by(2));
            names.filter(|name| !name.contains(['…', ' '])).map(str::to_string).collect()
        };
        let flags = flags_of("Flags of other names");
        assert!(flags.len() > 15, "{flags:?}");
        for flag in flags {
            assert!(instead_of(&flag).is_some(), "{flag}");
        }
        let launch = Cli::command().find_subcommand("launch").unwrap().clone();
        let known = |flag: &str| launch.get_arguments().any(|arg| arg.get_long() == Some(&bare(flag)));
        let flags = flags_of("Launchers");
        for flag in &flags {
            assert!(instead_of_launchers(flag).is_some() != known(flag), "{flag}");
        }
        for (names, _) in OTHER_LAUNCHERS {
            let told = |name: &&str| flags.iter().any(|flag| bare(flag) == **name);
            assert!(names.iter().all(told), "{names:?} are not in the documentation");
        }
    }

    #[test]
    fn underscores_and_values_are_no_matter() {
        assert!(instead_of("--use_flash_attn").is_some() && instead_of("--num-experts=8").is_some());
        assert!(instead_of("no-masked-softmax-fusion").is_some());
        assert_eq!(instead_of("--banana"), None);
    }
}
