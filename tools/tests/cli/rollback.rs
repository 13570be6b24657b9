//! Runs that go back to an earlier checkpoint.

use std::fs;

use crate::site::{RANKS, SOON, Site, ended, refused};
use crate::support::{kill, megatron, stderr, stdout, wait_for};

const FOLDERS: [&str; 2] = ["--save=saved", "--load=saved"];

fn latest(site: &Site) -> String {
    fs::read_to_string(site.path("saved/latest_checkpointed_iteration.txt"))
        .unwrap()
        .trim()
        .to_string()
}

/// A site with the checkpoints of steps 2, 4, 6 and 8 of a run of 8 in `saved`.
fn saved() -> Site {
    let site = Site::new();
    site.edit("train_iters = 20", "train_iters = 8");
    site.succeed(&["--save=saved", "--save-interval=2"]);
    site
}

#[test]
fn a_run_goes_back_and_says_what_it_will_replace_and_when() {
    for back in
        [&["--load=saved", "--ckpt-step=4"], &["--load=saved/iter_0000004", "--finetune=false"]]
    {
        let site = saved();
        let losses = site.losses();
        let log =
            stdout(&site.succeed(&[&back[..], &["--save=saved", "--exit-interval=5"]].concat()));
        for part in [
            "resumed from saved/iter_0000004 (32 samples consumed)",
            "later steps than 4, where this run continues: 6 and 8. It leaves 6 and 8 as they are.",
            "8 is the latest until this run first saves, at step 5",
            "a copy with the later steps is metrics.jsonl.1",
        ] {
            assert!(log.contains(part), "no {part:?} in {log}");
        }
        assert_eq!((latest(&site).as_str(), site.last_step()), ("5", 5));
        let whole = fs::read_to_string(site.path("metrics.jsonl.1")).unwrap();
        assert!(whole.contains("\"iteration\":8"), "{whole}");

        // The later steps of the earlier run do not count as the latest, and are replaced.
        let log = stdout(&site.succeed(&[&FOLDERS[..], &["--save-interval=3"]].concat()));
        assert!(log.contains("resumed from saved/iter_0000005"), "{log}");
        assert!(
            log.contains(
                "this run continues: 6 and 8. It replaces 6 and 8 when it saves the same steps."
            ),
            "{log}"
        );
        assert!(!log.contains("is the latest until"), "{log}");
        assert_eq!((latest(&site).as_str(), site.losses()), ("8", losses));
        let log = stdout(
            &site.succeed(&[&FOLDERS[..], &["--train-iters=9", "--lr-decay-iters=8"]].concat()),
        );
        assert!(!log.contains("later steps"), "{log}");
        site.assert_nothing_left();
    }
}

#[test]
fn the_metrics_of_a_run_that_is_continued_elsewhere_are_kept_in_a_copy() {
    let site = saved();
    let whole = fs::read_to_string(site.path("metrics.jsonl")).unwrap();
    let flags = ["--load=saved", "--ckpt-step=4", "--save=elsewhere", "--exit-interval=5"];
    let log = stdout(&site.succeed(&flags));
    assert!(log.contains("a copy with the later steps is metrics.jsonl.1"), "{log}");
    assert_eq!(fs::read_to_string(site.path("metrics.jsonl.1")).unwrap(), whole);
    assert_eq!(site.last_step(), 5);
}

#[test]
fn what_retention_will_remove_is_not_said_to_stay() {
    for (retention, said, left) in [
        (
            &["--most-recent-k=2"][..],
            "--most-recent-k removes 6 as older checkpoints once",
            &[8, 10][..],
        ),
        (&["--most-recent-k=3"], "It leaves 6 and 8 as they are.", &[6, 8, 10]),
        (
            &["--save-retain-interval=5"],
            "--save-retain-interval removes 6 and 8 as older checkpoints once",
            &[5, 10],
        ),
        (
            &["--save-retain-interval=5", "--train-iters=5"],
            "It leaves 6 and 8 as they are.",
            &[5, 6, 8],
        ),
    ] {
        let site = saved();
        let flags = [
            "--load=saved",
            "--ckpt-step=4",
            "--save=saved",
            "--train-iters=10",
            "--lr-decay-iters=8",
        ];
        let interval =
            if retention[0].starts_with("--save") { &["--save-interval=5"][..] } else { &[] };
        let log = stdout(&site.succeed(&[&flags[..], interval, retention].concat()));
        assert!(log.contains(said), "no {said:?} in {log}");
        let there = |step: &u64| site.path(&format!("saved/iter_{step:07}")).exists();
        let found: Vec<u64> = (5..=10).filter(there).collect();
        assert_eq!(found, left, "{retention:?}: {log}");
    }
}

#[test]
fn a_step_that_is_not_there_is_refused_with_those_that_are() {
    let site = saved();
    let before = site.files();
    let flags = [&FOLDERS[..], &["--ckpt-step=5"]].concat();
    let parts = ["iter_0000005: does not exist; existing iterations are 8, 6, 4, 2"];
    refused(&site.pretrain(&flags).output().unwrap(), &parts);
    for output in ended(site.ranks(&flags), SOON) {
        refused(&output, &parts);
    }
    for (flags, part) in [
        (&["--ckpt-step=4"][..], "ckpt_step = 4 (--ckpt-step) has no effect without load"),
        (
            &["--exit-on-missing-checkpoint"],
            "exit_on_missing_checkpoint = true (--exit-on-missing-checkpoint) has no effect without load",
        ),
        (&["--ckpt-step=4", "--load=new"], "new holds no checkpoint"),
        (&["--ckpt-step=4", "--load=saved/iter_0000002"], "is the folder of one iteration"),
    ] {
        refused(&site.pretrain(flags).output().unwrap(), &[part]);
    }
    site.assert_unchanged(&before);
}

#[test]
fn nobody_is_told_to_remove_what_is_loaded() {
    let site = saved();
    for load in [
        &["--load=saved"][..],
        &["--load=saved/iter_0000004"],
        &["--load=./saved", "--ckpt-step=4"],
    ] {
        let output =
            site.pretrain(&[load, &["--finetune", "--save=saved"]].concat()).output().unwrap();
        refused(&output, &["would overwrite it; save elsewhere"]);
        assert!(!stderr(&output).contains("remove"), "{}", stderr(&output));
    }
    let output = site.pretrain(&["--save=saved"]).output().unwrap();
    refused(&output, &["continue it with --load saved, or remove the iter_… folders in saved"]);
}

#[test]
fn ranks_that_are_started_again_go_on_from_what_the_run_saved_itself() {
    let site = Site::new();
    let constant = "--lr-decay-style=constant";
    site.succeed(&["--save=saved", "--save-interval=10", constant]);
    let flags =
        ["--ckpt-step=10", "--max-restarts=1", "--save-interval=10", "--train-iters=400", constant];
    let printed = fs::File::create(site.path("printed")).unwrap();
    let supervisor =
        site.pretrain(&[&FOLDERS[..], &flags].concat()).stdout(printed).spawn().unwrap();
    wait_for("the run to go back", || {
        (latest(&site) == "10" || site.last_step() < 20).then_some(())
    });
    site.wait_long_for_step(35);
    kill(site.supervised_ranks()[RANKS - 1], "KILL");
    let output = ended(vec![supervisor], 10 * SOON).remove(0);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let printed = fs::read_to_string(site.path("printed")).unwrap();
    let from: Vec<&str> =
        printed.lines().filter(|line| line.contains("resumed from saved/iter_")).collect();
    assert!(
        from.len() == 2 && from[0].contains("iter_0000010") && !from[1].contains("iter_0000010"),
        "{from:?}"
    );
    assert_eq!(latest(&site), "400");
}

#[test]
fn a_launcher_that_would_go_back_every_time_is_told() {
    let site = saved();
    for (restarts, refuses) in [("--max-restarts=1", true), ("--max-restarts=0", false)] {
        let mut command = site.mark(megatron());
        command.args([
            "launch",
            "--nproc-per-node=1",
            restarts,
            "--",
            env!("CARGO_BIN_EXE_megatron"),
            "pretrain",
        ]);
        command.args(["run.toml", "--ckpt-step=6", "--tensor-model-parallel-size=1"]);
        let output =
            command.args(FOLDERS).arg("--pipeline-model-parallel-size=1").output().unwrap();
        match refuses {
            true => refused(
                &output,
                &["--ckpt-step 6: this launcher may restart ranks", "--max-restarts 0"],
            ),
            false => assert!(output.status.success(), "{}", stderr(&output)),
        }
    }
}
