//! Runs small models on any layout inside one process: one thread per rank.

pub mod draw;
pub mod logits;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::Device;
use megatron::Result;
use megatron::comm::{CommOptions, Group, threads};
use megatron::config::*;
use megatron::data::SampleSource;
use megatron::params::{Piece, StateKind};
use megatron::train::{Sources, Trainer};
use models::Gpt;

/// Two kinds of architecture, as in the oracle runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Gpt2,
    Llama,
}

/// A run of a model small enough for a test: 8 layers, 8 heads, 4 query groups.
pub fn tiny(style: Style, dropout: f64) -> RunConfig {
    let gpt2 = style == Style::Gpt2;
    RunConfig {
        model: ModelConfig {
            num_layers: 8,
            hidden_size: 32,
            ffn_hidden_size: if gpt2 { 128 } else { 88 },
            num_attention_heads: 8,
            num_query_groups: 4,
            head_dim: 4,
            seq_length: 16,
            max_position_embeddings: 16,
            position_embedding: if gpt2 {
                PositionEmbedding::LearnedAbsolute
            } else {
                PositionEmbedding::Rope
            },
            rotary_base: 10_000.0,
            rope_scaling: RopeScaling::None,
            sliding_window: None,
            embed_layernorm: false,
            normalization: if gpt2 { Normalization::LayerNorm } else { Normalization::RMSNorm },
            norm_epsilon: 1e-5,
            swiglu: !gpt2,
            bias_linear: gpt2,
            qkv_bias: gpt2,
            untie_embeddings_and_output_weights: !gpt2,
            vocab_size: 101,
            make_vocab_size_divisible_by: 8,
            attention_dropout: dropout,
            hidden_dropout: dropout,
            init_method_std: 0.02,
        },
        parallel: ParallelConfig::default(),
        data: DataConfig {
            data_path: vec![],
            split: "969,30,1".into(),
            tokenizer: None,
            tokenizer_options: Default::default(),
            dataloader_type: DataloaderType::Sequential,
            eod_mask_loss: false,
            reset_position_ids: false,
            reset_attention_mask: false,
            cache_dir: "unused".into(),
            mock: false,
        },
        training: TrainingConfig {
            micro_batch_size: 1,
            global_batch_size: 8,
            rampup: None,
            train_iters: 30,
            train_samples: None,
            exit_interval: None,
            max_nonfinite_steps: 10,
            exit_duration_in_mins: None,
            iterations_to_skip: vec![],
            skip_train: false,
            seed: 1234,
            recompute: Recompute::None,
            distribute_saved_activations: false,
            activation_offload: Default::default(),
            precision: Precision::Fp32,
            grad_reduce_in_bf16: false,
            grad_reduce_in_fp16: false,
            enable_cuda_graph: false,
        },
        optimizer: OptimizerConfig {
            kind: OptimizerKind::Adam,
            lr: 1e-3,
            min_lr: 1e-4,
            decay_style: DecayStyle::Cosine,
            decay_samples: 240,
            warmup_samples: 16,
            warmup_init: 0.0,
            wsd_decay_samples: 0,
            wsd_decay_style: WsdDecayStyle::Linear,
            lr_schedule: None,
            weight_decay: 0.1,
            weight_decay_increase: None,
            adam_beta1: 0.9,
            adam_beta2: 0.95,
            adam_eps: 1e-8,
            exp_avg_dtype: Default::default(),
            exp_avg_sq_dtype: Default::default(),
            offload: Default::default(),
            sgd_momentum: 0.9,
            clip_grad: 1.0,
        },
        checkpoint: CheckpointConfig::default(),
        logging: LoggingConfig {
            log_interval: 1,
            eval_interval: None,
            eval_iters: 0,
            log_params_norm: false,
            log_num_zeros_in_grad: false,
            timing_log_level: 0,
            timing_log_option: Default::default(),
            metrics: None,
            tensorboard: None,
            prompt: None,
            prompt_tokens: 0,
            profile: None,
        },
    }
}

/// `config` with layout dp · tp · pp.
pub fn layout(mut config: RunConfig, dp: usize, tp: usize, pp: usize) -> RunConfig {
    config.parallel.data_parallel_size = dp;
    config.parallel.tensor_model_parallel_size = tp;
    config.parallel.pipeline_model_parallel_size = pp;
    config
}

/// `config` with sequences split over `cp` ranks.
pub fn context(mut config: RunConfig, cp: usize) -> RunConfig {
    config.parallel.context_parallel_size = cp;
    config
}

/// `config` with `v` chunks per stage.
pub fn interleave(mut config: RunConfig, v: usize) -> RunConfig {
    config.parallel.virtual_pipeline_size = v;
    config.parallel.schedule = ScheduleKind::Interleaved;
    config
}

/// A stream of tokens in memory; sample i is tokens [i·S, i·S + S], wrapping around.
pub struct Tokens {
    pub tokens: Vec<u32>,
    pub seq_length: usize,
}

impl Tokens {
    /// A sequence that can be learned: each token mostly follows from the previous one.
    pub fn synthetic(vocab: u32, seq_length: usize) -> Self {
        let mut state = 88172645463325252u64;
        let mut token = 1u32;
        let tokens = (0..seq_length * 4096 + 1).map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            token = if state.is_multiple_of(4) {
                (state >> 32) as u32 % vocab
            } else {
                (token * 7 + 3) % vocab
            };
            token
        });
        Self { tokens: tokens.collect(), seq_length }
    }
}

impl SampleSource for Tokens {
    fn seq_length(&self) -> usize {
        self.seq_length
    }

    fn num_samples(&self) -> u64 {
        ((self.tokens.len() - 1) / self.seq_length) as u64
    }

    fn sample(&self, index: u64, out: &mut [u32]) -> Result<()> {
        let start = (index % self.num_samples()) as usize * self.seq_length;
        out.copy_from_slice(&self.tokens[start..=start + self.seq_length]);
        Ok(())
    }
}

/// Training data, without data for evaluation.
pub fn sources(train: Tokens) -> Sources {
    Sources::of(train)
}

/// Runs `body` on every rank of a world of threads. Results are in rank order.
pub fn on_ranks<T: Send>(world: usize, body: impl Fn(Group) -> Result<T> + Sync) -> Result<Vec<T>> {
    on_ranks_with(world, CommOptions::default(), body)
}

/// As [`on_ranks`], with the given options.
pub fn on_ranks_with<T: Send>(
    world: usize,
    options: CommOptions,
    body: impl Fn(Group) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    threads::run_with(world, options, body)
}

/// Builds the trainer of one rank.
pub fn trainer(config: &RunConfig, world: Group, sources: &Sources) -> Result<Trainer> {
    let model = Gpt::of(config, &Device::Cpu)?;
    Trainer::new(config, &model, world, sources, &Device::Cpu)
}

/// Logical tensors assembled from the shares of all ranks.
pub type State = BTreeMap<(String, StateKind), Vec<f32>>;

/// A rank's owned shares: name, kind, global shape, pieces, values.
pub type Shares = Vec<(String, StateKind, Vec<usize>, Vec<Piece>, Vec<f32>)>;

/// The shares of one rank.
pub fn shares(trainer: &Trainer) -> Result<Shares> {
    let shards = trainer.owned_shards()?;
    shards
        .into_iter()
        .map(|s| Ok((s.name, s.kind, s.global_shape, s.pieces, s.data.to_f32()?)))
        .collect()
}

/// Assembles the shares of all ranks; panics if an element is missing or occurs twice.
pub fn assemble(ranks: Vec<Shares>) -> State {
    let mut state = State::new();
    let mut seen: BTreeMap<(String, StateKind), Vec<bool>> = BTreeMap::new();
    for (name, kind, shape, pieces, values) in ranks.into_iter().flatten() {
        let len = shape.iter().product();
        let whole = state.entry((name.clone(), kind)).or_insert_with(|| vec![f32::NAN; len]);
        let seen = seen.entry((name.clone(), kind)).or_insert_with(|| vec![false; len]);
        for piece in pieces {
            for (n, flat) in piece.flat.clone().enumerate() {
                let mut rest = flat;
                let mut global = 0;
                let mut stride = 1;
                for d in (0..shape.len()).rev() {
                    global += (piece.offset[d] + rest % piece.shape[d]) * stride;
                    rest /= piece.shape[d];
                    stride *= shape[d];
                }
                assert!(!seen[global], "{name} {kind:?}: element {global} is owned twice");
                seen[global] = true;
                whole[global] = values[piece.local + n];
            }
        }
    }
    for (key, seen) in seen {
        assert!(seen.iter().all(|s| *s), "{key:?}: an element is owned by no rank");
    }
    state
}

/// The results of a run: loss and gradient norm of every step, and the final state.
#[derive(Debug)]
pub struct Run {
    pub losses: Vec<f64>,
    pub grad_norms: Vec<f64>,
    pub initial: State,
    pub last: State,
}

/// Trains `steps` steps; every rank must report the same numbers.
pub fn train(config: &RunConfig, steps: usize) -> Result<Run> {
    train_from(config, None, steps)
}

/// Trains `steps` steps, from a checkpoint if one is given.
pub fn train_from(config: &RunConfig, checkpoint: Option<&Path>, steps: usize) -> Result<Run> {
    let vocab = config.model.vocab_size as u32;
    train_on(&sources(Tokens::synthetic(vocab, config.model.seq_length)), config, checkpoint, steps)
}

/// Trains `steps` steps and saves to `dir`; returns the folder of the checkpoint.
///
/// # Panics
/// If a rank fails.
pub fn save_after(config: &RunConfig, steps: usize, dir: &Path) -> PathBuf {
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    let saved = on_ranks(config.parallel.world_size(), |world| {
        let mut trainer = trainer(config, world, &data)?;
        for _ in 0..steps {
            trainer.step()?;
        }
        trainer.save(dir)
    });
    saved.expect("every rank saves").remove(0)
}

/// Trains `steps` steps with communication issued before independent computation.
pub fn train_overlapping(config: &RunConfig, steps: usize) -> Result<Run> {
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    train_with(CommOptions { overlap: true, ..CommOptions::default() }, &data, config, None, steps)
}

/// Trains `steps` steps on `data`, from a checkpoint if one is given.
pub fn train_on(
    data: &Sources,
    config: &RunConfig,
    checkpoint: Option<&Path>,
    steps: usize,
) -> Result<Run> {
    train_with(CommOptions::default(), data, config, checkpoint, steps)
}

/// As [`train_on`], with the given options.
pub fn train_with(
    options: CommOptions,
    data: &Sources,
    config: &RunConfig,
    checkpoint: Option<&Path>,
    steps: usize,
) -> Result<Run> {
    let ranks = on_ranks_with(config.parallel.world_size(), options, |world| {
        let mut trainer = trainer(config, world, data)?;
        if let Some(path) = checkpoint {
            trainer.load(path)?;
        }
        let initial = shares(&trainer)?;
        let mut numbers = Vec::new();
        for _ in 0..steps {
            let step = trainer.step()?;
            numbers.push((step.lm_loss, step.grad_norm));
        }
        Ok((numbers, initial, shares(&trainer)?))
    })?;
    let numbers = ranks[0].0.clone();
    // Compared by bits, because the norm of gradients that overflow is NaN.
    let bits = |numbers: &[(f64, f64)]| {
        numbers.iter().map(|(l, n)| (l.to_bits(), n.to_bits())).collect::<Vec<_>>()
    };
    assert!(
        ranks.iter().all(|r| bits(&r.0) == bits(&numbers)),
        "ranks disagree on loss or gradient norm"
    );
    let (mut initial, mut last) = (Vec::new(), Vec::new());
    for (_, i, l) in ranks {
        initial.push(i);
        last.push(l);
    }
    let (losses, grad_norms) = numbers.into_iter().unzip();
    Ok(Run { losses, grad_norms, initial: assemble(initial), last: assemble(last) })
}

/// Compares every loss, gradient norm, weight and moment by its bits.
///
/// # Panics
/// If one differs.
pub fn assert_same_runs(what: &str, a: &Run, b: &Run) {
    assert_eq!(a.losses, b.losses, "{what}: losses");
    assert_eq!(a.grad_norms, b.grad_norms, "{what}: gradient norms");
    assert!(a.last.keys().eq(b.last.keys()), "{what}: other tensors");
    for (key, value) in &b.last {
        assert!(a.last[key] == *value, "{what}: {key:?}");
    }
}

/// Largest |a − b| / |b|.
pub fn largest_relative_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| ((a - b) / b).abs())
        .fold(0.0, |m, d| if d.is_nan() { f64::INFINITY } else { m.max(d) })
}
