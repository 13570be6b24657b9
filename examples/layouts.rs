//! Trains the same small Llama in one process and over eight ranks, here as threads, and prints
//! both losses.
//!
//!     cargo run --release --example layouts
//!
//! It uses the library without the command line: a configuration, a model, a source of samples, a
//! world.

use candle_core::Device;
use megatron::Result;
use megatron::comm::{Group, threads};
use megatron::config::{
    ModelConfig, Normalization, OptimizerConfig, ParallelConfig, PositionEmbedding, RunConfig,
    ScheduleKind, TrainingConfig,
};
use megatron::data::SampleSource;
use megatron::train::{Sources, Trainer};
use models::Gpt;

/// Each token follows from the previous one.
struct Samples;

impl SampleSource for Samples {
    fn seq_length(&self) -> usize {
        32
    }

    fn num_samples(&self) -> u64 {
        1 << 20
    }

    fn sample(&self, index: u64, out: &mut [u32]) -> Result<()> {
        let mut token = (index * 37 % 96) as u32;
        for place in out {
            *place = token;
            token = (token * 5 + 7) % 96;
        }
        Ok(())
    }
}

fn train(config: &RunConfig, world: Group, sources: &Sources) -> Result<Vec<f64>> {
    let model = Gpt::of(config, &Device::Cpu)?;
    let mut trainer = Trainer::new(config, &model, world, sources, &Device::Cpu)?;
    (0..10).map(|_| Ok(trainer.step()?.lm_loss)).collect()
}

fn main() -> Result<()> {
    let alone = RunConfig {
        model: ModelConfig {
            num_layers: 4,
            hidden_size: 64,
            ffn_hidden_size: 176,
            num_attention_heads: 4,
            num_query_groups: 2,
            head_dim: 16,
            seq_length: 32,
            max_position_embeddings: 32,
            position_embedding: PositionEmbedding::Rope,
            normalization: Normalization::RMSNorm,
            swiglu: true,
            bias_linear: false,
            untie_embeddings_and_output_weights: true,
            vocab_size: 96,
            hidden_dropout: 0.1,
            ..Default::default()
        },
        training: TrainingConfig { global_batch_size: 16, ..Default::default() },
        optimizer: OptimizerConfig { lr: 3e-3, ..Default::default() },
        ..Default::default()
    };
    let cut = RunConfig {
        parallel: ParallelConfig {
            data_parallel_size: 2,
            tensor_model_parallel_size: 2,
            pipeline_model_parallel_size: 2,
            virtual_pipeline_size: 2,
            schedule: ScheduleKind::Interleaved,
            sequence_parallel: true,
            zero_stage: 1,
            ..Default::default()
        },
        ..alone.clone()
    };

    let sources = Sources::of(Samples);
    let single = train(&alone, megatron::comm::solo(), &sources)?;
    let ranks = threads::run(cut.parallel.world_size(), |rank| train(&cut, rank, &sources))?;
    let eight = &ranks[0];

    println!("step   one process   dp 2 · tp 2 (sequence parallel) · pp 2 (interleaved), ZeRO-1");
    for (step, (a, b)) in single.iter().zip(eight).enumerate() {
        println!("{:4}   {a:.8}    {b:.8}", step + 1);
        assert!((a - b).abs() < 1e-5, "a layout changes no loss");
    }
    Ok(())
}
