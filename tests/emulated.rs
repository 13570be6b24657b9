//! Runs whole models with the GPU kernels on the emulator. They match the CPU's run up to rounding,
//! and give the same bits for every order of threads and blocks.
//!
//! ```text
//! cargo test --release --features emulated --test emulated
//! ```

use std::sync::Arc;

use candle_core::Device;
use kernels::tensor::gpu::emulated::{Counts, Order, run, take_counts};
use kernels::tensor::trace::Recorder;
use megatron::config::{
    BatchSizeRampup, MomentDtype, Offload, OptimizerKind, Precision, Recompute, RecomputeMethod,
    RunConfig,
};
use megatron::data::SampleSource;
use megatron::train::Sources;
use system_tests::draw::{Random, data, difference, model, seeds};
use system_tests::{
    Style, Tokens, context, largest_relative_difference, layout, on_ranks, sources, tiny, trainer,
};

const STEPS: usize = 3;

/// Two layers, small enough for the emulator, with head sizes as on GPUs.
fn config(style: Style, dropout: f64, precision: Precision) -> RunConfig {
    let mut config = tiny(style, dropout);
    let model = &mut config.model;
    (model.num_layers, model.hidden_size, model.ffn_hidden_size) = (2, 128, 160);
    (model.num_attention_heads, model.num_query_groups, model.head_dim) = (2, 1, 64);
    config.training.global_batch_size = 2;
    config.training.precision = precision;
    config
}

/// Losses and gradient norms of a run; on the emulator if an order is given.
fn train(config: &RunConfig, order: Option<Order>) -> [Vec<f64>; 2] {
    train_on(
        &sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length)),
        config,
        order,
    )
}

fn train_on(data: &Sources, config: &RunConfig, order: Option<Order>) -> [Vec<f64>; 2] {
    let ranks = on_ranks(config.parallel.world_size(), |world| {
        let body = || {
            let mut trainer = trainer(config, world, data)?;
            (0..STEPS).map(|_| trainer.step().map(|step| (step.lm_loss, step.grad_norm))).collect()
        };
        match order {
            Some(order) => run(order, body),
            None => body(),
        }
    });
    let steps: Vec<(f64, f64)> = ranks.unwrap().remove(0);
    let (losses, norms) = steps.into_iter().unzip();
    [losses, norms]
}

#[track_caller]
fn follows_the_cpu(config: &RunConfig, tolerance: f64) {
    let cpu = train(config, None);
    let emulated = train(config, Some(Order::Forward));
    for (what, (got, want)) in ["losses", "gradient norms"].iter().zip(emulated.iter().zip(&cpu)) {
        let difference = largest_relative_difference(got, want);
        assert!(
            difference < tolerance,
            "{what} differ by {difference:e}: {got:?}, on the CPU {want:?}"
        );
    }
    assert!(cpu[0] != emulated[0], "losses are the CPU's bit for bit: nothing was emulated");
    for order in [Order::Backward, Order::Shuffled(5), Order::WarpByWarp] {
        assert_eq!(train(config, Some(order)), emulated, "{order:?}");
    }
}

#[test]
fn gpt2_with_dropout_in_fp32() {
    follows_the_cpu(&config(Style::Gpt2, 0.1, Precision::Fp32), 2e-5);
}

#[test]
fn llama_in_fp32() {
    follows_the_cpu(&config(Style::Llama, 0.0, Precision::Fp32), 2e-5);
}

#[test]
fn gpt2_in_bf16() {
    follows_the_cpu(&config(Style::Gpt2, 0.1, Precision::Bf16), 2e-2);
}

/// With 16 bits, the rounding of masks and sums differs, and so does the rounding of a step: a
/// random model may be far from smooth.
fn tolerances(precision: Precision) -> (f64, f64) {
    match precision {
        Precision::Fp32 | Precision::Fp64 => (1e-4, 1e-3),
        Precision::Bf16 => (3e-2, 0.2),
        Precision::Fp16(_) => (1e-2, 0.1),
    }
}

#[test]
fn runs_drawn_at_random() {
    for seed in seeds(12) {
        let r = &mut Random::new(seed);
        let mut config = model(r);
        let m = &mut config.model;
        m.num_layers = r.one(&[1, 2]);
        m.hidden_size = r.one(&[8, 40, 72]);
        m.head_dim = r.one(&[64, 96, 128, 256]);
        (m.num_attention_heads, m.num_query_groups) = r.one(&[(1, 1), (2, 1), (2, 2), (4, 2)]);
        m.seq_length = r.one(&[1, 3, 8, 17, 70]);
        m.max_position_embeddings = m.seq_length;
        config.training.global_batch_size = config.training.micro_batch_size * r.one(&[1, 2]);
        if config.training.precision == Precision::Fp64 {
            config.training.precision = Precision::Fp32;
        }
        let data = data(r, &mut config);
        println!("seed {seed}: {:?}\n{:?}\n{:?}", config.model, config.training, config.optimizer);
        config.validate().unwrap();
        let (cpu, emulated) =
            (train_on(&data, &config, None), train_on(&data, &config, Some(Order::Shuffled(seed))));
        let (losses, norms) = tolerances(config.training.precision);
        for (what, tolerance, at) in [("losses", losses, 0), ("gradient norms", norms, 1)] {
            let difference = difference(&emulated[at], &cpu[at]);
            println!("  {what} within {difference:.1e}");
            assert!(
                difference <= tolerance,
                "seed {seed}, {what}: {:?}, on the CPU {:?}",
                emulated[at],
                cpu[at]
            );
        }
    }
}

/// Covers state of more than one part, and several buckets, each with a last part of another
/// length.
#[test]
fn state_that_is_elsewhere_between_steps_changes_no_bit() {
    for (precision, kind, moments) in [
        (Precision::Fp32, OptimizerKind::Adam, MomentDtype::Fp32),
        (Precision::Bf16, OptimizerKind::Adam, MomentDtype::Bf16),
        (Precision::Fp32, OptimizerKind::Sgd, MomentDtype::Fp32),
    ] {
        let mut plain = config(Style::Gpt2, 0.0, precision);
        // Offloaded weights make one rank add several microbatches as several ranks do.
        plain.training.global_batch_size = plain.training.micro_batch_size;
        plain.parallel.bucket_size = 50_000;
        let o = &mut plain.optimizer;
        (o.kind, o.exp_avg_dtype, o.exp_avg_sq_dtype) = (kind, moments, moments);
        let kept = train(&plain, Some(Order::Forward));
        for offload in [Offload::Cpu, Offload::Nvme(std::env::temp_dir())] {
            for weights in [Offload::None, offload.clone()] {
                let mut config = plain.clone();
                config.optimizer.offload = offload.clone();
                config.parallel.zero_stage = if weights == Offload::None { 0 } else { 3 };
                config.parallel.param_offload = weights.clone();
                assert_eq!(
                    train(&config, Some(Order::Forward)),
                    kept,
                    "{precision} {kind:?} {offload:?}, weights {weights:?}"
                );
            }
        }
    }
}

/// Covers inputs in host memory and in files, whole and cut over tp, of segments and of single layers.
#[test]
fn saved_inputs_that_are_elsewhere_until_backward_change_no_bit() {
    for (precision, tp, pp, num_layers) in
        [(Precision::Fp32, 1, 1, 1), (Precision::Bf16, 2, 1, 1), (Precision::Fp32, 2, 2, 2)]
    {
        let mut plain = layout(config(Style::Gpt2, 0.1, precision), 1, tp, pp);
        (plain.model.num_query_groups, plain.model.num_layers) = (2, 2 * pp);
        let kept = train(&plain, Some(Order::Forward));
        let full = Recompute::Full { method: RecomputeMethod::Uniform, num_layers };
        for offload in [Offload::None, Offload::Cpu, Offload::Nvme(std::env::temp_dir())] {
            for cut in [false, true].into_iter().filter(|cut| !cut || tp > 1) {
                let mut config = plain.clone();
                config.training.recompute = full;
                config.training.distribute_saved_activations = cut;
                config.training.activation_offload = offload.clone();
                assert_eq!(
                    train(&config, Some(Order::Forward)),
                    kept,
                    "{precision} tp {tp} pp {pp} {offload:?} cut {cut}"
                );
            }
        }
    }
}

/// A step's samples are read while the previous step, whose batch size may differ, is computed.
#[test]
fn batches_that_grow_are_read_ahead() {
    let mut growing = config(Style::Gpt2, 0.1, Precision::Fp32);
    growing.training.global_batch_size = 3;
    growing.training.rampup = Some(BatchSizeRampup { start: 1, increment: 1, samples: 3 });
    growing.training.train_samples = Some(100);
    follows_the_cpu(&growing, 1e-5);
}

/// Covers state on the GPU, and state in host memory between steps.
#[test]
fn a_checkpoint_that_is_written_meanwhile_is_that_of_the_state_as_it_was() {
    for (precision, offload) in [
        (Precision::Fp32, Offload::None),
        (Precision::Bf16, Offload::None),
        (Precision::Bf16, Offload::Cpu),
    ] {
        let mut config = config(Style::Llama, 0.0, precision);
        config.optimizer.offload = offload.clone();
        let data =
            sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
        let dirs = [0; 2].map(|_| tempfile::tempdir().unwrap());
        let ranks = on_ranks(1, |world| {
            run(Order::Forward, || {
                let mut trainer = trainer(&config, world, &data)?;
                trainer.step()?;
                trainer.save(dirs[0].path())?;
                trainer.begin_save(dirs[1].path())?;
                trainer.step()?;
                trainer.finish_save()
            })
        });
        assert_eq!(ranks.unwrap(), [Some(1)]);
        let [at_once, meanwhile] = dirs.each_ref().map(|dir| {
            let folder = dir.path().join("iter_0000001");
            ["manifest.json", "rank_00000.safetensors"]
                .map(|name| std::fs::read(folder.join(name)).unwrap())
        });
        assert!(at_once == meanwhile, "{precision} {offload:?}");
    }
}

/// Covers ranks whose tensors go through the host, as on GPUs without NCCL.
#[test]
fn ranks_that_exchange_tensors_by_the_host_follow_one() {
    let mut one = config(Style::Llama, 0.0, Precision::Fp32);
    one.model.num_query_groups = 2;
    let want = train(&one, Some(Order::Forward));
    for (dp, cp, tp, pp, zero) in [
        (2, 1, 1, 1, 1),
        (2, 1, 1, 1, 2),
        (2, 1, 1, 1, 3),
        (1, 2, 1, 1, 3),
        (1, 1, 2, 1, 0),
        (1, 1, 1, 2, 0),
        (2, 1, 1, 2, 3),
    ] {
        let mut config = context(layout(one.clone(), dp, tp, pp), cp);
        config.parallel.zero_stage = zero;
        config.parallel.overlap_grad_reduce = pp > 1;
        config.parallel.sequence_parallel = tp > 1;
        let got = train(&config, Some(Order::Forward));
        for (got, want) in got.iter().zip(&want) {
            let difference = largest_relative_difference(got, want);
            assert!(
                difference < 2e-5,
                "dp {dp}, cp {cp}, tp {tp}, pp {pp}, stage {zero}: {got:?}, alone {want:?}"
            );
        }
    }
}

/// The device operations of a run's third step.
fn third_step(config: &RunConfig) -> Counts {
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    let ranks = on_ranks(1, |world| {
        run(Order::Forward, || {
            let mut trainer = trainer(config, world, &data)?;
            for _ in 0..2 {
                trainer.step()?;
            }
            take_counts();
            trainer.step()?;
            Ok(take_counts())
        })
    });
    ranks.unwrap().remove(0)
}

/// Samples that cannot be read from number `from` on.
struct Torn {
    whole: Arc<dyn SampleSource>,
    from: u64,
}

impl SampleSource for Torn {
    fn seq_length(&self) -> usize {
        self.whole.seq_length()
    }

    fn num_samples(&self) -> u64 {
        self.whole.num_samples()
    }

    fn sample(&self, index: u64, out: &mut [u32]) -> megatron::Result<()> {
        if index >= self.from {
            return Err(megatron::Error::data("torn.bin", format!("sample {index} is not there")));
        }
        self.whole.sample(index, out)
    }
}

#[test]
fn data_that_cannot_be_read_ahead_ends_the_step_that_needs_it() {
    let config = config(Style::Llama, 0.0, Precision::Fp32);
    let mut data =
        sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    data.train =
        Arc::new(Torn { whole: data.train, from: 2 * config.training.global_batch_size as u64 });
    let steps = on_ranks(1, |world| {
        run(Order::Forward, || {
            let mut trainer = trainer(&config, world, &data)?;
            Ok([0; 3].map(|_| trainer.step().map(|step| step.iteration).map_err(|e| e.to_string())))
        })
    });
    let [first, second, third] = steps.unwrap().remove(0);
    assert_eq!((first, second), (Ok(1), Ok(2)));
    assert!(third.unwrap_err().contains("sample 4 is not there"));
}

/// Also for fp16: the loss scaler learns of an overflow only after the step has ended.
#[test]
fn nothing_of_a_step_is_read_before_all_of_it_is_queued() {
    let fp16 = Precision::Fp16(megatron::config::LossScaling::Static(1024.0));
    for precision in [Precision::Fp32, Precision::Bf16, fp16] {
        for style in [Style::Gpt2, Style::Llama] {
            let mut config =
                config(style, if matches!(style, Style::Gpt2) { 0.1 } else { 0.0 }, precision);
            config.training.micro_batch_size = 1;
            let counts = third_step(&config);
            let what = format!("{style:?} in {precision}: {counts:?}");
            assert_eq!(
                (counts.waits, counts.launches),
                (1, counts.launches_before_last_wait),
                "{what}"
            );
            // Tokens, labels and mask of two microbatches; positions and sample numbers have been
            // on the device since the first step.
            assert_eq!(counts.uploads, 2 * 3, "{what}");
            let other: Vec<_> =
                counts.on_the_host.iter().filter(|op| !op.starts_with("linear")).collect();
            assert!(other.is_empty(), "{what}");
        }
    }
}

/// Except when the next forward's loss scale depends on the results.
#[test]
fn results_are_read_once_forward_and_backward_of_the_next_step_are_queued() {
    let adapts = megatron::config::DynamicLossScale { initial: 1024.0, ..Default::default() };
    let fp16 = Precision::Fp16(megatron::config::LossScaling::Dynamic(adapts));
    for (precision, lag) in [(Precision::Bf16, 1), (fp16, 0)] {
        let config = config(Style::Llama, 0.0, precision);
        let data =
            sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
        let ranks = on_ranks(1, |world| {
            run(Order::Forward, || {
                let mut trainer = trainer(&config, world, &data)?;
                trainer.step()?;
                trainer.advance(false)?;
                take_counts();
                let read: Vec<u64> =
                    trainer.advance(false)?.iter().map(|step| step.iteration).collect();
                let counts = take_counts();
                let refused = (lag == 1)
                    .then(|| trainer.save(std::path::Path::new("unused")).unwrap_err().to_string());
                Ok((read, counts, refused, trainer.settle()?.map(|step| step.iteration)))
            })
        });
        let (read, counts, refused, left) = ranks.unwrap().remove(0);
        assert_eq!((read, counts.waits), (vec![3 - lag], 1), "{precision}: {counts:?}");
        if lag == 0 {
            assert_eq!((counts.launches, left), (counts.launches_before_last_wait, None));
        } else {
            let behind = counts.launches - counts.launches_before_last_wait;
            assert!(
                behind > 0 && behind < counts.launches / 4,
                "the optimizer alone comes after: {counts:?}"
            );
            assert_eq!(left, Some(3));
            assert!(refused.unwrap().contains("results were not read"));
        }
    }
}

#[test]
fn a_profile_has_the_devices_times_and_waits_for_none_within_a_step() {
    let config = config(Style::Gpt2, 0.1, Precision::Bf16);
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    let recorder = Recorder::new();
    let ranks = on_ranks(1, |world| {
        run(Order::Forward, || {
            let mut trainer = trainer(&config, world, &data)?;
            trainer.step()?;
            let entered = recorder.enter_on("main", &Device::Cpu)?;
            take_counts();
            trainer.step()?;
            let counts = take_counts();
            drop(entered);
            Ok(counts)
        })
    });
    let counts = ranks.unwrap().remove(0);
    let events = recorder.take();
    assert_eq!(
        (counts.waits, counts.launches),
        (1, counts.launches_before_last_wait),
        "{counts:?}"
    );
    assert_eq!(counts.timestamps, 2 * events.len() as u64, "a span without the device's times");
    let step = &events[0];
    assert_eq!(step.name, "step");
    assert!(
        events
            .iter()
            .all(|e| e.start >= step.start && e.start + e.length <= step.start + step.length)
    );
    for name in ["forward", "backward", "attention", "layer_norm", "adamw", "linear", "verdict"] {
        assert!(events.iter().any(|e| e.name == name), "no {name}");
    }
}

#[test]
fn timers_have_the_devices_times_and_wait_for_none() {
    let mut config = config(Style::Gpt2, 0.1, Precision::Bf16);
    (config.logging.timing_log_level, config.logging.log_interval) = (2, 2);
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    let ranks = on_ranks(1, |world| {
        run(Order::Forward, || {
            let mut trainer = trainer(&config, world, &data)?;
            trainer.step()?;
            trainer.advance(false)?;
            take_counts();
            let steps = trainer.advance(false)?;
            Ok((steps, take_counts(), trainer.settle()?))
        })
    });
    let (steps, counts, third) = ranks.unwrap().remove(0);
    let [second] = steps.as_slice() else { panic!("{} steps", steps.len()) };
    assert_eq!((second.iteration, counts.waits), (2, 1), "{counts:?}");
    assert!(counts.timestamps > 0 && third.unwrap().timers.is_none());
    let timers = second.timers.as_ref().expect("a summary every two steps");
    for name in ["forward", "backward", "optimizer", "output"] {
        let all = timers.entries.iter().chain(&timers.details);
        let entry = all.into_iter().find(|entry| entry.name == name);
        assert!(entry.is_some_and(|entry| entry.ms[0] > 0.0), "{name} in {timers:?}");
    }
}
