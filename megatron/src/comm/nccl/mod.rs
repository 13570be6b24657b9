//! Groups that move GPU tensors by NCCL, and everything else through a CPU group of the same ranks.
//!
//! An operation on a GPU tensor is queued on the group's own stream, after an event of the tensor's
//! stream. Waiting for the operation makes the tensor's stream wait for an event of the group's
//! stream, so the host never waits. Ranges of flat buffers are used in place.
//!
//! The CPU group carries small values on the host (counts, verdicts, f64 sums), NCCL's identities,
//! and reports of lost ranks. A [`watchdog`] polls NCCL's errors and the age of queued operations.
//! A failure that it finds becomes the CPU group's verdict, which every rank reports. Conversely, a
//! verdict of the CPU group aborts NCCL's communicators, so that no kernel waits for a lost rank.
//!
//! NCCL sums in its own order, which is the same in every run of a layout, and rounds 16-bit sums
//! at every step.

mod core;
mod lane;
mod library;
mod watchdog;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use cudarc::driver::{CudaContext, CudaStream};
use kernels::tensor::gpu::{DevicePointer, Gpu};

use self::core::Core;
use self::lane::Lane;
use self::library::{Comm, Failed, ID_BYTES, Operation};
use self::watchdog::{Watchdog, heard};
use super::communicator::{Communicator, Group, ReduceOp, Work};
use super::inbox::lock;
use super::message::is_sendable;
use super::operands;
use crate::{Error, Result};

/// NCCL's version, e.g. 22703 for 2.27.3.
///
/// # Errors
/// If there is no NCCL on this machine.
pub fn version() -> Result<i32> {
    Ok(library::version()?)
}

/// A rank's membership in a group over NCCL and the CPU's transport.
pub struct NcclGroup {
    host: Group,
    /// `None` in a group of one rank.
    core: Option<Arc<Core>>,
    context: Arc<CudaContext>,
    /// Keyed by sender, receiver and tag. Lanes end in this order, which is the same on all ranks,
    /// because ending a lane may wait for its other rank to do the same.
    lanes: Mutex<BTreeMap<(usize, usize, u32), Arc<Lane>>>,
}

/// The first operation of a group: a sum over all ranks.
fn first_sum(at: DevicePointer) -> Operation {
    Operation::AllReduce { at, count: 1, dtype: DType::F32, op: ReduceOp::Sum }
}

/// Waits until all ranks have joined `comm`.
fn joined(comm: &Comm, host: &Group, timeout: Duration) -> Result<()> {
    let start = Instant::now();
    let said = |failed: Failed| match failed {
        // The watchdog does not watch this communicator yet.
        Failed::Remote(_) => heard(host).err().unwrap_or_else(|| failed.into()),
        _ => failed.into(),
    };
    while !comm.is_ready().map_err(said)? {
        host.health()?;
        if start.elapsed() > timeout {
            comm.abort();
            return Err(Error::comm(format!(
                "NCCL did not connect group {} within {timeout:?}",
                host.name()
            )));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Creates a communicator of all ranks of `host`. The first rank creates the identity.
fn join(host: &Group, context: &Arc<CudaContext>, timeout: Duration) -> Result<Comm> {
    let mine = if host.rank() == 0 { library::unique_id().map(Vec::from) } else { Ok(Vec::new()) };
    // A rank that fails to create one sends nothing, so that no rank waits for it.
    let ids = host.all_gather_bytes(mine.as_deref().unwrap_or_default())?;
    mine?;
    let id: [u8; ID_BYTES] = ids[0].as_slice().try_into().map_err(|_| {
        Error::comm(format!("NCCL could not be started by rank {}", host.ranks()[0]))
    })?;
    let comm = Comm::join(context, &id, host.size(), host.rank())?;
    joined(&comm, host, timeout)?;
    Ok(comm)
}

/// Adds NCCL for tensors on `device` to the world of `host`.
///
/// # Errors
/// If a rank has no NCCL, or the ranks cannot be connected. Then every rank gets an error.
pub fn world(host: Group, device: &Device, timeout: Duration) -> Result<Group> {
    let cuda = device.as_cuda_device()?;
    let context = cuda.cuda_stream().context().clone();
    let ready = version().map(|_| ()).map_err(|e| e.to_string());
    for (rank, said) in
        host.all_gather_bytes(ready.err().unwrap_or_default().as_bytes())?.iter().enumerate()
    {
        if !said.is_empty() {
            return Err(Error::comm(format!("rank {rank}: {}", crate::text::printable(said))));
        }
    }
    let connect = || {
        Gpu::on(device, "NCCL")?.load_kernels()?;
        let watchdog = Watchdog::start(host.clone(), timeout)?;
        let comm = join(&host, &context, timeout)?;
        Core::connected(host.clone(), comm, &context, &watchdog, first_sum)
    };
    // NCCL does not report a rank that failed before it joined.
    let tell = |e: &Error| host.abort(&format!("it cannot use its GPU with other ranks: {e}"));
    let core = if host.size() > 1 { Some(connect().inspect_err(tell)?) } else { None };
    Ok(Arc::new(NcclGroup { host, core, context, lanes: Mutex::default() }))
}

/// A tensor for NCCL: its address, and the stream that computes it.
struct Used {
    at: DevicePointer,
    compute: Arc<CudaStream>,
}

impl NcclGroup {
    fn used(&self, t: &Tensor, what: &'static str) -> Result<Used> {
        if !is_sendable(t.dtype()) {
            return Err(Error::comm(format!(
                "{}: dtype {} cannot be sent",
                self.on(what),
                t.dtype().as_str()
            )));
        }
        let gpu = Gpu::of(t, what)?;
        let at = gpu.inplace(t, t.dtype(), what, "tensor")?;
        Ok(Used { at, compute: gpu.stream().clone() })
    }

    /// Whether NCCL must run an operation on these tensors. A mix of CPU and GPU tensors is an
    /// error.
    fn on_gpu(&self, what: &str, tensors: &[&Tensor]) -> Result<bool> {
        let on_gpu = tensors.iter().filter(|t| t.device().is_cuda()).count();
        if on_gpu != 0 && on_gpu != tensors.len() {
            return Err(Error::comm(format!(
                "{}: one tensor is on a GPU, another on the CPU",
                self.on(what)
            )));
        }
        Ok(on_gpu > 0)
    }

    /// The operation's name in errors, e.g. `all_gather on group tp`.
    fn on(&self, what: &str) -> String {
        format!("{what} on group {}", self.host.name())
    }

    fn check_parts(&self, what: &str, small: &Tensor, large: &Tensor) -> Result<()> {
        operands::check_parts(|| self.on(what), self.host.size(), small, large)
    }

    fn check_rank(&self, what: &str, rank: usize) -> Result<()> {
        operands::check_rank(|| self.on(what), self.host.size(), rank)
    }

    /// A collective in place.
    fn in_place(
        &self,
        what: &'static str,
        t: &Tensor,
        operation: impl FnOnce(DevicePointer, usize) -> Operation,
    ) -> Result<Work> {
        let used = self.used(t, what)?;
        let Some(core) = &self.core else { return Ok(Work::done()) };
        core.queue(what, &used.compute, vec![t.clone()], &[operation(used.at, t.elem_count())])
    }

    /// A collective from one tensor to another.
    fn between(
        &self,
        what: &'static str,
        input: &Tensor,
        output: &Tensor,
        operations: impl FnOnce(DevicePointer, DevicePointer) -> Vec<Operation>,
    ) -> Result<Work> {
        let (from, to) = (self.used(input, what)?, self.used(output, what)?);
        let Some(core) = &self.core else {
            if from.at != to.at {
                kernels::ops::reduce::copy(output, input)?;
            }
            return Ok(Work::done());
        };
        core.queue(
            what,
            &from.compute,
            vec![input.clone(), output.clone()],
            &operations(from.at, to.at),
        )
    }

    fn lane(&self, direction: lane::Direction, peer: usize, tag: u32) -> Result<Option<Arc<Lane>>> {
        let Some(core) = &self.core else { return Ok(None) };
        let (sender, receiver) = match direction {
            lane::Direction::To => (self.rank(), peer),
            lane::Direction::From => (peer, self.rank()),
        };
        let mut lanes = lock(&self.lanes);
        if let Some(lane) = lanes.get(&(sender, receiver, tag)) {
            return Ok(Some(lane.clone()));
        }
        let lane = Arc::new(Lane::start(core, &self.context, direction, peer, tag)?);
        lanes.insert((sender, receiver, tag), lane.clone());
        Ok(Some(lane))
    }
}

impl Communicator for NcclGroup {
    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn size(&self) -> usize {
        self.host.size()
    }

    fn name(&self) -> &str {
        self.host.name()
    }

    fn ranks(&self) -> &[usize] {
        self.host.ranks()
    }

    fn overlaps(&self) -> bool {
        self.host.overlaps()
    }

    fn all_reduce(&self, t: &Tensor, op: ReduceOp) -> Result<Work> {
        if !self.on_gpu("all_reduce", &[t])? {
            return self.host.all_reduce(t, op);
        }
        let dtype = t.dtype();
        self.in_place("all_reduce", t, |at, count| Operation::AllReduce { at, count, dtype, op })
    }

    fn all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Work> {
        if !self.on_gpu("all_gather", &[input, output])? {
            return self.host.all_gather(input, output);
        }
        self.check_parts("all_gather", input, output)?;
        let (count, dtype) = (input.elem_count(), input.dtype());
        self.between("all_gather", input, output, |from, to| {
            vec![Operation::AllGather { from, to, count, dtype }]
        })
    }

    fn reduce_scatter(&self, input: &Tensor, output: &Tensor, op: ReduceOp) -> Result<Work> {
        if !self.on_gpu("reduce_scatter", &[input, output])? {
            return self.host.reduce_scatter(input, output, op);
        }
        self.check_parts("reduce_scatter", output, input)?;
        let (count, dtype) = (output.elem_count(), output.dtype());
        self.between("reduce_scatter", input, output, |from, to| {
            vec![Operation::ReduceScatter { from, to, count, dtype, op }]
        })
    }

    fn broadcast(&self, t: &Tensor, root: usize) -> Result<Work> {
        if !self.on_gpu("broadcast", &[t])? {
            return self.host.broadcast(t, root);
        }
        self.check_rank("broadcast", root)?;
        let dtype = t.dtype();
        self.in_place("broadcast", t, |at, count| Operation::Broadcast { at, count, dtype, root })
    }

    fn reduce(&self, t: &Tensor, root: usize, op: ReduceOp) -> Result<Work> {
        if !self.on_gpu("reduce", &[t])? {
            return self.host.reduce(t, root, op);
        }
        self.check_rank("reduce", root)?;
        let dtype = t.dtype();
        self.in_place("reduce", t, |at, count| Operation::Reduce { at, count, dtype, op, root })
    }

    fn gather(&self, input: &Tensor, output: Option<&Tensor>, root: usize) -> Result<Work> {
        let tensors: Vec<&Tensor> = std::iter::once(input).chain(output).collect();
        if !self.on_gpu("gather", &tensors)? {
            return self.host.gather(input, output, root);
        }
        self.check_rank("gather", root)?;
        let (count, dtype) = (input.elem_count(), input.dtype());
        let send = |from| Operation::Send { from, count, dtype, peer: root };
        match (output, root == self.rank()) {
            (None, false) => self.in_place("gather", input, |from, _| send(from)),
            (Some(output), true) => {
                self.check_parts("gather", input, output)?;
                let bytes = count * dtype.size_in_bytes();
                self.between("gather", input, output, |from, to| {
                    let parts = (0..self.size()).map(|peer| (peer, to.offset(peer * bytes)));
                    let receives =
                        parts.map(|(peer, to)| Operation::Recv { to, count, dtype, peer });
                    std::iter::once(send(from)).chain(receives).collect()
                })
            }
            _ => Err(Error::comm(format!(
                "{}: only the root, rank {root}, passes the whole tensor",
                self.on("gather")
            ))),
        }
    }

    fn scatter(&self, input: Option<&Tensor>, output: &Tensor, root: usize) -> Result<Work> {
        let tensors: Vec<&Tensor> = std::iter::once(output).chain(input).collect();
        if !self.on_gpu("scatter", &tensors)? {
            return self.host.scatter(input, output, root);
        }
        self.check_rank("scatter", root)?;
        let (count, dtype) = (output.elem_count(), output.dtype());
        let receive = |to| Operation::Recv { to, count, dtype, peer: root };
        match (input, root == self.rank()) {
            (None, false) => self.in_place("scatter", output, |to, _| receive(to)),
            (Some(input), true) => {
                self.check_parts("scatter", output, input)?;
                let bytes = count * dtype.size_in_bytes();
                self.between("scatter", input, output, |from, to| {
                    let parts = (0..self.size()).map(|peer| (peer, from.offset(peer * bytes)));
                    let sends =
                        parts.map(|(peer, from)| Operation::Send { from, count, dtype, peer });
                    std::iter::once(receive(to)).chain(sends).collect()
                })
            }
            _ => Err(Error::comm(format!(
                "{}: only the root, rank {root}, passes the whole tensor",
                self.on("scatter")
            ))),
        }
    }

    fn all_to_all(&self, input: &Tensor, output: &Tensor) -> Result<Work> {
        if !self.on_gpu("all_to_all", &[input, output])? {
            return self.host.all_to_all(input, output);
        }
        let (all, dtype, size) = (input.elem_count(), input.dtype(), self.size());
        operands::check_exchange(|| self.on("all_to_all"), size, input, output)?;
        let (count, bytes) = (all / size, all / size * dtype.size_in_bytes());
        self.between("all_to_all", input, output, |from, to| {
            let both = |peer: usize| {
                let (from, to) = (from.offset(peer * bytes), to.offset(peer * bytes));
                [
                    Operation::Send { from, count, dtype, peer },
                    Operation::Recv { to, count, dtype, peer },
                ]
            };
            (0..size).flat_map(both).collect()
        })
    }

    fn send(&self, t: &Tensor, dst: usize, tag: u32) -> Result<Work> {
        if !self.on_gpu("send", &[t])? || dst == self.rank() {
            return self.host.send(t, dst, tag);
        }
        self.check_rank("send", dst)?;
        match self.lane(lane::Direction::To, dst, tag)? {
            Some(lane) => lane.queue(t, self.used(t, "send")?),
            None => self.host.send(t, dst, tag),
        }
    }

    fn recv(&self, t: &Tensor, src: usize, tag: u32) -> Result<Work> {
        if !self.on_gpu("recv", &[t])? || src == self.rank() {
            return self.host.recv(t, src, tag);
        }
        self.check_rank("recv", src)?;
        match self.lane(lane::Direction::From, src, tag)? {
            Some(lane) => lane.queue(t, self.used(t, "recv")?),
            None => self.host.recv(t, src, tag),
        }
    }

    fn connect(&self, sends: &[(usize, u32)], receives: &[(usize, u32)]) -> Result<()> {
        let lanes = |direction, peers: &[(usize, u32)]| -> Result<Vec<Option<Arc<Lane>>>> {
            let others = peers.iter().filter(|(peer, _)| *peer != self.rank());
            others.map(|&(peer, tag)| self.lane(direction, peer, tag)).collect()
        };
        let (to, from) =
            (lanes(lane::Direction::To, sends)?, lanes(lane::Direction::From, receives)?);
        // Each lane connects on its own thread, so the order on one rank does not matter to others.
        to.iter().chain(&from).flatten().try_for_each(|lane| lane.connected())
    }

    fn barrier(&self) -> Result<()> {
        self.host.barrier()
    }

    fn split(&self, name: &str, color: Option<usize>, key: usize) -> Result<Option<Group>> {
        let host = self.host.split(name, color, key)?;
        let Some(core) = &self.core else {
            let (context, lanes) = (self.context.clone(), Mutex::default());
            return Ok(
                host.map(|host| -> Group { Arc::new(Self { host, core: None, context, lanes }) })
            );
        };
        core.check("split")?;
        // All ranks of the parent take part, including those without a color. The ranks of a part
        // have the same order in both groups.
        let splitting =
            core.comm.split(color, key).map_err(|failed| core.cause("split", failed))?;
        core.settle("split")?;
        let comm = splitting.part(&core.comm);
        let (Some(host), Some(comm)) = (host, comm) else { return Ok(None) };
        joined(&comm, &host, core.watchdog.timeout())?;
        let part = if host.size() > 1 {
            Some(Core::connected(host.clone(), comm, &self.context, &core.watchdog, first_sum)?)
        } else {
            None
        };
        Ok(Some(Arc::new(Self {
            host,
            core: part,
            context: self.context.clone(),
            lanes: Mutex::default(),
        })))
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.host.all_gather_bytes(bytes)
    }

    fn abort(&self, reason: &str) {
        self.host.abort(reason);
        if let Some(core) = &self.core {
            core.watchdog.end();
        }
    }

    fn leave(&self) {
        self.host.leave();
    }

    fn health(&self) -> Result<()> {
        match self.core.as_ref().and_then(|core| core.watchdog.found()) {
            Some(found) => Err(Error::comm(found)),
            None => self.host.health(),
        }
    }
}
