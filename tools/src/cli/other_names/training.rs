//! Batches, recompute, precision, the optimizer and its schedule.

use super::Takes::{Nothing, One, Several};
use super::{Entry, Given, Verdict, judged, leave_out, on, refuse, unless, with};

pub const TABLE: &[Entry] = &[
    // Batches and evaluation.
    leave_out(Nothing, "the loss is always the mean over tokens", "calculate-per-token-loss"),
    leave_out(
        Nothing,
        "a batch that the replicas do not divide is refused",
        "decrease-batch-size-if-needed",
    ),
    leave_out(
        One,
        "an evaluation's loss is the same in microbatches of any size",
        "eval-micro-batch-size",
    ),
    refuse(
        "a batch that grows by a table is not there: --rampup-batch-size grows it evenly",
        "step-batch-size-schedule phase-transition-iterations",
    ),
    refuse("evaluation in batches of another size is not there", "eval-global-batch-size"),
    refuse(
        "evaluation of --eval-iters batches every --eval-interval steps alone is there",
        "start-eval-at-iter full-validation multiple-validation-sets validation-set-names",
    ),
    refuse("use --check-for-nan-in-loss-and-grad", "check-for-nan-in-loss check-for-nan-in-grad"),
    // Recompute and memory.
    judged(
        Nothing,
        |_| Verdict::Words(vec!["--recompute-granularity=selective".to_string()]),
        "it is --recompute-granularity selective",
        "recompute-activations checkpoint-activations",
    ),
    judged(
        Several,
        recomputed_modules,
        "selective recompute is of attention and activation functions (core_attn), and full recompute of whole layers",
        "recompute-modules",
    ),
    leave_out(
        One,
        "every microbatch is computed again alike",
        "num-microbatches-with-partial-activation-checkpoints",
    ),
    leave_out(
        Nothing,
        "buffers are freed once they are no longer needed",
        "distribute-saved-activations deallocate-pipeline-outputs clone-scatter-output-in-embedding \
         no-clone-scatter-output-in-embedding",
    ),
    leave_out(
        One,
        "buffers are freed once they are no longer needed",
        "empty-unused-memory-level mlp-chunks-for-training",
    ),
    leave_out(
        Nothing,
        "there is no Python, and no garbage collector",
        "manual-gc manual-gc-eval no-manual-gc-eval",
    ),
    leave_out(
        One,
        "there is no Python, and no garbage collector",
        "manual-gc-interval train-sync-interval",
    ),
    leave_out(
        Nothing,
        "--enable-cuda-graph records CUDA graphs",
        "external-cuda-graph cuda-graph-retain-backward-graph cuda-graph-use-single-mempool optimizer-cuda-graph",
    ),
    leave_out(
        One,
        "--enable-cuda-graph records CUDA graphs",
        "cuda-graph-impl cuda-graph-warmup-steps",
    ),
    leave_out(
        Several,
        "--enable-cuda-graph records CUDA graphs",
        "cuda-graph-modules cuda-graph-scope",
    ),
    // Precision.
    leave_out(
        Nothing,
        "sums, losses and gradients are in fp32",
        "accumulate-allreduce-grads-in-fp32 grad-reduce-in-fp32 fp16-lm-cross-entropy \
         disable-bf16-reduced-precision-matmul",
    ),
    leave_out(Nothing, "--bf16 or --fp16 says it", "enable-autocast"),
    leave_out(One, "--bf16 or --fp16 says it", "params-dtype pipeline-dtype autocast-dtype"),
    unless(
        &["fp32", "float32"],
        "master weights, gradients and logits are in fp32",
        "main-grads-dtype main-params-dtype output-logit-dtype",
    ),
    refuse(
        "a residual stream in fp32 beside --bf16 or --fp16 is not there",
        "fp32-residual-connection",
    ),
    // The optimizer.
    leave_out(
        Nothing,
        "--exp-avg-dtype and --exp-avg-sq-dtype say it by themselves",
        "use-precision-aware-optimizer store-param-remainders",
    ),
    on("weight decay that is added to the gradient is not there", "decoupled-weight-decay"),
    refuse("a learning rate of the embedding's own is not there", "decoupled-lr"),
    with(
        "decoupled-lr",
        One,
        "a learning rate of the embedding's own is not there",
        "decoupled-min-lr",
    ),
    leave_out(
        Nothing,
        "--optimizer-cpu-offload keeps all moments in the host's memory, and moves them as it has to",
        "use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params \
         pin-cpu-grads pin-cpu-params",
    ),
    leave_out(
        One,
        "--optimizer-cpu-offload keeps all moments in the host's memory, and moves them as it has to",
        "optimizer-offload-fraction",
    ),
    leave_out(
        Nothing,
        "--use-distributed-optimizer split_points the state by elements",
        "use-layer-wise-distributed-optimizer no-use-layer-wise-param-layout muon-no-split-qkv muon-use-nesterov \
         muon-nesterov muon-split-qkv muon-use-syrk soap-use-kl-shampoo",
    ),
    leave_out(
        One,
        "it is read by optimizers that are not there (--optimizer is adam or sgd)",
        "muon-* adaptive-muon-* soap-* lion-*",
    ),
    refuse("steps are left out for what is not finite alone", "grad-norm-skip-threshold"),
    refuse(
        "weight decay leaves out biases and normalization, nothing else",
        "no-weight-decay-cond-type",
    ),
    refuse(
        "one optimizer and schedule for all parameters is there",
        "dump-param-to-param-group-map",
    ),
    // Names that Megatron-LM itself gave up, and fields that have flags by other names.
    refuse("use --micro-batch-size and --global-batch-size", "batch-size"),
    refuse("use --tensor-model-parallel-size", "model-parallel-size"),
    refuse(
        "use --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction",
        "warmup lr-warmup-steps",
    ),
    refuse("use --lr-decay-iters or --lr-decay-samples", "lr-decay-steps"),
    refuse("use --lr-wsd-decay-iters or --lr-wsd-decay-samples", "wsd-decay-steps"),
    refuse("weight decay that changes lasts as long as the run", "wd-incr-steps"),
    // Checks.
    leave_out(
        Nothing,
        "nothing is computed twice to find faulty machines",
        "test-mode check-for-spiky-loss check-for-large-grads",
    ),
    leave_out(
        One,
        "nothing is computed twice to find faulty machines",
        "rerun-mode error-injection-rate error-injection-type result-rejected-tracker-filename",
    ),
    leave_out(
        One,
        "replicas begin alike and are given the same sums",
        "check-weight-hash-across-dp-replicas-interval",
    ),
];

fn recomputed_modules(given: &Given<'_>) -> Verdict {
    let text = given.values.join(" ");
    let mut modules =
        text.split([' ', ',', '[', ']', '\'', '"']).filter(|module| !module.is_empty());
    let selective = given.line.value("recompute-granularity") == Some("selective");
    match modules.all(|module| module == "core_attn") || !selective {
        true => Verdict::PassedOver,
        false => given.refused(),
    }
}
