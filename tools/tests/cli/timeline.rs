//! `megatron timeline`: the schedule of a run, drawn without a run.

use std::fs;
use std::path::Path;
use std::process::Output;

use crate::support::{megatron, stderr, stdout};

/// A run whose data are not there.
const RUN: &str = r#"[model]
num_layers = 4
hidden_size = 64
num_attention_heads = 4
seq_length = 32

[data]
data_path = "nowhere.txt"
tokenizer = "byte"

[training]
micro_batch_size = 2
global_batch_size = 8
train_iters = 10

[optimizer]
lr = 1e-3
"#;

fn timeline(folder: &Path, args: &[&str]) -> Output {
    fs::write(folder.join("run.toml"), RUN).unwrap();
    megatron().current_dir(folder).arg("timeline").args(args).output().unwrap()
}

fn drawn(args: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let output = timeline(folder.path(), args);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    stdout(&output)
}

fn refused(args: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let output = timeline(folder.path(), args);
    assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
    stderr(&output)
}

#[test]
fn the_schedule_of_a_run_file_and_flags_is_drawn_without_data() {
    let text = drawn(&["run.toml", "--pipeline-model-parallel-size=2"]);
    for part in [
        "1f1b | tp 1 · pp 2 · dp 1 | 4 microbatches of 2 samples\n",
        "stage 0 |a0",
        "stage 1 ",
        "|A3",
        "| stage | layers | forward | backward | waits | in flight |",
        "| 0     |    0–1 |    1.00 |",
        "| 1     |    2–3 |",
        "bubble: ",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    let flags = ["--pipeline-model-parallel-size", "2", "--num_virtual_stages_per_pipeline_rank=2"];
    let text = drawn(&[&["run.toml"], &flags[..]].concat());
    assert!(text.contains("interleaved | ") && text.contains("| 0     |  0 + 2 |"), "{text}");
    assert!(text.contains("b3") && text.contains("B3"), "{text}");
}

#[test]
fn shapes_and_batch_are_all_that_flags_must_say() {
    let words = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \
                 --micro-batch-size 1 --global-batch-size 4 --pipeline-model-parallel-size 2";
    let words: Vec<&str> = words.split_whitespace().collect();
    let text = drawn(&words);
    assert!(text.contains("4 microbatches of 1 sample\n"), "{text}");
    assert!(text.contains("note: ") && text.contains("give --vocab-size"), "{text}");
    let text = drawn(&[&words[..], &["--vocab-size=100"]].concat());
    assert!(!text.contains("note: "), "{text}");
    let text = refused(&words[2..]);
    assert!(text.contains("not set: num_layers under [model]"), "{text}");
}

#[test]
fn of_many_microbatches_the_middle_is_left_out_and_a_line_says_so() {
    let long =
        ["run.toml", "--pipeline-model-parallel-size=2", "--global-batch-size=2000", "--columns"];
    let text = drawn(&[&long[..], &["80"]].concat());
    let stages: Vec<&str> = text.lines().filter(|line| line.starts_with("stage ")).collect();
    assert_eq!(stages.len(), 2);
    assert!(stages.iter().all(|line| line.len() <= 80 && line.contains(" ~ ")), "{text}");
    assert!(stages[0].contains("|a0") && stages[1].contains("|A999"), "{text}");
    assert!(text.contains("the middle of the step is left out"), "{text}");
}

#[test]
fn a_picture_is_written_beside() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["run.toml", "--pipeline-model-parallel-size=2", "--svg=picture.svg"];
    let output = timeline(folder.path(), &args);
    assert!(stdout(&output).contains("picture: picture.svg\n"), "{}", stderr(&output));
    let picture = fs::read_to_string(folder.path().join("picture.svg")).unwrap();
    // A background, rows, four forwards and backwards of each stage, and a legend of three.
    assert_eq!(picture.matches("<rect").count(), 1 + 2 + 16 + 3);
    assert!(picture.contains("1f1b | tp 1 · pp 2 · dp 1"), "{picture}");
    let output = timeline(folder.path(), &["run.toml", "--svg=nowhere/picture.svg"]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("cannot write the picture to nowhere/picture.svg (--svg)"), "{text}");
    let text = refused(&["run.toml", "--global-batch-size=200000", "--svg=picture.svg"]);
    assert!(text.contains("--svg: a step has 200000 passes"), "{text}");
}

#[test]
fn settings_that_make_no_schedule_are_refused_as_pretrain_refuses_them() {
    for (args, part) in [
        (&["--pipeline-model-parallel-size=5"][..], "num_layers = 4"),
        (&["--global-batch-size=3"], "global_batch_size = 3"),
        (&["--pipline-model-parallel-size=2"], "did you mean --pipeline-model-parallel-size?"),
        (&["--columns=none"], "--columns"),
        (&["--num-experts=8"], "mixture of experts is not supported"),
        (&["--config=other.toml"], "two run files"),
    ] {
        let text = refused(&[&["run.toml"], args].concat());
        assert!(text.contains(part), "no {part:?} in {text}");
        assert!(!text.contains("panicked"), "{text}");
    }
}

#[test]
fn help_names_its_own_flags_and_points_to_those_of_pretrain() {
    for words in [&["timeline", "--help"][..], &["help", "timeline"]] {
        let text = stdout(&megatron().args(words).output().unwrap());
        assert!(text.contains("--svg") && text.contains("megatron pretrain --help"), "{text}");
        assert!(!text.contains("--hidden-size"), "{text}");
    }
    for shell in ["bash", "zsh", "fish"] {
        let text = stdout(&megatron().args(["completions", shell]).output().unwrap());
        assert!(text.contains("timeline") && text.contains("columns"), "{shell}");
    }
}
