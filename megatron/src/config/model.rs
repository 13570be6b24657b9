//! `[model]`: the architecture.

use serde::{Deserialize, Serialize};

/// How the model encodes positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PositionEmbedding {
    /// A learned vector per absolute position, added to the token embedding (GPT-2).
    LearnedAbsolute,
    /// Rotary embedding of queries and keys (Su et al. 2021), rotating halves as Llama does.
    Rope,
    /// A penalty on attention scores that grows with distance, with a slope per head (ALiBi, Press
    /// et al. 2022; Bloom).
    Alibi,
    /// None.
    None,
}

/// How rotary frequencies are scaled for sequences longer than those a model was first trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// Frequencies are unchanged.
    #[default]
    None,
    /// All frequencies divided by `factor` (position interpolation, Chen et al. 2023).
    Linear {
        /// Divisor of positions; above 0.
        factor: f64,
    },
    /// Llama 3.1's: frequencies with a wavelength above `original_max_position` / `low_freq_factor`
    /// are divided by `factor`. Frequencies with a wavelength below `original_max_position` /
    /// `high_freq_factor` stay. Between the two it interpolates.
    Llama3 {
        /// Divisor of the lowest frequencies.
        factor: f64,
        /// Sets the wavelength above which frequencies are divided.
        low_freq_factor: f64,
        /// Sets the wavelength below which frequencies stay.
        high_freq_factor: f64,
        /// Longest sequence of the original training, in tokens.
        original_max_position: usize,
    },
}

impl RopeScaling {
    /// Llama 3's scaling with Megatron-LM's fixed constants.
    pub fn llama3(factor: f64) -> Self {
        Self::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192,
        }
    }

    /// The frequency in place of `frequency` (radians per position).
    pub fn apply(&self, frequency: f64) -> f64 {
        match *self {
            Self::None => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position,
            } => {
                let turns = original_max_position as f64 * frequency / std::f64::consts::TAU;
                if turns < low {
                    frequency / factor
                } else if turns > high {
                    frequency
                } else {
                    let smooth = (turns - low) / (high - low);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }
}

/// Attention to the nearest tokens only (Beltagy et al. 2020; Mistral 7B).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlidingWindow {
    /// Most tokens that a query attends to, itself included.
    pub size: usize,
    /// Layers, from 0, in which queries attend to all tokens before them anyway.
    pub full_layers: Vec<usize>,
}

/// The normalization before attention, before the MLP, and after the last layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Normalization {
    /// Mean and variance, with weight and bias.
    LayerNorm,
    /// Root mean square, with only a weight (Zhang and Sennrich 2019).
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
    /// How the model encodes positions.
    pub position_embedding: PositionEmbedding,
    /// Base of the rotary frequencies.
    pub rotary_base: f64,
    /// Applied to the rotary frequencies.
    #[serde(default)]
    pub rope_scaling: RopeScaling,
    /// `None`: every query attends to all tokens before it.
    #[serde(default)]
    pub sliding_window: Option<SlidingWindow>,
    /// A LayerNorm of the token embedding (Bloom).
    #[serde(default)]
    pub embed_layernorm: bool,
    /// The same kind everywhere in the model.
    pub normalization: Normalization,
    /// Added to the variance before the square root.
    pub norm_epsilon: f64,
    /// SwiGLU in place of GELU (tanh approximation).
    pub swiglu: bool,
    /// Biases in the linear layers.
    pub bias_linear: bool,
    /// A bias in the QKV projection even if `bias_linear` is false (Qwen2).
    pub qkv_bias: bool,
    /// The output matrix is a separate parameter instead of the token embedding.
    pub untie_embeddings_and_output_weights: bool,
    /// Number of tokens of the tokenizer; never padded. 0 until the data are opened.
    pub vocab_size: usize,
    /// The vocabulary is padded to a multiple of this times tp (zero rows, masked out of the
    /// softmax).
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

    /// Most tokens that a query of layer `layer` (from 0) attends to, if there is a limit.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window
            .as_ref()
            .filter(|window| !window.full_layers.contains(&layer))
            .map(|window| window.size)
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

    /// Query-key pairs of a sample in layer `layer` (from 0), counting the pair of a token with
    /// itself as half.
    pub fn attention_pairs(&self, layer: usize) -> f64 {
        let s = self.seq_length as f64;
        let w = self.window(layer).map_or(s, |window| s.min(window as f64));
        w * s - w * w / 2.0
    }

    /// Multiplications per token in the forward pass of layer `layer`: matrices and attention.
    pub fn layer_flops(&self, layer: usize) -> u64 {
        let (h, f, d) = (self.hidden_size, self.ffn_hidden_size, self.head_dim);
        let (q, kv) = (self.num_attention_heads * d, self.num_query_groups * d);
        let mlp = if self.swiglu { 3 } else { 2 };
        (h * (q + 2 * kv) + q * h + mlp * h * f) as u64 + self.attention_flops(layer)
    }

    /// The part of these for attention itself: scores and weighted values.
    pub fn attention_flops(&self, layer: usize) -> u64 {
        let keys = 2.0 * self.attention_pairs(layer) / self.seq_length.max(1) as f64;
        (keys * (self.num_attention_heads * self.head_dim) as f64) as u64
    }

    /// Multiplications per token in the forward pass of the output matrix.
    pub fn head_flops(&self) -> u64 {
        (self.hidden_size * self.vocab_size) as u64
    }

    fn norm_params(&self) -> usize {
        match self.normalization {
            Normalization::LayerNorm => 2 * self.hidden_size,
            Normalization::RMSNorm => self.hidden_size,
        }
    }

    /// Parameters of the first stage's embeddings, and of the last stage's normalization and output
    /// matrix. A tied matrix counts on both stages, because it costs memory and time on both.
    pub fn end_params(&self) -> (u64, u64) {
        let matrix = self.vocab_size * self.hidden_size;
        let positions = match self.position_embedding {
            PositionEmbedding::LearnedAbsolute => self.max_position_embeddings * self.hidden_size,
            PositionEmbedding::Rope | PositionEmbedding::Alibi | PositionEmbedding::None => 0,
        };
        let norm = if self.embed_layernorm { self.norm_params() } else { 0 };
        ((matrix + positions + norm) as u64, (matrix + self.norm_params()) as u64)
    }

    /// Parameters of the model; a tied matrix counts once.
    pub fn num_params(&self) -> u64 {
        let (first, last) = self.end_params();
        let twice = if self.untie_embeddings_and_output_weights {
            0
        } else {
            (self.vocab_size * self.hidden_size) as u64
        };
        self.layer_params() * self.num_layers as u64 + first + last - twice
    }
}

/// One small GPT-2 layer, for use as `ModelConfig { hidden_size: 512, ..Default::default() }`: set
/// the sizes; other settings are the defaults of Megatron-LM's flags.
impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            num_layers: 1,
            hidden_size: 64,
            ffn_hidden_size: 256,
            num_attention_heads: 1,
            num_query_groups: 1,
            head_dim: 64,
            seq_length: 1,
            max_position_embeddings: 1,
            position_embedding: PositionEmbedding::LearnedAbsolute,
            rotary_base: 1e4,
            rope_scaling: RopeScaling::None,
            sliding_window: None,
            embed_layernorm: false,
            normalization: Normalization::LayerNorm,
            norm_epsilon: 1e-5,
            swiglu: false,
            bias_linear: true,
            qkv_bias: false,
            untie_embeddings_and_output_weights: false,
            vocab_size: 1,
            make_vocab_size_divisible_by: 128,
            attention_dropout: 0.0,
            hidden_dropout: 0.0,
            init_method_std: 0.02,
        }
    }
}
