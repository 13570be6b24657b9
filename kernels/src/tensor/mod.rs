//! The foundation of the kernels: element types, devices, views, memory, threads, random numbers,
//! spans of time.

pub mod allocator;
pub mod arena;
pub(crate) mod arguments;
pub mod constants;
pub mod device;
pub mod device_memory;
pub(crate) mod element;
#[cfg(feature = "emulated")]
pub(crate) mod emulation;
pub mod error;
#[cfg(gpu)]
pub mod gpu;
pub mod graph;
pub mod host;
pub mod huge_pages;
pub mod nontemporal;
pub(crate) mod output;
pub(crate) mod parallel;
pub mod philox;
pub(crate) mod simd;
pub mod trace;
pub mod transfer;
pub(crate) mod view;
