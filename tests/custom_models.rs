//! Models other than GPT: a layer written in candle between the layers of a GPT, and a pipeline of
//! linear layers over features. On every layout they train as in one process, and wrong
//! declarations are found.

use std::ops::Range;
use std::path::Path;

use candle_core::{Device, Module, Tensor};
use candle_nn::{Init, VarBuilder};
use kernels::ops::activation::{relu, relu_backward};
use megatron::Result;
use megatron::checkpoint::{self, Manifest};
use megatron::config::{
    ModelConfig, Precision, Recompute, RecomputeMethod, RunConfig, TrainingConfig,
};
use megatron::data::SampleSource;
use megatron::params::{ParamId, ParamSpec, ParamsBuilder, Partition};
use megatron::pipeline::Chunk;
use megatron::tensor_parallel::layout::{FeatureSharded, Stream};
use megatron::tensor_parallel::{
    Activation, AutogradLayer, ColumnParallelLinear, Ctx, Features, Input, Layer, Linear,
    LinearSpec, MeanSquaredError, Output, RowParallelLinear, Saved,
};
use megatron::train::{Ends, ModelBuilder, Sources, Trainer, reshard_tensors};
use models::{Gpt, SavedGpt};
use system_tests::{
    Style, Tokens, context, interleave, largest_relative_difference, layout, on_ranks, sources,
    tiny,
};

const STEPS: usize = 12;

/// The layer that is added after each layer of a GPT.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Extra {
    /// A feed-forward network in candle, declared to compute each token independently.
    Network,
    /// The mean of the preceding tokens, in candle.
    Mean,
    /// candle-nn's norm, which has no backward.
    Norm,
    /// A bias on this rank's part of the tokens; `declared` tells whether its gradient is declared
    /// partial.
    Bias { declared: bool },
    /// A feed-forward network of a column-parallel and a row-parallel layer.
    Pair,
    /// The same pair in candle.
    PairInCandle,
}

fn network(vb: VarBuilder) -> candle_core::Result<impl Module + use<>> {
    let get = |shape: (usize, usize), name: &str| {
        vb.get_with_hints(shape, name, Init::Randn { mean: 0.0, stdev: 0.2 })
    };
    let (up, down) = (get((48, 32), "up")?, get((32, 48), "down")?);
    let bias = vb.get_with_hints(32, "bias", Init::Const(0.1))?;
    Ok(move |x: &Tensor| {
        let h = x.broadcast_matmul(&up.t()?)?.gelu()?;
        x + h.broadcast_matmul(&down.t()?)?.broadcast_add(&bias)?
    })
}

fn mean_before(vb: VarBuilder) -> candle_core::Result<impl Module + use<>> {
    let scale = vb.get_with_hints(32, "scale", Init::Uniform { lo: 0.2, up: 0.4 })?;
    Ok(move |x: &Tensor| {
        let length = x.dim(1)?;
        let sums = x.cumsum(1)?;
        let count = Tensor::arange(1u32, length as u32 + 1, x.device())?.to_dtype(x.dtype())?;
        let means = sums.broadcast_div(&count.reshape((1, length, 1))?)?;
        x + means.broadcast_mul(&scale)?
    })
}

/// `x + b` of the residual stream.
struct Bias(ParamId);

impl Layer for Bias {
    fn forward(&self, x: Stream, ctx: &Ctx) -> Result<(Stream, Saved)> {
        Ok((Stream(x.0.broadcast_add(&ctx.weight(self.0)?)?), Saved::new(())))
    }

    fn backward(&self, dy: Stream, _: Saved, ctx: &Ctx) -> Result<Stream> {
        ctx.bias_grad(&dy.0, self.0)?;
        Ok(dy)
    }

    fn params(&self) -> Vec<ParamId> {
        vec![self.0]
    }
}

/// The function of [`Pair`], with parameters of the same names and initial values.
fn pair(vb: VarBuilder) -> candle_core::Result<impl Module + use<>> {
    let linear = |name, inputs: usize, outputs: usize| {
        let vb = vb.pp(name);
        let normal = Init::Randn { mean: 0.0, stdev: 0.2 };
        let weight = vb.get_with_hints((outputs, inputs), "weight", normal)?;
        let bias = vb.get_with_hints(outputs, "bias", Init::Const(0.0))?;
        candle_core::Result::Ok(candle_nn::Linear::new(weight, Some(bias)))
    };
    let (up, down) = (linear("up", 32, 48)?, linear("down", 48, 32)?);
    Ok(move |x: &Tensor| x + down.forward(&up.forward(x)?.relu()?)?)
}

/// `x + down(relu(up(x)))`.
struct Pair {
    up: ColumnParallelLinear,
    down: RowParallelLinear,
}

impl Pair {
    fn declare(name: &str, sequence_parallel: bool, params: &mut ParamsBuilder) -> Self {
        let spec = |which, in_features, out_features| LinearSpec {
            name: format!("{name}.{which}"),
            in_features,
            out_features,
            bias: true,
            init_std: 0.2,
        };
        Self {
            up: ColumnParallelLinear::declare(&spec("up", 32, 48), 1, params),
            down: RowParallelLinear::declare(&spec("down", 48, 32), sequence_parallel, params),
        }
    }
}

impl Layer for Pair {
    fn forward(&self, x: Stream, ctx: &Ctx) -> Result<(Stream, Saved)> {
        let h = self.up.forward(&ctx.tp.enter(&x)?, ctx)?;
        let activated = FeatureSharded(relu(&h.0)?);
        let y = (&x.0 + self.down.project(&activated, ctx)?.0)?;
        Ok((Stream(y), Saved::new((x, h, activated))))
    }

    fn backward(&self, dy: Stream, saved: Saved, ctx: &Ctx) -> Result<Stream> {
        let (x, h, activated): (Stream, FeatureSharded, FeatureSharded) = saved.take()?;
        let da = self.down.project_backward(&dy, &activated, ctx)?;
        let dh = FeatureSharded(relu_backward(&da.0, &h.0)?);
        Ok(Stream((dy.0 + self.up.backward(&dh, &x, ctx)?.0)?))
    }

    fn params(&self) -> Vec<ParamId> {
        self.up.params().chain(self.down.params()).collect()
    }
}

struct Extended {
    gpt: Gpt,
    extra: Extra,
    sequence_parallel: bool,
}

impl Extended {
    fn extra(&self, layer: usize, params: &mut ParamsBuilder) -> Result<Box<dyn Layer>> {
        let name = format!("extra.{layer}");
        Ok(match self.extra {
            Extra::Network => {
                Box::new(AutogradLayer::declare(&name, params, network)?.each_token_by_itself())
            }
            Extra::Mean => Box::new(AutogradLayer::declare(&name, params, mean_before)?),
            Extra::Norm => Box::new(AutogradLayer::declare(&name, params, |vb| {
                candle_nn::layer_norm(32, 1e-5, vb.pp("norm"))
            })?),
            Extra::Bias { declared } => Box::new(Bias(params.declare(ParamSpec {
                name: format!("{name}.bias"),
                shape: vec![32],
                partition: Partition::Replicated,
                padded_dim0: 32,
                init: megatron::params::Init::Zeros,
                weight_decay: false,
                tie_group: None,
                grad_partial_over_tp: declared && self.sequence_parallel,
            }))),
            Extra::Pair => Box::new(Pair::declare(&name, self.sequence_parallel, params)),
            Extra::PairInCandle => Box::new(AutogradLayer::declare(&name, params, pair)?),
        })
    }
}

impl ModelBuilder for Extended {
    fn num_layers(&self) -> usize {
        self.gpt.num_layers()
    }

    fn tied(&self) -> bool {
        self.gpt.tied()
    }

    fn chunk(&self, ends: Ends, layers: Range<usize>, params: &mut ParamsBuilder) -> Result<Chunk> {
        let (first, last) = (layers.start, layers.end);
        let no = Ends { first: false, last: false };
        let mut chunk = self.gpt.chunk(Ends { first: ends.first, ..no }, first..first, params)?;
        for layer in layers {
            let own = self.gpt.chunk(no, layer..layer + 1, params)?;
            chunk.layers.extend(own.layers);
            chunk.layers.push(self.extra(layer, params)?);
        }
        chunk.output = self.gpt.chunk(Ends { last: ends.last, ..no }, last..last, params)?.output;
        Ok(chunk)
    }
}

fn run(
    config: &RunConfig,
    model: &(dyn ModelBuilder + Sync),
    sources: &Sources,
) -> Result<Vec<f64>> {
    let ranks = on_ranks(config.parallel.world_size(), |world| {
        let mut trainer = Trainer::new(config, model, world, sources, &Device::Cpu)?;
        (0..STEPS).map(|_| Ok(trainer.step()?.lm_loss)).collect()
    });
    Ok(ranks?.swap_remove(0))
}

fn extended(config: &RunConfig, extra: Extra) -> Result<Vec<f64>> {
    let (model, data) = model(config, extra)?;
    run(config, &model, &data)
}

fn sequence_parallel(mut config: RunConfig) -> RunConfig {
    config.parallel.sequence_parallel = true;
    config
}

fn zero_1(mut config: RunConfig) -> RunConfig {
    config.parallel.zero_stage = 1;
    config.parallel.overlap_grad_reduce = true;
    config
}

fn recomputing(mut config: RunConfig) -> RunConfig {
    config.training.recompute = Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 1 };
    config
}

fn delaying(mut config: RunConfig) -> RunConfig {
    config.parallel.delay_wgrad_compute = true;
    config
}

fn agree(what: &str, cut: &[f64], alone: &[f64]) {
    let difference = largest_relative_difference(cut, alone);
    assert!(difference < 1e-6, "{what}: losses differ by {difference:e}\n{cut:?}\n{alone:?}");
}

/// In f64: Adam makes a whole step of a gradient that is rounding alone, so in fp32 the losses of
/// random tokens part after a few steps, sooner where the order of sums differs.
#[test]
fn custom_layers_train_on_every_layout_as_in_one_process() {
    for style in [Style::Gpt2, Style::Llama] {
        let config = || {
            let mut config = tiny(style, 0.0);
            config.training.precision = Precision::Fp64;
            config
        };
        let extras = [Extra::Network, Extra::Mean, Extra::Bias { declared: true }, Extra::Pair];
        let [network, mean, bias, pair] = extras.map(|extra| {
            let alone = extended(&config(), extra).unwrap();
            let least = alone.iter().copied().fold(f64::MAX, f64::min);
            assert!(least < alone[0] - 0.02, "learns nothing: {alone:?}");
            (extra, alone)
        });
        assert!(network.1 != mean.1 && mean.1 != bias.1);
        for (what, cut, runs) in [
            ("dp 2, ZeRO-1", zero_1(layout(config(), 2, 1, 1)), vec![&network, &mean, &pair]),
            ("tp 2", layout(config(), 1, 2, 1), vec![&network, &bias, &pair]),
            ("tp 2, sp", sequence_parallel(layout(config(), 1, 2, 1)), vec![&mean, &bias, &pair]),
            ("cp 2", context(config(), 2), vec![&network, &bias]),
            (
                "tp 2, sp, cp 2, full recompute",
                recomputing(sequence_parallel(context(layout(config(), 1, 2, 1), 2))),
                vec![&network, &bias, &pair],
            ),
            ("pp 2, interleaved", interleave(layout(config(), 1, 1, 2), 2), vec![&network, &mean]),
            (
                "dp 2, tp 2, pp 2, delayed weight gradients",
                delaying(sequence_parallel(layout(config(), 2, 2, 2))),
                vec![&mean, &bias, &pair],
            ),
        ] {
            for (extra, alone) in runs {
                agree(
                    &format!("{style:?} {extra:?} {what}"),
                    &extended(&cut, *extra).unwrap(),
                    alone,
                );
            }
        }
    }
}

/// In f64, because candle rounds differently, and such differences grow from step to step.
#[test]
fn a_backward_of_ones_own_is_that_of_candle() {
    let mut config = tiny(Style::Llama, 0.0);
    config.training.precision = Precision::Fp64;
    let [own, in_candle] =
        [Extra::Pair, Extra::PairInCandle].map(|extra| extended(&config, extra).unwrap());
    let difference = largest_relative_difference(&own, &in_candle);
    assert!(difference < 1e-10, "losses differ by {difference:e}");
}

#[test]
fn what_a_layer_declares_wrongly_is_found_in_the_first_step() {
    let tp = || layout(tiny(Style::Gpt2, 0.0), 1, 2, 1);
    for config in [sequence_parallel(tp()), zero_1(sequence_parallel(layout(tp(), 2, 2, 1)))] {
        let wrong = extended(&config, Extra::Bias { declared: false }).unwrap_err().to_string();
        assert!(wrong.contains("parameter extra."), "{wrong}");
        assert!(wrong.contains("grad_partial_over_tp: true"), "{wrong}");
    }
    // Without sequence parallelism no gradient is partial.
    extended(&tp(), Extra::Bias { declared: false }).unwrap();

    let cut = extended(&tiny(Style::Gpt2, 0.0), Extra::Norm).unwrap_err().to_string();
    assert!(cut.contains("layer extra.7: candle's graph has no gradient of norm."), "{cut}");
    let mixes = extended(&context(tiny(Style::Gpt2, 0.0), 2), Extra::Mean).unwrap_err().to_string();
    assert!(mixes.contains("layer extra.0: context parallelism"), "{mixes}");
}

/// The model that extends `config`, and its data.
fn model(config: &RunConfig, extra: Extra) -> Result<(Extended, Sources)> {
    let gpt = Gpt::of(config, &Device::Cpu)?;
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    let sequence_parallel = config.parallel.sequence_parallel;
    Ok((Extended { gpt, extra, sequence_parallel }, data))
}

/// Losses of `steps` steps from the checkpoint in `from`. Then saves to `to`.
fn go_on(
    config: &RunConfig,
    from: Option<&Path>,
    steps: usize,
    to: Option<&Path>,
) -> Result<Vec<f64>> {
    let (model, data) = model(config, Extra::Network)?;
    let ranks = on_ranks(config.parallel.world_size(), |world| {
        let mut trainer = Trainer::new(config, &model, world, &data, &Device::Cpu)?;
        if let Some(from) = from {
            trainer.load(from)?;
        }
        let losses = (0..steps).map(|_| Ok(trainer.step()?.lm_loss)).collect::<Result<_>>()?;
        to.map(|to| trainer.save(to)).transpose()?;
        Ok(losses)
    });
    Ok(ranks?.swap_remove(0))
}

#[test]
fn a_checkpoint_of_any_model_is_resharded_by_its_tensors_alone() {
    let config = || tiny(Style::Gpt2, 0.0);
    let whole = go_on(&config(), None, 6, None).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let [saved, other] = ["saved", "other"].map(|name| dir.path().join(name));
    let cut = zero_1(sequence_parallel(layout(config(), 2, 2, 2)));
    go_on(&cut, None, 3, Some(&saved)).unwrap();
    let path = checkpoint::locate(&saved, None).unwrap();
    let refused = SavedGpt::open(&path).err().unwrap().to_string();
    assert!(refused.contains("calls it 'custom'"), "{refused}");

    let manifest = Manifest::read(&path).unwrap();
    for (what, to) in [
        ("pp 3, tp 4", layout(config(), 1, 4, 3)),
        ("dp 3, ZeRO-1", zero_1(layout(config(), 3, 1, 1))),
    ] {
        let folder = other.join(what.replace(' ', ""));
        assert!(reshard_tensors(&manifest, &folder, &to.parallel, &[], &mut |_| true).unwrap());
        let path = checkpoint::locate(&folder, None).unwrap();
        checkpoint::verify(&path).unwrap();
        let files = Manifest::read(&path).unwrap().files.len();
        assert_eq!(files, to.parallel.world_size(), "{what}");
        for (how, run) in [("alone", config()), ("tp 2, pp 2", layout(config(), 1, 2, 2))] {
            let losses = go_on(&run, Some(&path), 3, None).unwrap();
            agree(&format!("{what}, resumed {how}"), &losses, &whole[3..]);
        }
    }
    let uneven = layout(config(), 1, 3, 1).parallel;
    let refused = reshard_tensors(&manifest, &other.join("3"), &uneven, &[], &mut |_| true);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("cannot be split evenly over tp 3"), "{refused}");
}

const WIDTH: usize = 24;

/// Linear layers with ReLU between them, with their own backward or candle's.
struct Perceptron {
    autograd: bool,
}

impl ModelBuilder for Perceptron {
    fn num_layers(&self) -> usize {
        8
    }

    fn chunk(&self, ends: Ends, layers: Range<usize>, params: &mut ParamsBuilder) -> Result<Chunk> {
        let mut chunk = Chunk {
            input: ends.first.then(|| Box::new(Features { name: "x".into() }) as Box<dyn Input>),
            layers: Vec::new(),
            output: ends
                .last
                .then(|| Box::new(MeanSquaredError { targets: "y".into() }) as Box<dyn Output>),
            recompute: Recompute::None,
        };
        for i in layers {
            let name = format!("layers.{}", i / 2);
            let layer: Box<dyn Layer> = match (i % 2, self.autograd) {
                (1, false) => Box::new(Activation::Relu),
                (1, true) => {
                    Box::new(AutogradLayer::declare(&name, params, |_| Ok(|x: &Tensor| x.relu()))?)
                }
                (_, false) => {
                    let (in_features, out_features) = (WIDTH, WIDTH);
                    let spec =
                        LinearSpec { name, in_features, out_features, bias: true, init_std: 0.3 };
                    Box::new(Linear::declare(&spec, params))
                }
                (_, true) => Box::new(AutogradLayer::declare(&name, params, |vb| {
                    let normal = Init::Randn { mean: 0.0, stdev: 0.3 };
                    let weight = vb.get_with_hints((WIDTH, WIDTH), "weight", normal)?;
                    let bias = vb.get_with_hints(WIDTH, "bias", Init::Const(0.0))?;
                    Ok(candle_nn::Linear::new(weight, Some(bias)))
                })?),
            };
            chunk.layers.push(layer);
        }
        Ok(chunk)
    }
}

struct Samples;

impl SampleSource for Samples {
    fn seq_length(&self) -> usize {
        1
    }

    fn num_samples(&self) -> u64 {
        64
    }

    fn named(&self, index: u64) -> Result<Vec<(String, Tensor)>> {
        let x = (0..WIDTH as u64).map(|i| ((index % 64 * 79 + i * 107) % 200) as f32 / 100.0 - 1.0);
        let x = Tensor::from_vec(x.collect::<Vec<_>>(), WIDTH, &Device::Cpu)?;
        Ok(vec![("y".into(), x.abs()?), ("x".into(), x)])
    }
}

#[test]
fn features_and_a_squared_error_train_on_every_layout_with_either_backward() {
    let alone = || RunConfig {
        model: ModelConfig { num_layers: 8, hidden_size: WIDTH, ..Default::default() },
        training: TrainingConfig {
            micro_batch_size: 2,
            global_batch_size: 16,
            ..Default::default()
        },
        ..Default::default()
    };
    let data = Sources::of(Samples);
    let train =
        |config: &RunConfig, autograd| run(config, &Perceptron { autograd }, &data).unwrap();
    let losses = train(&alone(), false);
    assert!(losses[STEPS - 1] < losses[0] * 0.9, "learns nothing: {losses:?}");
    agree("backward by candle", &train(&alone(), true), &losses);
    for (what, cut) in [
        ("dp 2, ZeRO-1", zero_1(layout(alone(), 2, 1, 1))),
        ("tp 2", layout(alone(), 1, 2, 1)),
        ("pp 4", layout(alone(), 1, 1, 4)),
        ("pp 2, interleaved", interleave(layout(alone(), 1, 1, 2), 2)),
        ("dp 2, tp 2, pp 2, delayed", delaying(zero_1(layout(alone(), 2, 2, 2)))),
    ] {
        agree(what, &train(&cut, false), &losses);
        agree(&format!("{what}, backward by candle"), &train(&cut, true), &losses);
    }
}
