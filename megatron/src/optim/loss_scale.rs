//! The loss scale of fp16 training (Micikevicius et al. 2018), by the rule of DeepSpeed's
//! `DynamicLossScaler`.

use serde::{Deserialize, Serialize};

use crate::config::{DynamicLossScale, LossScaling, Precision};
use crate::{Error, Result};

/// The factor on the loss of every step. All ranks of a run have the same factor, because all see
/// the same overflows.
#[derive(Clone, Debug, PartialEq)]
pub struct LossScaler {
    scale: f64,
    dynamic: Option<Dynamic>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Dynamic {
    config: DynamicLossScale,
    /// Steps so far.
    iteration: u64,
    /// The last step that overflowed.
    last_overflow: Option<u64>,
    /// Overflows that are left until the scale is halved.
    hysteresis: u64,
}

/// The state of a dynamic loss scale in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LossScalerState {
    /// As text, which restores the exact value.
    scale: String,
    iteration: u64,
    last_overflow: Option<u64>,
    hysteresis: u64,
}

impl LossScaler {
    /// The scale of a run's first step: 1, except in fp16.
    pub fn new(precision: Precision) -> Self {
        match precision {
            Precision::Fp16(LossScaling::Static(scale)) => Self { scale, dynamic: None },
            Precision::Fp16(LossScaling::Dynamic(config)) => Self {
                scale: config.initial,
                dynamic: Some(Dynamic {
                    config,
                    iteration: 0,
                    last_overflow: None,
                    hysteresis: config.hysteresis,
                }),
            },
            Precision::Fp64 | Precision::Fp32 | Precision::Bf16 => {
                Self { scale: 1.0, dynamic: None }
            }
        }
    }

    /// Factor on the loss, and so on every gradient, of the next step.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Whether the scale is dynamic: whether a step's scale depends on the outcome of the previous
    /// step.
    pub fn adapts(&self) -> bool {
        self.dynamic.is_some()
    }

    /// Whether overflows can still lower the scale, at once or after a few of them.
    pub fn may_fall(&self) -> bool {
        self.dynamic.is_some_and(|dynamic| self.scale > dynamic.config.min)
    }

    /// Updates the scale after a step. `overflow` tells whether the step's gradients overflowed.
    ///
    /// # Errors
    /// If they overflowed at the minimum scale.
    pub fn update(&mut self, overflow: bool) -> Result<()> {
        let Some(Dynamic { config, iteration, last_overflow, hysteresis }) = &mut self.dynamic
        else {
            return Ok(());
        };
        if overflow {
            if *hysteresis > 1 {
                *hysteresis -= 1;
            } else if self.scale <= config.min {
                return Err(Error::Diverged(format!(
                    "the gradients are not finite although the loss scale is already at its \
                     minimum, {}: the model diverges; continue from an earlier checkpoint with a \
                     lower lr or clip_grad, or train in bf16, which needs no loss scale",
                    config.min
                )));
            } else {
                self.scale = (self.scale / 2.0).max(config.min);
            }
            *last_overflow = Some(*iteration);
        } else {
            // Without an overflow so far, count as if the step before the first had overflowed.
            let good = last_overflow.map_or(*iteration, |last| *iteration - last - 1);
            let grows = good > 0 && good.is_multiple_of(config.window);
            if config.consecutive_hysteresis || grows {
                *hysteresis = config.hysteresis;
            }
            if grows {
                self.scale *= 2.0;
            }
        }
        *iteration += 1;
        Ok(())
    }

    /// The state for a checkpoint; `None` for a static scale.
    pub fn state(&self) -> Option<LossScalerState> {
        self.dynamic.map(|d| LossScalerState {
            scale: self.scale.to_string(),
            iteration: d.iteration,
            last_overflow: d.last_overflow,
            hysteresis: d.hysteresis,
        })
    }

    /// Restores the state from a checkpoint; does nothing for a static scale.
    ///
    /// # Errors
    /// If the state holds no scale.
    pub fn restore(&mut self, state: &LossScalerState) -> Result<()> {
        let Some(dynamic) = &mut self.dynamic else { return Ok(()) };
        let scale =
            state.scale.parse().ok().filter(|scale: &f64| scale.is_finite() && *scale > 0.0);
        let scale =
            scale.ok_or_else(|| Error::config(format!("{:?} is not a loss scale", state.scale)))?;
        if state.last_overflow.is_some_and(|last| last >= state.iteration) {
            return Err(Error::config(
                "the last overflow of its loss scale is after its last step",
            ));
        }
        self.scale = scale;
        dynamic.iteration = state.iteration;
        dynamic.last_overflow = state.last_overflow;
        dynamic.hysteresis = state.hysteresis.clamp(1, dynamic.config.hysteresis);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaler(config: DynamicLossScale) -> LossScaler {
        LossScaler::new(Precision::Fp16(LossScaling::Dynamic(config)))
    }

    /// The scale after each step; `x` overflows, `.` does not.
    fn scales(scaler: &mut LossScaler, steps: &str) -> Vec<f64> {
        let step = |c| {
            scaler.update(c == 'x').unwrap();
            scaler.scale()
        };
        steps.chars().map(step).collect()
    }

    const SMALL: DynamicLossScale = DynamicLossScale {
        initial: 8.0,
        min: 1.0,
        window: 2,
        hysteresis: 1,
        consecutive_hysteresis: false,
    };

    // The expected scales of these tests are the values that DeepSpeed's DynamicLossScaler has
    // after `update_scale` of each step.

    #[test]
    fn an_overflow_halves_and_a_window_without_one_doubles() {
        // The window starts at the step after the first good one, because DeepSpeed counts
        // (iteration − last overflow) − 1.
        assert_eq!(scales(&mut scaler(SMALL), "x....."), [4.0, 4.0, 4.0, 8.0, 8.0, 16.0]);
        assert_eq!(scales(&mut scaler(SMALL), "....."), [8.0, 8.0, 16.0, 16.0, 32.0]);
    }

    #[test]
    fn hysteresis_tolerates_overflows_and_is_refilled_when_the_scale_grows() {
        let config = DynamicLossScale { hysteresis: 2, ..SMALL };
        assert_eq!(scales(&mut scaler(config), "x.x"), [8.0, 8.0, 4.0]);
        assert_eq!(scales(&mut scaler(config), "x...x.x"), [8.0, 8.0, 8.0, 16.0, 16.0, 16.0, 8.0]);
        // Once the hysteresis is spent, it stays spent until the scale grows.
        assert_eq!(scales(&mut scaler(config), "xxx"), [8.0, 4.0, 2.0]);
    }

    #[test]
    fn consecutive_hysteresis_is_refilled_by_every_step_without_overflow() {
        let config = DynamicLossScale { hysteresis: 2, consecutive_hysteresis: true, ..SMALL };
        assert_eq!(scales(&mut scaler(config), "x.x.xx"), [8.0, 8.0, 8.0, 8.0, 8.0, 4.0]);
    }

    #[test]
    fn the_minimum_is_reached_and_then_an_overflow_is_an_error() {
        let mut scaler = scaler(DynamicLossScale { min: 3.0, ..SMALL });
        assert!(scaler.may_fall());
        assert_eq!(scales(&mut scaler, "xx"), [4.0, 3.0]);
        assert!(!scaler.may_fall());
        let error = scaler.update(true).unwrap_err().to_string();
        assert!(error.contains("already at its minimum, 3") && error.contains("bf16"), "{error}");
    }

    #[test]
    fn the_scale_goes_on_where_it_stopped() {
        let config = DynamicLossScale { initial: 1.1, min: 1e-3, hysteresis: 2, ..SMALL };
        let steps = "x..x.xx...";
        let whole = scales(&mut scaler(config), steps);
        for cut in 0..steps.len() {
            let mut first = scaler(config);
            scales(&mut first, &steps[..cut]);
            let state = serde_json::to_string(&first.state().unwrap()).unwrap();
            let mut second = scaler(config);
            second.restore(&serde_json::from_str(&state).unwrap()).unwrap();
            assert_eq!(second, first);
            assert_eq!(scales(&mut second, &steps[cut..]), whole[cut..]);
        }
    }

    #[test]
    fn a_static_scale_stays_and_other_precisions_have_none() {
        let mut fixed = LossScaler::new(Precision::Fp16(LossScaling::Static(128.0)));
        assert_eq!(scales(&mut fixed, "x.x"), [128.0; 3]);
        assert_eq!((LossScaler::new(Precision::Bf16).scale(), fixed.state()), (1.0, None));
    }
}
