//! `megatron pretrain` as a whole: a tiny run over several processes; its output, and stopping,
//! killing and resuming it.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{is_alive, kill, megatron, stderr, stdout, wait_for};

const RUN: &str = r#"[model]
num_layers = 2
hidden_size = 16
num_attention_heads = 2
seq_length = 8
attention_dropout = 0.0
hidden_dropout = 0.0

[parallel]
tensor_model_parallel_size = 2

[data]
data_path = "text.txt"
tokenizer = "byte"
cache_dir = "cache"

[training]
micro_batch_size = 1
train_iters = 4

[optimizer]
lr = 1e-3

[checkpoint]
save = "saved"
load = "saved"

[logging]
metrics = "metrics.jsonl"
eval_iters = 1
"#;

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("run.toml"), RUN).unwrap();
    std::fs::write(
        folder.path().join("text.txt"),
        "A text that says little, again and again.\n\n".repeat(100),
    )
    .unwrap();
    folder
}

fn pretrain(folder: &Path, flags: &[&str]) -> Command {
    let mut command = megatron();
    command
        .current_dir(folder)
        .args(["pretrain", "run.toml"])
        .args(flags)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn metrics(folder: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap_or_default();
    text.lines().filter(|line| line.contains("\"grad_norm\"")).map(str::to_string).collect()
}

fn saved_iteration(folder: &Path) -> String {
    let pointer = std::fs::read_to_string(folder.join("saved/latest_checkpointed_iteration.txt"));
    pointer.unwrap_or_default().trim().to_string()
}

/// The processes that `parent` started.
fn children(parent: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"))
        .unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

#[test]
fn a_run_prints_megatrons_lines_writes_metrics_and_saves() {
    let folder = folder();
    let output = pretrain(folder.path(), &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert_eq!(text.matches("| consumed samples:").count(), 4, "{text}");
    assert!(
        text.contains("] iteration        4/       4 | consumed samples:            4 |"),
        "{text}"
    );
    assert_eq!(metrics(folder.path()).len(), 4);
    assert_eq!(saved_iteration(folder.path()), "4");
}

#[test]
fn a_launcher_can_start_the_ranks_of_a_run() {
    let folder = folder();
    let program = env!("CARGO_BIN_EXE_megatron");
    let output = megatron()
        .current_dir(folder.path())
        .args([
            "launch",
            "--nproc-per-node",
            "4",
            "--",
            program,
            "pretrain",
            "run.toml",
            "--global-batch-size",
            "4",
        ])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("[0]:  ["), "{}", stdout(&output));
    assert_eq!(metrics(folder.path()).len(), 4);
}

#[test]
fn signals_save_and_stop_and_the_same_command_goes_on() {
    let single = &["--tensor-model-parallel-size=1"][..];
    for (signal, code, layout) in
        [("INT", 130, &[][..]), ("TERM", 143, single), ("HUP", 129, single)]
    {
        let folder = folder();
        let endless = [&["--train-iters=1000000"], layout].concat();
        let child = pretrain(folder.path(), &endless).stdout(Stdio::null()).spawn().unwrap();
        wait_for("some steps", || (metrics(folder.path()).len() > 2).then_some(()));
        kill(child.id(), signal);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert!(!stderr(&output).contains("error"), "{}", stderr(&output));
        let saved: usize = saved_iteration(folder.path()).parse().unwrap();
        assert_eq!(metrics(folder.path()).len(), saved);
        // The run's length is part of its learning-rate schedule, so it stays; the run makes one
        // more step.
        let next = format!("--exit-interval={}", saved + 1);
        let output = pretrain(folder.path(), &[&endless[..], &[&next]].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(saved_iteration(folder.path()), (saved + 1).to_string());
        assert_eq!(metrics(folder.path()).len(), saved + 1);
    }
}

#[test]
fn a_hangup_is_nothing_to_a_run_that_nohup_started() {
    let folder = folder();
    let mut command = Command::new("sh");
    let run = "trap '' HUP; exec \"$0\" pretrain run.toml --train-iters=1000000 --tensor-model-parallel-size=1";
    command.current_dir(folder.path()).args(["-c", run, env!("CARGO_BIN_EXE_megatron")]);
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let step_after = |step| {
        wait_for("a step", || Some(metrics(folder.path()).len()).filter(|&steps| steps > step))
    };
    step_after(2);
    kill(child.id(), "HUP");
    // Longer than saving and stopping would take.
    std::thread::sleep(Duration::from_millis(500));
    step_after(step_after(0));
    assert!(child.try_wait().unwrap().is_none());
    kill(child.id(), "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

/// `key` of each step in the metrics.
fn steps(folder: &Path, key: &str) -> Vec<u64> {
    let number =
        |line: &String| serde_json::from_str::<serde_json::Value>(line).unwrap()[key].as_u64();
    metrics(folder).iter().filter_map(number).collect()
}

#[test]
fn samples_of_the_whole_run_and_tokens_are_counted_through_changes_of_batch_and_length() {
    let folder = folder();
    let train = |flags: &[&str]| {
        let output = pretrain(folder.path(), flags).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        stdout(&output)
    };
    let run = ["--train-samples=24", "--position-embedding-type=rope"];
    train(&[&run[..], &["--global-batch-size=4", "--exit-interval=2"]].concat());
    train(&[&run[..], &["--global-batch-size=2", "--seq-length=16"]].concat());
    // 24 samples: 2 steps of 4, then 8 of 2.
    assert_eq!(steps(folder.path(), "consumed_samples"), [4, 8, 10, 12, 14, 16, 18, 20, 22, 24]);
    let tokens = [32, 64, 96, 128, 160, 192, 224, 256, 288, 320];
    assert_eq!(steps(folder.path(), "consumed_tokens"), tokens);
    // Measured again in a resumed run, even if its first step is not printed.
    assert!(steps(folder.path(), "memory").iter().all(|bytes| *bytes > 0));
    let again = train(&[&run[..], &["--global-batch-size=8", "--seq-length=16"]].concat());
    assert!(again.contains("nothing is left to train"), "{again}");
}

#[test]
fn a_batch_that_grows_makes_the_steps_that_the_samples_of_the_run_suffice_for() {
    let folder = folder();
    let growing =
        ["--train-samples=60", "--global-batch-size=8", "--rampup-batch-size", "2", "2", "30"];
    let run = [&growing[..], &["--lr-decay-style=linear", "--lr-decay-samples=50"]].concat();
    let train = |flags: &[&str]| {
        let output = pretrain(folder.path(), &[&run[..], flags].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        stdout(&output)
    };
    let first = train(&["--exit-interval=3"]);
    assert!(first.contains("| 2 to 8 microbatches of 1 "), "{first}");
    // Another layout resumes during the ramp-up, without a note about the learning rate, whose
    // decay is given in samples.
    let second = train(&["--data-parallel-size=2"]);
    assert!(!second.contains("note:"), "{second}");
    assert_eq!(steps(folder.path(), "global_batch_size"), [2, 2, 2, 2, 2, 4, 4, 4, 6, 6, 8, 8, 8]);
    assert_eq!(
        steps(folder.path(), "consumed_samples"),
        [2, 4, 6, 8, 10, 14, 18, 22, 28, 34, 42, 50, 58]
    );
    assert!(train(&[]).contains("nothing is left to train"));

    let refused =
        pretrain(folder.path(), &[&run[..], &["--lr-warmup-iters=2"]].concat()).output().unwrap();
    let message = stderr(&refused);
    assert!(
        refused.status.code() == Some(2) && message.contains("--lr-warmup-samples instead of"),
        "{message}"
    );
    // All errors at once, with the flags to change.
    let in_steps =
        ["--train-iters=20", "--lr-decay-iters=20", "--lr-warmup-iters=0", "--global-batch-size=8"];
    let flags = [&in_steps[..], &["--rampup-batch-size", "2", "2", "40"]].concat();
    let message = stderr(&pretrain(folder.path(), &flags).output().unwrap());
    for part in [
        "steps have different numbers of samples, so give lengths in samples: ",
        "--train-samples instead of train_iters = 20 (--train-iters), ",
        "--lr-decay-samples instead of lr_decay_iters = 20 (--lr-decay-iters)\n",
    ] {
        assert!(message.contains(part), "no {part:?} in {message}");
    }
}

/// With a tiny learning rate, losses differ only if the samples do.
#[test]
fn validation_goes_on_through_the_data_in_megatrons_orders_and_begins_anew_in_ours() {
    let losses = |order: &str, flags: &[&str]| {
        let folder = folder();
        // Every sentence is different.
        let text: String =
            (0..400).map(|i| format!("The number {} is {}.\n\n", i, i * i * 7 % 1000)).collect();
        std::fs::write(folder.path().join("text.txt"), text).unwrap();
        let order = format!("--dataloader-type={order}");
        let common = [
            &order,
            "--lr=1e-30",
            "--weight-decay=0",
            "--split=50,50,0",
            "--eval-interval=1",
            "--train-iters=3",
        ];
        for more in flags.iter().map(|flag| Some(*flag)).chain([None]) {
            let output =
                pretrain(folder.path(), &[&common[..], more.as_slice()].concat()).output().unwrap();
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        }
        let lines = std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
        let values =
            lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let losses = values
            .filter(|value| value["eval"] == "validation")
            .map(|value| value["lm_loss"].to_string());
        losses.collect::<Vec<_>>()
    };
    let ours = losses("shuffled", &[]);
    assert_eq!((ours.len(), &ours[0], &ours[1]), (3, &ours[1], &ours[2]));
    let megatrons = losses("single", &[]);
    assert!(
        megatrons.len() == 3 && megatrons[0] != megatrons[1] && megatrons[1] != megatrons[2],
        "{megatrons:?}"
    );
    // The position follows from the step, also in a resumed run.
    assert_eq!(losses("single", &["--exit-interval=2"]), megatrons);
}

#[test]
fn what_was_asked_for_and_does_not_happen_is_said_in_one_line() {
    for (flags, note) in [
        (
            &["--eval-interval=2", "--eval-iters=0"][..],
            Some("--eval-interval 2 has no effect: --eval-iters is 0"),
        ),
        (
            &["--eval-interval=2", "--split=1,0,0"],
            Some("has no effect: --split 1,0,0 leaves less than one sample"),
        ),
        (&["--eval-interval=2"], None),
        (
            &[
                "--sgd-momentum=0.5",
                "--prompt-tokens=9",
                "--lr-decay-style=constant",
                "--min-lr=1e-5",
            ],
            Some(
                "note: these settings have no effect here: sgd_momentum (the optimizer is Adam); \
                 min_lr (lr_decay_style is constant); prompt_tokens (there is no prompt)",
            ),
        ),
        (
            &["--tensor-model-parallel-size=1", "--sequence-parallel"],
            Some("no effect here: sequence_parallel ("),
        ),
        (
            &["--iterations-to-skip", "2", "99", "101"],
            Some("no effect here: iterations_to_skip 99 101 (the run ends after step "),
        ),
    ] {
        let folder = folder();
        let output = pretrain(folder.path(), flags).output().unwrap();
        let text = stdout(&output);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(
            text.matches("note: ").count(),
            usize::from(note.is_some()),
            "{flags:?}: {text}"
        );
        assert!(text.contains(note.unwrap_or_default()), "{flags:?}: {text}");
    }
}

#[test]
fn statistics_of_parameters_and_gradients_are_told_beside_log_lines() {
    let folder = folder();
    let flags = [
        "--log-params-norm",
        "--log-num-zeros-in-grad",
        "--log-interval=3",
        "--tensorboard-dir=board",
    ];
    let flags = [&flags[..], &["--tensorboard-log-interval=3"]].concat();
    let output = pretrain(folder.path(), &flags).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    let lines: Vec<&str> = text.lines().filter(|line| line.contains("] iteration")).collect();
    assert!(lines.len() == 2 && lines.iter().all(|line| line.contains(" | num zeros: ")), "{text}");
    assert!(lines.iter().all(|line| line.contains(" | params norm: ")), "{text}");
    let told = |line: &String| serde_json::from_str::<serde_json::Value>(line).unwrap();
    let told = metrics(folder.path()).iter().map(told).collect::<Vec<_>>();
    for key in ["params_norm", "num_zeros_in_grad"] {
        assert_eq!(
            told.iter().map(|step| step[key].is_number()).collect::<Vec<_>>(),
            [false, false, true, true]
        );
    }
    let events =
        std::fs::read_dir(folder.path().join("board")).unwrap().map(|entry| entry.unwrap().path());
    let events = std::fs::read(events.into_iter().find(|path| path.is_file()).unwrap()).unwrap();
    for tag in ["params-norm", "num-zeros"] {
        assert!(events.windows(tag.len()).any(|part| part == tag.as_bytes()), "{tag}");
    }
}

#[test]
fn timers_follow_each_log_line_and_are_in_the_metrics_and_the_curves() {
    let board = ["--log-interval=2", "--tensorboard-dir=board", "--log-timers-to-tensorboard"];
    for (flags, ranks, num_timers) in [
        (&["--timing-log-level=0"][..], None, 0),
        (&["--wall-clock-breakdown"], Some(" (min, max) time across ranks (ms): forward: ("), 6),
        (
            &["--timing-log-level=2", "--timing-log-option=max"],
            Some(" max time across ranks (ms): forward: "),
            12,
        ),
    ] {
        let folder = folder();
        let output = pretrain(folder.path(), &[&board[..], flags].concat()).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let text = stdout(&output);
        let lines: Vec<&str> = text.lines().collect();
        let at: Vec<usize> =
            (0..lines.len()).filter(|at| lines[*at].contains("] iteration")).collect();
        assert!(!at.is_empty());
        for next in at.iter().map(|at| lines[at + 1]) {
            assert_eq!(ranks.is_some(), next.contains("across ranks (ms)"), "{text}");
            assert!(next.starts_with(ranks.unwrap_or_default()), "{text}");
        }
        let told = |line: &String| serde_json::from_str::<serde_json::Value>(line).unwrap();
        let steps = metrics(folder.path()).iter().map(told).collect::<Vec<_>>();
        let steps = steps.iter().filter(|line| line.get("grad_norm").is_some());
        for step in steps {
            let due = num_timers > 0 && step["iteration"].as_u64().unwrap().is_multiple_of(2);
            let there = step.get("timers").map_or(0, |timers| timers.as_object().unwrap().len());
            assert_eq!(there, if due { num_timers } else { 0 }, "{step}");
        }
        let mut files = std::fs::read_dir(folder.path().join("board")).unwrap();
        let events = files.find_map(|file| std::fs::read(file.unwrap().path()).ok()).unwrap();
        let tag = b"forward-time";
        assert_eq!(events.windows(tag.len()).any(|part| part == tag), num_timers > 0);
    }
}

#[test]
fn a_killed_rank_is_named_and_ends_the_run() {
    let folder = folder();
    let child =
        pretrain(folder.path(), &["--train-iters=1000000"]).stdout(Stdio::null()).spawn().unwrap();
    wait_for("some steps", || (metrics(folder.path()).len() > 2).then_some(()));
    let ranks = children(child.id());
    assert_eq!(ranks.len(), 2);
    let start = Instant::now();
    kill(ranks[1], "KILL");
    let output = child.wait_with_output().unwrap();
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!(output.status.code(), Some(137));
    let text = stderr(&output);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(
        text.starts_with(&format!("error: rank 1 (pid {}) was killed by SIGKILL", ranks[1])),
        "{text}"
    );
    assert!(text.contains("continues from the last checkpoint in saved"), "{text}");
    assert!(!ranks.iter().any(|&pid| is_alive(pid)));
}

/// Weights that are too large to sample from are detected only after training.
#[test]
fn a_prompt_that_cannot_be_continued_does_not_fail_a_run_that_is_finished() {
    let folder = folder();
    let flags = [
        "--lr=1e30",
        "--train-iters=1",
        "--prompt=A text",
        "--max-restarts=2",
        "--prompt-tokens=1",
        "--eval-iters=0",
    ];
    let output = pretrain(folder.path(), &flags).output().unwrap();
    let (log, said) = (stdout(&output), stderr(&output));
    assert!(output.status.success(), "{log}{said}");
    assert!(
        log.contains("the run is finished, but its prompt could not be continued"),
        "{log}{said}"
    );
    assert!(folder.path().join("saved/iter_0000001").is_dir() && !said.contains("start"), "{said}");
}

#[test]
fn steps_that_are_skipped_pass_their_samples_over_and_update_nothing() {
    let folder = folder();
    let train = |flags: &[&str]| {
        let flags = [
            &[
                "--train-iters=6",
                "--lr-warmup-iters=5",
                "--lr-decay-iters=6",
                "--iterations-to-skip",
                "3",
                "4",
            ],
            flags,
        ]
        .concat();
        let output = pretrain(folder.path(), &flags).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        stdout(&output)
    };
    // The run resumes with step 4, on another layout.
    let first = train(&["--exit-interval=3"]);
    assert!(first.contains("step 3 is skipped, as --iterations-to-skip asks"), "{first}");
    assert_eq!(saved_iteration(folder.path()), "3");
    train(&["--tensor-model-parallel-size=1"]);
    assert_eq!(steps(folder.path(), "iteration"), [1, 2, 5, 6]);
    assert_eq!(steps(folder.path(), "consumed_samples"), [1, 2, 5, 6]);
    assert_eq!(steps(folder.path(), "skipped_iterations"), [0, 0, 2, 2]);
    let rates: Vec<f64> = metrics(folder.path())
        .iter()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).unwrap()["learning_rate"]
                .as_f64()
                .unwrap()
        })
        .collect();
    // The warm-up counts only steps that are made.
    assert!(
        rates
            .iter()
            .zip([0.0, 0.2, 0.4, 0.6])
            .all(|(rate, share)| (rate - share * 1e-3).abs() < 1e-12),
        "{rates:?}"
    );
}

#[test]
fn made_up_data_are_the_same_on_every_layout() {
    let losses = |flags: &[&str]| {
        let folder = folder();
        let flags =
            [&["--mock-data", "--global-batch-size=4", "--data-parallel-size=2"], flags].concat();
        let output = pretrain(folder.path(), &flags).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let lines = metrics(folder.path());
        lines
            .iter()
            .map(|line| {
                serde_json::from_str::<serde_json::Value>(line).unwrap()["lm_loss"].to_string()
            })
            .collect::<Vec<_>>()
    };
    let (tp, order) = ("--tensor-model-parallel-size=1", "--dataloader-type=single");
    let expected = losses(&[tp, order]);
    assert_eq!(
        (expected.len(), &losses(&[tp, order, "--pipeline-model-parallel-size=2"])),
        (4, &expected)
    );
    let folder = folder();
    let both = pretrain(folder.path(), &["--mock-data", "--data-path=text.txt"]).output().unwrap();
    assert!(both.status.success(), "{}", stderr(&both));
    let note = "note: mock_data = true (--mock-data) generates data; data_path is not read";
    assert!(stdout(&both).contains(note), "{}", stdout(&both));
}
