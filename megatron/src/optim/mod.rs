//! Optimizers, learning-rate schedules, and the ownership of a model's state when it is saved.
//!
//! ```
//! use megatron::config::{DecayStyle, DynamicLossScale, LossScaling, OptimizerConfig, Precision};
//! use megatron::optim::{Applied, LossScaler, LrSchedule};
//!
//! # fn main() -> megatron::Result<()> {
//! // Warm-up over 100 samples, then down to min_lr at 1,100.
//! let lr = LrSchedule::new(&OptimizerConfig {
//!     lr: 1.0,
//!     min_lr: 0.2,
//!     decay_style: DecayStyle::Linear,
//!     warmup_samples: 100,
//!     decay_samples: 1100,
//!     ..Default::default()
//! })?;
//! let rates = [0, 50, 100, 600, 1100, 5000]
//!     .map(|samples| lr.lr_at(Applied { samples, ..Default::default() }));
//! for (rate, expected) in rates.into_iter().zip([0.0, 0.5, 1.0, 0.6, 0.2, 0.2]) {
//!     assert!((rate - expected).abs() < 1e-9, "{rate}");
//! }
//!
//! // fp16: the scale is halved when gradients overflow.
//! let dynamic = DynamicLossScale { hysteresis: 1, ..Default::default() };
//! let mut scaler = LossScaler::new(Precision::Fp16(LossScaling::Dynamic(dynamic)));
//! let before = scaler.scale();
//! scaler.update(true)?;
//! assert_eq!(scaler.scale(), before / 2.0);
//! # Ok(())
//! # }
//! ```

mod loss_scale;
mod lr;
mod optimizer;
mod ownership;
mod state;
mod weight_decay;

pub use loss_scale::{LossScaler, LossScalerState};
pub use lr::{Applied, LrSchedule};
pub use optimizer::{Optimizer, Queued, Rates, StepResult};
pub use ownership::written;
pub use weight_decay::weight_decay_at;
