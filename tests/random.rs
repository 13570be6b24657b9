//! Random models, layouts, schedules and precisions. Each run follows the single process and has
//! the same bits as the same layout without a pipeline. Its checkpoint continues under another
//! layout, resharded or not, and with communication issued early.
//!
//! The environment variables `RANDOM_RUNS` and `RANDOM_SEED` set the number of runs and the first
//! seed. A failure names its seed.

use megatron::checkpoint::latest;
use megatron::comm::CommOptions;
use megatron::config::*;
use megatron::train::Sources as TrainSources;
use models::SavedGpt;
use system_tests::draw::{Random, cut, data, difference, model, seeds};
use system_tests::{Run, on_ranks, train_on, train_with, trainer};

const RUNS: u64 = 48;
const STEPS: usize = 5;
/// Steps before the checkpoint.
const SAVED: usize = 2;

/// The same layout over tp, cp and dp, without a pipeline and without options that change no bit.
fn without_pipeline(config: &RunConfig) -> RunConfig {
    let mut plain = config.clone();
    plain.training.recompute = Recompute::None;
    plain.training.distribute_saved_activations = false;
    plain.training.activation_offload = Offload::None;
    plain.parallel = ParallelConfig {
        tensor_model_parallel_size: config.parallel.tensor_model_parallel_size,
        context_parallel_size: config.parallel.context_parallel_size,
        data_parallel_size: config.parallel.data_parallel_size,
        sequence_parallel: config.parallel.sequence_parallel,
        // Stages of ZeRO add several microbatches, and copies of shards, in orders of their own.
        zero_stage: config.parallel.zero_stage,
        num_distributed_optimizer_instances: config.parallel.num_distributed_optimizer_instances,
        // Where one rank has all shards, offload makes it add microbatches as several ranks do.
        param_offload: config.parallel.param_offload.clone(),
        ..Default::default()
    };
    plain
}

/// Allowed differences of losses and gradient norms between layouts that add in different orders.
/// The largest differences in a thousand runs were, per precision, 1e-11 and 0 (norms are fp32),
/// 2e-5 and 2e-4, 7e-3 and 6e-2, 2e-3 and 2e-2.
fn tolerances(precision: Precision) -> (f64, f64) {
    match precision {
        Precision::Fp64 => (1e-10, 1e-6),
        Precision::Fp32 => (1e-4, 1e-3),
        Precision::Bf16 => (2e-2, 0.2),
        Precision::Fp16(_) => (1e-2, 0.1),
    }
}

/// As [`tolerances`], with one exception: some models are so steep that the single process,
/// `alone`, differs more between 16 bits and fp32. Layouts may then differ from it, and from each
/// other, by the same amount.
fn allowed(plain: &RunConfig, data: &TrainSources, alone: &Run) -> (f64, f64) {
    let (losses, norms) = tolerances(plain.training.precision);
    if !matches!(plain.training.precision, Precision::Bf16 | Precision::Fp16(_)) {
        return (losses, norms);
    }
    let mut exact = plain.clone();
    exact.training.precision = Precision::Fp32;
    let exact = train_on(data, &exact, None, STEPS).unwrap();
    let off = |a: &[f64], b: &[f64]| 3.0 * difference(a, b);
    (
        losses.max(off(&alone.losses, &exact.losses)),
        norms.max(off(&alone.grad_norms, &exact.grad_norms)),
    )
}

fn close(what: &str, (losses, norms): (f64, f64), run: (&[f64], &[f64]), alone: (&[f64], &[f64])) {
    let (loss, norm) = (difference(run.0, alone.0), difference(run.1, alone.1));
    println!("  {what}: losses within {loss:.1e}, gradient norms within {norm:.1e}");
    assert!(loss <= losses, "{what}: losses differ by {loss:e}\n{:?}\n{:?}", run.0, alone.0);
    assert!(norm <= norms, "{what}: gradient norms differ by {norm:e}\n{:?}\n{:?}", run.1, alone.1);
}

fn same_bits(what: &str, a: &[f64], b: &[f64]) {
    let bits = |numbers: &[f64]| numbers.iter().map(|n| n.to_bits()).collect::<Vec<_>>();
    assert!(bits(a) == bits(b), "{what}\n{a:?}\n{b:?}");
}

fn numbers(run: &Run) -> (&[f64], &[f64]) {
    (&run.losses, &run.grad_norms)
}

fn one(seed: u64) {
    let r = &mut Random::new(seed);
    let mut plain = model(r);
    let data = data(r, &mut plain);
    plain.validate().unwrap();
    let (first, second) = (cut(r, &plain), cut(r, &plain));
    println!(
        "seed {seed}: {:?}\n{:?}\n{:?}\n  {:?}\n  {:?}",
        plain.model, plain.training, plain.optimizer, first.parallel, second.parallel
    );
    let precision = plain.training.precision;
    let alone = train_on(&data, &plain, None, STEPS).unwrap();
    let run = train_on(&data, &first, None, STEPS).unwrap();
    assert!(run.initial == alone.initial, "initial weights differ");
    let within = allowed(&plain, &data, &alone);
    close("first", within, numbers(&run), numbers(&alone));
    let same_cut = train_on(&data, &without_pipeline(&first), None, STEPS).unwrap();
    same_bits("losses without pipeline", &run.losses, &same_cut.losses);
    same_bits("gradient norms without pipeline", &run.grad_norms, &same_cut.grad_norms);
    assert!(run.last == same_cut.last, "state without pipeline");

    let dir = tempfile::tempdir().unwrap();
    let saved = on_ranks(first.parallel.world_size(), |world| {
        let mut trainer = trainer(&first, world, &data)?;
        for _ in 0..SAVED {
            trainer.step()?;
        }
        trainer.save(dir.path())
    });
    let path = saved.unwrap().remove(0);
    let rest = STEPS - SAVED;
    let overlap = CommOptions { overlap: true, ..CommOptions::default() };
    let on = train_with(overlap, &data, &first, Some(&path), rest).unwrap();
    // Checkpoints hold fp32.
    let within = if precision == Precision::Fp64 { tolerances(Precision::Fp32) } else { within };
    if precision != Precision::Fp64 {
        same_bits("losses after the checkpoint", &on.losses[..], &run.losses[SAVED..]);
        assert!(on.last == run.last, "state after the checkpoint");
    } else {
        close("goes on", within, numbers(&on), (&run.losses[SAVED..], &run.grad_norms[SAVED..]));
    }
    // Ranks read what they need from another layout's files, or from files of their own layout.
    let resharded = tempfile::tempdir().unwrap();
    let path = if r.chance(50) {
        let saved = SavedGpt::open(&path).unwrap();
        assert!(
            saved
                .reshard(resharded.path(), &second.parallel, &Origins::default(), &mut |_| true)
                .unwrap()
        );
        latest(resharded.path()).unwrap().unwrap().path
    } else {
        path
    };
    let on = train_on(&data, &second, Some(&path), rest).unwrap();
    close("second", within, numbers(&on), (&alone.losses[SAVED..], &alone.grad_norms[SAVED..]));
    let same_cut = train_on(&data, &without_pipeline(&second), Some(&path), rest).unwrap();
    same_bits("losses without pipeline, after the checkpoint", &on.losses, &same_cut.losses);
    assert!(on.last == same_cut.last, "state without pipeline, after the checkpoint");
}

#[test]
fn runs_drawn_at_random() {
    for seed in seeds(RUNS) {
        one(seed);
    }
}
