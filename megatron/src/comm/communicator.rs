//! The interface that every backend (threads, shared memory, TCP, NCCL) implements.

use std::sync::Arc;

use candle_core::Tensor;

use super::executor::Submitted;
use crate::Result;

/// How a reduction combines elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// The sum, in rank order.
    Sum,
    /// The maximum; NaN wins, so that non-finite values are never hidden.
    Max,
    /// The minimum; NaN wins.
    Min,
}

/// A shared handle to a communicator.
pub type Group = Arc<dyn Communicator>;

/// Completes an operation.
pub(crate) trait Pending: Send {
    /// Blocks until the operation is complete.
    fn wait(self: Box<Self>) -> Result<()>;
    /// Tells that the caller will not wait. The operation must complete all the same.
    fn detach(self: Box<Self>);
}

/// An operation in flight. Dropping it does not cancel the operation; its buffers stay alive until
/// it ends.
#[must_use = "an operation is complete only after wait()"]
pub struct Work(Option<State>);

enum State {
    /// In the queue of its group. A separate variant, because small operations are too short for
    /// another allocation.
    Queued(Submitted),
    Other(Box<dyn Pending>),
}

impl Work {
    /// An operation that is already complete.
    pub fn done() -> Self {
        Self(None)
    }

    /// An operation in the queue of its group.
    pub(crate) fn queued(submitted: Submitted) -> Self {
        Self(Some(State::Queued(submitted)))
    }

    /// An operation that `pending` completes.
    pub(crate) fn pending(pending: impl Pending + 'static) -> Self {
        Self(Some(State::Other(Box::new(pending))))
    }

    /// Blocks until the operation is complete on this rank.
    ///
    /// # Errors
    /// If a peer was lost, did not arrive in time, or called another operation.
    pub fn wait(mut self) -> Result<()> {
        match self.0.take() {
            None => Ok(()),
            Some(State::Queued(submitted)) => submitted.wait(),
            Some(State::Other(pending)) => pending.wait(),
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        match self.0.take() {
            None => {}
            Some(State::Queued(submitted)) => submitted.detach(),
            Some(State::Other(pending)) => pending.detach(),
        }
    }
}

/// One rank's membership in a group of ranks.
///
/// Tensors are contiguous (views included) and of dtype f32, bf16, f16, f64, i64, u32 or u8. Ranks
/// are indices within the group. "In place" mutates the tensor's storage. Every member calls the
/// same collectives in the same order; messages are matched per (peer, tag) in order.
///
/// A clone of a tensor, a view and a reshape share its storage, so an operation in place changes
/// all of them. If another holder must keep the old values, pass `t.copy()?`. Candle's `cat` of one
/// tensor, `contiguous` of a contiguous tensor and `to_dtype` to the same dtype also return such
/// clones.
pub trait Communicator: Send + Sync {
    /// This rank's index in the group.
    fn rank(&self) -> usize;
    /// The number of ranks in the group.
    fn size(&self) -> usize;
    /// The group's name as it appears in messages, e.g. `tp`.
    fn name(&self) -> &str;
    /// The group's members as ranks of the world, in group order.
    fn ranks(&self) -> &[usize];

    /// Whether layers and pipelines should issue an operation before independent computation, and
    /// wait after it. This pays off if operations run by themselves, as on a GPU's streams. Ranks
    /// on a CPU already use all cores for computation, and a communicating thread would take some
    /// of them. The results are the same, and ranks of a group may even differ.
    fn overlaps(&self) -> bool;

    /// Combines `t` over all ranks, in place.
    fn all_reduce(&self, t: &Tensor, op: ReduceOp) -> Result<Work>;
    /// Concatenates every rank's `input` (flat, in rank order) into `output` (size · elements of
    /// input). `input` may be the rank-th part of `output` itself (a view of the same storage).
    fn all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Work>;
    /// Combines `input` over all ranks and leaves the rank-th of `size` equal flat parts in
    /// `output`. `output` may be that very part of `input` (a view of the same storage).
    fn reduce_scatter(&self, input: &Tensor, output: &Tensor, op: ReduceOp) -> Result<Work>;
    /// Copies `t` of rank `root` to every rank, in place.
    fn broadcast(&self, t: &Tensor, root: usize) -> Result<Work>;
    /// Combines `t` over all ranks into `t` of rank `root`; `t` of other ranks stays unchanged.
    fn reduce(&self, t: &Tensor, root: usize, op: ReduceOp) -> Result<Work>;
    /// Concatenates every rank's `input` into `output` of rank `root` (`None` elsewhere).
    fn gather(&self, input: &Tensor, output: Option<&Tensor>, root: usize) -> Result<Work>;
    /// Distributes the equal flat parts of `input` of rank `root` (`None` elsewhere) into every
    /// rank's `output`.
    fn scatter(&self, input: Option<&Tensor>, output: &Tensor, root: usize) -> Result<Work>;
    /// Sends the i-th equal flat part of `input` to rank i, whose `output` receives it as its
    /// rank-th part.
    fn all_to_all(&self, input: &Tensor, output: &Tensor) -> Result<Work>;
    /// Sends `t` to rank `dst`. Never waits for the receiver on the calling thread.
    fn send(&self, t: &Tensor, dst: usize, tag: u32) -> Result<Work>;
    /// Receives the next message from `src` with this tag into `t` (in place).
    fn recv(&self, t: &Tensor, src: usize, tag: u32) -> Result<Work>;
    /// Prepares messages to and from these ranks, given as (rank, tag), if the transport must
    /// connect for each kind. Otherwise a connection is made at the first message of a kind, while
    /// other work is going on. The ranks that exchange the messages call it together.
    fn connect(&self, _sends: &[(usize, u32)], _receives: &[(usize, u32)]) -> Result<()> {
        Ok(())
    }
    /// Returns after every rank has called it.
    fn barrier(&self) -> Result<()>;

    /// Splits the group (collective over all its ranks, as `ncclCommSplit`): ranks with the same
    /// `color` form a group, ordered by `key`, then by rank; `None` joins no group.
    fn split(&self, name: &str, color: Option<usize>, key: usize) -> Result<Option<Group>>;

    /// Gathers bytes of every rank, in rank order; lengths may differ.
    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Ends the run. Pending and later operations of this rank, and of every reachable rank of the
    /// world, soon fail with an error that names this rank and `reason`. The first reason given on
    /// any rank is kept.
    fn abort(&self, reason: &str);

    /// Says goodbye to all ranks of the world, for a process that ends without dropping its groups.
    /// Messages already sent arrive, and the other ranks do not consider this rank dead. The world
    /// cannot be used afterwards.
    fn leave(&self) {}

    /// Whether the run can continue, as far as this rank knows. Does not wait.
    ///
    /// # Errors
    /// If a rank was lost or the run was aborted.
    fn health(&self) -> Result<()>;
}
