//! A custom layer in a GPT: a gate written in candle after each transformer layer, trained in one
//! process and under dp 2 · tp 2 (sequence parallel) · pp 2 with ZeRO-1, over eight threads. The
//! program prints both losses, which agree.
//!
//!     cargo run --release --example custom_layer

use std::ops::Range;

use candle_core::{Device, Tensor};
use candle_nn::{Init, VarBuilder};
use megatron::Result;
use megatron::comm::{Group, solo, threads};
use megatron::config::{ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainingConfig};
use megatron::data::SampleSource;
use megatron::params::ParamsBuilder;
use megatron::pipeline::Chunk;
use megatron::tensor_parallel::AutogradLayer;
use megatron::train::{Ends, ModelBuilder, Sources, Trainer};
use models::Gpt;

const WIDTH: usize = 64;

/// `x · (1 + tanh(x·Wᵀ))`, with the backward of candle's graph.
fn gate(vb: VarBuilder) -> candle_core::Result<impl candle_nn::Module + use<>> {
    let normal = Init::Randn { mean: 0.0, stdev: 0.02 };
    let gate = candle_nn::Linear::new(vb.get_with_hints((WIDTH, WIDTH), "weight", normal)?, None);
    Ok(move |x: &Tensor| x * (candle_nn::Module::forward(&gate, x)?.tanh()? + 1.0)?)
}

/// A GPT with a gate after each layer.
struct Gated(Gpt);

impl ModelBuilder for Gated {
    fn num_layers(&self) -> usize {
        self.0.num_layers()
    }

    fn tied(&self) -> bool {
        self.0.tied()
    }

    fn chunk(&self, ends: Ends, layers: Range<usize>, params: &mut ParamsBuilder) -> Result<Chunk> {
        let (first, last) = (layers.start, layers.end);
        let inner = Ends { first: false, last: false };
        // The embedding, each layer with its gate, the head.
        let mut chunk = self.0.chunk(Ends { first: ends.first, ..inner }, first..first, params)?;
        for layer in layers {
            chunk.layers.extend(self.0.chunk(inner, layer..layer + 1, params)?.layers);
            let gate = AutogradLayer::declare(&format!("gates.{layer}"), params, gate)?;
            chunk.layers.push(Box::new(gate.each_token_by_itself()));
        }
        chunk.output = self.0.chunk(Ends { last: ends.last, ..inner }, last..last, params)?.output;
        Ok(chunk)
    }
}

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

fn train(config: &RunConfig, world: Group) -> Result<Vec<f64>> {
    let sources = Sources::of(Samples);
    let model = Gated(Gpt::of(config, &Device::Cpu)?);
    let mut trainer = Trainer::new(config, &model, world, &sources, &Device::Cpu)?;
    (0..20).map(|_| Ok(trainer.step()?.lm_loss)).collect()
}

fn main() -> Result<()> {
    let alone = RunConfig {
        model: ModelConfig {
            num_layers: 4,
            hidden_size: WIDTH,
            ffn_hidden_size: 4 * WIDTH,
            num_attention_heads: 4,
            num_query_groups: 4,
            head_dim: WIDTH / 4,
            seq_length: 32,
            max_position_embeddings: 32,
            vocab_size: 96,
            ..Default::default()
        },
        training: TrainingConfig { global_batch_size: 16, ..Default::default() },
        optimizer: OptimizerConfig { lr: 3e-3, ..Default::default() },
        ..Default::default()
    };
    let single = train(&alone, solo())?;

    let cut = RunConfig {
        parallel: ParallelConfig {
            data_parallel_size: 2,
            tensor_model_parallel_size: 2,
            pipeline_model_parallel_size: 2,
            sequence_parallel: true,
            zero_stage: 1,
            ..Default::default()
        },
        ..alone
    };
    let eight = threads::run(cut.parallel.world_size(), |rank| train(&cut, rank))?.swap_remove(0);

    println!("step   one process   dp 2 · tp 2 (sequence parallel) · pp 2, ZeRO-1");
    for (step, (a, b)) in single.iter().zip(&eight).enumerate() {
        println!("{:4}   {a:.8}    {b:.8}", step + 1);
        assert!((a - b).abs() < 1e-5, "a layout changes no loss");
    }
    Ok(())
}
