//! Ranks whose launcher tells them RANK and WORLD_SIZE alone, as Kubernetes' operators do: they find out who else is on their machine, say whom they wait for, and
//! tell each other why they cannot take part.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command};

use crate::site::{RANKS, SOON, Site, ended, free_port, refused};
use crate::support::stderr;

/// Rank `rank` of the site's run, which knows nothing of machines.
fn rank(site: &Site, rank: usize, port: u16, flags: &[&str]) -> Command {
    let mut command = site.rank(rank, port, flags);
    command.env_remove("LOCAL_RANK").env_remove("LOCAL_WORLD_SIZE").arg("--distributed-timeout-minutes=0.5");
    command
}

fn succeeded(children: Vec<Child>) {
    ended(children, 3 * SOON).iter().for_each(|output| assert!(output.status.success(), "{}", stderr(output)));
}

#[test]
fn rank_and_world_size_are_enough() {
    let site = Site::new();
    site.succeed(&[]);
    let expected = site.losses();
    std::fs::remove_file(site.path("metrics.jsonl")).unwrap();
    let port = free_port();
    succeeded((0..RANKS).map(|r| rank(&site, r, port, &[]).spawn().unwrap()).collect());
    assert_eq!(site.losses(), expected);
    site.assert_nothing_left();
}

#[test]
fn who_waits_for_a_rank_says_for_which() {
    let (site, port) = (Site::new(), free_port());
    let mut ranks: Vec<_> = [1, 0, 3].into_iter().map(|r| rank(&site, r, port, &[]).spawn().unwrap()).collect();
    let mut told = BufReader::new(ranks[1].stderr.take().unwrap()).lines();
    let line = told.next().unwrap().unwrap();
    assert!(line.starts_with("rank 0 is waiting for 1 of 4 ranks: 2 ("), "{line}");
    ranks.push(rank(&site, 2, port, &[]).spawn().unwrap());
    assert!(told.next().is_none(), "nothing else is wrong");
    succeeded(ranks);
}

#[test]
fn who_waits_for_rank_0_says_where() {
    let (site, port) = (Site::new(), free_port());
    let mut first = rank(&site, 2, port, &[]).spawn().unwrap();
    let mut told = BufReader::new(first.stderr.take().unwrap()).lines();
    let line = told.next().unwrap().unwrap();
    assert!(line.starts_with(&format!("waiting for rank 0, which is to be found at 127.0.0.1:{port}: ")), "{line}");
    let others = [0, 1, 3].map(|r| rank(&site, r, port, &[]).spawn().unwrap());
    succeeded(others.into_iter().chain([first]).collect());
}

/// Built for GPUs, the program would find one on some machines.
#[cfg(not(feature = "cuda"))]
#[test]
fn a_rank_without_its_device_tells_the_others_at_once() {
    let (site, port) = (Site::new(), free_port());
    let flags = |r| if r == 2 { &["--device=cuda"][..] } else { &[] };
    let ranks = (0..RANKS).map(|r| rank(&site, r, port, flags(r)).spawn().unwrap()).collect();
    for (r, output) in ended(ranks, SOON).iter().enumerate() {
        let who = if r == 2 { "error: --device cuda: no GPU" } else { "rank 2 failed: --device cuda: no GPU" };
        refused(output, &[who, "--features cuda"]);
    }
    site.assert_nothing_left();
}
