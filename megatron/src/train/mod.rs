//! The training loop, and what it reports.

pub mod metrics;
pub mod report;

pub use metrics::{EvalMetrics, MetricsWriter, StepMetrics};
pub use report::Reporter;
