//! How the model and the batch are split over ranks, and how ranks communicate.

use super::Takes::{Nothing, One, Several};
use super::{Entry, leave_out, refuse, unless};

pub const TABLE: &[Entry] = &[
    leave_out(
        Nothing,
        "communication is overlapped where that helps, which changes no result",
        "tp-comm-overlap tp-comm-overlap-ag tp-comm-overlap-rs tp-comm-overlap-rs-dgrad tp-comm-bulk-dgrad \
         tp-comm-bulk-wgrad tp-comm-split-ag tp-comm-split-rs tp-comm-atomic-ag tp-comm-atomic-rs \
         tp-comm-overlap-disable-qkv tp-comm-overlap-disable-fc1 disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs \
         disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-split-ag disable-tp-comm-split-rs \
         overlap-param-gather overlap-param-gather-with-optimizer-step overlap-p2p-comm overlap-p2p-comm-warmup-flush \
         overlap-p2p-communication-warmup-flush no-overlap-p2p-communication batch-p2p-comm batch-p2p-sync \
         align-grad-reduce no-align-grad-reduce align-param-gather no-align-param-gather use-ring-exchange-p2p \
         no-scatter-gather-tensors-in-pipeline no-async-tensor-model-parallel-allreduce defer-embedding-wgrad-compute \
         create-all-gather-group",
    ),
    leave_out(
        One,
        "communication is overlapped where that helps, which changes no result",
        "tp-comm-overlap-cfg tp-comm-bootstrap-backend wgrad-deferral-limit suggested-communication-unit-size \
         pipeline-model-parallel-comm-backend",
    ),
    leave_out(
        One,
        "the order of passes changes no result; a group has as many microbatches as there are stages",
        "microbatch-group-size-per-virtual-pipeline-stage microbatch-group-size-per-vp-stage",
    ),
    leave_out(
        Nothing,
        "gradients are summed in fp32 (unless --grad-reduce-in-bf16), in buckets of --bucket-size",
        "average-in-collective ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw \
         pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation reduce-scatter-with-fp32-accumulation",
    ),
    leave_out(
        One,
        "gradients are summed in fp32 (unless --grad-reduce-in-bf16), in buckets of --bucket-size",
        "ddp-num-buckets num-buckets",
    ),
    leave_out(
        Several,
        "gradients are summed in fp32 (unless --grad-reduce-in-bf16), in buckets of --bucket-size",
        "ddp-param-name-patterns-for-fp32-local-accumulation param-name-patterns-for-fp32-local-accumulation",
    ),
    leave_out(
        Nothing,
        "NCCL's environment variables (NCCL_…) configure it",
        "nccl-ub use-nccl-ub disable-symmetric-registration use-sharp high-priority-a2a-comm-stream \
         use-gloo-process-groups disable-gloo-process-groups",
    ),
    leave_out(
        One,
        "NCCL's environment variables (NCCL_…) configure it",
        "sharp-enabled-group nccl-communicator-config-path",
    ),
    leave_out(
        Several,
        "NCCL's environment variables (NCCL_…) configure it",
        "high-priority-stream-groups",
    ),
    leave_out(
        Several,
        "context parallelism uses all-to-all between tokens and heads, Megatron's a2a",
        "cp-comm-type hierarchical-context-parallel-sizes",
    ),
    refuse(
        "context parallelism of varying size is not supported",
        "hybrid-context-parallel max-seqlen-per-dp-cp-rank",
    ),
    leave_out(Nothing, "the order of ranks changes no result", "use-tp-pp-dp-mapping"),
    leave_out(One, "the launcher's LOCAL_RANK sets it", "local-rank"),
    leave_out(One, "ranks connect before the model is created", "lazy-mpu-init"),
    leave_out(
        One,
        "--distributed-timeout-minutes applies at all times",
        "distributed-timeout-seconds-after-init",
    ),
    refuse("start as many ranks as the run needs", "fake-process-group"),
    unless(
        &["1"],
        "weights sharded beyond tp and gathered per layer are not supported",
        "gtp-weight-remat-size expert-gtp-weight-remat-size tensor-parallel-num-weight-shards \
         expert-tensor-parallel-num-weight-shards",
    ),
    leave_out(Several, "it needs --gtp-weight-remat-size, which is not supported", "gtp-*"),
    // FSDP.
    leave_out(
        Nothing,
        "--data-parallel-sharding-strategy, or --zero-stage, says what is sharded",
        "use-megatron-fsdp use-custom-fsdp",
    ),
    refuse("use --zero-stage 3", "use-torch-fsdp2"),
    refuse("use --zero-reshard-after-forward false", "torch-fsdp2-no-reshard-after-forward"),
    refuse(
        "copies of shards share nothing more: --num-distributed-optimizer-instances makes them",
        "enable-full-sharding-in-hsdp",
    ),
    unless(
        &["no_shard"],
        "copies of shards share nothing more: --num-distributed-optimizer-instances makes them",
        "outer-dp-sharding-strategy",
    ),
    leave_out(
        Nothing,
        "it changes how Megatron's FSDP works, not what it computes",
        "keep-fp8-transpose-cache strict-fsdp-dtensor-load no-strict-fsdp-dtensor-load \
         fsdp-all-gather-in-start-param-sync fsdp-db-use-persist-buf-on-alloc-fail \
         fsdp-double-buffer fsdp-manual-registration \
         megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-use-decoupled-grad",
    ),
    leave_out(
        One,
        "it changes how Megatron's FSDP works; --grad-reduce-in-bf16 and --bf16 choose dtypes",
        "megatron-fsdp-*",
    ),
];
