//! Backend for processes of one host, over shared memory: a ring of bytes per ordered pair of ranks
//! for messages, windows for collectives, and a heap per rank for large messages. Threads of one
//! process use windows and heaps, too.
//!
//! The memory belongs to an unnamed file (`memfd_create`), which the other ranks open through rank
//! 0's `/proc` entry. Nothing stays behind, however a run ends. Waiting ranks sleep in the kernel
//! and check ten times per second whether their peer is alive.

mod arena;
mod copy_out;
mod futex;
mod heap;
mod process;
mod remote;
mod ring;
mod ring_position;
mod segment;
mod window;

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(crate) use self::arena::Arena;
pub(crate) use self::copy_out::copy_out;
pub(crate) use self::heap::{Block, PIECE};
pub use self::process::Process;
pub(crate) use self::remote::{Mark, Reach, read as read_memory, write as write_memory};
use self::ring::Ring;
pub(crate) use self::ring_position::RingPosition;
pub(crate) use self::segment::Segment;
pub(crate) use self::window::{BLOCK, Blocks, Windows};
use super::endpoint::{LOOKS, Link, TICK, ends_of_chains};
use super::inbox::{Loss, lock};
use super::message::{Header, Message, Payload};

/// Bytes of a memory page.
const PAGE: usize = 4096;

/// Interval at which a waiting rank also checks the ranks that it does not wait for.
const CHECK_ALL: Duration = Duration::from_secs(1);

/// A partially received message; it may arrive in many pieces.
#[derive(Default)]
struct Incoming {
    header: Vec<u8>,
    body: Option<(Header, Vec<u8>)>,
}

/// A message that did not fit into the ring as a whole.
struct Outgoing {
    header: [u8; Header::BYTES],
    payload: Payload,
    /// Bytes of header and payload that are already in the ring.
    written: usize,
}

impl Outgoing {
    /// Writes as much as fits; returns whether it wrote anything.
    fn advance(&mut self, ring: &Ring) -> bool {
        let before = self.written;
        if self.written < Header::BYTES {
            self.written += ring.write(&self.header[self.written..]);
        }
        if self.written >= Header::BYTES {
            self.written += ring.write(&self.payload[self.written - Header::BYTES..]);
        }
        self.written > before
    }

    fn is_done(&self) -> bool {
        self.written == Header::BYTES + self.payload.len()
    }
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Outgoing>,
    /// Whether the thread is writing a message that it took from the queue.
    busy: bool,
    /// Set when the rank leaves: the time to give up on queued messages.
    closing: Option<Instant>,
    thread: Option<JoinHandle<()>>,
}

/// This rank's end of the ring to one peer.
struct Sender {
    segment: Arc<Segment>,
    ring: Ring,
    dst: usize,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Sender {
    fn send(self: &Arc<Self>, mut message: Outgoing) {
        let mut queue = lock(&self.queue);
        if queue.waiting.is_empty() && !queue.busy {
            message.advance(&self.ring);
            if message.is_done() {
                return;
            }
        }
        queue.waiting.push_back(message);
        if queue.thread.is_none() {
            let sender = self.clone();
            let named = std::thread::Builder::new().name(format!("comm-send-{}", self.dst));
            match named.spawn(move || sender.run()) {
                Ok(thread) => queue.thread = Some(thread),
                Err(e) => {
                    let how = format!("failed: cannot start a thread to send with: {e}");
                    self.segment.condemn(&Loss { rank: self.segment.rank(), how });
                }
            }
        }
        self.changed.notify_all();
    }

    /// Writes queued messages as the receiver makes room.
    fn run(&self) {
        let mut queue = lock(&self.queue);
        loop {
            let Some(mut message) = queue.waiting.pop_front() else {
                if queue.closing.is_some() {
                    return;
                }
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            queue.busy = true;
            drop(queue);
            while !message.is_done() {
                if !message.advance(&self.ring)
                    && !self.ring.wait_writable(TICK)
                    && self.is_pointless()
                {
                    break;
                }
            }
            queue = lock(&self.queue);
            queue.busy = false;
        }
    }

    /// Whether queued messages will not be read.
    fn is_pointless(&self) -> bool {
        let late = lock(&self.queue).closing.is_some_and(|deadline| Instant::now() >= deadline);
        late || self.segment.verdict().is_some() || !self.segment.reads(self.dst)
    }
}

/// Shared memory between this rank and the others of its host.
pub(crate) struct LocalLink {
    segment: Arc<Segment>,
    senders: Vec<Arc<Sender>>,
    receivers: Vec<(Ring, Mutex<Incoming>)>,
    arena: Arc<Arena>,
    last_check: Mutex<Instant>,
    timeout: Duration,
    /// Whether every rank may have its own core.
    alone: bool,
}

impl LocalLink {
    /// Connects over a segment that this rank has joined. `timeout` limits how long leaving waits
    /// for receivers.
    pub fn new(segment: Arc<Segment>, timeout: Duration) -> Self {
        let (rank, size) = (segment.rank(), segment.size());
        let sender = |dst| {
            let ring = Ring::new(segment.clone(), rank, dst);
            let (segment, queue, changed) = (segment.clone(), Mutex::default(), Condvar::new());
            Arc::new(Sender { segment, ring, dst, queue, changed })
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            senders: (0..size).map(sender).collect(),
            receivers: (0..size)
                .map(|src| (Ring::new(segment.clone(), src, rank), Mutex::default()))
                .collect(),
            arena: segment.arena(),
            last_check: Mutex::new(Instant::now()),
            timeout,
            alone: cores >= size,
            segment,
        }
    }
}

impl Incoming {
    /// Reads what has arrived; returns whether there was anything.
    fn advance(&mut self, ring: &Ring) -> Result<bool, String> {
        let mut any = false;
        if self.body.is_none() {
            let want = Header::BYTES - self.header.len();
            any |= ring.read(&mut self.header, want) > 0;
            if let Ok(bytes) = <&[u8; Header::BYTES]>::try_from(&self.header[..]) {
                let header = Header::decode(bytes).map_err(|e| e.to_string())?;
                let mut payload = Vec::new();
                payload
                    .try_reserve_exact(header.len as usize)
                    .map_err(|e| format!("cannot receive {} bytes: {e}", header.len))?;
                self.header.clear();
                self.body = Some((header, payload));
            }
        }
        if let Some((header, payload)) = &mut self.body {
            let want = header.len as usize - payload.len();
            any |= ring.read(payload, want) > 0;
        }
        Ok(any)
    }

    fn finished(&mut self) -> Option<(Header, Payload)> {
        let (header, payload) =
            self.body.take_if(|(header, payload)| payload.len() == header.len as usize)?;
        Some((header, Arc::new(payload)))
    }
}

impl Link for LocalLink {
    fn send(&self, dst: usize, header: Header, payload: Payload) {
        self.senders[dst].send(Outgoing { header: header.encode(), payload, written: 0 });
    }

    fn pulls(&self) -> bool {
        true
    }

    fn pull(&self, src: usize, patience: Duration) -> Result<Option<Message>, Loss> {
        let (ring, incoming) = &self.receivers[src];
        let mut incoming = lock(incoming);
        let lost = |how| Loss { rank: src, how };
        loop {
            let any = incoming.advance(ring).map_err(lost)?;
            if let Some((header, payload)) = incoming.finished() {
                self.segment.awaits_nobody();
                return Message::new(header, payload, &self.arena, src)
                    .map(Some)
                    .map_err(|e| lost(e.to_string()));
            }
            if !patience.is_zero() {
                self.segment.awaits(src);
            }
            if any || ring.wait_readable(patience, self.alone) {
                continue;
            }
            // Checked first, because it explains why other ranks have left.
            if let Some(loss) = self.segment.verdict() {
                return Err(loss);
            }
            return match self.segment.gone(src) {
                // What the peer wrote before it was lost can still be read.
                Some(how) if ring.is_empty() => Err(lost(how)),
                _ => Ok(None),
            };
        }
    }

    fn check(&self) -> Option<Loss> {
        if let Some(loss) = self.segment.verdict() {
            return Some(loss);
        }
        let mut last = lock(&self.last_check);
        if last.elapsed() < CHECK_ALL {
            return None;
        }
        *last = Instant::now();
        // A rank that left regularly matters only to the ranks that still need it.
        (0..self.segment.size())
            .find_map(|rank| self.segment.died(rank).map(|how| Loss { rank, how }))
    }

    fn culprits(&self, missing: Vec<usize>) -> Vec<usize> {
        let before = self.segment.beats();
        for _ in 0..LOOKS {
            // This rank is not the one that hangs, and others may be asking at the same time.
            self.segment.beat();
            std::thread::sleep(TICK);
        }
        let waits: Vec<bool> =
            self.segment.beats().iter().zip(&before).map(|(now, before)| now != before).collect();
        ends_of_chains(missing, waits.len(), |rank| {
            self.segment.awaited_by(rank).filter(|_| waits[rank])
        })
    }

    fn spread(&self, loss: &Loss) {
        self.segment.condemn(loss);
    }

    fn arena(&self) -> Option<&Arc<Arena>> {
        Some(&self.arena)
    }

    fn alone(&self) -> bool {
        self.alone
    }

    fn awaits(&self, src: usize) {
        self.segment.awaits(src);
    }

    fn awaits_nobody(&self) {
        self.segment.awaits_nobody();
    }

    fn gone(&self, src: usize) -> Option<Loss> {
        self.segment.gone(src).map(|how| Loss { rank: src, how })
    }
}

impl Drop for LocalLink {
    fn drop(&mut self) {
        // Two ranks that leave must not wait for each other to read.
        self.segment.start_leaving();
        let deadline = Instant::now() + self.timeout;
        for sender in &self.senders {
            lock(&sender.queue).closing = Some(deadline);
            sender.changed.notify_all();
        }
        for sender in &self.senders {
            let thread = lock(&sender.queue).thread.take();
            // The thread reports nothing: a receiver misses what was not delivered.
            let _ = thread.map(JoinHandle::join);
        }
        self.segment.leave();
    }
}
