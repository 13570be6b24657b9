//! Tests of connections whose callers gave up, and of ranks that leave.

use super::*;
use crate::comm::Backend;

fn member(addresses: Vec<String>) -> Member {
    let here = || "here".to_string();
    Member {
        token: 0,
        world_size: 2,
        backend: Backend::Tcp,
        host: here(),
        identity: here(),
        pid: 1,
        addresses,
    }
}

/// Two connected ranks, and their inboxes.
fn pair() -> [(TcpLink, Arc<Inbox>); 2] {
    let listeners = [0, 1].map(|_| Listener::bind(true).unwrap());
    let members: Vec<Member> =
        listeners.iter().map(|listener| member(vec![listener.at("127.0.0.1")])).collect();
    let deadline = Instant::now() + Duration::from_secs(10);
    let connect = |(rank, listener)| {
        let (inbox, options) = (Arc::new(Inbox::new(2)), CommOptions::default());
        let link = TcpLink::connect(rank, &members, 7, listener, inbox.clone(), deadline, &options)
            .unwrap();
        (link, inbox)
    };
    let [zero, one] = listeners;
    std::thread::scope(|scope| {
        let one = scope.spawn(move || connect((1, one)));
        [connect((0, zero)), one.join().unwrap()]
    })
}

#[test]
fn a_rank_that_leaves_after_a_failure_tells_the_cause_before_its_process_ends() {
    let [(link, inbox), (_peer, heard)] = pair();
    let loss = Loss { rank: 0, how: "failed: no data".into() };
    inbox.condemn(loss.clone());
    link.leave();
    // Nothing waits for a thread of the rank, and its connection may close.
    assert_eq!(heard.verdict(), Some(loss));
    assert!(link.peers.iter().flatten().all(|peer| peer.writer.is_finished()));
}

fn accept(listener: &Listener) -> io::Result<TcpStream> {
    Ok(listener.listener.accept()?.0)
}

/// Rank `rank` of run 7, which has no secret.
fn me(rank: usize) -> Me {
    Me { rank, nonce: 7, secret: Secret::default() }
}

fn connect(port: u16) -> TcpStream {
    connect_once("127.0.0.1", port, Duration::from_secs(5)).unwrap()
}

/// A connection on which rank `from` of run 7 has sent rank 0 everything except its proof.
fn introduced(from: usize, port: u16) -> TcpStream {
    let mut stream = connect(port);
    stream.write_all(&[&greeting(7, from, 0)[..], &[0; 33]].concat()).unwrap();
    stream
}

#[test]
fn a_rank_that_freezes_while_it_introduces_itself_holds_up_no_other_and_is_named() {
    let listener = Listener::bind(true).unwrap();
    let port = listener.address.port();
    let deadline = Instant::now() + Duration::from_secs(2);
    let mut streams = vec![None, None, None, None];
    // One connection sends nothing at all, and rank 1 sends nothing after its greeting.
    let _silent = connect(port);
    let _frozen = introduced(1, port);
    let result = std::thread::scope(|scope| {
        let others = [3, 2].map(|rank| {
            let stream = connect(port);
            scope.spawn(move || me(rank).greet(&stream, 0).map(|()| stream).unwrap())
        });
        let result = answer(&me(0), &mut streams, || accept(&listener), deadline);
        others.into_iter().for_each(|other| drop(other.join().unwrap()));
        result
    });
    let Err(Error::Timeout { missing, .. }) = result else { panic!("{result:?}") };
    assert_eq!(missing, [1]);
    assert!(streams[2].is_some() && streams[3].is_some());
}

#[test]
fn a_process_without_the_runs_secret_is_no_rank_and_takes_no_ranks_place() {
    let secret = Secret::new().unwrap();
    let listener = Listener::bind(true).unwrap();
    let port = listener.address.port();
    let mut streams = vec![None, None];
    // Both know the run's nonce. One starts before the rank and ends after it.
    let (early, frozen) = (connect(port), introduced(1, port));
    let refused = Me { secret: Secret::new().unwrap(), ..me(1) };
    std::thread::scope(|scope| {
        let stranger = scope.spawn(|| refused.greet(&early, 0).unwrap_err());
        let rank = scope.spawn(|| {
            let why = stranger.join().unwrap();
            assert_eq!(secret::mismatch(&why), Some(secret::Mismatch::Different));
            let stream = connect(port);
            Me { secret: secret.clone(), ..me(1) }.greet(&stream, 0).unwrap();
            (&stream).write_all(b"x").unwrap();
            stream
        });
        let accept = || accept(&listener);
        let deadline = Instant::now() + Duration::from_secs(10);
        answer(&Me { secret: secret.clone(), ..me(0) }, &mut streams, accept, deadline).unwrap();
        drop((rank.join().unwrap(), frozen));
    });
    let mut heard = [0];
    streams[1].as_mut().unwrap().read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"x");
}

#[test]
fn idle_connections_in_any_number_keep_no_rank_out() {
    let listener = Listener::bind(true).unwrap();
    let port = listener.address.port();
    let mut streams = vec![None, None];
    std::thread::scope(|scope| {
        let (connected, idle) = std::sync::mpsc::channel();
        let caller = scope.spawn(move || {
            // Four times the room for strangers, all before the rank.
            (0..4 * super::super::pending_connections::RESERVE)
                .for_each(|_| connected.send(connect(port)).unwrap());
            let stream = connect(port);
            me(1).greet(&stream, 0).map(|()| stream).unwrap()
        });
        answer(
            &me(0),
            &mut streams,
            || accept(&listener),
            Instant::now() + Duration::from_secs(20),
        )
        .unwrap();
        drop((caller.join().unwrap(), idle));
    });
    assert!(streams[1].is_some());
}

#[test]
fn connections_are_accepted_again_once_the_system_has_what_it_takes() {
    let listener = Listener::bind(true).unwrap();
    let mut streams = vec![None, None];
    let caller = connect(listener.address.port());
    let caller = std::thread::spawn(move || me(1).greet(&caller, 0).map(|()| caller));
    let mut errors = vec![libc::EMFILE, libc::EINTR, libc::ECONNABORTED];
    let mut calls = || {
        errors
            .pop()
            .map_or_else(|| accept(&listener), |code| Err(io::Error::from_raw_os_error(code)))
    };
    answer(&me(0), &mut streams, &mut calls, Instant::now() + Duration::from_secs(10)).unwrap();
    assert!(streams[1].is_some() && caller.join().unwrap().is_ok());
    // If the system never recovers, no other rank is to blame.
    let refuse = || Err(io::Error::from_raw_os_error(libc::EMFILE));
    let result =
        answer(&me(0), &mut [None, None], refuse, Instant::now() + Duration::from_millis(50));
    let message = result.unwrap_err().to_string();
    assert!(message.contains("ulimit -n"), "{message}");
}

#[test]
fn a_caller_that_gave_up_is_not_taken_for_one_that_connected() {
    let listener = Listener::bind(true).unwrap();
    let port = listener.address.port();
    let members = [member(vec![listener.at("127.0.0.1")]), member(vec![])];
    // Rank 1 called while rank 0 was delayed, and closed the connection before it was answered.
    drop(introduced(1, port));
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut streams = vec![None, None];
    let mut caller = std::thread::scope(|scope| {
        let caller = scope.spawn(|| call(&me(1), 0, &members, deadline).unwrap());
        answer(&me(0), &mut streams, || accept(&listener), deadline).unwrap();
        // Without the proof in the third message, the abandoned connection would have been
        // answered, and this call never.
        drop(listener);
        caller.join().unwrap()
    });
    caller.write_all(b"x").unwrap();
    let mut heard = [0];
    streams[1].as_mut().unwrap().read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"x");
}
