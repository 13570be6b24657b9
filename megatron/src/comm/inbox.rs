//! The inbox of a rank: holds messages until an operation asks for them.
//!
//! Collectives of a group take a peer's messages in order of arrival. Point-to-point receives take
//! the n-th message of (group, peer, tag). Backends either push messages from their own threads, or
//! the waiting thread pulls them.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::message::{Message, Op};

/// Maximum time for which messages of a lost rank may still be in transit.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Selects the message that an operation waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Key {
    /// The next message of the group's collectives.
    Collective { group: u64 },
    /// The `index`-th message with this tag.
    Tagged { group: u64, tag: u32, index: u64 },
}

/// The reason why a message will not come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Loss {
    /// The world rank that is gone.
    pub rank: usize,
    /// What happened to it, e.g. `died (pid 123)`.
    pub how: String,
}

#[derive(Default)]
struct Tagged {
    arrived: u64,
    waiting: HashMap<u64, Message>,
}

#[derive(Default)]
struct Source {
    collectives: HashMap<u64, VecDeque<Message>>,
    tagged: HashMap<(u64, u32), Tagged>,
    /// Whether a thread is pulling from the backend. Other threads sleep until it has stored what
    /// came.
    pulling: bool,
    /// Present if no more messages will come.
    lost: Option<String>,
}

impl Source {
    fn store(&mut self, message: Message) {
        let Message { header, .. } = &message;
        if header.call.op == Op::SendRecv {
            let tagged = self.tagged.entry((header.group, header.call.tag)).or_default();
            tagged.waiting.insert(tagged.arrived, message);
            tagged.arrived += 1;
        } else {
            self.collectives.entry(header.group).or_default().push_back(message);
        }
    }

    fn take(&mut self, key: Key) -> Option<Message> {
        match key {
            Key::Collective { group } => self.collectives.get_mut(&group)?.pop_front(),
            Key::Tagged { group, tag, index } => {
                self.tagged.get_mut(&(group, tag))?.waiting.remove(&index)
            }
        }
    }

    fn holds(&self, key: Key) -> bool {
        match key {
            Key::Collective { group } => {
                self.collectives.get(&group).is_some_and(|queue| !queue.is_empty())
            }
            Key::Tagged { group, tag, index } => self
                .tagged
                .get(&(group, tag))
                .is_some_and(|tagged| tagged.waiting.contains_key(&index)),
        }
    }
}

/// The result of one look at the inbox.
pub(crate) enum Look {
    Found(Message),
    /// The caller must pull from the backend, then call [`Inbox::pulled`].
    Pull,
    Lost(Loss),
    /// No message within the given time.
    Nothing,
}

/// The mailboxes of one rank, one per rank of the world.
pub(crate) struct Inbox {
    sources: Vec<(Mutex<Source>, Condvar)>,
    /// The reason why the run is over, and the time when it was set.
    verdict: Mutex<Option<(Loss, Instant)>>,
    /// Whether there is a verdict.
    over: AtomicBool,
}

// A panic while a lock is held leaves plain queues in a valid state, so poisoning is ignored.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inbox {
    /// Empty mailboxes for a world of `size` ranks.
    pub fn new(size: usize) -> Self {
        Self {
            sources: (0..size).map(|_| Default::default()).collect(),
            verdict: Mutex::default(),
            over: AtomicBool::new(false),
        }
    }

    /// Stores a message from world rank `src`.
    pub fn push(&self, src: usize, message: Message) {
        let (source, changed) = &self.sources[src];
        lock(source).store(message);
        changed.notify_all();
    }

    /// Records that no more messages from world rank `src` will come.
    pub fn lose(&self, src: usize, how: impl Into<String>) {
        let (source, changed) = &self.sources[src];
        lock(source).lost.get_or_insert(how.into());
        changed.notify_all();
    }

    /// Records that the run is over because of `loss`; every wait ends. The first verdict is kept.
    pub fn condemn(&self, loss: Loss) {
        lock(&self.verdict).get_or_insert_with(|| (loss, Instant::now()));
        self.over.store(true, Ordering::Release);
        for (source, changed) in &self.sources {
            // The lock ensures that no thread is between checking the verdict and going to sleep.
            drop(lock(source));
            changed.notify_all();
        }
    }

    /// The reason why the run is over, if it is.
    pub fn verdict(&self) -> Option<Loss> {
        if !self.over.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.verdict).as_ref().map(|(loss, _)| loss.clone())
    }

    /// The reason why no more messages from world rank `src` will come, if that is so.
    pub fn lost(&self, src: usize) -> Option<Loss> {
        lock(&self.sources[src].0).lost.clone().map(|how| Loss { rank: src, how })
    }

    /// Looks for a message from world rank `src`. Sleeps at most `patience`.
    pub fn look(&self, src: usize, key: Key, patience: Duration, pulls: bool) -> Look {
        let until = Instant::now() + patience;
        let (source, changed) = &self.sources[src];
        let mut guard = lock(source);
        loop {
            if let Some(message) = guard.take(key) {
                return Look::Found(message);
            }
            if let Some((loss, since)) = lock(&self.verdict).clone() {
                // Other ranks may report a loss before the last messages of the lost rank have
                // arrived.
                if pulls
                    || loss.rank != src
                    || guard.lost.is_some()
                    || since.elapsed() >= LAST_WORDS
                {
                    return Look::Lost(loss);
                }
                guard = changed
                    .wait_timeout(guard, LAST_WORDS / 10)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                continue;
            }
            if let Some(how) = &guard.lost {
                return Look::Lost(Loss { rank: src, how: how.clone() });
            }
            if pulls && !guard.pulling {
                guard.pulling = true;
                return Look::Pull;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Look::Nothing;
            }
            guard = changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes the turn to pull from the backend, if no thread has it. [`Inbox::pulled`] ends it.
    pub fn begin_pull(&self, src: usize) -> bool {
        !std::mem::replace(&mut lock(&self.sources[src].0).pulling, true)
    }

    /// Ends a pull that [`Inbox::look`] requested.
    pub fn pulled(&self, src: usize, message: Option<Message>) {
        let (source, changed) = &self.sources[src];
        let mut guard = lock(source);
        guard.pulling = false;
        if let Some(message) = message {
            guard.store(message);
        }
        drop(guard);
        changed.notify_all();
    }

    /// Whether the message has already arrived.
    pub fn holds(&self, src: usize, key: Key) -> bool {
        lock(&self.sources[src].0).holds(key)
    }

    /// Removes the remaining messages of a finished group.
    pub fn forget(&self, group: u64) {
        for (source, _) in &self.sources {
            let mut source = lock(source);
            source.collectives.remove(&group);
            source.tagged.retain(|(of, _), _| *of != group);
        }
    }
}
