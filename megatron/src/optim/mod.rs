//! Optimizers, learning-rate schedules, and who writes what of a model's state.

mod loss_scale;
mod lr;
mod optimizer;
mod ownership;
mod state;

pub use loss_scale::{LossScaler, LossScalerState};
pub use lr::LrSchedule;
pub use optimizer::{Optimizer, Queued, StepResult};
pub use ownership::written;
