//! GPUs: devices, their memory, and kernel launches on the stream of a tensor's device.
//!
//! Two backends share one interface, [`Gpu`]: the CUDA driver (feature `cuda`), and, for tests
//! without a GPU, an emulator on CPU tensors (feature `emulated`). The operations themselves (a
//! module for each of the crate's) know only the interface. An operation returns as soon as its
//! kernels are queued; nothing here waits for the device.

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
/// File names of the CUDA libraries in `wanted` (`nccl`, …) that are not on this machine; none if
/// the libraries are linked in the ordinary way.
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

/// The list of compiled files, written by the build script.
pub(crate) mod modules {
    include!(concat!(env!("OUT_DIR"), "/modules.rs"));
}

/// Threads per block for kernels that do not need another number.
pub(crate) const THREADS: u32 = 256;

/// Device properties that launches depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Compute capability, e.g. (9, 0) for Hopper.
    pub capability: (u32, u32),
    pub multiprocessors: u32,
    /// Bytes of shared memory available to one block.
    pub shared_per_block: u32,
    /// Bytes of L2 cache.
    pub l2: u32,
}

/// Whether a GPU computes operations on `t`.
pub(crate) fn runs_here(t: &Tensor) -> bool {
    backend::runs_here(t)
}

/// Whether GPU kernels compute operations on `device`.
pub(crate) fn computes(device: &Device) -> bool {
    backend::computes(device)
}
