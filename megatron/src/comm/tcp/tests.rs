//! What becomes of connections whose callers gave up.

use super::*;

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
