//! Unsupported kinds of models and training: the flags that ask for them, and flags that are read
//! only together with those.

use super::Takes::{Nothing, One, Several};
use super::{Entry, leave_out, refuse, unless, with};

const EXPERTS: &str = "mixture of experts is not supported";
const MLA: &str = "multi-latent attention is not supported";
const FP8: &str = "FP8 and FP4 are not supported: use --bf16";
const OFFLOAD: &str = "only what full recompute saves is offloaded: --recompute-granularity full --offload-activations cpu";
const MTP: &str = "multi-token prediction is not supported";
const HYBRID: &str = "state-space layers (Mamba) are not supported";
const VARIANTS: &str = "attention other than softmax over queries and keys is not supported";
const RL: &str = "reinforcement learning is not supported";
const MUP: &str = "scaling by the width of the model (µP) is not supported";
const STREAMS: &str = "several residual streams are not supported";
const TEACHERS: &str = "distillation from another model is not supported";
const IMAGES: &str = "image models are not supported";
const RETRIEVAL: &str = "retrieval is not supported";
const ENCODERS: &str = "encoders (BERT, T5) are not supported, only decoders (GPT, Llama)";
const SERVING: &str = "only Megatron-LM's servers read it; `megatron generate` continues text";

pub const TABLE: &[Entry] = &[
    refuse(EXPERTS, "num-experts num-moe-experts moe-use-upcycling"),
    with(
        "num-experts num-moe-experts moe-use-upcycling",
        Nothing,
        EXPERTS,
        "moe-grouped-gemm moe-permute-fusion moe-router-fusion moe-router-pre-softmax moe-router-enable-expert-bias \
         moe-shared-expert-overlap moe-shared-expert-gate moe-layer-recompute moe-per-layer-logging moe-enable-deepep \
         moe-use-legacy-grouped-gemm moe-extended-tp moe-router-padding-for-fp8 moe-router-padding-for-quantization \
         moe-pad-expert-input-to-capacity moe-apply-probs-on-input moe-router-force-load-balancing moe-token-dropping \
         moe-pad-experts-for-cuda-graph-inference moe-permute-fusion-into-hybridep \
         overlap-moe-expert-parallel-comm overlap-dispatch-backward-with-experts-wgrad \
         use-grouped-gemm-for-shared-expert ep-overlap-early-attn-memory-release",
    ),
    with(
        "num-experts num-moe-experts moe-use-upcycling",
        Several,
        EXPERTS,
        "moe-* expert-model-parallel-size expert-tensor-parallel-size ep-size",
    ),
    refuse(MLA, "multi-latent-attention"),
    with(
        "multi-latent-attention",
        Nothing,
        MLA,
        "cache-mla-latents mla-down-proj-fusion no-yarn-correction-range-round-to-int",
    ),
    with(
        "multi-latent-attention",
        One,
        MLA,
        "q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim rotary-scaling-factor mscale \
         mscale-all-dim beta-fast beta-slow original-max-position-embeddings yarn-*",
    ),
    refuse(
        FP8,
        "fp8-format fp8 fp4-format fp4 te-precision-config-file quant-recipe use-kitchen use-kitchen-attention",
    ),
    with(
        "fp8-format fp8 fp4-format fp4",
        Nothing,
        FP8,
        "first-last-layers-bf16 fp8-param-gather fp8-param fp8-wgrad fp8-dot-product-attention \
         fp8-multi-head-attention fp8-output-proj fp4-param fp4-param-gather tp-only-amax-red \
         activation-func-fp8-input-store reuse-grad-buf-for-mxfp8-param-ag disable-parameter-transpose-cache",
    ),
    with(
        "fp8-format fp8 fp4-format fp4 use-kitchen",
        One,
        FP8,
        "fp8-* fp4-* num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 kitchen-*",
    ),
    refuse(OFFLOAD, "cpu-offloading fine-grained-activation-offloading"),
    unless(&["0"], OFFLOAD, "cpu-offloading-num-layers"),
    with(
        "cpu-offloading cpu-offloading-num-layers fine-grained-activation-offloading",
        Nothing,
        OFFLOAD,
        "cpu-offloading-* delay-offload-until-cuda-graph",
    ),
    with(
        "cpu-offloading cpu-offloading-num-layers fine-grained-activation-offloading",
        Several,
        OFFLOAD,
        "offload-modules activation-offload-fraction min-offloaded-tensor-size delta-offload-bytes-across-pp-ranks \
         fine-grained-offloading-max-inflight-offloads",
    ),
    unless(&["0"], MTP, "mtp-num-layers"),
    with(
        "mtp-num-layers",
        Nothing,
        MTP,
        "mtp-detach-heads mtp-hsm mtp-standalone mtp-use-repeated-layer",
    ),
    with("mtp-num-layers", One, MTP, "mtp-*"),
    refuse(HYBRID, "is-hybrid-model hybrid-layer-pattern hybrid-override-pattern"),
    unless(&["0"], HYBRID, "hybrid-attention-ratio hybrid-mlp-ratio"),
    with(
        "is-hybrid-model hybrid-layer-pattern hybrid-override-pattern",
        Nothing,
        HYBRID,
        "disable-mamba-mem-eff-path use-mamba-mem-eff-path",
    ),
    with("is-hybrid-model hybrid-layer-pattern hybrid-override-pattern", One, HYBRID, "mamba-*"),
    refuse(VARIANTS, "experimental-attention-variant"),
    with(
        "experimental-attention-variant",
        One,
        VARIANTS,
        "experimental-attention-variant-* linear-attention-freq linear-conv-kernel-dim linear-key-head-dim \
         linear-num-key-heads linear-num-value-heads linear-value-head-dim dsa-* gdp-*",
    ),
    refuse("layers that differ from each other are not supported", "heterogeneous-*"),
    refuse(MUP, "use-mup"),
    with("use-mup", One, MUP, "mup-*"),
    refuse(STREAMS, "enable-mhc-connections"),
    with("enable-mhc-connections", One, STREAMS, "mhc-*"),
    refuse(RL, "perform-rl-step"),
    with("perform-rl-step", Several, RL, "rl-* grpo-* langrl-* refit-method"),
    refuse(TEACHERS, "export-kd-teacher-load export-kd-cfg logits-load-dir logits-save-dir"),
    with("logits-load-dir logits-save-dir", One, TEACHERS, "logits-load-* logits-save-*"),
    refuse(
        ENCODERS,
        "bert-no-binary-head bert-load bert-embedder-type encoder-num-layers encoder-seq-length decoder-num-layers \
         decoder-seq-length mask-prob short-seq-prob output-bert-embeddings",
    ),
    refuse(
        RETRIEVAL,
        "retro-* biencoder-* ict-head-size ict-load titles-data-path query-in-block-prob use-one-sent-docs \
         evidence-data-path retriever-* block-data-path embedding-path indexer-batch-size indexer-log-interval",
    ),
    refuse(
        IMAGES,
        "vision-* dino-* swin-backbone-type img-h img-w patch-dim num-channels num-classes classes-fraction \
         data-per-class-fraction head-lr-mult iter-per-epoch mask-type mask-factor",
    ),
    leave_out(
        Nothing,
        SERVING,
        "inference-dynamic-batching inference-dynamic-batching-enable-prefix-caching \
         inference-dynamic-batching-track-paused-request-events \
         inference-dynamic-batching-track-generated-token-events inference-cuda-graph-all-prefills \
         inference-disable-ep-consensus inference-disable-triton-nvls-kernels inference-fuse-tp-communication \
         inference-moe-disable-fused-quant-kernels inference-text-gen-server-logging \
         inference-use-synchronous-zmq-collectives inference-wandb-logging flash-decode decode-only-cuda-graphs \
         enable-chunked-prefill disable-chunked-prefill nccl-all-reduce-for-prefill use-legacy-static-engine \
         use-inference-optimized-layers return-log-probs skip-prompt-log-probs offset-sampling-seed-by-dp-rank \
         use-same-sampling-seed-across-dp-ranks",
    ),
    leave_out(
        One,
        SERVING,
        "inference-* mlp-chunks-for-prefill symmetric-ar-type num-speculative-tokens max-tokens-to-oom",
    ),
    refuse(
        "it names a part of Megatron-LM's configuration; the settings in it have flags",
        "attr checkpoint ddp dist finalize-model-grads-func fn grad-scale-func grad-sync-func inference logger model \
         name no-sync-func param-sync-func predicate profiling rerun-state-machine rng scheduler straggler \
         timers train validation with-name-predicate",
    ),
];
