//! Trains the same small Llama in one process and over eight ranks, which are threads here, and
//! prints both losses.
//!
//!     cargo run --release --example layouts
//!
//! Shows how the library is used without the command line: a configuration, a model, a source of
//! samples, a world.

use std::sync::Arc;

use candle_core::{DType, Device};
use megatron::Result;
use megatron::comm::{Group, threads};
use megatron::config::RunConfig;
use megatron::data::SampleSource;
use megatron::train::{Sources, Trainer};
use models::Gpt;
use system_tests::{Style, Tokens, interleave, layout, tiny};

fn train(config: &RunConfig, world: Group, sources: &Sources) -> Result<Vec<f64>> {
    let parallel = &config.parallel;
    let model = Gpt::new(
        &config.model,
        parallel.tensor_model_parallel_size,
        parallel.sequence_parallel,
        config.training.recompute,
        DType::F32,
        &Device::Cpu,
    )?;
    let mut trainer = Trainer::new(config, &model, world, sources, &Device::Cpu)?;
    (0..10).map(|_| Ok(trainer.step()?.lm_loss)).collect()
}

fn main() -> Result<()> {
    let alone = tiny(Style::Llama, 0.1);
    let mut cut = interleave(layout(alone.clone(), 2, 2, 2), 2);
    cut.parallel.sequence_parallel = true;
    cut.parallel.use_distributed_optimizer = true;

    let train_data: Arc<dyn SampleSource> =
        Arc::new(Tokens::synthetic(101, alone.model.seq_length));
    let sources = Sources {
        train: train_data,
        valid: None,
        test: None,
        document_ends: None,
        fingerprint: String::new(),
    };
    let single = train(&alone, megatron::comm::solo(), &sources)?;
    let world = threads::world(cut.parallel.world_size());
    let ranks: Vec<Result<Vec<f64>>> = std::thread::scope(|scope| {
        let handles: Vec<_> =
            world.into_iter().map(|rank| scope.spawn(|| train(&cut, rank, &sources))).collect();
        handles.into_iter().filter_map(|handle| handle.join().ok()).collect()
    });
    let eight = ranks.into_iter().collect::<Result<Vec<_>>>()?.swap_remove(0);

    println!("step   one process   dp 2 · tp 2 (sequence parallel) · pp 2 (interleaved), ZeRO-1");
    for (step, (a, b)) in single.iter().zip(&eight).enumerate() {
        println!("{:4}   {a:.8}    {b:.8}", step + 1);
    }
    Ok(())
}
