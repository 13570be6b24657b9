//! `[model]`: the architecture.

use clap::{ArgAction, Args};
use megatron::config::{Normalization, PositionEmbedding};

use super::choice;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Model: the architecture, [model]")]
pub struct ModelFlags {
    /// Transformer layers
    #[arg(long, value_name = "N")]
    pub num_layers: Option<usize>,
    /// Width of the residual stream
    #[arg(long, value_name = "N")]
    pub hidden_size: Option<usize>,
    /// Width of the MLP's inner layer [default: 4·hidden, with SwiGLU 8/3·hidden rounded down to a
    /// multiple of 64]
    #[arg(long, value_name = "N")]
    pub ffn_hidden_size: Option<usize>,
    /// Query heads
    #[arg(long, value_name = "N")]
    pub num_attention_heads: Option<usize>,
    /// Key/value heads, each shared by a group of query heads [default: the number of query heads;
    /// 1 with --group-query-attention]
    #[arg(long, value_name = "N")]
    pub num_query_groups: Option<usize>,
    /// Share key/value heads among groups of query heads; --num-query-groups implies this
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub group_query_attention: bool,
    /// Width of one head [default: hidden size / query heads]
    #[arg(long, value_name = "N")]
    pub kv_channels: Option<usize>,
    /// Tokens per training sample
    #[arg(long, value_name = "N")]
    pub seq_length: Option<usize>,
    /// The longest sequence the model accepts; rows of a learned position embedding [default: the
    /// sequence length]
    #[arg(long, value_name = "N")]
    pub max_position_embeddings: Option<usize>,
    /// How the model encodes positions
    #[arg(long, value_name = "TYPE", default_value = "learned_absolute",
          value_parser = choice::<PositionEmbedding>(&["learned_absolute", "rope", "alibi", "none"]))]
    pub position_embedding_type: PositionEmbedding,
    /// Base of the rotary frequencies
    #[arg(long, value_name = "X", default_value_t = 10000.0)]
    pub rotary_base: f64,
    /// Divide rotary frequencies by N, for sequences N times as long as those first trained on
    #[arg(long, value_name = "N")]
    pub rotary_seq_len_interpolation_factor: Option<f64>,
    /// Scale rotary frequencies as Llama 3.1 does, from 8192 original positions
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub use_rope_scaling: bool,
    /// Factor by which --use-rope-scaling extends the context
    #[arg(long, value_name = "X", default_value_t = 8.0)]
    pub rope_scaling_factor: f64,
    /// Most tokens that a query attends to, itself included [default: all before it]
    #[arg(long, value_name = "N")]
    pub sliding_window: Option<usize>,
    /// Apply LayerNorm to the token embedding
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub embed_layernorm: bool,
    /// Normalization before attention, before the MLP, and after the last layer
    #[arg(long, value_name = "TYPE", default_value = "LayerNorm",
          value_parser = choice::<Normalization>(&["LayerNorm", "RMSNorm"]))]
    pub normalization: Normalization,
    /// Added to the variance before the square root
    #[arg(long, value_name = "X", alias = "layernorm-epsilon", default_value_t = 1e-5)]
    pub norm_epsilon: f64,
    /// Use SwiGLU in the MLP instead of GELU
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub swiglu: bool,
    /// Leave out the biases of linear layers
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub disable_bias_linear: bool,
    /// Keep the bias of the QKV projection when --disable-bias-linear removes the others
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub add_qkv_bias: bool,
    /// Use a separate output matrix instead of the token embedding
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub untie_embeddings_and_output_weights: bool,
    /// Tokens in the vocabulary, for data without a tokenizer, or to change the number of an
    /// --init-from-hf model [default: the tokenizer's, or that model's]
    #[arg(long, value_name = "N")]
    pub vocab_size: Option<usize>,
    /// Pad the vocabulary to a multiple of N times the tensor-parallel size; padding changes no
    /// result
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub make_vocab_size_divisible_by: usize,
    /// Probability of dropping an attention weight
    #[arg(long, value_name = "P", default_value_t = 0.1)]
    pub attention_dropout: f64,
    /// Probability of dropping an element of an embedding, attention or MLP output
    #[arg(long, value_name = "P", default_value_t = 0.1)]
    pub hidden_dropout: f64,
    /// Standard deviation of the initial weights; output projections use this / √(2·layers)
    #[arg(long, value_name = "X", default_value_t = 0.02)]
    pub init_method_std: f64,
}
