//! Fused forward and backward operations of transformers on candle tensors.
//!
//! No parallelism over ranks lives here: a kernel sees one device, one rank's tensors, and the
//! numbers that place them in the global problem (vocabulary offset, sample ids) where it needs
//! them. Every kernel's result is independent of the number of threads, bit for bit: reductions run
//! over fixed blocks and are combined in block order.

// SIMD, CUDA and reinterpretation of plain numbers live here; every block states why it is sound.
#![allow(unsafe_code)]

mod cpu;
#[cfg(gpu)]
mod cuda;
pub mod ops;
pub mod tensor;

/// Leaves an operation to the GPU's implementation if its tensor is there: `on_gpu!(x,
/// activation::gelu(x, OP))` near the beginning of it.
macro_rules! on_gpu {
    ($t:expr, $($call:tt)+) => {
        #[cfg(gpu)]
        if $crate::tensor::gpu::runs_here($t) {
            return $crate::cuda::$($call)+;
        }
    };
}
pub(crate) use on_gpu;

/// As [`on_gpu`], for what the emulator leaves to the CPU.
macro_rules! on_cuda {
    ($t:expr, $($call:tt)+) => {
        #[cfg(feature = "cuda")]
        if $crate::tensor::gpu::runs_here($t) {
            return $crate::cuda::$($call)+;
        }
    };
}
pub(crate) use on_cuda;

pub use cpu::gemm::peak;
pub use tensor::error::{Error, Result};
pub use tensor::simd::{Isa, vectorize};
