//! Computation on CPUs: plain functions on slices, split over a thread pool.

pub mod activation;
pub mod attention;
pub mod clip;
pub mod columns;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub(crate) mod gemm;
pub mod lanes;
pub mod linear;
pub mod norm;
pub mod optimizer;
pub mod reduce;
pub mod regroup;
pub mod remainders;
pub mod rope;
