//! Backend over TCP, for ranks on several hosts: one connection per pair of ranks.
//!
//! Each connection has one thread that writes queued frames and one that moves received frames to
//! the inbox, so neither side ever waits for the other's program. Every frame starts with its kind:
//! a message, a verdict on the run, a goodbye, or the rank that the sender waits for. A waiting
//! rank repeats the last kind, which distinguishes it from a rank that hangs. A connection that
//! ends without a goodbye means that its rank died.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::CommOptions;
use super::endpoint::{LOOKS, Link, TICK, ends_of_chains};
use super::inbox::{Inbox, Loss, lock};
use super::message::{Header, Message, Payload};
use super::pending_connections::{PeerState, PendingConnections, Timed};
use super::rendezvous::{Member, connect_once, is_loopback};
use super::secret::{self, Secret, introduce};
use crate::text::printable;
use crate::{Error, Result};

const MESSAGE: u8 = 1;
const VERDICT: u8 = 2;
const FAREWELL: u8 = 3;
const AWAITS: u8 = 4;
/// Longest reason that a verdict carries, in bytes.
const MAX_REASON: usize = 4096;
/// Messages shorter than this are sent in one piece with their header.
const COALESCE: usize = 16 << 10;
/// Interval at which a waiting rank reports that it waits.
const SAY_AGAIN: Duration = Duration::from_millis(500);
/// Time for which a rank counts as waiting after such a report.
const STILL_WAITS: Duration = Duration::from_millis(1500);
/// Time limit for a stranger's greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for which a leaving rank waits for the others to leave, because closing a connection could
/// lose its last messages.
const LINGER: Duration = Duration::from_secs(1);

/// The listener at which a rank waits for higher ranks to connect.
pub(crate) struct Listener {
    listener: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Listens on a free port, of the loopback interface only or of all interfaces.
    pub fn bind(loopback: bool) -> Result<Self> {
        let any: [IpAddr; 2] = match loopback {
            true => [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
            false => [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()],
        };
        let bind = || {
            let listener = TcpListener::bind(&any.map(|ip| SocketAddr::new(ip, 0))[..])?;
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            Ok(Self { listener, address })
        };
        bind().map_err(|e: io::Error| Error::comm(format!("cannot listen for other ranks: {e}")))
    }

    /// The address at which it listens.
    #[cfg(test)]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address of this listener on `host`.
    pub fn at(&self, host: &str) -> String {
        format!("{host} {}", self.address.port())
    }
}

/// The greeting of both sides of a new connection: the run, the sender, and the receiver. A proof
/// follows. The caller sends its proof only after it has received the answer, so a caller that gave
/// up in between leaves an unproved greeting.
fn greeting(nonce: u64, from: usize, to: usize) -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    bytes[..8].copy_from_slice(&nonce.to_le_bytes());
    bytes[8..16].copy_from_slice(&(from as u64).to_le_bytes());
    bytes[16..].copy_from_slice(&(to as u64).to_le_bytes());
    bytes
}

const GREETING: usize = 24;

fn hear(stream: &mut impl Read) -> io::Result<[u8; GREETING]> {
    let mut heard = [0; GREETING];
    stream.read_exact(&mut heard)?;
    Ok(heard)
}

/// This rank's identity in a run.
#[derive(Clone)]
struct Me {
    rank: usize,
    nonce: u64,
    secret: Secret,
}

impl Me {
    /// Introduces this rank to rank `to` at the other end of `stream`.
    fn greet(&self, stream: &TcpStream, to: usize) -> io::Result<()> {
        let answer = greeting(self.nonce, to, self.rank);
        let expect = |stream: &mut Timed| match hear(stream)? {
            heard if heard == answer => Ok(heard.to_vec()),
            _ => Err(io::Error::other("another program answered")),
        };
        let mut timed = Timed::new(stream, GREETING_TIMEOUT);
        introduce(&mut timed, &self.secret, &greeting(self.nonce, self.rank, to), expect)?;
        stream.set_read_timeout(None)
    }
}

/// Connects to rank `to` at one of its addresses.
fn call(me: &Me, to: usize, members: &[Member], deadline: Instant) -> Result<TcpStream> {
    let peer = &members[to];
    let places = || peer.addresses.iter().filter_map(|address| address.split_once(' '));
    // Another machine's loopback address would lead back to this machine, so it is skipped if that
    // machine has other addresses.
    let tries_loopback =
        members[me.rank].is_near(peer) || places().all(|(host, _)| is_loopback(host));
    let start = Instant::now();
    let mut pause = Duration::from_millis(5);
    loop {
        let mut refusals = Vec::new();
        for (host, port) in places().filter_map(|(host, port)| Some((host, port.parse().ok()?))) {
            if !tries_loopback && is_loopback(host) {
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let met = connect_once(host, port, left.min(Duration::from_secs(3)))
                .and_then(|stream| me.greet(&stream, to).map(|()| stream));
            match met {
                Ok(stream) => return Ok(stream),
                Err(e) => refusals.push(format!("{host}:{port}: {e}")),
            }
        }
        if Instant::now() + pause >= deadline {
            let tried = match refusals.is_empty() {
                true => "none of its addresses can be reached from here".to_string(),
                false => refusals.join("; "),
            };
            let how = format!("cannot be reached ({tried})");
            let operation =
                format!("connecting rank {} for {:.0} s", me.rank, start.elapsed().as_secs_f64());
            return Err(Error::PeerLost { rank: to, how, operation });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Accepts connections until every higher rank has connected.
fn answer(
    me: &Me,
    streams: &mut [Option<TcpStream>],
    mut accept: impl FnMut() -> io::Result<TcpStream>,
    deadline: Instant,
) -> Result<()> {
    let (start, size, rank) = (Instant::now(), streams.len(), me.rank);
    let pending = Arc::new(PendingConnections::new(size));
    let missing = |streams: &[Option<TcpStream>]| -> Vec<usize> {
        (rank + 1..size).filter(|peer| streams[*peer].is_none()).collect()
    };
    let (met, arrivals) = std::sync::mpsc::channel();
    while !missing(streams).is_empty() {
        let mut patience = Duration::from_millis(1);
        // The system's reason why it accepted no connection, or could not register it.
        let accepted = accept().and_then(|stream| Ok((pending.enter(&stream)?, stream)));
        let refusal = match accepted {
            Ok((number, stream)) => {
                patience = Duration::ZERO;
                let (met, pending, me) = (met.clone(), pending.clone(), me.clone());
                // On its own thread, so that a caller that falls silent delays no other. The thread
                // ends by the deadline.
                let greeting =
                    std::thread::Builder::new().name("comm-greeting".into()).spawn(move || {
                        // Strangers are disconnected; a rank whose connection was cut tries again.
                        let peer = meet(&me, &stream, size, deadline, || {
                            pending.heard(number, PeerState::Introduced)
                        });
                        pending.leave(number);
                        if let Ok(peer) = peer {
                            // Not needed any more once all ranks are connected.
                            let _ = met.send((peer, stream));
                        }
                    });
                greeting.err()
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => None,
            Err(e) if passes(&e) => Some(e),
            Err(e) => return Err(cannot_accept(&e)),
        };
        if let Ok((peer, stream)) = arrivals.recv_timeout(patience) {
            streams[peer] = Some(stream);
        }
        if Instant::now() >= deadline && !missing(streams).is_empty() {
            if let Some(e) = refusal {
                return Err(cannot_accept(&e));
            }
            let seconds = start.elapsed().as_secs_f64();
            return Err(Error::Timeout {
                operation: "connecting over tcp".into(),
                missing: missing(streams),
                seconds,
            });
        }
    }
    // Closes the remaining connections of strangers.
    pending.clear();
    Ok(())
}

/// Whether a later attempt to accept a connection may succeed: the caller gave up, a signal
/// interrupted it, or the system temporarily lacks a resource.
fn passes(error: &io::Error) -> bool {
    use libc::{ECONNABORTED, EINTR, EMFILE, ENFILE, ENOBUFS, ENOMEM, EPROTO};
    let passing = [ECONNABORTED, EINTR, EMFILE, ENFILE, ENOBUFS, ENOMEM, EPROTO];
    error.raw_os_error().is_some_and(|code| passing.contains(&code))
}

fn cannot_accept(error: &io::Error) -> Error {
    let advice = match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => {
            "; raise the limit on open files (`ulimit -n`) where this rank starts"
        }
        _ => "",
    };
    Error::comm(format!("cannot accept connections of other ranks: {error}{advice}"))
}

/// Identifies the caller: a higher rank, after it has proved itself, which also confirms that it
/// received the answer. Calls `introduced` when only the proof is missing.
fn meet(
    me: &Me,
    stream: &TcpStream,
    size: usize,
    deadline: Instant,
    introduced: impl FnOnce(),
) -> io::Result<usize> {
    let Me { rank, nonce, secret } = me;
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    let mut timed = Timed::new(stream, GREETING_TIMEOUT);
    let mut peer = 0;
    let answered = secret::answer(&mut timed, secret, |stream| {
        let heard = hear(stream)?;
        let found = (rank + 1..size).find(|peer| heard == greeting(*nonce, *peer, *rank));
        peer = found.ok_or_else(|| io::Error::other("it is not a rank of this run"))?;
        Ok((heard.to_vec(), greeting(*nonce, *rank, peer).to_vec()))
    })?;
    introduced();
    // A rank of this run proves itself or closes the connection. Giving up earlier would be wrong:
    // it might still send the proof and consider itself connected.
    timed.deadline = deadline.max(Instant::now() + Duration::from_millis(1));
    answered.recognize(&mut timed, secret)?;
    stream.set_read_timeout(None)?;
    Ok(peer)
}

enum Frame {
    Message(Header, Payload),
    Verdict(Loss),
    Farewell,
    Awaits(usize),
}

/// The rank that each rank waits for, as reported by that rank, with the time of the report.
type Waits = Mutex<Vec<Option<(usize, Instant)>>>;

#[derive(Default)]
struct Outbox {
    frames: Mutex<VecDeque<Frame>>,
    changed: Condvar,
}

impl Outbox {
    fn push(&self, frame: Frame) {
        lock(&self.frames).push_back(frame);
        self.changed.notify_one();
    }

    fn pop(&self) -> Frame {
        let mut frames = lock(&self.frames);
        loop {
            match frames.pop_front() {
                Some(frame) => return frame,
                None => frames = self.changed.wait(frames).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

struct Peer {
    stream: TcpStream,
    outbox: Arc<Outbox>,
    writer: JoinHandle<()>,
    reader: JoinHandle<()>,
}

/// TCP connections from this rank to all others.
pub(crate) struct TcpLink {
    /// Ordered by rank; `None` for this rank.
    peers: Vec<Option<Peer>>,
    inbox: Arc<Inbox>,
    rank: usize,
    waits: Arc<Waits>,
}

impl TcpLink {
    /// Connects every pair of `members`: each rank calls lower ranks and answers higher ones.
    ///
    /// # Errors
    /// If a rank cannot be reached by `deadline`.
    pub fn connect(
        rank: usize,
        members: &[Member],
        nonce: u64,
        listener: Listener,
        inbox: Arc<Inbox>,
        deadline: Instant,
        options: &CommOptions,
    ) -> Result<Self> {
        let mut streams: Vec<Option<TcpStream>> = members.iter().map(|_| None).collect();
        let me = Me { rank, nonce, secret: options.secret.clone() };
        for to in 0..rank {
            streams[to] = Some(call(&me, to, members, deadline)?);
        }
        let accept = || listener.listener.accept().map(|(stream, _)| stream);
        answer(&me, &mut streams, accept, deadline)?;
        let waits = Arc::new(Mutex::new(vec![None; members.len()]));
        let peer = |(peer, stream): (usize, Option<TcpStream>)| {
            stream
                .map(|stream| Peer::start(peer, stream, inbox.clone(), waits.clone(), options))
                .transpose()
        };
        let peers: io::Result<_> = streams.into_iter().enumerate().map(peer).collect();
        let peers = peers
            .map_err(|e| Error::comm(format!("cannot set up a connection between ranks: {e}")))?;
        Ok(Self { peers, inbox, rank, waits })
    }
}

impl Peer {
    fn start(
        rank: usize,
        stream: TcpStream,
        inbox: Arc<Inbox>,
        waits: Arc<Waits>,
        options: &CommOptions,
    ) -> io::Result<Self> {
        stream.set_write_timeout(Some(options.timeout))?;
        let outbox = Arc::new(Outbox::default());
        let (mut to, mut from, queue) = (stream.try_clone()?, stream.try_clone()?, outbox.clone());
        let writer = std::thread::Builder::new().name(format!("comm-to-{rank}"));
        // If a connection cannot be written to, the reader finds it broken, too, and tells the
        // inbox.
        let writer = writer.spawn(move || drop(write_frames(&mut to, &queue)))?;
        let reader = std::thread::Builder::new().name(format!("comm-from-{rank}"));
        let reader = reader.spawn(move || match read_frames(&mut from, rank, &inbox, &waits) {
            Ok(()) => inbox.lose(rank, "left the run"),
            Err(e) => {
                let how = match e.kind() {
                    io::ErrorKind::UnexpectedEof => "died (its connection was closed)".into(),
                    _ => format!("died (its connection broke: {e})"),
                };
                inbox.condemn(Loss { rank, how });
            }
        })?;
        Ok(Self { stream, outbox, writer, reader })
    }
}

fn write_frames(to: &mut TcpStream, outbox: &Outbox) -> io::Result<()> {
    let mut result = Ok(());
    loop {
        let frame = outbox.pop();
        let last = matches!(frame, Frame::Farewell);
        // After a failure the queue is still emptied, so that it does not grow.
        if result.is_ok() {
            result = write_frame(to, frame);
        }
        if last {
            return result.and_then(|()| to.shutdown(Shutdown::Write));
        }
    }
}

fn write_frame(to: &mut impl Write, frame: Frame) -> io::Result<()> {
    match frame {
        Frame::Message(header, payload) => {
            let mut bytes = Vec::with_capacity(1 + Header::BYTES + payload.len().min(COALESCE));
            bytes.push(MESSAGE);
            bytes.extend_from_slice(&header.encode());
            if payload.len() <= COALESCE {
                bytes.extend_from_slice(&payload);
                return to.write_all(&bytes);
            }
            to.write_all(&bytes)?;
            to.write_all(&payload)
        }
        Frame::Verdict(loss) => {
            let reason = &loss.how.as_bytes()[..loss.how.floor_char_boundary(MAX_REASON)];
            let mut bytes = vec![VERDICT];
            bytes.extend_from_slice(&(loss.rank as u32).to_le_bytes());
            bytes.extend_from_slice(&(reason.len() as u32).to_le_bytes());
            bytes.extend_from_slice(reason);
            to.write_all(&bytes)
        }
        Frame::Farewell => to.write_all(&[FAREWELL]),
        Frame::Awaits(rank) => {
            let [a, b, c, d] = (rank as u32).to_le_bytes();
            to.write_all(&[AWAITS, a, b, c, d])
        }
    }
}

/// Moves received frames to the inbox until the peer says goodbye.
fn read_frames(from: &mut impl Read, rank: usize, inbox: &Inbox, waits: &Waits) -> io::Result<()> {
    let garbage =
        |e: &dyn std::fmt::Display| io::Error::new(io::ErrorKind::InvalidData, e.to_string());
    let read_u32 = |from: &mut dyn Read| {
        let mut bytes = [0; 4];
        from.read_exact(&mut bytes).map(|()| u32::from_le_bytes(bytes))
    };
    loop {
        let mut kind = [0];
        from.read_exact(&mut kind)?;
        match kind[0] {
            MESSAGE => {
                let mut header = [0; Header::BYTES];
                from.read_exact(&mut header)?;
                let header = Header::decode(&header).map_err(|e| garbage(&e))?;
                let mut payload = Vec::new();
                payload.try_reserve_exact(header.len as usize).map_err(|e| garbage(&e))?;
                if from.by_ref().take(header.len).read_to_end(&mut payload)? as u64 != header.len {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                inbox.push(rank, Message::whole(header, Arc::new(payload)));
            }
            VERDICT => {
                let lost = read_u32(from)? as usize;
                let len = read_u32(from)? as usize;
                if len > MAX_REASON {
                    return Err(garbage(&"a verdict of impossible length"));
                }
                let mut reason = vec![0; len];
                from.read_exact(&mut reason)?;
                inbox.condemn(Loss { rank: lost, how: printable(&reason) });
            }
            AWAITS => {
                let awaited = read_u32(from)? as usize;
                let mut waits = lock(waits);
                if awaited >= waits.len() {
                    return Err(garbage(&"a rank outside this world"));
                }
                waits[rank] = Some((awaited, Instant::now()));
            }
            FAREWELL => return Ok(()),
            other => return Err(garbage(&format!("a frame of unknown kind {other}"))),
        }
    }
}

impl Link for TcpLink {
    fn send(&self, dst: usize, header: Header, payload: Payload) {
        if let Some(peer) = &self.peers[dst] {
            peer.outbox.push(Frame::Message(header, payload));
        }
    }

    fn spread(&self, loss: &Loss) {
        for peer in self.peers.iter().flatten() {
            peer.outbox.push(Frame::Verdict(loss.clone()));
        }
    }

    fn leave(&self) {
        self.say_farewell();
        let deadline = Instant::now() + LINGER;
        // Closing a connection with unread data would discard sent data. Therefore this rank reads
        // until the peer's own goodbye.
        let is_going = |peer: &Peer| !(peer.writer.is_finished() && peer.reader.is_finished());
        while self.peers.iter().flatten().any(is_going) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn awaits(&self, src: usize) {
        let now = Instant::now();
        let mut waits = lock(&self.waits);
        if waits[self.rank].is_some_and(|(awaited, said)| awaited == src && now < said + SAY_AGAIN)
        {
            return;
        }
        waits[self.rank] = Some((src, now));
        drop(waits);
        for peer in self.peers.iter().flatten() {
            peer.outbox.push(Frame::Awaits(src));
        }
    }

    fn culprits(&self, missing: Vec<usize>) -> Vec<usize> {
        for _ in 0..LOOKS {
            // Others may be asking at the same time, and this rank is not the one that hangs.
            let awaited = lock(&self.waits)[self.rank];
            awaited.into_iter().for_each(|(src, _)| self.awaits(src));
            std::thread::sleep(TICK);
        }
        let waits = lock(&self.waits).clone();
        ends_of_chains(missing, waits.len(), |rank| {
            waits[rank].filter(|(_, said)| said.elapsed() < STILL_WAITS).map(|(awaited, _)| awaited)
        })
    }
}

impl TcpLink {
    /// Queues this rank's last messages. Frames queued afterwards are not sent.
    fn say_farewell(&self) {
        let verdict = self.inbox.verdict();
        for peer in self.peers.iter().flatten() {
            // A peer that does not know the verdict yet would take this goodbye for the cause.
            if let Some(loss) = &verdict {
                peer.outbox.push(Frame::Verdict(loss.clone()));
            }
            peer.outbox.push(Frame::Farewell);
        }
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.say_farewell();
        let peers: Vec<Peer> = self.peers.drain(..).flatten().collect();
        let mut readers = Vec::new();
        for Peer { stream, writer, reader, .. } in peers {
            // The threads have no result. A peer notices what could not be sent.
            let _ = writer.join();
            readers.push((stream, reader));
        }
        let deadline = Instant::now() + LINGER;
        for (stream, reader) in readers {
            while !reader.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            let _ = stream.shutdown(Shutdown::Both);
            let _ = reader.join();
        }
    }
}

#[cfg(test)]
mod tests;
