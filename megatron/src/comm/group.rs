//! A group of ranks over any backend: the [`Communicator`] that `threads`, `local` and `tcp` share.
//!
//! Groups of one world share its connections; messages carry the group's identity, so a split costs one exchange of
//! (color, key) and, where ranks share memory, a window of it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::{DType, Tensor};
use kernels::host::{with_bytes, with_bytes_mut};
use kernels::trace::{Kind, Recorder, span};

use super::collectives;
use super::communicator::{Communicator, Group, Pending, ReduceOp, Work};
use super::endpoint::{Endpoint, Failure};
use super::executor::Executor;
use super::inbox::{Key, Loss, lock};
use super::local::{PIECE, Side, Windows};
use super::message::{Call, Header, Message, Op, Payload, is_sendable};
use super::staging::{self, Issued};
use crate::{Error, Result};

/// How long operations that are still queued may take once their group is dropped.
const LINGER: Duration = Duration::from_secs(10);

/// Messages of at least so many bytes are handed over in shared memory, where there is any.
const HEAP_FROM: usize = 32 << 10;

/// What the operations of a group need while they run.
pub(crate) struct Core {
    pub name: String,
    id: u64,
    /// Index in `ranks`.
    pub rank: usize,
    /// Members as ranks of the world.
    pub ranks: Vec<usize>,
    endpoint: Arc<Endpoint>,
    /// When the handle was dropped: waits end soon after.
    dropped: Mutex<Option<Instant>>,
    /// Why the group cannot be used any more: after a failure its ranks are no longer at the same operation.
    broken: Mutex<Option<String>>,
    /// Where its collectives exchange data, if all members share memory. Held by the one that runs.
    pub windows: Option<Mutex<Windows>>,
}

impl Core {
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Whether this rank may read the memory of others.
    pub fn reads_memory(&self) -> bool {
        self.endpoint.options.read_memory
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

    /// What precedes `len` bytes of `call`.
    pub fn header(&self, phase: u8, call: Call, len: usize) -> Header {
        Header { group: self.id, phase, call, len: len as u64 }
    }

    /// Queues `payload` for `peer` as part of `call`.
    pub fn send(&self, peer: usize, phase: u8, call: Call, payload: Payload) {
        self.endpoint.send(self.ranks[peer], self.header(phase, call, payload.len()), payload);
    }

    /// The error of this rank in `call`, while `peer` is in `theirs`.
    pub fn disagreement(&self, peer: usize, theirs: Call, call: Call) -> Error {
        let mut ranks = [(self.ranks[peer], theirs), (self.endpoint.rank, call)];
        ranks.sort_unstable_by_key(|(rank, _)| *rank);
        let [(low, first), (high, second)] = ranks;
        Error::comm(format!(
            "{}: rank {low} called {first} but rank {high} called {second}; all ranks must issue the same operations in the same order",
            self.label(),
        ))
    }

    /// The next message of `peer`, which must belong to `call` and hold `len` bytes. `others` are those whose messages
    /// the caller waits for next; they are named, too, if the time runs out.
    pub fn recv(&self, peer: usize, phase: u8, call: Call, len: Option<usize>, others: &[usize]) -> Result<Payload> {
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

    fn wait(&self, peer: usize, key: Key, call: &Call, others: &[usize]) -> Result<Message> {
        let start = Instant::now();
        self.endpoint.recv(self.ranks[peer], key, || self.deadline(start)).map_err(|failure| {
            let late =
                || others.iter().copied().filter(|other| !self.endpoint.holds(self.ranks[*other], key)).collect();
            self.failed(failure, peer, late, call, start)
        })
    }

    /// Waits until `peer` has brought about `ready` by moving `side` on. Later peers that are not ready are named, too, if the time
    /// runs out.
    pub fn await_peer(&self, peer: usize, side: &Side, ready: impl Fn(usize) -> bool, call: &Call) -> Result<()> {
        if ready(peer) {
            return Ok(());
        }
        let start = Instant::now();
        let waited = self.endpoint.wait_until(self.ranks[peer], side, || ready(peer), || self.deadline(start));
        waited.map_err(|failure| {
            let late = || self.peers().filter(|other| *other > peer && !ready(*other)).collect();
            self.failed(failure, peer, late, call, start)
        })
    }

    /// The error for waiting for `peer` in vain since `start`; `late` are others that have not come either.
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
                let missing = std::iter::once(peer).chain(late()).map(|late| self.ranks[late]).collect();
                let mut missing = self.endpoint.culprits(missing);
                missing.sort_unstable();
                Error::Timeout { operation: self.operation(call), missing, seconds: start.elapsed().as_secs_f64() }
            }
        }
    }

    fn lost(&self, loss: Loss, call: &Call) -> Error {
        Error::PeerLost { rank: loss.rank, how: loss.how, operation: self.operation(call) }
    }

    /// Runs one collective; after a failure the group refuses everything else.
    fn run(&self, call: Call, operation: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        if let Some(loss) = self.endpoint.verdict() {
            return Err(self.lost(loss, &call));
        }
        if let Some(why) = &*lock(&self.broken) {
            return Err(Error::comm(format!("{} cannot run after an earlier failure: {why}", self.operation(&call))));
        }
        operation(self).inspect_err(|error| {
            lock(&self.broken).get_or_insert(error.to_string());
        })
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.endpoint.forget(self.id);
    }
}

/// A rank's membership in a group, over any backend.
pub(crate) struct EndpointGroup {
    // Dropped first: its thread finishes the queue with the core still connected.
    executor: Executor,
    core: Arc<Core>,
    /// Number of collectives issued. Held while one is queued, so that queue and numbers agree.
    issued: Mutex<u64>,
    splits: AtomicU64,
    sent: Mutex<HashMap<(usize, u32), u64>>,
    received: Mutex<HashMap<(usize, u32), u64>>,
}

impl EndpointGroup {
    /// The group of all ranks of a world.
    pub fn world(endpoint: Arc<Endpoint>, size: usize) -> Group {
        let rank = endpoint.rank;
        let shared = endpoint.arena().filter(|_| size > 1).cloned();
        let windows = shared.and_then(|arena| Windows::new(arena, rank, (0..size).map(|rank| (rank, 0))));
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
            broken: Mutex::default(),
            windows: windows.map(Mutex::new),
        };
        Arc::new(Self {
            executor: Executor::default(),
            core: Arc::new(core),
            issued: Mutex::default(),
            splits: AtomicU64::new(0),
            sent: Mutex::default(),
            received: Mutex::default(),
        })
    }

    /// Issues a collective: gives it its number and its place in the queue.
    fn issue(
        &self,
        mut call: Call,
        operation: impl FnOnce(&Core, Call) -> Result<()> + Send + 'static,
    ) -> Result<Work> {
        let mut issued = lock(&self.issued);
        call.seq = *issued;
        *issued += 1;
        let core = self.core.clone();
        let recorder = Recorder::current();
        let job = move || {
            // The group's own thread records for the thread that issued; whoever waits, and runs it, records already.
            let beside = recorder.filter(|_| Recorder::current().is_none());
            let _entered = beside.map(|recorder| recorder.enter(&format!("comm {}", core.name)));
            let bytes = call.count as usize * width(call.dtype);
            let _span = span(call.op.name(), Kind::Communication).work(0, bytes);
            core.run(call, |core| operation(core, call))
        };
        if self.core.size() == 1 {
            job()?;
            return Ok(Work::done());
        }
        self.executor.submit(&self.core.name, job)
    }

    /// Issues an exchange of bytes and waits for it.
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
        Ok(Call { dtype: t.dtype(), count: t.elem_count() as u64, ..Call::new(op) })
    }

    fn check(&self, op: Op, t: &Tensor) -> Result<()> {
        let refuse = |why: &str| Err(Error::comm(format!("{} on {}: {why}", Call::new(op), self.core.label())));
        if !is_sendable(t.dtype()) {
            return refuse(&format!("dtype {} cannot be sent", t.dtype().as_str()));
        }
        if !t.is_contiguous() {
            return refuse(&format!("a tensor of shape {:?} is not contiguous", t.dims()));
        }
        if t.device().is_metal() {
            return refuse("the tensor is neither on the CPU nor on a GPU of NVIDIA's");
        }
        Ok(())
    }

    /// Checks that `large` holds `size` times the elements of `small`, of the same dtype.
    fn check_parts(&self, op: Op, small: &Tensor, large: &Tensor) -> Result<()> {
        self.check(op, small)?;
        self.check(op, large)?;
        let size = self.core.size();
        if small.dtype() != large.dtype() || small.elem_count() * size != large.elem_count() {
            return Err(Error::comm(format!(
                "{} on {}: {}×{} is not {size} parts of {}×{}",
                Call::new(op),
                self.core.label(),
                large.dtype().as_str(),
                large.elem_count(),
                small.dtype().as_str(),
                small.elem_count(),
            )));
        }
        Ok(())
    }

    fn check_rank(&self, op: Op, rank: usize) -> Result<()> {
        if rank < self.core.size() {
            return Ok(());
        }
        Err(Error::comm(format!("{} on {}: there is no rank {rank} in the group", Call::new(op), self.core.label())))
    }

    /// The tensor that only the root passes.
    fn at_root<'a>(&self, op: Op, t: Option<&'a Tensor>, root: usize) -> Result<Option<&'a Tensor>> {
        self.check_rank(op, root)?;
        match (t, root == self.core.rank) {
            (Some(t), true) => Ok(Some(t)),
            (None, false) => Ok(None),
            (given, _) => Err(Error::comm(format!(
                "{} on {}: rank {} of the group {} the whole tensor, but the root is {root}",
                Call::new(op),
                self.core.label(),
                self.core.rank,
                if given.is_some() { "passed" } else { "did not pass" },
            ))),
        }
    }
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
        let call = self.call(Op::AllGather, input)?;
        let (input, output) = (staging::issued(input)?, staging::issued(output)?);
        self.issue(call, move |core, call| {
            staging::from_to(core.size(), &input, &output, |input, output| {
                collectives::all_gather(core, call, input, output)
            })
        })
    }

    fn reduce_scatter(&self, input: &Tensor, output: &Tensor, op: ReduceOp) -> Result<Work> {
        self.check_parts(Op::ReduceScatter, output, input)?;
        let call = Call { reduce: Some(op), ..self.call(Op::ReduceScatter, output)? };
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
        let count = input.elem_count();
        if output.elem_count() != count || output.dtype() != input.dtype() || !count.is_multiple_of(self.core.size()) {
            return Err(Error::comm(format!(
                "all_to_all on {}: input of {}×{count} and output of {}×{} must be equal and divide by {}",
                self.core.label(),
                input.dtype().as_str(),
                output.dtype().as_str(),
                output.elem_count(),
                self.core.size(),
            )));
        }
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
        let heap =
            self.core.endpoint.arena().map(|arena| arena.heap()).filter(|_| len >= HEAP_FROM && dst != self.core.rank);
        staging::read(&staging::issued(t)?, |t| {
            if let Some(block) = heap.and_then(|heap| heap.allocate(len)) {
                // Told first, so that the receiver copies along.
                let place = Arc::new((block.offset as u64).to_le_bytes().to_vec());
                self.core.send(dst, Message::IN_HEAP, call, place);
                with_bytes(t, "send", |bytes| {
                    block.write(bytes);
                    Ok(())
                })?;
            } else {
                self.core.send(dst, 0, call, Arc::new(with_bytes(t, "send", |bytes| Ok(bytes.to_vec()))?));
            }
            Ok(())
        })?;
        Ok(Work::done())
    }

    fn recv(&self, t: &Tensor, src: usize, tag: u32) -> Result<Work> {
        self.check_rank(Op::SendRecv, src)?;
        let call = Call { tag, seq: next(&self.received, (src, tag)), ..self.call(Op::SendRecv, t)? };
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
                .map_err(|e| Error::comm(format!("split on {}: rank {rank}: {e}", self.core.label())))?;
            if its_name != name {
                return Err(Error::comm(format!(
                    "{}: rank {} splits off group {name} but rank {} splits off group {its_name}; all ranks must split \
                     in the same order",
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
            let windows = theirs.filter(|theirs| theirs.len() > 1).map(|theirs| ranks.iter().copied().zip(theirs));
            if windows.is_none() {
                arena.give_back(mine, 0);
            }
            Windows::new(arena.clone(), rank, windows?)
        });
        let id = [number, color as u64].iter().fold(self.core.id, |id, word| fnv(id, &word.to_le_bytes()));
        Ok(Some(Self::group(name, fnv(id, name.as_bytes()), rank, ranks, self.core.endpoint.clone(), windows)))
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.gather_bytes(Op::AllGatherBytes, bytes)
    }

    fn abort(&self, reason: &str) {
        let endpoint = &self.core.endpoint;
        endpoint.condemn(Loss { rank: endpoint.rank, how: format!("failed: {reason}") });
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

/// A receive that happens when it is waited for; until then the message waits in the inbox.
struct Receive {
    core: Arc<Core>,
    t: Issued,
    src: usize,
    call: Call,
}

impl Receive {
    fn complete(&self) -> Result<()> {
        staging::between(None, Some(&self.t), |_, t| t.map_or(Ok(()), |t| self.complete_on_cpu(t)))
    }

    fn complete_on_cpu(&self, t: &Tensor) -> Result<()> {
        let Self { core, src, call, .. } = self;
        let key = Key::Tagged { group: core.id, tag: call.tag, index: call.seq };
        let Message { header, payload, block } = core.wait(*src, key, call, &[])?;
        if !header.call.same_elements(call) {
            return Err(Error::comm(format!(
                "{}: rank {} sent a {} but rank {} receives {}×{}",
                core.label(),
                core.ranks[*src],
                header.call,
                core.endpoint.rank,
                call.dtype.as_str(),
                call.count,
            )));
        }
        let Some(block) = block else { return write(t, 0, &payload) };
        for piece in 0..block.len().div_ceil(PIECE) {
            core.await_peer(*src, block.written(), |_| block.has(piece), call)?;
            write(t, piece * PIECE, block.piece(piece))?;
        }
        Ok(())
    }
}

impl Pending for Receive {
    fn wait(self: Box<Self>) -> Result<()> {
        self.complete()
    }

    fn detach(self: Box<Self>) {
        // The caller gave up the result, so there is nobody to tell of a failure; the group's next wait meets it.
        let receiver = std::thread::Builder::new().name(format!("comm-recv-{}", self.core.name));
        let _ = receiver.spawn(move || drop(self.complete()));
    }
}

/// Copies `bytes` into `t`, starting `offset` bytes into it.
pub(crate) fn write(t: &Tensor, offset: usize, bytes: &[u8]) -> Result<()> {
    Ok(with_bytes_mut(t, "receive", |all| match all.get_mut(offset..offset + bytes.len()) {
        Some(part) => {
            part.copy_from_slice(bytes);
            Ok(())
        }
        None => Err(kernels::Error::shape("receive", "more bytes than the tensor holds")),
    })?)
}

/// Bytes of an element.
pub(crate) fn width(dtype: DType) -> usize {
    dtype.size_in_bytes()
}

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a, continued from `hash`.
fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}
