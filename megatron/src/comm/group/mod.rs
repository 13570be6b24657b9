//! A group of ranks over any backend: the [`Communicator`] that `threads`, `local` and `tcp` share.
//!
//! Groups of one world share its connections. Messages carry the group's identity, so a split costs
//! only one exchange of (color, key) and, if ranks share memory, one window.

mod core;
mod receive;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use candle_core::{DType, Tensor};
use kernels::tensor::host::with_bytes;
use kernels::tensor::trace::{Kind, Recorder, span};

pub(crate) use self::core::Core;
use self::receive::Receive;
pub(crate) use self::receive::write;
use super::communicator::{Communicator, Group, ReduceOp, Work};
use super::endpoint::Endpoint;
use super::executor::Executor;
use super::inbox::{Loss, lock};
use super::local::Windows;
use super::message::{Call, Message, Op, is_sendable};
use super::{collectives, operands, staging};
use crate::{Error, Result};

/// Messages of at least this many bytes go through shared memory, if there is any.
const HEAP_FROM: usize = 32 << 10;

/// A rank's membership in a group, over any backend.
pub(crate) struct EndpointGroup {
    // Dropped first: its thread finishes the queue while the core is still connected.
    executor: Executor,
    core: Arc<Core>,
    splits: AtomicU64,
    sent: Mutex<HashMap<(usize, u32), u64>>,
    received: Mutex<HashMap<(usize, u32), u64>>,
}

impl EndpointGroup {
    /// The group of all ranks of a world.
    pub fn world(endpoint: Arc<Endpoint>, size: usize) -> Group {
        let rank = endpoint.rank;
        let shared = endpoint.arena().filter(|_| size > 1).cloned();
        let windows =
            shared.and_then(|arena| Windows::new(arena, rank, (0..size).map(|rank| (rank, 0))));
        Self::group("world", FNV_OFFSET, rank, (0..size).collect(), endpoint, windows)
    }

    fn group(
        name: &str,
        id: u64,
        rank: usize,
        ranks: Vec<usize>,
        endpoint: Arc<Endpoint>,
        windows: Option<Windows>,
    ) -> Group {
        let core = Core {
            name: name.to_owned(),
            id,
            rank,
            ranks,
            endpoint,
            dropped: Mutex::default(),
            broken: OnceLock::new(),
            windows: windows.map(Mutex::new),
        };
        Arc::new(Self {
            executor: Executor::default(),
            core: Arc::new(core),
            splits: AtomicU64::new(0),
            sent: Mutex::default(),
            received: Mutex::default(),
        })
    }

    /// Issues a collective: assigns its number and queues it.
    fn issue(
        &self,
        call: Call,
        operation: impl FnOnce(&Core, Call) -> Result<()> + Send + 'static,
    ) -> Result<Work> {
        let core = self.core.clone();
        let recorder = Recorder::current();
        let job = move |seq| {
            let call = Call { seq, ..call };
            // The group's worker thread records for the issuing thread. A waiting thread that runs
            // the operation itself already records.
            let beside = recorder.filter(|_| Recorder::current().is_none());
            let _entered = beside.map(|recorder| recorder.enter(&format!("comm {}", core.name)));
            let bytes = call.count as usize * width(call.dtype);
            let _span = span(call.op.name(), Kind::Communication).work(0, bytes);
            core.run(call, |core| operation(core, call))
        };
        if self.core.size() == 1 {
            // In a group of one, no other rank can be at another operation.
            job(0)?;
            return Ok(Work::done());
        }
        self.executor.submit(&self.core.name, job)
    }

    /// Exchanges bytes and waits for the result.
    fn gather_bytes(&self, op: Op, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let gathered = Arc::new(Mutex::new(Vec::new()));
        let (bytes, out) = (Arc::new(bytes.to_vec()), gathered.clone());
        self.issue(Call::new(op), move |core, call| {
            *lock(&out) = collectives::all_gather_bytes(core, call, bytes)?;
            Ok(())
        })?
        .wait()?;
        Ok(std::mem::take(&mut *lock(&gathered)))
    }

    fn call(&self, op: Op, t: &Tensor) -> Result<Call> {
        self.check(op, t)?;
        Ok(call_on(op, t))
    }

    /// E.g. `all_reduce of f32×6 on group tp (ranks 0,1)`, for errors before a call is issued.
    fn on(&self, op: Op, t: Option<&Tensor>) -> String {
        let of = t.map(|t| format!(" of {}", operands::elements(t))).unwrap_or_default();
        format!("{}{of} on {}", op.name(), self.core.label())
    }

    fn check(&self, op: Op, t: &Tensor) -> Result<()> {
        let refuse = |why: &str| Err(Error::comm(format!("{}: {why}", self.on(op, Some(t)))));
        if !is_sendable(t.dtype()) {
            return refuse(&format!("dtype {} cannot be sent", t.dtype().as_str()));
        }
        if !t.is_contiguous() {
            return refuse(&format!("a tensor of shape {:?} is not contiguous", t.dims()));
        }
        if t.device().is_metal() {
            return refuse("the tensor is neither on the CPU nor on an NVIDIA GPU");
        }
        Ok(())
    }

    fn check_parts(&self, op: Op, small: &Tensor, large: &Tensor) -> Result<()> {
        self.check(op, small)?;
        self.check(op, large)?;
        operands::check_parts(|| self.on(op, Some(small)), self.core.size(), small, large)
    }

    fn check_rank(&self, op: Op, rank: usize) -> Result<()> {
        operands::check_rank(|| self.on(op, None), self.core.size(), rank)
    }

    /// The tensor that only the root passes.
    fn at_root<'a>(
        &self,
        op: Op,
        t: Option<&'a Tensor>,
        root: usize,
    ) -> Result<Option<&'a Tensor>> {
        self.check_rank(op, root)?;
        match (t, root == self.core.rank) {
            (Some(t), true) => Ok(Some(t)),
            (None, false) => Ok(None),
            (given, _) => Err(Error::comm(format!(
                "{}: rank {} of the group {} the whole tensor, but the root is {root}",
                self.on(op, given),
                self.core.rank,
                if given.is_some() { "passed" } else { "did not pass" },
            ))),
        }
    }
}

/// The call of `op` on `t`, which was checked.
fn call_on(op: Op, t: &Tensor) -> Call {
    Call { dtype: t.dtype(), count: t.elem_count() as u64, ..Call::new(op) }
}

/// The next number of `counters[key]`.
fn next(counters: &Mutex<HashMap<(usize, u32), u64>>, key: (usize, u32)) -> u64 {
    let mut counters = lock(counters);
    let counter = counters.entry(key).or_default();
    *counter += 1;
    *counter - 1
}

impl Communicator for EndpointGroup {
    fn rank(&self) -> usize {
        self.core.rank
    }

    fn size(&self) -> usize {
        self.core.size()
    }

    fn name(&self) -> &str {
        &self.core.name
    }

    fn ranks(&self) -> &[usize] {
        &self.core.ranks
    }

    fn overlaps(&self) -> bool {
        self.core.endpoint.options.overlap
    }

    fn all_reduce(&self, t: &Tensor, op: ReduceOp) -> Result<Work> {
        let call = Call { reduce: Some(op), ..self.call(Op::AllReduce, t)? };
        let t = staging::issued(t)?;
        self.issue(call, move |core, call| {
            staging::in_place(core.size(), &t, |t| collectives::all_reduce(core, call, t, op))
        })
    }

    fn all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Work> {
        self.check_parts(Op::AllGather, input, output)?;
        let call = call_on(Op::AllGather, input);
        let (input, output) = (staging::issued(input)?, staging::issued(output)?);
        self.issue(call, move |core, call| {
            staging::from_to(core.size(), &input, &output, |input, output| {
                collectives::all_gather(core, call, input, output)
            })
        })
    }

    fn reduce_scatter(&self, input: &Tensor, output: &Tensor, op: ReduceOp) -> Result<Work> {
        self.check_parts(Op::ReduceScatter, output, input)?;
        let call = Call { reduce: Some(op), ..call_on(Op::ReduceScatter, output) };
        let (input, output) = (staging::issued(input)?, staging::issued(output)?);
        self.issue(call, move |core, call| {
            staging::from_to(core.size(), &input, &output, |input, output| {
                collectives::reduce_scatter(core, call, input, output, op)
            })
        })
    }

    fn broadcast(&self, t: &Tensor, root: usize) -> Result<Work> {
        self.check_rank(Op::Broadcast, root)?;
        let call = Call { root: Some(root as u32), ..self.call(Op::Broadcast, t)? };
        let t = staging::issued(t)?;
        self.issue(call, move |core, call| {
            staging::in_place(core.size(), &t, |t| collectives::broadcast(core, call, t, root))
        })
    }

    fn reduce(&self, t: &Tensor, root: usize, op: ReduceOp) -> Result<Work> {
        self.check_rank(Op::Reduce, root)?;
        let call = Call { reduce: Some(op), root: Some(root as u32), ..self.call(Op::Reduce, t)? };
        let t = staging::issued(t)?;
        self.issue(call, move |core, call| {
            staging::in_place(core.size(), &t, |t| collectives::reduce(core, call, t, root, op))
        })
    }

    fn gather(&self, input: &Tensor, output: Option<&Tensor>, root: usize) -> Result<Work> {
        let output = self.at_root(Op::Gather, output, root)?;
        if let Some(output) = output {
            self.check_parts(Op::Gather, input, output)?;
        }
        let call = Call { root: Some(root as u32), ..self.call(Op::Gather, input)? };
        let (input, output) = (staging::issued(input)?, output.map(staging::issued).transpose()?);
        self.issue(call, move |core, call| {
            staging::between(Some(&input), output.as_ref(), |input, output| match input {
                Some(input) => collectives::gather(core, call, input, output, root),
                None => Ok(()),
            })
        })
    }

    fn scatter(&self, input: Option<&Tensor>, output: &Tensor, root: usize) -> Result<Work> {
        let input = self.at_root(Op::Scatter, input, root)?;
        if let Some(input) = input {
            self.check_parts(Op::Scatter, output, input)?;
        }
        let call = Call { root: Some(root as u32), ..self.call(Op::Scatter, output)? };
        let (input, output) = (input.map(staging::issued).transpose()?, staging::issued(output)?);
        self.issue(call, move |core, call| {
            staging::between(input.as_ref(), Some(&output), |input, output| match output {
                Some(output) => collectives::scatter(core, call, input, output, root),
                None => Ok(()),
            })
        })
    }

    fn all_to_all(&self, input: &Tensor, output: &Tensor) -> Result<Work> {
        let call = self.call(Op::AllToAll, input)?;
        self.check(Op::AllToAll, output)?;
        operands::check_exchange(
            || self.on(Op::AllToAll, Some(input)),
            self.core.size(),
            input,
            output,
        )?;
        let (input, output) = (staging::issued(input)?, staging::issued(output)?);
        self.issue(call, move |core, call| {
            staging::from_to(core.size(), &input, &output, |input, output| {
                collectives::all_to_all(core, call, input, output)
            })
        })
    }

    fn send(&self, t: &Tensor, dst: usize, tag: u32) -> Result<Work> {
        self.check_rank(Op::SendRecv, dst)?;
        let call = Call { tag, seq: next(&self.sent, (dst, tag)), ..self.call(Op::SendRecv, t)? };
        if let Some(loss) = self.core.endpoint.verdict() {
            return Err(self.core.lost(loss, &call));
        }
        let len = t.elem_count() * width(t.dtype());
        let heap = self
            .core
            .endpoint
            .arena()
            .map(|arena| arena.heap())
            .filter(|_| len >= HEAP_FROM && dst != self.core.rank);
        staging::read(&staging::issued(t)?, |t| {
            if let Some(block) = heap.and_then(|heap| heap.allocate(len)) {
                // Announced first, so that the receiver can copy while the sender writes.
                let place = Arc::new((block.offset as u64).to_le_bytes().to_vec());
                self.core.send(dst, Message::IN_HEAP, call, place);
                with_bytes(t, "send", |bytes| {
                    block.write(bytes);
                    Ok(())
                })?;
            } else {
                self.core.send(
                    dst,
                    0,
                    call,
                    Arc::new(with_bytes(t, "send", |bytes| Ok(bytes.to_vec()))?),
                );
            }
            Ok(())
        })?;
        Ok(Work::done())
    }

    fn recv(&self, t: &Tensor, src: usize, tag: u32) -> Result<Work> {
        self.check_rank(Op::SendRecv, src)?;
        let call =
            Call { tag, seq: next(&self.received, (src, tag)), ..self.call(Op::SendRecv, t)? };
        Ok(Work::pending(Receive { core: self.core.clone(), t: staging::issued(t)?, src, call }))
    }

    fn barrier(&self) -> Result<()> {
        self.issue(Call::new(Op::Barrier), collectives::barrier)?.wait()
    }

    fn split(&self, name: &str, color: Option<usize>, key: usize) -> Result<Option<Group>> {
        let arena = self.core.endpoint.arena().filter(|_| color.is_some());
        let window = arena.and_then(|arena| arena.take_window());
        let mine = serde_json::json!([name, color, key, window]).to_string();
        let mut members = Vec::new();
        for (rank, bytes) in self.gather_bytes(Op::Split, mine.as_bytes())?.iter().enumerate() {
            type Said = (String, Option<usize>, usize, Option<usize>);
            let (its_name, its_color, its_key, its_window): Said = serde_json::from_slice(bytes)
                .map_err(|e| {
                    Error::comm(format!("split on {}: rank {rank}: {e}", self.core.label()))
                })?;
            if its_name != name {
                return Err(Error::comm(format!(
                    "{}: rank {} creates group {name}, but rank {} creates group {its_name}; all \
                     ranks must split in the same order",
                    self.core.label(),
                    self.core.endpoint.rank,
                    self.core.ranks[rank],
                )));
            }
            if color.is_some() && its_color == color {
                members.push((its_key, rank, its_window));
            }
        }
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        let Some(color) = color else { return Ok(None) };
        members.sort_unstable();
        let rank = members.iter().position(|(_, rank, _)| *rank == self.core.rank).unwrap_or(0);
        let ranks: Vec<usize> = members.iter().map(|(_, rank, _)| self.core.ranks[*rank]).collect();
        let windows = arena.zip(window).and_then(|(arena, mine)| {
            let theirs: Option<Vec<usize>> = members.iter().map(|(_, _, window)| *window).collect();
            let windows = theirs
                .filter(|theirs| theirs.len() > 1)
                .map(|theirs| ranks.iter().copied().zip(theirs));
            if windows.is_none() {
                arena.give_back(mine, 0);
            }
            Windows::new(arena.clone(), rank, windows?)
        });
        let id = [number, color as u64]
            .iter()
            .fold(self.core.id, |id, word| fnv(id, &word.to_le_bytes()));
        Ok(Some(Self::group(
            name,
            fnv(id, name.as_bytes()),
            rank,
            ranks,
            self.core.endpoint.clone(),
            windows,
        )))
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.gather_bytes(Op::AllGatherBytes, bytes)
    }

    fn abort(&self, reason: &str) {
        let endpoint = &self.core.endpoint;
        endpoint.condemn(Loss { rank: endpoint.rank, how: format!("failed: {reason}") });
    }

    fn leave(&self) {
        self.core.endpoint.leave();
    }

    fn health(&self) -> Result<()> {
        match self.core.endpoint.loss() {
            Some(loss) => Err(self.core.lost(loss, &Call::new(Op::Barrier))),
            None => Ok(()),
        }
    }
}

impl Drop for EndpointGroup {
    fn drop(&mut self) {
        *lock(&self.core.dropped) = Some(Instant::now());
        if std::thread::panicking() {
            self.abort("its thread panicked");
        }
    }
}

/// Bytes of one element.
pub(crate) fn width(dtype: DType) -> usize {
    dtype.size_in_bytes()
}

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a hash, continued from `hash`.
fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}
