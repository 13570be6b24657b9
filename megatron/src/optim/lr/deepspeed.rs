//! DeepSpeed's schedules, in the order of its arithmetic, so that every digit is the same.
//!
//! Follows `deepspeed/runtime/lr_schedules.py` of DeepSpeed 0.19.8. DeepSpeed counts by
//! `last_batch_iteration`: it is −1 at step 0, where the constructor sets a rate without the
//! formula, and k − 1 at step k. So formulas apply from step 1 on, where the count is 0.

use std::f64::consts::PI;

use crate::config::{
    DeepSpeedSchedule, LrRangeTest, OneCycle, Warmup, WarmupCosine, WarmupDecay, WarmupType,
};

/// DeepSpeed sets `beta2` to this value where it cycles `beta1`.
const BETA2_OF_CYCLE: f64 = 0.99;

/// The learning rate of the step after `step` applied ones. `lr` is the optimizer's own rate.
pub fn lr_at(schedule: &DeepSpeedSchedule, lr: f64, step: u64) -> f64 {
    let last = step.checked_sub(1);
    match schedule {
        DeepSpeedSchedule::WarmupLr(warmup) => {
            warmup.between(last.map(|last| warmup.risen(last).unwrap_or(1.0)))
        }
        DeepSpeedSchedule::WarmupDecayLr(decay) => {
            decay.warmup.between(last.map(|last| decay.left(last)))
        }
        DeepSpeedSchedule::WarmupCosineLr(cosine) => match last {
            None => 0.0,
            Some(last) => lr * cosine.ratio(last),
        },
        DeepSpeedSchedule::OneCycle(cycle) => match last {
            None => cycle.cycle_min_lr,
            Some(last) => cycle.lr(last),
        },
        DeepSpeedSchedule::LrRangeTest(test) => test.lr(step),
    }
}

/// `beta1` and `beta2` of the step after `step` applied ones, if the schedule cycles them.
pub fn betas_at(schedule: &DeepSpeedSchedule, step: u64) -> Option<[f64; 2]> {
    let DeepSpeedSchedule::OneCycle(cycle) = schedule else { return None };
    let beta1 = match step.checked_sub(1) {
        None => cycle.cycle_min_mom,
        Some(last) => cycle.momentum(last),
    };
    cycle.cycle_momentum.then_some([beta1, BETA2_OF_CYCLE])
}

/// The fraction of a warm-up that is over; `None` after its end. DeepSpeed makes a warm-up of one
/// step two steps long.
fn risen(steps: u64, of: WarmupType, last: u64) -> Option<f64> {
    let steps = steps.max(2);
    (last < steps).then(|| match of {
        WarmupType::Log => 1.0 / (steps as f64).ln() * ((last + 1) as f64).ln(),
        WarmupType::Linear => last as f64 / steps as f64,
    })
}

impl Warmup {
    fn risen(&self, last: u64) -> Option<f64> {
        risen(self.warmup_num_steps, self.warmup_type, last)
    }

    /// The rate at a fraction of the way from the lowest to the highest.
    fn between(&self, fraction: Option<f64>) -> f64 {
        match fraction {
            None => self.warmup_min_lr,
            Some(gamma) => self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * gamma,
        }
    }
}

impl WarmupDecay {
    /// The fraction of the highest rate, in the warm-up and in the decay.
    fn left(&self, last: u64) -> f64 {
        self.warmup.risen(last).unwrap_or_else(|| {
            let total = self.total_num_steps as f64;
            let decay = total - self.warmup.warmup_num_steps.max(2) as f64;
            ((total - last as f64) / decay.max(1.0)).max(0.0)
        })
    }
}

impl WarmupCosine {
    fn ratio(&self, last: u64) -> f64 {
        if let Some(risen) = risen(self.warmup_num_steps, self.warmup_type, last) {
            return self.warmup_min_ratio + risen * (1.0 - self.warmup_min_ratio);
        }
        let warmup = self.warmup_num_steps.max(2);
        let decay = self.total_num_steps.saturating_sub(warmup).max(1);
        let progress = ((last - warmup + 1) as f64 / decay as f64).min(1.0);
        let wave = (1.0 + (PI * progress).cos()) / 2.0;
        (self.cos_min_ratio + (1.0 - self.cos_min_ratio) * wave).max(0.0)
    }
}

impl OneCycle {
    /// How far the rate is from its lowest in the cycle, from 0 to 1. The momentum is as far from
    /// its highest.
    fn scale(&self, last: u64) -> f64 {
        let (first, second) = self.halves();
        let total = first + second;
        let (step, share) = ((last + 1) as f64, first / total);
        let cycle = (1.0 + step / total).floor();
        let x = 1.0 + step / total - cycle;
        let (scale, stairs) = if x <= share {
            (x / share, self.cycle_first_stair_count)
        } else {
            ((x - 1.0) / (share - 1.0), self.cycle_second_stair_count)
        };
        if stairs == 0 {
            return scale;
        }
        let (stairs, within) = (stairs as f64, step % total);
        let stair = if within <= first {
            within * stairs / first
        } else {
            (total - within) * stairs / second
        };
        stair.floor() / stairs
    }

    fn lr(&self, last: u64) -> f64 {
        let (min, max) = (self.cycle_min_lr, self.cycle_max_lr);
        match self.decay(last) {
            None => min + (max - min) * self.scale(last),
            Some(_) if self.decay_step_size == 0 || self.decay_lr_rate == 0.0 => min,
            Some(intervals) => min / (1.0 + self.decay_lr_rate * intervals),
        }
    }

    /// The momentum grows in the decay; the settings are checked to keep it below 1.
    fn momentum(&self, last: u64) -> f64 {
        let (min, max) = (self.cycle_min_mom, self.cycle_max_mom);
        match self.decay(last) {
            None => max - (max - min) * self.scale(last),
            Some(_) if self.decay_step_size == 0 || self.decay_mom_rate == 0.0 => max,
            Some(intervals) => max * (1.0 + self.decay_mom_rate * intervals),
        }
    }
}

impl LrRangeTest {
    fn lr(&self, step: u64) -> f64 {
        let intervals = step as f64 / self.lr_range_test_step_size as f64;
        let intervals = if self.lr_range_test_staircase { intervals.floor() } else { intervals };
        self.lr_range_test_min_lr * (1.0 + self.lr_range_test_step_rate * intervals)
    }
}

/// The fixture says how DeepSpeed and PyTorch were driven.
#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};
    use kernels::ops::optimizer::{AdamW, Segment, StochasticRounding, adamw_segments};
    use serde_json::Value;

    use super::*;

    const GOLDENS: &str = include_str!("../../../tests/fixtures/lr_schedules.json");

    struct Golden {
        schedule: DeepSpeedSchedule,
        base: f64,
        case: Value,
    }

    impl Golden {
        /// The numbers of all steps under `key`, without serde_json's rounding.
        fn numbers(&self, key: &str) -> Option<Vec<f64>> {
            let text = self.case.get(key)?.as_str()?;
            Some(text.split(' ').map(|number| number.parse().unwrap()).collect())
        }
    }

    fn goldens() -> Vec<Golden> {
        let file: Value = serde_json::from_str(GOLDENS).unwrap();
        let base = file["lr"].as_f64().unwrap();
        let cases = file["cases"].as_array().unwrap().iter().cloned();
        let golden = |case: Value| Golden {
            schedule: serde_json::from_value(case.clone()).unwrap(),
            base,
            case,
        };
        cases.map(golden).collect()
    }

    /// Logarithm and cosine come from the platform's mathematical library, as Python's do. Another
    /// platform's may differ in the last digit; everything else is equal to the last bit anywhere.
    #[track_caller]
    fn assert_equal(got: f64, expected: f64, is_of_library: bool, what: &str) {
        let tolerance = if is_of_library { 1e-15 * expected.abs().max(1e-18) } else { 0.0 };
        assert!((got - expected).abs() <= tolerance, "{what}: {got:?}, not {expected:?}");
    }

    #[test]
    fn every_step_has_the_rate_and_the_momentum_of_deepspeed() {
        let (mut steps, mut cycled) = (0, 0);
        for golden in goldens() {
            let schedule = &golden.schedule;
            let is_of_library = golden.case["warmup_type"] == "log"
                || matches!(schedule, DeepSpeedSchedule::WarmupCosineLr(_));
            for (step, expected) in golden.numbers("lr").unwrap().into_iter().enumerate() {
                let what = format!("{schedule:?} at step {step}");
                let rate = lr_at(schedule, golden.base, step as u64);
                assert_equal(rate, expected, is_of_library, &what);
                steps += 1;
            }
            let momenta = golden.numbers("beta1").unwrap_or_default();
            for (step, expected) in momenta.iter().enumerate() {
                let [beta1, beta2] = betas_at(schedule, step as u64).unwrap();
                assert_equal(beta1, *expected, false, &format!("{schedule:?} at step {step}"));
                assert_eq!(beta2, 0.99);
                cycled += 1;
            }
            assert!(!momenta.is_empty() || betas_at(schedule, 3).is_none());
        }
        assert!(steps > 700 && cycled >= 200, "{steps} steps, {cycled} with momentum");
    }

    /// Bias correction uses the step's own `beta1`, to the power of the step, as in PyTorch.
    #[test]
    fn an_update_with_cycled_momentum_is_that_of_pytorch() {
        for golden in goldens() {
            let Some(weights) = golden.numbers("weights") else { continue };
            let tensor = |value: f64| Tensor::new(&[value], &Device::Cpu).unwrap();
            let (weight, first, second) = (tensor(1.0), tensor(0.0), tensor(0.0));
            for (step, expected) in weights.into_iter().enumerate() {
                let [beta1, beta2] = betas_at(&golden.schedule, step as u64).unwrap();
                let adam = AdamW {
                    lr: lr_at(&golden.schedule, golden.base, step as u64),
                    beta1,
                    beta2,
                    eps: 1e-8,
                    weight_decay: 0.0,
                    step: step as u64 + 1,
                    grad_scale: 1.0,
                };
                let grad = tensor(((step * 7 % 5) as f64 - 2.0) / 4.0);
                let whole =
                    Segment { len: 1, decays: false, rounding: StochasticRounding::default() };
                adamw_segments(&weight, None, &grad, &first, &second, &adam, None, &[whole])
                    .unwrap();
                let got = weight.to_vec1::<f64>().unwrap()[0];
                let schedule = &golden.schedule;
                assert!(
                    (got - expected).abs() < 1e-13,
                    "{schedule:?} at step {step}: {got:?}, not {expected:?}"
                );
            }
        }
    }
}
