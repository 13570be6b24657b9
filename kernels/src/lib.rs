//! Fused forward and backward operations of transformers on candle tensors.
//!
//! No parallelism over ranks lives here: a kernel sees one device, one rank's tensors, and the
//! numbers that place them in the global problem (vocabulary offset, sample ids) where it needs them.
//! Every kernel's result is independent of the number of threads, bit for bit: reductions run over
//! fixed blocks and are combined in block order.

// SIMD, CUDA and reinterpretation of plain numbers live here; every block states why it is sound.
#![allow(unsafe_code)]

pub mod activation;
pub mod arena;
pub mod attention;
pub mod clip;
pub mod cross_entropy;
pub mod device;
pub mod dropout;
pub mod embedding;
pub mod error;
mod exponential;
mod float;
mod gemm;
#[cfg(gpu)]
pub mod gpu;
pub mod graph;
pub mod halves;
pub mod host;
pub mod huge_pages;
pub mod linear;
pub mod memory;
pub mod norm;
pub mod optimizer;
mod output;
mod par;
pub mod philox;
pub mod reduce;
pub mod regroup;
pub mod rope;
mod rounding;
mod simd;
pub mod stream;
pub mod trace;
pub mod transfer;
mod view;

/// Leaves an operation to the GPU's implementation if its tensor is there: `on_gpu!(x, activation::gelu(x, OP))` near the beginning of it.
macro_rules! on_gpu {
    ($t:expr, $($call:tt)+) => {
        #[cfg(gpu)]
        if $crate::gpu::runs_here($t) {
            return $crate::gpu::$($call)+;
        }
    };
}
pub(crate) use on_gpu;

/// As [`on_gpu`], for what the emulator leaves to the CPU.
macro_rules! on_cuda {
    ($t:expr, $($call:tt)+) => {
        #[cfg(feature = "cuda")]
        if $crate::gpu::runs_here($t) {
            return $crate::gpu::$($call)+;
        }
    };
}
pub(crate) use on_cuda;

pub use error::{Error, Result};
pub use gemm::peak;
pub use simd::{Isa, vectorize};
