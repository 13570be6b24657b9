//! Models, layouts, schedules and precisions drawn at random: each run follows the single process, has the bits of the same cut without a pipeline, and
//! its checkpoint goes on under another layout.
//!
//! `RANDOM_RUNS` and `RANDOM_SEED` in the environment say how many are drawn, and from where on; a failure names its seed.

use megatron::config::*;
use system_tests::draw::{Random, cut, data, difference, model, seeds};
use system_tests::{Run, on_ranks, train_on, trainer};

const RUNS: u64 = 24;
const STEPS: usize = 5;
/// Steps before the checkpoint.
const SAVED: usize = 2;

/// The same cut over tp and dp, with neither a pipeline nor what changes no bit.
fn without_pipeline(config: &RunConfig) -> RunConfig {
    let mut plain = config.clone();
    plain.training.recompute = Recompute::None;
    plain.parallel = ParallelConfig {
        tensor_model_parallel_size: config.parallel.tensor_model_parallel_size,
        data_parallel_size: config.parallel.data_parallel_size,
        sequence_parallel: config.parallel.sequence_parallel,
        ..Default::default()
    };
    plain
}

/// Allowed differences of losses and gradient norms between layouts that add in another order. Of a thousand runs the largest measured are
/// 1e-11 and 0 (norms are fp32), 2e-5 and 2e-4, 7e-3 and 6e-2, 2e-3 and 2e-2.
fn tolerances(precision: Precision) -> (f64, f64) {
    match precision {
        Precision::Fp64 => (1e-10, 1e-6),
        Precision::Fp32 => (1e-4, 1e-3),
        Precision::Bf16 => (2e-2, 0.2),
        Precision::Fp16(_) => (1e-2, 0.1),
    }
}

fn close(what: &str, precision: Precision, run: (&[f64], &[f64]), alone: (&[f64], &[f64])) {
    let (losses, norms) = tolerances(precision);
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
    if let Err(error) = plain.validate() {
        println!("seed {seed}: refused, {error}");
        return;
    }
    let (first, second) = (cut(r, &plain), cut(r, &plain));
    println!(
        "seed {seed}: {:?}\n{:?}\n{:?}\n  {:?}\n  {:?}",
        plain.model, plain.training, plain.optimizer, first.parallel, second.parallel
    );
    let precision = plain.training.precision;
    let alone = train_on(&data, &plain, None, STEPS).unwrap();
    let run = train_on(&data, &first, None, STEPS).unwrap();
    assert!(run.initial == alone.initial, "initial weights differ");
    close("first", precision, numbers(&run), numbers(&alone));
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
    let on = train_on(&data, &first, Some(&path), rest).unwrap();
    // Checkpoints are of fp32.
    let precision = if precision == Precision::Fp64 { Precision::Fp32 } else { precision };
    if plain.training.precision == precision {
        same_bits("losses after the checkpoint", &on.losses[..], &run.losses[SAVED..]);
        assert!(on.last == run.last, "state after the checkpoint");
    } else {
        close("goes on", precision, numbers(&on), (&run.losses[SAVED..], &run.grad_norms[SAVED..]));
    }
    let on = train_on(&data, &second, Some(&path), rest).unwrap();
    close("second", precision, numbers(&on), (&alone.losses[SAVED..], &alone.grad_norms[SAVED..]));
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
