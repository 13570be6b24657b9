//! GPUs through the CUDA driver API: launches, copies, and memory of candle's devices.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::{CudaStorageSlice, cudarc};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, DType, Device, Shape, Storage, Tensor};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DevicePtr, DriverError, result, sys};

use super::loaded::{Loaded, with_loaded};
use super::{Args, DevicePointer, Properties};
use crate::tensor::device_memory::Memory;
use crate::{Error, Result};

pub(super) fn runs_here(t: &Tensor) -> bool {
    computes(t.device())
}

pub(super) fn computes(device: &Device) -> bool {
    device.is_cuda()
}

/// Opens GPU `ordinal` with a stream of its own, and makes its memory pool keep freed memory.
///
/// candle's own `Device::new_cuda` works on "the thread's default stream", so tensors of two
/// threads would not be ordered. By default the pool returns everything to the system whenever
/// anything waits for the device. Code that uses tensors on other streams orders those uses itself,
/// so the events that cudarc would record at every use are disabled.
///
/// # Errors
/// Those of the driver.
pub fn open(ordinal: usize) -> Result<Device> {
    count()?;
    let device = Device::new_cuda_with_stream(ordinal)?;
    let cuda = device.as_cuda_device()?;
    // SAFETY: all kernels and copies of this crate and of candle are queued on the device's stream,
    // except copies to and from the host. Those and communication have streams of their own: they
    // wait for the device's stream, the device's stream or the host waits for them, and they keep
    // their tensors until then.
    unsafe { cuda.disable_event_tracking() };
    let keep = u64::MAX;
    let stream = cuda.cuda_stream();
    let context = stream.context();
    if context.has_async_alloc() {
        let failed = |e: DriverError| Error::gpu("memory pool", e.to_string());
        // SAFETY: the device exists; the attribute is a u64.
        unsafe {
            let pool = result::device::get_default_mem_pool(context.cu_device()).map_err(failed)?;
            result::mem_pool::set_attribute(
                pool,
                sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                std::ptr::from_ref(&keep).cast_mut().cast(),
            )
            .map_err(failed)?;
        }
    }
    Ok(device)
}

/// Number of GPUs.
///
/// # Errors
/// In one line, if there is no driver or a CUDA library is missing.
pub fn count() -> Result<usize> {
    let unavailable = |message: String| Error::NoGpu { message };
    use super::missing_libraries;
    if !missing_libraries(&["cuda"]).is_empty() {
        let message = "this machine has no NVIDIA driver (libcuda.so.1 not found); use --device cpu, or install the driver";
        return Err(unavailable(message.into()));
    }
    let count = match CudaContext::device_count() {
        Ok(count) => count.max(0) as usize,
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => 0,
        Err(error) => {
            return Err(unavailable(format!(
                "the driver says: {error}; use --device cpu, or mend it"
            )));
        }
    };
    let missing = missing_libraries(&["cublas", "cublasLt", "curand", "nvrtc", "cudart"]);
    if count > 0 && !missing.is_empty() {
        let list = missing.join(", ");
        let message = format!(
            "CUDA's {list} not found; set CUDA_HOME or LD_LIBRARY_PATH to a toolkit's, or use --device cpu"
        );
        return Err(unavailable(message));
    }
    Ok(count)
}

/// The elements of a contiguous tensor on the CPU; waits for the device.
pub fn to_host(t: &Tensor) -> Result<Tensor> {
    const OP: &str = "to_host";
    /// A copy of the elements from `at` on.
    fn copied<T: candle_core::WithDType>(
        gpu: &Gpu,
        at: DevicePointer,
        shape: &Shape,
    ) -> Result<Tensor> {
        let failed = |e: DriverError| Error::gpu(OP, e.to_string());
        let n = shape.elem_count();
        let mut values: Vec<T> = Vec::with_capacity(n);
        gpu.stream.context().bind_to_thread().map_err(failed)?;
        if n > 0 {
            // SAFETY: both sides have the same number of elements. The values are read only after
            // the stream was waited for, and T is a plain number, so any bits are a value.
            unsafe {
                let bytes = std::slice::from_raw_parts_mut(
                    values.as_mut_ptr().cast::<u8>(),
                    n * size_of::<T>(),
                );
                result::memcpy_dtoh_async(bytes, at.0, gpu.stream.cu_stream()).map_err(failed)?;
                gpu.stream.synchronize().map_err(failed)?;
                values.set_len(n);
            }
        }
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
    }
    super::graph::refuse(OP)?;
    let gpu = Gpu::of(t, OP)?;
    let at = gpu.input(t, t.dtype(), OP, "tensor")?;
    match t.dtype() {
        DType::U8 => copied::<u8>(&gpu, at, t.shape()),
        DType::U32 => copied::<u32>(&gpu, at, t.shape()),
        DType::I16 => copied::<i16>(&gpu, at, t.shape()),
        DType::I64 => copied::<i64>(&gpu, at, t.shape()),
        DType::BF16 => copied::<half::bf16>(&gpu, at, t.shape()),
        DType::F16 => copied::<half::f16>(&gpu, at, t.shape()),
        DType::F32 => copied::<f32>(&gpu, at, t.shape()),
        DType::F64 => copied::<f64>(&gpu, at, t.shape()),
        dtype => Err(Error::DType { op: OP, dtype }),
    }
}

/// A point in the order of a stream.
pub(super) struct Event(CudaEvent);

impl Event {
    /// Whether the device has reached it.
    pub fn is_reached(&self) -> bool {
        self.0.is_complete()
    }
}

/// A time on a stream, known once the device has reached it.
pub struct Timestamp(CudaEvent);

impl Timestamp {
    /// Waits until the device has reached it.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn wait(&self) -> Result<()> {
        self.0.synchronize().map_err(|e| Error::gpu("timestamp", e.to_string()))
    }

    /// Time since `earlier` of the same stream, to about half a microsecond. Waits as
    /// [`Timestamp::wait`].
    ///
    /// # Errors
    /// Those of the driver.
    pub fn since(&self, earlier: &Self) -> Result<Duration> {
        let ms =
            earlier.0.elapsed_ms(&self.0).map_err(|e| Error::gpu("timestamp", e.to_string()))?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}

/// Pinned pages, which the device copies from and to directly, as long as this lives.
pub(super) struct Locked(usize);

impl Drop for Locked {
    fn drop(&mut self) {
        // SAFETY: the registered range begins here. An error is ignored: when the process ends, the
        // driver may already be gone.
        let _ = unsafe { sys::cuMemHostUnregister(self.0 as *mut c_void) };
    }
}

/// A GPU, and the stream on which its tensors' operations are queued.
pub struct Gpu {
    device: CudaDevice,
    stream: Arc<CudaStream>,
}

impl Gpu {
    /// The GPU of the tensor's device.
    ///
    /// # Errors
    /// If `t` is not on a GPU.
    pub fn of(t: &Tensor, op: &'static str) -> Result<Self> {
        Self::on(t.device(), op)
    }

    /// The GPU of the device.
    ///
    /// # Errors
    /// If the device is not a GPU.
    pub fn on(device: &Device, op: &'static str) -> Result<Self> {
        match device {
            Device::Cuda(device) => {
                Ok(Self { device: device.clone(), stream: device.cuda_stream() })
            }
            other => Err(Error::Device { op, device: format!("{:?}", other.location()) }),
        }
    }

    /// The stream that operations are queued on.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// # Errors
    /// Those of the driver.
    pub fn properties(&self) -> Result<Properties> {
        with_loaded(self.stream.context(), "properties", |loaded| Ok(loaded.properties))
    }

    /// Loads all kernels now. Otherwise each is loaded at its first launch, which may wait for all
    /// work on the device (CUDA C++ Programming Guide, "Lazy Loading"). That wait never ends if the
    /// work waits for a message that only a later launch here sends.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn load_kernels(&self) -> Result<()> {
        with_loaded(self.stream.context(), "all kernels", Loaded::load_all)
    }

    /// The streams for copies to the host, and from it.
    fn copies(&self, op: &'static str) -> Result<[Arc<CudaStream>; 2]> {
        let context = self.stream.context();
        with_loaded(context, op, |loaded| {
            if loaded.copies.is_none() {
                let stream = || context.new_stream().map_err(|e| Error::gpu(op, e.to_string()));
                loaded.copies = Some([stream()?, stream()?]);
            }
            loaded.copies.clone().ok_or_else(|| Error::gpu(op, "no stream for copies"))
        })
    }

    /// The time at which the device has done everything queued so far.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn timestamp(&self) -> Result<Timestamp> {
        let event = self.stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
        event.map(Timestamp).map_err(|e| Error::gpu("timestamp", e.to_string()))
    }

    /// Flat host memory for `n` elements. It is pinned if the driver can pin it; otherwise copies
    /// take longer. (Pinning needs a context, which communication threads do not have yet.)
    pub(super) fn lock_memory(&self, n: usize, dtype: DType) -> Result<(Tensor, Option<Locked>)> {
        /// Granularity of pinning. Only whole pages of the tensor itself are pinned, never a
        /// neighbour's memory.
        const PAGE: usize = 64 << 10;
        const PORTABLE: u32 = 1; // CU_MEMHOSTREGISTER_PORTABLE: for all contexts
        let size = dtype.size_in_bytes();
        let bytes = (n * size).next_multiple_of(PAGE);
        let all = Tensor::zeros((bytes + 2 * PAGE) / size, dtype, &Device::Cpu)?;
        let first = crate::tensor::host::with_bytes_mut(&all, "lock_memory", |bytes| {
            Ok(bytes.as_mut_ptr().expose_provenance())
        })?;
        let skip = first.next_multiple_of(PAGE) - first;
        // Elements are aligned to their size, so whole elements are skipped.
        let elements = all.narrow(0, skip / size, n)?;
        self.stream
            .context()
            .bind_to_thread()
            .map_err(|e| Error::gpu("lock_memory", e.to_string()))?;
        // SAFETY: whole pages of the tensor. Its memory does not move, and outlives `Locked`.
        let locked =
            unsafe { sys::cuMemHostRegister_v2((first + skip) as *mut c_void, bytes, PORTABLE) };
        Ok((elements, locked.result().is_ok().then_some(Locked(first + skip))))
    }

    /// An event after everything queued on the device's stream.
    pub(super) fn mark(&self) -> Result<Event> {
        self.stream.record_event(None).map(Event).map_err(|e| Error::gpu("mark", e.to_string()))
    }

    /// Copies elements to the host after `after`, on the stream for downloads, and waits for the
    /// copy.
    pub(super) fn fetch(&self, from: DevicePointer, to: &mut [u8], after: &Event) -> Result<()> {
        const OP: &str = "fetch";
        let failed = |e: DriverError| Error::gpu(OP, e.to_string());
        if to.is_empty() {
            return Ok(());
        }
        let [down, _] = self.copies(OP)?;
        down.wait(&after.0).map_err(failed)?;
        // SAFETY: both sides have the same number of bytes; both outlive the copy, which is waited
        // for.
        unsafe { result::memcpy_dtoh_async(to, from.0, down.cu_stream()) }.map_err(failed)?;
        down.record_event(None).and_then(|done| done.synchronize()).map_err(failed)
    }

    /// Copies elements from the host. If `after` is given, the copy runs after it on the stream for
    /// uploads, and work queued on the device's stream from now on waits for the copy. Otherwise it
    /// runs on the device's stream. The bytes may change once the returned event is reached.
    pub(super) fn put(
        &self,
        to: DevicePointer,
        from: &[u8],
        after: Option<&Event>,
    ) -> Result<Event> {
        const OP: &str = "put";
        let failed = |e: DriverError| Error::gpu(OP, e.to_string());
        let [_, up] = self.copies(OP)?;
        let stream = if after.is_some() { &up } else { &self.stream };
        if let Some(after) = after {
            stream.wait(&after.0).map_err(failed)?;
        }
        if !from.is_empty() {
            // SAFETY: both sides have the same number of bytes. The caller keeps the host's until
            // the event is reached. The device's memory is freed in the order of its stream, which
            // from here on comes after the copy.
            unsafe { result::memcpy_htod_async(to.0, from, stream.cu_stream()) }.map_err(failed)?;
        }
        let done = stream.record_event(None).map_err(failed)?;
        if after.is_some() {
            self.stream.wait(&done).map_err(failed)?;
        }
        Ok(Event(done))
    }

    pub(super) fn launch_with(
        &self,
        file: &'static str,
        name: &str,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        mut args: Args,
    ) -> Result<()> {
        let function =
            with_loaded(self.stream.context(), name, |loaded| loaded.function(file, name))?;
        args.check(name, &function.sizes)?;
        let failed = |e: DriverError| {
            Error::gpu(
                name,
                format!("{e} (grid {grid:?}, {threads} threads, {shared} bytes of shared memory)"),
            )
        };
        function.allow(shared).map_err(failed)?;
        let mut addresses: Vec<*mut c_void> = args.addresses();
        let [x, y, z] = grid;
        // SAFETY: number and sizes of the arguments match the parameters; the driver copies them
        // before it returns. Pointers among them are the callers' responsibility: they come from
        // live tensors of sizes that the operation has checked.
        unsafe {
            result::launch_kernel(
                function.handle,
                (x, y, z),
                (threads, 1, 1),
                shared,
                self.stream.cu_stream(),
                &mut addresses,
            )
        }
        .map_err(failed)
    }

    /// Where the storage of `t` begins.
    pub(super) fn storage(
        &self,
        t: &Tensor,
        op: &'static str,
        _write: bool,
    ) -> Result<DevicePointer> {
        let (storage, _) = t.storage_and_layout();
        let Storage::Cuda(cuda) = &*storage else {
            return Err(Error::Device { op, device: format!("{:?}", t.device().location()) });
        };
        if !cuda.device.same_device(&self.device) {
            let device =
                "another GPU, or another stream of it, than its other operands".to_string();
            return Err(Error::Device { op, device });
        }
        /// The address. Uses are not tracked (see [`open`]), so nothing has to be held while it is
        /// used.
        fn address<T>(slice: &cudarc::driver::CudaSlice<T>, stream: &CudaStream) -> u64 {
            slice.device_ptr(stream).0
        }
        let stream = &self.stream;
        Ok(DevicePointer(match &cuda.slice {
            CudaStorageSlice::U8(slice) => address(slice, stream),
            CudaStorageSlice::U32(slice) => address(slice, stream),
            CudaStorageSlice::I16(slice) => address(slice, stream),
            CudaStorageSlice::I64(slice) => address(slice, stream),
            CudaStorageSlice::BF16(slice) => address(slice, stream),
            CudaStorageSlice::F16(slice) => address(slice, stream),
            CudaStorageSlice::F32(slice) => address(slice, stream),
            CudaStorageSlice::F64(slice) => address(slice, stream),
            _ => return Err(Error::DType { op, dtype: t.dtype() }),
        }))
    }

    /// A tensor of uninitialized elements.
    pub(super) fn allocate(&self, shape: Shape, dtype: DType, op: &'static str) -> Result<Tensor> {
        // The driver does not allocate blocks of zero bytes.
        let room = if shape.elem_count() == 0 { Shape::from(1) } else { shape.clone() };
        // SAFETY: the kernels of the operation that asks for a result write all of it.
        match unsafe { self.device.alloc_uninit(&room, dtype) } {
            Ok(storage) => {
                Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
            }
            Err(error) => Err(self.describe(error, shape, dtype, op)),
        }
    }

    /// The error of an allocation; if there was too little memory, with a report of what holds it.
    fn describe(
        &self,
        error: candle_core::Error,
        shape: Shape,
        dtype: DType,
        op: &'static str,
    ) -> Error {
        if !crate::tensor::error::names_out_of_memory(&error) {
            return error.into();
        }
        let bytes = shape.elem_count() * dtype.size_in_bytes();
        Error::OutOfMemory { op, bytes, shape: shape.into_dims(), dtype, memory: self.memory() }
    }

    /// Use of the device's memory, as far as the driver reports it. Peaks are those since the
    /// process began.
    pub(crate) fn memory(&self) -> Option<Memory> {
        use sys::{CUgraphMem_attribute as G, CUmemPool_attribute as A};
        let context = self.stream.context();
        context.bind_to_thread().ok()?;
        let (free, total) = context.mem_get_info().ok()?;
        // SAFETY: the device exists; all attributes are u64.
        let get = |attribute| unsafe {
            let pool = result::device::get_default_mem_pool(context.cu_device())?;
            let mut value = 0_u64;
            result::mem_pool::get_attribute(pool, attribute, std::ptr::from_mut(&mut value).cast())
                .map(|()| value)
        };
        let get = |attribute| get(attribute).map_err(|_: DriverError| ()).ok();
        // Graphs have memory outside the pool; a driver that does not know the attribute has none.
        let graphs = |attribute| {
            let mut value = 0_u64;
            // SAFETY: as above.
            unsafe {
                let value = std::ptr::from_mut(&mut value).cast();
                _ = sys::cuDeviceGetGraphMemAttribute(context.cu_device(), attribute, value);
            }
            value
        };
        Some(Memory {
            used: get(A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?
                + graphs(G::CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT),
            reserved: get(A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?
                + graphs(G::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT),
            peak_used: get(A::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?
                + graphs(G::CU_GRAPH_MEM_ATTR_USED_MEM_HIGH),
            peak_reserved: get(A::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?
                + graphs(G::CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH),
            free: free as u64,
            total: total as u64,
        })
    }
}
