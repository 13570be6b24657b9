//! The weight decay as a function of the samples consumed by applied steps.
//!
//! Follows Megatron-LM's `OptimizerParamScheduler` (`get_wd`).

use std::f64::consts::PI;

use crate::config::{IncreaseStyle, OptimizerConfig};

/// The weight decay of the next step, when earlier applied (not skipped) steps consumed `samples`.
pub fn weight_decay_at(config: &OptimizerConfig, samples: u64) -> f64 {
    let Some(increase) = &config.weight_decay_increase else { return config.weight_decay };
    if samples >= increase.samples {
        return increase.end;
    }
    let ratio = samples as f64 / increase.samples as f64;
    let coefficient = match increase.style {
        IncreaseStyle::Linear => ratio,
        IncreaseStyle::Cosine => 0.5 * ((PI * (1.0 - ratio)).cos() + 1.0),
    };
    increase.start + coefficient * (increase.end - increase.start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{WeightDecayIncrease, valid};

    fn assert_curve(style: IncreaseStyle, points: &[(u64, f64)]) {
        let mut config = valid().optimizer;
        config.weight_decay_increase =
            Some(WeightDecayIncrease { start: 0.1, end: 0.5, style, samples: 400 });
        for &(samples, expected) in points {
            let decay = weight_decay_at(&config, samples);
            assert!(
                (decay - expected).abs() < 1e-12,
                "{style:?} at {samples}: {decay}, not {expected}"
            );
        }
    }

    #[test]
    fn it_grows_from_start_to_end_and_stays_there() {
        assert_curve(
            IncreaseStyle::Linear,
            &[(0, 0.1), (100, 0.2), (200, 0.3), (400, 0.5), (401, 0.5)],
        );
        // cos 60° and cos 45°, counted from the far end of the half wave.
        let quarter = 0.1 + 0.4 * 0.5 * (1.0 - 0.5f64.sqrt());
        assert_curve(
            IncreaseStyle::Cosine,
            &[(0, 0.1), (100, quarter), (200, 0.3), (400, 0.5), (u64::MAX, 0.5)],
        );
    }

    #[test]
    fn it_is_the_same_all_along_without_an_increase() {
        let config = valid().optimizer;
        assert_eq!(
            [0, 7, u64::MAX].map(|samples| weight_decay_at(&config, samples)),
            [config.weight_decay; 3]
        );
    }
}
