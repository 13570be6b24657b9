//! Floating-point operations of a training step, counted as Megatron-LM does.
//!
//! 6·B·S·\[L(h(q + 2kv) + q·h) + L·h·ffn·(3 SwiGLU | 2) + h·V_padded\] + 12·B·q·Σ pairs: the matrix
//! products of forward and backward, without recompute. q and kv are projection widths. Pairs are
//! the query-key pairs of a layer: S²/2 under causal attention, and W·S − W²/2 under a sliding
//! window of W < S tokens. As in Megatron, separate documents in a sequence count as one.

use crate::config::ModelConfig;

/// Floating-point operations of one step over `samples` sequences. `padded_vocab` is V_padded.
pub fn step_flops(model: &ModelConfig, samples: usize, padded_vocab: usize) -> f64 {
    let [b, s, l, h, f] =
        [samples, model.seq_length, model.num_layers, model.hidden_size, model.ffn_hidden_size]
            .map(|n| n as f64);
    let q = (model.num_attention_heads * model.head_dim) as f64;
    let kv = (model.num_query_groups * model.head_dim) as f64;
    let mlp = if model.swiglu { 3.0 } else { 2.0 };
    let linear = l * (h * (q + 2.0 * kv) + q * h) + l * h * f * mlp + h * padded_vocab as f64;
    let pairs: f64 = (0..model.num_layers).map(|layer| model.attention_pairs(layer)).sum();
    6.0 * b * s * linear + 12.0 * b * q * pairs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Normalization, PositionEmbedding, SlidingWindow};

    #[test]
    fn a_hand_counted_model() {
        let model = ModelConfig {
            num_layers: 2,
            hidden_size: 8,
            ffn_hidden_size: 16,
            num_attention_heads: 4,
            num_query_groups: 2,
            head_dim: 2,
            seq_length: 4,
            max_position_embeddings: 4,
            position_embedding: PositionEmbedding::Rope,
            rotary_base: 1e4,
            rope_scaling: Default::default(),
            sliding_window: None,
            embed_layernorm: false,
            normalization: Normalization::RMSNorm,
            norm_epsilon: 1e-5,
            swiglu: true,
            bias_linear: false,
            qkv_bias: false,
            untie_embeddings_and_output_weights: true,
            vocab_size: 10,
            make_vocab_size_divisible_by: 16,
            attention_dropout: 0.0,
            hidden_dropout: 0.0,
            init_method_std: 0.02,
        };
        // A query and its own key count as half a pair, so that causal attention has half of the
        // square.
        let window = |size, full_layers: &[usize]| {
            let window = SlidingWindow { size, full_layers: full_layers.to_vec() };
            step_flops(&ModelConfig { sliding_window: Some(window), ..model.clone() }, 3, 16)
        };
        let all = step_flops(&model, 3, 16);
        assert_eq!([window(4, &[]), window(9, &[]), window(2, &[0, 1])], [all; 3]);
        // 4²/2 pairs minus the 2²/2 pairs of queries and keys more than 2 apart, in one layer or
        // two.
        let apart = 12.0 * 3.0 * 8.0 * 2.0;
        assert_eq!([window(2, &[1]), window(2, &[])], [all - apart, all - 2.0 * apart]);
        // Per token: attention 8·(8+8) + 8·8 = 192 per layer, MLP 8·16·3 = 384 per layer, head 8·16
        // = 128.
        let linear = 2.0 * (192.0 + 384.0) + 128.0;
        assert_eq!(step_flops(&model, 3, 16), 6.0 * 12.0 * linear + 6.0 * 3.0 * 16.0 * 2.0 * 8.0);
    }
}
