//! GPU memory, on an emulator with a memory limit and a counting allocator: the memory that a step
//! reports, and the error when it is exhausted.
//!
//! ```text
//! cargo test --release --features emulated --test memory
//! ```
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use candle_core::Device;
use kernels::tensor::gpu::emulated::{Metered, Order, limit_memory, run};
use megatron::Error;
use megatron::config::RunConfig;
use megatron::train::{Footprint, StepMetrics};
use models::Gpt;
use system_tests::{Style, Tokens, on_ranks, sources, tiny, trainer};

/// The system's allocator, with a count of the bytes in use.
struct Counting;

static USED: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);

fn took(bytes: usize) {
    PEAK.fetch_max(USED.fetch_add(bytes as u64, Relaxed) + bytes as u64, Relaxed);
}

// SAFETY: the system's allocator does the work, with the caller's arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: as the caller promises; the same below.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size() as u64, Relaxed);
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn meter() -> Metered {
    Metered { used: USED.load(Relaxed), peak: PEAK.load(Relaxed) }
}

fn config() -> RunConfig {
    let mut config = tiny(Style::Llama, 0.0);
    let model = &mut config.model;
    (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.vocab_size) =
        (2, 128, 512, 2000);
    (model.num_attention_heads, model.num_query_groups, model.head_dim) = (2, 1, 64);
    (config.training.micro_batch_size, config.training.global_batch_size) = (4, 4);
    config
}

/// Runs a step on a device with `before` free bytes while the trainer is built and `after` free
/// bytes afterwards.
fn step(before: u64, after: u64) -> Result<StepMetrics, Error> {
    let config = config();
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    let limit = |room: u64| limit_memory(Some((meter().used + room, meter)));
    let ranks = on_ranks(1, |world| {
        run(Order::Forward, || {
            limit(before);
            let mut trainer = trainer(&config, world, &data)?;
            limit(after);
            trainer.step()
        })
    });
    ranks.map(|mut ranks| ranks.remove(0))
}

/// Bytes of a rank between two steps and at their peak, and what the memory report says of its
/// weights, gradients and optimizer state.
fn state(dp: usize, zero_stage: u8) -> [f64; 3] {
    let mut config = config();
    (config.model.num_layers, config.model.hidden_size) = (6, 256);
    config.model.untie_embeddings_and_output_weights = false;
    config.parallel.data_parallel_size = dp;
    config.parallel.zero_stage = zero_stage;
    (config.training.micro_batch_size, config.training.global_batch_size) = (1, dp);
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    let before = USED.load(Relaxed);
    let ranks = on_ranks(dp, |world| {
        run(Order::Forward, || {
            let mut trainer = trainer(&config, world.clone(), &data)?;
            trainer.step()?;
            world.barrier()?;
            let held = USED.load(Relaxed) - before;
            PEAK.store(before + held, Relaxed);
            world.barrier()?;
            trainer.step()?;
            world.barrier()?;
            Ok([held, PEAK.load(Relaxed) - before].map(|bytes| bytes as f64 / dp as f64))
        })
    });
    let [held, peak] = ranks.unwrap().remove(0);
    let model = Gpt::of(&config, &Device::Cpu).unwrap();
    let report = Footprint::of_stages(&config, &model).unwrap().remove(0);
    [held, peak, report.total() - report.activations]
}

/// ZeRO-3 keeps 1/dp of all state, and two units whole: of the embedding, which is tied to the head,
/// and of the largest layer, the weights and their gradients.
fn the_state_of_zero_3_is_a_share_and_two_units() {
    let [held, peak, reported] = state(1, 0);
    let activations = peak - held;
    let (hidden, ffn, vocab) = (256.0, 512.0, 2000.0);
    let layer = hidden * (2.0 * 128.0 + 2.0 * 64.0 + 3.0 * ffn);
    let units = (layer + vocab * hidden) * (4.0 + 4.0);
    for dp in [2, 4, 8] {
        let [held_here, peak_here, reported_here] = state(dp, 3);
        let share = reported / dp as f64;
        let expected = share + units;
        eprintln!(
            "dp {dp}: held {held_here} of {held}, peak {peak_here}, report {reported_here}, expected {expected}, activations {activations}"
        );
        assert!((reported_here / expected - 1.0).abs() < 0.01, "{reported_here} for {expected}");
        // Between steps there are no gradients, which are a fourth of the state.
        assert!((held_here / (0.75 * share) - 1.0).abs() < 0.05, "{held_here} of {share}");
        assert!(
            peak_here < 1.05 * (expected + activations),
            "{peak_here}: {expected}, {activations}"
        );
    }
}

/// One test for all cases, because the limit and the count are global.
#[test]
fn the_peak_is_reported_and_too_little_memory_explained() {
    the_state_of_zero_3_is_a_share_and_two_units();
    const ENOUGH: u64 = 1 << 40;
    let metrics = step(ENOUGH, ENOUGH).unwrap();
    let memory = metrics.memory;
    // At least weights, gradients and two moments of 2000 · 128 elements.
    let least = 2 * 4 * 4 * 2000 * 128;
    assert!(memory.allocated > least && memory.reserved == Some(memory.allocated), "{memory:?}");
    assert_eq!(metrics.to_json()["memory_reserved"], memory.allocated);

    // Memory runs out during the activations.
    let error = step(ENOUGH, 300_000).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::OutOfMemory(_)), "{text}");
    for part in [
        ": no memory on the GPU for ",
        " bytes (a tensor [",
        "] of F32): ",
        "Held by: weights 0.0",
        "main gradients 0.0",
        "optimizer state 0.0",
        "activations and results of operations",
        "a smaller --micro-batch-size (now 4)",
        "--recompute-granularity",
        "--bf16",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }

    // Memory runs out while the model is built, after the weights and before the main gradients.
    // Fewer activations would not help.
    let text = step(6_500_000, ENOUGH).unwrap_err().to_string();
    assert!(text.starts_with("main gradients: no memory on the GPU"), "{text}");
    assert!(
        text.contains("--tensor-model-parallel-size") && !text.contains("--micro-batch-size"),
        "{text}"
    );
    limit_memory(None);
}
