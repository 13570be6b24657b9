//! What becomes of connections whose callers gave up, and of ranks that leave.

use super::*;

/// Two ranks that are connected, and what arrives at each.
fn pair() -> [(TcpLink, Arc<Inbox>); 2] {
    let listeners = [0, 1].map(|_| Listener::bind(true).unwrap());
    let member = |listener: &Listener| Member {
        token: 0,
        world_size: 2,
        host: "here".into(),
        identity: "here".into(),
        pid: 1,
        addresses: vec![listener.at("127.0.0.1")],
    };
    let members: Vec<Member> = listeners.iter().map(member).collect();
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

#[test]
fn a_caller_that_gave_up_is_not_taken_for_one_that_connected() {
    let listener = Listener::bind(true).unwrap();
    let port = listener.address.port();
    let member =
        |addresses| Member { token: 0, world_size: 2, host: "here".into(), identity: "here".into(), pid: 1, addresses };
    let members = [member(vec![listener.at("127.0.0.1")]), member(vec![])];
    // Rank 1 called while rank 0 was held up, and closed before it was answered.
    let mut gone = connect_once("127.0.0.1", port, Duration::from_secs(5)).unwrap();
    gone.write_all(&greeting(7, 1, 0)).unwrap();
    drop(gone);
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut streams = vec![None, None];
    let mut caller = std::thread::scope(|scope| {
        let caller = scope.spawn(|| call(1, 0, &members, 7, deadline).unwrap());
        answer(0, &mut streams, 7, &listener.listener, deadline).unwrap();
        // Without the third word the abandoned connection would have been answered, and this call never.
        drop(listener);
        caller.join().unwrap()
    });
    caller.write_all(b"x").unwrap();
    let mut heard = [0];
    streams[1].as_mut().unwrap().read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"x");
}
