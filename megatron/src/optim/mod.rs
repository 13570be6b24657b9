//! Optimizers and learning-rate schedules.

mod lr;
mod optimizer;

pub use lr::LrSchedule;
pub use optimizer::{Optimizer, StepResult};
