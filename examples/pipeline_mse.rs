//! Four `Linear(512)` + ReLU layers trained with mean squared error: in one process, and as a
//! pipeline of two stages, here as threads. The program prints both losses, which are equal.
//!
//!     cargo run --release --example pipeline_mse
//!
//! It corresponds to DeepSpeed's `PipelineModule(layers=[Linear, ReLU, …], loss_fn=MSELoss())`: the
//! inputs are features, the outputs are compared with targets, and neither is text.

use std::ops::Range;

use candle_core::{Device, Tensor};
use megatron::Result;
use megatron::comm::{Group, solo, threads};
use megatron::config::{ModelConfig, ParallelConfig, Recompute, RunConfig, TrainingConfig};
use megatron::data::SampleSource;
use megatron::params::ParamsBuilder;
use megatron::pipeline::Chunk;
use megatron::tensor_parallel::{
    Activation, Features, Input, Layer, Linear, LinearSpec, MeanSquaredError, Output,
};
use megatron::train::{Ends, ModelBuilder, Sources, Trainer};

const WIDTH: usize = 512;

/// Linear layers, with ReLU between them.
struct Perceptron {
    layers: usize,
}

impl ModelBuilder for Perceptron {
    fn num_layers(&self) -> usize {
        2 * self.layers
    }

    fn chunk(&self, ends: Ends, layers: Range<usize>, params: &mut ParamsBuilder) -> Result<Chunk> {
        let layers = layers.map(|i| -> Box<dyn Layer> {
            if i % 2 == 1 {
                return Box::new(Activation::Relu);
            }
            let spec = LinearSpec {
                name: format!("layers.{}", i / 2),
                in_features: WIDTH,
                out_features: WIDTH,
                bias: true,
                init_std: (2.0 / WIDTH as f64).sqrt(),
            };
            Box::new(Linear::declare(&spec, params))
        });
        Ok(Chunk {
            layers: layers.collect(),
            input: ends.first.then(|| Box::new(Features { name: "x".into() }) as Box<dyn Input>),
            output: ends
                .last
                .then(|| Box::new(MeanSquaredError { targets: "y".into() }) as Box<dyn Output>),
            recompute: Recompute::None,
        })
    }
}

/// Features by a formula; the targets are their absolute values.
struct Samples;

impl SampleSource for Samples {
    fn seq_length(&self) -> usize {
        1
    }

    fn num_samples(&self) -> u64 {
        1024
    }

    fn named(&self, index: u64) -> Result<Vec<(String, Tensor)>> {
        let x: Vec<f32> = (0..WIDTH as u64)
            .map(|i| ((index % 1024 * 7919 + i * 104_729) % 2000) as f32 / 1000.0 - 1.0)
            .collect();
        let x = Tensor::from_vec(x, WIDTH, &Device::Cpu)?;
        Ok(vec![("y".into(), x.abs()?), ("x".into(), x)])
    }
}

fn train(config: &RunConfig, world: Group) -> Result<Vec<f64>> {
    let sources = Sources::of(Samples);
    let model = Perceptron { layers: 4 };
    let mut trainer = Trainer::new(config, &model, world, &sources, &Device::Cpu)?;
    (0..20).map(|_| Ok(trainer.step()?.lm_loss)).collect()
}

fn main() -> Result<()> {
    let alone = RunConfig {
        model: ModelConfig { num_layers: 8, hidden_size: WIDTH, ..Default::default() },
        training: TrainingConfig {
            micro_batch_size: 8,
            global_batch_size: 32,
            ..Default::default()
        },
        ..Default::default()
    };
    let single = train(&alone, solo())?;

    let cut = RunConfig {
        parallel: ParallelConfig { pipeline_model_parallel_size: 2, ..Default::default() },
        ..alone
    };
    let stages = threads::run(cut.parallel.world_size(), |rank| train(&cut, rank))?;
    let pipeline = &stages[0];

    println!("step   one process   pipeline of 2");
    for (step, (a, b)) in single.iter().zip(pipeline).enumerate() {
        println!("{:4}   {a:.8}    {b:.8}", step + 1);
        assert_eq!(a, b, "a pipeline changes no bit");
    }
    Ok(())
}
