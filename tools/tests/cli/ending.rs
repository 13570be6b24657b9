//! How runs end before their last step, which checkpoints stay, and runs without steps.

use std::fs;
use std::process::Output;

use crate::site::{RANKS, SOON, Site, ended, refused};
use crate::support::{kill, kill_together, megatron, stderr, stdout};

const ENDLESS: [&str; 3] = ["--save=saved", "--load=saved", "--train-iters=1000000"];

fn saved_step(site: &Site) -> u64 {
    let pointer = fs::read_to_string(site.path("saved/latest_checkpointed_iteration.txt")).unwrap();
    pointer.trim().parse().unwrap()
}

/// Asserts that a run ended with `code` only because of a signal, and saved its last step.
fn stopped(site: &Site, outputs: &[Output], code: i32) {
    for output in outputs {
        assert_eq!(output.status.code(), Some(code), "{}", stderr(output));
        assert!(!stderr(output).contains("error"), "{}", stderr(output));
    }
    assert_eq!(saved_step(site), site.last_step());
    site.assert_nothing_left();
}

#[test]
fn schedulers_warnings_save_and_end_a_run_whoever_they_come_to() {
    // As Slurm sends them: to all processes of a step, or only to those selected by `--signal` or
    // the user.
    for (to_supervisor, to_ranks) in [(true, 0..0), (false, 2..3), (true, 0..RANKS)] {
        let site = Site::new();
        let flags = [&ENDLESS[..], &["--exit-signal-handler", "--exit-signal=SIGUSR1"]].concat();
        let child = site.pretrain(&flags).spawn().unwrap();
        site.wait_for_step(2);
        let ranks = site.supervised_ranks();
        let supervisor = to_supervisor.then_some(child.id());
        let all: Vec<u32> = supervisor.into_iter().chain(ranks[to_ranks].to_vec()).collect();
        kill_together(&all, "USR1");
        stopped(&site, &ended(vec![child], SOON), 138);
    }
    let site = Site::new();
    let mut launch = site.mark(megatron());
    launch.args([
        "launch",
        "--nproc-per-node",
        "4",
        "--",
        env!("CARGO_BIN_EXE_megatron"),
        "pretrain",
        "run.toml",
    ]);
    let child = launch.args(ENDLESS).spawn().unwrap();
    site.wait_for_step(2);
    kill(child.id(), "USR2");
    stopped(&site, &ended(vec![child], SOON), 140);
}

#[test]
fn ranks_without_a_supervisor_end_with_the_code_of_the_one_that_was_told() {
    let site = Site::new();
    let ranks = site.ranks(&ENDLESS);
    site.wait_for_step(2);
    kill(ranks[3].id(), "USR1");
    stopped(&site, &ended(ranks, SOON), 138);
}

#[test]
fn a_run_whose_time_is_over_saves_and_ends_well_after_a_step() {
    for flags in [
        &["--exit-interval=5"][..],
        &["--async-save", "--save-interval=1"],
        &["--split=80,20,0", "--eval-interval=1"],
    ] {
        let site = Site::new();
        site.edit("eval_iters = 0", "eval_iters = 1");
        // Less time than the start takes.
        let flags = [&ENDLESS[..], &["--exit-duration-in-mins=0.0001"], flags].concat();
        for step in 1..=2 {
            site.succeed(&flags);
            assert_eq!((site.last_step(), saved_step(&site)), (step, step));
        }
        site.succeed(&["--load=saved", "--train-iters=3", "--exit-duration-in-mins=60"]);
        assert_eq!(site.last_step(), 3);
        site.assert_nothing_left();
    }
}

#[test]
fn old_checkpoints_are_removed_once_a_newer_one_is_complete() {
    for at_once in [&[][..], &["--async-save"]] {
        let site = Site::new();
        let retain = [
            "--save-interval=2",
            "--save-retain-interval=6",
            "--most-recent-k=2",
            "--save=saved",
            "--load=saved",
        ];
        let flags = [&retain[..], at_once].concat();
        let log = stdout(&site.succeed(&[&flags[..], &["--train-iters=11"]].concat()));
        assert!(log.contains("removed the checkpoint of step 2\n"), "{log}");
        // A folder that another run had partly removed.
        fs::rename(site.path("saved/iter_0000010"), site.path("saved/.iter_0000010.tmp")).unwrap();
        site.succeed(&[&flags[..], &["--train-iters=15"]].concat());
        let mut names: Vec<String> = fs::read_dir(site.path("saved"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let expected = [
            "iter_0000006",
            "iter_0000012",
            "iter_0000014",
            "iter_0000015",
            "latest_checkpointed_iteration.txt",
        ];
        assert_eq!(names, expected, "{at_once:?}");
        site.assert_nothing_left();
    }
    let site = Site::new();
    for (flags, part) in [
        (
            &["--most-recent-k=2"][..],
            "most_recent_k = 2 (--most-recent-k) has no effect: no checkpoints are saved",
        ),
        (
            &["--most-recent-k=-2", "--save=saved"],
            "most_recent_k = -2 (--most-recent-k) must be the number",
        ),
        (
            &["--save-retain-interval=3", "--save-interval=2", "--save=saved"],
            "save_retain_interval = 3 (--save-retain-interval) must be a multiple of save_interval = 2",
        ),
    ] {
        refused(&site.pretrain(flags).output().unwrap(), &[part]);
    }
}

#[test]
fn without_training_a_checkpoint_is_evaluated_and_nothing_else_changes() {
    let site = Site::new();
    site.edit("eval_iters = 0", "eval_iters = 2");
    let evaluated = |log: &str| -> Vec<String> {
        let lines = log.lines().filter(|line| line.contains("lm loss value"));
        lines.map(|line| line.split_once("lm loss value").unwrap().1.to_string()).collect()
    };
    let split = "--split=80,10,10";
    let trained = stdout(&site.succeed(&[split, "--save=saved", "--train-iters=3"]));
    let before = site.files();
    let log = stdout(&site.succeed(&[split, "--save=saved", "--load=saved", "--skip-train"]));
    assert!(log.contains("evaluating step 3, without training"), "{log}");
    assert_eq!(evaluated(&log).len(), 2);
    assert_eq!(evaluated(&log), evaluated(&trained));
    let metrics = site.path("metrics.jsonl");
    let appended = fs::read(&metrics).unwrap();
    assert!(appended.starts_with(&before[&metrics]) && appended.ends_with(b"}\n"));
    fs::write(&metrics, &before[&metrics]).unwrap();
    site.assert_unchanged(&before);
    for (flags, part) in [
        (
            &["--skip-train", "--eval-iters=0"][..],
            "eval_iters = 0 (--eval-iters) turns evaluation off",
        ),
        (&["--skip-train", "--split=1,0,0"], "there are no validation or test data"),
    ] {
        refused(&site.pretrain(flags).output().unwrap(), &[part]);
    }
}

#[test]
fn a_checkpoint_that_is_missing_may_be_an_error() {
    let site = Site::new();
    let before = site.files();
    let flags = ["--load=svaed", "--exit-on-missing-checkpoint"];
    refused(
        &site.pretrain(&flags).output().unwrap(),
        &["svaed", "holds no checkpoint", "--exit-on-missing-checkpoint"],
    );
    site.assert_unchanged(&before);
    site.succeed(&["--save=saved", "--train-iters=1"]);
    site.succeed(&["--load=saved", "--exit-on-missing-checkpoint", "--train-iters=2"]);
    assert_eq!(site.last_step(), 2);
}
