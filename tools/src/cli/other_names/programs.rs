//! Flags and keys of DeepSpeed, Hugging Face's Trainer and other programs, with the equivalent flag
//! here.

use super::{Entry, refuse};

/// DeepSpeed's.
pub const DEEPSPEED: &[Entry] = &[
    refuse("use --zero-stage", "zero-optimization stage"),
    refuse("use --overlap-grad-reduce", "overlap-comm"),
    refuse("use --bucket-size", "reduce-bucket-size allgather-bucket-size"),
    refuse(
        "leave it out: layers are gathered whole",
        "stage3-* contiguous-gradients round-robin-gradients",
    ),
    refuse("use --adam-beta1 and --adam-beta2", "betas"),
    refuse("use --offload-optimizer cpu", "cpu-optimizer"),
    refuse("use --offload-param cpu", "cpu-offload-params remote-device"),
    refuse("use --micro-batch-size", "train-micro-batch-size-per-gpu micro-batch-size-per-gpu"),
    refuse("use --global-batch-size", "train-batch-size"),
    refuse("use --gradient-accumulation-steps", "num-microbatches"),
    refuse("use --clip-grad", "gradient-clipping max-grad-norm"),
    refuse("use --initial-loss-scale 2ⁿ", "initial-scale-power"),
    refuse("use --log-interval", "steps-per-print logging-steps"),
    refuse(
        "leave it out: saved activations are contiguous, and no layer waits for others",
        "contiguous-memory-optimization contiguous-checkpointing contigious-checkpointing \
         synchronize-checkpoint-boundary synchronize-each-layer number-checkpoints num-checkpoints \
         profile-backward",
    ),
    refuse("use --pipeline-partition, e.g. type:transformer", "partition-method"),
    refuse(
        "use --recompute-granularity",
        "deepspeed-activation-checkpointing activation-checkpointing \
        gradient-checkpointing",
    ),
];

/// Short names of a layout's sizes.
pub const SIZES: &[Entry] = &[
    refuse(
        "use --tensor-model-parallel-size",
        "tp-size tp tensor-parallel-size tensor-parallel tensor-parallel-degree",
    ),
    refuse(
        "use --pipeline-model-parallel-size",
        "pp-size pp pipe-parallel-size pipeline-parallel-size \
        pipeline-parallel-degree",
    ),
    refuse("use --context-parallel-size", "cp-size cp context-parallel-degree"),
    refuse("use --data-parallel-size", "dp-size dp data-parallel-degree"),
];

/// Those of Hugging Face's Trainer and its example scripts, of Accelerate and torchrun.
pub const HUGGING_FACE: &[Entry] = &[
    refuse(
        "use --train-iters or --train-samples",
        "num-train-epochs max-steps num-epochs epochs training-steps",
    ),
    refuse("use --micro-batch-size", "per-device-train-batch-size"),
    refuse(
        "evaluation uses the batch size of training: --micro-batch-size and --eval-iters",
        "per-device-eval-batch-size",
    ),
    refuse("use --lr", "learning-rate"),
    refuse("use --lr-decay-style", "lr-scheduler-type"),
    refuse(
        "use --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction",
        "warmup-steps warmup-ratio",
    ),
    refuse("use --adam-eps", "adam-epsilon"),
    refuse("use --optimizer", "optim"),
    refuse("use --save", "output-dir save-dir"),
    refuse("use --save-interval", "save-steps save-strategy"),
    refuse("use --most-recent-k", "save-total-limit"),
    refuse("use --eval-interval", "eval-steps eval-strategy evaluation-strategy"),
    refuse("use --load", "resume-from-checkpoint"),
    refuse("use --init-from-hf DIR", "model-name-or-path config-name"),
    refuse("use --tokenizer", "tokenizer-name tokenizer-path tokenizer-name-or-path"),
    refuse("use --data-path", "train-file dataset-name dataset train-dataset dataset-path"),
    refuse("use --seq-length", "block-size max-seq-length max-length sequence-length seq-len"),
    refuse("use --bf16 or --fp16", "torch-dtype dtype mixed-precision"),
    refuse("use --tensorboard-dir or --metrics", "report-to logging-dir"),
    refuse(
        "use --rdzv, or the launcher's MASTER_ADDR and MASTER_PORT",
        "master-addr master-port dist-url",
    ),
    refuse(
        "use it with `megatron launch`, or start replicas with `--data-parallel-size`",
        "nproc-per-node nnodes node-rank",
    ),
];

/// Flags of other text generators, for `megatron generate`: Megatron-LM's, Hugging Face's, vLLM's
/// and llama.cpp's. Names without dashes, and the equivalent here.
const GENERATORS: [(&[&str], &str); 6] = [
    (
        &[
            "max-new-tokens",
            "num-tokens-to-generate",
            "tokens-to-generate",
            "max-length",
            "max-tokens",
            "num-new-tokens",
            "out-seq-length",
            "n-predict",
        ],
        "use --num-tokens",
    ),
    (&["prompts", "text", "input-text"], "use --prompt, once for each text"),
    (&["model", "model-name-or-path", "model-path", "checkpoint", "ckpt"], "use --load"),
    (
        &["greedy", "do-sample", "no-sample"],
        "--temperature 0 takes the likeliest token; above 0, tokens are sampled",
    ),
    (&["tp-size", "tp", "tensor-parallel-size"], "use --tensor-model-parallel-size"),
    (&["random-seed"], "use --seed"),
];

/// The advice for a flag of another text generator, by its name with dashes.
pub fn instead_of_generators(name: &str) -> Option<&'static str> {
    GENERATORS.iter().find(|(names, _)| names.contains(&name)).map(|(_, instead)| *instead)
}
