//! The rendezvous of ranks, and its errors.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use megatron::comm::rendezvous::{Clients, FileStore, Store, StoreServer, TcpStore};
use megatron::comm::{Backend, CommOptions, RankInfo, Rendezvous, Secret, init};
use megatron::{Error, Result};

use crate::support::{info, options};

const SECOND: Duration = Duration::from_secs(1);

fn impatient() -> CommOptions {
    CommOptions { connect_timeout: SECOND, ..options(SECOND) }
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn check_store(store: &dyn Store, other: &dyn Store) {
    assert_eq!(store.get("a/b").unwrap(), None);
    store.set("a/b", b"\0value").unwrap();
    store.set("a/.c%", b"").unwrap();
    store.set("b", b"2").unwrap();
    assert_eq!(other.get("a/b").unwrap().unwrap(), b"\0value");
    assert_eq!(other.get("a/.c%").unwrap().unwrap(), b"");
    assert_eq!(other.list("a/").unwrap(), ["a/.c%", "a/b"]);
    assert_eq!(other.wait_for("a/", 2, Duration::ZERO).unwrap().unwrap().len(), 2);
    assert_eq!(other.wait_for("a/", 3, SECOND / 50).unwrap(), None);
    assert_eq!(store.add("b", 40).unwrap(), 42);
    assert!(store.add("a/b", 1).unwrap_err().to_string().contains("a/b"));
    assert_eq!(store.wait("late", SECOND / 50).unwrap(), None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(SECOND / 20);
            other.set("late", b"now").unwrap();
        });
        assert_eq!(store.wait("late", 10 * SECOND).unwrap().unwrap(), b"now");
        for store in [store, other] {
            scope.spawn(|| (0..100).for_each(|_| assert!(store.add("count", 1).unwrap() > 0)));
        }
    });
    assert_eq!(store.add("count", 0).unwrap(), 200);
}

#[test]
fn a_store_in_a_folder_keeps_values_and_counts() {
    let dir = tempfile::tempdir().unwrap();
    check_store(&FileStore::open(dir.path()).unwrap(), &FileStore::open(dir.path()).unwrap());
}

#[test]
fn a_store_over_tcp_keeps_values_and_counts() {
    let server = serve(Secret::default());
    check_store(&connect(&server).unwrap(), &connect(&server).unwrap());
}

/// A store for two ranks of this machine.
fn serve(secret: Secret) -> StoreServer {
    StoreServer::bind(
        "127.0.0.1",
        0,
        Clients { ranks: 2, one_host: true, secret, ..Clients::default() },
    )
    .unwrap()
}

/// A client without a secret.
fn connect(server: &StoreServer) -> Result<TcpStore> {
    TcpStore::connect("127.0.0.1", server.address().port(), SECOND, &Secret::default(), None)
}

#[test]
fn garbage_does_not_disturb_a_store() {
    let server = serve(Secret::default());
    let store = connect(&server).unwrap();
    // A client without a secret. Its challenge is zeros, but its proof is not.
    let greeting = [b"MGTSTOR2".as_slice(), &[0; 33]].concat();
    let huge_key = [&greeting[..], b"\x01", &[0xff; 64]].concat();
    let huge_value = [&greeting[..], b"\x01\x01\x00k", &[0xff; 64]].concat();
    for garbage in [b"GET / HTTP/1.1\r\n\r\n".as_slice(), &huge_key, &huge_value] {
        let mut stranger = TcpStream::connect(server.address()).unwrap();
        stranger.set_read_timeout(Some(10 * SECOND)).unwrap();
        stranger.write_all(garbage).unwrap();
        let mut reply = Vec::new();
        // The server closes the connection, with or without a reset.
        let _ = stranger.read_to_end(&mut reply);
        assert!(reply.len() <= 8 + 1 + 32 + 32, "{reply:?}");
    }
    store.set("k", b"v").unwrap();
    assert_eq!(store.get("k").unwrap().unwrap(), b"v");
}

#[test]
fn a_port_in_use_is_reported_at_once_with_advice() {
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = holder.local_addr().unwrap().port();
    let start = Instant::now();
    let rendezvous = Rendezvous::Tcp { host: "127.0.0.1".into(), port, is_host: true };
    let Err(Error::Config(message)) =
        init(&info(0, 2), &rendezvous, Backend::Auto, options(SECOND)).map(drop)
    else {
        panic!()
    };
    assert!(message.contains(&format!("port {port} of 127.0.0.1 is in use")), "{message}");
    assert!(message.contains("MASTER_PORT"), "{message}");
    assert!(start.elapsed() < 2 * SECOND);
}

#[test]
fn another_program_on_the_port_is_recognized() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let answer =
        std::thread::spawn(move || other.accept().unwrap().0.write_all(b"SSH-2.0-OpenSSH_9.6\r\n"));
    let rendezvous = Rendezvous::Tcp { host: "127.0.0.1".into(), port, is_host: false };
    let Err(Error::Config(message)) =
        init(&info(1, 2), &rendezvous, Backend::Auto, options(SECOND)).map(drop)
    else {
        panic!()
    };
    assert!(message.contains("another program"), "{message}");
    answer.join().unwrap().unwrap();
}

#[test]
fn a_store_that_never_comes_up_is_named() {
    let rendezvous =
        Rendezvous::Tcp { host: "127.0.0.1".into(), port: free_port(), is_host: false };
    // As far as this rank knows, the user made no mistake.
    let Err(Error::Comm(message)) =
        init(&info(1, 2), &rendezvous, Backend::Auto, impatient()).map(drop)
    else {
        panic!()
    };
    assert!(
        message.contains("cannot reach 127.0.0.1:") && message.contains("MASTER_ADDR"),
        "{message}"
    );
}

/// The results of ranks `present` in a world of `size`.
fn meet(
    present: &[usize],
    size: usize,
    rendezvous: impl Fn(usize) -> Rendezvous + Sync,
) -> Vec<Result<Vec<usize>>> {
    std::thread::scope(|scope| {
        let join = |rank: usize| {
            let rendezvous = rendezvous(rank);
            scope.spawn(move || {
                Ok(init(&info(rank, size), &rendezvous, Backend::Auto, impatient())?
                    .group
                    .ranks()
                    .to_vec())
            })
        };
        let ranks: Vec<_> = present.iter().map(|rank| join(*rank)).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn ranks_that_do_not_appear_are_named_to_all() {
    let (dir, port) = (tempfile::tempdir().unwrap(), free_port());
    let file = |_| Rendezvous::File { dir: dir.path().into() };
    let tcp = |rank| Rendezvous::Tcp { host: "localhost".into(), port, is_host: rank == 0 };
    for told in [meet(&[0, 2], 4, file), meet(&[0, 2], 4, tcp)] {
        for result in told {
            let Err(Error::Timeout { operation, missing, .. }) = &result else {
                panic!("{result:?}")
            };
            assert_eq!((operation.as_str(), missing.as_slice()), ("rendezvous", &[1, 3][..]));
        }
    }
}

#[test]
fn rank_0_may_serve_the_store_itself() {
    let port = free_port();
    for result in meet(&[0, 1, 2], 3, |rank| Rendezvous::Tcp {
        host: "localhost".into(),
        port,
        is_host: rank == 0,
    }) {
        assert_eq!(result.unwrap(), [0, 1, 2]);
    }
}

/// This machine's address on connections to other machines, if it has one.
fn own_ip() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("198.51.100.1:9").ok()?;
    Some(socket.local_addr().ok()?.ip())
}

#[test]
fn rank_0_may_be_told_localhost_where_others_are_told_its_address() {
    let Some(ip) = own_ip() else { return eprintln!("skipped: no network") };
    // As under Kubeflow's PyTorchJob. Ranks 0 and 1 share a machine and neither knows its name.
    // Rank 2 is on another machine, where loopback does not reach them.
    let (port, places) =
        (free_port(), [("localhost", "a.invalid"), ("127.0.0.1", "a.invalid"), ("", "b.invalid")]);
    let join = |rank: usize| {
        let (master, host) = places[rank];
        let master = if master.is_empty() { ip.to_string() } else { master.into() };
        let info = RankInfo {
            host: host.into(),
            local_rank: None,
            local_world_size: None,
            in_pod: true,
            ..info(rank, 3)
        };
        let rendezvous = Rendezvous::Tcp { host: master, port, is_host: rank == 0 };
        let world = init(&info, &rendezvous, Backend::Auto, options(10 * SECOND))?;
        Ok((world.group.ranks().to_vec(), world.local_rank, world.local_world_size))
    };
    let told: Vec<Result<_>> = std::thread::scope(|scope| {
        let ranks = [0, 1, 2].map(|rank| scope.spawn(move || join(rank)));
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    // No rank was told how many ranks are on its machine.
    for (result, local) in told.into_iter().zip([(0, 2), (1, 2), (0, 1)]) {
        assert_eq!(result.unwrap(), (vec![0, 1, 2], local.0, local.1));
    }
}

#[test]
fn a_folder_may_hold_the_files_of_earlier_runs() {
    let dir = tempfile::tempdir().unwrap();
    let file = |_| Rendezvous::File { dir: dir.path().into() };
    for size in [4, 2, 3] {
        let present: Vec<usize> = (0..size).collect();
        for result in meet(&present, size, file) {
            assert_eq!(result.unwrap(), present);
        }
    }
    let told = meet(&[0], 2, file);
    assert!(matches!(&told[0], Err(Error::Timeout { missing, .. }) if *missing == [1]), "{told:?}");
}

#[test]
fn ranks_that_disagree_about_the_size_of_the_world_are_told_both() {
    let dir = tempfile::tempdir().unwrap();
    let rendezvous = Rendezvous::File { dir: dir.path().into() };
    let join =
        |rank, size| init(&info(rank, size), &rendezvous, Backend::Auto, options(SECOND)).map(drop);
    let told = std::thread::scope(|scope| {
        let ranks = [scope.spawn(|| join(0, 2)), scope.spawn(|| join(1, 3))];
        ranks.map(|rank| rank.join().unwrap())
    });
    for result in told {
        let message = result.unwrap_err().to_string();
        assert!(
            message.contains("WORLD_SIZE=2") && message.contains("rank 1 with WORLD_SIZE=3"),
            "{message}"
        );
    }
}

#[test]
fn ranks_with_different_backends_are_told_both_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let rendezvous = Rendezvous::File { dir: dir.path().into() };
    let join =
        |rank, backend| init(&info(rank, 2), &rendezvous, backend, options(30 * SECOND)).map(drop);
    let told = std::thread::scope(|scope| {
        let ranks =
            [scope.spawn(|| join(0, Backend::Tcp)), scope.spawn(|| join(1, Backend::Local))];
        ranks.map(|rank| rank.join().unwrap())
    });
    for result in told {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("--distributed-backend tcp, but rank 1 with local"), "{message}");
    }
}

#[test]
fn a_program_that_is_silent_where_the_store_should_be_is_told_as_that() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let rendezvous = Rendezvous::Tcp { host: "127.0.0.1".into(), port, is_host: false };
    let message = init(&info(1, 2), &rendezvous, Backend::Auto, options(SECOND))
        .map(drop)
        .unwrap_err()
        .to_string();
    assert!(message.contains("accepts connections, but sends nothing for 5 s"), "{message}");
    assert!(message.contains("choose a MASTER_PORT that no other program uses"), "{message}");
}

#[test]
fn two_processes_with_one_rank_are_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let told = meet(&[1, 1], 2, |_| Rendezvous::File { dir: dir.path().into() });
    let joined_twice = |r: &Result<_>| matches!(r, Err(Error::Config(m)) if m.contains("RANK=1") || m.contains("as rank 1"));
    assert!(told.iter().any(joined_twice), "{told:?}");
}

#[test]
fn a_second_process_with_a_rank_that_has_answered_is_refused() {
    let (dir, port) = (tempfile::tempdir().unwrap(), free_port());
    let file = |_| Rendezvous::File { dir: dir.path().into() };
    let tcp = |rank| Rendezvous::Tcp { host: "localhost".into(), port, is_host: rank == 0 };
    let rendezvous: [&(dyn Fn(usize) -> Rendezvous + Sync); 2] = [&file, &tcp];
    for rendezvous in rendezvous {
        let told = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| meet(&[0, 1, 3], 4, rendezvous));
            std::thread::sleep(SECOND / 3);
            let second = meet(&[1], 4, rendezvous);
            waiting.join().unwrap().into_iter().chain(second).collect::<Vec<_>>()
        });
        for result in &told {
            assert!(matches!(result, Err(Error::Config(m)) if m.contains("RANK=1")), "{told:?}");
        }
    }
}

/// A secret of at least 32 characters, made from `text`.
fn secret(text: &str) -> Secret {
    Secret::parse(&text.repeat(32)).unwrap()
}

/// As [`init`] of rank `rank` of 2, with or without a secret. Messages during the rendezvous are
/// counted in `REFUSED`.
fn join_with(secret: Secret, rank: usize, rendezvous: Rendezvous, timeout: Duration) -> Result<()> {
    let options = CommOptions { secret, on_wait: Some(hear), ..options(timeout) };
    let world = init(&info(rank, 2), &rendezvous, Backend::Tcp, options)?;
    world.group.barrier()
}

static HEARD: std::sync::Mutex<Vec<String>> = std::sync::Mutex::new(Vec::new());

fn hear(line: &str) {
    HEARD.lock().unwrap().push(line.into());
}

#[test]
fn ranks_with_one_secret_meet_wherever_it_is() {
    let (dir, port) = (tempfile::tempdir().unwrap(), free_port());
    let file = |_| Rendezvous::File { dir: dir.path().into() };
    let tcp = |rank| Rendezvous::Tcp { host: "localhost".into(), port, is_host: rank == 0 };
    let rendezvous: [&(dyn Fn(usize) -> Rendezvous + Sync); 2] = [&file, &tcp];
    for place in rendezvous {
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| {
                scope.spawn(move || join_with(secret("a"), rank, place(rank), 10 * SECOND))
            });
            ranks.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
        });
    }
}

#[test]
fn a_rank_of_another_secret_is_told_and_takes_no_place_of_those_that_have_one() {
    let [none, a, b] = [Secret::default(), secret("a"), secret("b")];
    for (run, stranger, told) in [
        (a.clone(), b, "its MEGATRON_RUN_SECRET differs"),
        (a.clone(), none.clone(), "it has a MEGATRON_RUN_SECRET, but this process has none"),
        (none, a, "it has no MEGATRON_RUN_SECRET, but this process has one"),
    ] {
        let (dir, port) = (tempfile::tempdir().unwrap(), free_port());
        let file = |_| Rendezvous::File { dir: dir.path().into() };
        let tcp = |rank| Rendezvous::Tcp { host: "localhost".into(), port, is_host: rank == 0 };
        let rendezvous: [&(dyn Fn(usize) -> Rendezvous + Sync); 2] = [&file, &tcp];
        for place in rendezvous {
            std::thread::scope(|scope| {
                let join = |secret: &Secret, rank| {
                    let secret = secret.clone();
                    scope.spawn(move || join_with(secret, rank, place(rank), 10 * SECOND))
                };
                let first = join(&run, 0);
                // The rank is told at once, not after its timeout.
                let refused = join(&stranger, 1).join().unwrap();
                let Err(Error::Config(message)) = refused else { panic!("{refused:?}") };
                assert!(
                    message.contains(told) && message.contains("give all ranks the same"),
                    "{message}"
                );
                // The run still waits for its own rank 1.
                join(&run, 1).join().unwrap().unwrap();
                first.join().unwrap().unwrap();
            });
        }
        let reversed = match told {
            told if told.contains("differs") => told.to_string(),
            told if told.contains(" no ") => {
                "it has a MEGATRON_RUN_SECRET, but this process has none".into()
            }
            _ => "it has no MEGATRON_RUN_SECRET, but this process has one".into(),
        };
        let heard = HEARD.lock().unwrap();
        let of = |how: &str| {
            heard.iter().filter(|line| line.contains(how) && line.contains(&reversed)).count()
        };
        assert!(
            of("to join was refused") >= 1 && of("to join as rank 1 was refused") >= 1,
            "{heard:?}"
        );
    }
}

#[test]
fn idle_connections_in_any_number_keep_no_rank_from_the_store() {
    let server = serve(secret("a"));
    let port = server.address().port();
    // More connections than there is room for; some have started their greeting.
    let mut idle: Vec<TcpStream> =
        (0..300).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    idle.iter_mut().step_by(2).for_each(|stream| drop(stream.write_all(b"MGTS")));
    let tcp = Rendezvous::Tcp { host: "127.0.0.1".into(), port, is_host: false };
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let tcp = tcp.clone();
            scope.spawn(move || join_with(secret("a"), rank, tcp, 10 * SECOND))
        });
        ranks.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
    });
    // Ranks that have met do not need the store: it has ended and has closed all its connections.
    let deadline = Instant::now() + 10 * SECOND;
    while TcpStream::connect_timeout(&server.address(), SECOND).is_ok() {
        assert!(Instant::now() < deadline, "the store is still there");
        std::thread::sleep(SECOND / 100);
    }
    for mut stream in idle {
        stream.set_read_timeout(Some(10 * SECOND)).unwrap();
        let closed = stream.read(&mut [0; 8]);
        assert!(
            matches!(closed, Ok(0))
                || closed.as_ref().is_err_and(|e| e.kind() != std::io::ErrorKind::WouldBlock),
            "{closed:?}"
        );
    }
}

#[test]
fn strangers_that_connect_all_the_time_keep_no_rank_from_the_store() {
    for _ in 0..5 {
        let server = serve(secret("a"));
        let (address, done) = (server.address(), std::sync::atomic::AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut held = std::collections::VecDeque::new();
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    held.extend(TcpStream::connect_timeout(&address, SECOND));
                    held.drain(..held.len().saturating_sub(200));
                }
            });
            let tcp = || Rendezvous::Tcp {
                host: "127.0.0.1".into(),
                port: address.port(),
                is_host: false,
            };
            let ranks = [0, 1]
                .map(|rank| scope.spawn(move || join_with(secret("a"), rank, tcp(), 20 * SECOND)));
            let results = ranks.map(|rank| rank.join().unwrap());
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(results.iter().all(Result::is_ok), "{results:?}");
        });
    }
}

#[test]
fn a_silent_client_is_closed() {
    let server = serve(Secret::default());
    let mut silent = TcpStream::connect(server.address()).unwrap();
    silent.set_read_timeout(Some(20 * SECOND)).unwrap();
    assert_eq!(silent.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn a_folder_that_others_can_write_into_is_no_place_to_meet() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let outer = tempfile::tempdir().unwrap();
    let dir = outer.path().join("meet");
    let store = FileStore::open(&dir).unwrap();
    store.add("k", 1).unwrap();
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&dir), 0o700);
    for entry in std::fs::read_dir(&dir).unwrap() {
        assert_eq!(mode(&entry.unwrap().path()), 0o600);
    }
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o777)).unwrap();
    let Err(Error::Config(message)) = FileStore::open(&dir).map(drop) else { panic!() };
    assert!(
        message.contains("is writable by every user") && message.contains("another folder"),
        "{message}"
    );
}
