//! Megatron-LM's schedule: a warm-up, then a decay, as a function of the samples of applied steps.
//!
//! Follows Megatron-LM's `OptimizerParamScheduler`; WSD is Hu et al. 2024 (MiniCPM). Lengths are in
//! samples, so a schedule does not depend on the batch size.

use std::f64::consts::PI;

use crate::config::{DecayStyle, OptimizerConfig, WsdDecayStyle};
use crate::{Error, Result};

/// A linear warm-up, from 0 by default, then one of the decay styles down
/// to the minimum.
#[derive(Clone, Debug)]
pub struct MegatronSchedule {
    max_lr: f64,
    min_lr: f64,
    style: DecayStyle,
    decay: u64,
    warmup: u64,
    warmup_init: f64,
    wsd_decay: u64,
    wsd_style: WsdDecayStyle,
}

impl MegatronSchedule {
    /// The schedule of a run.
    ///
    /// # Errors
    /// If a rate is negative or not finite, if `min_lr` or the initial rate of the warm-up exceeds
    /// `lr`, or if the lengths do not fit together.
    pub fn new(config: &OptimizerConfig) -> Result<Self> {
        let &OptimizerConfig {
            lr,
            min_lr,
            decay_style,
            decay_samples,
            warmup_samples,
            warmup_init,
            ..
        } = config;
        let &OptimizerConfig { wsd_decay_samples, wsd_decay_style, .. } = config;
        if !lr.is_finite() || !min_lr.is_finite() || min_lr < 0.0 || min_lr > lr {
            return Err(Error::config(format!(
                "lr = {lr} and min-lr = {min_lr} must satisfy 0 ≤ min-lr ≤ lr"
            )));
        }
        if !(0.0..=lr).contains(&warmup_init) {
            return Err(Error::config(format!(
                "lr-warmup-init = {warmup_init} must be between 0 and lr = {lr}"
            )));
        }
        if decay_style != DecayStyle::Constant
            && (warmup_samples > decay_samples || decay_samples == 0)
        {
            return Err(Error::config(format!(
                "the warm-up of {warmup_samples} samples must not be longer than the decay of {decay_samples} samples, \
                 which includes it and has at least one; shorten lr-warmup or lengthen lr-decay"
            )));
        }
        let room = decay_samples.saturating_sub(warmup_samples);
        if decay_style == DecayStyle::Wsd && wsd_decay_samples > room {
            return Err(Error::config(format!(
                "a WSD schedule anneals over its last {wsd_decay_samples} samples, which must be at most decay − warm-up = \
                 {decay_samples} − {warmup_samples} = {room}; shorten lr-wsd-decay"
            )));
        }
        Ok(Self {
            max_lr: lr,
            min_lr,
            style: decay_style,
            decay: decay_samples,
            warmup: warmup_samples,
            warmup_init,
            wsd_decay: wsd_decay_samples,
            wsd_style: wsd_decay_style,
        })
    }

    /// The learning rate of the next step, when earlier applied (not skipped) steps consumed
    /// `samples`. The k-th applied step, counted from 0, has samples = k·GBS. With a warm-up, the
    /// first step has the warm-up's initial rate, by default 0.
    pub fn lr_at(&self, samples: u64) -> f64 {
        if self.warmup > 0 && samples <= self.warmup {
            return self.warmup_init
                + (self.max_lr - self.warmup_init) * samples as f64 / self.warmup as f64;
        }
        if self.style == DecayStyle::Constant {
            return self.max_lr;
        }
        if samples > self.decay {
            return self.min_lr;
        }
        let ratio = (samples - self.warmup) as f64 / (self.decay - self.warmup) as f64;
        let coefficient = match self.style {
            DecayStyle::InverseSquareRoot => {
                let lr = self.max_lr * (self.warmup.max(1) as f64).sqrt()
                    / (samples.max(1) as f64).sqrt();
                return lr.max(self.min_lr);
            }
            DecayStyle::Constant => 1.0,
            DecayStyle::Linear => 1.0 - ratio,
            DecayStyle::Cosine => cosine(ratio),
            DecayStyle::Wsd => self.anneal(samples),
        };
        self.min_lr + coefficient * (self.max_lr - self.min_lr)
    }

    /// The number of samples after which the rate stays at its lowest. `None` for a constant
    /// schedule, which never falls.
    pub fn end(&self) -> Option<u64> {
        (!matches!(self.style, DecayStyle::Constant)).then_some(self.decay)
    }

    /// The rate from [`Self::end`] on.
    pub fn lowest(&self) -> f64 {
        self.min_lr
    }

    /// Coefficient of a WSD schedule. It is 1 until the last `wsd_decay` samples.
    fn anneal(&self, samples: u64) -> f64 {
        let stable = self.decay - self.wsd_decay;
        if samples <= stable {
            return 1.0;
        }
        let ratio = (samples - stable) as f64 / self.wsd_decay as f64;
        match self.wsd_style {
            WsdDecayStyle::Linear => 1.0 - ratio,
            WsdDecayStyle::Cosine => cosine(ratio),
            WsdDecayStyle::Exponential => 2.0 * 0.5f64.powf(ratio) - 1.0,
            WsdDecayStyle::MinusSqrt => 1.0 - ratio.sqrt(),
        }
    }
}

/// Half a cosine wave from 1 down to 0.
fn cosine(ratio: f64) -> f64 {
    0.5 * ((PI * ratio).cos() + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::OptimizerKind;

    fn config(decay_style: DecayStyle) -> OptimizerConfig {
        OptimizerConfig {
            kind: OptimizerKind::Adam,
            lr: 1.0,
            min_lr: 0.1,
            decay_style,
            decay_samples: 1000,
            warmup_samples: 100,
            warmup_init: 0.0,
            wsd_decay_samples: 400,
            wsd_decay_style: WsdDecayStyle::Linear,
            lr_schedule: None,
            weight_decay: 0.1,
            weight_decay_increase: None,
            adam_beta1: 0.9,
            adam_beta2: 0.95,
            adam_eps: 1e-8,
            exp_avg_dtype: Default::default(),
            exp_avg_sq_dtype: Default::default(),
            offload: Default::default(),
            sgd_momentum: 0.9,
            clip_grad: 1.0,
        }
    }

    #[track_caller]
    fn assert_curve(config: &OptimizerConfig, points: &[(u64, f64)]) {
        let schedule = MegatronSchedule::new(config).unwrap();
        for &(samples, lr) in points {
            let got = schedule.lr_at(samples);
            assert!((got - lr).abs() < 1e-12, "at {samples} samples: {got}, expected {lr}");
        }
    }

    #[test]
    fn warm_up_rises_linearly_from_zero_whatever_the_style() {
        for style in [
            DecayStyle::Constant,
            DecayStyle::Linear,
            DecayStyle::Cosine,
            DecayStyle::InverseSquareRoot,
            DecayStyle::Wsd,
        ] {
            assert_curve(&config(style), &[(0, 0.0), (25, 0.25), (50, 0.5), (100, 1.0)]);
        }
    }

    #[test]
    fn constant_never_decays() {
        assert_curve(&config(DecayStyle::Constant), &[(101, 1.0), (1000, 1.0), (1_000_000, 1.0)]);
    }

    #[test]
    fn linear_falls_from_the_end_of_the_warm_up_to_the_minimum() {
        // 550 is half of the way from 100 to 1000: 0.1 + 0.5 · 0.9.
        assert_curve(
            &config(DecayStyle::Linear),
            &[(325, 0.775), (550, 0.55), (1000, 0.1), (1001, 0.1)],
        );
    }

    #[test]
    fn cosine_is_half_a_wave() {
        // cos 60° = 1/2 a third of the way: 0.1 + 0.9 · 0.75; two thirds: 0.1 + 0.9 · 0.25.
        assert_curve(
            &config(DecayStyle::Cosine),
            &[(400, 0.775), (550, 0.55), (700, 0.325), (1000, 0.1), (5000, 0.1)],
        );
    }

    #[test]
    fn inverse_square_root_is_floored_by_the_minimum() {
        let curve = [(400, 0.5), (900, 1.0 / 3.0), (1000, 0.1f64.sqrt()), (1001, 0.1)];
        assert_curve(&config(DecayStyle::InverseSquareRoot), &curve);
        let floored = OptimizerConfig { min_lr: 0.4, ..config(DecayStyle::InverseSquareRoot) };
        assert_curve(&floored, &[(400, 0.5), (900, 0.4)]);
        let without_warmup =
            OptimizerConfig { warmup_samples: 0, ..config(DecayStyle::InverseSquareRoot) };
        assert_curve(&without_warmup, &[(0, 1.0), (1, 1.0), (4, 0.5)]);
    }

    #[test]
    fn wsd_is_stable_until_its_last_part_and_anneals_in_four_styles() {
        let quarter = 700; // a quarter of the annealing from 600 to 1000
        for (style, coefficient) in [
            (WsdDecayStyle::Linear, 0.75),
            (WsdDecayStyle::Cosine, 0.5 * (0.5f64.sqrt() + 1.0)), // cos 45° = √½
            (WsdDecayStyle::Exponential, 2.0 / 2f64.powf(0.25) - 1.0),
            (WsdDecayStyle::MinusSqrt, 0.5),
        ] {
            let config = OptimizerConfig { wsd_decay_style: style, ..config(DecayStyle::Wsd) };
            assert_curve(
                &config,
                &[
                    (101, 1.0),
                    (600, 1.0),
                    (quarter, 0.1 + 0.9 * coefficient),
                    (1000, 0.1),
                    (1001, 0.1),
                ],
            );
        }
    }

    #[test]
    fn wsd_without_annealing_drops_to_the_minimum_at_its_end() {
        let config = OptimizerConfig { wsd_decay_samples: 0, ..config(DecayStyle::Wsd) };
        assert_curve(&config, &[(1000, 1.0), (1001, 0.1)]);
    }

    #[test]
    fn decay_starts_at_once_without_warm_up() {
        let config = OptimizerConfig { warmup_samples: 0, ..config(DecayStyle::Linear) };
        assert_curve(&config, &[(0, 1.0), (500, 0.55)]);
    }

    #[test]
    fn a_warm_up_begins_at_the_rate_that_it_is_given() {
        let config = OptimizerConfig { warmup_init: 0.2, ..config(DecayStyle::Linear) };
        assert_curve(&config, &[(0, 0.2), (25, 0.4), (100, 1.0), (550, 0.55)]);
    }

    #[test]
    fn a_warm_up_may_be_as_long_as_the_decay() {
        let styles = [
            DecayStyle::Linear,
            DecayStyle::Cosine,
            DecayStyle::InverseSquareRoot,
            DecayStyle::Wsd,
        ];
        for style in styles {
            let config =
                OptimizerConfig { warmup_samples: 1000, wsd_decay_samples: 0, ..config(style) };
            assert_curve(&config, &[(0, 0.0), (500, 0.5), (1000, 1.0), (1001, 0.1)]);
        }
    }

    #[test]
    fn lengths_and_rates_that_contradict_each_other_are_refused() {
        let refused = |config: OptimizerConfig| {
            MegatronSchedule::new(&config).expect_err("must be refused").to_string()
        };
        let linear = || config(DecayStyle::Linear);
        assert!(refused(OptimizerConfig { min_lr: 2.0, ..linear() }).contains("min-lr = 2"));
        assert!(refused(OptimizerConfig { lr: f64::NAN, ..linear() }).contains("lr = NaN"));
        assert!(
            refused(OptimizerConfig { warmup_samples: 1001, ..linear() })
                .contains("longer than the decay of 1000")
        );
        assert!(
            refused(OptimizerConfig { warmup_init: 1.5, ..linear() })
                .contains("lr-warmup-init = 1.5")
        );
        assert!(
            refused(OptimizerConfig { wsd_decay_samples: 901, ..config(DecayStyle::Wsd) })
                .contains("1000 − 100 = 900")
        );
    }
}
