//! Options that must not change a bit: schedule, virtual stages, recompute and the place of what it
//! saves, ZeRO-1, bucket size, overlap.

use candle_core::Device;
use kernels::tensor::trace::Recorder;
use megatron::comm::CommOptions;
use megatron::config::{
    LossScaling, Offload, PartitionMethod, Precision, Recompute, RecomputeMethod, RunConfig,
    ScheduleKind,
};
use megatron::data::{GlobalBatch, Loader};
use system_tests::{
    Style, Tokens, assert_same_runs, context, interleave, layout, on_ranks_with, sources, tiny,
    train, train_overlapping, trainer,
};

const STEPS: usize = 6;

/// Trains both configurations and compares every loss, gradient norm, weight and moment.
fn same_bits(what: &str, changed: &RunConfig, plain: &RunConfig) {
    assert_same_runs(what, &train(changed, STEPS).unwrap(), &train(plain, STEPS).unwrap());
}

/// Runs `body` for both families, with dropout, so that masks are part of the comparison.
fn for_both(body: impl Fn(&str, RunConfig)) {
    for style in [Style::Gpt2, Style::Llama] {
        body(&format!("{style:?}"), tiny(style, 0.1));
    }
}

#[test]
fn pipelines_of_any_depth_and_schedule() {
    for_both(|name, plain| {
        for pp in [2, 4] {
            let cut = layout(plain.clone(), 1, 1, pp);
            same_bits(&format!("{name} 1f1b pp {pp}"), &cut, &plain);
            same_bits(&format!("{name} interleaved pp {pp}"), &interleave(cut.clone(), 2), &plain);
            let mut gpipe = cut;
            gpipe.parallel.schedule = ScheduleKind::Gpipe;
            same_bits(&format!("{name} gpipe pp {pp}"), &gpipe, &plain);
        }
    });
}

/// `config` with delayed weight gradients.
fn delayed(mut config: RunConfig) -> RunConfig {
    config.parallel.delay_wgrad_compute = true;
    config
}

/// `config` under every schedule that supports it.
fn under_all_schedules(config: &RunConfig, v: usize) -> [(&'static str, RunConfig); 4] {
    let (mut gpipe, mut ahead) = (config.clone(), config.clone());
    gpipe.parallel.schedule = ScheduleKind::Gpipe;
    ahead.parallel.extra_warmup = 2;
    [
        ("1f1b", config.clone()),
        ("1f1b with extra warm-up", ahead),
        ("interleaved", interleave(config.clone(), v)),
        ("gpipe", gpipe),
    ]
}

#[test]
fn delayed_weight_gradients_under_every_schedule() {
    for_both(|name, plain| {
        for (dp, tp, pp) in [(1, 1, 2), (1, 1, 4), (2, 2, 2)] {
            let mut plain = layout(plain.clone(), dp, tp, 1);
            plain.parallel.sequence_parallel = true;
            let cut = layout(plain.clone(), dp, tp, pp);
            for (schedule, cut) in under_all_schedules(&cut, 2) {
                same_bits(&format!("{name} {dp}·{tp}·{pp} {schedule}"), &delayed(cut), &plain);
            }
        }
    });
}

#[test]
fn delayed_weight_gradients_with_tied_and_untied_uneven_stages() {
    for style in [Style::Gpt2, Style::Llama] {
        for untied in [false, true] {
            let mut plain = tiny(style, 0.1);
            plain.model.untie_embeddings_and_output_weights = untied;
            let mut cut = interleave(layout(plain.clone(), 1, 1, 2), 3);
            cut.parallel.partition = PartitionMethod::Explicit(vec![2, 1, 2, 1, 2, 0]);
            same_bits(&format!("{style:?} untied {untied}"), &delayed(cut), &plain);
        }
    }
}

#[test]
fn delayed_weight_gradients_with_zero_1_and_overlap() {
    for_both(|name, plain| {
        let plain = layout(plain, 2, 1, 2);
        for (schedule, cut) in under_all_schedules(&plain, 2) {
            for (zero, bucket_size) in [(false, 1000), (true, 1000), (true, 1)] {
                let mut cut = delayed(cut.clone());
                cut.parallel.zero_stage = zero.into();
                cut.parallel.bucket_size = bucket_size;
                cut.parallel.overlap_grad_reduce = true;
                same_bits(
                    &format!("{name} {schedule} zero {zero} bucket {bucket_size}"),
                    &cut,
                    &plain,
                );
            }
        }
    });
}

#[test]
fn delayed_weight_gradients_with_recompute_and_early_receives() {
    for_both(|name, plain| {
        let plain = layout(plain, 1, 2, 2);
        for (schedule, cut) in under_all_schedules(&plain, 2) {
            for recompute in [
                Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 3 },
                Recompute::Full { method: RecomputeMethod::Block, num_layers: 1 },
                Recompute::Selective,
            ] {
                let mut cut = delayed(cut.clone());
                cut.training.recompute = recompute;
                let what = format!("{name} {schedule} {recompute:?}");
                let expected = train(&plain, STEPS).unwrap();
                assert_same_runs(&what, &train(&cut, STEPS).unwrap(), &expected);
                assert_same_runs(
                    &format!("{what}, early"),
                    &train_overlapping(&cut, STEPS).unwrap(),
                    &expected,
                );
            }
        }
    });
}

/// Spans of a step by rank, each as the letter that `letter` gives.
fn spans(config: &RunConfig, letter: impl Fn(&str) -> Option<char> + Sync) -> Vec<String> {
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    let ranks = on_ranks_with(config.parallel.world_size(), CommOptions::default(), |world| {
        let mut trainer = trainer(config, world, &data)?;
        let recorder = Recorder::new();
        let entered = recorder.enter("rank");
        trainer.step()?;
        drop(entered);
        Ok(recorder
            .take()
            .iter()
            .filter(|e| e.thread == 0)
            .filter_map(|e| letter(e.name))
            .collect())
    });
    ranks.unwrap()
}

/// Covers forwards, backwards, input gradients and weight gradients of a rank, and the products
/// within them.
#[test]
fn delayed_weight_gradients_run_apart() {
    let mut config = delayed(layout(tiny(Style::Llama, 0.0), 1, 1, 2));
    (config.model.num_layers, config.training.global_batch_size) = (2, 2);
    let ranks = spans(&config, |name| match name {
        "forward" => Some('F'),
        "backward" => Some('B'),
        "input gradients" => Some('I'),
        "weight gradients" => Some('W'),
        "linear_wgrad" => Some('.'),
        _ => None,
    });
    // A layer has four matrices. The gradient of the output matrix is part of the last stage's
    // forward.
    assert_eq!(ranks, ["FFB....B....", "F.IF.IW....W...."]);
}

#[test]
fn pipelines_under_tensor_and_data_parallelism() {
    for_both(|name, plain| {
        let mut plain = layout(plain, 2, 2, 1);
        plain.parallel.sequence_parallel = true;
        let cut = layout(plain.clone(), 2, 2, 2);
        same_bits(&format!("{name} 2·2·2"), &cut, &plain);
        same_bits(&format!("{name} 2·2·2 interleaved"), &interleave(cut, 4), &plain);
    });
}

/// Covers sequences split over cp, alone and combined with every other axis. No schedule,
/// recompute, ZeRO-1, bucket size or early message changes a bit.
#[test]
fn context_parallelism_with_all_that_changes_no_bit() {
    for_both(|name, plain| {
        for (dp, cp, tp) in [(1, 2, 1), (1, 4, 1), (2, 2, 2)] {
            let mut plain = context(layout(plain.clone(), dp, tp, 1), cp);
            plain.parallel.sequence_parallel = tp > 1;
            let expected = train(&plain, STEPS).unwrap();
            let mut changed = vec![];
            for (schedule, cut) in
                under_all_schedules(&context(layout(plain.clone(), dp, tp, 2), cp), 2)
            {
                changed.push((format!("{schedule}, delayed"), delayed(cut.clone())));
                changed.push((schedule.into(), cut));
            }
            for recompute in [
                Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 3 },
                Recompute::Selective,
            ] {
                let mut again = plain.clone();
                again.training.recompute = recompute;
                changed.push((format!("{recompute:?}"), again));
            }
            for (zero, bucket_size) in [(true, 40_000_000), (true, 1), (false, 1000)] {
                let mut sharded = plain.clone();
                sharded.parallel.zero_stage = zero.into();
                sharded.parallel.overlap_grad_reduce = bucket_size < 40_000_000;
                sharded.parallel.bucket_size = bucket_size;
                changed.push((format!("zero {zero} bucket {bucket_size}"), sharded));
            }
            let mut narrow = plain.clone();
            narrow.training.precision = Precision::Bf16;
            let mut sharded = narrow.clone();
            sharded.parallel.zero_stage = 1;
            same_bits(&format!("{name} dp {dp} cp {cp} tp {tp} bf16 zero"), &sharded, &narrow);
            for (change, config) in changed {
                let what = format!("{name} dp {dp} cp {cp} tp {tp} {change}");
                assert_same_runs(&what, &train(&config, STEPS).unwrap(), &expected);
                assert_same_runs(
                    &format!("{what}, early"),
                    &train_overlapping(&config, STEPS).unwrap(),
                    &expected,
                );
            }
        }
    });
}

/// Covers receives that are posted one pass ahead, and gathers and sums over tp that overlap with
/// products.
#[test]
fn communication_before_it_is_needed() {
    for_both(|name, plain| {
        for ((dp, tp, pp), sequence_parallel) in [
            ((1, 1, 4), false),
            ((1, 2, 1), false),
            ((1, 2, 1), true),
            ((1, 4, 2), true),
            ((2, 2, 2), true),
        ] {
            let mut cut = layout(plain.clone(), dp, tp, pp);
            cut.parallel.sequence_parallel = sequence_parallel;
            let mut variants = vec![("1f1b", cut.clone())];
            if pp > 1 {
                variants.push(("interleaved", interleave(cut.clone(), 2)));
                cut.parallel.schedule = ScheduleKind::Gpipe;
                variants.push(("gpipe", cut));
            }
            for (schedule, mut cut) in variants {
                for recompute in [Recompute::None, Recompute::Selective] {
                    cut.training.recompute = recompute;
                    let what = format!(
                        "{name} {dp}·{tp}·{pp} sp {sequence_parallel} {schedule} {recompute:?}"
                    );
                    assert_same_runs(
                        &what,
                        &train_overlapping(&cut, STEPS).unwrap(),
                        &train(&cut, STEPS).unwrap(),
                    );
                }
            }
        }
    });
}

/// Gradient products (D of inputs, W of weights) and waits (.) of one step of two layers, on one of
/// two tensor-parallel ranks.
fn products_and_waits(overlap: bool) -> String {
    let mut config = layout(tiny(Style::Llama, 0.0), 1, 2, 1);
    (config.model.num_layers, config.training.global_batch_size) = (2, 1);
    config.parallel.sequence_parallel = true;
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    let options = CommOptions { overlap, ..CommOptions::default() };
    let ranks = on_ranks_with(2, options, |world| {
        let mut trainer = trainer(&config, world, &data)?;
        let recorder = Recorder::new();
        let entered = recorder.enter("rank");
        trainer.step()?;
        drop(entered);
        let letter = |name: &str| match name {
            "linear_dgrad" => Some('D'),
            "linear_wgrad" => Some('W'),
            "wait for a collective" => Some('.'),
            _ => None,
        };
        Ok(recorder
            .take()
            .iter()
            .filter(|e| e.thread == 0)
            .filter_map(|e| letter(e.name))
            .collect())
    });
    ranks.unwrap().remove(0)
}

/// The input of a column-parallel layer is gathered while its gradient is computed. That gradient
/// is summed while the weight's gradient is computed.
#[test]
fn collectives_of_backward_run_beside_its_products() {
    let (beside, between) = (products_and_waits(true), products_and_waits(false));
    // An MLP, then the attention before it, each starting from the gathered gradient of its output.
    assert_eq!(beside.matches(".DWD.W..DWD.W.").count(), 2, "{beside}");
    assert_eq!(between.matches(".DW.D.W.DW.D.W").count(), 2, "{between}");
}

/// Products in forward and backward of a microbatch of three layers, with segments of two.
#[test]
fn no_output_of_a_recomputed_segment_is_made_again() {
    let mut config = tiny(Style::Llama, 0.0);
    (config.model.num_layers, config.training.global_batch_size) =
        (3, config.training.micro_batch_size);
    config.training.recompute = Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 2 };
    let ranks = spans(&config, |name| match name {
        "forward" => Some('F'),
        "backward" => Some('B'),
        "linear" => Some('.'),
        "linear_wgrad" => Some('W'),
        _ => None,
    });
    // Forward has four products per layer, and the head's with its gradients. Backward recomputes
    // the third layer except for its last product, then two layers likewise.
    let forward = format!("F{}.W", ".".repeat(12));
    assert_eq!(ranks, [format!("{forward}B...WWWW{}{}", ".".repeat(7), "W".repeat(8))]);
}

#[test]
fn recompute() {
    for_both(|name, plain| {
        let plain = layout(plain, 1, 2, 2);
        for (method, num_layers) in [
            (RecomputeMethod::Uniform, 1),
            (RecomputeMethod::Uniform, 3),
            (RecomputeMethod::Block, 2),
        ] {
            let mut changed = plain.clone();
            changed.training.recompute = Recompute::Full { method, num_layers };
            same_bits(&format!("{name} full {method:?} {num_layers}"), &changed, &plain);
        }
        let mut changed = plain.clone();
        changed.training.recompute = Recompute::Selective;
        same_bits(&format!("{name} selective"), &changed, &plain);
    });
}

/// `config` with recomputed layers whose saved inputs are cut over tp, in files, or both.
fn fewer_saved_inputs(config: &RunConfig, recompute: Recompute) -> Vec<(String, RunConfig)> {
    let cuts = [(true, false), (false, true), (true, true)];
    let cuts = cuts.into_iter().filter(|(cut, _)| !cut || !config.parallel.sequence_parallel);
    let changed = cuts.map(|(cut, in_files)| {
        let mut changed = config.clone();
        let t = &mut changed.training;
        (t.recompute, t.distribute_saved_activations) = (recompute, cut);
        if in_files {
            t.activation_offload = Offload::Nvme(std::env::temp_dir());
        }
        changed.data.data_path = vec!["memory".into()];
        changed.validate().unwrap();
        (format!("{recompute:?}, cut {cut}, in files {in_files}"), changed)
    });
    changed.collect()
}

/// Covers saved inputs of every schedule, in segments, under tp, sequence parallelism, cp and ZeRO.
#[test]
fn saved_inputs_cut_over_tp_and_in_files() {
    const FEW: usize = 3;
    let full = |method, num_layers| Recompute::Full { method, num_layers };
    let [uniform, block] = [RecomputeMethod::Uniform, RecomputeMethod::Block];
    for_both(|name, plain| {
        for (dp, cp, tp, pp, stage, sequence_parallel) in [
            (1, 1, 2, 1, 0, false),
            (1, 1, 4, 2, 1, false),
            (1, 2, 2, 2, 2, false),
            (2, 1, 2, 1, 3, false),
            (1, 1, 2, 2, 0, true),
        ] {
            let mut plain = context(layout(plain.clone(), dp, tp, pp), cp);
            plain.parallel.zero_stage = stage;
            plain.parallel.sequence_parallel = sequence_parallel;
            let expected = train(&plain, FEW).unwrap();
            let what = format!("{name} {dp}·{cp}·{tp}·{pp} stage {stage}");
            for recompute in [full(uniform, 1), full(uniform, 3), full(block, 2)] {
                for (change, changed) in fewer_saved_inputs(&plain, recompute) {
                    let run = train(&changed, FEW).unwrap();
                    assert_same_runs(&format!("{what}, {change}"), &run, &expected);
                }
            }
            if pp == 1 {
                let (change, changed) = fewer_saved_inputs(&plain, full(uniform, 1)).remove(2);
                let early = train_overlapping(&changed, FEW).unwrap();
                assert_same_runs(&format!("{what}, {change}, early"), &early, &expected);
                continue;
            }
            for (schedule, cut) in under_all_schedules(&plain, 2) {
                let (change, changed) = fewer_saved_inputs(&cut, full(uniform, 1)).pop().unwrap();
                for (order, changed) in [("", changed.clone()), ("delayed", delayed(changed))] {
                    let what = format!("{what}, {schedule} {order}, {change}");
                    assert_same_runs(&what, &train(&changed, FEW).unwrap(), &expected);
                    let early = train_overlapping(&changed, FEW).unwrap();
                    assert_same_runs(&format!("{what}, early"), &early, &expected);
                }
            }
        }
    });
}

#[test]
fn saved_inputs_in_16_bits_and_of_an_evaluation_between_steps() {
    for precision in [Precision::Bf16, Precision::Fp16(LossScaling::Static(1024.0))] {
        let mut plain = layout(tiny(Style::Gpt2, 0.1), 1, 2, 2);
        plain.training.precision = precision;
        // An odd number of elements, which two ranks share.
        (plain.model.seq_length, plain.model.hidden_size) = (15, 33);
        let data =
            sources(Tokens::synthetic(plain.model.vocab_size as u32, plain.model.seq_length));
        let losses = |config: &RunConfig| {
            let ranks = on_ranks_with(4, CommOptions::default(), |world| {
                let mut trainer = trainer(config, world, &data)?;
                let batch = GlobalBatch::new(1, 8, 0, 1)?;
                let held_out =
                    Loader::new(data.train.clone(), batch, config.model.vocab_size, Device::Cpu);
                let mut losses = Vec::new();
                for _ in 0..3 {
                    losses.push(trainer.step()?.lm_loss);
                    losses.push(trainer.evaluate(&held_out, 0, 1)?);
                }
                Ok(losses)
            });
            ranks.unwrap().remove(0)
        };
        let expected = losses(&plain);
        let recompute = Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 1 };
        for (change, changed) in fewer_saved_inputs(&plain, recompute) {
            assert_eq!(losses(&changed), expected, "{precision} {change}");
        }
    }
}

/// `type:` counts what it matches: layers alone, or the ends as well.
#[test]
fn layers_dealt_by_type() {
    for_both(|name, plain| {
        for (regex, layers) in [("transformer", [4, 4]), ("Transformer|embedding", [4, 4])] {
            let mut cut = layout(plain.clone(), 1, 1, 2);
            cut.parallel.partition = PartitionMethod::Type(regex.into());
            let data =
                sources(Tokens::synthetic(cut.model.vocab_size as u32, cut.model.seq_length));
            let ranks = on_ranks_with(2, CommOptions::default(), |world| {
                Ok(trainer(&cut, world, &data)?.stage().chunks[0].layers.len())
            });
            assert_eq!(ranks.unwrap(), layers, "{regex}");
            same_bits(&format!("{name} type:{regex}"), &cut, &plain);
        }
        let mut none = layout(plain, 1, 1, 2);
        none.parallel.partition = PartitionMethod::Type("mlp".into());
        let refused = train(&none, 1).unwrap_err().to_string();
        assert!(refused.contains("its types are Embedding, TransformerLayer, Head"), "{refused}");
    });
}

#[test]
fn zero_1_bucket_size_and_overlap() {
    for_both(|name, plain| {
        for (dp, tp, pp) in [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)] {
            let mut plain = layout(plain.clone(), dp, tp, pp);
            // With sequence parallelism, gradients of norms are sums over tp; in buckets of one
            // parameter each is separate.
            plain.parallel.sequence_parallel = true;
            for (zero, bucket_size, overlap) in [
                (true, 40_000_000, false),
                (false, 1000, false),
                (false, 1000, true),
                (true, 1000, true),
                (true, 1, true),
            ] {
                let mut changed = plain.clone();
                changed.parallel.zero_stage = zero.into();
                changed.parallel.bucket_size = bucket_size;
                changed.parallel.overlap_grad_reduce = overlap;
                let what = format!(
                    "{name} {dp}·{tp}·{pp} zero {zero} bucket {bucket_size} overlap {overlap}"
                );
                same_bits(&what, &changed, &plain);
            }
        }
    });
}

/// Sums over replicas have one order in all stages, as long as a step has one microbatch.
#[test]
fn zero_stages_at_one_microbatch() {
    for_both(|name, plain| {
        for (dp, cp, tp, pp) in
            [(2, 1, 1, 1), (4, 1, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (1, 2, 1, 1), (2, 2, 2, 1)]
        {
            let mut plain = context(layout(plain.clone(), dp, tp, pp), cp);
            plain.training.global_batch_size = dp * plain.training.micro_batch_size;
            plain.parallel.sequence_parallel = tp > 1;
            for (precision, recompute) in [
                (Precision::Fp32, Recompute::None),
                (
                    Precision::Bf16,
                    Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 3 },
                ),
            ] {
                let mut plain = plain.clone();
                (plain.training.precision, plain.training.recompute) = (precision, recompute);
                let expected = train(&plain, STEPS).unwrap();
                for (stage, overlap, reshards) in [
                    (1, true, true),
                    (2, false, true),
                    (2, true, true),
                    (3, true, true),
                    (3, false, false),
                ] {
                    let mut sharded = plain.clone();
                    let p = &mut sharded.parallel;
                    p.zero_stage = stage;
                    p.overlap_grad_reduce = overlap;
                    p.zero_reshard_after_forward = reshards;
                    let what = format!(
                        "{name} {precision} {dp}·{cp}·{tp}·{pp} stage {stage} overlap {overlap}"
                    );
                    let run = if overlap {
                        train_overlapping(&sharded, STEPS)
                    } else {
                        train(&sharded, STEPS)
                    };
                    assert_same_runs(&what, &run.unwrap(), &expected);
                }
            }
        }
    });
}

/// Size of a rank's master weights for 16-bit weights: a share of dp · cp.
#[test]
fn zero_1_cuts_masters_over_every_replica() {
    let masters = |zero: bool| {
        let mut config = context(layout(tiny(Style::Llama, 0.0), 2, 1, 1), 2);
        config.training.precision = Precision::Bf16;
        config.parallel.zero_stage = zero.into();
        let data =
            sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
        let ranks = on_ranks_with(4, CommOptions::default(), |world| {
            Ok(trainer(&config, world, &data)?.stage().params.bytes_by_kind())
        });
        let of = |kinds: &[(&str, usize); 3]| {
            kinds.iter().find(|(kind, _)| *kind == "master weights").unwrap().1
        };
        ranks.unwrap().iter().map(of).collect::<Vec<_>>()
    };
    let shares: Vec<_> = masters(true).iter().map(|bytes| 4 * bytes).collect();
    assert_eq!(shares, masters(false));
}
