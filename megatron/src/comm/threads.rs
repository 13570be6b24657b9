//! Backend whose ranks are threads of one process, for tests and examples.
//!
//! Messages are handed over without a copy: both ends share the bytes.

use std::sync::Arc;

use super::CommOptions;
use super::communicator::Group;
use super::endpoint::{Endpoint, Link};
use super::group::EndpointGroup;
use super::inbox::{Inbox, Loss};
use super::message::{Header, Message, Payload};

struct ThreadLink {
    rank: usize,
    inboxes: Arc<Vec<Arc<Inbox>>>,
}

impl Link for ThreadLink {
    fn send(&self, dst: usize, header: Header, payload: Payload) {
        self.inboxes[dst].push(self.rank, Message { header, payload });
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

/// The world groups of `size` ranks, each to be moved to its own thread. A rank that drops its groups, or panics,
/// makes the others' waits for it fail.
pub fn world(size: usize) -> Vec<Group> {
    world_with(size, CommOptions::default())
}

/// As [`world`], with other than the default options.
pub fn world_with(size: usize, options: CommOptions) -> Vec<Group> {
    let inboxes: Arc<Vec<Arc<Inbox>>> = Arc::new((0..size).map(|_| Arc::new(Inbox::new(size))).collect());
    let group = |rank: usize| {
        let link = Box::new(ThreadLink { rank, inboxes: inboxes.clone() });
        let endpoint = Endpoint::new(rank, options.clone(), inboxes[rank].clone(), link);
        EndpointGroup::world(Arc::new(endpoint), size)
    };
    (0..size).map(group).collect()
}

/// A world of one rank.
pub fn solo() -> Group {
    let inboxes = Arc::new(vec![Arc::new(Inbox::new(1))]);
    let link = Box::new(ThreadLink { rank: 0, inboxes: inboxes.clone() });
    let endpoint = Endpoint::new(0, CommOptions::default(), inboxes[0].clone(), link);
    EndpointGroup::world(Arc::new(endpoint), 1)
}
