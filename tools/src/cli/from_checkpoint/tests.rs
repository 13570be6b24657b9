use std::collections::BTreeSet;
use std::ffi::OsString;

use megatron::config::RunConfig;

use super::*;
use crate::cli::flags::sections;
use crate::cli::resolve;
use crate::commands::{Request, parse};

/// The required settings, as words of a command line.
const LEAST: &str = "--num-layers=8 --hidden-size=64 --num-attention-heads=8 --seq-length=32 --micro-batch-size=2 --lr=0.001";

fn resolved(words: &[String]) -> RunConfig {
    let words: Vec<OsString> = ["megatron", "pretrain"]
        .iter()
        .map(OsString::from)
        .chain(words.iter().map(OsString::from))
        .collect();
    let Ok(Request::Pretrain(gathered)) = parse(&words) else { panic!("{words:?}") };
    resolve(&gathered, None).unwrap().run
}

/// The settings that a run takes from the checkpoint of a run started with `words`.
fn said(words: &str) -> (RunConfig, Vec<Setting>) {
    let words: Vec<String> = format!("{LEAST} {words}").split(' ').map(str::to_string).collect();
    let run = resolved(&words);
    let RunConfig { model, parallel, data, training, optimizer, checkpoint, logging } = run.clone();
    let save = checkpoint.save.clone();
    let recorded = RecordedRun {
        model,
        parallel: Some(parallel),
        data: Some(data),
        training: Some(training),
        optimizer: Some(optimizer),
        checkpoint: Some(checkpoint),
        logging: Some(logging),
    };
    let places =
        Places { save: save.as_deref(), saves: save.is_some(), continues: true, tokenizer: None };
    (run, run_file::parse(&text_of(&recorded, &places).unwrap()).unwrap().settings)
}

/// Together these runs use every setting that a checkpoint records.
const RUNS: [&str; 13] = [
    "--data-path a.txt b\u{7f}\"c --tokenizer=train:300 --train-iters=10",
    "--mock-data --vocab-size=300 --train-samples=1001 --global-batch-size=16 --rampup-batch-size 4 4 100 --lr-warmup-samples=7 \
     --lr-warmup-init=1e-7 --lr-decay-samples=500 --lr-decay-style=WSD --lr-wsd-decay-samples=99 --lr-wsd-decay-style=cosine \
     --exit-duration-in-mins=0.5 --iterations-to-skip 3 7 --seed=18446744073709551615 --exit-interval=4 --max-nonfinite-steps=3 --enable-cuda-graph",
    "--data-path=x --train-iters=10 --num-query-groups=4 --kv-channels=16 --ffn-hidden-size=100 --max-position-embeddings=64 \
     --position-embedding-type=rope --rotary-base=500000 --use-rope-scaling --rope-scaling-factor=32 --sliding-window=8 \
     --embed-layernorm --normalization=RMSNorm --norm-epsilon=1e-6 --swiglu --disable-bias-linear --add-qkv-bias \
     --untie-embeddings-and-output-weights --make-vocab-size-divisible-by=4 --attention-dropout=0 --hidden-dropout=0.25 \
     --init-method-std=0.006 --bf16 --grad-reduce-in-bf16 --recompute-granularity=full --recompute-method=block --recompute-num-layers=2 \
     --offload-activations=nvme --nvme-path=/tmp",
    "--data-path=x --train-iters=10 --position-embedding-type=rope --rotary-seq-len-interpolation-factor=2 --fp16 --hysteresis=3 \
     --initial-loss-scale=4096 --min-loss-scale=2 --loss-scale-window=20 --consecutive-hysteresis --recompute-granularity=selective \
     --tensor-model-parallel-size=2 --pipeline-model-parallel-size=2 --context-parallel-size=2 --data-parallel-size=2 --sequence-parallel \
     --num-virtual-stages-per-pipeline-rank=2 --pipeline-partition=1,3,3,1 --delay-wgrad-compute --use-distributed-optimizer \
     --zero-reshard-after-forward=false --num-distributed-optimizer-instances=2 --overlap-grad-reduce --global-batch-size=16",
    "--data-path=x --train-iters=10 --fp16 --loss-scale=128 --pipeline-model-parallel-size=2 --pipeline-extra-warmup=1 \
     --tensor-model-parallel-size=2 --recompute-granularity=full --distribute-saved-activations --offload-activations=cpu \
     --pipeline-partition=type:Transformer|embedding --optimizer=sgd --sgd-momentum=0.5 --clip-grad=0 --min-lr=1e-5 --weight-decay=0.1 \
     --start-weight-decay=0 --end-weight-decay=0.1 --weight-decay-incr-style=cosine --optimizer-cpu-offload",
    "--data-path=x --train-iters=10 --adam-beta1=0.8 --adam-beta2=0.95 --adam-eps=1e-10 --exp-avg-dtype=bf16 --exp-avg-sq-dtype=bf16 \
     --offload-optimizer=nvme --zero-stage=3 --offload-param=nvme --nvme-path=/tmp --split=8,1,1 --dataloader-type=single --eod-mask-loss --reset-position-ids --reset-attention-mask \
     --cache-dir=cache --lr-warmup-fraction=1 --vocab-file=vocab.json --merge-file=merges.txt --split-special-tokens \
     --tokenizer-hf-no-include-special-tokens",
    "--data-path=x --train-iters=10 --save=saved --save-interval=2 --async-save --save-retain-interval=4 --most-recent-k=2 --log-interval=5 \
     --eval-interval=3 --eval-iters=7 --metrics=metrics.jsonl --tensorboard-dir=board --tensorboard-log-interval=2 \
     --log-validation-ppl-to-tensorboard --log-timers-to-tensorboard --log-memory-to-tensorboard --log-params-norm --log-num-zeros-in-grad \
     --timing-log-level=2 --timing-log-option=all --prompt=x --prompt-tokens=9",
    "--data-path=x --train-iters=2000 --lr-schedule=WarmupLR --warmup-min-lr=1e-5 --warmup-type=linear",
    "--data-path=x --train-iters=10 --lr-schedule=WarmupDecayLR --warmup-num-steps=3 --total-num-steps=8",
    "--data-path=x --train-iters=10 --lr-schedule=WarmupCosineLR --warmup-num-steps=3 --warmup-min-ratio=0.1 --cos-min-ratio=0.2",
    "--data-path=x --train-iters=10 --lr-schedule=OneCycle --cycle-min-lr=1e-4 --cycle-max-lr=0.001 --cycle-first-step-size=3 \
     --cycle-second-step-size=4 --cycle-first-stair-count=2 --cycle-second-stair-count=1 --decay-step-size=2 --decay-lr-rate=0.5 \
     --cycle-min-mom=0.7 --cycle-max-mom=0.8 --decay-mom-rate=0.01",
    "--data-path=x --train-iters=10 --lr-schedule=OneCycle --cycle-min-lr=1e-4 --cycle-max-lr=0.001 --optimizer=sgd",
    "--data-path=x --train-iters=10 --lr-schedule=LRRangeTest --lr-range-test-step-size=3 --lr-range-test-step-rate=0.5 \
     --lr-range-test-staircase",
];

/// The words of a setting as a user types them: a list appears once, because the last one counts.
fn as_typed(words: Vec<String>) -> Vec<String> {
    let Some((flag, _)) = words[0].split_once('=').filter(|_| words.len() > 1) else {
        return words;
    };
    let value = |word: &String| {
        word.split_once('=').map_or_else(|| word.clone(), |(_, value)| value.to_string())
    };
    std::iter::once(flag.to_string()).chain(words.iter().map(value)).collect()
}

#[test]
fn what_a_checkpoint_says_makes_the_run_that_wrote_it() {
    for words in RUNS {
        let (run, settings) = said(words);
        let again: Vec<String> =
            settings.into_iter().flat_map(|setting| as_typed(setting.words)).collect();
        let [first, second] = [run, resolved(&again)].map(|run| serde_json::to_value(run).unwrap());
        assert_eq!(first, second, "{words}");
    }
}

/// A new setting must be written by `text_of` or be listed here.
#[test]
fn every_setting_is_said_or_is_not_the_checkpoints_to_say() {
    let said: BTreeSet<String> =
        RUNS.into_iter().flat_map(|words| said(words).1).map(|setting| setting.key).collect();
    let in_other_words = [
        "group_query_attention",
        "tokenizer_type",
        "tokenizer_model",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout",
        "num_layers_per_virtual_pipeline_stage",
        "lr_decay_iters",
        "lr_warmup_iters",
        "lr_warmup_fraction",
        "lr_wsd_decay_iters",
        "warmup_max_lr",
        "check_for_nan_in_loss_and_grad",
        "no_check_for_nan_in_loss_and_grad",
        "use_distributed_optimizer",
        "data_parallel_sharding_strategy",
        "optimizer_cpu_offload",
        "offload_optimizer_nvme_path",
        "wall_clock_breakdown",
        "gradient_accumulation_steps",
    ];
    let of_machines = [
        "bucket_size",
        "device",
        "distributed_backend",
        "overlap_communication",
        "distributed_timeout_minutes",
        "rdzv",
    ];
    let of_one_start = [
        "load",
        "ckpt_step",
        "override_opt_param_scheduler",
        "use_checkpoint_opt_param_scheduler",
        "use_checkpoint_args",
        "exit_on_missing_checkpoint",
        "finetune",
        "no_load_optim",
        "init_from_hf",
        "max_restarts",
        "skip_train",
        "exit_signal_handler",
        "exit_signal",
        "profile",
        "profile_step_start",
        "profile_step_end",
        "profile_ranks",
        "profile_dir",
    ];
    let unsaid: Vec<&str> = [&in_other_words[..], &of_machines, &of_one_start].concat();
    for (section, args) in sections() {
        for key in args.iter().map(|arg| arg.get_id().as_str()) {
            assert!(said.contains(key) != unsaid.contains(&key), "{key} under [{section}]");
        }
    }
}

#[test]
fn every_key_that_is_named_is_a_setting() {
    let keys: BTreeSet<String> = sections()
        .into_iter()
        .flat_map(|(_, args)| args)
        .map(|arg| arg.get_id().to_string())
        .collect();
    let together = TOGETHER.iter().flat_map(|(those, these)| [*those, *these]);
    for key in REQUIRED.into_iter().chain(together).flatten() {
        assert!(keys.contains(*key), "{key}");
    }
}
