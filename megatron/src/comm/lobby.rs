//! Connections from whoever calls, as many as there is room for, and for as long as they may take.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::inbox::lock;

/// Connections beyond those that the ranks of a run need: of strangers, and of ranks that begin
/// again.
pub(crate) const RESERVE: usize = 64;

/// Connections that are being served. One that there is no room for takes the place of the one that
/// has been silent for longest, of those that said least of who they are: whoever only holds
/// connections open keeps nobody out.
pub(crate) struct Lobby {
    most: usize,
    guests: Mutex<Guests>,
}

#[derive(Default)]
struct Guests {
    next: u64,
    inside: BTreeMap<u64, Guest>,
}

struct Guest {
    stream: TcpStream,
    standing: Standing,
    heard: Instant,
}

/// What is known of a connection's other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Standing {
    /// Nothing.
    Silent,
    /// It speaks the protocol, and has not proved yet who it is.
    Introduced,
    /// Who it is.
    Known,
}

impl Lobby {
    /// Room for what `ranks` ranks need.
    pub fn new(ranks: usize) -> Self {
        Self { most: ranks + RESERVE, guests: Mutex::default() }
    }

    /// Takes a connection in and returns its number; another one may be closed for it.
    ///
    /// # Errors
    /// If the system has no descriptor for it.
    pub fn enter(&self, stream: &TcpStream) -> io::Result<u64> {
        let stream = stream.try_clone()?;
        let mut guests = lock(&self.guests);
        if guests.inside.len() >= self.most {
            let longest =
                guests.inside.iter().min_by_key(|(_, guest)| (guest.standing, guest.heard));
            if let Some(guest) =
                longest.map(|(number, _)| *number).and_then(|number| guests.inside.remove(&number))
            {
                // Whoever serves it finds it closed. One that is closed already needs no closing.
                let _ = guest.stream.shutdown(Shutdown::Both);
            }
        }
        let number = guests.next;
        guests.next += 1;
        guests
            .inside
            .insert(number, Guest { stream, standing: Standing::Silent, heard: Instant::now() });
        Ok(number)
    }

    /// Connection `number` has said something, by which it is of `standing`.
    pub fn heard(&self, number: u64, standing: Standing) {
        if let Some(guest) = lock(&self.guests).inside.get_mut(&number) {
            (guest.standing, guest.heard) = (standing, Instant::now());
        }
    }

    /// Connection `number` ends, or is no longer for the lobby to close.
    pub fn leave(&self, number: u64) {
        lock(&self.guests).inside.remove(&number);
    }

    pub fn is_empty(&self) -> bool {
        lock(&self.guests).inside.is_empty()
    }

    /// Closes all of them.
    pub fn clear(&self) {
        for guest in std::mem::take(&mut lock(&self.guests).inside).values() {
            let _ = guest.stream.shutdown(Shutdown::Both);
        }
    }
}

/// A connection whose other side has until `deadline` for all that it is to say, however it divides
/// it.
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
        let lobby = Lobby { most: 3, ..Lobby::new(0) };
        let pairs = [0; 5].map(|_| pair(&listener));
        let numbers: Vec<u64> =
            pairs[..3].iter().map(|[_, there]| lobby.enter(there).unwrap()).collect();
        // The first two have spoken, and of these one has proved who it is.
        lobby.heard(numbers[0], Standing::Known);
        lobby.heard(numbers[1], Standing::Introduced);
        let closed = || pairs.each_ref().map(|[here, _]| is_closed(here));
        let fourth = lobby.enter(&pairs[3][1]).unwrap();
        assert_eq!(closed(), [false, false, true, false, false]);
        lobby.heard(fourth, Standing::Known);
        let fifth = lobby.enter(&pairs[4][1]).unwrap();
        assert_eq!(closed(), [false, true, true, false, false]);
        lobby.leave(fifth);
        lobby.enter(&pairs[4][1]).unwrap();
        assert_eq!(closed(), [false, true, true, false, false], "there was room");
        lobby.clear();
        assert!(lobby.is_empty() && is_closed(&pairs[0][0]) && is_closed(&pairs[4][0]));
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
