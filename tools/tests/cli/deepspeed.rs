//! `ds_config.json` as it is: real configurations run, say what has no effect, agree with flags, and
//! become run files.

use std::fs;
use std::path::PathBuf;

use crate::site::{Site, refused};
use crate::support::{stderr, stdout};

/// A model for any of the layouts; batch, learning rate and precision are the configuration's.
const RUN: &str = r#"[model]
num_layers = 4
hidden_size = 32
num_attention_heads = 4
seq_length = 16
hidden_dropout = 0.1

[data]
data_path = "text.txt"
tokenizer = "byte"
cache_dir = "cache"

[training]
train_iters = 6

[logging]
metrics = "metrics.jsonl"
eval_iters = 0
"#;

fn site(config: &str) -> Site {
    let site = Site::new();
    site.write("run.toml", RUN);
    let from = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/deepspeed");
    fs::copy(from.join(config), site.path("ds_config.json")).unwrap();
    site
}

/// A configuration, flags that it needs beside it, the flags that say the same without it, and lines
/// that the run prints.
struct Case {
    config: &'static str,
    beside: &'static str,
    instead: &'static str,
    prints: &'static [&'static str],
}

const CASES: [Case; 8] = [
    Case {
        config: "stage2.json",
        beside: "--data-parallel-size=4",
        instead: "--data-parallel-size=4 --global-batch-size=16 --micro-batch-size=4 --lr=1e-5 --lr-decay-style=constant --weight-decay=0 --fp16 \
                  --zero-stage=2",
        prints: &[],
    },
    Case {
        config: "stage3-offload-cpu.json",
        beside: "--data-parallel-size=4 --micro-batch-size=2",
        instead: "--data-parallel-size=4 --micro-batch-size=2 --fp16 --adam-beta1=0.8 --weight-decay=3e-7 --lr=3e-5 --lr-schedule=WarmupLR --warmup-num-steps=500 \
                  --zero-stage=3",
        prints: &[
            "without effect here: zero_optimization.contiguous_gradients, zero_optimization.",
            "this run computes on the CPU, so offload to `cpu` changes nothing",
        ],
    },
    Case {
        config: "auto-3d-nvme.json",
        beside: "--lr=1e-3 --nvme-path=state",
        instead: "--lr=1e-3 --nvme-path=state --micro-batch-size=4 --global-batch-size=16 --fp16 --zero-stage=3 \
                  --offload-param=nvme --tensor-model-parallel-size=4 --pipeline-model-parallel-size=2 --weight-decay=0 \
                  --lr-schedule=WarmupLR --warmup-num-steps=1 --recompute-granularity=full \
                  --distribute-saved-activations --grad-reduce-in-fp16",
        prints: &[
            "pipeline_parallel.micro_batches = 8 has no effect: a step has gradient_accumulation_steps microbatches",
        ],
    },
    Case {
        config: "trainer-zero2.json",
        beside: "--data-parallel-size=2 --micro-batch-size=2 --lr=1e-3 --fp16",
        instead: "--data-parallel-size=2 --micro-batch-size=2 --lr=1e-3 --fp16 --weight-decay=0 --lr-schedule=WarmupLR \
                  --warmup-num-steps=1 --zero-stage=2 --overlap-grad-reduce",
        prints: &[],
    },
    Case {
        config: "trainer-zero3-nvme.json",
        beside: "--data-parallel-size=2 --lr=1e-3 --bf16 --lr-decay-style=cosine",
        instead: "--data-parallel-size=2 --lr=1e-3 --bf16 --lr-decay-style=cosine --micro-batch-size=1 \
                  --global-batch-size=4 --zero-stage=3 --offload-param=nvme --offload-optimizer=nvme --nvme-path=state \
                  --overlap-grad-reduce",
        prints: &["aio.block_size"],
    },
    Case {
        config: "warmup-decay.json",
        beside: "--data-parallel-size=2",
        instead: "--data-parallel-size=2 --micro-batch-size=2 --global-batch-size=8 --bf16 --grad-reduce-in-bf16 \
                  --lr=3e-4 --adam-beta2=0.95 --weight-decay=0.1 --lr-schedule=WarmupDecayLR --total-num-steps=6 \
                  --warmup-num-steps=2 --warmup-type=linear --recompute-granularity=full --zero-stage=1",
        prints: &["activation_checkpointing.number_checkpoints"],
    },
    Case {
        config: "megatron-deepspeed.json",
        beside: "--tensor-model-parallel-size=2 --data-parallel-size=2 --lr=1e-3 --lr-decay-style=linear",
        instead: "--tensor-model-parallel-size=2 --data-parallel-size=2 --lr=1e-3 --micro-batch-size=2 \
                  --global-batch-size=16 --fp16 --loss-scale=1024 --grad-reduce-in-fp16",
        prints: &["fp16.hysteresis", "checkpoint.load_universal"],
    },
    Case {
        config: "sgd-onecycle-monitors.json",
        beside: "--data-parallel-size=2",
        instead: "--data-parallel-size=2 --global-batch-size=8 --micro-batch-size=4 --optimizer=sgd --lr=0.01 \
                  --weight-decay=0 --lr-schedule=OneCycle --cycle-min-lr=0.001 --cycle-max-lr=0.01 --decay-lr-rate=0.1 \
                  --cycle-first-step-size=3 --cycle-second-step-size=3 --decay-step-size=2 --cycle-momentum=false \
                  --recompute-granularity=full",
        prints: &["logs/csv/metrics.jsonl has a JSON object for each step"],
    },
];

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// Where the run writes its metrics: those of a CSV monitor replace the run file's.
fn losses(site: &Site) -> Vec<(u64, String)> {
    let monitor = site.path("logs/csv/metrics.jsonl");
    if monitor.exists() {
        fs::rename(&monitor, site.path("metrics.jsonl")).unwrap();
    }
    site.losses()
}

#[test]
fn real_configurations_run_as_flags_that_say_the_same() {
    for case in CASES {
        let site = site(case.config);
        if case.config.starts_with("sgd") {
            site.edit("metrics = \"metrics.jsonl\"\n", "");
        }
        let with = [vec!["--deepspeed-config=ds_config.json"], words(case.beside)].concat();
        let output = site.succeed(&with);
        let text = stdout(&output);
        for part in case.prints {
            assert!(text.contains(part), "{}: {part:?} is not in {text}", case.config);
        }
        let by_file = losses(&site);
        assert_eq!(by_file.len(), 6, "{}", case.config);
        let _ = fs::remove_file(site.path("metrics.jsonl"));
        site.succeed(&[words(case.instead), vec!["--metrics=metrics.jsonl"]].concat());
        assert_eq!(site.losses(), by_file, "{}", case.config);

        // The run file that is printed makes the same run.
        let print = site.succeed(&[with.clone(), vec!["--print-config"]].concat());
        site.write("whole.toml", &stdout(&print));
        fs::rename(site.path("run.toml"), site.path("first.toml")).unwrap();
        fs::rename(site.path("whole.toml"), site.path("run.toml")).unwrap();
        let _ = fs::remove_file(site.path("metrics.jsonl"));
        site.succeed(&[]);
        assert_eq!(losses(&site), by_file, "{}: {}", case.config, stdout(&print));
    }
}

#[test]
fn a_configuration_becomes_the_sections_of_a_run_file() {
    for config in ["stage2.json", "warmup-decay.json", "megatron-deepspeed.json"] {
        let case = CASES.iter().find(|case| case.config == config).unwrap();
        let site = site(config);
        site.succeed(&[vec!["--deepspeed=ds_config.json"], words(case.beside)].concat());
        let by_file = site.losses();
        let mut convert = site.mark(crate::support::megatron());
        let converted = convert.args(["convert-config", "ds_config.json"]).output().unwrap();
        assert!(converted.status.success(), "{}", stderr(&converted));
        let text = stdout(&converted);
        // Sections of both are one.
        let merged = text
            .replace("[training]\n", "[training]\ntrain_iters = 6\n")
            .replace("[logging]\n", "[logging]\nmetrics = \"metrics.jsonl\"\neval_iters = 0\n");
        let logging = "[logging]\nmetrics = \"metrics.jsonl\"\neval_iters = 0\n";
        let rest = if text.contains("[logging]") { "" } else { logging };
        let data = RUN.split("[training]").next().unwrap();
        site.write("run.toml", &format!("{data}{merged}\n{rest}"));
        let _ = fs::remove_file(site.path("metrics.jsonl"));
        // Flags beside the file contradict nothing: a flag overrides a run file.
        site.succeed(&words(case.beside));
        assert_eq!(site.losses(), by_file, "{config}: {text}");
    }
}

#[test]
fn contradictions_and_hostile_files_get_one_message() {
    let base = "\"train_micro_batch_size_per_gpu\": 2, \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-4}}";
    let cases: [(&str, &[&str], &[&str]); 12] = [
        (
            "{BASE, \"train_batch_size\": 16, \"gradient_accumulation_steps\": 3}",
            &["--data-parallel-size=2"],
            &[
                "global_batch_size = 16 (ds_config.json: train_batch_size) must be",
                "micro_batch_size = 2 (ds_config.json: train_micro_batch_size_per_gpu)",
                "gradient_accumulation_steps = 3 (ds_config.json: gradient_accumulation_steps)",
                "= 12",
            ],
        ),
        (
            "{\"train_batch_size\": 15, \"optimizer\": {\"type\": \"AdamW\"}}",
            &["--data-parallel-size=2"],
            &[
                "global_batch_size = 15 (ds_config.json: train_batch_size) must be a multiple of",
                "= 2",
            ],
        ),
        (
            "{BASE}",
            &["--lr=2e-4"],
            &["ds_config.json: optimizer.params.lr: lr = 0.0001 contradicts --lr, which says 2e-4"],
        ),
        (
            "{BASE, \"fp16\": {\"enabled\": true}, \"bf16\": {\"enabled\": true}}",
            &[],
            &["bf16 (ds_config.json: bf16.enabled) and fp16 (ds_config.json: fp16.enabled)"],
        ),
        (
            "{BASE, \"fp16\": {\"enabled\": true}}",
            &["--bf16"],
            &["bf16 (--bf16) and fp16 (ds_config.json: fp16.enabled)"],
        ),
        (
            "{BASE, \"zero_optimization\": {\"stage\": 4}}",
            &[],
            &["zero-stage", "must be 0, 1, 2 or 3"],
        ),
        (
            "{BASE, \"zero_optimisation\": {\"stage\": 2}, \"steps_per_prinz\": 1}",
            &[],
            &[
                "ds_config.json: zero_optimisation: unknown key; did you mean \"zero_optimization\"?",
                "ds_config.json: steps_per_prinz: unknown key",
            ],
        ),
        (
            "{BASE, \"zero_optimization\": {\"stage\": 2, \"offload_param\": {\"device\": \"cpu\"}}}",
            &[],
            &[
                "offload_param = cpu (ds_config.json: zero_optimization.offload_param.device)",
                "zero_stage = 3",
            ],
        ),
        ("{BASE, \"optimizer\": 3}", &[], &["the key \"optimizer\" is there twice"]),
        ("{BASE,, }", &[], &["ds_config.json: not valid JSON", "line 1"]),
        ("[]", &[], &["ds_config.json: expected an object"]),
        (
            "{BASE, \"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_max_lr\": 1e-3, \"warmup_step\": 3}}}",
            &[],
            &["scheduler.params.warmup_step: unknown key"],
        ),
    ];
    for (text, flags, parts) in cases {
        let site = Site::new();
        site.write("run.toml", RUN);
        site.write("ds_config.json", &text.replace("BASE", base));
        let before = site.files();
        let output =
            site.pretrain(&[flags, &["--deepspeed", "ds_config.json"]].concat()).output().unwrap();
        refused(&output, parts);
        site.assert_unchanged(&before);
    }
    let site = Site::new();
    refused(
        &site.pretrain(&["--deepspeed-config=none.json"]).output().unwrap(),
        &["cannot read none.json"],
    );
}
