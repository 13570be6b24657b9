//! Ranks that are restarted after one failed.

use std::fs;
use std::process::{Command, Output};

use crate::site::{RANKS, SOON, Site, ended, refused};
use crate::support::{kill, megatron, stderr, stdout, wait_for};

/// `script` as two ranks that may be restarted `restarts` times.
fn launched(restarts: u32, script: &str) -> Command {
    let mut command = megatron();
    command.args([
        "launch",
        "--nproc-per-node=2",
        "--max-restarts",
        &restarts.to_string(),
        "--",
        "sh",
        "-c",
        script,
    ]);
    command
}

fn run(restarts: u32, script: &str) -> Output {
    launched(restarts, script).output().unwrap()
}

/// How often ranks were restarted, by the supervisor's output.
fn restarts(output: &Output) -> usize {
    stderr(output).matches("restarting all ranks").count()
}

#[test]
fn ranks_are_started_again_until_they_succeed_and_told_how_often() {
    let script = "echo $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS; [ $TORCHELASTIC_RESTART_COUNT = 2 ] || [ $RANK = 0 ] || exit 5";
    let output = run(3, script);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_string).collect();
    lines.sort();
    assert_eq!(lines, ["[0]: 0/3", "[0]: 1/3", "[0]: 2/3", "[1]: 0/3", "[1]: 1/3", "[1]: 2/3"]);
    let text = stderr(&output);
    assert_eq!((restarts(&output), text.matches("rank 1 (pid ").count()), (2, 2), "{text}");
    assert!(
        text.contains("exited with code 5") && text.contains("(restart 2 of at most 3)"),
        "{text}"
    );
}

#[test]
fn a_failure_that_comes_every_time_ends_the_run_once_restarts_are_spent() {
    for spent in [0, 2] {
        let output = run(spent, "[ $RANK = 0 ] || exit 6; exec sleep 60");
        assert_eq!(
            (output.status.code(), restarts(&output)),
            (Some(6), spent as usize),
            "{}",
            stderr(&output)
        );
    }
}

#[test]
fn ranks_that_are_asked_to_stop_are_not_started_again() {
    let folder = tempfile::tempdir().unwrap();
    // The rank that receives the request fails.
    let script = format!(
        "trap 'exit 9' TERM; echo $$ >> {}/started; while true; do sleep 0.1; done",
        folder.path().display()
    );
    let started =
        || fs::read_to_string(folder.path().join("started")).unwrap_or_default().lines().count();
    let mut command = launched(5, &script);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let supervisor = command.spawn().unwrap();
    wait_for("the ranks to start", || (started() == 2).then_some(()));
    kill(supervisor.id(), "TERM");
    let output = ended(vec![supervisor], SOON).remove(0);
    assert_eq!((restarts(&output), started()), (0, 2), "{}", stderr(&output));
}

#[test]
fn settings_that_cannot_be_used_are_told_once() {
    let program = env!("CARGO_BIN_EXE_megatron");
    let output = run(4, &format!("{program} pretrain --data-path /nowhere --hidden-size 7"));
    assert_eq!((output.status.code(), restarts(&output)), (Some(2), 0), "{}", stderr(&output));
}

#[test]
fn a_run_whose_rank_was_killed_goes_on_by_itself_and_comes_to_the_same_losses() {
    const STEPS: u64 = 400;
    let site = Site::new();
    site.edit("train_iters = 20", &format!("train_iters = {STEPS}"));
    site.succeed(&[]);
    let losses = site.losses();
    fs::remove_file(site.path("metrics.jsonl")).unwrap();
    let saving = ["--save=saved", "--load=saved", "--save-interval=40", "--max-restarts=2"];
    // More than fits into a pipe that is not read.
    let printed = fs::File::create(site.path("printed")).unwrap();
    let supervisor = site.pretrain(&saving).stdout(printed).spawn().unwrap();
    let pointer = site.path("saved/latest_checkpointed_iteration.txt");
    for (rank, from) in [(RANKS - 1, 1), (0, 200)] {
        wait_for("a checkpoint", || pointer.exists().then_some(()));
        site.wait_long_for_step(from);
        let ranks = site.supervised_ranks();
        kill(ranks[rank], "KILL");
        wait_for("other ranks", || {
            site.supervised_ranks().iter().all(|pid| !ranks.contains(pid)).then_some(())
        });
    }
    let output = ended(vec![supervisor], 10 * SOON).remove(0);
    assert_eq!((output.status.code(), restarts(&output)), (Some(0), 2), "{}", stderr(&output));
    assert_eq!(
        fs::read_to_string(site.path("printed")).unwrap().matches("resumed from").count(),
        2
    );
    assert_eq!(site.losses(), losses);
    site.assert_nothing_left();
}

#[test]
fn a_run_of_one_rank_has_a_supervisor_where_it_may_be_started_again() {
    let site = Site::new();
    let alone = [
        "--tensor-model-parallel-size=1",
        "--pipeline-model-parallel-size=1",
        "--data-parallel-size=1",
    ];
    let expected = site.succeed(&alone);
    let losses = site.losses();
    fs::remove_file(site.path("metrics.jsonl")).unwrap();
    let again = ["--save=saved", "--load=saved", "--max-restarts=1"];
    let output = site.succeed(&[&alone[..], &again].concat());
    assert_eq!(site.losses(), losses);
    let described = |output: &Output| stdout(output).matches("tokenizer").count();
    assert_eq!(described(&output), described(&expected), "{}", stdout(&output));
}

#[test]
fn restarts_need_a_checkpoint_to_go_on_from() {
    let site = Site::new();
    for flags in [
        &["--max-restarts=1"][..],
        &["--max-restarts=1", "--save=a"],
        &["--max-restarts=1", "--save=a", "--load=b"],
    ] {
        refused(
            &site.pretrain(flags).output().unwrap(),
            &["max_restarts = 1 (--max-restarts)", "set --save, and --load with the same folder"],
        );
    }
}

#[test]
fn a_signal_that_comes_after_a_failure_is_heeded_too() {
    let folder = tempfile::tempdir().unwrap();
    // One rank has failed, and the other ends slowly.
    let script = format!(
        "[ $RANK = 0 ] || exit 5; trap 'echo ending; sleep 1.5; exit 0' TERM; echo $$ >> {0}/started; echo x > {0}/up; while true; do sleep 0.1; done",
        folder.path().display()
    );
    let started =
        || fs::read_to_string(folder.path().join("started")).unwrap_or_default().lines().count();
    let mut command = launched(3, &script);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let supervisor = command.spawn().unwrap();
    wait_for("a rank to start", || (started() == 1).then_some(()));
    std::thread::sleep(std::time::Duration::from_millis(500));
    kill(supervisor.id(), "TERM");
    let output = ended(vec![supervisor], SOON).remove(0);
    assert_eq!(
        (output.status.code(), restarts(&output), started()),
        (Some(5), 0, 1),
        "{}",
        stderr(&output)
    );
}

#[test]
fn settings_that_were_used_before_are_tried_again() {
    let program = env!("CARGO_BIN_EXE_megatron");
    let unusable = format!("{program} pretrain --data-path /nowhere --hidden-size 7");
    let script =
        format!("case $TORCHELASTIC_RESTART_COUNT in 0) exit 5;; 1) exec {unusable};; esac");
    let output = run(3, &script);
    assert_eq!((output.status.code(), restarts(&output)), (Some(0), 2), "{}", stderr(&output));
}

#[test]
fn a_run_that_diverges_would_do_so_again() {
    let site = Site::new();
    let diverging = [
        "--fp16",
        "--initial-loss-scale=65536",
        "--min-loss-scale=65536",
        "--hysteresis=1",
        "--lr=1e30",
    ];
    let again = [
        "--clip-grad=0",
        "--save=saved",
        "--load=./saved",
        "--save-interval=1",
        "--max-restarts=3",
    ];
    let output = site.pretrain(&[&diverging[..], &again].concat()).output().unwrap();
    assert_eq!((output.status.code(), restarts(&output)), (Some(1), 0), "{}", stderr(&output));
    assert!(stderr(&output).contains("loss scale"), "{}", stderr(&output));
}

#[test]
fn ranks_of_a_launcher_are_told_whose_restarts_count() {
    let site = Site::new();
    for (granted, told) in [(0, true), (2, false)] {
        let mut command = site.mark(megatron());
        command.args(["launch", "--nproc-per-node=1", &format!("--max-restarts={granted}"), "--"]);
        command.args([
            env!("CARGO_BIN_EXE_megatron"),
            "pretrain",
            "run.toml",
            "--train-iters=1",
            "--max-restarts=1",
        ]);
        command.args(["--tensor-model-parallel-size=1", "--pipeline-model-parallel-size=1"]);
        let output = command
            .args([format!("--save=of{granted}"), format!("--load=of{granted}")])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let text = stdout(&output);
        assert_eq!(
            text.contains("--max-restarts 1 is for ranks that `pretrain` starts"),
            told,
            "{text}"
        );
    }
}
