//! DeepSpeed's learning-rate schedules. Settings have DeepSpeed's names, and lengths are in steps.
//!
//! Source: `deepspeed/runtime/lr_schedules.py`. OneCycle and the range test are Smith 2018
//! (arXiv:1803.09820).

use serde::{Deserialize, Serialize};

/// A schedule of DeepSpeed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type")]
pub enum DeepSpeedSchedule {
    /// A warm-up, then the highest rate.
    #[serde(rename = "WarmupLR")]
    WarmupLr(Warmup),
    /// A warm-up, then a linear decay.
    #[serde(rename = "WarmupDecayLR")]
    WarmupDecayLr(WarmupDecay),
    /// A warm-up, then half a cosine wave. Its rates are fractions of the optimizer's.
    #[serde(rename = "WarmupCosineLR")]
    WarmupCosineLr(WarmupCosine),
    /// The rate rises and falls once, the momentum falls and rises; then both may decay.
    OneCycle(OneCycle),
    /// The rate rises all along, to find the rate at which training diverges.
    #[serde(rename = "LRRangeTest")]
    LrRangeTest(LrRangeTest),
}

/// How a warm-up rises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WarmupType {
    /// With log(step) / log(length).
    Log,
    /// With step / length.
    Linear,
}

/// A rise from `warmup_min_lr` to `warmup_max_lr`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Warmup {
    /// Rate of the first two steps.
    pub warmup_min_lr: f64,
    /// Rate after the warm-up.
    pub warmup_max_lr: f64,
    /// Length; 1 counts as 2.
    pub warmup_num_steps: u64,
    /// Shape.
    pub warmup_type: WarmupType,
}

/// A warm-up, and a linear decay to `warmup_min_lr`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WarmupDecay {
    /// The warm-up, and the two rates of the decay.
    #[serde(flatten)]
    pub warmup: Warmup,
    /// Steps until the decay ends, warm-up included.
    pub total_num_steps: u64,
}

/// A warm-up to the optimizer's rate, and a decay along half a cosine wave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WarmupCosine {
    /// Where the warm-up begins, as a fraction of the rate. The very first step has rate 0.
    pub warmup_min_ratio: f64,
    /// Length; 1 counts as 2.
    pub warmup_num_steps: u64,
    /// Shape.
    pub warmup_type: WarmupType,
    /// Where the decay ends, as a fraction of the rate.
    pub cos_min_ratio: f64,
    /// Steps until the decay ends, warm-up included.
    pub total_num_steps: u64,
}

/// A rise and a fall of the rate, then a decay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OneCycle {
    /// Rate at both ends of the cycle.
    pub cycle_min_lr: f64,
    /// Rate in its middle.
    pub cycle_max_lr: f64,
    /// Steps of the rise.
    pub cycle_first_step_size: u64,
    /// Steps of the fall.
    pub cycle_second_step_size: u64,
    /// Stairs in which the rate rises; 0 for a rise with every step.
    pub cycle_first_stair_count: u64,
    /// The same for the fall.
    pub cycle_second_stair_count: u64,
    /// Steps of an interval of the decay after the cycle; 0 for no decay.
    pub decay_step_size: u64,
    /// After n intervals the rate is `cycle_min_lr` / (1 + `decay_lr_rate` · n).
    pub decay_lr_rate: f64,
    /// Whether AdamW's `beta1` follows the cycle. DeepSpeed then sets `beta2` to 0.99.
    pub cycle_momentum: bool,
    /// `beta1` in the middle of the cycle, and of the very first step.
    pub cycle_min_mom: f64,
    /// `beta1` at both ends of the cycle.
    pub cycle_max_mom: f64,
    /// After n intervals `beta1` is `cycle_max_mom` · (1 + `decay_mom_rate` · n).
    pub decay_mom_rate: f64,
}

/// A rate that rises without end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LrRangeTest {
    /// Rate of the first step.
    pub lr_range_test_min_lr: f64,
    /// Steps of an interval.
    pub lr_range_test_step_size: u64,
    /// After n intervals the rate is `lr_range_test_min_lr` · (1 + `lr_range_test_step_rate` · n).
    pub lr_range_test_step_rate: f64,
    /// Whether the rate rises only at the end of an interval.
    pub lr_range_test_staircase: bool,
}

impl OneCycle {
    /// Steps of a cycle's two halves.
    pub(crate) fn halves(&self) -> (f64, f64) {
        (self.cycle_first_step_size as f64, self.cycle_second_step_size as f64)
    }

    /// Intervals of the decay after the cycle, or `None` in the cycle. They begin with one step.
    pub(crate) fn decay(&self, last: u64) -> Option<f64> {
        let (first, second) = self.halves();
        let (last, total) = (last as f64, first + second);
        (last >= total).then(|| (last - total + 1.0) / self.decay_step_size as f64)
    }
}
