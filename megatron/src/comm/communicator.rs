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

/// What completes an operation.
pub(crate) trait Pending: Send {
    /// Blocks until the operation is complete.
    fn wait(self: Box<Self>) -> Result<()>;
    /// The caller will not wait; the operation must complete all the same.
    fn detach(self: Box<Self>);
}

/// An operation in flight. Dropping it does not cancel the operation; its buffers stay alive until
/// it ends.
#[must_use = "an operation is complete only after wait()"]
pub struct Work(Option<State>);

enum State {
    /// In the queue of its group. Small operations are too short for an allocation more.
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
/// all of them: pass `t.copy()?` where another holder must keep the old values. candle's `cat` of
/// one tensor, `contiguous` of a contiguous one and `to_dtype` of its own dtype are such clones.
pub trait Communicator: Send + Sync {
    /// This rank's index in the group.
    fn rank(&self) -> usize;
    /// The number of ranks in the group.
    fn size(&self) -> usize;
    /// The group's name as it appears in messages, e.g. `tp`.
    fn name(&self) -> &str;
    /// The group's members as ranks of the world, in group order.
    fn ranks(&self) -> &[usize];

    /// Whether layers and pipelines should issue operations before computation that does not need
    /// them, and wait after it. That pays where operations run by themselves, as on a GPU's
    /// streams; a CPU's ranks use all of its cores for computation, from which a thread that
    /// communicates would only take. Results are the same, and ranks of a group may even differ.
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
    /// Combines `t` over all ranks into `t` of rank `root`; the others' stay as they are.
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
    /// Receives into `t` (in place) the next message of `src` with this tag.
    fn recv(&self, t: &Tensor, src: usize, tag: u32) -> Result<Work>;
    /// Prepares messages to and from these ranks, as (rank, tag), where the transport has to
    /// connect for each kind of them; without it that happens at the first of a kind, beside
    /// whatever else goes on then. Those who exchange them call it together.
    fn connect(&self, _sends: &[(usize, u32)], _receives: &[(usize, u32)]) -> Result<()> {
        Ok(())
    }
    /// Returns when every rank has called it.
    fn barrier(&self) -> Result<()>;

    /// Splits the group (collective over all its ranks, as `ncclCommSplit`): ranks with the same
    /// `color` form a group, ordered by `key`, then by rank; `None` joins no group.
    fn split(&self, name: &str, color: Option<usize>, key: usize) -> Result<Option<Group>>;

    /// Bytes of every rank, in rank order; lengths may differ.
    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Ends the run: pending and later operations of this rank and, as far as they can be reached,
    /// of every rank of the world fail soon with an error that names this rank and `reason`. The
    /// first reason given anywhere stays.
    fn abort(&self, reason: &str);

    /// Says farewell to all ranks of the world, for a process that ends without dropping its
    /// groups: what it told them arrives, and they do not take it for dead. The world is of no use
    /// after it.
    fn leave(&self) {}

    /// Whether the run can go on, as far as this rank has heard; waits for nobody.
    ///
    /// # Errors
    /// If a rank was lost or the run was aborted.
    fn health(&self) -> Result<()>;
}
