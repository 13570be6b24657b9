//! Connections that are not authenticated yet, with limits on their number and time.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::inbox::lock;

/// Connections in addition to those that the ranks of a run need: for strangers, and for ranks that
/// connect again.
pub(crate) const RESERVE: usize = 64;

/// Connections that are being served. If there is no room for a new one, another one is closed:
/// among those whose peer state is lowest, the one that has been silent the longest. Idle
/// connections thus cannot keep ranks out.
pub(crate) struct PendingConnections {
    most: usize,
    connections: Mutex<Connections>,
}

#[derive(Default)]
struct Connections {
    next: u64,
    inside: BTreeMap<u64, Connection>,
}

struct Connection {
    stream: TcpStream,
    state: PeerState,
    heard: Instant,
}

/// How much is known about a connection's peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PeerState {
    /// It has sent nothing.
    Silent,
    /// It speaks the protocol, but has not authenticated itself.
    Introduced,
    /// It is authenticated.
    Known,
}

impl PendingConnections {
    /// Room for the connections of `ranks` ranks.
    pub fn new(ranks: usize) -> Self {
        Self { most: ranks + RESERVE, connections: Mutex::default() }
    }

    /// Adds a connection and returns its number. Another connection may be closed to make room.
    ///
    /// # Errors
    /// If the system has no file descriptor for it.
    pub fn enter(&self, stream: &TcpStream) -> io::Result<u64> {
        let stream = stream.try_clone()?;
        let mut connections = lock(&self.connections);
        if connections.inside.len() >= self.most {
            let longest = connections
                .inside
                .iter()
                .min_by_key(|(_, connection)| (connection.state, connection.heard));
            if let Some(connection) = longest
                .map(|(number, _)| *number)
                .and_then(|number| connections.inside.remove(&number))
            {
                // The serving thread notices the close. A connection that is already closed needs
                // none.
                let _ = connection.stream.shutdown(Shutdown::Both);
            }
        }
        let number = connections.next;
        connections.next += 1;
        connections
            .inside
            .insert(number, Connection { stream, state: PeerState::Silent, heard: Instant::now() });
        Ok(number)
    }

    /// Records that connection `number` has sent something, and its new `state`.
    pub fn heard(&self, number: u64, state: PeerState) {
        if let Some(connection) = lock(&self.connections).inside.get_mut(&number) {
            (connection.state, connection.heard) = (state, Instant::now());
        }
    }

    /// Removes connection `number`, because it ends or this set may no longer close it.
    pub fn leave(&self, number: u64) {
        lock(&self.connections).inside.remove(&number);
    }

    pub fn is_empty(&self) -> bool {
        lock(&self.connections).inside.is_empty()
    }

    /// Closes all connections.
    pub fn clear(&self) {
        for connection in std::mem::take(&mut lock(&self.connections).inside).values() {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }
}

/// A connection whose peer must send everything before `deadline`, in however many pieces.
pub(crate) struct Timed<'a> {
    pub stream: &'a TcpStream,
    pub deadline: Instant,
}

impl<'a> Timed<'a> {
    pub fn new(stream: &'a TcpStream, patience: Duration) -> Self {
        Self { stream, deadline: Instant::now() + patience }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        stream.read(bytes)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut stream = self.stream;
        stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Both ends of a connection.
    fn pair(listener: &TcpListener) -> [TcpStream; 2] {
        [TcpStream::connect(listener.local_addr().unwrap()).unwrap(), listener.accept().unwrap().0]
    }

    fn is_closed(stream: &TcpStream) -> bool {
        let mut stream = Timed::new(stream, Duration::from_millis(20));
        matches!(stream.read(&mut [0]), Ok(0))
    }

    #[test]
    fn one_more_takes_the_place_of_the_one_that_said_least_and_has_been_silent_for_longest() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let pending = PendingConnections { most: 3, ..PendingConnections::new(0) };
        let pairs = [0; 5].map(|_| pair(&listener));
        let numbers: Vec<u64> =
            pairs[..3].iter().map(|[_, there]| pending.enter(there).unwrap()).collect();
        // The first two have sent something, and one of them has authenticated itself.
        pending.heard(numbers[0], PeerState::Known);
        pending.heard(numbers[1], PeerState::Introduced);
        let closed = || pairs.each_ref().map(|[here, _]| is_closed(here));
        let fourth = pending.enter(&pairs[3][1]).unwrap();
        assert_eq!(closed(), [false, false, true, false, false]);
        pending.heard(fourth, PeerState::Known);
        let fifth = pending.enter(&pairs[4][1]).unwrap();
        assert_eq!(closed(), [false, true, true, false, false]);
        pending.leave(fifth);
        pending.enter(&pairs[4][1]).unwrap();
        assert_eq!(closed(), [false, true, true, false, false], "there was room");
        pending.clear();
        assert!(pending.is_empty() && is_closed(&pairs[0][0]) && is_closed(&pairs[4][0]));
    }

    #[test]
    fn a_side_that_speaks_byte_by_byte_gets_no_longer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let [mut here, there] = pair(&listener);
        let heard = std::thread::scope(|scope| {
            scope.spawn(move || {
                while here.write_all(b"x").is_ok() {
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let result = Timed::new(&there, Duration::from_millis(100)).read_exact(&mut [0; 1000]);
            there.shutdown(Shutdown::Both).unwrap();
            drop(there);
            result
        });
        assert!(matches!(
            heard.unwrap_err().kind(),
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
        ));
    }
}
