//! Batch-size ramp-up: on any layout, under any schedule, and through a checkpoint during the
//! ramp-up.

use megatron::config::{BatchSizeRampup, RunConfig, ScheduleKind};
use system_tests::{
    Style, Tokens, assert_same_runs, context, interleave, largest_relative_difference, layout,
    save_after, sources, tiny, train, train_from, trainer,
};

/// Steps of 4, 4, 4, 4, 8, 8, 12, 12, 16 … samples.
const STEPS: usize = 10;

fn growing(style: Style) -> RunConfig {
    let mut config = tiny(style, 0.1);
    config.training.global_batch_size = 16;
    config.training.rampup = Some(BatchSizeRampup { start: 4, increment: 4, samples: 48 });
    config.training.train_samples = Some(1000);
    config
}

#[test]
fn steps_have_the_batches_that_grow_and_what_they_count_follows() {
    let config = growing(Style::Gpt2);
    let data = sources(Tokens::synthetic(101, 16));
    let world = megatron::comm::solo();
    let mut trainer = trainer(&config, world, &data).unwrap();
    let steps: Vec<_> = (0..STEPS).map(|_| trainer.step().unwrap()).collect();
    let sizes: Vec<_> = steps.iter().map(|step| step.global_batch_size).collect();
    assert_eq!(sizes, [4, 4, 4, 4, 8, 8, 12, 12, 16, 16]);
    let consumed: Vec<_> = steps.iter().map(|step| step.consumed_samples).collect();
    assert_eq!(consumed, [4, 8, 12, 16, 24, 32, 44, 56, 72, 88]);
    assert!(steps.iter().all(|step| step.consumed_tokens == step.consumed_samples * 16));
    // Warm-up covers 16 samples; the rate of step k depends on the samples before it.
    assert_eq!([0, 1, 4].map(|k| steps[k].learning_rate), [0.0, 0.25e-3, 1e-3]);
    assert_eq!(trainer.progress().applied_samples, 88);
}

#[test]
fn the_first_step_is_that_of_a_run_with_as_small_a_batch() {
    for style in [Style::Gpt2, Style::Llama] {
        let mut small = growing(style);
        (small.training.rampup, small.training.global_batch_size) = (None, 4);
        let [grown, small] = [growing(style), small].map(|config| train(&config, 4).unwrap());
        assert_same_runs("steps of 4 samples", &grown, &small);
    }
}

#[test]
fn every_layout_follows_one_process() {
    for style in [Style::Gpt2, Style::Llama] {
        let alone = train(&growing(style), STEPS).unwrap();
        let cut = |dp, tp, pp| layout(growing(style), dp, tp, pp);
        let mut delayed = cut(2, 1, 2);
        (delayed.parallel.delay_wgrad_compute, delayed.parallel.zero_stage) = (true, 1);
        // Interleaved schedules need a multiple of pp microbatches; the first steps have 2.
        let layouts = [
            cut(4, 1, 1),
            cut(1, 2, 1),
            cut(2, 2, 2),
            delayed,
            interleave(cut(2, 1, 2), 2),
            context(cut(2, 1, 1), 2),
        ];
        for config in layouts {
            let run = train(&config, STEPS).unwrap();
            let difference = largest_relative_difference(&run.losses, &alone.losses);
            assert!(
                difference <= 1e-4,
                "{style:?} {:?}: losses differ by {difference:e}",
                config.parallel
            );
            let difference = largest_relative_difference(&run.grad_norms, &alone.grad_norms);
            assert!(
                difference <= 1e-3,
                "{style:?} {:?}: norms differ by {difference:e}",
                config.parallel
            );
        }
    }
}

#[test]
fn no_schedule_changes_a_bit() {
    let plain = train(&growing(Style::Llama), STEPS).unwrap();
    let cut = layout(growing(Style::Llama), 1, 1, 4);
    let (mut gpipe, mut delayed, mut ahead) = (cut.clone(), cut.clone(), cut.clone());
    gpipe.parallel.schedule = ScheduleKind::Gpipe;
    delayed.parallel.delay_wgrad_compute = true;
    ahead.parallel.extra_warmup = 2;
    for (name, config) in [
        ("1f1b", &cut),
        ("gpipe", &gpipe),
        ("delayed", &delayed),
        ("ahead", &ahead),
        ("interleaved", &interleave(cut.clone(), 2)),
    ] {
        assert_same_runs(name, &train(config, STEPS).unwrap(), &plain);
    }
}

#[test]
fn a_run_goes_on_amid_the_growth() {
    let config = layout(growing(Style::Gpt2), 2, 1, 2);
    let uninterrupted = train(&config, STEPS).unwrap();
    for before in [3, 6, 8] {
        let dir = tempfile::tempdir().unwrap();
        let path = save_after(&config, before, dir.path());
        let resumed = train_from(&config, Some(&path), STEPS - before).unwrap();
        assert_eq!(resumed.losses, uninterrupted.losses[before..], "after {before} steps");
        assert!(resumed.last == uninterrupted.last, "after {before} steps");
    }
}
