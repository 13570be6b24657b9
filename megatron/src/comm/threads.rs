//! Backend whose ranks are threads of one process, for tests and examples.
//!
//! Messages are passed without a copy, because both ends share the bytes. Collectives and large
//! messages use memory that all threads share, as between processes.
//!
//! ```
//! use megatron::Error;
//! use megatron::comm::{Communicator, threads};
//!
//! # fn main() -> megatron::Result<()> {
//! let ranks = threads::run(3, |world| {
//!     world.barrier()?;
//!     Ok((world.rank(), world.size()))
//! })?;
//! assert_eq!(ranks, [(0, 3), (1, 3), (2, 3)]);
//!
//! // No rank waits for ever for a failed rank, and the error is that rank's.
//! let failed = threads::run(3, |world| match world.rank() {
//!     2 => Err(Error::Config("no data".into())),
//!     _ => world.barrier(),
//! });
//! assert_eq!(failed.unwrap_err().to_string(), "no data");
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;

use super::CommOptions;
use super::communicator::Group;
use super::endpoint::{Endpoint, Link};
use super::group::EndpointGroup;
use super::inbox::{Inbox, Loss};
use super::local::Arena;
use super::message::{Header, Message, Payload};
use crate::{Error, Result};

struct ThreadLink {
    rank: usize,
    inboxes: Arc<Vec<Arc<Inbox>>>,
    arena: Option<Arc<Arena>>,
    /// Whether every rank may have its own core.
    alone: bool,
}

impl ThreadLink {
    fn new(rank: usize, inboxes: &Arc<Vec<Arc<Inbox>>>, arena: Option<Arc<Arena>>) -> Box<Self> {
        let alone = std::thread::available_parallelism().map_or(1, usize::from) >= inboxes.len();
        Box::new(Self { rank, inboxes: inboxes.clone(), arena, alone })
    }
}

impl Link for ThreadLink {
    fn send(&self, dst: usize, header: Header, payload: Payload) {
        let message = match &self.arena {
            Some(arena) => Message::new(header, payload, arena, self.rank),
            None => Ok(Message::whole(header, payload)),
        };
        match message {
            Ok(message) => self.inboxes[dst].push(self.rank, message),
            Err(e) => self.spread(&Loss { rank: self.rank, how: format!("failed: {e}") }),
        }
    }

    fn arena(&self) -> Option<&Arc<Arena>> {
        self.arena.as_ref()
    }

    fn alone(&self) -> bool {
        self.alone
    }

    fn spread(&self, loss: &Loss) {
        for inbox in self.inboxes.iter() {
            inbox.condemn(loss.clone());
        }
    }
}

impl Drop for ThreadLink {
    fn drop(&mut self) {
        for inbox in self.inboxes.iter() {
            inbox.lose(self.rank, "left the run");
        }
    }
}

/// Runs `rank` as each of `size` ranks, each on its own thread, and returns the results in order of
/// rank.
///
/// # Errors
/// The error of the first rank that failed by itself and not because another rank was lost.
///
/// # Panics
/// If a rank panics.
pub fn run<T: Send>(size: usize, rank: impl Fn(Group) -> Result<T> + Sync) -> Result<Vec<T>> {
    run_with(size, CommOptions::default(), rank)
}

/// As [`run`], with the given options.
///
/// # Errors
/// As [`run`].
///
/// # Panics
/// As [`run`].
pub fn run_with<T: Send>(
    size: usize,
    options: CommOptions,
    rank: impl Fn(Group) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let rank = &rank;
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let start = |group| scope.spawn(move || rank(group));
        let ranks: Vec<_> = world_with(size, options).into_iter().map(start).collect();
        let join = |thread: std::thread::ScopedJoinHandle<_>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        ranks.into_iter().map(join).collect()
    });
    let is_cause = |result: &Result<T>| {
        result.as_ref().is_err_and(|error| !matches!(error, Error::PeerLost { .. }))
    };
    match results.iter().position(is_cause) {
        Some(cause) => results.into_iter().skip(cause).take(1).collect(),
        None => results.into_iter().collect(),
    }
}

/// The world groups of `size` ranks, each to be moved to its own thread. If a rank drops its
/// groups, or panics, the others' waits for it fail.
pub fn world(size: usize) -> Vec<Group> {
    world_with(size, CommOptions::default())
}

/// As [`world`], with the given options.
pub fn world_with(size: usize, options: CommOptions) -> Vec<Group> {
    let inboxes: Arc<Vec<Arc<Inbox>>> =
        Arc::new((0..size).map(|_| Arc::new(Inbox::new(size))).collect());
    // Without shared memory everything goes as messages.
    let mut arenas = Arena::of_threads(size).unwrap_or_default().into_iter();
    let group = |rank: usize| {
        let link = ThreadLink::new(rank, &inboxes, arenas.next());
        let endpoint = Endpoint::new(rank, options.clone(), inboxes[rank].clone(), link);
        EndpointGroup::world(Arc::new(endpoint), size)
    };
    (0..size).map(group).collect()
}

/// A world of one rank.
pub fn solo() -> Group {
    let inboxes = Arc::new(vec![Arc::new(Inbox::new(1))]);
    let link = ThreadLink::new(0, &inboxes, None);
    let endpoint = Endpoint::new(0, CommOptions::default(), inboxes[0].clone(), link);
    EndpointGroup::world(Arc::new(endpoint), 1)
}
