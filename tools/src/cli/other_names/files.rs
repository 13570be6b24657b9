//! Data, tokenizers and checkpoints.

use super::Takes::{Nothing, One, Several};
use super::{Entry, leave_out, on, refuse, unless, with};

pub const TABLE: &[Entry] = &[
    // Data.
    leave_out(
        Nothing,
        "data are memory-mapped and read on demand",
        "no-mmap-bin-files no-create-attention-mask-in-dataloader dataloader-fast-cache-load \
         dataloader-defer-npy-index-mmap enable-msc disable-msc",
    ),
    leave_out(
        One,
        "data are memory-mapped and read on demand",
        "num-workers num-dataset-builder-threads object-storage-cache-path",
    ),
    leave_out(Nothing, "--dataloader-type cyclic never shards data", "no-data-sharding"),
    unless(&["0.005"], "blends use Megatron-LM's 0.005", "mid-level-dataset-surplus"),
    unless(&["1"], "--data-path sets how often data are read", "sample-rate"),
    refuse(
        "use --data-path and --split",
        "train-data-path valid-data-path test-data-path data-args-path per-split-data-args-path \
         per-dataset-sequences-path",
    ),
    refuse(
        "use --reset-attention-mask and --reset-position-ids",
        "dataloader-inter-document-masking",
    ),
    leave_out(Nothing, "data have no padding tokens", "allow-ambiguous-pad-tokens"),
    refuse("fill-in-the-middle is not supported", "fim-data"),
    with("fim-data", Nothing, "fill-in-the-middle is not supported", "fim-no-prefix"),
    with("fim-data", One, "fill-in-the-middle is not supported", "fim-*"),
    refuse(
        "fine-tuning on conversations (SFT) is not supported: --finetune continues on other text",
        "sft",
    ),
    with(
        "sft",
        One,
        "fine-tuning on conversations (SFT) is not supported: --finetune continues on other text",
        "sft-tokenizer-prompt-format",
    ),
    // Tokenizers.
    leave_out(
        Nothing,
        "tokenizer.json describes the tokenizer completely",
        "tokenizer-hf-no-use-fast tokenizer-sentencepiece-legacy tokenizer-sentencepiece-ignore-extra-whitespaces \
         trust-remote-code legacy-tokenizer use-gigatoken save-tokenizer-assets \
         use-tokenizer-model-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args",
    ),
    leave_out(
        One,
        "tokenizer.json describes the tokenizer completely",
        "tiktoken-pattern tiktoken-num-special-tokens metadata-path tokenizer-metadata chat-template \
         null-tokenizer-eod-id null-tokenizer-pad-id",
    ),
    leave_out(
        Several,
        "tokenizer.json describes the tokenizer completely",
        "tiktoken-special-tokens special-tokens",
    ),
    unless(&["0"], "sentinel tokens (T5) are not supported", "vocab-extra-ids"),
    leave_out(
        One,
        "padding of the vocabulary changes no result",
        "padded-vocab-size pad-vocab-size",
    ),
    // Checkpoints.
    leave_out(
        Nothing,
        "checkpoints have one format, with checksums, and load under every layout",
        "ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load fully-parallel-save \
         fully-parallel-load ckpt-assume-constant-structure dist-ckpt-optim-fully-reshardable \
         distrib-optim-fully-reshardable-mem-efficient dist-ckpt-save-pre-mcore-014 auto-detect-ckpt-format \
         use-dist-ckpt verify-integrity ckpt-load-validate-sharding-integrity ckpt-drop-redundant-extra-state \
         ckpt-fully-parallel-load-per-rank-objects ckpt-pg-tensors-cache-create hetereogenous-dist-checkpoint",
    ),
    leave_out(
        One,
        "checkpoints have one format, with checksums, and load under every layout",
        "ckpt-format dist-ckpt-format dist-ckpt-strictness dist-ckpt-workers ckpt-fully-parallel-load-exchange-algo \
         ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save-process-group ckpt-pg-tensors-cache-path",
    ),
    leave_out(
        Nothing,
        "--async-save sets this",
        "use-persistent-ckpt-worker async-ckpt-use-cpu-shm",
    ),
    leave_out(
        One,
        "--async-save sets this",
        "async-strategy async-ckpt-cpu-priority async-ckpt-io-priority",
    ),
    leave_out(
        Nothing,
        "random numbers follow from seed and step, without state",
        "no-load-rng no-save-rng load-rng save-rng",
    ),
    leave_out(Nothing, "master weights are in every checkpoint", "load-main-params-from-ckpt"),
    on("use --no-load-optim", "load-optim"),
    on("checkpoints without optimizer state are not supported", "save-optim"),
    refuse("checkpoints without optimizer state are not supported", "no-save-optim"),
    refuse("use --load DIR --finetune", "pretrained-checkpoint"),
    refuse("use --load DIR/iter_…", "override-ckpt-iteration"),
    refuse(
        "`megatron import` and `megatron reshard` rewrite checkpoints",
        "ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format",
    ),
    refuse(
        "set the layout of this run; a checkpoint loads under every layout",
        "use-mp-args-from-checkpoint-args",
    ),
    refuse(
        "temporary checkpoints are not supported: --save-interval sets how often --save is written",
        "non-persistent-save-interval non-persistent-ckpt-type replication",
    ),
    with(
        "non-persistent-save-interval non-persistent-ckpt-type replication",
        One,
        "temporary checkpoints are not supported: --save-interval sets how often --save is written",
        "non-persistent-* replication-*",
    ),
    refuse("use a run file", "yaml-cfg"),
    leave_out(One, "every checkpoint holds the run's settings", "save-config-filepath"),
    leave_out(
        One,
        "tensors of single steps cannot be written",
        "save-activations-interval save-dgrads-interval save-params-interval save-wgrads-interval \
         save-tokens-per-expert-interval",
    ),
];
