//! Adam's moments in bf16: the loss curve follows fp32, rounding is the same on any layout, and
//! checkpoints resume in either dtype.

use megatron::config::{MomentDtype, Precision, Recompute, RunConfig, ScheduleKind};
use megatron::params::StateKind;
use system_tests::{
    Run, Style, interleave, largest_relative_difference, layout, save_after, tiny, train,
    train_from,
};

const STEPS: usize = 30;

fn model(style: Style, precision: Precision) -> RunConfig {
    let mut config = tiny(style, 0.1);
    config.training.precision = precision;
    config.optimizer.exp_avg_dtype = MomentDtype::Bf16;
    config.optimizer.exp_avg_sq_dtype = MomentDtype::Bf16;
    config
}

fn in_fp32(mut config: RunConfig) -> RunConfig {
    config.optimizer.exp_avg_dtype = MomentDtype::Fp32;
    config.optimizer.exp_avg_sq_dtype = MomentDtype::Fp32;
    config
}

/// The share of elements of a state kind that differ by more than `tolerance`.
fn share_apart(a: &Run, b: &Run, kind: StateKind, tolerance: f32) -> f64 {
    let of = |run: &Run| {
        run.last
            .iter()
            .filter(|((_, of), _)| *of == kind)
            .flat_map(|(_, v)| v.clone())
            .collect::<Vec<f32>>()
    };
    let (a, b) = (of(a), of(b));
    assert!(!a.is_empty() && a.len() == b.len());
    let apart = a.iter().zip(&b).filter(|(a, b)| (*a - *b).abs() > tolerance * b.abs());
    apart.count() as f64 / a.len() as f64
}

#[test]
fn losses_follow_those_with_moments_in_fp32() {
    for style in [Style::Gpt2, Style::Llama] {
        for precision in [Precision::Fp32, Precision::Bf16] {
            let narrow = train(&model(style, precision), STEPS).unwrap();
            let wide = train(&in_fp32(model(style, precision)), STEPS).unwrap();
            let difference = largest_relative_difference(&narrow.losses, &wide.losses);
            println!("{style:?} {precision}: losses within {difference:.1e}");
            assert!(
                narrow.losses != wide.losses && difference < 0.003,
                "{style:?} {precision}: {difference:e}"
            );
            for moment in [StateKind::ExpAvg, StateKind::ExpAvgSq] {
                let is_bf16 = |value: &f32| value.to_bits() & 0xffff == 0;
                assert!(
                    narrow
                        .last
                        .iter()
                        .all(|((_, kind), v)| *kind != moment || v.iter().all(is_bf16))
                );
            }
        }
    }
}

/// The rounding of second moments depends on the elements' indices, not on their places on ranks.
/// Layouts differ only where the gradients' own rounding changes the result of stochastic rounding.
/// With separate random numbers, half of the elements would differ after any number of steps. Such
/// differences change later gradients, so their share grows with the steps, differently where
/// caches, and with them the order of sums, differ.
#[test]
fn every_layout_rounds_alike() {
    const STEPS: usize = 15;
    for style in [Style::Gpt2, Style::Llama] {
        let plain = model(style, Precision::Fp32);
        let alone = train(&plain, STEPS).unwrap();
        for (dp, tp, pp, zero) in
            [(4, 1, 1, true), (1, 2, 1, false), (1, 4, 1, false), (2, 2, 2, true)]
        {
            let mut config = layout(plain.clone(), dp, tp, pp);
            config.parallel.zero_stage = zero.into();
            let run = train(&config, STEPS).unwrap();
            let what = format!("{style:?} {dp}·{tp}·{pp} zero {zero}");
            let difference = largest_relative_difference(&run.losses, &alone.losses);
            let apart = share_apart(&run, &alone, StateKind::ExpAvgSq, 1e-3);
            println!(
                "{what}: losses within {difference:.1e}, {:.2}% of second moments apart",
                100.0 * apart
            );
            assert!(difference < 1e-4, "{what}: losses differ by {difference:e}");
            assert!(apart < 0.05, "{what}: {:.1}% of second moments differ", 100.0 * apart);
        }
    }
}

#[test]
fn pipelines_zero_1_buckets_and_recompute_change_no_bit() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        for (dp, tp) in [(1, 1), (2, 2)] {
            let plain = layout(model(Style::Gpt2, precision), dp, tp, 1);
            let alone = train(&plain, 6).unwrap();
            let mut variants = vec![interleave(layout(plain.clone(), dp, tp, 2), 2)];
            variants[0].training.recompute = Recompute::Selective;
            for (zero, bucket_size, overlap) in
                [(true, 1000, true), (true, 40_000_000, false), (false, 1, true)]
            {
                let mut cut = layout(plain.clone(), dp, tp, 2);
                cut.parallel.schedule = ScheduleKind::Gpipe;
                cut.parallel.zero_stage = zero.into();
                cut.parallel.bucket_size = bucket_size;
                cut.parallel.overlap_grad_reduce = overlap;
                variants.push(cut);
            }
            for cut in variants {
                let run = train(&cut, 6).unwrap();
                assert_eq!(run.losses, alone.losses, "{precision} {:?}", cut.parallel);
                assert!(run.last == alone.last, "{precision} {:?}: final state", cut.parallel);
            }
        }
    }
}

#[test]
fn a_run_continues_bitwise_and_with_moments_in_another_dtype() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = layout(model(Style::Llama, Precision::Bf16), 2, 1, 2);
    config.parallel.zero_stage = 1;
    let uninterrupted = train(&config, 12).unwrap();
    let path = save_after(&config, 6, dir.path());
    let resumed = train_from(&config, Some(&path), 6).unwrap();
    assert_eq!(resumed.losses, uninterrupted.losses[6..]);
    assert!(resumed.last == uninterrupted.last, "final state");

    // Stored moments are loaded unchanged, and rounded to the nearest bf16.
    let stored = train_from(&config, Some(&path), 0).unwrap().last;
    assert!(train_from(&in_fp32(config.clone()), Some(&path), 0).unwrap().last == stored);
    let wide = dir.path().join("wide");
    let path = save_after(&in_fp32(config.clone()), 6, &wide);
    let follows = train_from(&config, Some(&path), 6).unwrap();
    assert!(largest_relative_difference(&follows.losses, &uninterrupted.losses[6..]) < 0.003);
}
