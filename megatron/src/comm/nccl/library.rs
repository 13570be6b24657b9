//! NCCL's communicators, in non-blocking mode: a call returns at once, and whether it went well is
//! asked for.
//!
//! Library and driver are called through `cudarc`'s lowest level: its safe one has neither splits
//! nor aborts nor asynchronous errors.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use candle_core::DType;
use cudarc::driver::{CudaContext, CudaStream};
use cudarc::nccl::sys;
use kernels::tensor::gpu::DevicePointer;

use crate::Error;
use crate::comm::ReduceOp;
use crate::comm::inbox::lock;

/// What ranks that form a communicator must agree on.
pub const ID_BYTES: usize = 128;

/// `ncclConfig_t` as it was in NCCL 2.18, which every later version takes.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    fn non_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_801,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// Why a call did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    /// The communicator was aborted before; why, whoever aborted it knows.
    #[error("NCCL's communicator was aborted")]
    Aborted,
    /// What NCCL says where a peer is gone, among other causes.
    #[error("NCCL: {0}")]
    Remote(String),
    /// Anything else that NCCL or the driver says.
    #[error("{0}")]
    Here(String),
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        Self::comm(failed.to_string())
    }
}

/// Result of a call of a communicator's.
pub type Result<T> = std::result::Result<T, Failed>;

fn text(result: sys::ncclResult_t) -> String {
    // SAFETY: NCCL returns a static string for every result.
    let text = unsafe { CStr::from_ptr(sys::ncclGetErrorString(result)) };
    text.to_string_lossy().into_owned()
}

/// NCCL's version, e.g. 22703 for 2.27.3.
///
/// # Errors
/// If there is no NCCL on this machine.
pub fn version() -> Result<i32> {
    if !kernels::tensor::gpu::missing_libraries(&["nccl"]).is_empty() {
        return Err(Failed::Here(
            "NCCL (libnccl.so.2) not found; set LD_LIBRARY_PATH to its folder".to_string(),
        ));
    }
    let mut version = 0;
    // SAFETY: one result.
    match unsafe { sys::ncclGetVersion(&mut version) } {
        sys::ncclResult_t::ncclSuccess => Ok(version),
        result => Err(Failed::Here(format!("NCCL: {}", text(result)))),
    }
}

/// A fresh identity for a communicator.
///
/// # Errors
/// What NCCL says.
pub fn unique_id() -> Result<[u8; ID_BYTES]> {
    let mut id = sys::ncclUniqueId { internal: [0; ID_BYTES] };
    // SAFETY: one result.
    match unsafe { sys::ncclGetUniqueId(&mut id) } {
        sys::ncclResult_t::ncclSuccess => Ok(id.internal.map(|c| c as u8)),
        result => Err(Failed::Here(format!("NCCL cannot create a unique id: {}", text(result)))),
    }
}

/// A rank's communicator; none once it was aborted.
pub struct Comm {
    /// Every call of NCCL's with the handle is made under the lock, and whoever ends the
    /// communicator takes the handle out first: an abort frees what it points to. Calls return at
    /// once (non-blocking mode), and an abort waits for one that does not for a moment only.
    raw: Mutex<Option<sys::ncclComm_t>>,
    context: Arc<CudaContext>,
}

// SAFETY: a communicator belongs to no thread; calls are made one at a time, under the lock.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// A part of a communicator in the making.
#[must_use]
pub struct Splitting {
    place: *mut sys::ncclComm_t,
    joins: bool,
}

impl Splitting {
    /// The part of `parent`, which is ready again; none for a rank without a color.
    pub fn part(self, parent: &Comm) -> Option<Comm> {
        // SAFETY: leaked by `split`; NCCL is done with it.
        let comm = *unsafe { Box::from_raw(self.place) };
        (self.joins && !comm.is_null())
            .then(|| Comm { raw: Mutex::new(Some(comm)), context: parent.context.clone() })
    }
}

impl Comm {
    /// Begins to join the communicator `id` as one of `size` ranks; ready once [`Comm::is_ready`]
    /// says so.
    ///
    /// # Errors
    /// What NCCL says at once.
    pub fn join(
        context: &Arc<CudaContext>,
        id: &[u8; ID_BYTES],
        size: usize,
        rank: usize,
    ) -> Result<Self> {
        bind(context)?;
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        let mut config = Config::non_blocking();
        let mut comm = std::ptr::null_mut();
        // SAFETY: the configuration is laid out as NCCL's of the version that it names, and is
        // copied by the call.
        let result = unsafe {
            let config = std::ptr::from_mut(&mut config).cast();
            sys::ncclCommInitRankConfig(&mut comm, size as c_int, id, rank as c_int, config)
        };
        accepted(result, comm)?;
        Ok(Self { raw: Mutex::new(Some(comm)), context: context.clone() })
    }

    /// Begins to split it, as all its ranks must; once [`Comm::is_ready`] says that this is done,
    /// [`Splitting::part`] has the result.
    ///
    /// # Errors
    /// What NCCL says at once.
    pub fn split(&self, color: Option<usize>, key: usize) -> Result<Splitting> {
        let mut config = Config::non_blocking();
        // NCCL's own thread writes it before the parent is ready, or never: so it stays if that
        // does not come to pass.
        let comm = Box::leak(Box::new(std::ptr::null_mut()));
        let place: *mut sys::ncclComm_t = comm;
        let color_or_none = color.map_or(-1, |color| color as c_int); // NCCL_SPLIT_NOCOLOR
        self.call(|raw| {
            // SAFETY: a live communicator; the configuration as above; the result has a place that
            // stays.
            unsafe {
                let config = std::ptr::from_mut(&mut config).cast();
                sys::ncclCommSplit(raw, color_or_none, key as c_int, place, config)
            }
        })?;
        Ok(Splitting { place, joins: color.is_some() })
    }

    /// Whether everything that was asked for is done or queued.
    ///
    /// # Errors
    /// If NCCL found an error since, its own or a peer's.
    pub fn is_ready(&self) -> Result<bool> {
        is_ready(lock(&self.raw).as_ref())
    }

    /// As [`Comm::is_ready`], for whoever must not wait: while another thread is in a call there is
    /// nothing to tell.
    ///
    /// # Errors
    /// As [`Comm::is_ready`].
    pub fn look(&self) -> Result<()> {
        match self.raw.try_lock() {
            Ok(raw) => is_ready(raw.as_ref()).map(drop),
            Err(TryLockError::Poisoned(raw)) => is_ready(raw.into_inner().as_ref()).map(drop),
            Err(TryLockError::WouldBlock) => Ok(()),
        }
    }

    /// Makes one call, which NCCL finishes by itself if it says that it is in progress.
    fn call(&self, f: impl FnOnce(sys::ncclComm_t) -> sys::ncclResult_t) -> Result<()> {
        let raw = lock(&self.raw);
        let comm = raw.ok_or(Failed::Aborted)?;
        bind(&self.context)?;
        accepted(f(comm), comm)
    }

    /// Queues all of `operations` as one: none waits for another.
    ///
    /// # Errors
    /// What NCCL says at once.
    pub fn queue(&self, stream: &CudaStream, operations: &[Operation]) -> Result<()> {
        self.call(|comm| {
            // SAFETY: a live communicator and stream. The addresses are of tensors that whoever
            // queues keeps until the stream is through.
            unsafe {
                let begun = sys::ncclGroupStart();
                if begun != sys::ncclResult_t::ncclSuccess {
                    return begun;
                }
                let mut first_error = None;
                for operation in operations {
                    match operation.queue(comm, stream) {
                        sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress => {}
                        result => _ = first_error.get_or_insert(result),
                    }
                }
                let ended = sys::ncclGroupEnd();
                first_error.unwrap_or(ended)
            }
        })
    }

    /// Ends what is in flight, here at once and on peers soon. No call succeeds after it.
    pub fn abort(&self) {
        abort(&[self]);
    }

    /// The handle, which nobody else finds any more, unless a call does not return before
    /// `deadline`. The lock is not held any longer: ending a communicator may take long, and others
    /// want to know that it is over.
    fn take_until(
        &self,
        deadline: Instant,
    ) -> std::result::Result<Option<sys::ncclComm_t>, StillCalled> {
        loop {
            match self.raw.try_lock() {
                Ok(mut raw) => return Ok(raw.take()),
                Err(TryLockError::Poisoned(raw)) => return Ok(raw.into_inner().take()),
                Err(TryLockError::WouldBlock) if Instant::now() > deadline => {
                    return Err(StillCalled);
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(100)),
            }
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // One that still connects, or has failed, can only be aborted.
        if !self.is_ready().unwrap_or(false) {
            return self.abort();
        }
        let raw = lock(&self.raw).take();
        if let Some(comm) = raw {
            let _ = bind(&self.context);
            // SAFETY: a live communicator, which nobody else finds. Whoever drops it has waited for
            // its stream.
            let _ = unsafe { sys::ncclCommDestroy(comm) };
        }
    }
}

/// A communicator that is still in a call of NCCL's.
struct StillCalled;

/// From here on (2.22) NCCL aborts the communicators of a group together; before, each call in a
/// group aborts at once.
const ABORTS_GROUPS: i32 = 22_200;
/// How long calls under way may take before communicators are aborted without those that they are
/// of.
const CALLS_END: Duration = Duration::from_secs(1);
/// How long communicators may take to end before the caller goes on without them.
const ABORTS_END: Duration = Duration::from_secs(10);

/// A communicator for the thread that aborts it.
struct Condemned {
    raw: sys::ncclComm_t,
    context: Arc<CudaContext>,
}

// SAFETY: it was taken: no other thread calls it.
unsafe impl Send for Condemned {}

impl Condemned {
    /// Inside of a group this only notes it down, so it needs its context until the group ends.
    fn abort(&self) {
        let _ = bind(&self.context);
        // SAFETY: a live communicator, which nobody else finds.
        let _ = unsafe { sys::ncclCommAbort(self.raw) };
    }
}

/// Ends what is in flight on all of `comms`, as [`Comm::abort`] does for one.
///
/// Not one after the other: an abort has the communicator's own operations end, then frees memory,
/// which may wait for whatever runs on the device, so for an operation of the next communicator
/// that hangs (<https://github.com/NVIDIA/nccl/issues/1013>).
pub fn abort(comms: &[&Comm]) {
    let mut left = comms.to_vec();
    // Calls that do not return may wait for another communicator, so what they are of is tried
    // again once the others have ended.
    for _ in 0..2 {
        let deadline = Instant::now() + CALLS_END;
        let mut condemned = Vec::new();
        left.retain(|comm| match comm.take_until(deadline) {
            Ok(raw) => {
                condemned.extend(raw.map(|raw| Condemned { raw, context: comm.context.clone() }));
                false
            }
            Err(StillCalled) => true,
        });
        abort_together(condemned);
    }
}

/// Returns when all are aborted, or it takes too long.
fn abort_together(condemned: Vec<Condemned>) {
    if condemned.is_empty() {
        return;
    }
    let together = version().is_ok_and(|version| version >= ABORTS_GROUPS);
    let parts: Vec<Vec<Condemned>> = if together {
        vec![condemned]
    } else {
        condemned.into_iter().map(|one| vec![one]).collect()
    };
    let (ended, wait) = channel::<()>();
    for part in parts {
        let ended = ended.clone();
        let abort = move || {
            abort_part(part);
            drop(ended);
        };
        // By another thread, since whoever reports the failure must not hang with it.
        let _ = std::thread::Builder::new().name("nccl-abort".to_string()).spawn(abort);
    }
    drop(ended);
    // Ends when nobody is left that could send.
    let _ = wait.recv_timeout(ABORTS_END);
}

/// Aborts some by this thread, as a group of NCCL's: all are told to end before one waits for what
/// it has to.
fn abort_part(part: Vec<Condemned>) {
    if let [one] = &part[..] {
        return one.abort();
    }
    // SAFETY: groups are a thread's own.
    let _ = unsafe { sys::ncclGroupStart() };
    part.iter().for_each(Condemned::abort);
    // SAFETY: as above.
    let _ = unsafe { sys::ncclGroupEnd() };
}

/// Makes `context` the calling thread's. cudarc's own way (`bind_to_thread`) also takes out the
/// error that a tensor's end has left for whoever asks next, which would be lost on a thread that
/// has nothing to do with it.
pub fn bind(context: &CudaContext) -> Result<()> {
    // SAFETY: the context lives; a context is one of any thread's.
    unsafe { cudarc::driver::result::ctx::set_current(context.cu_ctx()) }
        .map_err(|e| Failed::Here(format!("CUDA: {e}")))
}

/// Whether everything that was asked of a communicator is done or queued. Called under its lock.
fn is_ready(comm: Option<&sys::ncclComm_t>) -> Result<bool> {
    let comm = *comm.ok_or(Failed::Aborted)?;
    let mut state = sys::ncclResult_t::ncclSuccess;
    // SAFETY: a live communicator; one result.
    let result = unsafe { sys::ncclCommGetAsyncError(comm, &mut state) };
    for result in [result, state] {
        match result {
            sys::ncclResult_t::ncclSuccess => {}
            sys::ncclResult_t::ncclInProgress => return Ok(false),
            result => return Err(explained(result, comm)),
        }
    }
    Ok(true)
}

fn accepted(result: sys::ncclResult_t, comm: sys::ncclComm_t) -> Result<()> {
    match result {
        sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress => Ok(()),
        result => Err(explained(result, comm)),
    }
}

fn explained(result: sys::ncclResult_t, comm: sys::ncclComm_t) -> Failed {
    // SAFETY: takes any communicator, null too; the text is copied before the next call.
    let detail = unsafe {
        let last = sys::ncclGetLastError(comm);
        if last.is_null() {
            String::new()
        } else {
            CStr::from_ptr(last).to_string_lossy().trim().to_string()
        }
    };
    let detail = if detail.is_empty() { detail } else { format!(" ({detail})") };
    let said = format!("{}{detail}", text(result));
    match result {
        // Which of them it is depends on where a connection broke.
        sys::ncclResult_t::ncclRemoteError
        | sys::ncclResult_t::ncclSystemError
        | sys::ncclResult_t::ncclInternalError => Failed::Remote(said),
        _ => Failed::Here(format!("NCCL: {said}")),
    }
}

/// Something to queue. Counts are of elements.
#[derive(Clone, Copy)]
pub enum Operation {
    AllReduce {
        at: DevicePointer,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    },
    AllGather {
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DType,
    },
    ReduceScatter {
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    },
    Broadcast {
        at: DevicePointer,
        count: usize,
        dtype: DType,
        root: usize,
    },
    Reduce {
        at: DevicePointer,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        root: usize,
    },
    Send {
        from: DevicePointer,
        count: usize,
        dtype: DType,
        peer: usize,
    },
    Recv {
        to: DevicePointer,
        count: usize,
        dtype: DType,
        peer: usize,
    },
}

fn data_type(dtype: DType) -> sys::ncclDataType_t {
    use sys::ncclDataType_t as T;
    match dtype {
        DType::BF16 => T::ncclBfloat16,
        DType::F16 => T::ncclFloat16,
        DType::F32 => T::ncclFloat32,
        DType::F64 => T::ncclFloat64,
        DType::I64 => T::ncclInt64,
        DType::U32 => T::ncclUint32,
        // What groups send was checked before: this is u8.
        _ => T::ncclUint8,
    }
}

fn reduction(op: ReduceOp) -> sys::ncclRedOp_t {
    match op {
        ReduceOp::Sum => sys::ncclRedOp_t::ncclSum,
        ReduceOp::Max => sys::ncclRedOp_t::ncclMax,
        ReduceOp::Min => sys::ncclRedOp_t::ncclMin,
    }
}

impl Operation {
    /// # Safety
    /// The communicator and stream live; the addresses hold as many elements until the stream is
    /// through.
    unsafe fn queue(self, comm: sys::ncclComm_t, stream: &CudaStream) -> sys::ncclResult_t {
        let stream = stream.cu_stream().cast();
        let read = |at: DevicePointer| at.address() as *const c_void;
        let write = |at: DevicePointer| at.address() as *mut c_void;
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::AllReduce { at, count, dtype, op } => sys::ncclAllReduce(
                    read(at),
                    write(at),
                    count,
                    data_type(dtype),
                    reduction(op),
                    comm,
                    stream,
                ),
                Self::AllGather { from, to, count, dtype } => {
                    sys::ncclAllGather(read(from), write(to), count, data_type(dtype), comm, stream)
                }
                Self::ReduceScatter { from, to, count, dtype, op } => sys::ncclReduceScatter(
                    read(from),
                    write(to),
                    count,
                    data_type(dtype),
                    reduction(op),
                    comm,
                    stream,
                ),
                Self::Broadcast { at, count, dtype, root } => sys::ncclBroadcast(
                    read(at),
                    write(at),
                    count,
                    data_type(dtype),
                    root as c_int,
                    comm,
                    stream,
                ),
                Self::Reduce { at, count, dtype, op, root } => {
                    let (root, op) = (root as c_int, reduction(op));
                    sys::ncclReduce(
                        read(at),
                        write(at),
                        count,
                        data_type(dtype),
                        op,
                        root,
                        comm,
                        stream,
                    )
                }
                Self::Send { from, count, dtype, peer } => {
                    sys::ncclSend(read(from), count, data_type(dtype), peer as c_int, comm, stream)
                }
                Self::Recv { to, count, dtype, peer } => {
                    sys::ncclRecv(write(to), count, data_type(dtype), peer as c_int, comm, stream)
                }
            }
        }
    }
}
