//! Ranks whose launcher sets only RANK and WORLD_SIZE, as Kubernetes operators do: they detect the
//! ranks on their machine, report the ranks they wait for, and tell each other why they cannot take
//! part.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command};

use crate::site::{RANKS, SOON, Site, ended, free_port, refused};
use crate::support::stderr;

const SECRET: &str = "MEGATRON_RUN_SECRET";

/// Rank `rank` of the site's run, without information on machines, but with the secret.
fn rank(site: &Site, rank: usize, port: u16, flags: &[&str]) -> Command {
    let mut command = site.rank(rank, port, flags);
    command
        .env_remove("LOCAL_RANK")
        .env_remove("LOCAL_WORLD_SIZE")
        .arg("--distributed-timeout-minutes=0.5");
    command.env(SECRET, "a".repeat(32));
    command
}

fn succeeded(children: Vec<Child>) {
    ended(children, 3 * SOON)
        .iter()
        .for_each(|output| assert!(output.status.success(), "{}", stderr(output)));
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
fn ranks_that_were_handed_no_secret_run_and_rank_0_says_so_in_one_line() {
    for (name, changed) in [("torchrun", true), ("a launcher with a secret", false)] {
        let (site, port) = (Site::new(), free_port());
        let start = |r| {
            let mut rank = rank(&site, r, port, &["--train-iters=1"]);
            if changed { rank.env_remove(SECRET) } else { &mut rank }.spawn().unwrap()
        };
        let outputs = ended((0..RANKS).map(start).collect(), 3 * SOON);
        for (r, output) in outputs.iter().enumerate() {
            let text = stderr(output);
            let notes = text.matches("note: the ranks of this run are not authenticated").count();
            assert_eq!(notes, usize::from(changed && r == 0), "{name}, rank {r}: {text}");
            assert!(
                output.status.success()
                    && (notes == 0 || text.contains("export MEGATRON_RUN_SECRET=")),
                "{text}"
            );
        }
    }
}

#[test]
fn a_rank_of_another_secret_ends_at_once_and_the_run_waits_for_its_own() {
    let (site, port) = (Site::new(), free_port());
    let mut ranks: Vec<Child> =
        [0, 2, 3].map(|r| rank(&site, r, port, &[]).spawn().unwrap()).into();
    let mut told = BufReader::new(ranks[0].stderr.take().unwrap()).lines();
    for (secret, why) in
        [(Some("b".repeat(32)), "MEGATRON_RUN_SECRET differs"), (None, "this process has none")]
    {
        let mut stranger = rank(&site, 1, port, &[]);
        match secret {
            Some(secret) => stranger.env(SECRET, secret),
            None => stranger.env_remove(SECRET),
        };
        refused(
            &ended(vec![stranger.spawn().unwrap()], SOON)[0],
            &["refuses this rank: it", why, "give all ranks"],
        );
        // Rank 0 may first report the ranks it waits for.
        let line =
            told.by_ref().map(Result::unwrap).find(|line| line.contains("was refused")).unwrap();
        assert!(
            line.starts_with("a process at 127.0.0.1 that tried to join was refused: it"),
            "{line}"
        );
    }
    ranks.push(rank(&site, 1, port, &[]).spawn().unwrap());
    succeeded(ranks);
}

/// The port where the ranks of a supervised run met.
fn port(rank: u32) -> u16 {
    let environment = std::fs::read(format!("/proc/{rank}/environ")).unwrap();
    let port = environment
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(b"MASTER_PORT="))
        .unwrap();
    String::from_utf8_lossy(port).parse().unwrap()
}

#[test]
fn ranks_that_have_met_leave_no_port_open_nor_their_supervisor() {
    let site = Site::new();
    let supervisor =
        site.pretrain(&["--train-iters=1000000", "--log-interval=1000000"]).spawn().unwrap();
    let ranks = site.supervised_ranks();
    site.wait_for_step(1);
    let address = ("127.0.0.1", port(ranks[0]));
    assert!(std::net::TcpStream::connect(address).is_err(), "{address:?}");
    crate::support::kill(supervisor.id(), "INT");
    ended(vec![supervisor], SOON);
    site.assert_nothing_left();
}

#[test]
fn who_waits_for_a_rank_says_for_which() {
    let (site, port) = (Site::new(), free_port());
    let mut ranks: Vec<_> =
        [1, 0, 3].into_iter().map(|r| rank(&site, r, port, &[]).spawn().unwrap()).collect();
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
    assert!(line.starts_with(&format!("waiting for rank 0 at 127.0.0.1:{port}: ")), "{line}");
    let others = [0, 1, 3].map(|r| rank(&site, r, port, &[]).spawn().unwrap());
    succeeded(others.into_iter().chain([first]).collect());
}

/// A program built for GPUs would find one on some machines.
#[cfg(not(feature = "cuda"))]
#[test]
fn a_rank_without_its_device_tells_the_others_at_once() {
    let (site, port) = (Site::new(), free_port());
    let flags = |r| if r == 2 { &["--device=cuda"][..] } else { &[] };
    let ranks = (0..RANKS).map(|r| rank(&site, r, port, flags(r)).spawn().unwrap()).collect();
    for (r, output) in ended(ranks, SOON).iter().enumerate() {
        let who = if r == 2 {
            "error: --device cuda: no GPU"
        } else {
            "rank 2 failed: --device cuda: no GPU"
        };
        refused(output, &[who, "--features cuda"]);
    }
    site.assert_nothing_left();
}
