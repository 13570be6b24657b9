//! Optimizers, learning-rate schedules, and who writes what of a model's state.

mod loss_scale;
mod lr;
mod optimizer;
mod ownership;
mod state;
mod weight_decay;

pub use loss_scale::{LossScaler, LossScalerState};
pub use lr::LrSchedule;
pub use optimizer::{Optimizer, Queued, Rates, StepResult};
pub use ownership::written;
pub use weight_decay::weight_decay_at;
