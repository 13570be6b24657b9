//! A GPT-like decoder: GPT-2 style (learned positions, LayerNorm, GELU, biases, tied) and Llama style (rotary positions,
//! RMSNorm, SwiGLU, grouped queries, untied) are settings of one set of layers.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device};
use kernels::attention::RopeTable;
use megatron::Result;
use megatron::config::{ModelConfig, PositionEmbedding, Recompute};
use megatron::params::ParamsBuilder;
use megatron::pipeline::Chunk;
use megatron::tensor_parallel::{
    AttentionSpec, BlockSpec, Embedding, Head, Layer, MlpSpec, NormSpec, TransformerLayer, VocabSpec,
};
use megatron::train::{Ends, ModelBuilder};

/// Builds the chunks of a GPT.
pub struct Gpt {
    config: ModelConfig,
    vocab: VocabSpec,
    block: BlockSpec,
    sequence_parallel: bool,
    recompute: Recompute,
}

impl Gpt {
    /// `tp` and `sequence_parallel`: how layers are cut. The dtype and device are those of the model's parameters.
    ///
    /// # Errors
    /// If the rotary table cannot be made.
    pub fn new(
        config: &ModelConfig,
        tp: usize,
        sequence_parallel: bool,
        recompute: Recompute,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let sequence_parallel = sequence_parallel && tp > 1;
        let norm = NormSpec {
            hidden: config.hidden_size,
            kind: config.normalization,
            eps: config.norm_epsilon,
            sequence_parallel,
        };
        // Megatron's and GPT-2's scaled initialization of the projections that write into the residual stream.
        let output_init_std = config.init_method_std / (2.0 * config.num_layers as f64).sqrt();
        let rope = match config.position_embedding {
            PositionEmbedding::Rope => {
                let positions = config.max_position_embeddings.max(config.seq_length);
                Some(Arc::new(RopeTable::new(positions, config.head_dim, config.rotary_base, dtype, device)?))
            }
            PositionEmbedding::LearnedAbsolute | PositionEmbedding::None => None,
        };
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
            recompute_activation: selective,
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
        Ok(Self { config: config.clone(), vocab, block, sequence_parallel, recompute })
    }
}

impl ModelBuilder for Gpt {
    fn layer_params(&self) -> Vec<u64> {
        vec![self.config.layer_params(); self.config.num_layers]
    }

    fn end_params(&self) -> (u64, u64) {
        self.config.end_params()
    }

    fn tied(&self) -> bool {
        self.vocab.tied
    }

    fn chunk(&self, ends: Ends, layers: Range<usize>, params: &mut ParamsBuilder) -> Result<Chunk> {
        let embedding = ends.first.then(|| {
            let positions = (self.config.position_embedding == PositionEmbedding::LearnedAbsolute)
                .then_some(self.config.max_position_embeddings);
            Embedding::declare(&self.vocab, positions, self.config.hidden_dropout, self.sequence_parallel, params)
        });
        let layers = layers
            .map(|layer| Box::new(TransformerLayer::declare(layer, &self.block, params)) as Box<dyn Layer>)
            .collect();
        let head = ends.last.then(|| Head::declare(&self.vocab, &self.block.norm, params));
        Ok(Chunk { embedding, layers, head, recompute: self.recompute })
    }
}
