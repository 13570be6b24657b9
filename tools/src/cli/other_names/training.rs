//! Batches, recompute, precision, the optimizer and its schedule.

use super::Takes::{Nothing, One, Several};
use super::{Entry, Given, Verdict, judged, leave_out, on, refuse, unless, with};

pub const TABLE: &[Entry] = &[
    // Batches and evaluation.
    leave_out(Nothing, "the loss is always the mean over tokens", "calculate-per-token-loss"),
    leave_out(
        Nothing,
        "a batch size that the replicas do not divide is refused",
        "decrease-batch-size-if-needed",
    ),
    leave_out(
        One,
        "evaluation loss does not depend on the microbatch size",
        "eval-micro-batch-size",
    ),
    refuse(
        "a batch-size schedule is not supported: --rampup-batch-size increases it evenly",
        "step-batch-size-schedule phase-transition-iterations",
    ),
    refuse("a separate batch size for evaluation is not supported", "eval-global-batch-size"),
    refuse(
        "evaluation is only of --eval-iters batches every --eval-interval steps",
        "start-eval-at-iter full-validation multiple-validation-sets validation-set-names",
    ),
    refuse("use --check-for-nan-in-loss-and-grad", "check-for-nan-in-loss check-for-nan-in-grad"),
    // Recompute and memory.
    judged(
        Nothing,
        |_| Verdict::Words(vec!["--recompute-granularity=selective".to_string()]),
        "use --recompute-granularity selective",
        "recompute-activations checkpoint-activations",
    ),
    judged(
        Nothing,
        |_| Verdict::Words(vec!["--offload-activations=cpu".to_string()]),
        "use --offload-activations cpu",
        "cpu-checkpointing checkpoint-in-cpu",
    ),
    judged(
        Several,
        recomputed_modules,
        "selective recompute covers attention and activation functions (core_attn), full recompute whole layers",
        "recompute-modules",
    ),
    leave_out(
        One,
        "every microbatch is recomputed in the same way",
        "num-microbatches-with-partial-activation-checkpoints",
    ),
    leave_out(
        Nothing,
        "buffers are freed as soon as possible",
        "deallocate-pipeline-outputs clone-scatter-output-in-embedding \
         no-clone-scatter-output-in-embedding",
    ),
    leave_out(
        One,
        "buffers are freed as soon as possible",
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
    leave_out(Nothing, "--bf16 or --fp16 sets it", "enable-autocast"),
    leave_out(One, "--bf16 or --fp16 sets it", "params-dtype pipeline-dtype autocast-dtype"),
    unless(
        &["fp32", "float32"],
        "master weights, gradients and logits are in fp32",
        "main-grads-dtype main-params-dtype output-logit-dtype",
    ),
    refuse(
        "an fp32 residual stream with --bf16 or --fp16 is not supported",
        "fp32-residual-connection",
    ),
    // The optimizer.
    leave_out(
        Nothing,
        "--exp-avg-dtype and --exp-avg-sq-dtype are enough",
        "use-precision-aware-optimizer store-param-remainders",
    ),
    on("weight decay added to the gradient is not supported", "decoupled-weight-decay"),
    refuse("a separate learning rate for the embedding is not supported", "decoupled-lr"),
    with(
        "decoupled-lr",
        One,
        "a separate learning rate for the embedding is not supported",
        "decoupled-min-lr",
    ),
    leave_out(
        Nothing,
        "--offload-optimizer cpu keeps all moments in host memory and transfers them when needed",
        "use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params \
         pin-cpu-grads pin-cpu-params",
    ),
    leave_out(
        One,
        "--offload-optimizer cpu keeps all moments in host memory and transfers them when needed",
        "optimizer-offload-fraction",
    ),
    leave_out(
        Nothing,
        "--use-distributed-optimizer splits the state by elements",
        "use-layer-wise-distributed-optimizer no-use-layer-wise-param-layout muon-no-split-qkv muon-use-nesterov \
         muon-nesterov muon-split-qkv muon-use-syrk soap-use-kl-shampoo",
    ),
    leave_out(
        One,
        "only unsupported optimizers read it (--optimizer is adam or sgd)",
        "muon-* adaptive-muon-* soap-* lion-*",
    ),
    refuse("only steps that are not finite are skipped", "grad-norm-skip-threshold"),
    refuse("weight decay excludes only biases and normalization", "no-weight-decay-cond-type"),
    refuse("all parameters use one optimizer and one schedule", "dump-param-to-param-group-map"),
    // Names that Megatron-LM itself removed, and fields with flags of other names.
    refuse("use --micro-batch-size and --global-batch-size", "batch-size"),
    refuse("use --tensor-model-parallel-size", "model-parallel-size"),
    refuse(
        "use --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction",
        "warmup lr-warmup-steps",
    ),
    refuse("use --lr-decay-iters or --lr-decay-samples", "lr-decay-steps"),
    refuse("use --lr-wsd-decay-iters or --lr-wsd-decay-samples", "wsd-decay-steps"),
    refuse("a weight-decay schedule always lasts the whole run", "wd-incr-steps"),
    // Checks.
    leave_out(
        Nothing,
        "no step is repeated to find faulty machines",
        "test-mode check-for-spiky-loss check-for-large-grads",
    ),
    leave_out(
        One,
        "no step is repeated to find faulty machines",
        "rerun-mode error-injection-rate error-injection-type result-rejected-tracker-filename",
    ),
    leave_out(
        One,
        "replicas start equal and receive the same sums",
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
