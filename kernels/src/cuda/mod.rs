//! Computation on GPUs: a module for each of [`ops`](crate::ops). It launches kernels of `cuda/` on
//! the stream of the tensors' device, or calls cuBLASLt.
//!
//! An operation returns when its kernels are queued; nothing here waits for the device.

pub(crate) mod activation;
pub(crate) mod attention;
pub(crate) mod columns;
pub(crate) mod cross_entropy;
pub(crate) mod dropout;
pub(crate) mod embedding;
#[cfg(feature = "cuda")]
pub(crate) mod linear;
pub(crate) mod norm;
pub(crate) mod optimizer;
#[cfg(feature = "cuda")]
pub(crate) mod product;
pub(crate) mod reduce;
pub(crate) mod regroup;
pub(crate) mod rope;
