//! `[model]`: the architecture.

use serde::{Deserialize, Serialize};

/// How positions enter the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PositionEmbedding {
    /// A learned vector per absolute position, added to the token embedding (GPT-2).
    LearnedAbsolute,
    /// Rotary embedding of queries and keys (Su et al. 2021), rotating halves as Llama does.
    Rope,
    /// None.
    None,
}

/// The normalization before attention, before the MLP, and after the last layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Normalization {
    LayerNorm,
    RMSNorm,
}

/// The architecture of a GPT-like decoder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Number of transformer layers.
    pub num_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP's inner layer (of each half for SwiGLU).
    pub ffn_hidden_size: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key/value heads; equals `num_attention_heads` without grouped-query attention.
    pub num_query_groups: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Tokens per training sample.
    pub seq_length: usize,
    /// Rows of the learned position embedding; the longest sequence the model accepts.
    pub max_position_embeddings: usize,
    pub position_embedding: PositionEmbedding,
    /// Base of the rotary frequencies.
    pub rotary_base: f64,
    pub normalization: Normalization,
    /// Added to the variance before the square root.
    pub norm_epsilon: f64,
    /// SwiGLU in place of GELU (tanh approximation).
    pub swiglu: bool,
    /// Biases in the linear layers.
    pub bias_linear: bool,
    /// A bias in the QKV projection even where `bias_linear` is false (Qwen2).
    pub qkv_bias: bool,
    /// The output matrix is a parameter of its own rather than the token embedding.
    pub untie_embeddings_and_output_weights: bool,
    /// Number of tokens of the tokenizer; never padded. 0 until the data are opened.
    pub vocab_size: usize,
    /// The vocabulary is padded to a multiple of this times tp (zero rows, masked out of the softmax).
    pub make_vocab_size_divisible_by: usize,
    /// Probability of dropping an attention weight.
    pub attention_dropout: f64,
    /// Probability of dropping an element of an embedding, attention or MLP output.
    pub hidden_dropout: f64,
    /// Standard deviation of the initial weights; output projections use this / √(2·layers).
    pub init_method_std: f64,
}

impl ModelConfig {
    /// V_padded: the vocabulary rounded up to a multiple of `make_vocab_size_divisible_by` · tp.
    pub fn padded_vocab_size(&self, tp: usize) -> usize {
        self.vocab_size.next_multiple_of((self.make_vocab_size_divisible_by * tp).max(1))
    }

    /// Parameters of one transformer layer.
    pub fn layer_params(&self) -> u64 {
        let (h, f) = (self.hidden_size, self.ffn_hidden_size);
        let q = self.num_attention_heads * self.head_dim;
        let qkv = q + 2 * self.num_query_groups * self.head_dim;
        let fc1 = if self.swiglu { 2 * f } else { f };
        let norms = 2 * self.norm_params();
        let mut biases = if self.bias_linear { h + fc1 + h } else { 0 };
        if self.bias_linear || self.qkv_bias {
            biases += qkv;
        }
        (h * qkv + q * h + h * fc1 + f * h + norms + biases) as u64
    }

    fn norm_params(&self) -> usize {
        match self.normalization {
            Normalization::LayerNorm => 2 * self.hidden_size,
            Normalization::RMSNorm => self.hidden_size,
        }
    }

    /// Parameters of the first stage's embeddings, and of the last stage's normalization and output matrix. A tied
    /// matrix counts at both ends: it costs memory and time on both.
    pub fn end_params(&self) -> (u64, u64) {
        let matrix = self.vocab_size * self.hidden_size;
        let positions = match self.position_embedding {
            PositionEmbedding::LearnedAbsolute => self.max_position_embeddings * self.hidden_size,
            PositionEmbedding::Rope | PositionEmbedding::None => 0,
        };
        ((matrix + positions) as u64, (matrix + self.norm_params()) as u64)
    }

    /// Parameters of the model, a tied matrix counted once.
    pub fn num_params(&self) -> u64 {
        let (first, last) = self.end_params();
        let twice =
            if self.untie_embeddings_and_output_weights { 0 } else { (self.vocab_size * self.hidden_size) as u64 };
        self.layer_params() * self.num_layers as u64 + first + last - twice
    }
}
