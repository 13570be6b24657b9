//! One rank's connection to the world: sending, waiting with deadlines, and agreeing on lost ranks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::CommOptions;
use super::inbox::{Inbox, Key, Look, Loss};
use super::local::{Arena, RingPosition};
use super::message::{Header, Message, Payload};

/// Interval at which a wait checks whether its peer is alive and whether the run is over.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// Number of ticks in which a waiting rank reports several times, even on a busy machine.
pub(crate) const LOOKS: usize = 5;

/// Follows the chains of waiting ranks that start at `missing`, in a world of `size`, and returns
/// their ends. A rank in a circle of waiting ranks is its own end. `awaited` gives the rank that a
/// rank waits for.
pub(crate) fn ends_of_chains(
    missing: Vec<usize>,
    size: usize,
    awaited: impl Fn(usize) -> Option<usize>,
) -> Vec<usize> {
    let end = |first: usize| {
        let mut chain = std::iter::successors(Some(first), |rank| awaited(*rank)).take(size + 1);
        chain.find(|rank| awaited(*rank).is_none()).unwrap_or(first)
    };
    let mut ends: Vec<usize> = missing.into_iter().map(end).collect();
    ends.sort_unstable();
    ends.dedup();
    ends
}

/// A backend: transports bytes from this rank to the others. Ranks are world ranks.
pub(crate) trait Link: Send + Sync {
    /// Queues a message for `dst`. Messages arrive in the order of sending. The call never waits
    /// for the receiver, and messages to a rank that is gone are dropped.
    fn send(&self, dst: usize, header: Header, payload: Payload);

    /// Whether waiting ranks must call [`Link::pull`]. Other backends push into the inbox from
    /// their own threads.
    fn pulls(&self) -> bool {
        false
    }

    /// The next message from `src`. Waits at most `patience`.
    fn pull(&self, _src: usize, _patience: Duration) -> Result<Option<Message>, Loss> {
        Ok(None)
    }

    /// Looks for lost ranks, including ranks that this rank does not wait for.
    fn check(&self) -> Option<Loss> {
        None
    }

    /// Of the ranks that were waited for in vain, the ones to blame. A rank that itself waits for
    /// another rank is not to blame.
    fn culprits(&self, missing: Vec<usize>) -> Vec<usize> {
        missing
    }

    /// Tells every rank that the run is over because of `loss`.
    fn spread(&self, loss: &Loss);

    /// Says goodbye to every rank and delivers what was sent, as dropping the link does. Nothing
    /// may be sent afterwards.
    fn leave(&self) {}

    /// Memory that all ranks of the world share.
    fn arena(&self) -> Option<&Arc<Arena>> {
        None
    }

    /// Whether each rank may have its own core, so that spinning before sleeping takes no time from
    /// other ranks.
    fn alone(&self) -> bool {
        false
    }

    /// Reports that this rank waits for `src`; must be repeated while it waits.
    fn awaits(&self, _src: usize) {}

    /// Reports that this rank has what it waited for.
    fn awaits_nobody(&self) {}

    /// The reason why nothing more will come from `src`, if that is so.
    fn gone(&self, _src: usize) -> Option<Loss> {
        None
    }
}

/// The reason why a wait ended without its message.
#[derive(Debug)]
pub(crate) enum Failure {
    Lost(Loss),
    TimedOut,
}

/// This rank's end of a world.
pub(crate) struct Endpoint {
    pub rank: usize,
    pub options: CommOptions,
    inbox: Arc<Inbox>,
    link: Box<dyn Link>,
}

impl Endpoint {
    pub fn new(rank: usize, options: CommOptions, inbox: Arc<Inbox>, link: Box<dyn Link>) -> Self {
        Self { rank, options, inbox, link }
    }

    /// Queues a message for world rank `dst`, which may be this one.
    pub fn send(&self, dst: usize, header: Header, payload: Payload) {
        if dst == self.rank {
            self.inbox.push(dst, Message::whole(header, payload));
        } else {
            self.link.send(dst, header, payload);
        }
    }

    /// Waits for a message from world rank `src`. `deadline` is evaluated at every tick, so it may
    /// change.
    pub fn recv(
        &self,
        src: usize,
        key: Key,
        deadline: impl Fn() -> Instant,
    ) -> Result<Message, Failure> {
        let pulls = self.link.pulls() && src != self.rank;
        loop {
            let patience = deadline().saturating_duration_since(Instant::now()).min(TICK);
            match self.inbox.look(src, key, patience, pulls) {
                Look::Found(message) => return Ok(message),
                Look::Lost(loss) => {
                    self.condemn(loss.clone());
                    return Err(Failure::Lost(self.inbox.verdict().unwrap_or(loss)));
                }
                Look::Pull => match self.link.pull(src, patience) {
                    Ok(Some(message)) => {
                        self.inbox.pulled(src, Some(message));
                        continue;
                    }
                    Ok(None) => self.inbox.pulled(src, None),
                    Err(loss) => {
                        // The backend found the ring empty and its writer gone, so nothing more
                        // will come.
                        self.inbox.pulled(src, None);
                        if loss.rank == src {
                            self.inbox.lose(src, loss.how);
                        } else {
                            self.condemn(loss);
                        }
                        continue;
                    }
                },
                Look::Nothing => self.link.awaits(src),
            }
            if let Some(loss) = self.link.check() {
                self.condemn(loss);
                continue;
            }
            if Instant::now() >= deadline() {
                return Err(Failure::TimedOut);
            }
        }
    }

    /// Spins briefly for `ready`, before a wait that may sleep.
    pub fn look(&self, ready: impl Fn() -> bool) -> bool {
        RingPosition::spin(self.link.alone(), ready)
    }

    /// Waits until world rank `src` makes `ready` true by advancing `position`. `deadline` is
    /// evaluated at every tick.
    pub fn wait_until(
        &self,
        src: usize,
        position: &RingPosition,
        ready: impl Fn() -> bool,
        deadline: impl Fn() -> Instant,
    ) -> Result<(), Failure> {
        loop {
            self.link.awaits(src);
            let patience = deadline().saturating_duration_since(Instant::now()).min(TICK);
            if position.wait(patience, &ready) {
                self.link.awaits_nobody();
                return Ok(());
            }
            let loss = self.loss_of(src);
            // Work that the peer finished before it was lost counts.
            if ready() {
                return Ok(());
            }
            if let Some(loss) = loss {
                self.condemn(loss.clone());
                return Err(Failure::Lost(self.inbox.verdict().unwrap_or(loss)));
            }
            if Instant::now() >= deadline() {
                return Err(Failure::TimedOut);
            }
        }
    }

    /// The reason why waiting for world rank `src` is in vain, if it is.
    fn loss_of(&self, src: usize) -> Option<Loss> {
        // The verdict is checked first, because it explains why other ranks have left.
        let verdict = || self.inbox.verdict().or_else(|| self.link.check());
        verdict().or_else(|| self.inbox.lost(src)).or_else(|| self.link.gone(src))
    }

    /// Memory that all ranks of the world share, if the backend has any.
    pub fn arena(&self) -> Option<&Arc<Arena>> {
        self.link.arena()
    }

    /// Whether the message has already arrived.
    pub fn holds(&self, src: usize, key: Key) -> bool {
        if self.inbox.holds(src, key) {
            return true;
        }
        // Backends that are pulled may hold it in their buffers.
        while self.link.pulls() && src != self.rank && self.inbox.begin_pull(src) {
            let message = self.link.pull(src, Duration::ZERO).unwrap_or_default();
            let dry = message.is_none();
            self.inbox.pulled(src, message);
            if dry || self.inbox.holds(src, key) {
                break;
            }
        }
        self.inbox.holds(src, key)
    }

    /// Of the ranks that were waited for in vain, the ones to blame, as far as the backend knows.
    pub fn culprits(&self, missing: Vec<usize>) -> Vec<usize> {
        self.link.culprits(missing)
    }

    /// Ends the run on every rank because of `loss`.
    pub fn condemn(&self, loss: Loss) {
        if self.inbox.verdict().is_none() {
            self.link.spread(&loss);
        }
        self.inbox.condemn(loss);
    }

    /// As [`Endpoint::verdict`], but first looks for lost ranks that no rank waits for.
    pub fn loss(&self) -> Option<Loss> {
        if self.inbox.verdict().is_none()
            && let Some(loss) = self.link.check()
        {
            self.condemn(loss);
        }
        self.inbox.verdict()
    }

    /// The reason why the run is over, if it is.
    pub fn verdict(&self) -> Option<Loss> {
        self.inbox.verdict()
    }

    /// Says goodbye to the other ranks.
    pub fn leave(&self) {
        self.link.leave();
    }

    /// Removes the remaining messages of a finished group.
    pub fn forget(&self, group: u64) {
        self.inbox.forget(group);
    }
}
