//! NCCL's communicators, in non-blocking mode: a call returns at once, and its result is queried
//! later.
//!
//! NCCL and the driver are called through the lowest level of `cudarc`, because its safe level
//! supports neither splits nor aborts nor asynchronous errors.

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

/// Bytes of the identity that the ranks of a communicator share.
pub const ID_BYTES: usize = 128;

/// `ncclConfig_t` of NCCL 2.18, which every later version accepts.
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

/// The reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    /// The communicator was aborted before. The aborting code knows the reason.
    #[error("NCCL's communicator was aborted")]
    Aborted,
    /// An NCCL error whose causes include a lost peer.
    #[error("NCCL: {0}")]
    Remote(String),
    /// Any other error of NCCL or the driver.
    #[error("{0}")]
    Here(String),
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        Self::comm(failed.to_string())
    }
}

/// Result of a call on a communicator.
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

/// Creates a new identity for a communicator.
///
/// # Errors
/// The error that NCCL reports.
pub fn unique_id() -> Result<[u8; ID_BYTES]> {
    let mut id = sys::ncclUniqueId { internal: [0; ID_BYTES] };
    // SAFETY: one result.
    match unsafe { sys::ncclGetUniqueId(&mut id) } {
        sys::ncclResult_t::ncclSuccess => Ok(id.internal.map(|c| c as u8)),
        result => Err(Failed::Here(format!("NCCL cannot create a unique id: {}", text(result)))),
    }
}

/// A rank's communicator; `None` inside once it was aborted.
pub struct Comm {
    /// Every NCCL call with the handle is made under the lock. Code that ends the communicator
    /// takes the handle out first, because an abort frees the memory behind it. Calls return at
    /// once (non-blocking mode); for one that does not, an abort waits only briefly.
    raw: Mutex<Option<sys::ncclComm_t>>,
    context: Arc<CudaContext>,
}

// SAFETY: a communicator is not bound to a thread, and calls are made one at a time, under the
// lock.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// A part of a communicator that is being created.
#[must_use]
pub struct Splitting {
    place: *mut sys::ncclComm_t,
    joins: bool,
}

impl Splitting {
    /// The part of `parent`, which must be ready again. `None` for a rank without a color.
    pub fn part(self, parent: &Comm) -> Option<Comm> {
        // SAFETY: leaked by `split`; NCCL no longer uses it.
        let comm = *unsafe { Box::from_raw(self.place) };
        (self.joins && !comm.is_null())
            .then(|| Comm { raw: Mutex::new(Some(comm)), context: parent.context.clone() })
    }
}

impl Comm {
    /// Begins to join the communicator `id` as one of `size` ranks. It is complete when
    /// [`Comm::is_ready`] returns true.
    ///
    /// # Errors
    /// The error that NCCL reports at once.
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
        // SAFETY: the configuration has the layout of the NCCL version that it names, and the call
        // copies it.
        let result = unsafe {
            let config = std::ptr::from_mut(&mut config).cast();
            sys::ncclCommInitRankConfig(&mut comm, size as c_int, id, rank as c_int, config)
        };
        accepted(result, comm)?;
        Ok(Self { raw: Mutex::new(Some(comm)), context: context.clone() })
    }

    /// Begins to split the communicator; all its ranks must call it. When [`Comm::is_ready`]
    /// returns true, [`Splitting::part`] has the result.
    ///
    /// # Errors
    /// The error that NCCL reports at once.
    pub fn split(&self, color: Option<usize>, key: usize) -> Result<Splitting> {
        let mut config = Config::non_blocking();
        // NCCL's own thread writes the result before the parent is ready, or never. The memory is
        // leaked in the second case.
        let comm = Box::leak(Box::new(std::ptr::null_mut()));
        let place: *mut sys::ncclComm_t = comm;
        let color_or_none = color.map_or(-1, |color| color as c_int); // NCCL_SPLIT_NOCOLOR
        self.call(|raw| {
            // SAFETY: a live communicator; the configuration as above; the result's memory stays
            // valid.
            unsafe {
                let config = std::ptr::from_mut(&mut config).cast();
                sys::ncclCommSplit(raw, color_or_none, key as c_int, place, config)
            }
        })?;
        Ok(Splitting { place, joins: color.is_some() })
    }

    /// Whether everything requested is done or queued.
    ///
    /// # Errors
    /// If NCCL found an error in the meantime, on this rank or a peer.
    pub fn is_ready(&self) -> Result<bool> {
        is_ready(lock(&self.raw).as_ref())
    }

    /// As [`Comm::is_ready`], for callers that must not wait. Reports no error while another thread
    /// is in a call.
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

    /// Makes one call. NCCL finishes it later if it reports that the call is in progress.
    fn call(&self, f: impl FnOnce(sys::ncclComm_t) -> sys::ncclResult_t) -> Result<()> {
        let raw = lock(&self.raw);
        let comm = raw.ok_or(Failed::Aborted)?;
        bind(&self.context)?;
        accepted(f(comm), comm)
    }

    /// Queues all of `operations` as one group, so that none waits for another.
    ///
    /// # Errors
    /// The error that NCCL reports at once.
    pub fn queue(&self, stream: &CudaStream, operations: &[Operation]) -> Result<()> {
        self.call(|comm| {
            // SAFETY: a live communicator and stream. The caller keeps the tensors at these
            // addresses until the stream has finished.
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

    /// Ends the operations in flight, on this rank at once and on peers soon. Later calls fail.
    pub fn abort(&self) {
        abort(&[self]);
    }

    /// Takes the handle out, so that no other thread can use it, unless a call does not return
    /// before `deadline`. The lock is then released: ending a communicator may take long, and other
    /// threads need to see that it is over.
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
        // A communicator that is still connecting, or has failed, can only be aborted.
        if !self.is_ready().unwrap_or(false) {
            return self.abort();
        }
        let raw = lock(&self.raw).take();
        if let Some(comm) = raw {
            let _ = bind(&self.context);
            // SAFETY: a live communicator that no other thread can use. The code that drops it has
            // waited for its stream.
            let _ = unsafe { sys::ncclCommDestroy(comm) };
        }
    }
}

/// The communicator is still in an NCCL call.
struct StillCalled;

/// From this version (2.22) on NCCL aborts the communicators of a group together. Earlier versions
/// abort at once on each call in a group.
const ABORTS_GROUPS: i32 = 22_200;
/// Time limit for calls in progress. Afterwards the other communicators are aborted first.
const CALLS_END: Duration = Duration::from_secs(1);
/// Time limit for aborts. Afterwards the caller continues without them.
const ABORTS_END: Duration = Duration::from_secs(10);

/// A communicator that is handed to the aborting thread.
struct Condemned {
    raw: sys::ncclComm_t,
    context: Arc<CudaContext>,
}

// SAFETY: the handle was taken out, so no other thread uses it.
unsafe impl Send for Condemned {}

impl Condemned {
    /// Inside a group this call is only recorded, so the context must live until the group ends.
    fn abort(&self) {
        let _ = bind(&self.context);
        // SAFETY: a live communicator that no other thread can use.
        let _ = unsafe { sys::ncclCommAbort(self.raw) };
    }
}

/// Ends the operations in flight on all of `comms`, as [`Comm::abort`] does for one.
///
/// They are not aborted one after the other: an abort first ends the communicator's own operations,
/// then frees memory. Freeing may wait for any work on the device, and thus for a hanging operation
/// of the next communicator (<https://github.com/NVIDIA/nccl/issues/1013>).
pub fn abort(comms: &[&Comm]) {
    let mut left = comms.to_vec();
    // A call that does not return may wait for another communicator, so its communicator is tried
    // again after the others have ended.
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

/// Returns when all are aborted, or after a time limit.
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
        // On another thread, because the thread that reports the failure must not hang with the
        // abort.
        let _ = std::thread::Builder::new().name("nccl-abort".to_string()).spawn(abort);
    }
    drop(ended);
    // Also ends when no sender is left.
    let _ = wait.recv_timeout(ABORTS_END);
}

/// Aborts communicators on this thread, as one NCCL group: all are told to end before the thread
/// waits for any of them.
fn abort_part(part: Vec<Condemned>) {
    if let [one] = &part[..] {
        return one.abort();
    }
    // SAFETY: a group belongs to the calling thread.
    let _ = unsafe { sys::ncclGroupStart() };
    part.iter().for_each(Condemned::abort);
    // SAFETY: as above.
    let _ = unsafe { sys::ncclGroupEnd() };
}

/// Makes `context` current on the calling thread. cudarc's own function (`bind_to_thread`) also
/// takes the stored error of a dropped tensor, which would then be lost on an unrelated thread.
pub fn bind(context: &CudaContext) -> Result<()> {
    // SAFETY: the context lives, and any thread may use it.
    unsafe { cudarc::driver::result::ctx::set_current(context.cu_ctx()) }
        .map_err(|e| Failed::Here(format!("CUDA: {e}")))
}

/// Whether everything requested of a communicator is done or queued. Call it under the
/// communicator's lock.
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
    // SAFETY: accepts any communicator, including null; the text is copied before the next call.
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
        // The error code depends on where a connection broke.
        sys::ncclResult_t::ncclRemoteError
        | sys::ncclResult_t::ncclSystemError
        | sys::ncclResult_t::ncclInternalError => Failed::Remote(said),
        _ => Failed::Here(format!("NCCL: {said}")),
    }
}

/// An operation to queue. Counts are in elements.
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
        // The dtypes of groups were checked before, so this is u8.
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
    /// The communicator and the stream must be live, and the addresses must hold the given number
    /// of elements until the stream has finished.
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
