//! `--profile`: traces that viewers can read, and a table.

use std::fs;

use serde_json::Value;

use crate::site::{RANKS, SOON, Site, ended};
use crate::support::{kill, pipe, stderr, stdout, wait_for};

#[test]
fn every_rank_leaves_a_trace_and_the_run_a_table() {
    let site = Site::new();
    let flags = ["--profile", "--profile-dir=traces", "--train-iters=4", "--profile-step-start=2"];
    let output = site.pretrain(&flags).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("profile: 2 steps") && text.contains("mean of 4 ranks"), "{text}");
    assert!(text.contains("| linear_wgrad ") && text.contains("| wait for a gradient "), "{text}");
    for rank in 0..RANKS {
        let trace =
            fs::read(site.path("traces").join(format!("trace_rank_{rank:05}.json"))).unwrap();
        let trace: Value = serde_json::from_slice(&trace).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let named = |name: &str| {
            events.iter().filter(|e| e["ph"] == "X" && e["name"] == name).collect::<Vec<_>>()
        };
        assert!(events.iter().all(|e| e["pid"] == rank));
        assert_eq!(named("step").len(), 2);
        // Four microbatches a step, forward and backward, inside the steps.
        assert_eq!((named("forward").len(), named("backward").len()), (8, 8));
        let span = |e: &Value| {
            (e["ts"].as_f64().unwrap(), e["ts"].as_f64().unwrap() + e["dur"].as_f64().unwrap())
        };
        for pass in named("forward") {
            let (start, end) = span(pass);
            let within = |step: &&Value| span(step).0 <= start + 1.0 && end <= span(step).1 + 1.0;
            assert!(named("step").iter().any(within), "{pass}");
        }
        assert!(!named("linear").is_empty() && !named("all_reduce").is_empty());
    }
}

#[test]
fn only_the_ranks_asked_for_are_recorded() {
    let site = Site::new();
    let flags = ["--profile", "--profile-dir=traces", "--train-iters=3", "--profile-ranks=1"];
    let output = site.pretrain(&flags).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let files: Vec<_> =
        fs::read_dir(site.path("traces")).unwrap().map(|f| f.unwrap().file_name()).collect();
    assert_eq!(files, ["trace_rank_00001.json"]);
}

#[test]
fn a_pipe_in_the_place_of_a_trace_holds_nothing_up() {
    let site = Site::new();
    fs::create_dir(site.path("traces")).unwrap();
    pipe(&site.path("traces/trace_rank_00001.json"));
    let run =
        site.pretrain(&["--profile", "--profile-dir=traces", "--train-iters=4"]).spawn().unwrap();
    let output = ended(vec![run], SOON).remove(0);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("trace_rank_00001.json: it is a pipe"), "{}", stdout(&output));
}

#[test]
fn profile_settings_that_record_nothing_are_refused() {
    let site = Site::new();
    for (flags, needle) in [
        (
            vec!["--profile", "--profile-step-start=5", "--profile-step-end=5"],
            "leave no step to record",
        ),
        (vec!["--profile", "--profile-ranks=4"], "not among the 4"),
    ] {
        let output = site.pretrain(&flags).output().unwrap();
        assert!(!output.status.success());
        assert!(stderr(&output).contains(needle), "{flags:?}: {}", stderr(&output));
    }
}

#[test]
fn traces_are_written_when_the_last_recorded_step_is_made() {
    let site = Site::new();
    let flags =
        ["--profile", "--profile-dir=traces", "--train-iters=1000000", "--profile-step-start=2"];
    let run = site.pretrain(&flags).spawn().unwrap();
    wait_for("the traces", || {
        (0..RANKS)
            .all(|rank| site.path(&format!("traces/trace_rank_{rank:05}.json")).exists())
            .then_some(())
    });
    site.wait_for_step(20);
    kill(run.id(), "TERM");
    let output = ended(vec![run], SOON).remove(0);
    let text = stdout(&output);
    let (before, after) = text.split_once("profile: 2 steps").unwrap();
    assert!(
        before.contains("] iteration        3/") && !before.contains("] iteration        5/"),
        "{text}"
    );
    assert!(after.contains("] iteration       19/") && !after.contains("profile: "), "{text}");
}
