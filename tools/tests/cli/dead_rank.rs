//! Ranks that die, hang or are asked to stop: the others end soon, the cause is named, and the run
//! resumes bitwise.

use std::fs;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::site::{RANKS, SOON, Site, ended, free_port, refused};
use crate::support::{kill, megatron, stderr, stdout, wait_for};

const STEPS: u64 = 400;

/// A site and the losses of its uninterrupted run.
fn site() -> (Site, Vec<(u64, String)>) {
    let site = Site::new();
    site.edit("train_iters = 20", &format!("train_iters = {STEPS}"));
    site.succeed(&[]);
    let losses = site.losses();
    assert_eq!(losses.len() as u64, STEPS);
    (site, losses)
}

/// Flags of a run that saves to `folder` every `interval` steps and resumes from there.
fn saving(folder: &str, interval: u64) -> [String; 3] {
    [format!("--save={folder}"), format!("--load={folder}"), format!("--save-interval={interval}")]
}

fn words(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

/// Asserts that `folder` holds an intact checkpoint from which the run reaches the same losses, bit
/// for bit.
fn resumes_bitwise(site: &Site, folder: &str, uninterrupted: &[(u64, String)]) {
    let flags = saving(folder, 1000);
    let output = site.succeed(&words(&flags));
    assert!(stdout(&output).contains("resumed from"), "{}", stdout(&output));
    assert_eq!(site.losses(), uninterrupted);
    site.assert_nothing_left();
}

/// Waits for the first checkpoint in `folder`, then for a few more steps.
fn wait_for_checkpoint(site: &Site, folder: &str) {
    let pointer = site.path(folder).join("latest_checkpointed_iteration.txt");
    wait_for("a checkpoint", || pointer.exists().then_some(()));
    let there = site.losses().len() as u64;
    site.wait_for_step((there + 3).min(STEPS));
}

fn start(site: &Site, flags: &[&str]) -> Child {
    let _ = fs::remove_file(site.path("metrics.jsonl"));
    site.pretrain(flags).spawn().unwrap()
}

#[test]
fn a_killed_rank_ends_a_supervised_run_which_resumes_bitwise() {
    let (site, losses) = site();
    for rank in [0, 2, RANKS - 1] {
        let folder = format!("saved{rank}");
        let flags = saving(&folder, 40);
        let supervisor = start(&site, &words(&flags));
        wait_for_checkpoint(&site, &folder);
        let pid = site.supervised_ranks()[rank];
        kill(pid, "KILL");
        let output = ended(vec![supervisor], SOON).remove(0);
        assert_eq!(output.status.code(), Some(137));
        let named = format!("rank {rank} (pid {pid}) was killed by SIGKILL");
        refused(&output, &[&named, "The same command continues from the last checkpoint in"]);
        site.assert_nothing_left();
        resumes_bitwise(&site, &folder, &losses);
    }
}

#[test]
fn a_killed_rank_ends_the_ranks_of_a_launcher_which_resume_bitwise() {
    let (site, losses) = site();
    for (rank, backend) in [(0, "local"), (1, "local"), (RANKS - 1, "local"), (2, "tcp")] {
        let folder = format!("saved{rank}");
        let flags = saving(&folder, 40);
        let _ = fs::remove_file(site.path("metrics.jsonl"));
        let children =
            site.ranks(&[words(&flags), vec!["--distributed-backend", backend]].concat());
        wait_for_checkpoint(&site, &folder);
        let pid = children[rank].id();
        kill(pid, "KILL");
        // Only ranks on one host see each other's processes.
        let how =
            if backend == "local" { format!("pid {pid}") } else { "its connection ".to_string() };
        let named = format!("rank {rank} died ({how}");
        for (_, output) in
            ended(children, SOON).iter().enumerate().filter(|(other, _)| *other != rank)
        {
            refused(output, &[&named, "The same command continues from the last checkpoint in"]);
        }
        site.assert_nothing_left();
        resumes_bitwise(&site, &folder, &losses);
    }
}

#[test]
fn a_rank_killed_while_it_saves_leaves_the_last_checkpoint_intact() {
    let (site, losses) = site();
    for rank in [0, RANKS - 1] {
        let folder = format!("saved{rank}");
        // A run that saves at every step spends most of its time saving.
        let flags = saving(&folder, 1);
        let supervisor = start(&site, &words(&flags));
        wait_for_checkpoint(&site, &folder);
        let pid = site.supervised_ranks()[rank];
        let saving = || {
            fs::read_dir(site.path(&folder))
                .unwrap()
                .flatten()
                .any(|e| is_temporary(&e.file_name()))
        };
        wait_for("a save", || saving().then_some(()));
        kill(pid, "KILL");
        refused(
            &ended(vec![supervisor], SOON)[0],
            &[&format!("rank {rank} (pid {pid}) was killed by SIGKILL")],
        );
        // The next save removes the files that the killed rank was writing.
        resumes_bitwise(&site, &folder, &losses);
    }
}

fn is_temporary(name: &std::ffi::OsStr) -> bool {
    name.to_string_lossy().ends_with(".tmp")
}

#[test]
fn a_rank_that_hangs_is_named_after_the_timeout() {
    let site = Site::new();
    let flags = ["--train-iters=1000000", "--distributed-timeout-minutes=0.05"];
    let supervisor = site.pretrain(&flags).spawn().unwrap();
    site.wait_for_step(3);
    kill(site.supervised_ranks()[2], "STOP");
    // Three seconds of this are the timeout.
    let output = ended(vec![supervisor], SOON + Duration::from_secs(3)).remove(0);
    refused(&output, &["waited", "[2]"]);
    site.assert_nothing_left();
}

#[test]
fn a_timeout_may_be_longer_than_any_run() {
    for minutes in ["2e17", "inf"] {
        Site::new().succeed(&["--train-iters=1", "--distributed-timeout-minutes", minutes]);
    }
}

#[test]
fn no_rank_outlives_its_supervisor() {
    let site = Site::new();
    let mut supervisor = site.pretrain(&["--train-iters=1000000"]).spawn().unwrap();
    site.wait_for_step(3);
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
    site.assert_nothing_left();
}

#[test]
fn no_rank_outlives_a_launcher_with_a_shell_between_them() {
    let site = Site::new();
    let mut command = site.mark(megatron());
    let ranks = RANKS.to_string();
    command.args(["launch", "--nproc-per-node", &ranks, "--", "sh", "-c", "\"$0\" \"$@\"; true"]);
    command.args([env!("CARGO_BIN_EXE_megatron"), "pretrain", "run.toml", "--train-iters=1000000"]);
    let mut launcher = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    site.wait_for_step(3);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    site.assert_nothing_left();
}

#[test]
fn a_supervised_run_one_rank_of_which_is_told_to_stop_saves_and_does_not_fail() {
    let site = Site::new();
    let supervisor = site.pretrain(&["--train-iters=1000000", "--save=saved"]).spawn().unwrap();
    site.wait_for_step(3);
    kill(site.supervised_ranks()[1], "TERM");
    let output = ended(vec![supervisor], SOON).remove(0);
    assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
    assert!(!stderr(&output).contains("error"), "{}", stderr(&output));
    assert!(site.path("saved/latest_checkpointed_iteration.txt").exists());
}

#[test]
fn a_supervised_run_that_is_told_to_stop_saves_and_resumes_bitwise() {
    let (site, losses) = site();
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let folder = format!("saved{signal}");
        let flags = saving(&folder, 100_000);
        let supervisor = start(&site, &words(&flags));
        site.wait_for_step(5);
        kill(supervisor.id(), signal);
        let output = ended(vec![supervisor], SOON).remove(0);
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert!(!stderr(&output).contains("error"), "{}", stderr(&output));
        site.assert_nothing_left();
        resumes_bitwise(&site, &folder, &losses);
    }
}

#[test]
fn a_run_says_what_a_signal_does_and_where_it_stopped() {
    let alone = ["--tensor-model-parallel-size=1", "--pipeline-model-parallel-size=1"];
    let launched = |site: &Site, flags: &[&str]| {
        let program = env!("CARGO_BIN_EXE_megatron");
        let mut command = site.mark(megatron());
        command.args([
            "launch",
            &format!("--nproc-per-node={RANKS}"),
            "--",
            program,
            "pretrain",
            "run.toml",
        ]);
        command.args(flags);
        command
    };
    type Start<'a> = &'a dyn Fn(&Site, &[&str]) -> std::process::Command;
    let cases: [(&str, Start<'_>); 3] = [
        ("alone", &|site, flags| site.pretrain(&[flags, &alone].concat())),
        ("supervised", &|site, flags| site.pretrain(flags)),
        ("launched", &launched),
    ];
    for (who, start) in cases {
        for saves in [true, false] {
            let site = Site::new();
            let flags = ["--train-iters=1000000", "--save=saved"];
            let run = start(&site, if saves { &flags } else { &flags[..1] }).spawn().unwrap();
            site.wait_for_step(3);
            kill(run.id(), "INT");
            let output = ended(vec![run], SOON).remove(0);
            assert_eq!(output.status.code(), Some(130), "{who}: {}", stderr(&output));
            // `launch` does not know whether its command saves.
            let does = if saves && who != "launched" { "saving and stopping" } else { "stopping" };
            let line = format!("SIGINT: {does}; Ctrl-C now stops at once\n");
            assert_eq!(
                (stderr(&output).matches("SIG").count(), stderr(&output).matches(&line).count()),
                (1, 1),
                "{who}"
            );
            let (text, step) = (stdout(&output), site.last_step());
            let end = match saves {
                true => format!("stopped at step {step}; saved in saved/iter_{step:07}\n"),
                false => format!("stopped at step {step}; nothing is saved without --save\n"),
            };
            assert_eq!(text.matches(&end).count(), 1, "{who}: no {end:?} in {text}");
            // Lines that appear once at the start, however the run was started.
            for part in ["samples of 16 tokens: ", " tokens in cache/", "model: "] {
                assert_eq!(text.matches(part).count(), 1, "{who}: {part:?} in {text}");
            }
        }
    }
}

#[test]
fn one_rank_of_a_launcher_that_is_told_to_stop_stops_all_after_saving() {
    let (site, losses) = site();
    let flags = saving("saved", 100_000);
    fs::remove_file(site.path("metrics.jsonl")).unwrap();
    let children = site.ranks(&words(&flags));
    site.wait_for_step(5);
    kill(children[1].id(), "TERM");
    for output in ended(children, SOON) {
        assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
    }
    resumes_bitwise(&site, "saved", &losses);
}

#[test]
fn a_setting_of_some_ranks_alone_is_named_though_they_do_more_together() {
    let site = Site::new();
    for saves in 0..2 {
        let port = free_port();
        let flags = |rank| if (rank == 0) == (saves == 0) { &["--save=saved"][..] } else { &[] };
        let ranks =
            (0..RANKS).map(|rank| site.rank(rank, port, flags(rank)).spawn().unwrap()).collect();
        for output in ended(ranks, SOON) {
            refused(&output, &["started differently", "checkpoint.save"]);
        }
        assert!(!site.path("saved").exists());
    }
}

#[test]
fn a_run_that_is_told_to_stop_does_not_finish_its_evaluation() {
    let site = Site::new();
    let flags = ["--train-iters=1000", "--save=saved", "--eval-interval=5", "--eval-iters=100000"];
    let supervisor = site.pretrain(&flags).spawn().unwrap();
    site.wait_for_step(5);
    kill(supervisor.id(), "TERM");
    let output = ended(vec![supervisor], SOON).remove(0);
    assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
    assert_eq!(
        fs::read_to_string(site.path("saved/latest_checkpointed_iteration.txt")).unwrap().trim(),
        "5"
    );
}

#[test]
fn a_second_ctrl_c_ends_a_run_that_cannot_stop_by_itself() {
    let site = Site::new();
    let supervisor = site.pretrain(&["--train-iters=1000000"]).spawn().unwrap();
    site.wait_for_step(3);
    // A hanging rank keeps the others from finishing the step.
    kill(site.supervised_ranks()[1], "STOP");
    kill(supervisor.id(), "INT");
    std::thread::sleep(Duration::from_millis(300));
    kill(supervisor.id(), "INT");
    let output = ended(vec![supervisor], SOON).remove(0);
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    site.assert_nothing_left();
}
