//! `megatron pretrain` with wrong settings: one message that says what is wrong, where, and what to
//! do.

use std::process::Output;

use crate::support::{megatron, stderr, stdout};

/// A run with only valid settings.
const GOOD: &str = r#"[model]
num_layers = 4
hidden_size = 64
num_attention_heads = 8
num_query_groups = 4
seq_length = 32

[data]
data_path = "TEXT"
tokenizer = "byte"
cache_dir = "CACHE"

[training]
micro_batch_size = 2
global_batch_size = 8
train_iters = 10

[optimizer]
lr = 1e-3
"#;

/// `pretrain` of the good run file with `from` replaced by `to`, under `flags`.
fn pretrain(from: &str, to: &str, flags: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(
        folder.path().join("text.txt"),
        "All work and no play makes a dull corpus.\n\n".repeat(200),
    )
    .unwrap();
    assert!(GOOD.contains(from));
    let text =
        GOOD.replace(from, to).replace("TEXT", &path("text.txt")).replace("CACHE", &path("cache"));
    std::fs::write(folder.path().join("run.toml"), text).unwrap();
    megatron()
        .current_dir(folder.path())
        .arg("pretrain")
        .arg("run.toml")
        .args(flags)
        .output()
        .unwrap()
}

/// Asserts that a run ends with code 2 and one message that contains all of `parts`.
fn refused(output: &Output, parts: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(text.matches("error: ").count(), 1, "{text}");
    for part in parts {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert!(!text.contains("panicked") && !text.contains("backtrace"), "{text}");
}

#[test]
fn help_explains_every_level() {
    let levels: [(&[&str], &str); 6] = [
        (&["--help"], "pretrain"),
        (&["pretrain", "--help"], "--num-layers"),
        (&["launch", "--help"], "--nproc-per-node"),
        (&["help"], "pretrain"),
        (&["help", "pretrain"], "--num-layers"),
        (&["help", "bench", "step"], "--micro-batch-size"),
    ];
    for (words, expected) in levels {
        let output = megatron().args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(stdout(&output).contains(expected));
    }
}

#[test]
fn shells_complete_commands_and_flags() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = megatron().args(["completions", shell]).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{shell}");
        let text = stdout(&output);
        let known = ["pretrain", "tensor-model-parallel-size", "reshard"]
            .iter()
            .all(|word| text.contains(word));
        assert!(known && !text.contains("use-mcore-models"), "{shell}: {text}");
    }
}

/// As in `--help`: switches with their values.
#[test]
fn every_command_has_a_man_page() {
    let folder = tempfile::tempdir().unwrap();
    let output = megatron().current_dir(folder.path()).args(["man", "pages"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let page =
        |name: &str| std::fs::read_to_string(folder.path().join("pages").join(name)).unwrap();
    assert!(page("megatron.1").contains("megatron\\-pretrain(1)"));
    assert!(page("megatron-bench-step.1").contains("micro\\-batch\\-size"));
    let pretrain = page("megatron-pretrain.1");
    assert!(pretrain.contains("swiglu") && pretrain.contains("true|false"), "{pretrain}");
}

#[test]
fn help_shows_sections_and_defaults() {
    let output = megatron().args(["pretrain", "--help"]).output().unwrap();
    let text = stdout(&output);
    for section in [
        "[model]",
        "[parallel]",
        "[data]",
        "[training]",
        "[optimizer]",
        "[checkpoint]",
        "[logging]",
    ] {
        assert!(text.contains(&format!("{section}:")), "{section}");
    }
    assert!(text.contains("[default: 969,30,1]") && text.contains("[default: 1234]"));
}

#[test]
fn an_unknown_flag_names_the_nearest() {
    refused(
        &pretrain("", "", &["--hiden-size", "4"]),
        &["--hiden-size: no such flag; did you mean --hidden-size?"],
    );
}

#[test]
fn an_unknown_key_names_its_line_and_the_nearest() {
    refused(
        &pretrain("num_layers", "num_layer", &[]),
        &["run.toml:2: ", "`num_layer`", "did you mean `num_layers`?"],
    );
}

#[test]
fn values_of_the_wrong_kind_are_told_in_plain_words() {
    for (flags, part) in [
        (&["--zero-stage", "4"][..], "'--zero-stage <0|1|2|3>': must be 0, 1, 2 or 3"),
        (&["--num-layers=four"], "'--num-layers <N>': expects a whole number"),
        (&["--num-layers=-4"], "'--num-layers <N>': must not be negative"),
        (&["--lr=high"], "'--lr <X>': expects a number"),
        (&["second.toml"], "two run files: second.toml is the second; name only one run file"),
        (&["--lr-warmup-iters=11"], "give fewer --lr-warmup-iters, or a part of the decay with"),
    ] {
        refused(&pretrain("", "", flags), &[part]);
    }
    refused(
        &pretrain("num_layers = 4", "num_layers = -4", &[]),
        &["`num_layers` under [model] cannot be -4: must not be negative"],
    );
}

/// Flags of each program are explained on a page about it.
#[test]
fn flags_of_other_programs_name_their_page() {
    for (flags, page) in [
        (&["--zero_optimization", "3"][..], "from-deepspeed.md explains"),
        (&["--per_device_train_batch_size", "3"], "from-torchrun.md explains"),
        (&["--num-experts", "3"], "from-megatron-lm.md explains"),
        (
            &["--num-experts", "3", "--steps-per-print", "2"],
            "from-deepspeed.md and docs/reference/from-megatron-lm.md explain how",
        ),
    ] {
        refused(&pretrain("", "", flags), &[page]);
    }
    let launch = |flags: &[&str]| megatron().arg("launch").args(flags).output().unwrap();
    refused(&launch(&["--tee", "3", "--", "true"]), &["from-torchrun.md explains"]);
    refused(&launch(&["--num_gpus", "3", "--", "true"]), &["from-deepspeed.md explains"]);
    let output = launch(&["--ssh-port", "22", "--", "true"]);
    refused(&output, &["--ssh-port has no effect without --hostfile"]);
}

#[test]
fn a_refused_run_leaves_no_empty_folder() {
    let folder = tempfile::tempdir().unwrap();
    let save = folder.path().join("new/checkpoints");
    let save = save.to_str().unwrap();
    for ranks in ["1", "2"] {
        let flags = ["--data-path=no-such-data", "--save", save, "--data-parallel-size", ranks];
        let output = pretrain("", "", &flags);
        assert!(stderr(&output).contains("no-such-data: does not exist"), "{}", stderr(&output));
        assert!(!folder.path().join("new").exists());
    }
}

#[test]
fn a_missing_run_file_is_named() {
    let output = megatron().args(["pretrain", "--config", "/no/run.toml"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        stderr(&output),
        "error: cannot read the run file /no/run.toml: No such file or directory (os error 2)\n"
    );
}

#[test]
fn missing_settings_are_listed() {
    refused(&pretrain("hidden_size = 64\n", "", &[]), &["not set: hidden_size under [model]"]);
}

#[test]
fn group_query_attention_alone_shares_one_key_value_head_among_all() {
    let output = pretrain(
        "num_query_groups = 4",
        "group_query_attention = true",
        &["--tensor-model-parallel-size=2"],
    );
    refused(
        &output,
        &["num_query_groups = 1 (default: 1 with group_query_attention)", "1 mod 2 = 1"],
    );
    let output = pretrain("", "", &["--group-query-attention", "--tensor-model-parallel-size=3"]);
    refused(&output, &["num_query_groups = 4 (run.toml:5)"]);
}

#[test]
fn sizes_that_do_not_divide_are_cited_with_their_origins() {
    let output = pretrain("", "", &["--tensor-model-parallel-size", "3"]);
    refused(
        &output,
        &[
            "num_attention_heads = 8 (run.toml:4)",
            "tensor_model_parallel_size = 3 (--tensor-model-parallel-size)",
            "8 mod 3 = 2",
        ],
    );
    refused(
        &pretrain("global_batch_size = 8", "global_batch_size = 7", &[]),
        &["7 mod 2 = 1", "data_parallel_size = 1 (default)"],
    );
    refused(
        &pretrain("hidden_size = 64", "hidden_size = 65", &[]),
        &["65 mod 8 = 1", "kv_channels"],
    );
    refused(
        &pretrain("num_layers = 4", "num_layers = 1", &["--pipeline-model-parallel-size=2"]),
        &["num_layers = 1", "2 stages"],
    );
}

#[test]
fn a_world_that_does_not_fit_the_layout_is_refused() {
    let output = {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("run.toml"), GOOD).unwrap();
        megatron()
            .current_dir(folder.path())
            .envs([("RANK", "0"), ("WORLD_SIZE", "6")])
            .args(["pretrain", "run.toml", "--tensor-model-parallel-size=4"])
            .output()
            .unwrap()
    };
    refused(&output, &["WORLD_SIZE = 6 (environment)", "6 mod 4 = 2"]);
}

#[test]
fn contradictions_are_refused() {
    let contradictions: [(&[&str], &str); 12] = [
        (
            &["--delay-wgrad-compute"],
            "delay_wgrad_compute = true (--delay-wgrad-compute) fills the time",
        ),
        (&["--pipeline-schedule=interleaved"], "num_layers_per_virtual_pipeline_stage"),
        (
            &[
                "--pipeline-schedule=1f1b",
                "--num-layers-per-virtual-pipeline-stage=1",
                "--pipeline-model-parallel-size=2",
            ],
            "pipeline_schedule = 1f1b (--pipeline-schedule)",
        ),
        (
            &[
                "--num-virtual-stages-per-pipeline-rank=2",
                "--num-layers-per-virtual-pipeline-stage=1",
                "--pipeline-model-parallel-size=2",
            ],
            "num_virtual_stages_per_pipeline_rank (--num-virtual-stages-per-pipeline-rank)",
        ),
        (
            &[
                "--num-virtual-stages-per-pipeline-rank=2",
                "--pipeline-schedule=1f1b",
                "--pipeline-model-parallel-size=2",
            ],
            "num_virtual_stages_per_pipeline_rank = 2 (--num-virtual-stages-per-pipeline-rank) needs the interleaved",
        ),
        (
            &["--num-virtual-stages-per-pipeline-rank=0"],
            "(--num-virtual-stages-per-pipeline-rank) must be at least 1",
        ),
        (
            &[
                "--pipeline-extra-warmup=2",
                "--pipeline-schedule=gpipe",
                "--pipeline-model-parallel-size=2",
            ],
            "pipeline_extra_warmup = 2 (--pipeline-extra-warmup) is for the 1f1b schedule",
        ),
        (
            &["--train-iters=10", "--train-samples=80"],
            "train_iters (--train-iters) and train_samples (--train-samples)",
        ),
        (&["--lr-warmup-iters=1", "--lr-warmup-fraction=0.1"], "lr_warmup_iters"),
        (&["--save-interval=5"], "save_interval = 5 (--save-interval) has no folder"),
        (&["--recompute-method=block"], "recompute_granularity = full"),
        (&["--min-lr=1"], "min_lr = 1 (--min-lr) exceeds lr = 0.001 (run.toml:19)"),
    ];
    for (flags, expected) in contradictions {
        refused(&pretrain("", "", flags), &[expected]);
    }
}

#[test]
fn settings_of_another_precision_are_refused() {
    let contradictions: [(&[&str], &[&str]); 9] = [
        (&["--bf16", "--fp16"], &["bf16 (--bf16) and fp16 (--fp16) set the same thing"]),
        (
            &["--loss-scale=128"],
            &["loss_scale (--loss-scale) is a setting of fp16", "the run is in fp32"],
        ),
        (
            &["--hysteresis=2"],
            &["hysteresis (--hysteresis) is a setting of fp16", "the run is in fp32"],
        ),
        (
            &["--fp16", "--loss-scale=128", "--loss-scale-window=5"],
            &[
                "loss_scale_window (--loss-scale-window)",
                "loss_scale = 128 (--loss-scale) is fixed",
            ],
        ),
        (&["--fp16", "--loss-scale=1e39"], &["(--loss-scale)", "the largest of f32"]),
        (
            &["--fp16", "--loss-scale=-1"],
            &["loss_scale = -1 (--loss-scale) must be a finite number above 0"],
        ),
        (
            &["--fp16", "--initial-loss-scale=4", "--min-loss-scale=8"],
            &[
                "min_loss_scale = 8 (--min-loss-scale) exceeds initial_loss_scale = 4 (--initial-loss-scale)",
            ],
        ),
        (&["--fp16", "--hysteresis=0"], &["hysteresis = 0 (--hysteresis) must be at least 1"]),
        (
            &["--grad-reduce-in-bf16"],
            &["grad_reduce_in_bf16 = true (--grad-reduce-in-bf16)", "the run is in fp32"],
        ),
    ];
    for (flags, expected) in contradictions {
        refused(&pretrain("", "", flags), expected);
    }
}

#[test]
fn context_parallelism_needs_heads_and_tokens_that_it_can_deal() {
    refused(
        &pretrain(
            "",
            "",
            &[
                "--context-parallel-size=3",
                "--tensor-model-parallel-size=2",
                "--num-attention-heads=4",
            ],
        ),
        &[
            "num_query_groups = 4",
            "must be a multiple of 6",
            "context_parallel_size = 3 (--context-parallel-size)",
        ],
    );
    refused(
        &pretrain(
            "",
            "",
            &["--context-parallel-size=2", "--num-attention-heads=4", "--seq-length=15"],
        ),
        &[
            "seq_length = 15 (--seq-length) must be a multiple of context_parallel_size = 2 (--context-parallel-size)",
        ],
    );
}

#[test]
fn cuda_graphs_are_refused_on_a_cpu_and_beside_what_they_cannot_repeat() {
    let graph = &["--enable-cuda-graph", "--device=cpu"][..];
    for ranks in ["--data-parallel-size=1", "--data-parallel-size=2"] {
        let output = pretrain("", "", &[graph, &[ranks, "--global-batch-size=8"]].concat());
        refused(
            &output,
            &["--enable-cuda-graph records the work of a GPU, but this run computes on the CPU"],
        );
    }
    refused(
        &pretrain("", "", &["--enable-cuda-graph", "--tensor-model-parallel-size=2"]),
        &["tensor_model_parallel_size = 2 (--tensor-model-parallel-size) cannot be combined with \
             enable_cuda_graph = true (--enable-cuda-graph)"],
    );
}

#[test]
fn numbers_out_of_range_are_refused() {
    for flag in [
        "--hidden-dropout=1",
        "--lr=nan",
        "--adam-beta2=1.5",
        "--train-iters=0",
        "--seq-length=0",
        "--split=a,b",
    ] {
        let key = flag.trim_start_matches("--").split('=').next().unwrap().replace('-', "_");
        refused(
            &pretrain("", "", &[flag]),
            &[&format!("{key} = "), &format!("({})", flag.split('=').next().unwrap())],
        );
    }
}

/// Products of sizes do not overflow, and no impossible amount of memory is requested.
#[test]
fn sizes_that_are_wrong_by_typing_are_refused() {
    let sizes = [
        "num-layers",
        "hidden-size",
        "ffn-hidden-size",
        "kv-channels",
        "max-position-embeddings",
        "make-vocab-size-divisible-by",
        "micro-batch-size",
        "global-batch-size",
        "seq-length",
    ];
    for size in sizes {
        for number in [u64::MAX - 7, 1 << 32] {
            let said = pretrain("", "", &[&format!("--{size}={number}")]);
            refused(
                &said,
                &[&format!("{} = {number}", size.replace('-', "_")), "must be at most 2147483647"],
            );
        }
        // If it is valid, there is too little memory for it, or it contradicts other settings.
        let said = stderr(&pretrain("", "", &[&format!("--{size}=2147483640")]));
        assert!(
            said.contains("error: ") && !said.contains("bug") && !said.contains("allocation"),
            "{size}: {said}"
        );
    }
}

#[test]
fn missing_data_are_named_once_before_ranks_start() {
    let output = pretrain("\"TEXT\"", "\"/no/such/text\"", &["--tensor-model-parallel-size=2"]);
    let text = stderr(&output);
    assert!(!output.status.success());
    assert_eq!(text.matches("/no/such/text: ").count(), 1, "{text}");
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let output = pretrain("", "", &["--save=/dev/null/checkpoints"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("cannot write to the folder /dev/null/checkpoints"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn checkpoints_of_another_run_are_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("latest_checkpointed_iteration.txt"), "7").unwrap();
    std::fs::create_dir(folder.path().join("iter_0000007")).unwrap();
    let output = pretrain("", "", &[&format!("--save={}", folder.path().display())]);
    assert!(!output.status.success());
    let text = stderr(&output);
    assert!(
        text.contains("iter_0000007") && text.contains("overwrite") && text.contains("--load"),
        "{text}"
    );
}

#[test]
fn a_damaged_checkpoint_is_named_once_before_ranks_start() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("latest_checkpointed_iteration.txt"), "7").unwrap();
    std::fs::create_dir(folder.path().join("iter_0000007")).unwrap();
    let output = pretrain(
        "",
        "",
        &[&format!("--load={}", folder.path().display()), "--tensor-model-parallel-size=2"],
    );
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains("iter_0000007/manifest.json") && !text.contains("rank"), "{text}");
}

/// As in Megatron-LM, a loss scale of 0 is dynamic, gloo is the backend for CPUs, and nccl for
/// GPUs.
#[test]
fn values_of_megatron_lm_are_understood() {
    let flags =
        ["--train-iters=1", "--fp16", "--loss-scale=0", "--initial-loss-scale=8", "--device=cpu"];
    let notes = |backend: &str| {
        let output = pretrain("", "", &[&flags[..], &["--distributed-backend", backend]].concat());
        assert_eq!(output.status.code(), Some(0), "{backend}: {}", stderr(&output));
        stdout(&output).matches("distributed_backend = nccl").count()
    };
    assert_eq!((notes("gloo"), notes("nccl")), (0, 1));
}

#[test]
fn layouts_in_megatrons_words_are_those_of_the_partition() {
    let refuses = |flags: &[&str], parts: &[&str]| refused(&pretrain("", "", flags), parts);
    let stages = "--pipeline-model-parallel-size=2";
    refuses(
        &[stages, "--pipeline-model-parallel-layout=Ett|t|tL"],
        &["has 3 stages", "a multiple of pipeline_model"],
    );
    refuses(
        &[stages, "--pipeline-model-parallel-layout=Et|tL"],
        &["pipeline_partition = 1,1", "num_layers = 4"],
    );
    refuses(&[stages, "--pipeline-model-parallel-layout=Et|mtL"], &["multi-token prediction (m)"]);
    refuses(
        &[stages, "--pipeline-partition=2,2", "--decoder-first-pipeline-num-layers=1"],
        &[
            "pipeline_partition (--pipeline-partition)",
            "decoder_first_pipeline_num_layers",
            "give only one",
        ],
    );
}

/// Megatron-LM's scripts contain flags that are read only together with another flag.
#[test]
fn settings_that_nothing_reads_are_passed_over_in_one_line() {
    let flags = [
        "--bf16",
        "--initial-loss-scale=65536",
        "--hysteresis=2",
        "--no-load-optim",
        "--profile-step-start=4",
    ];
    let more = [
        "--log-timers-to-tensorboard",
        "--lr-warmup-samples=0",
        "--lr-warmup-fraction=0.5",
        "--train-iters=2",
    ];
    let output =
        pretrain("", "", &[&flags[..], &more, &["--use-flash-attn", "--log-interval=1"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    let names = "--use-flash-attn, --initial-loss-scale, --hysteresis, --no-load-optim, --profile-step-start, \
                 --log-timers-to-tensorboard";
    assert!(
        text.contains(&format!("6 flags of Megatron-LM have no effect here: {names}\n")),
        "{text}"
    );
    // The fraction is used: the first step is halfway up.
    assert!(text.contains("learning rate: 1.000000E-03"), "{text}");
}
