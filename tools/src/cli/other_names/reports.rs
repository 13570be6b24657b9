//! Logs, profiles, and the monitoring of runs.

use super::Takes::{Nothing, One, Several};
use super::{Entry, leave_out};

pub const TABLE: &[Entry] = &[
    leave_out(
        Nothing,
        "it is in the log, in --metrics or in TensorBoard's curves, or is not measured",
        "log-throughput log-progress log-energy log-device-memory-used log-l2-norm-grad-to-tensorboard \
         log-loss-scale-to-tensorboard no-log-loss-scale-to-tensorboard no-log-learnig-rate-to-tensorboard \
         log-batch-size-to-tensorboard log-runtime-to-tensorboard log-throughput-to-tensorboard \
         log-world-size-to-tensorboard log-max-attention-logit barrier-with-L1-time no-barrier-with-level-1-timing \
         log-straggler disable-straggler-on-startup set-level-for-all-loggers filter-warnings",
    ),
    leave_out(
        One,
        "it is in the log, in --metrics or in TensorBoard's curves, or is not measured",
        "logging-level tensorboard-queue-size log-memory-interval runtime-time-unit \
         throughput-window-size straggler-ctrlr-port straggler-minmax-count config-logger-dir",
    ),
    leave_out(
        Several,
        "it is in the log, in --metrics or in TensorBoard's curves, or is not measured",
        "memory-keys modules-to-filter",
    ),
    leave_out(
        Nothing,
        "--metrics FILE writes JSON lines and --tensorboard-dir writes curves, which such services read",
        "no-one-logger one-logger-async otel-enabled",
    ),
    leave_out(
        One,
        "--metrics FILE writes JSON lines and --tensorboard-dir writes curves, which such services read",
        "wandb-project wandb-entity wandb-exp-name wandb-save-dir one-logger-project one-logger-run-name \
         app-tag-run-name app-tag-run-version otel-service-name",
    ),
    leave_out(
        Several,
        "--metrics FILE writes JSON lines and --tensorboard-dir writes curves, which such services read",
        "otel-span-groups",
    ),
    leave_out(
        Nothing,
        "--profile records a trace",
        "use-pytorch-profiler use-nsys-profiler nvtx-ranges record-shapes pytorch-profiler-collect-callstack \
         pytorch-profiler-collect-chakra pytorch-profiler-collect-shapes record-memory-history \
         run-workload-inspector-server flight-recorder-dump-on-timeout flight-recorder-extra-dump-on-exec \
         flight-recorder-include-only-active flight-recorder-include-stack-trace",
    ),
    leave_out(
        One,
        "--profile records a trace",
        "memory-snapshot-path flight-recorder-dump-path flight-recorder-trace-buffer-size",
    ),
    leave_out(
        Nothing,
        "ranks watch each other, and --max-restarts restarts them",
        "enable-ft-package calc-ft-timeouts inprocess-restart inprocess-empty-cuda-cache adlr-autoresume \
         exit-signal-handler-for-dataloader exit-signal-handler-for-training",
    ),
    leave_out(
        One,
        "ranks watch each other, and --max-restarts restarts them",
        "ft-num-warmup-iters inprocess-* adlr-autoresume-interval",
    ),
    leave_out(
        Several,
        "`megatron doctor` and `megatron bench` test a machine",
        "gpu-sniff-test-interval gemm-shapes skip-allreduce skip-alltoall skip-gemm skip-reducescatter skip-sendrecv",
    ),
];
