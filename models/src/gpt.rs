//! A GPT-like decoder.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device};
use kernels::ops::attention::{RopeTable, rope_frequencies};
use kernels::tensor::device::computes_ahead;
use megatron::Result;
use megatron::config::{ModelConfig, PositionEmbedding, Recompute, RunConfig};
use megatron::params::{ParamSpec, ParamsBuilder};
use megatron::pipeline::{Chunk, ChunkCosts};
use megatron::tensor_parallel::{
    AttentionSpec, BlockSpec, Embedding, Head, Input, Layer, MlpSpec, NormSpec, Output,
    TransformerLayer, VocabSpec,
};
use megatron::train::{Ends, ModelBuilder, SavedActivations};

/// Builds the chunks of a GPT-like decoder. GPT-2 style (learned positions, LayerNorm, GELU,
/// biases, tied) and Llama style (rotary positions, RMSNorm, SwiGLU, grouped queries, untied) are
/// settings of the same layers. The crate's first page trains one.
///
/// ```
/// use megatron::config::ModelConfig;
/// use models::Gpt;
///
/// # fn main() -> megatron::Result<()> {
/// let config = ModelConfig {
///     num_layers: 2,
///     vocab_size: 100,
///     untie_embeddings_and_output_weights: true,
///     ..Default::default()
/// };
/// let specs = Gpt::specs(&config)?;
/// assert_eq!(specs[0].name, "embedding.word_embeddings.weight");
/// assert_eq!(specs[0].shape, [100, 64]);
/// let elements: u64 = specs.iter().map(|spec| spec.shape.iter().product::<usize>() as u64).sum();
/// let (first, last) = config.end_params();
/// assert_eq!(elements, first + 2 * config.layer_params() + last);
/// # Ok(())
/// # }
/// ```
pub struct Gpt {
    config: ModelConfig,
    vocab: VocabSpec,
    block: BlockSpec,
    sequence_parallel: bool,
    recompute: Recompute,
}

impl Gpt {
    /// The model of a run, for computation on `device`.
    ///
    /// # Errors
    /// As [`Gpt::new`].
    pub fn of(run: &RunConfig, device: &Device) -> Result<Self> {
        let RunConfig { model, parallel: p, training, .. } = run;
        let (tp, dtype) = (p.tensor_model_parallel_size, training.precision.dtype());
        Self::new(model, tp, p.sequence_parallel, training.recompute, dtype, device)
    }

    /// `tp` and `sequence_parallel` say how layers are split. Sequences have at most
    /// `config.seq_length` tokens. `dtype` and `device` are those of the model's parameters.
    ///
    /// # Errors
    /// If the rotary table cannot be created.
    pub fn new(
        config: &ModelConfig,
        tp: usize,
        sequence_parallel: bool,
        recompute: Recompute,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let rope = match config.position_embedding {
            PositionEmbedding::Rope => {
                let frequencies = rope_frequencies(config.head_dim, config.rotary_base);
                let frequencies: Vec<f64> =
                    frequencies.into_iter().map(|f| config.rope_scaling.apply(f)).collect();
                // 16 bits are too few for the angles.
                let dtype = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
                Some(Arc::new(RopeTable::with_frequencies(
                    config.seq_length,
                    &frequencies,
                    dtype,
                    device,
                )?))
            }
            PositionEmbedding::LearnedAbsolute
            | PositionEmbedding::Alibi
            | PositionEmbedding::None => None,
        };
        Ok(Self::assemble(config, tp, sequence_parallel, recompute, rope, device))
    }

    fn assemble(
        config: &ModelConfig,
        tp: usize,
        sequence_parallel: bool,
        recompute: Recompute,
        rope: Option<Arc<RopeTable>>,
        device: &Device,
    ) -> Self {
        let sequence_parallel = sequence_parallel && tp > 1;
        let norm = NormSpec {
            hidden: config.hidden_size,
            kind: config.normalization,
            eps: config.norm_epsilon,
            sequence_parallel,
        };
        // The scaled initialization of Megatron and GPT-2 for projections that write into the
        // residual stream.
        let output_init_std = config.init_method_std / (2.0 * config.num_layers as f64).sqrt();
        let alibi = (config.position_embedding == PositionEmbedding::Alibi)
            .then(|| alibi_slopes(config.num_attention_heads).into());
        let selective = recompute == Recompute::Selective;
        let attention = AttentionSpec {
            hidden: config.hidden_size,
            heads: config.num_attention_heads,
            groups: config.num_query_groups,
            head_dim: config.head_dim,
            qkv_bias: config.bias_linear || config.qkv_bias,
            bias: config.bias_linear,
            init_std: config.init_method_std,
            output_init_std,
            dropout: config.attention_dropout,
            rope,
            alibi,
            window: None, // each layer has its own
            tp,
            sequence_parallel,
            recompute_core: selective,
        };
        let mlp = MlpSpec {
            hidden: config.hidden_size,
            ffn: config.ffn_hidden_size,
            swiglu: config.swiglu,
            bias: config.bias_linear,
            init_std: config.init_method_std,
            output_init_std,
            sequence_parallel,
            // On a CPU one pass computes the activation together with its gradient, at no extra
            // cost and with the same bits.
            recompute_activation: selective || !computes_ahead(device),
        };
        let vocab = VocabSpec {
            vocab_size: config.vocab_size,
            padded: config.padded_vocab_size(tp),
            hidden: config.hidden_size,
            init_std: config.init_method_std,
            tied: !config.untie_embeddings_and_output_weights,
            tp,
        };
        let block = BlockSpec { norm, attention, mlp, hidden_dropout: config.hidden_dropout };
        Self { config: config.clone(), vocab, block, sequence_parallel, recompute }
    }
}

impl Gpt {
    /// A model for asking which parameters it has and how `tp` splits them, not for computation.
    ///
    /// # Errors
    /// If the configuration is not a valid model.
    pub fn outline(config: &ModelConfig, tp: usize) -> Result<Self> {
        // No parameter depends on the rotary table.
        Ok(Self::assemble(config, tp, false, Recompute::None, None, &Device::Cpu))
    }

    /// The model of a run, for asking what its ranks hold, not for computation.
    pub fn outline_of(run: &RunConfig) -> Self {
        let RunConfig { model, parallel: p, training, .. } = run;
        let tp = p.tensor_model_parallel_size;
        Self::assemble(model, tp, p.sequence_parallel, training.recompute, None, &Device::Cpu)
    }

    /// The parameters of the whole model, in forward order, each once.
    ///
    /// # Errors
    /// If the configuration is not a valid model.
    pub fn specs(config: &ModelConfig) -> Result<Vec<ParamSpec>> {
        let gpt = Self::outline(config, 1)?;
        let mut params = ParamsBuilder::default();
        gpt.chunk(Ends { first: true, last: true }, 0..config.num_layers, &mut params)?;
        Ok(params.specs().cloned().collect())
    }
}

/// The slope of each of n heads. If n is a power of two, they form a geometric sequence from
/// 2^(−8/n). Otherwise they are the slopes for the next lower power of two, followed by every other
/// slope for the next higher one (Press et al. 2022, appendix A.2).
fn alibi_slopes(heads: usize) -> Vec<f64> {
    let power = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    let slope = |of: usize, i: usize| 2f64.powf(-8.0 * i as f64 / of as f64);
    let first = (1..=power).map(|i| slope(power, i));
    first.chain((1..).step_by(2).map(|i| slope(2 * power, i))).take(heads).collect()
}

impl ModelBuilder for Gpt {
    fn architecture(&self) -> &str {
        megatron::train::GPT
    }

    fn num_layers(&self) -> usize {
        self.config.num_layers
    }

    fn layer_params(&self) -> Vec<u64> {
        vec![self.config.layer_params(); self.config.num_layers]
    }

    fn end_params(&self) -> (u64, u64) {
        self.config.end_params()
    }

    fn flops(&self) -> (Vec<u64>, u64) {
        let layers = (0..self.config.num_layers).map(|layer| self.config.layer_flops(layer));
        (layers.collect(), self.config.head_flops())
    }

    fn costs(&self) -> (Vec<ChunkCosts>, ChunkCosts) {
        let c = &self.config;
        let (h, f, d) = (c.hidden_size, c.ffn_hidden_size, c.head_dim);
        let (q, kv) = (c.num_attention_heads * d, c.num_query_groups * d);
        let fc1 = if c.swiglu { 2 * f } else { f };
        let selective = self.recompute == Recompute::Selective;
        let tp = self.block.attention.tp;
        // The activation is counted even on a CPU, which never saves it: the memory serves the
        // operands of delayed weight gradients.
        let activated = if selective { 0 } else { f / tp };
        let activations = self.saved_activations().all as usize + activated;
        // Gradients of the four products, and their inputs. Under sequence parallelism these are
        // gathered along the sequence.
        let operands = 4 * h + (2 * q + 2 * kv + fc1 + f) / tp;
        let layer = |layer: usize| {
            let (attention, all) = (c.attention_flops(layer), c.layer_flops(layer));
            // Backward of attention has five products (the scores again, and two gradients for each
            // of two products); forward has two.
            let again = if selective { attention } else { 0 };
            ChunkCosts {
                forward: all,
                recompute: all - (h * f) as u64,
                input_gradients: all - attention + attention * 5 / 2 + again,
                weight_gradients: all - attention,
                activations: activations as u64,
                operands: operands as u64,
            }
        };
        let head = ChunkCosts { forward: 3 * c.head_flops(), ..ChunkCosts::default() };
        ((0..c.num_layers).map(layer).collect(), head)
    }

    fn saved_activations(&self) -> SavedActivations {
        let c = &self.config;
        let (h, d, tp) = (c.hidden_size, c.head_dim, self.block.attention.tp);
        let (q, kv) = (c.num_attention_heads * d, c.num_query_groups * d);
        let fc1 = if c.swiglu { 2 * c.ffn_hidden_size } else { c.ffn_hidden_size };
        let input = if self.sequence_parallel { h / tp } else { h };
        let attention = if self.recompute == Recompute::Selective { 0 } else { q };
        // The stream and its normalized copy, twice; QKV, the output of attention, and the input of
        // the activation function.
        SavedActivations {
            all: (4 * input + (q + 2 * kv + attention + fc1) / tp) as u64,
            input: input as u64,
        }
    }

    fn tied(&self) -> bool {
        self.vocab.tied
    }

    fn chunk(&self, ends: Ends, layers: Range<usize>, params: &mut ParamsBuilder) -> Result<Chunk> {
        let input = ends.first.then(|| {
            let positions = (self.config.position_embedding == PositionEmbedding::LearnedAbsolute)
                .then_some(self.config.max_position_embeddings);
            let norm = self.config.embed_layernorm.then_some(&self.block.norm);
            let embedding = Embedding::declare(
                &self.vocab,
                positions,
                norm,
                self.config.hidden_dropout,
                self.sequence_parallel,
                params,
            );
            Box::new(embedding) as Box<dyn Input>
        });
        let layers = layers
            .map(|layer| {
                let mut block = self.block.clone();
                block.attention.window = self.config.window(layer);
                Box::new(TransformerLayer::declare(layer, &block, params)) as Box<dyn Layer>
            })
            .collect();
        let output = ends.last.then(|| {
            Box::new(Head::declare(&self.vocab, &self.block.norm, params)) as Box<dyn Output>
        });
        Ok(Chunk { input, layers, output, recompute: self.recompute })
    }
}

#[cfg(test)]
mod tests {
    use super::alibi_slopes;

    #[test]
    fn slopes_of_a_power_of_two_are_geometric_and_others_fill_in_between() {
        assert_eq!(
            alibi_slopes(8),
            [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
        );
        assert_eq!(alibi_slopes(1), [1.0 / 256.0]);
        let six = alibi_slopes(6);
        assert_eq!(six[..4], alibi_slopes(4));
        assert_eq!(six[4..], [0.5, 0.125]);
    }
}
