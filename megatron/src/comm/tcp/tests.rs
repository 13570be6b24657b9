//! What becomes of connections whose callers gave up, and of ranks that leave.

use super::*;
use crate::comm::Backend;

fn member(addresses: Vec<String>) -> Member {
    let here = || "here".to_string();
    Member { token: 0, world_size: 2, backend: Backend::Tcp, host: here(), identity: here(), pid: 1, addresses }
}

/// Two ranks that are connected, and what arrives at each.
fn pair() -> [(TcpLink, Arc<Inbox>); 2] {
    let listeners = [0, 1].map(|_| Listener::bind(true).unwrap());
    let members: Vec<Member> = listeners.iter().map(|listener| member(vec![listener.at("127.0.0.1")])).collect();
    let deadline = Instant::now() + Duration::from_secs(10);
    let connect = |(rank, listener)| {
        let (inbox, options) = (Arc::new(Inbox::new(2)), CommOptions::default());
        let link = TcpLink::connect(rank, &members, 7, listener, inbox.clone(), deadline, &options).unwrap();
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
    // Nothing waits for a thread of the rank's any more, and its connection may close.
    assert_eq!(heard.verdict(), Some(loss));
    assert!(link.peers.iter().flatten().all(|peer| peer.writer.is_finished()));
}

fn accept(listener: &Listener) -> io::Result<TcpStream> {
    Ok(listener.listener.accept()?.0)
}

/// What rank `from` of run 7 has said to rank 0 once it only has to agree.
fn introduced(from: usize, port: u16) -> TcpStream {
    let mut stream = connect_once("127.0.0.1", port, Duration::from_secs(5)).unwrap();
    stream.write_all(&greeting(7, from, 0)).unwrap();
    stream
}

#[test]
fn a_rank_that_freezes_while_it_introduces_itself_holds_up_no_other_and_is_named() {
    let listener = Listener::bind(true).unwrap();
    let port = listener.address.port();
    let deadline = Instant::now() + Duration::from_secs(2);
    let mut streams = vec![None, None, None, None];
    // One says nothing at all, and rank 1 nothing more after its greeting.
    let _silent = connect_once("127.0.0.1", port, Duration::from_secs(5)).unwrap();
    let _frozen = introduced(1, port);
    let result = std::thread::scope(|scope| {
        let others = [3, 2].map(|rank| {
            let mut stream = introduced(rank, port);
            scope.spawn(move || {
                assert_eq!(hear(&mut stream).unwrap(), greeting(7, 0, rank));
                stream.write_all(&[AGREED]).unwrap();
            })
        });
        let result = answer(0, &mut streams, 7, || accept(&listener), deadline);
        others.into_iter().for_each(|other| other.join().unwrap());
        result
    });
    let Err(Error::Timeout { missing, .. }) = result else { panic!("{result:?}") };
    assert_eq!(missing, [1]);
    assert!(streams[2].is_some() && streams[3].is_some());
}

#[test]
fn connections_are_accepted_again_once_the_system_has_what_it_takes() {
    let listener = Listener::bind(true).unwrap();
    let mut streams = vec![None, None];
    let mut caller = introduced(1, listener.address.port());
    caller.write_all(&[AGREED]).unwrap();
    let mut errors = vec![libc::EMFILE, libc::EINTR, libc::ECONNABORTED];
    let mut calls = || errors.pop().map_or_else(|| accept(&listener), |code| Err(io::Error::from_raw_os_error(code)));
    answer(0, &mut streams, 7, &mut calls, Instant::now() + Duration::from_secs(10)).unwrap();
    assert!(streams[1].is_some());
    // If it never has, no other rank is to blame.
    let refuse = || Err(io::Error::from_raw_os_error(libc::EMFILE));
    let result = answer(0, &mut [None, None], 7, refuse, Instant::now() + Duration::from_millis(50));
    let message = result.unwrap_err().to_string();
    assert!(message.contains("ulimit -n"), "{message}");
}

#[test]
fn a_caller_that_gave_up_is_not_taken_for_one_that_connected() {
    let listener = Listener::bind(true).unwrap();
    let port = listener.address.port();
    let members = [member(vec![listener.at("127.0.0.1")]), member(vec![])];
    // Rank 1 called while rank 0 was held up, and closed before it was answered.
    let mut gone = connect_once("127.0.0.1", port, Duration::from_secs(5)).unwrap();
    gone.write_all(&greeting(7, 1, 0)).unwrap();
    drop(gone);
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut streams = vec![None, None];
    let mut caller = std::thread::scope(|scope| {
        let caller = scope.spawn(|| call(1, 0, &members, 7, deadline).unwrap());
        answer(0, &mut streams, 7, || accept(&listener), deadline).unwrap();
        // Without the third word the abandoned connection would have been answered, and this call never.
        drop(listener);
        caller.join().unwrap()
    });
    caller.write_all(b"x").unwrap();
    let mut heard = [0];
    streams[1].as_mut().unwrap().read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"x");
}
