//! A layer of your own that is split over tp: an adapter, `x + up(relu(down(x)))`, after each layer
//! of a GPT. `down` is column-parallel, so each tp rank computes a part of the narrow features; `up`
//! is row-parallel, so the ranks sum their results. It trains in one process and over tp 2 with
//! sequence parallelism (two threads). The program prints both losses, which agree.
//!
//!     cargo run --release --example sharded_layer

use std::ops::Range;

use candle_core::Device;
use megatron::Result;
use megatron::comm::{Group, solo, threads};
use megatron::config::{ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainingConfig};
use megatron::data::SampleSource;
use megatron::params::{ParamId, ParamsBuilder};
use megatron::pipeline::{Chunk, ChunkCosts};
use megatron::tensor_parallel::layout::{FeatureSharded, Stream};
use megatron::tensor_parallel::{
    ColumnParallelLinear, Ctx, Layer, LinearSpec, RowParallelLinear, Saved,
};
use megatron::train::{Ends, ModelBuilder, SavedActivations, Sources, Trainer};
use models::Gpt;

const WIDTH: usize = 64;
const NARROW: usize = 16;

struct Adapter {
    down: ColumnParallelLinear,
    up: RowParallelLinear,
}

impl Adapter {
    fn declare(name: &str, sequence_parallel: bool, params: &mut ParamsBuilder) -> Self {
        let down = LinearSpec::new(format!("{name}.down"), WIDTH, NARROW);
        let up =
            LinearSpec { init_std: 0.02, ..LinearSpec::new(format!("{name}.up"), NARROW, WIDTH) };
        Self {
            down: ColumnParallelLinear::declare(&down, 1, params),
            up: RowParallelLinear::declare(&up, sequence_parallel, params),
        }
    }
}

impl Layer for Adapter {
    fn forward(&self, x: Stream, ctx: &Ctx) -> Result<(Stream, Saved)> {
        let narrow = FeatureSharded(self.down.forward(&ctx.tp.enter(&x)?, ctx)?.0.relu()?);
        let y = Stream((&x.0 + self.up.project(&narrow, ctx)?.0)?);
        Ok((y, Saved::new((x, narrow))))
    }

    fn backward(&self, dy: Stream, saved: Saved, ctx: &Ctx) -> Result<Stream> {
        let (x, narrow): (Stream, FeatureSharded) = saved.take()?;
        let d_narrow = self.up.project_backward(&dy, &narrow, ctx)?.0;
        let is_positive = narrow.0.gt(0.0)?.to_dtype(d_narrow.dtype())?;
        let d_down = FeatureSharded((d_narrow * is_positive)?);
        Ok(Stream((dy.0 + self.down.backward(&d_down, &x, ctx)?.0)?))
    }

    fn params(&self) -> Vec<ParamId> {
        self.down.params().chain(self.up.params()).collect()
    }
}

/// A GPT with an adapter after each layer.
struct Adapted {
    gpt: Gpt,
    sequence_parallel: bool,
}

impl ModelBuilder for Adapted {
    fn num_layers(&self) -> usize {
        self.gpt.num_layers()
    }

    fn chunk(&self, ends: Ends, layers: Range<usize>, params: &mut ParamsBuilder) -> Result<Chunk> {
        let (first, last) = (layers.start, layers.end);
        let inner = Ends { first: false, last: false };
        // The embedding, each layer with its adapter, the head.
        let mut chunk =
            self.gpt.chunk(Ends { first: ends.first, ..inner }, first..first, params)?;
        for layer in layers {
            chunk.layers.extend(self.gpt.chunk(inner, layer..layer + 1, params)?.layers);
            let name = format!("adapters.{layer}");
            let adapter = Adapter::declare(&name, self.sequence_parallel, params);
            chunk.layers.push(Box::new(adapter));
        }
        chunk.output =
            self.gpt.chunk(Ends { last: ends.last, ..inner }, last..last, params)?.output;
        Ok(chunk)
    }

    /// Needed if the model shares one matrix between embedding and head.
    fn tied(&self) -> bool {
        self.gpt.tied()
    }

    // The rest balances pipeline stages and estimates memory; the adapters are small.
    fn layer_params(&self) -> Vec<u64> {
        self.gpt.layer_params()
    }

    fn end_params(&self) -> (u64, u64) {
        self.gpt.end_params()
    }

    fn flops(&self) -> (Vec<u64>, u64) {
        self.gpt.flops()
    }

    fn costs(&self) -> (Vec<ChunkCosts>, ChunkCosts) {
        self.gpt.costs()
    }

    fn saved_activations(&self) -> SavedActivations {
        self.gpt.saved_activations()
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
    let gpt = Gpt::of(config, &Device::Cpu)?;
    let model = Adapted { gpt, sequence_parallel: config.parallel.sequence_parallel };
    let mut trainer = Trainer::new(config, &model, world, &Sources::of(Samples), &Device::Cpu)?;
    (0..20).map(|_| Ok(trainer.step()?.lm_loss)).collect()
}

fn main() -> Result<()> {
    let alone = RunConfig {
        model: ModelConfig {
            num_layers: 2,
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

    let parallel = ParallelConfig {
        tensor_model_parallel_size: 2,
        sequence_parallel: true,
        ..Default::default()
    };
    let cut = RunConfig { parallel, ..alone };
    let two = threads::run(2, |rank| train(&cut, rank))?.swap_remove(0);

    println!("step   one process   tp 2 (sequence parallel)");
    for (step, (a, b)) in single.iter().zip(&two).enumerate() {
        println!("{:4}   {a:.8}    {b:.8}", step + 1);
        assert!((a - b).abs() < 1e-5, "a layout changes no loss");
    }
    assert!(single[19] < single[0] - 1.0, "the model learns");
    Ok(())
}
