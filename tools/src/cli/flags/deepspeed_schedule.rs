//! DeepSpeed's learning-rate schedules, by DeepSpeed's names and with the defaults of its classes.

use clap::{ArgAction, Args, ValueEnum};
use megatron::config::WarmupType;

use super::choice;

#[derive(Args, Clone, Debug)]
pub struct DeepSpeedScheduleFlags {
    /// A learning-rate schedule of DeepSpeed, in place of --lr-decay-style and --lr-warmup-…. The
    /// flags below are its settings; lengths are in steps that update the weights
    #[arg(long, value_name = "NAME", value_enum)]
    pub lr_schedule: Option<LrScheduleName>,
    /// WarmupLR, WarmupDecayLR: learning rate of the first two steps
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub warmup_min_lr: f64,
    /// WarmupLR, WarmupDecayLR: learning rate after the warm-up [default: --lr; in DeepSpeed 0.001
    /// for WarmupDecayLR]
    #[arg(long, value_name = "X")]
    pub warmup_max_lr: Option<f64>,
    /// The three Warmup…: length of the warm-up
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub warmup_num_steps: u64,
    /// The three Warmup…: how the learning rate rises, with log(step) or with the step
    #[arg(long, value_name = "TYPE", default_value = "log",
          value_parser = choice::<WarmupType>(&["log", "linear"]))]
    pub warmup_type: WarmupType,
    /// WarmupDecayLR, WarmupCosineLR: steps until the decay ends, warm-up included
    /// [default: the whole run]
    #[arg(long, value_name = "N")]
    pub total_num_steps: Option<u64>,
    /// WarmupCosineLR: where the warm-up begins, as a fraction of --lr
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub warmup_min_ratio: f64,
    /// WarmupCosineLR: where the decay ends, as a fraction of --lr
    #[arg(long, value_name = "X", default_value_t = 0.0001)]
    pub cos_min_ratio: f64,
    /// OneCycle: learning rate at both ends of the cycle
    #[arg(long, value_name = "X")]
    pub cycle_min_lr: Option<f64>,
    /// OneCycle: learning rate in the middle of the cycle
    #[arg(long, value_name = "X")]
    pub cycle_max_lr: Option<f64>,
    /// OneCycle: the rate is divided by 1 + this · n after n intervals of --decay-step-size
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub decay_lr_rate: f64,
    /// OneCycle: steps in which the rate rises
    #[arg(long, value_name = "N", default_value_t = 2000)]
    pub cycle_first_step_size: u64,
    /// OneCycle: steps in which the rate falls [default: --cycle-first-step-size]
    #[arg(long, value_name = "N")]
    pub cycle_second_step_size: Option<u64>,
    /// OneCycle: stairs in which the rate rises; 0 lets every step rise
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub cycle_first_stair_count: u64,
    /// OneCycle: stairs in which the rate falls [default: --cycle-first-stair-count]
    #[arg(long, value_name = "N")]
    pub cycle_second_stair_count: Option<u64>,
    /// OneCycle: steps of an interval of the decay after the cycle; 0 for no decay
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub decay_step_size: u64,
    /// OneCycle: Adam's beta1 falls as the rate rises, and beta2 is 0.99, as in DeepSpeed. SGD's
    /// momentum is not cycled
    #[arg(long, action = ArgAction::Set, default_value_t = true)]
    pub cycle_momentum: bool,
    /// OneCycle: beta1 in the middle of the cycle, and of the first step
    #[arg(long, value_name = "X", default_value_t = 0.8)]
    pub cycle_min_mom: f64,
    /// OneCycle: beta1 at both ends of the cycle
    #[arg(long, value_name = "X", default_value_t = 0.9)]
    pub cycle_max_mom: f64,
    /// OneCycle: beta1 is multiplied by 1 + this · n after n intervals of --decay-step-size
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub decay_mom_rate: f64,
    /// LRRangeTest: learning rate of the first step
    #[arg(long, value_name = "X", default_value_t = 0.001)]
    pub lr_range_test_min_lr: f64,
    /// LRRangeTest: steps of an interval
    #[arg(long, value_name = "N", default_value_t = 2000)]
    pub lr_range_test_step_size: u64,
    /// LRRangeTest: the rate is multiplied by 1 + this · n after n intervals
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub lr_range_test_step_rate: f64,
    /// LRRangeTest: the rate rises only at the end of an interval
    #[arg(long)]
    pub lr_range_test_staircase: bool,
}

/// The name of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LrScheduleName {
    #[value(name = "WarmupLR")]
    WarmupLr,
    #[value(name = "WarmupDecayLR")]
    WarmupDecayLr,
    #[value(name = "WarmupCosineLR")]
    WarmupCosineLr,
    #[value(name = "OneCycle")]
    OneCycle,
    #[value(name = "LRRangeTest")]
    LrRangeTest,
}

impl LrScheduleName {
    /// The settings of the schedule.
    pub fn keys(self) -> &'static [&'static str] {
        match self {
            Self::WarmupLr => {
                &["warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"]
            }
            Self::WarmupDecayLr => &[
                "warmup_min_lr",
                "warmup_max_lr",
                "warmup_num_steps",
                "warmup_type",
                "total_num_steps",
            ],
            Self::WarmupCosineLr => &[
                "warmup_min_ratio",
                "warmup_num_steps",
                "warmup_type",
                "cos_min_ratio",
                "total_num_steps",
            ],
            Self::OneCycle => &[
                "cycle_min_lr",
                "cycle_max_lr",
                "decay_lr_rate",
                "cycle_first_step_size",
                "cycle_second_step_size",
                "cycle_first_stair_count",
                "cycle_second_stair_count",
                "decay_step_size",
                "cycle_momentum",
                "cycle_min_mom",
                "cycle_max_mom",
                "decay_mom_rate",
            ],
            Self::LrRangeTest => &[
                "lr_range_test_min_lr",
                "lr_range_test_step_size",
                "lr_range_test_step_rate",
                "lr_range_test_staircase",
            ],
        }
    }

    /// The setting whose value `--lr` would be; `None` where `--lr` has its own meaning.
    pub fn peak_key(self) -> Option<&'static str> {
        match self {
            Self::WarmupLr | Self::WarmupDecayLr => Some("warmup_max_lr"),
            Self::WarmupCosineLr => None,
            Self::OneCycle => Some("cycle_max_lr"),
            Self::LrRangeTest => Some("lr_range_test_min_lr"),
        }
    }
}

impl std::fmt::Display for LrScheduleName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// The settings of Megatron-LM's schedule, which a schedule of DeepSpeed replaces.
pub const MEGATRON_SCHEDULE: [&str; 11] = [
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "lr_warmup_init",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "lr_wsd_decay_style",
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::Command;

    use super::*;

    #[test]
    fn every_flag_is_a_setting_of_a_schedule() {
        let command = DeepSpeedScheduleFlags::augment_args(Command::new("schedules"));
        let flags: BTreeSet<String> =
            command.get_arguments().map(|arg| arg.get_id().to_string()).collect();
        let keys = LrScheduleName::value_variants().iter().flat_map(|name| name.keys());
        let keys: BTreeSet<String> =
            keys.copied().chain(["lr_schedule"]).map(str::to_string).collect();
        assert_eq!(flags, keys);
    }
}
