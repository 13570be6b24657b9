//! Arguments of operations: shapes, masks, rules and settings. The kernels of CPU and GPU both read
//! them.

pub mod attention;
pub mod clip;
pub mod cross_entropy;
pub mod dropout;
pub mod norm;
pub mod optimizer;
pub mod rope;
pub mod stochastic_rounding;
