//! DeepSpeed's OneCycle: the optimizer takes its betas from the schedule.

use megatron::config::{DecayStyle, DeepSpeedSchedule, OneCycle, OptimizerKind, RunConfig};
use system_tests::{Style, assert_same_runs, layout, tiny, train};

const STEPS: usize = 6;

/// A run with constant rate and constant betas, by Megatron-LM's schedule.
fn constant(beta1: f64, beta2: f64) -> RunConfig {
    let mut config = tiny(Style::Llama, 0.0);
    let o = &mut config.optimizer;
    (o.lr, o.min_lr, o.decay_style, o.warmup_samples) = (1e-3, 0.0, DecayStyle::Constant, 0);
    (o.adam_beta1, o.adam_beta2) = (beta1, beta2);
    config
}

/// The same rate by OneCycle, with a momentum that goes from `min` to `max`.
fn cycled(min: f64, max: f64) -> RunConfig {
    let mut config = constant(0.9, 0.95);
    config.optimizer.lr_schedule = Some(DeepSpeedSchedule::OneCycle(OneCycle {
        cycle_min_lr: 1e-3,
        cycle_max_lr: 1e-3,
        cycle_first_step_size: 4,
        cycle_second_step_size: 4,
        cycle_first_stair_count: 0,
        cycle_second_stair_count: 0,
        decay_step_size: 0,
        decay_lr_rate: 0.0,
        cycle_momentum: true,
        cycle_min_mom: min,
        cycle_max_mom: max,
        decay_mom_rate: 0.0,
    }));
    config
}

#[test]
fn betas_of_the_schedule_replace_the_configured_ones() {
    let run = train(&cycled(0.7, 0.7), STEPS).unwrap();
    assert_same_runs("a flat cycle", &run, &train(&constant(0.7, 0.99), STEPS).unwrap());
    let rising = train(&cycled(0.7, 0.8), STEPS).unwrap();
    assert_eq!(run.losses[0], rising.losses[0]);
    assert_ne!(run.losses[STEPS - 1], rising.losses[STEPS - 1]);
}

#[test]
fn every_layout_cycles_alike() {
    let alone = train(&cycled(0.7, 0.9), STEPS).unwrap();
    let mut config = layout(cycled(0.7, 0.9), 2, 1, 1);
    config.parallel.zero_stage = 1;
    let sharded = train(&config, STEPS).unwrap();
    let difference = system_tests::largest_relative_difference(&alone.losses, &sharded.losses);
    assert!(difference < 1e-5, "{difference:e}");
}

/// As in DeepSpeed, where SGD has no betas.
#[test]
fn sgd_keeps_its_momentum() {
    let with_sgd = |mut config: RunConfig| {
        config.optimizer.kind = OptimizerKind::Sgd;
        train(&config, STEPS).unwrap()
    };
    assert_same_runs("SGD", &with_sgd(cycled(0.7, 0.9)), &with_sgd(constant(0.9, 0.95)));
}
