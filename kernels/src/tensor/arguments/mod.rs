//! Shapes, masks, rules and settings that operations are called with, read by the kernels of both
//! kinds of device.

pub mod attention;
pub mod clip;
pub mod cross_entropy;
pub mod dropout;
pub mod norm;
pub mod optimizer;
pub mod rope;
pub mod stochastic_rounding;
