//! Opens the CPU and GPUs, and copies between them.

use std::fmt;
use std::str::FromStr;
use std::time::Instant;

use candle_core::{DType, Device, Shape, Tensor};
use half::{bf16, f16};

pub use crate::tensor::device_memory::Memory;
use crate::tensor::element::Elem;
use crate::tensor::host::HostElem;
use crate::tensor::output::anything;
use crate::tensor::transfer::{Mark, fetch, mark};
use crate::{Error, Result};

/// The device that a program was told to compute on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// A GPU if this program has kernels for GPUs and the machine has one, else the CPU.
    #[default]
    Auto,
    Cpu,
    /// A GPU: this one, or the one that matches the process's local rank.
    Cuda(Option<usize>),
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        match s.split_once(':') {
            None if s == "auto" => Ok(Self::Auto),
            None if s == "cpu" => Ok(Self::Cpu),
            None if s == "cuda" => Ok(Self::Cuda(None)),
            Some(("cuda", n)) => n
                .parse()
                .map(|n| Self::Cuda(Some(n)))
                .map_err(|_| format!("'{n}' is not the number of a GPU (cuda:0, cuda:1, …)")),
            _ => Err(format!("'{s}' is no device: auto, cpu, cuda or cuda:N")),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(n)) => write!(f, "cuda:{n}"),
        }
    }
}

impl Choice {
    /// The device for the process with this `local_rank` on its machine. Processes beyond the
    /// number of GPUs share them.
    ///
    /// # Errors
    /// If a GPU was asked for and there is none, or this program has no kernels for GPUs. The
    /// message is one line that says what to do.
    pub fn open(self, local_rank: usize) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Auto => match gpus() {
                Ok(count) if count > 0 => open_gpu(local_rank % count),
                // The machine has a GPU, so a missing library is an error. Silently falling back to
                // the CPU would waste hours.
                Err(error) if has_driver() => Err(error),
                _ => Ok(Device::Cpu),
            },
            Self::Cuda(ordinal) => {
                let count = gpus()?;
                match ordinal.unwrap_or(local_rank % count.max(1)) {
                    ordinal if ordinal < count => open_gpu(ordinal),
                    ordinal => Err(unavailable(format!(
                        "there is no GPU {ordinal}: this machine has {count}"
                    ))),
                }
            }
        }
    }
}

fn unavailable(message: impl Into<String>) -> Error {
    Error::NoGpu { message: message.into() }
}

/// Number of GPUs visible to this program.
///
/// # Errors
/// If this program has no kernels for GPUs, or CUDA is not there.
#[cfg(feature = "cuda")]
pub fn gpus() -> Result<usize> {
    crate::tensor::gpu::count()
}

#[cfg(feature = "cuda")]
fn has_driver() -> bool {
    crate::tensor::gpu::missing_libraries(&["cuda"]).is_empty()
}

#[cfg(not(feature = "cuda"))]
fn has_driver() -> bool {
    false
}

#[cfg(feature = "cuda")]
fn open_gpu(ordinal: usize) -> Result<Device> {
    crate::tensor::gpu::open(ordinal)
}

/// Number of GPUs visible to this program.
///
/// # Errors
/// If this program has no kernels for GPUs, or CUDA is not there.
#[cfg(not(feature = "cuda"))]
pub fn gpus() -> Result<usize> {
    Err(unavailable(
        "this program was built for the CPU alone; build it with `cargo build --release --features cuda` (docs/guide/install.md)",
    ))
}

#[cfg(not(feature = "cuda"))]
fn open_gpu(_ordinal: usize) -> Result<Device> {
    gpus().map(|_| Device::Cpu)
}

/// The elements of a contiguous tensor (or view) on the CPU: `t` itself if it is there, else a
/// copy, which waits for the device.
///
/// # Errors
/// If `t` is not contiguous, or those of the driver.
pub fn to_host(t: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "emulated")]
    crate::tensor::emulation::waited();
    #[cfg(feature = "cuda")]
    if t.device().is_cuda() {
        if t.elem_count() * t.dtype().size_in_bytes() > LOCKED {
            return crate::tensor::gpu::to_host(t);
        }
        let here = crate::tensor::gpu::transfer::mark(t.device())?;
        return Ok(crate::tensor::gpu::transfer::fetch(t, &here)?.tensor().force_contiguous()?);
    }
    Ok(t.clone())
}

/// Values that the host reads later, as they are at one point in the order of their device's
/// operations.
pub struct Reading {
    tensors: Vec<Tensor>,
    /// That point, on a GPU.
    at: Option<Mark>,
}

/// Marks the point after everything queued so far. [`Reading::wait`] later reads `tensors`,
/// contiguous and on one device, as they are at this point, whatever is queued after it. Does not
/// wait. Nothing may write to the tensors until they are read.
///
/// # Errors
/// Those of the driver.
pub fn read_later(tensors: Vec<Tensor>) -> Result<Reading> {
    let at = match tensors.first() {
        // The emulator's tensors are on the host.
        Some(first) if first.device().is_cuda() => mark(first.device())?,
        _ => None,
    };
    Ok(Reading { tensors, at })
}

impl Reading {
    /// The values on the host. Waits for them, but not for work queued since [`read_later`].
    ///
    /// # Errors
    /// If a tensor is not contiguous or on another device, or those of the driver.
    pub fn wait(self) -> Result<Vec<Tensor>> {
        #[cfg(feature = "emulated")]
        crate::tensor::emulation::waited();
        let read = |t: &Tensor| match &self.at {
            Some(at) => Ok(fetch(t, at)?.tensor().force_contiguous()?),
            None => Ok(t.clone()),
        };
        self.tensors.iter().map(read).collect()
    }
}

/// Largest upload, in bytes, that goes through pinned memory. Larger ones take long enough without
/// waiting for pinned pages.
#[cfg(feature = "cuda")]
const LOCKED: usize = 64 << 20;

/// A tensor of `values` on `device`. When this returns, a GPU has the values or will have them in
/// the order of its stream.
///
/// # Errors
/// If the number of values differs from the elements of `shape`, or there is no memory.
pub fn upload<T: HostElem>(
    values: Vec<T>,
    shape: impl Into<Shape>,
    device: &Device,
) -> Result<Tensor> {
    #[cfg(feature = "emulated")]
    if crate::tensor::gpu::computes(device) {
        crate::tensor::emulation::uploaded();
    }
    #[cfg(feature = "cuda")]
    if device.is_cuda() && std::mem::size_of_val(values.as_slice()) <= LOCKED {
        const OP: &str = "upload";
        let shape = shape.into();
        let gpu = crate::tensor::gpu::Gpu::on(device, OP)?;
        let (tensor, to) = gpu.output(shape, T::DTYPE, OP)?;
        if tensor.elem_count() != values.len() {
            return Err(Error::shape(
                OP,
                format!("{} values for shape {:?}", values.len(), tensor.dims()),
            ));
        }
        // SAFETY: every HostElem is a plain number without padding; any byte of it may be read.
        let bytes = unsafe {
            std::slice::from_raw_parts(
                values.as_ptr().cast::<u8>(),
                std::mem::size_of_val(values.as_slice()),
            )
        };
        crate::tensor::gpu::transfer::upload(&gpu, bytes, to)?;
        return Ok(tensor);
    }
    Ok(Tensor::from_vec(values, shape.into(), device)?)
}

/// A tensor for a result that is written before it is read. If the dtype is a float, its contents
/// are arbitrary.
///
/// # Errors
/// If there is no memory.
pub fn empty(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    #[cfg(gpu)]
    if crate::tensor::gpu::computes(device) {
        const OP: &str = "empty";
        return Ok(crate::tensor::gpu::Gpu::on(device, OP)?.output(shape, dtype, OP)?.0);
    }
    fn on_cpu<E: Elem>(shape: Shape) -> Result<Tensor> {
        Ok(Tensor::from_vec(anything::<E>(shape.elem_count()), shape, &Device::Cpu)?)
    }
    match dtype {
        DType::F32 if device.is_cpu() => on_cpu::<f32>(shape.into()),
        DType::F64 if device.is_cpu() => on_cpu::<f64>(shape.into()),
        DType::BF16 if device.is_cpu() => on_cpu::<bf16>(shape.into()),
        DType::F16 if device.is_cpu() => on_cpu::<f16>(shape.into()),
        _ => Ok(Tensor::zeros(shape, dtype, device)?),
    }
}

/// As [`empty`], with zeros. `what` names the tensor's purpose in errors.
///
/// # Errors
/// As [`empty`]; names `what`.
pub fn zeros(
    what: &'static str,
    shape: impl Into<Shape>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    #[cfg(gpu)]
    if crate::tensor::gpu::computes(device)
        && matches!(dtype, DType::F32 | DType::BF16 | DType::F16 | DType::I16)
    {
        let gpu = crate::tensor::gpu::Gpu::on(device, what)?;
        let (tensor, to) = gpu.output(shape, dtype, what)?;
        gpu.zero(to, tensor.elem_count(), dtype.size_in_bytes(), what)?;
        return Ok(tensor);
    }
    let _ = what;
    Ok(Tensor::zeros(shape, dtype, device)?)
}

/// The memory of a GPU; none for the CPU, or where the driver does not report it. Does not wait for
/// the device.
pub fn memory(device: &Device) -> Option<Memory> {
    #[cfg(gpu)]
    if crate::tensor::gpu::computes(device) {
        return crate::tensor::gpu::Gpu::on(device, "memory").ok()?.memory();
    }
    let _ = device;
    None
}

/// Whether operations on `device` return before they are computed, as on a GPU.
pub fn computes_ahead(device: &Device) -> bool {
    #[cfg(gpu)]
    return crate::tensor::gpu::computes(device);
    #[cfg(not(gpu))]
    {
        let _ = device;
        false
    }
}

/// Seconds that `device` takes for the work that `f` queues on it; on the CPU, seconds that `f`
/// takes. Waits for the device.
///
/// # Errors
/// Those of `f`, or those of the driver.
pub fn seconds<E: From<Error>>(
    device: &Device,
    f: impl FnOnce() -> std::result::Result<(), E>,
) -> std::result::Result<f64, E> {
    #[cfg(gpu)]
    if crate::tensor::gpu::computes(device) {
        let gpu = crate::tensor::gpu::Gpu::on(device, "seconds")?;
        let start = gpu.timestamp()?;
        f()?;
        return Ok(gpu.timestamp()?.since(&start)?.as_secs_f64());
    }
    let _ = device;
    let start = Instant::now();
    f()?;
    Ok(start.elapsed().as_secs_f64())
}

/// The name of a device: `CPU`, or the GPU's number and name.
pub fn name(device: &Device) -> String {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        let stream = cuda.cuda_stream();
        let context = stream.context();
        let name = context.name().unwrap_or_else(|error| error.to_string());
        return format!("cuda:{} ({name})", context.ordinal());
    }
    if device.is_cpu() { "CPU".to_string() } else { format!("{:?}", device.location()) }
}

/// Whether two tensors are the same elements of one storage.
pub fn same_elements(a: &Tensor, b: &Tensor) -> bool {
    crate::tensor::view::same_storage(a, b)
        && a.layout().start_offset() == b.layout().start_offset()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_read_as_they_are_written() {
        for text in ["auto", "cpu", "cuda", "cuda:0", "cuda:13"] {
            assert_eq!(text.parse::<Choice>().unwrap().to_string(), text);
        }
        for text in ["", "gpu", "cuda:", "cuda:x", "cpu:0", "cuda:-1"] {
            text.parse::<Choice>().unwrap_err();
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn without_kernels_for_gpus_auto_is_the_cpu_and_cuda_says_how_to_build() {
        assert!(Choice::Auto.open(3).unwrap().is_cpu());
        let error = Choice::Cuda(None).open(0).unwrap_err().to_string();
        assert!(error.contains("--features cuda") && !error.contains('\n'), "{error}");
    }
}
