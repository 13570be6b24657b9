//! What must not change a bit: schedule, virtual stages, recompute, ZeRO-1, bucket size, overlap.

use megatron::config::{Recompute, RecomputeMethod, RunConfig, ScheduleKind};
use system_tests::{Style, interleave, layout, tiny, train};

const STEPS: usize = 6;

/// Trains both and compares every loss, gradient norm, weight and moment.
fn same_bits(what: &str, changed: &RunConfig, plain: &RunConfig) {
    let (a, b) = (train(changed, STEPS).unwrap(), train(plain, STEPS).unwrap());
    assert_eq!(a.losses, b.losses, "{what}: losses");
    assert_eq!(a.grad_norms, b.grad_norms, "{what}: gradient norms");
    for (key, value) in &b.last {
        assert!(a.last[key] == *value, "{what}: {key:?}");
    }
}

/// Both families, with dropout, so that masks are part of what is compared.
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

#[test]
fn recompute() {
    for_both(|name, plain| {
        let plain = layout(plain, 1, 2, 2);
        for (method, num_layers) in
            [(RecomputeMethod::Uniform, 1), (RecomputeMethod::Uniform, 3), (RecomputeMethod::Block, 2)]
        {
            let mut changed = plain.clone();
            changed.training.recompute = Recompute::Full { method, num_layers };
            same_bits(&format!("{name} full {method:?} {num_layers}"), &changed, &plain);
        }
        let mut changed = plain.clone();
        changed.training.recompute = Recompute::Selective;
        same_bits(&format!("{name} selective"), &changed, &plain);
    });
}

#[test]
fn zero_1_bucket_size_and_overlap() {
    for_both(|name, plain| {
        for (dp, tp, pp) in [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)] {
            let plain = layout(plain.clone(), dp, tp, pp);
            for (zero, bucket_size, overlap) in [
                (true, 40_000_000, false),
                (false, 1000, false),
                (false, 1000, true),
                (true, 1000, true),
                (true, 1, true),
            ] {
                let mut changed = plain.clone();
                changed.parallel.use_distributed_optimizer = zero;
                changed.parallel.bucket_size = bucket_size;
                changed.parallel.overlap_grad_reduce = overlap;
                let what = format!("{name} {dp}·{tp}·{pp} zero {zero} bucket {bucket_size} overlap {overlap}");
                same_bits(&what, &changed, &plain);
            }
        }
    });
}
