//! Computation on CPUs: plain functions of slices, split over a thread pool.

pub mod attention;
pub(crate) mod gemm;
pub mod optimizer;
