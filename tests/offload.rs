//! Optimizer state, gradients and weights in files instead of memory: the same bits on every layout,
//! and identical checkpoints.

use std::env::temp_dir;

use candle_core::Device;
use megatron::config::{
    DynamicLossScale, LossScaling, MomentDtype, Offload, OptimizerKind, Precision, RunConfig,
};
use megatron::train::Footprint;
use models::Gpt;
use system_tests::{Style, layout, save_after, tiny, train, train_from};

const STEPS: usize = 8;

fn offloaded(mut config: RunConfig) -> RunConfig {
    // Unnamed files leave nothing to clean up.
    config.optimizer.offload = Offload::Nvme(temp_dir());
    if config.parallel.zero_stage == 3 {
        config.parallel.param_offload = Offload::Nvme(temp_dir());
    }
    config
}

/// Configurations with every precision and kind of state.
fn variants() -> Vec<RunConfig> {
    let plain = tiny(Style::Gpt2, 0.1);
    let mut variants = Vec::new();
    // The first steps overflow, and are skipped.
    let fp16 = Precision::Fp16(LossScaling::Dynamic(DynamicLossScale {
        initial: f64::from(1 << 24),
        ..Default::default()
    }));
    for precision in [Precision::Fp32, Precision::Fp64, Precision::Bf16, fp16] {
        let mut config = plain.clone();
        config.training.precision = precision;
        variants.push(config);
    }
    let mut narrow = variants[2].clone();
    (narrow.optimizer.exp_avg_dtype, narrow.optimizer.exp_avg_sq_dtype) =
        (MomentDtype::Bf16, MomentDtype::Bf16);
    let mut sgd = plain;
    (sgd.optimizer.kind, sgd.optimizer.lr) = (OptimizerKind::Sgd, 0.05);
    variants.extend([narrow, sgd]);
    variants
}

#[test]
fn state_in_files_changes_no_bit() {
    for plain in variants() {
        for (dp, tp, pp, zero) in
            [(1, 1, 1, 0), (2, 1, 1, 1), (2, 2, 2, 1), (1, 2, 1, 3), (2, 1, 2, 2), (2, 1, 1, 3)]
        {
            let mut config = layout(plain.clone(), dp, tp, pp);
            config.parallel.zero_stage = zero;
            if dp == 1 && zero == 3 {
                // Offloaded weights make one rank add microbatches as several ranks do.
                config.training.global_batch_size = config.training.micro_batch_size;
            }
            let what = format!(
                "{} {:?} {dp}·{tp}·{pp} stage {zero}",
                config.training.precision, config.optimizer.kind
            );
            let (kept, file_backed) =
                (train(&config, STEPS).unwrap(), train(&offloaded(config.clone()), STEPS).unwrap());
            let skipped = file_backed.grad_norms.iter().filter(|norm| !norm.is_finite()).count();
            let expected = if matches!(config.training.precision, Precision::Fp16(_)) {
                1..STEPS
            } else {
                0..1
            };
            assert!(expected.contains(&skipped), "{what}: {skipped} steps were skipped");
            assert_eq!(file_backed.losses, kept.losses, "{what}");
            assert!(file_backed.last == kept.last, "{what}: final state");
        }
    }
}

/// What `Footprint` reports of ZeRO-3 at dp N: 1/N of all state of stage 0, and of two units, the
/// embedding (tied to the head) and a layer, the weights and the fp32 gradients.
#[test]
fn the_state_of_zero_3_is_a_share_and_two_units() {
    let state = |dp: usize, zero_stage: u8| {
        let mut config = layout(tiny(Style::Gpt2, 0.0), dp, 1, 1);
        (config.model.hidden_size, config.model.vocab_size) = (64, 1000);
        (config.model.head_dim, config.model.ffn_hidden_size) = (16, 256);
        (config.model.num_attention_heads, config.model.num_query_groups) = (4, 4);
        config.parallel.zero_stage = zero_stage;
        let model = Gpt::of(&config, &Device::Cpu).unwrap();
        let report = Footprint::of_stages(&config, &model).unwrap().remove(0);
        report.total() - report.activations
    };
    let whole = state(1, 0);
    // Weights with biases, and two norms.
    let layer = 12 * 64 * 64 + 13 * 64;
    let units = f64::from((layer + 1000 * 64) * (4 + 4));
    for dp in [2, 4, 8] {
        let (here, expected) = (state(dp, 3), whole / dp as f64 + units);
        assert!((here / expected - 1.0).abs() < 0.01, "dp {dp}: {here} instead of {expected}");
    }
}

#[test]
fn either_run_resumes_the_other_bitwise() {
    for plain in variants() {
        let dir = tempfile::tempdir().unwrap();
        let mut saved = layout(plain, 2, 2, 1);
        saved.parallel.zero_stage = 3;
        let uninterrupted = train(&saved, STEPS).unwrap();
        let rest = STEPS - 4;
        for (from, to) in
            [(offloaded(saved.clone()), saved.clone()), (saved.clone(), offloaded(saved.clone()))]
        {
            let path = save_after(&from, 4, dir.path());
            let resumed = train_from(&to, Some(&path), rest).unwrap();
            assert_eq!(resumed.losses, uninterrupted.losses[4..]);
            assert!(resumed.last == uninterrupted.last, "final state");
            let stored = train_from(&from, Some(&path), 0).unwrap().last;
            // Another layout, whose shards come in several parts.
            let alone = layout(to, 1, 1, 1);
            assert!(
                train_from(&alone, Some(&path), 0).unwrap().last == stored,
                "what is loaded alone"
            );
        }
    }
}
