//! One loss curve on any layout: every layout of a run follows the single process, from bitwise the
//! same initial weights.

use megatron::Result;
use megatron::config::{
    LossScaling, MomentDtype, Offload, OptimizerKind, Precision, Recompute, RecomputeMethod,
    RunConfig,
};
use megatron::params::StateKind;
use megatron::train::{Footprint, Sources};
use models::Gpt;
use system_tests::{
    Run, Style, Tokens, assemble, context, interleave, largest_relative_difference, layout,
    on_ranks, shares, sources, tiny, train, trainer,
};

/// dp · cp · tp · pp
const LAYOUTS: [(usize, usize, usize, usize); 17] = [
    (2, 1, 1, 1),
    (4, 1, 1, 1),
    (1, 1, 2, 1),
    (1, 1, 4, 1),
    (1, 1, 1, 2),
    (1, 1, 1, 4),
    (2, 1, 2, 1),
    (2, 1, 1, 2),
    (1, 1, 2, 2),
    (2, 1, 2, 2),
    (1, 1, 2, 4),
    (1, 2, 1, 1),
    (1, 4, 1, 1),
    (1, 2, 2, 1),
    (2, 2, 1, 1),
    (1, 2, 1, 2),
    (2, 2, 2, 2),
];
const STEPS: usize = 30;
/// Allowed relative difference; measured differences are about 1e-8 in losses and 1e-7 in gradient
/// norms.
const TOLERANCE: f64 = 1e-4;

fn agree(what: &str, run: &Run, alone: &Run) {
    assert!(run.initial == alone.initial, "{what}: initial weights differ");
    let loss = largest_relative_difference(&run.losses, &alone.losses);
    let norm = largest_relative_difference(&run.grad_norms, &alone.grad_norms);
    println!("{what}: losses within {loss:.1e}, gradient norms within {norm:.1e}");
    assert!(
        loss <= TOLERANCE,
        "{what}: losses differ by {loss:e}\n{:?}\n{:?}",
        run.losses,
        alone.losses
    );
    assert!(
        norm <= 1e-3,
        "{what}: gradient norms differ by {norm:e}\n{:?}\n{:?}",
        run.grad_norms,
        alone.grad_norms
    );
}

fn every_layout_follows_the_single_process(style: Style, dropout: f64) {
    let alone = train(&tiny(style, dropout), STEPS).unwrap();
    assert!(
        alone.losses[STEPS - 1] < alone.losses[0] - 0.2,
        "the model learns nothing: {:?}",
        alone.losses
    );
    for (dp, cp, tp, pp) in LAYOUTS {
        let plain = context(layout(tiny(style, dropout), dp, tp, pp), cp);
        let mut variants = vec![("", plain.clone())];
        if pp > 1 {
            variants.push((" interleaved", interleave(plain.clone(), 2)));
        }
        for (name, mut config) in variants {
            let what = format!("{style:?} dropout {dropout} {dp}·{cp}·{tp}·{pp}{name}");
            agree(&what, &train(&config, STEPS).unwrap(), &alone);
            if tp > 1 {
                config.parallel.sequence_parallel = true;
                agree(&format!("{what} sp"), &train(&config, STEPS).unwrap(), &alone);
            }
        }
    }
}

#[test]
fn gpt2_style() {
    every_layout_follows_the_single_process(Style::Gpt2, 0.0);
}

#[test]
fn gpt2_style_with_dropout() {
    every_layout_follows_the_single_process(Style::Gpt2, 0.1);
}

#[test]
fn llama_style() {
    every_layout_follows_the_single_process(Style::Llama, 0.0);
}

#[test]
fn llama_style_with_dropout() {
    every_layout_follows_the_single_process(Style::Llama, 0.1);
}

/// Several microbatches are reduced one by one under ZeRO-2 and 3, and copies of shards are summed
/// after the shards: sums have another order than under ZeRO-1.
#[test]
fn zero_stages_and_hybrid_sharding_follow_zero_1() {
    for (index, (dp, cp, tp, pp)) in [
        (2, 1, 1, 1),
        (4, 1, 1, 1),
        (2, 1, 2, 1),
        (2, 1, 1, 2),
        (4, 1, 2, 1),
        (2, 2, 1, 1),
        (1, 4, 1, 1),
        (2, 1, 2, 2),
        (2, 2, 1, 2),
        (2, 1, 1, 4),
    ]
    .into_iter()
    .enumerate()
    {
        for style in [Style::Gpt2, Style::Llama] {
            let mut first = context(layout(tiny(style, 0.1), dp, tp, pp), cp);
            // Four microbatches.
            first.training.global_batch_size = 4 * dp;
            first.parallel.sequence_parallel = tp > 1;
            first.parallel.zero_stage = 1;
            if pp > 1 && index % 2 == 1 {
                first = interleave(first, 2);
                first.parallel.delay_wgrad_compute = true;
            }
            if index % 3 == 0 {
                first.training.recompute =
                    Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 2 };
            }
            let expected = train(&first, STEPS).unwrap();
            let copies = if dp * cp == 4 { 2 } else { 1 };
            for (stage, copies) in [(2, 1), (3, 1), (1, copies), (2, copies), (3, copies)] {
                let mut config = first.clone();
                config.parallel.zero_stage = stage;
                config.parallel.num_distributed_optimizer_instances = copies;
                config.parallel.zero_reshard_after_forward = copies == 1;
                config.parallel.overlap_grad_reduce = stage == 2;
                let run = train(&config, STEPS).unwrap();
                let what = format!("{style:?} {dp}·{cp}·{tp}·{pp} stage {stage} × {copies}");
                assert!(run.initial == expected.initial, "{what}: initial weights differ");
                let loss = largest_relative_difference(&run.losses, &expected.losses);
                let norm = largest_relative_difference(&run.grad_norms, &expected.grad_norms);
                println!("{what}: losses within {loss:.1e}, norms within {norm:.1e}");
                assert!(loss <= 1e-6 && norm <= 1e-5, "{what}: losses {loss:e}, norms {norm:e}");
            }
        }
    }
}

/// Bytes of weights, gradients, master weights and moments of each rank, before training.
fn held(config: &RunConfig) -> Vec<(usize, [f64; 4])> {
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    let ranks = on_ranks(config.parallel.world_size(), |world| {
        let trainer = trainer(config, world, &data)?;
        let bytes: Vec<f64> =
            trainer.memory_by_use().into_iter().map(|(_, bytes)| bytes as f64).collect();
        Ok((trainer.groups().pp.rank(), bytes.try_into().unwrap()))
    });
    ranks.unwrap()
}

#[test]
fn ranks_hold_what_was_counted_before() {
    let fp16 = Precision::Fp16(LossScaling::Static(1.0));
    for (style, precision) in [
        (Style::Gpt2, Precision::Fp32),
        (Style::Llama, Precision::Bf16),
        (Style::Gpt2, fp16),
        (Style::Llama, Precision::Fp64),
    ] {
        for (dp, cp, tp, pp) in [(1, 1, 1, 1), (2, 1, 2, 1), (2, 2, 1, 2), (1, 1, 2, 4)] {
            let mut config = context(layout(tiny(style, 0.0), dp, tp, pp), cp);
            config.training.precision = precision;
            config.parallel.zero_stage = match precision {
                Precision::Fp32 => 1,
                Precision::Fp64 => 2,
                _ => 3,
            };
            config.parallel.bucket_size = 3000;
            if pp == 4 {
                config.parallel.partition =
                    megatron::config::PartitionMethod::Explicit(vec![1, 3, 3, 1]);
                config.optimizer.kind = OptimizerKind::Sgd;
            } else if pp == 2 {
                config = interleave(config, 2);
                config.optimizer.exp_avg_sq_dtype = MomentDtype::Bf16;
            }
            let counted = Footprint::of_stages(&config, &Gpt::outline_of(&config)).unwrap();
            for (stage, held) in held(&config) {
                let Footprint { weights, gradients, masters, moments, .. } = counted[stage];
                assert_eq!(
                    held,
                    [weights, gradients, masters, moments],
                    "{style:?} {precision} {dp}·{cp}·{tp}·{pp}, stage {stage}"
                );
            }
        }
    }
}

/// The norm of all parameters and the number of zeros in the gradient in each step, and the norm of
/// the final parameters, computed from the assembled state.
fn statistics(config: &RunConfig, data: &Sources) -> (Vec<(f64, f64)>, f64) {
    let mut config = config.clone();
    (config.logging.log_params_norm, config.logging.log_num_zeros_in_grad) = (true, true);
    let ranks = on_ranks(config.parallel.world_size(), |world| {
        let mut trainer = trainer(&config, world, data)?;
        let steps = (0..3).map(|_| trainer.step()).collect::<Result<Vec<_>>>()?;
        let numbers =
            steps.iter().map(|step| (step.params_norm.unwrap(), step.num_zeros_in_grad.unwrap()));
        Ok((numbers.collect::<Vec<_>>(), shares(&trainer)?))
    });
    let (mut numbers, shares): (Vec<_>, Vec<_>) = ranks.unwrap().into_iter().unzip();
    assert!(numbers.iter().all(|rank| *rank == numbers[0]), "ranks disagree: {numbers:?}");
    let state = assemble(shares);
    let params = state
        .iter()
        .filter(|((_, kind), _)| *kind == StateKind::Param)
        .flat_map(|(_, values)| values);
    (numbers.swap_remove(0), params.map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt())
}

#[test]
fn the_norm_of_parameters_and_the_zeros_of_gradients_count_each_of_the_model_once() {
    let folder = tempfile::tempdir().unwrap();
    for style in [Style::Gpt2, Style::Llama] {
        let mut config = tiny(style, 0.0);
        // More tokens than a batch contains, so that some rows of the embedding have no gradient;
        // and padding rows.
        config.model.vocab_size = 203;
        let data = sources(Tokens::synthetic(203, config.model.seq_length));
        let alone = statistics(&config, &data).0;
        let zeros: Vec<f64> = alone.iter().map(|(_, zeros)| *zeros).collect();
        // In a tied matrix every row has a gradient from the head. Attention does not depend on the
        // biases of keys; their gradients consist of rounding errors and may be zero in one order
        // of summation and not in another.
        let key_biases = if style == Style::Gpt2 { 8.0 * 16.0 } else { 0.0 };
        let expected = |zeros: &f64| match style {
            Style::Gpt2 => *zeros <= key_biases,
            Style::Llama => *zeros > 0.0 && zeros % 32.0 == 0.0,
        };
        assert!(zeros.iter().all(expected), "{zeros:?}");
        for (dp, cp, tp, pp) in
            [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 2, 2), (2, 2, 1, 1), (2, 1, 2, 2)]
        {
            for (precision, sharded, file_backed) in [
                (Precision::Fp32, false, false),
                (Precision::Fp32, true, true),
                (Precision::Bf16, true, false),
                (Precision::Bf16, false, false),
                (Precision::Fp16(LossScaling::Static(64.0)), true, false),
            ] {
                let mut config = context(layout(config.clone(), dp, tp, pp), cp);
                config.training.precision = precision;
                config.parallel.zero_stage = sharded.into();
                config.parallel.sequence_parallel = tp > 1;
                if file_backed {
                    config.optimizer.offload = Offload::Nvme(folder.path().into());
                }
                let what = format!("{style:?} {precision} {dp}·{cp}·{tp}·{pp}");
                let (numbers, norm) = statistics(&config, &data);
                let last = numbers[2].0;
                assert!(
                    (last - norm).abs() <= 1e-12 * norm,
                    "{what}: {last} of parameters whose norm is {norm}"
                );
                if precision == Precision::Fp32 {
                    let near = |(a, b): (&(f64, f64), &f64)| (a.1 - b).abs() <= key_biases;
                    assert!(
                        numbers.iter().zip(&zeros).all(near),
                        "{what}: {numbers:?}, alone {zeros:?}"
                    );
                    assert!(
                        numbers.iter().zip(&alone).all(|(a, b)| (a.0 / b.0 - 1.0).abs() < 1e-6),
                        "{what}"
                    );
                }
            }
        }
    }
}
