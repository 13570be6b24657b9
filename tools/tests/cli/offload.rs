//! ZeRO-3 with weights, gradients and optimizer state in files: it ends as any run does, resumes
//! bitwise with or without the files, and leaves nothing in their folder.

use std::fs;

use crate::checkpoints::limited;
use crate::site::{SOON, Site, ended, refused};
use crate::support::{kill, stderr, stdout};

const STEPS: u64 = 200;
/// Data parallel by two within each of two stages.
const LAYOUT: [&str; 3] = ["--tensor-model-parallel-size=1", "--zero-stage=3", "--save=saved"];
const FILES: [&str; 3] = ["--offload-param=nvme", "--offload-optimizer=nvme", "--nvme-path=state"];

fn flags<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&LAYOUT[..], &FILES, &["--load=saved", "--save-interval=10"], more].concat()
}

/// A site, and the losses of a whole run with everything in memory.
fn site() -> (Site, Vec<(u64, String)>) {
    let site = Site::new();
    site.edit("train_iters = 20", &format!("train_iters = {STEPS}"));
    site.edit(
        "pipeline_model_parallel_size = 2",
        "pipeline_model_parallel_size = 2\ndata_parallel_size = 2",
    );
    site.succeed(&LAYOUT[..2]);
    let losses = site.losses();
    assert_eq!(losses.len() as u64, STEPS);
    (site, losses)
}

fn assert_nothing_left(site: &Site) {
    site.assert_nothing_left();
    assert_eq!(fs::read_dir(site.path("state")).map_or(0, Iterator::count), 0, "files of state");
}

#[test]
fn state_in_files_survives_a_dead_rank_and_signals() {
    let (site, losses) = site();
    for (signal, code) in [("KILL", 137), ("INT", 130), ("TERM", 143)] {
        for folder in ["saved", "metrics.jsonl"].map(|name| site.path(name)) {
            let _ = fs::remove_dir_all(&folder).or_else(|_| fs::remove_file(&folder));
        }
        let run = site.pretrain(&flags(&[])).spawn().unwrap();
        site.wait_for_step(12);
        // One rank dies; the whole run is asked to stop.
        kill(if signal == "KILL" { site.supervised_ranks()[1] } else { run.id() }, signal);
        let output = ended(vec![run], SOON).remove(0);
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        if signal == "KILL" {
            refused(&output, &["rank 1 (pid ", "was killed by SIGKILL"]);
        } else {
            assert!(!stderr(&output).contains("error"), "{}", stderr(&output));
        }
        assert_nothing_left(&site);
        // The state comes back into files, or into memory.
        let resumed =
            if signal == "INT" { [&LAYOUT[..], &["--load=saved"]].concat() } else { flags(&[]) };
        let output = site.succeed(&resumed);
        assert!(stdout(&output).contains("resumed from"), "{}", stdout(&output));
        assert_eq!(site.losses(), losses, "{signal}");
        assert_nothing_left(&site);
    }
}

#[test]
fn a_disk_without_room_for_the_state_is_named_before_the_first_step() {
    let site = Site::new();
    site.succeed(&["--train-iters=1"]); // makes the cache, which has to be written, too
    let tcp = ["--distributed-backend=tcp", "--train-iters=9", "--metrics=/dev/null"];
    let command = site.pretrain(&flags(&tcp));
    let output = ended(vec![limited(&site, &command, 64).spawn().unwrap()], SOON).remove(0);
    refused(
        &output,
        &["state: no room for ", "GiB", "free disk space, or give a folder on another disk"],
    );
    assert!(!site.path("saved/latest_checkpointed_iteration.txt").exists());
    assert_nothing_left(&site);
}
