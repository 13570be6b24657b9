//! The part of a group that its operations use: identity, messages and waits among the members, and
//! the handling of failures.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::comm::endpoint::{Endpoint, Failure};
use crate::comm::inbox::{Key, Loss, lock};
use crate::comm::local::{RingPosition, Windows};
use crate::comm::message::{Call, Header, Message, Payload};
use crate::{Error, Result};

/// Time limit for operations that are still queued when their group is dropped.
const LINGER: Duration = Duration::from_secs(10);

/// The data that a group's operations need.
pub(crate) struct Core {
    pub name: String,
    pub id: u64,
    /// Index in `ranks`.
    pub rank: usize,
    /// Members as ranks of the world.
    pub ranks: Vec<usize>,
    pub endpoint: Arc<Endpoint>,
    /// Time when the handle was dropped; waits end soon after.
    pub dropped: Mutex<Option<Instant>>,
    /// The reason why the group is unusable. After a failure its ranks may be at different
    /// operations.
    pub broken: OnceLock<String>,
    /// Windows for its collectives, if all members share memory. The running collective holds the
    /// lock.
    pub windows: Option<Mutex<Windows>>,
}

impl Core {
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Whether this rank may access the memory of others.
    pub fn remote_memory_access(&self) -> bool {
        self.endpoint.options.remote_memory_access
    }

    /// Indices of the other members.
    pub fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.size()).filter(move |peer| *peer != rank)
    }

    /// E.g. `group tp (ranks 0,1)`.
    pub fn label(&self) -> String {
        let ranks: Vec<String> = self.ranks.iter().map(usize::to_string).collect();
        format!("group {} (ranks {})", self.name, ranks.join(","))
    }

    pub fn operation(&self, call: &Call) -> String {
        format!("{call} on {}", self.label())
    }

    fn deadline(&self, start: Instant) -> Instant {
        let deadline = start + self.endpoint.options.timeout;
        lock(&self.dropped).map_or(deadline, |dropped| deadline.min(dropped + LINGER))
    }

    /// The header of `len` bytes of `call`.
    pub fn header(&self, phase: u8, call: Call, len: usize) -> Header {
        Header { group: self.id, phase, call, len: len as u64 }
    }

    /// Queues `payload` for `peer` as part of `call`.
    pub fn send(&self, peer: usize, phase: u8, call: Call, payload: Payload) {
        self.endpoint.send(self.ranks[peer], self.header(phase, call, payload.len()), payload);
    }

    /// The error of this rank in `call`, if `peer` is in the call `theirs`.
    pub fn disagreement(&self, peer: usize, theirs: Call, call: Call) -> Error {
        let mut ranks = [(self.ranks[peer], theirs), (self.endpoint.rank, call)];
        ranks.sort_unstable_by_key(|(rank, _)| *rank);
        let [(low, first), (high, second)] = ranks;
        Error::comm(format!(
            "{}: rank {low} called {first}, but rank {high} called {second}; all ranks must issue \
             the same operations in the same order",
            self.label(),
        ))
    }

    /// The next message from `peer`, which must belong to `call` and hold `len` bytes. `others` are
    /// the peers that the caller waits for next; a timeout names them, too.
    pub fn recv(
        &self,
        peer: usize,
        phase: u8,
        call: Call,
        len: Option<usize>,
        others: &[usize],
    ) -> Result<Payload> {
        let key = Key::Collective { group: self.id };
        let Message { header, payload, .. } = self.wait(peer, key, &call, others)?;
        if header.call != call || header.phase != phase {
            return Err(self.disagreement(peer, header.call, call));
        }
        if len.is_some_and(|len| len != payload.len()) {
            return Err(Error::comm(format!(
                "{}: rank {} sent {} bytes",
                self.operation(&call),
                self.ranks[peer],
                payload.len()
            )));
        }
        Ok(payload)
    }

    /// The next message from `peer` with `key`.
    pub fn wait(&self, peer: usize, key: Key, call: &Call, others: &[usize]) -> Result<Message> {
        let start = Instant::now();
        self.endpoint.recv(self.ranks[peer], key, || self.deadline(start)).map_err(|failure| {
            let late = || {
                others
                    .iter()
                    .copied()
                    .filter(|other| !self.endpoint.holds(self.ranks[*other], key))
                    .collect()
            };
            self.failed(failure, peer, late, call, start)
        })
    }

    /// Waits until `peer` makes `ready` true by advancing `position`. A timeout also names later
    /// peers that are not ready.
    pub fn await_peer(
        &self,
        peer: usize,
        position: &RingPosition,
        ready: impl Fn(usize) -> bool,
        call: &Call,
    ) -> Result<()> {
        if ready(peer) || self.endpoint.look(|| ready(peer)) {
            return Ok(());
        }
        let start = Instant::now();
        let waited = self.endpoint.wait_until(
            self.ranks[peer],
            position,
            || ready(peer),
            || self.deadline(start),
        );
        waited.map_err(|failure| {
            let late = || self.peers().filter(|other| *other > peer && !ready(*other)).collect();
            self.failed(failure, peer, late, call, start)
        })
    }

    /// The error of a wait for `peer` that started at `start` and failed. `late` are other peers
    /// that have not arrived.
    fn failed(
        &self,
        failure: Failure,
        peer: usize,
        late: impl Fn() -> Vec<usize>,
        call: &Call,
        start: Instant,
    ) -> Error {
        match failure {
            Failure::Lost(loss) => self.lost(loss, call),
            Failure::TimedOut => {
                let missing =
                    std::iter::once(peer).chain(late()).map(|late| self.ranks[late]).collect();
                let mut missing = self.endpoint.culprits(missing);
                missing.sort_unstable();
                Error::Timeout {
                    operation: self.operation(call),
                    missing,
                    seconds: start.elapsed().as_secs_f64(),
                }
            }
        }
    }

    pub fn lost(&self, loss: Loss, call: &Call) -> Error {
        Error::PeerLost { rank: loss.rank, how: loss.how, operation: self.operation(call) }
    }

    /// Runs one collective. After a failure the group refuses all further ones.
    pub fn run(&self, call: Call, operation: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        if let Some(loss) = self.endpoint.verdict() {
            return Err(self.lost(loss, &call));
        }
        if let Some(why) = self.broken.get() {
            return Err(Error::comm(format!(
                "{} cannot run after an earlier failure: {why}",
                self.operation(&call)
            )));
        }
        operation(self).inspect_err(|error| {
            self.broken.get_or_init(|| error.to_string());
        })
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.endpoint.forget(self.id);
    }
}
