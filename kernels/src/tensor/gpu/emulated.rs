//! Runs GPU kernels on CPU tensors, by the emulator of `cuda/emulator`: for tests on machines
//! without a GPU.
//!
//! Threads inside [`run`] emulate, and all threads after [`everywhere`]. Tensors of f64 stay on the
//! CPU, because there are no GPU kernels for them; tests compute their reference values in f64.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Shape, Tensor};
use rayon::prelude::*;

use super::modules::MODULES;
use super::{Args, DevicePointer, Properties};
use crate::tensor::device_memory::Memory;
use crate::tensor::emulation::{COUNTS, HERE, INSIDE, is_on};
pub use crate::tensor::emulation::{Counts, Order, everywhere, run, take_counts};
use crate::tensor::host;
use crate::{Error, Result};

pub(super) fn runs_here(t: &Tensor) -> bool {
    computes(t.device()) && t.dtype() != DType::F64
}

pub(super) fn computes(device: &Device) -> bool {
    is_on() && device.is_cpu()
}

/// A meter's reading of the memory that tensors take, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metered {
    pub used: u64,
    pub peak: u64,
}

type Limit = (u64, fn() -> Metered);
static LIMIT: Mutex<Option<Limit>> = Mutex::new(None);

/// Limits the emulated device's memory to a number of bytes. `meter` reports how many are in use:
/// tensors lie in host memory, so the test's allocator knows.
pub fn limit_memory(limit: Option<Limit>) {
    *LIMIT.lock().unwrap_or_else(PoisonError::into_inner) = limit;
}

/// A kernel registered with the emulator.
#[repr(C)]
struct Kernel {
    opaque: [u8; 0],
}

/// The first kernel of a file; it links to the others.
#[repr(transparent)]
pub(crate) struct List(*const Kernel);

// SAFETY: written before the program starts.
unsafe impl Sync for List {}

unsafe extern "C" {
    fn emulator_find(list: *const Kernel, name: *const c_char) -> *const Kernel;
    fn emulator_arguments(kernel: *const Kernel, sizes: *mut u32, room: u32) -> u32;
    fn emulator_run_block(
        kernel: *const Kernel,
        grid: *const u32,
        num_threads: u32,
        shared_bytes: u32,
        index: *const u32,
        order: u32,
        seed: u64,
        args: *mut *mut c_void,
        error: *mut c_char,
        error_room: usize,
    ) -> bool;
}

/// Shared by the blocks of a launch.
struct Launch {
    kernel: *const Kernel,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    order: Order,
    args: Vec<*mut c_void>,
}

// SAFETY: the kernel is a static; blocks only read the arguments, which outlive the launch.
unsafe impl Sync for Launch {}

impl Launch {
    fn block(&self, number: u64) -> std::result::Result<(), String> {
        let [x, y, _] = self.grid.map(u64::from);
        let index = [number % x, number / x % y, number / (x * y)].map(|i| i as u32);
        let (order, seed) = match self.order {
            Order::Forward => (0, 0),
            Order::Backward => (1, 0),
            Order::WarpByWarp => (3, 0),
            Order::Shuffled(seed) => (2, seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        };
        let mut error = [0_u8; 512];
        let mut args = self.args.clone();
        // SAFETY: the kernel and its arguments; the argument sizes were compared with its
        // parameters. `error` has the stated size. The kernel's use of its pointers is as (un)safe
        // as on a GPU.
        let ended = unsafe {
            emulator_run_block(
                self.kernel,
                self.grid.as_ptr(),
                self.threads,
                self.shared,
                index.as_ptr(),
                order,
                seed,
                args.as_mut_ptr(),
                error.as_mut_ptr().cast(),
                error.len(),
            )
        };
        if ended {
            return Ok(());
        }
        Err(CStr::from_bytes_until_nul(&error)
            .map_or_else(|_| "?".into(), |e| e.to_string_lossy().into_owned()))
    }
}

/// Shared memory per block that is available on every supported GPU: that of compute capabilities
/// 8.6 and 8.9.
const SHARED_OF_ALL: u32 = 99 << 10;

const PROPERTIES: Properties =
    Properties { capability: (9, 0), multiprocessors: 3, shared_per_block: 227 << 10, l2: 4 << 20 };

/// A point in the order of the emulated device's operations, which is always reached.
pub(super) struct Event;

impl Event {
    pub fn is_reached(&self) -> bool {
        true
    }
}

/// A point in time.
pub struct Timestamp(Instant);

impl Timestamp {
    /// # Errors
    /// None; the signature is that of the driver.
    pub fn wait(&self) -> Result<()> {
        Ok(())
    }

    /// Time since `earlier`.
    ///
    /// # Errors
    /// None; the signature is that of the driver.
    pub fn since(&self, earlier: &Self) -> Result<Duration> {
        Ok(self.0.saturating_duration_since(earlier.0))
    }
}

/// Nothing has to be pinned.
pub(super) struct Locked;

fn address(pointer: DevicePointer) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(pointer.0 as usize)
}

/// The emulated GPU.
pub struct Gpu(());

impl Gpu {
    /// The GPU of the tensor's device.
    ///
    /// # Errors
    /// If `t` is not on the CPU.
    pub fn of(t: &Tensor, op: &'static str) -> Result<Self> {
        Self::on(t.device(), op)
    }

    /// The GPU of the device.
    ///
    /// # Errors
    /// If it is not the CPU.
    pub fn on(device: &Device, op: &'static str) -> Result<Self> {
        if device.is_cpu() {
            return Ok(Self(()));
        }
        Err(Error::Device { op, device: format!("{:?}", device.location()) })
    }

    /// Few multiprocessors, so that persistent grids loop.
    ///
    /// # Errors
    /// None; the signature is that of the driver.
    pub fn properties(&self) -> Result<Properties> {
        Ok(PROPERTIES)
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
        let most_shared =
            if file.ends_with("_sm90a") { PROPERTIES.shared_per_block } else { SHARED_OF_ALL };
        if threads == 0 || threads > 1024 || shared > most_shared {
            return Err(Error::gpu(
                name,
                format!("{threads} threads, {shared} bytes of shared memory are no launch"),
            ));
        }
        let c_name = CString::new(name).map_err(|e| Error::gpu(name, e.to_string()))?;
        let list = MODULES
            .iter()
            .find(|(stem, _)| *stem == file)
            .map_or(std::ptr::null(), |(_, list)| list.0);
        // SAFETY: a list of kernels, which may be empty, and a C string.
        let kernel = unsafe { emulator_find(list, c_name.as_ptr()) };
        if kernel.is_null() {
            return Err(Error::gpu(name, format!("no such kernel in cuda/{file}.cu")));
        }
        let mut sizes = [0_u32; 64];
        // SAFETY: `sizes` has the stated size.
        let num_args =
            unsafe { emulator_arguments(kernel, sizes.as_mut_ptr(), sizes.len() as u32) } as usize;
        let sizes: Vec<usize> = sizes.iter().take(num_args).map(|&size| size as usize).collect();
        args.check(name, &sizes)?;
        COUNTS.with_borrow_mut(|counts| counts.launches += 1);
        let order = HERE.get().unwrap_or(Order::Forward);
        let launch = Launch { kernel, grid, threads, shared, order, args: args.addresses() };
        let num_blocks = grid.iter().map(|&n| u64::from(n)).product::<u64>();
        let result = match order {
            // One after the other, to keep exactly this order.
            Order::Backward => (0..num_blocks).rev().try_for_each(|i| launch.block(i)),
            Order::Forward | Order::Shuffled(_) | Order::WarpByWarp => {
                (0..num_blocks).into_par_iter().try_for_each(|i| launch.block(i))
            }
        };
        result.map_err(|message| Error::gpu(name, message))
    }

    /// Address of the storage of `t`.
    pub(super) fn storage(
        &self,
        t: &Tensor,
        op: &'static str,
        write: bool,
    ) -> Result<DevicePointer> {
        if !t.device().is_cpu() {
            return Err(Error::Device { op, device: format!("{:?}", t.device().location()) });
        }
        let start = t.layout().start_offset() * t.dtype().size_in_bytes();
        let outside = INSIDE.replace(true);
        let first = if write {
            host::with_bytes_mut(t, op, |bytes| Ok(bytes.as_mut_ptr().expose_provenance()))
        } else {
            host::with_bytes(t, op, |bytes| Ok(bytes.as_ptr().expose_provenance()))
        };
        INSIDE.set(outside);
        Ok(DevicePointer((first? - start) as u64))
    }

    /// The current time: kernels have run by the time their launch returns.
    ///
    /// # Errors
    /// None; the signature is that of the driver.
    pub fn timestamp(&self) -> Result<Timestamp> {
        COUNTS.with_borrow_mut(|counts| counts.timestamps += 1);
        Ok(Timestamp(Instant::now()))
    }

    /// Flat host memory for `n` elements.
    pub(super) fn lock_memory(&self, n: usize, dtype: DType) -> Result<(Tensor, Option<Locked>)> {
        Ok((Tensor::zeros(n, dtype, &Device::Cpu)?, None))
    }

    pub(super) fn mark(&self) -> Result<Event> {
        Ok(Event)
    }

    pub(super) fn fetch(&self, from: DevicePointer, to: &mut [u8], _after: &Event) -> Result<()> {
        // SAFETY: the caller has a tensor of that many bytes there, and room for them in other
        // memory.
        unsafe { std::ptr::copy_nonoverlapping(address(from), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    pub(super) fn put(
        &self,
        to: DevicePointer,
        from: &[u8],
        _after: Option<&Event>,
    ) -> Result<Event> {
        // SAFETY: as above, in the other direction.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), address(to), from.len()) };
        Ok(Event)
    }

    /// The emulated device's memory, if it is limited.
    pub(crate) fn memory(&self) -> Option<Memory> {
        let (total, meter) = (*LIMIT.lock().unwrap_or_else(PoisonError::into_inner))?;
        let Metered { used, peak } = meter();
        let free = total.saturating_sub(used);
        Some(Memory { used, reserved: used, peak_used: peak, peak_reserved: peak, free, total })
    }

    /// A tensor filled with NaN, which shows elements that no kernel writes.
    pub(super) fn allocate(&self, shape: Shape, dtype: DType, op: &'static str) -> Result<Tensor> {
        let n = shape.elem_count();
        let bytes = n * dtype.size_in_bytes();
        if let Some(memory) = self.memory().filter(|memory| memory.free < bytes as u64) {
            return Err(Error::OutOfMemory {
                op,
                bytes,
                shape: shape.into_dims(),
                dtype,
                memory: Some(memory),
            });
        }
        let cpu = &candle_core::Device::Cpu;
        Ok(match dtype {
            DType::F32 => Tensor::from_vec(vec![f32::from_bits(u32::MAX); n], shape, cpu)?,
            DType::BF16 => Tensor::from_vec(vec![half::bf16::from_bits(u16::MAX); n], shape, cpu)?,
            DType::F16 => Tensor::from_vec(vec![half::f16::from_bits(u16::MAX); n], shape, cpu)?,
            DType::F64 => Tensor::from_vec(vec![f64::from_bits(u64::MAX); n], shape, cpu)?,
            DType::I16 => Tensor::from_vec(vec![-1_i16; n], shape, cpu)?,
            DType::I64 => Tensor::from_vec(vec![-1_i64; n], shape, cpu)?,
            DType::U32 => Tensor::from_vec(vec![u32::MAX; n], shape, cpu)?,
            DType::U8 => Tensor::from_vec(vec![u8::MAX; n], shape, cpu)?,
            dtype => return Err(Error::DType { op, dtype }),
        })
    }
}
