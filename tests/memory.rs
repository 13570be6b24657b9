//! GPU memory, on an emulator with a memory limit and a counting allocator: the memory that a step
//! reports, and the error when it is exhausted.
//!
//! ```text
//! cargo test --release --features emulated --test memory
//! ```
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kernels::tensor::gpu::emulated::{Metered, Order, limit_memory, run};
use megatron::Error;
use megatron::config::RunConfig;
use megatron::train::StepMetrics;
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

/// One test for all cases, because the limit is global to the device.
#[test]
fn the_peak_is_reported_and_too_little_memory_explained() {
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
