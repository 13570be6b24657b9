//! Every kernel of `cuda/`, compared with the CPU's operation in f64.
//!
//! The same cases run on the emulator, where there is no GPU, and on a GPU:
//! ```text
//! cargo test --release --features emulated --test gpu
//! cargo test --release --features cuda --test gpu
//! ```
#![cfg(any(feature = "cuda", feature = "emulated"))]

mod activation;
mod attention;
mod cross_entropy;
mod dropout;
mod embedding;
#[cfg(feature = "emulated")]
mod emulator;
#[cfg(feature = "cuda")]
mod graph;
mod linear;
mod norm;
mod optimizer;
mod reduce;
mod regroup;
mod rope;
mod support;
mod transfer;
