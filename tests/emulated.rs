//! Whole models by the kernels of GPUs, on the emulator, against the CPU's: the same run to rounding, and the same bits in every order of
//! threads and blocks.
//!
//! ```text
//! cargo test --release -p system-tests --features emulated --target-dir target/emulated --test emulated
//! ```

use kernels::gpu::emulated::{Order, run};
use megatron::config::{Precision, RunConfig};
use system_tests::{Style, Tokens, largest_relative_difference, on_ranks, sources, tiny, trainer};

const STEPS: usize = 3;

/// Two layers, small enough for the emulator, with heads as GPUs have them.
fn config(style: Style, dropout: f64, precision: Precision) -> RunConfig {
    let mut config = tiny(style, dropout);
    let model = &mut config.model;
    (model.num_layers, model.hidden_size, model.ffn_hidden_size) = (2, 128, 160);
    (model.num_attention_heads, model.num_query_groups, model.head_dim) = (2, 1, 64);
    config.training.global_batch_size = 2;
    config.training.precision = precision;
    config
}

/// Losses and gradient norms of a run, on the emulator if an order is given.
fn train(config: &RunConfig, order: Option<Order>) -> [Vec<f64>; 2] {
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    let ranks = on_ranks(1, |world| {
        let body = || {
            let mut trainer = trainer(config, world, &data)?;
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
        assert!(difference < tolerance, "{what} differ by {difference:e}: {got:?}, on the CPU {want:?}");
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
