//! Ranks as separate processes: the test binary starts itself again, once per rank.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use candle_core::DType;
use megatron::comm::{Backend, Group, ReduceOp, Rendezvous, init, spawn_with};
use megatron::{Error, Result};

use crate::support::{bytes, info, options, tensor};

const SECOND: Duration = Duration::from_secs(1);
/// Elements of sums: exchanged whole, in slices, and by remote memory access.
const COUNTS: [usize; 3] = [1000, 300_000, 1_000_001];

/// Starts rank `rank` of `size` to run `task` (see [`a_rank_of_another_test`]).
fn spawn(task: &str, backend: &str, rank: usize, size: usize, dir: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([
        "--exact",
        "processes::a_rank_of_another_test",
        "--nocapture",
        "--include-ignored",
    ]);
    command.env("COMM_TEST_RANK", format!("{task} {backend} {rank} {size} {}", dir.display()));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for a rank and returns its output, if it succeeded. Kills it after half a minute.
fn finish(mut child: Child) -> String {
    let deadline = Instant::now() + 30 * SECOND;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("a rank hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

fn run_task(task: &str, g: &Group) -> Result<()> {
    match task {
        "sums" => {
            for count in COUNTS {
                let t = tensor(g.rank(), count, DType::F32);
                g.all_reduce(&t, ReduceOp::Sum)?.wait()?;
                println!("RESULT {count} {:08x}", crc32c::crc32c(&bytes(&t)));
            }
            Ok(())
        }
        // Runs until a rank is killed.
        _ => {
            let t = tensor(g.rank(), task.parse().unwrap(), DType::F32);
            loop {
                g.all_reduce(&t, ReduceOp::Sum)?.wait()?;
            }
        }
    }
}

/// Not a test itself: [`spawn`] runs it in each process. Without a task it does nothing.
#[test]
fn a_rank_of_another_test() {
    let Ok(task) = std::env::var("COMM_TEST_RANK") else { return };
    let words: Vec<&str> = task.splitn(5, ' ').collect();
    let [task, backend, rank, size, dir] = words[..] else { panic!("{words:?}") };
    let (rank, size) = (rank.parse().unwrap(), size.parse().unwrap());
    let backend = if backend == "local" { Backend::Local } else { Backend::Tcp };
    let world = init(
        &info(rank, size),
        &Rendezvous::File { dir: dir.into() },
        backend,
        options(20 * SECOND),
    )
    .unwrap();
    println!("READY");
    match run_task(task, &world.group) {
        Ok(()) => {}
        Err(Error::PeerLost { rank, how, .. }) => println!("LOST {rank} {how}"),
        Err(e) => panic!("{e}"),
    }
}

fn lines<'a>(output: &'a str, word: &str) -> Vec<&'a str> {
    output.lines().filter_map(|line| line.strip_prefix(word)).collect()
}

#[test]
fn processes_get_the_bits_that_threads_get() {
    let expected = crate::support::ranks("threads", 3, |g| {
        let sum = |count| {
            let t = tensor(g.rank(), count, DType::F32);
            g.all_reduce(&t, ReduceOp::Sum)?.wait()?;
            Ok(format!(" {count} {:08x}", crc32c::crc32c(&bytes(&t))))
        };
        COUNTS.into_iter().map(sum).collect::<Result<Vec<_>>>()
    });
    for backend in ["local", "tcp"] {
        let dir = tempfile::tempdir().unwrap();
        let children: Vec<Child> =
            (0..3).map(|rank| spawn("sums", backend, rank, 3, dir.path())).collect();
        for child in children {
            assert_eq!(lines(&finish(child), "RESULT"), expected[0], "{backend}");
        }
    }
}

/// Names in the places where shared memory could be left behind.
fn leftovers() -> Vec<String> {
    let shared = std::fs::read_dir("/dev/shm").into_iter().flatten();
    let names =
        shared.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()));
    names.filter(|name| name.contains("megatron")).collect()
}

#[test]
fn a_rank_that_is_killed_is_named_to_the_others_and_leaves_nothing_behind() {
    // Sums over windows, by remote memory access, and over messages.
    for (backend, count) in [("local", "100000"), ("local", "2000000"), ("tcp", "100000")] {
        let dir = tempfile::tempdir().unwrap();
        let mut children: Vec<Child> =
            (0..3).map(|rank| spawn(count, backend, rank, 3, dir.path())).collect();
        // Rank 0's output begins when all ranks have met.
        let mut output = std::io::BufReader::new(children[1].stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("READY") {
            line.clear();
            assert!(
                std::io::BufRead::read_line(&mut output, &mut line).unwrap() > 0,
                "{backend}: rank 1 ended"
            );
        }
        std::thread::sleep(SECOND / 5);
        let start = Instant::now();
        let mut killed = children.remove(1);
        killed.kill().unwrap();
        let others: Vec<String> = children.into_iter().map(finish).collect();
        assert!(start.elapsed() < 5 * SECOND, "{backend}: {:?}", start.elapsed());
        for other in &others {
            let lost = lines(other, "LOST 1 died");
            assert_eq!(lost.len(), 1, "{backend}: {other}");
            assert!(backend == "tcp" || lost[0] == format!(" (pid {})", killed.id()), "{lost:?}");
        }
        assert_eq!(killed.wait().unwrap().signal(), Some(9));
        assert_eq!(leftovers(), Vec::<String>::new());
    }
}

/// Runs both as the starting process and as one of its ranks.
#[test]
fn a_program_starts_its_own_ranks_and_one_that_fails_ends_the_others() {
    const NAME: &str =
        "processes::a_program_starts_its_own_ranks_and_one_that_fails_ends_the_others";
    let fails = std::env::var_os("SPAWN_TEST_FAILS").is_some();
    let run = |fail: bool| {
        let prepare = &mut |command: &mut Command| {
            command.args(["--exact", NAME, "--nocapture"]).stdout(Stdio::null());
            command.stderr(Stdio::null());
            if fail {
                command.env("SPAWN_TEST_FAILS", "1");
            }
        };
        spawn_with(3, prepare, |world| {
            let rank = world.group.rank();
            assert_eq!((world.local_rank, world.local_world_size), (rank, 3));
            if fails && rank == 1 {
                return Err(Error::config("as it is to"));
            }
            let sum = tensor(rank, 100, DType::F32);
            world.group.all_reduce(&sum, ReduceOp::Sum)?.wait()?;
            if fails { world.group.barrier() } else { Ok(()) }
        })
    };
    if std::env::var_os("RANK").is_some() {
        run(false).unwrap();
        return;
    }
    run(false).unwrap();
    let message = run(true).unwrap_err().to_string();
    assert!(message.contains("the other ranks are stopped"), "{message}");
}
