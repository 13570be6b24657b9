//! Random runs: architecture, batch, precision, optimizer, documents, layout, schedule.

use megatron::config::*;
use megatron::data::DocumentEnds;
use megatron::train::Sources;

use crate::{Style, Tokens, sources, tiny};

/// xorshift64*.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % n
    }

    pub fn one<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// The seeds of a random test. The environment variable `RANDOM_RUNS` overrides their number
/// `runs`; `RANDOM_SEED` sets the first one, by default 0.
///
/// # Panics
/// If a variable is not a number.
pub fn seeds(runs: u64) -> std::ops::Range<u64> {
    let number = |name: &str| {
        let value = std::env::var(name).ok()?;
        Some(value.parse().unwrap_or_else(|_| panic!("{name}={value}: not a number")))
    };
    let first = number("RANDOM_SEED").unwrap_or(0);
    first..first + number("RANDOM_RUNS").unwrap_or(runs)
}

/// A valid configuration for one process.
pub fn model(r: &mut Random) -> RunConfig {
    let mut config = tiny(r.one(&[Style::Gpt2, Style::Llama]), 0.0);
    config.data.data_path = vec!["memory".into()];
    let m = &mut config.model;
    m.num_layers = r.one(&[1, 2, 3, 4, 6, 8]);
    (m.num_attention_heads, m.num_query_groups) =
        r.one(&[(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (6, 2), (8, 4), (12, 4)]);
    m.head_dim = r.one(&[2, 4, 6, 10, 16]);
    m.hidden_size = r.one(&[8, 20, 32, 36, 52]);
    m.ffn_hidden_size = r.one(&[8, 24, 44, 100]);
    m.seq_length = r.one(&[1, 2, 4, 7, 12, 16, 24]);
    m.max_position_embeddings = m.seq_length + r.below(3);
    m.position_embedding = r.one(&[
        PositionEmbedding::LearnedAbsolute,
        PositionEmbedding::Rope,
        PositionEmbedding::Rope,
        PositionEmbedding::Alibi,
        PositionEmbedding::None,
    ]);
    if m.position_embedding == PositionEmbedding::Rope {
        m.rope_scaling = r.one(&[
            RopeScaling::None,
            RopeScaling::Linear { factor: 2.5 },
            RopeScaling::llama3(8.0),
        ]);
    }
    if r.chance(25) {
        let full_layers = (0..m.num_layers).filter(|_| r.chance(30)).collect();
        m.sliding_window = Some(SlidingWindow { size: 1 + r.below(m.seq_length), full_layers });
    }
    m.embed_layernorm = r.chance(20);
    m.normalization = r.one(&[Normalization::LayerNorm, Normalization::RMSNorm]);
    m.swiglu = r.chance(50);
    m.bias_linear = r.chance(50);
    m.qkv_bias = m.bias_linear || r.chance(30);
    m.untie_embeddings_and_output_weights = r.chance(50);
    m.vocab_size = r.one(&[3, 17, 64, 101]);
    m.make_vocab_size_divisible_by = r.one(&[1, 4, 32]);
    m.attention_dropout = r.one(&[0.0, 0.0, 0.1, 0.5]);
    m.hidden_dropout = r.one(&[0.0, 0.0, 0.1, 0.5]);
    m.init_method_std = 0.15;
    let t = &mut config.training;
    t.micro_batch_size = r.one(&[1, 1, 2, 3]);
    t.global_batch_size = t.micro_batch_size * r.one(&[1, 2, 3, 4, 6, 8, 12]);
    t.seed = r.below(1000) as u64;
    t.precision = r.one(&[
        Precision::Fp64,
        Precision::Fp64,
        Precision::Fp32,
        Precision::Fp32,
        Precision::Bf16,
        Precision::Fp16(LossScaling::Dynamic(DynamicLossScale {
            initial: 4096.0,
            ..Default::default()
        })),
    ]);
    let o = &mut config.optimizer;
    o.kind = r.one(&[OptimizerKind::Adam, OptimizerKind::Adam, OptimizerKind::Sgd]);
    // Some gradients are 0 except for rounding, such as those of the keys' biases. Adam would
    // otherwise make their updates as large as all others.
    o.adam_eps = 1e-5;
    o.lr = if o.kind == OptimizerKind::Adam { 1e-3 } else { 0.05 };
    o.clip_grad = r.one(&[0.0, 0.1, 1.0, 100.0]);
    if o.kind == OptimizerKind::Adam && config.training.precision != Precision::Fp64 && r.chance(30)
    {
        (o.exp_avg_dtype, o.exp_avg_sq_dtype) = r.one(&[
            (MomentDtype::Bf16, MomentDtype::Fp32),
            (MomentDtype::Fp32, MomentDtype::Bf16),
            (MomentDtype::Bf16, MomentDtype::Bf16),
        ]);
    }
    o.weight_decay = r.one(&[0.0, 0.1]);
    o.warmup_samples = r.one(&[0, 5]);
    config
}

/// A random layout of `config` over at most 12 ranks.
///
/// # Panics
/// If none is found.
pub fn cut(r: &mut Random, config: &RunConfig) -> RunConfig {
    for _ in 0..10_000 {
        let mut config = config.clone();
        let p = &mut config.parallel;
        p.tensor_model_parallel_size = r.one(&[1, 1, 2, 2, 3, 4]);
        p.context_parallel_size = r.one(&[1, 1, 2, 2, 3, 4]);
        p.data_parallel_size = r.one(&[1, 1, 2, 3, 4]);
        p.pipeline_model_parallel_size = r.one(&[1, 2, 2, 3, 4]);
        p.sequence_parallel = p.tensor_model_parallel_size > 1 && r.chance(60);
        p.zero_stage = r.one(&[0, 1, 2, 2, 3, 3]);
        if p.zero_stage > 0 && p.num_replicas().is_multiple_of(2) && r.chance(30) {
            p.num_distributed_optimizer_instances = 2;
        }
        p.zero_reshard_after_forward = r.chance(70);
        p.overlap_grad_reduce = r.chance(50);
        p.bucket_size = r.one(&[1, 100, 1000, 40_000_000]);
        if p.pipeline_model_parallel_size > 1 {
            p.schedule =
                r.one(&[ScheduleKind::Gpipe, ScheduleKind::OneFOneB, ScheduleKind::Interleaved]);
            p.delay_wgrad_compute = r.chance(40);
            match p.schedule {
                ScheduleKind::Interleaved => p.virtual_pipeline_size = r.one(&[2, 3, 4]),
                ScheduleKind::OneFOneB => p.extra_warmup = r.one(&[0, 0, 1, 3]),
                ScheduleKind::Gpipe => {}
            }
            p.partition = r.one(&[
                PartitionMethod::Uniform,
                PartitionMethod::Parameters,
                PartitionMethod::Flops,
                PartitionMethod::Type("transformer".into()),
                PartitionMethod::Type("transformer|embedding|head".into()),
            ]);
            if r.chance(25) {
                p.partition = PartitionMethod::Explicit(dealt(
                    r,
                    config.model.num_layers,
                    p.pipeline_model_parallel_size * p.virtual_pipeline_size,
                ));
            }
        }
        config.training.recompute = r.one(&[
            Recompute::None,
            Recompute::None,
            Recompute::Selective,
            Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 1 },
            Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 2 },
            Recompute::Full { method: RecomputeMethod::Block, num_layers: 1 },
        ]);
        let files = Offload::Nvme(std::env::temp_dir());
        if r.chance(15) {
            config.optimizer.offload = files.clone();
        }
        if config.parallel.zero_stage == 3 && r.chance(25) {
            config.parallel.param_offload = files.clone();
        }
        if matches!(config.training.recompute, Recompute::Full { .. }) {
            let p = &config.parallel;
            let is_whole = p.tensor_model_parallel_size > 1 && !p.sequence_parallel;
            config.training.distribute_saved_activations = is_whole && r.chance(60);
            if r.chance(50) {
                config.training.activation_offload = files;
            }
        }
        if config.parallel.world_size() <= 12 && config.validate().is_ok() {
            return config;
        }
    }
    panic!("no layout goes with {config:?}");
}

/// Distributes `layers` over `stages`; some stages may be empty.
fn dealt(r: &mut Random, layers: usize, stages: usize) -> Vec<usize> {
    let mut dealt = vec![0; stages];
    (0..layers).for_each(|_| dealt[r.below(stages)] += 1);
    dealt
}

/// Tokens, in some runs with documents, which are then set in `config`.
pub fn data(r: &mut Random, config: &mut RunConfig) -> Sources {
    let m = &config.model;
    let mut data = sources(Tokens::synthetic(m.vocab_size as u32, m.seq_length));
    if r.chance(30) {
        let ends = DocumentEnds {
            token: 1,
            mask_loss: r.chance(50),
            reset_positions: !matches!(
                m.position_embedding,
                PositionEmbedding::Alibi | PositionEmbedding::None
            ) && r.chance(50),
            reset_attention: r.chance(50),
        };
        config.data.eod_mask_loss = ends.mask_loss;
        config.data.reset_position_ids = ends.reset_positions;
        config.data.reset_attention_mask = ends.reset_attention;
        data.document_ends = Some(ends);
    }
    data
}

/// The largest |a − b|, relative to b, or to 1 if b is smaller: the loss of a sharp model on few
/// tokens is a small difference of large logits. Norms of steps that overflow are not finite, in
/// any layout.
pub fn difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let both = a.iter().zip(b).filter(|(a, b)| a.is_finite() || b.is_finite());
    let differences = both.map(|(a, b)| (a - b).abs() / b.abs().max(1.0));
    differences.fold(0.0, |m, d| if d.is_nan() { f64::INFINITY } else { m.max(d) })
}
