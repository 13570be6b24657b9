//! The operations. They check shapes and choose a device; the modules `cpu` and `cuda` compute.

pub mod activation;
pub mod attention;
pub mod clip;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod linear;
pub mod norm;
pub mod optimizer;
pub mod reduce;
pub mod regroup;
pub mod remainders;
pub mod rope;
#[cfg(feature = "cuda")]
pub mod survey;
