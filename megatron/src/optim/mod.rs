//! Optimizers and learning-rate schedules.

mod lr;

pub use lr::LrSchedule;
