//! Fused forward and backward operations of transformers on candle tensors.
//!
//! No parallelism over ranks lives here: a kernel sees one device, one rank's tensors, and the
//! numbers that place them in the global problem (vocabulary offset, sample ids) where it needs them.
//! Every kernel's result is independent of the number of threads, bit for bit: reductions run over
//! fixed blocks and are combined in block order.

// SIMD, CUDA and reinterpretation of plain numbers live here; every block states why it is sound.
#![allow(unsafe_code)]

pub mod error;
pub mod host;

pub use error::{Error, Result};
