//! The machine's GPUs, this program's kernels for them, and their measured speeds: for `megatron
//! doctor`.

use std::ffi::c_int;

use candle_core::cuda_backend::cudarc;
use candle_core::{DType, Device, Tensor};
use cudarc::cublaslt;
use cudarc::driver::{DriverError, result, sys};

use crate::ops::linear::linear_into;
use crate::tensor::gpu::{Gpu, driver, modules};
use crate::tensor::philox::fill_normal;
use crate::{Error, Result};

/// A GPU as its driver describes it.
#[derive(Clone, Debug)]
pub struct GpuInfo {
    pub name: String,
    pub capability: (i32, i32),
    pub multiprocessors: i32,
    /// Total bytes.
    pub memory: usize,
    /// Bytes of L2 cache.
    pub l2: i32,
    /// For every GPU, whether this one reads its memory directly.
    pub peers: Vec<bool>,
}

/// The machine's GPUs, and the driver and libraries for them.
#[derive(Clone, Debug)]
pub struct Survey {
    /// The CUDA version of the driver, e.g. 13000.
    pub driver: i32,
    pub cublas_lt: usize,
    pub gpus: Vec<GpuInfo>,
}

/// Speeds measured on one GPU.
#[derive(Clone, Copy, Debug)]
pub struct Speeds {
    /// Bytes per second, read plus written, of a copy within device memory.
    pub copy: f64,
    /// Operations per second of a large matrix product in bf16, and in f32.
    pub bf16: f64,
    pub f32: f64,
}

fn failed(e: DriverError) -> Error {
    Error::gpu("survey", e.to_string())
}

/// Queries the driver.
///
/// # Errors
/// If there is no driver, or those of the driver.
pub fn survey() -> Result<Survey> {
    use sys::CUdevice_attribute as A;
    let count = driver::count()?;
    let mut version = 0;
    // SAFETY: one result.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(failed)?;
    let devices = (0..count)
        .map(|i| result::device::get(i as c_int).map_err(failed))
        .collect::<Result<Vec<_>>>()?;
    let gpus = devices.iter().map(|&device| {
        // SAFETY: the device exists.
        let attribute = |a| unsafe { result::device::get_attribute(device, a) }.map_err(failed);
        let reads = |other: sys::CUdevice| {
            let mut can = 0;
            // SAFETY: both devices exist; one result.
            let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, device, other) }.result();
            asked.map(|()| can != 0 || device == other).map_err(failed)
        };
        Ok(GpuInfo {
            name: result::device::get_name(device).map_err(failed)?,
            capability: (
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            // SAFETY: the device exists.
            memory: unsafe { result::device::total_mem(device) }.map_err(failed)?,
            l2: attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            peers: devices.iter().map(|&other| reads(other)).collect::<Result<_>>()?,
        })
    });
    let gpus = gpus.collect::<Result<_>>()?;
    // SAFETY: takes nothing.
    Ok(Survey { driver: version, cublas_lt: unsafe { cublaslt::sys::cublasLtGetVersion() }, gpus })
}

/// The kernel files in this program, with the code size of each over all GPU architectures.
pub fn compiled() -> Vec<(&'static str, usize)> {
    modules::MODULES.iter().map(|(file, image)| (*file, image.len())).collect()
}

/// Measures a GPU for about a second. Other users of the GPU falsify the result.
///
/// # Errors
/// Those of CUDA.
pub fn measure(device: &Device) -> Result<Speeds> {
    // Sizes grow until the overhead of starting and stopping no longer matters. The first copy is
    // larger than any cache.
    let copy = grown(28, 30, |power| copies(device, 1 << power))?;
    let bf16 = grown(8, 13, |power| products(device, DType::BF16, 1 << power))?;
    let f32 = grown(8, 12, |power| products(device, DType::F32, 1 << power))?;
    Ok(Speeds { copy, bf16, f32 })
}

/// The rate at the first power of two for which an operation takes a millisecond, or at the last
/// power. `rate(power)(times)` returns the seconds of one of `times` operations, and the work that
/// one does.
fn grown<F: FnMut(usize) -> Result<(f64, f64)>>(
    first: u32,
    last: u32,
    mut rate: impl FnMut(u32) -> Result<F>,
) -> Result<f64> {
    for power in first..last {
        let mut rate = rate(power)?;
        if rate(1)?.0 >= 1e-3 {
            let (seconds, amount) = rate(5)?;
            return Ok(amount / seconds);
        }
    }
    let (seconds, amount) = rate(last)?(10)?;
    Ok(amount / seconds)
}

/// Copies of `bytes`; the work is bytes read plus written.
fn copies(device: &Device, bytes: usize) -> Result<impl FnMut(usize) -> Result<(f64, f64)>> {
    const OP: &str = "measure";
    let source = Tensor::zeros(bytes, DType::U8, device)?;
    let gpu = Gpu::of(&source, OP)?;
    let (target, to) = gpu.output(bytes, DType::U8, OP)?;
    Ok(move |times| {
        let from = gpu.input(&source, DType::U8, OP, "source")?;
        let _alive = &target;
        let seconds = seconds(&gpu, times, || {
            // SAFETY: both have at least the copied length, and live.
            unsafe {
                result::memcpy_dtod_async(
                    to.address(),
                    from.address(),
                    bytes,
                    gpu.stream().cu_stream(),
                )
            }
            .map_err(failed)
        })?;
        Ok((seconds, 2.0 * bytes as f64))
    })
}

/// Products of square matrices; the work is arithmetic operations. Values are normally distributed,
/// because a GPU's clock depends on the values it multiplies.
fn products(
    device: &Device,
    dtype: DType,
    edge: usize,
) -> Result<impl FnMut(usize) -> Result<(f64, f64)>> {
    // One block of values, repeated.
    let block = (edge * edge).min(1 << 20);
    let mut values = vec![0_f32; block];
    fill_normal(&mut values, 1, 0, 0, 1.0);
    let block_of =
        Tensor::from_vec(values, block, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?;
    let x = Tensor::cat(&vec![&block_of; edge * edge / block], 0)?.reshape((edge, edge))?;
    let y = x.zeros_like()?;
    let gpu = Gpu::of(&x, "measure")?;
    Ok(move |times| {
        let seconds = seconds(&gpu, times, || linear_into(&x, &x, None, &y))?;
        Ok((seconds, 2.0 * (edge as f64).powi(3)))
    })
}

/// Seconds of one of `times` operations, after a warm-up that does not count.
fn seconds(gpu: &Gpu, times: usize, mut queue: impl FnMut() -> Result<()>) -> Result<f64> {
    let event =
        || gpu.stream().record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed);
    queue()?;
    let before = event()?;
    for _ in 0..times {
        queue()?;
    }
    let after = event()?;
    Ok(f64::from(before.elapsed_ms(&after).map_err(failed)?) / 1e3 / times as f64)
}
