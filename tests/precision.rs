//! 16-bit training: it follows the curve of fp32 on any layout, and its checkpoints resume in any
//! precision.

use std::path::Path;

use candle_core::{DType, Tensor};
use megatron::config::{
    DynamicLossScale, LossScaling, Precision, Recompute, RecomputeMethod, RunConfig, ScheduleKind,
};
use megatron::train::Trainer;
use system_tests::{
    Run, State, Style, Tokens, assemble, interleave, largest_relative_difference, layout, on_ranks,
    save_after, shares, sources, tiny, train, train_from, trainer,
};

const STEPS: usize = 30;
const FP16: Precision = Precision::Fp16(LossScaling::Dynamic(DYNAMIC));
const DYNAMIC: DynamicLossScale = DynamicLossScale {
    initial: 65_536.0,
    min: 1.0,
    window: 1000,
    hysteresis: 2,
    consecutive_hysteresis: false,
};

fn model(style: Style, dropout: f64, precision: Precision) -> RunConfig {
    let mut config = tiny(style, dropout);
    config.training.precision = precision;
    config
}

fn same_bits(what: &str, a: &Run, b: &Run) {
    assert_eq!(a.losses, b.losses, "{what}: losses");
    assert_eq!(a.grad_norms, b.grad_norms, "{what}: gradient norms");
    assert!(a.last == b.last, "{what}: final state");
}

#[test]
fn losses_follow_those_of_fp32() {
    for style in [Style::Gpt2, Style::Llama] {
        let fp32 = train(&model(style, 0.1, Precision::Fp32), STEPS).unwrap();
        for precision in [Precision::Bf16, FP16] {
            let run = train(&model(style, 0.1, precision), STEPS).unwrap();
            assert!(
                run.initial == fp32.initial,
                "{style:?} {precision}: first values are drawn in fp32"
            );
            let difference = largest_relative_difference(&run.losses, &fp32.losses);
            println!("{style:?} {precision}: losses within {difference:.1e} of fp32");
            assert!(difference < 0.01, "{style:?} {precision}: losses differ by {difference:e}");
        }
    }
}

#[test]
fn every_layout_follows_the_single_process() {
    for (style, precision) in
        [(Style::Gpt2, Precision::Bf16), (Style::Llama, Precision::Bf16), (Style::Llama, FP16)]
    {
        let plain = model(style, 0.1, precision);
        let alone = train(&plain, STEPS).unwrap();
        for (dp, tp, pp) in [(4, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 2)] {
            let mut config = layout(plain.clone(), dp, tp, pp);
            for sequence_parallel in [false, tp > 1] {
                config.parallel.sequence_parallel = sequence_parallel;
                let what = format!("{style:?} {precision} {dp}·{tp}·{pp} sp {sequence_parallel}");
                let run = train(&config, STEPS).unwrap();
                assert!(run.initial == alone.initial, "{what}: initial weights differ");
                let difference = largest_relative_difference(&run.losses, &alone.losses);
                println!("{what}: losses within {difference:.1e}");
                assert!(
                    difference < tolerance(precision),
                    "{what}: losses differ by {difference:e}"
                );
            }
        }
    }
}

/// Under tp each rank's term of a sum is rounded to 16 bits before the terms are added, and under
/// dp gradients are added in another order. Activations differ by their rounding, 2⁻⁹ in bf16 and
/// 2⁻¹² in fp16; most of it cancels in the mean over 128 tokens. Measured differences are 8e-5 and
/// 6e-6.
fn tolerance(precision: Precision) -> f64 {
    if precision == Precision::Bf16 { 5e-4 } else { 5e-5 }
}

#[test]
fn pipelines_and_recompute_change_no_bit() {
    for (style, precision) in [(Style::Gpt2, Precision::Bf16), (Style::Llama, FP16)] {
        let plain = model(style, 0.1, precision);
        let alone = train(&plain, 6).unwrap();
        let mut variants = Vec::new();
        for pp in [2, 4] {
            let cut = layout(plain.clone(), 1, 1, pp);
            variants.push(("1f1b", cut.clone()));
            variants.push(("interleaved", interleave(cut.clone(), 2)));
            let mut gpipe = cut;
            gpipe.parallel.schedule = ScheduleKind::Gpipe;
            variants.push(("gpipe", gpipe));
        }
        for recompute in [
            Recompute::Selective,
            Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 3 },
        ] {
            let mut changed = plain.clone();
            changed.training.recompute = recompute;
            variants.push(("recompute", changed));
        }
        for (name, config) in variants {
            same_bits(
                &format!("{style:?} {precision} {name}"),
                &train(&config, 6).unwrap(),
                &alone,
            );
        }
    }
}

#[test]
fn zero_1_buckets_and_overlap_change_no_bit() {
    for (precision, narrow) in [(Precision::Bf16, false), (Precision::Bf16, true), (FP16, true)] {
        for (dp, tp, pp) in [(2, 1, 1), (4, 1, 1), (2, 2, 2)] {
            let mut plain = layout(model(Style::Gpt2, 0.1, precision), dp, tp, pp);
            in_narrow_messages(&mut plain, narrow);
            let expected = train(&plain, 6).unwrap();
            for (zero, bucket_size, overlap) in
                [(true, 40_000_000, false), (false, 1000, true), (true, 1000, true)]
            {
                let mut changed = plain.clone();
                changed.parallel.zero_stage = zero.into();
                changed.parallel.bucket_size = bucket_size;
                changed.parallel.overlap_grad_reduce = overlap;
                let what = format!(
                    "{dp}·{tp}·{pp} zero {zero} bucket {bucket_size} overlap {overlap} {precision} narrow {narrow}"
                );
                same_bits(&what, &train(&changed, 6).unwrap(), &expected);
            }
        }
    }
}

#[test]
fn gradients_summed_in_16_bit_messages_follow_those_in_fp32() {
    for precision in [Precision::Bf16, FP16] {
        for zero_stage in [1, 3] {
            let mut plain = layout(model(Style::Gpt2, 0.0, precision), 4, 1, 1);
            plain.parallel.zero_stage = zero_stage;
            let mut rounded = plain.clone();
            in_narrow_messages(&mut rounded, true);
            let (plain, rounded) = (train(&plain, STEPS).unwrap(), train(&rounded, STEPS).unwrap());
            assert!(plain.grad_norms != rounded.grad_norms, "{precision}: messages of fp32");
            let difference = largest_relative_difference(&rounded.losses, &plain.losses);
            assert!(difference < tolerance(precision), "{precision}, stage {zero_stage}");
        }
    }
}

/// Sends gradients in the dtype of the weights.
fn in_narrow_messages(config: &mut RunConfig, narrow: bool) {
    let training = &mut config.training;
    training.grad_reduce_in_bf16 = narrow && training.precision == Precision::Bf16;
    training.grad_reduce_in_fp16 = narrow && training.precision != Precision::Bf16;
}

fn each_rank<T: Send>(
    config: &RunConfig,
    body: impl Fn(&mut Trainer) -> megatron::Result<T> + Sync,
) -> Vec<T> {
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    on_ranks(config.parallel.world_size(), |world| body(&mut trainer(config, world, &data)?))
        .unwrap()
}

#[test]
fn the_same_layout_continues_bitwise() {
    for precision in [Precision::Bf16, FP16] {
        for zero in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let mut config = layout(model(Style::Gpt2, 0.1, precision), 2, 1, 2);
            config.parallel.zero_stage = zero.into();
            let uninterrupted = train(&config, 12).unwrap();
            let path = save_after(&config, 6, dir.path());
            let resumed = train_from(&config, Some(&path), 6).unwrap();
            assert_eq!(resumed.losses, uninterrupted.losses[6..]);
            assert!(
                resumed.last == uninterrupted.last,
                "{precision} zero {zero}: final state differs"
            );
        }
    }
}

/// The content of a checkpoint, as fp32 training loads it.
fn stored(path: &Path) -> State {
    train_from(&tiny(Style::Gpt2, 0.1), Some(path), 0).unwrap().last
}

#[test]
fn a_checkpoint_passes_through_any_precision_and_layout_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let writer = layout(model(Style::Gpt2, 0.1, Precision::Bf16), 2, 1, 2);
    let mut path = save_after(&writer, 4, &dir.path().join("first"));
    let expected = stored(&path);
    for (at, (precision, dp, tp, pp, zero)) in [
        (Precision::Fp32, 1, 2, 1, false),
        (Precision::Bf16, 4, 1, 1, true),
        (FP16, 1, 2, 2, false),
        (Precision::Bf16, 2, 2, 1, true),
    ]
    .into_iter()
    .enumerate()
    {
        let mut config = layout(model(Style::Gpt2, 0.1, precision), dp, tp, pp);
        config.parallel.zero_stage = zero.into();
        let into = dir.path().join(at.to_string());
        path = each_rank(&config, |trainer| {
            trainer.load(&path)?;
            require_rounded(trainer)?;
            trainer.save(&into)
        })
        .remove(0);
        assert!(stored(&path) == expected, "{precision} changed the state");
    }
}

/// Asserts that a rank's weights are the rounded values of its master weights.
fn require_rounded(trainer: &Trainer) -> megatron::Result<()> {
    let store = &trainer.stage().params;
    for bucket in store.buckets() {
        let Some(master) = &bucket.master else { continue };
        let weights = bucket.weights.kept().lend(&master.range, &store.options().device)?;
        let values = |t: &Tensor| t.to_dtype(DType::F32)?.to_vec1::<f32>();
        assert!(values(&weights)?.iter().any(|w| *w != 0.0));
        if weights.dtype() == DType::BF16 {
            // The high halves are the rounded values whatever the low halves are, so only low
            // halves that are all zero would be wrong.
            assert!(master.values.all_on_host()?.to_vec1::<i16>()?.iter().any(|low| *low != 0));
        } else {
            assert_eq!(
                values(&weights)?,
                values(&master.values.all_on_host()?.to_dtype(weights.dtype())?)?
            );
        }
    }
    Ok(())
}

#[test]
fn another_precision_goes_on_with_the_curve() {
    for (from, to) in [
        (Precision::Fp32, Precision::Bf16),
        (Precision::Bf16, Precision::Fp32),
        (Precision::Bf16, FP16),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let uninterrupted = train(&model(Style::Llama, 0.0, from), 20).unwrap();
        let path = save_after(&model(Style::Llama, 0.0, from), 10, dir.path());
        let resumed = train_from(&model(Style::Llama, 0.0, to), Some(&path), 10).unwrap();
        let difference = largest_relative_difference(&resumed.losses, &uninterrupted.losses[10..]);
        assert!(difference < 0.01, "{from} to {to}: losses differ by {difference:e}");
    }
}

/// Makes one element of a normalization on this rank infinite, and returns the tensors for
/// restoring it.
fn poison(trainer: &Trainer) -> megatron::Result<(Tensor, Tensor)> {
    let mut norms =
        trainer.stage().params.iter().filter(|(_, p)| p.spec.name.ends_with("layernorm.weight"));
    let (id, _) = norms.next().expect("every stage has layers");
    let element = trainer.stage().params.weight(id)?.narrow(0, 3, 1)?;
    let before = element.copy()?;
    kernels::ops::reduce::copy(
        &element,
        &Tensor::new(&[f32::INFINITY], element.device())?.to_dtype(element.dtype())?,
    )?;
    Ok((element, before))
}

#[test]
fn an_overflow_on_one_rank_is_skipped_on_all_and_follows_the_rule() {
    // x: a rank's gradients overflow. The scales are DeepSpeed's with a window of 2 and a
    // hysteresis of 2.
    let steps = ".x.x...x";
    let scales = [1024.0, 1024.0, 1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0];
    for (dp, tp, pp, zero) in
        [(1, 1, 1, false), (2, 1, 2, true), (2, 1, 2, false), (1, 2, 2, false)]
    {
        let dynamic = DynamicLossScale { initial: 1024.0, window: 2, ..DYNAMIC };
        let precision = Precision::Fp16(LossScaling::Dynamic(dynamic));
        let mut config = layout(model(Style::Llama, 0.0, precision), dp, tp, pp);
        config.parallel.zero_stage = zero.into();
        let ranks = each_rank(&config, |trainer| {
            let mut seen = Vec::new();
            for c in steps.chars() {
                let poisoned = c == 'x' && trainer.groups().world.rank() == dp * tp * pp - 1;
                let (before, progress) = (shares(trainer)?, trainer.progress());
                let restore = if poisoned { Some(poison(trainer)?) } else { None };
                let step = trainer.step()?;
                if let Some((element, before)) = restore {
                    kernels::ops::reduce::copy(&element, &before)?;
                }
                assert_eq!(step.skipped, c == 'x');
                assert_eq!(step.grad_norm.is_finite(), c == '.');
                let now = trainer.progress();
                assert_eq!(
                    (now.iteration, now.updates),
                    (progress.iteration + 1, progress.updates + u64::from(c == '.'))
                );
                assert_eq!(
                    shares(trainer)? == before,
                    c == 'x',
                    "weights and moments change with applied steps alone"
                );
                seen.push(step.loss_scale);
            }
            Ok((seen, trainer.progress().skipped_iterations, shares(trainer)?))
        });
        for (seen, skipped, _) in &ranks {
            assert_eq!(*seen, scales, "{dp}·{tp}·{pp} zero {zero}");
            assert_eq!(*skipped, 3);
        }
        assemble(ranks.into_iter().map(|rank| rank.2).collect());
    }
}

#[test]
fn the_loss_scale_changes_no_fp32_accumulated_value_and_is_resumed() {
    let with = |initial: f64| {
        let dynamic = DynamicLossScale { initial, window: 3, ..DYNAMIC };
        model(Style::Gpt2, 0.0, Precision::Fp16(LossScaling::Dynamic(dynamic)))
    };
    let scales = |trainer: &mut Trainer, steps: usize| {
        (0..steps).map(|_| Ok(trainer.step()?.loss_scale)).collect::<megatron::Result<Vec<f64>>>()
    };
    let dir = tempfile::tempdir().unwrap();
    let before = each_rank(&with(4096.0), |trainer| {
        let seen = scales(trainer, 4)?;
        trainer.save(dir.path())?;
        Ok((seen, scales(trainer, 4)?))
    });
    assert_eq!(before[0].0, [4096.0; 4]);
    let path = dir.path().join("iter_0000004");
    // A saved scale takes precedence over the run's own initial scale.
    let resumed = each_rank(&with(2.0), |trainer| {
        trainer.load(&path)?;
        scales(trainer, 4)
    });
    assert_eq!(resumed[0], before[0].1);
    assert_eq!(resumed[0], [8192.0, 8192.0, 8192.0, 16384.0]);
}

#[test]
fn gradients_that_overflow_at_the_least_scale_end_the_run() {
    let dynamic = DynamicLossScale { initial: 2.0, hysteresis: 1, ..DYNAMIC };
    let config = model(Style::Gpt2, 0.0, Precision::Fp16(LossScaling::Dynamic(dynamic)));
    let error = each_rank(&config, |trainer| {
        poison(trainer)?;
        assert!(trainer.step()?.skipped);
        Ok(trainer.step().unwrap_err().to_string())
    });
    assert!(error[0].contains("already at its minimum, 1"), "{}", error[0]);
}
