//! Bloom: linear biases on attention scores, and a normalized embedding.
//!
//! `transformers` `modeling_bloom.py`; Le Scao et al. 2022. Its fused QKV interleaves (query, key,
//! value) per head, which equals our order per key/value group with one query head each.

use super::{Transform::*, WeightMap, rule};

pub(super) static MAP: WeightMap = WeightMap {
    prefix: "transformer.",
    rules: &[
        rule("embedding.word_embeddings.weight", &["word_embeddings.weight"], Copy),
        rule("embedding.layernorm.weight", &["word_embeddings_layernorm.weight"], Copy),
        rule("embedding.layernorm.bias", &["word_embeddings_layernorm.bias"], Copy),
        rule("decoder.layers.{}.input_layernorm.weight", &["h.{}.input_layernorm.weight"], Copy),
        rule("decoder.layers.{}.input_layernorm.bias", &["h.{}.input_layernorm.bias"], Copy),
        rule(
            "decoder.layers.{}.self_attention.linear_qkv.weight",
            &["h.{}.self_attention.query_key_value.weight"],
            Copy,
        ),
        rule(
            "decoder.layers.{}.self_attention.linear_qkv.bias",
            &["h.{}.self_attention.query_key_value.bias"],
            Copy,
        ),
        rule(
            "decoder.layers.{}.self_attention.linear_proj.weight",
            &["h.{}.self_attention.dense.weight"],
            Copy,
        ),
        rule(
            "decoder.layers.{}.self_attention.linear_proj.bias",
            &["h.{}.self_attention.dense.bias"],
            Copy,
        ),
        rule(
            "decoder.layers.{}.pre_mlp_layernorm.weight",
            &["h.{}.post_attention_layernorm.weight"],
            Copy,
        ),
        rule(
            "decoder.layers.{}.pre_mlp_layernorm.bias",
            &["h.{}.post_attention_layernorm.bias"],
            Copy,
        ),
        rule("decoder.layers.{}.mlp.linear_fc1.weight", &["h.{}.mlp.dense_h_to_4h.weight"], Copy),
        rule("decoder.layers.{}.mlp.linear_fc1.bias", &["h.{}.mlp.dense_h_to_4h.bias"], Copy),
        rule("decoder.layers.{}.mlp.linear_fc2.weight", &["h.{}.mlp.dense_4h_to_h.weight"], Copy),
        rule("decoder.layers.{}.mlp.linear_fc2.bias", &["h.{}.mlp.dense_4h_to_h.bias"], Copy),
        rule("decoder.final_layernorm.weight", &["ln_f.weight"], Copy),
        rule("decoder.final_layernorm.bias", &["ln_f.bias"], Copy),
    ],
    ignorable: &["h.{}.self_attention.mask"],
};
