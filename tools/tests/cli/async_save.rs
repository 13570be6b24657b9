//! `--async-save`: the same checkpoints as those of a run that waits for saves, written while
//! training continues.

use std::collections::BTreeMap;
use std::fs;

use crate::site::{SOON, Site, ended, refused};
use crate::support::{kill, kill_together, stderr, stdout};

const SAVE: [&str; 3] = ["--save=saved", "--load=saved", "--async-save"];

/// The shards of every checkpoint in `folder`.
fn shards(site: &Site, folder: &str) -> BTreeMap<String, Vec<u8>> {
    let files = |folder: &str| {
        fs::read_dir(site.path(folder)).unwrap().map(|entry| entry.unwrap()).collect::<Vec<_>>()
    };
    let mut shards = BTreeMap::new();
    for iteration in files(folder).iter().filter(|entry| entry.path().is_dir()) {
        let iteration = iteration.file_name().into_string().unwrap();
        for file in files(&format!("{folder}/{iteration}")) {
            let name = file.file_name().into_string().unwrap();
            if name.ends_with(".safetensors") {
                shards.insert(format!("{iteration}/{name}"), fs::read(file.path()).unwrap());
            }
        }
    }
    shards
}

/// The saved iterations in a log, in order.
fn saved(log: &str) -> Vec<u64> {
    let lines = log
        .lines()
        .filter_map(|line| line.split_once("successfully saved checkpoint from iteration"));
    lines.map(|(_, rest)| rest.split_whitespace().next().unwrap().parse().unwrap()).collect()
}

#[test]
fn its_checkpoints_are_those_of_a_run_that_saves_at_once() {
    let site = Site::new();
    let length = ["--train-iters=7", "--save-interval=2"];
    let log = stdout(&site.succeed(&[&length[..], &["--save=at-once"]].concat()));
    assert_eq!(saved(&log), [2, 4, 6, 7]);
    let losses = site.losses();
    fs::remove_file(site.path("metrics.jsonl")).unwrap();
    let log = stdout(&site.succeed(&[&length[..], &SAVE].concat()));
    assert_eq!(saved(&log), [2, 4, 6, 7]);
    assert_eq!(site.losses(), losses);
    let expected = shards(&site, "at-once");
    assert_eq!(expected.len(), 4 * crate::site::RANKS);
    assert!(shards(&site, "saved") == expected);
    site.assert_nothing_left();
}

#[test]
fn a_run_that_is_stopped_or_killed_goes_on_from_what_was_complete() {
    let uninterrupted = Site::new();
    // A learning rate that does not depend on the run's length.
    let constant = "--lr-decay-style=constant";
    uninterrupted.succeed(&["--train-iters=40", constant]);
    for signal in ["TERM", "KILL"] {
        let site = Site::new();
        let flags = [&SAVE[..], &["--save-interval=1", "--train-iters=100000", constant]].concat();
        let child = site.pretrain(&flags).spawn().unwrap();
        site.wait_for_step(12);
        if signal == "KILL" {
            kill_together(&site.supervised_ranks(), signal);
        } else {
            kill(child.id(), signal);
        }
        let output = ended(vec![child], SOON).remove(0);
        let last = *saved(&stdout(&output)).last().unwrap();
        let pointer =
            fs::read_to_string(site.path("saved/latest_checkpointed_iteration.txt")).unwrap();
        let there: u64 = pointer.trim().parse().unwrap();
        if signal == "TERM" {
            // All steps that were made are saved.
            assert_eq!(
                (output.status.code(), there),
                (Some(143), site.last_step()),
                "{}",
                stderr(&output)
            );
        }
        assert!(there == last || there == last + 1, "{there}, {last}");
        if there < 40 {
            site.succeed(
                &[&SAVE[..], &["--save-interval=7", "--train-iters=40", constant]].concat(),
            );
            assert_eq!(site.losses(), uninterrupted.losses(), "{signal}");
        }
        site.assert_nothing_left();
    }
}

#[test]
fn it_is_refused_where_it_changes_nothing_or_takes_the_memory_that_is_to_be_saved() {
    let site = Site::new();
    let before = site.files();
    for (flags, parts) in [
        (
            &["--save=saved"][..],
            &["async_save = true (--async-save) has no effect", "set save_interval"][..],
        ),
        (
            &["--save=saved", "--save-interval=1", "--offload-optimizer-nvme-path=offload"],
            &["async_save = true", "offload_optimizer_nvme_path = offload", "leave one out"],
        ),
    ] {
        refused(&site.pretrain(&[&["--async-save"], flags].concat()).output().unwrap(), parts);
    }
    site.assert_unchanged(&before);
}
