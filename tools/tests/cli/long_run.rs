//! The resources of a run do not grow with its length.

use std::fs;
use std::time::Duration;

use crate::site::{SOON, Site, ended};
use crate::support::stderr;

/// Bytes of resident memory by which the allocator may still grow between the two measurements.
const SLACK: u64 = 3 << 20;

/// The resources of a process.
#[derive(Debug)]
struct Holdings {
    resident: u64,
    threads: usize,
    descriptors: usize,
}

/// The minimum of a few measurements of `pid`, so that a file open during a save does not count.
fn holdings(pid: u32) -> Holdings {
    let looks = (0..10).map(|_| {
        std::thread::sleep(Duration::from_millis(15));
        holdings_now(pid)
    });
    let least = |a: Holdings, b: Holdings| Holdings {
        resident: a.resident.min(b.resident),
        threads: a.threads.min(b.threads),
        descriptors: a.descriptors.min(b.descriptors),
    };
    looks.reduce(least).unwrap()
}

fn holdings_now(pid: u32) -> Holdings {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let value = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    Holdings { resident: value("VmRSS:") * 1024, threads: value("Threads:") as usize, descriptors }
}

#[test]
fn two_thousand_steps_need_what_three_hundred_do() {
    let site = Site::new();
    site.edit("hidden_size = 32", "hidden_size = 16");
    site.edit("global_batch_size = 8", "global_batch_size = 4");
    let flags =
        ["--train-iters=1000000", "--log-interval=100", "--save=saved", "--save-interval=500"];
    let mut supervisor = site.pretrain(&flags).spawn().unwrap();
    let pids = site.supervised_ranks();
    let look = |step: u64| {
        site.wait_long_for_step(step);
        pids.iter().map(|&pid| holdings(pid)).collect::<Vec<_>>()
    };
    // Both far from a save, which happens every 500 steps.
    let (early, late) = (look(300), look(2300));
    assert!(supervisor.try_wait().unwrap().is_none());
    crate::support::kill(supervisor.id(), "TERM");
    let output = ended(vec![supervisor], SOON).remove(0);
    assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
    for (rank, (early, late)) in early.iter().zip(&late).enumerate() {
        assert!(late.resident <= early.resident + SLACK, "rank {rank}: {early:?}, then {late:?}");
        assert!(late.threads <= early.threads, "rank {rank}: {early:?}, then {late:?}");
        assert!(late.descriptors <= early.descriptors, "rank {rank}: {early:?}, then {late:?}");
    }
    site.assert_nothing_left();
}
