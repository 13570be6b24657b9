//! `megatron reshard`: converts one run's checkpoint to another layout, and refuses unusable input.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::support::{kill, megatron, stderr, stdout, wait_for};

const RUN: &str = r#"[model]
num_layers = 4
hidden_size = 16
num_attention_heads = 4
seq_length = 8

[data]
data_path = "text.txt"
tokenizer = "byte"
cache_dir = "cache"

[training]
micro_batch_size = 1
global_batch_size = 2
train_iters = 6
exit_interval = 3

[optimizer]
lr = 1e-3

[logging]
metrics = "metrics.jsonl"
eval_iters = 0
"#;

/// A folder in which a run of one rank made the first half of its steps and saved to `saved`.
pub fn trained(flags: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run.toml"), RUN).unwrap();
    fs::write(
        folder.path().join("text.txt"),
        "A text that says little, again and again.\n\n".repeat(100),
    )
    .unwrap();
    let args = [&["pretrain", "run.toml", "--save", "saved"], flags].concat();
    succeed(megatron().current_dir(folder.path()).args(args));
    folder
}

pub fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    output
}

fn reshard(folder: &Path, args: &[&str]) -> Command {
    let mut command = megatron();
    command.current_dir(folder).arg("reshard").args(args);
    command
}

/// The losses of the steps in `metrics.jsonl`.
fn losses(folder: &Path) -> Vec<f64> {
    let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let steps = text.lines().filter(|line| line.contains("\"grad_norm\""));
    steps
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).unwrap()["lm_loss"].as_f64().unwrap()
        })
        .collect()
}

#[test]
fn a_resharded_checkpoint_resumes_under_its_layout_as_the_first_does_under_its_own() {
    let folder = trained(&[]);
    let dir = folder.path();
    for sidecar in ["tokenizer.json", "hf_config.json"] {
        fs::write(dir.join("saved").join(sidecar), sidecar).unwrap();
    }
    let layout = [
        "--tensor-model-parallel-size=2",
        "--pipeline-model-parallel-size=2",
        "--use-distributed-optimizer",
    ];
    let output = succeed(&mut reshard(dir, &[&["saved", "cut"], &layout[..]].concat()));
    let text = stdout(&output);
    assert!(
        text.contains("saved/iter_0000003 (tp 1 · pp 1 · dp 1) → cut/iter_0000003 (tp 2 · pp 2 · dp 1 · ZeRO-1)"),
        "{text}"
    );
    assert_eq!(fs::read_dir(dir.join("cut/iter_0000003")).unwrap().count(), 5);
    for sidecar in ["tokenizer.json", "hf_config.json"] {
        assert_eq!(fs::read_to_string(dir.join("cut").join(sidecar)).unwrap(), sidecar);
    }
    let go_on = |from: &str, flags: &[&str]| {
        succeed(
            megatron().current_dir(dir).args(["pretrain", "run.toml", "--load", from]).args(flags),
        );
        losses(dir)
    };
    let own = go_on("saved", &[]);
    let cut = go_on("cut", &layout);
    assert_eq!((own.len(), cut.len()), (6, 6));
    assert!(own.iter().zip(&cut).all(|(a, b)| (a - b).abs() < 1e-4 * a), "{own:?} {cut:?}");
}

#[test]
fn one_iteration_is_chosen_by_its_number_or_its_folder() {
    let folder = trained(&["--save-interval=1"]);
    for (i, args) in
        [&["saved", "--iteration=2"][..], &["saved/iter_0000002"]].into_iter().enumerate()
    {
        let to = format!("to{i}");
        let output = succeed(&mut reshard(folder.path(), &[args, &[&to]].concat()));
        assert!(stdout(&output).contains(&format!("{to}/iter_0000002")), "{}", stdout(&output));
    }
    let output = reshard(folder.path(), &["saved", "to9", "--iteration=9"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("iter_0000009: does not exist"), "{}", stderr(&output));
}

#[test]
fn what_does_not_fit_is_refused_with_the_equation_and_where_its_numbers_come_from() {
    let folder = trained(&[]);
    for (flags, code, parts) in [
        (
            &["--tensor-model-parallel-size=3"][..],
            2,
            &[
                "num_attention_heads = 4 (the checkpoint)",
                "multiple of tensor_model_parallel_size = 3 (--tensor-model-parallel-size)",
            ][..],
        ),
        (
            &["--pipeline-model-parallel-size=5"],
            2,
            &["num_layers = 4 (the checkpoint) cannot fill 5 stages"],
        ),
        (
            &["--num-layers-per-virtual-pipeline-stage=3"],
            2,
            &["num_layers = 4 (the checkpoint) must be a multiple"],
        ),
        (&["--data-parallel-size=1000000"], 2, &["1000000 ranks are more than"]),
        (
            &["--data-parallel-size=0"],
            2,
            &["data_parallel_size = 0 (--data-parallel-size) must be at least 1"],
        ),
    ] {
        let output = reshard(folder.path(), &[&["saved", "to"], flags].concat()).output().unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(parts.iter().all(|part| text.contains(part)), "{flags:?}: {text}");
        assert!(!folder.path().join("to").exists());
    }
    let output = reshard(folder.path(), &["saved", "saved"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("already exists"), "{}", stderr(&output));
}

/// If resharding is interrupted while writing, the exit code shows it, and nothing looks like a
/// checkpoint; the next attempt is complete.
#[test]
fn an_interrupted_run_leaves_nothing_that_looks_finished() {
    let folder = trained(&["--hidden-size=512", "--num-layers=2", "--train-iters=1"]);
    let to = folder.path().join("cut");
    let mut interrupted = false;
    for signal in ["INT", "TERM", "INT", "TERM", "INT", "TERM"] {
        let mut command =
            reshard(folder.path(), &["saved", "cut", "--tensor-model-parallel-size=4"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // Its first file appears after it starts to handle signals.
        let begun = || {
            [".iter_0000001.tmp/rank_00000.safetensors", "iter_0000001"]
                .iter()
                .any(|name| to.join(name).exists())
        };
        wait_for("resharding to begin", || begun().then_some(()));
        kill(child.id(), signal);
        let status = child.wait().unwrap();
        if status.success() {
            fs::remove_dir_all(&to).unwrap(); // it finished first
            continue;
        }
        assert_eq!(status.code(), Some(if signal == "INT" { 130 } else { 143 }));
        let left: Vec<_> =
            fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.is_empty(), "{left:?}");
        interrupted = true;
    }
    assert!(interrupted, "no run was slow enough to be interrupted");
    succeed(&mut reshard(folder.path(), &["saved", "cut", "--tensor-model-parallel-size=4"]));
    succeed(megatron().current_dir(folder.path()).args(["inspect", "cut"]));
}

#[test]
fn memory_is_bounded_by_chunks_and_not_by_the_model() {
    // 80 MB of tensors, the largest with 4 MB, through a process limited to 48 MB of data.
    let folder = trained(&["--hidden-size=512", "--num-layers=2", "--train-iters=1"]);
    let files: u64 = fs::read_dir(folder.path().join("saved/iter_0000001"))
        .unwrap()
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum();
    assert!(files > 70_000_000, "{files}");
    let run = |kilobytes: u32, to: &str| {
        let mut command = Command::new("sh");
        let script = format!("ulimit -d {kilobytes} && exec \"$@\"");
        let flags = ["--tensor-model-parallel-size=4", "--data-parallel-size=2"];
        let program = env!("CARGO_BIN_EXE_megatron");
        command
            .current_dir(folder.path())
            .args(["-c", &script, "sh", program, "reshard", "saved", to])
            .args(flags);
        command.output().unwrap()
    };
    let output = run(48_000, "cut");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(!run(4_000, "less").status.success(), "the limit has no effect");
}
