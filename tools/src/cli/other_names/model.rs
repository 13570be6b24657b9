//! The architecture, its computation, and its initial weights.

use super::Takes::{Nothing, One, Several};
use super::{Entry, Given, Verdict, judged, leave_out, on, refuse, same_value, unless, with};

pub const TABLE: &[Entry] = &[
    leave_out(
        Nothing,
        "kernels are fused where possible",
        "no-masked-softmax-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion \
         no-gradient-accumulation-fusion no-gradient-reduce-div-fusion no-persist-layer-norm masked-softmax-fusion \
         bias-activation-fusion bias-dropout-fusion apply-rope-fusion gradient-accumulation-fusion \
         gradient-reduce-div-fusion persist-layer-norm memory-efficient-layer-norm fused-residual-rmsnorm \
         fused-single-qkv-rope use-flashinfer-fused-rope cross-entropy-loss-fusion use-transformer-engine-op-fuser \
         use-fused-weighted-squared-relu use-grouped-gemm-for-dense-mlp disable-jit-fuser",
    ),
    leave_out(
        One,
        "every layer has one implementation",
        "cross-entropy-fusion-impl transformer-impl attention-backend flash-attention-version",
    ),
    leave_out(
        Nothing,
        "every layer has one implementation",
        "use-mcore-models use-legacy-models enable-experimental export-te-mcore-model onnx-safe",
    ),
    leave_out(
        Nothing,
        "attention is fused, with scores and softmax in fp32",
        "use-flash-attn attention-softmax-in-fp32 apply-query-key-layer-scaling",
    ),
    unless(&["local"], "layers written in Python are not supported", "spec"),
    // Activation functions.
    judged(
        Nothing,
        exact_gelu,
        "with it, Megatron-LM computes GELU with erf, which is not supported; leave it out for GELU with tanh",
        "no-bias-gelu-fusion use-te-activation-func",
    ),
    leave_out(Nothing, "GELU uses tanh", "openai-gelu"),
    refuse(
        "only GELU (tanh) and SwiGLU are supported",
        "squared-relu quick-geglu activation-func activation-func-clamp-value gated-linear-unit",
    ),
    unless(&["0"], "an offset in SwiGLU is not supported", "glu-linear-offset"),
    on("use --disable-bias-linear", "add-bias-linear"),
    // Normalization.
    refuse(
        "normalization weights stored minus 1 are not supported",
        "apply-layernorm-1p layernorm-zero-centered-gamma",
    ),
    refuse(
        "only pre-LayerNorm residual connections are supported",
        "apply-residual-connection-post-layernorm",
    ),
    refuse("normalization of queries and keys is not supported", "qk-layernorm qk-l2-norm"),
    with(
        "qk-layernorm qk-l2-norm",
        Nothing,
        "normalization of queries and keys is not supported",
        "apply-wd-to-qk-layernorm",
    ),
    refuse("clipping of queries and keys is not supported", "qk-clip"),
    with("qk-clip", One, "clipping of queries and keys is not supported", "qk-clip-*"),
    // Positions.
    judged(
        Nothing,
        |_| Verdict::Words(vec!["--position-embedding-type=rope".to_string()]),
        "use --position-embedding-type rope",
        "use-rotary-position-embeddings",
    ),
    judged(
        Nothing,
        no_position_embedding,
        "use --position-embedding-type none",
        "no-position-embedding",
    ),
    judged(
        One,
        whole_heads,
        "rotary positions for a part of each head are not supported",
        "rotary-percent",
    ),
    judged(
        Nothing,
        of_rope,
        "rotary positions that pair neighbouring elements are not supported",
        "rotary-interleaved",
    ),
    judged(
        One,
        of_rope,
        "a mix of layers with and without rotary positions is not supported",
        "no-rope-freq",
    ),
    unless(&["rope"], "YaRN is not supported", "rope-type"),
    leave_out(
        One,
        "it needs --position-embedding-type relative, which is not supported",
        "relative-attention-num-buckets relative-attention-max-distance",
    ),
    leave_out(
        Several,
        "it needs --position-embedding-type mrope, which is not supported",
        "mrope-section",
    ),
    // Attention.
    judged(
        Several,
        window,
        "only windows over a query and the tokens before it are supported: --window-size N,0, which is --sliding-window N + 1",
        "window-size",
    ),
    with(
        "window-size",
        One,
        "windows in only some layers are not supported",
        "window-attn-skip-freq",
    ),
    unless(&["vanilla"], "softmax with an offset is not supported", "softmax-type"),
    refuse("an attention scale other than 1/√(head width) is not supported", "softmax-scale"),
    refuse("gates on the attention output are not supported", "attention-output-gate"),
    refuse(
        "sequences of different lengths in one microbatch are not supported",
        "variable-seq-lengths",
    ),
    // Initial weights.
    leave_out(
        Nothing,
        "initial weights are the same under every layout and on every device",
        "use-cpu-initialization init-model-with-meta-device perform-initialization no-initialization",
    ),
    refuse("replicas start with equal weights", "data-parallel-random-init"),
    refuse(
        "initial weights are normal, with --init-method-std",
        "init-method-xavier-uniform init-method output-layer-init-method embedding-init-method \
         embedding-init-method-std",
    ),
    refuse("frozen layers are not supported", "freeze-all-layers"),
    // Reproducibility.
    leave_out(
        Nothing,
        "steps are always bitwise reproducible",
        "deterministic-mode batch-invariant-mode te-rng-tracker use-te-rng-tracker inference-rng-tracker",
    ),
    leave_out(One, "steps are always bitwise reproducible", "batch-invariant-backend"),
];

/// SwiGLU has no GELU.
fn exact_gelu(given: &Given<'_>) -> Verdict {
    if given.line.has("swiglu") { Verdict::PassedOver } else { given.refused() }
}

fn is_rope(given: &Given<'_>) -> bool {
    given.line.value("position-embedding-type") == Some("rope")
        || given.line.has("use-rotary-position-embeddings")
}

/// Read only with rotary positions.
fn of_rope(given: &Given<'_>) -> Verdict {
    if is_rope(given) { given.refused() } else { Verdict::PassedOver }
}

fn whole_heads(given: &Given<'_>) -> Verdict {
    if given.values.iter().all(|value| same_value(value, "1")) {
        Verdict::PassedOver
    } else {
        of_rope(given)
    }
}

/// Megatron-LM accepts it only with rotary positions, for historical reasons: these were once added
/// to learned ones.
fn no_position_embedding(given: &Given<'_>) -> Verdict {
    match given.line.value("position-embedding-type") {
        Some("rope" | "none" | "alibi") => Verdict::PassedOver,
        _ if is_rope(given) => Verdict::PassedOver,
        _ => given.refused(),
    }
}

/// `(128,0)`, `128,0` or `128 0`: 128 tokens before a query, not counting the query itself.
fn window(given: &Given<'_>) -> Verdict {
    let text = given.values.join(" ");
    let numbers: Vec<&str> =
        text.split(['(', ')', '[', ']', ',', ' ']).filter(|number| !number.is_empty()).collect();
    match numbers.as_slice() {
        ["-1", "0" | "-1"] => Verdict::PassedOver,
        [before, "0"] => {
            match before.parse::<usize>().ok().and_then(|before| before.checked_add(1)) {
                Some(size) => Verdict::Words(vec![format!("--sliding-window={size}")]),
                None => given.refused(),
            }
        }
        _ => given.refused(),
    }
}
