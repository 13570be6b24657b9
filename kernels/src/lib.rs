//! Fused forward and backward transformer operations on candle tensors.
//!
//! This crate knows nothing of parallelism over ranks. A kernel sees one device and one rank's
//! tensors. Where it needs the place of those tensors in the global problem, the caller passes it
//! as numbers (vocabulary offset, sample ids). Every result is bit-identical for any number of
//! threads: reductions run over fixed blocks and are combined in block order.

// SIMD, CUDA and reinterpretation of plain numbers need `unsafe`; every block states why it is
// sound.
#![allow(unsafe_code)]

mod cpu;
#[cfg(gpu)]
mod cuda;
pub mod ops;
pub mod tensor;

/// Returns the GPU's implementation of an operation if the tensor is on a GPU. Belongs near the
/// beginning of the operation: `on_gpu!(x, activation::gelu(x, OP))`.
macro_rules! on_gpu {
    ($t:expr, $($call:tt)+) => {
        #[cfg(gpu)]
        if $crate::tensor::gpu::runs_here($t) {
            return $crate::cuda::$($call)+;
        }
    };
}
pub(crate) use on_gpu;

/// As [`on_gpu`], for operations that the emulator leaves to the CPU.
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
