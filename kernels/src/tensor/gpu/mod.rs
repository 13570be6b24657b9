//! GPUs: devices, their memory, and launches of kernels on the stream of a tensor's device.
//!
//! There are two ways to run them behind one interface, [`Gpu`]: CUDA's driver (feature `cuda`),
//! and, where there is no GPU, an emulator on tensors of the CPU (feature `emulated`), for tests.
//! The operations themselves (a module for each of the crate's) know only the interface. Nothing
//! here waits for the device: an operation returns when its kernels are queued.

#[cfg(feature = "cuda")]
pub(crate) mod driver;
#[cfg(feature = "emulated")]
pub mod emulated;
pub(crate) mod flat;
pub(crate) mod items;
pub(crate) mod launch;
#[cfg(all(feature = "cuda", target_arch = "x86_64"))]
mod libraries;
#[cfg(feature = "cuda")]
mod loaded;
pub(crate) mod memory;
pub(crate) mod tensor_map;

#[cfg(feature = "cuda")]
pub(crate) mod graph;
pub(crate) mod transfer;

#[cfg(feature = "cuda")]
use driver as backend;
#[cfg(all(feature = "emulated", not(feature = "cuda")))]
use emulated as backend;

pub use backend::{Gpu, Timestamp};
#[cfg(feature = "cuda")]
pub use driver::{count, open, to_host};
/// The names of those of CUDA's libraries (`nccl`, …) that are not on this machine, as files; none
/// where they are linked in the ordinary way.
#[cfg(feature = "cuda")]
pub fn missing_libraries(wanted: &[&str]) -> Vec<String> {
    #[cfg(target_arch = "x86_64")]
    return libraries::missing(wanted);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = wanted;
        Vec::new()
    }
}

pub use launch::Args;
pub use memory::DevicePointer;

use candle_core::{Device, Tensor};

/// The list of compiled files, which the build script writes.
pub(crate) mod modules {
    include!(concat!(env!("OUT_DIR"), "/modules.rs"));
}

/// Threads of a block where a kernel has no reason for another number.
pub(crate) const THREADS: u32 = 256;

/// What launches depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Compute capability, e.g. (9, 0) of Hopper.
    pub capability: (u32, u32),
    pub multiprocessors: u32,
    /// Bytes of shared memory that one block can have.
    pub shared_per_block: u32,
    /// Bytes of second-level cache.
    pub l2: u32,
}

/// Whether the operation on `t` is one of a GPU.
pub(crate) fn runs_here(t: &Tensor) -> bool {
    backend::runs_here(t)
}

/// Whether what is on `device` is computed by kernels of GPUs.
pub(crate) fn computes(device: &Device) -> bool {
    backend::computes(device)
}
