//! GPT-2: fused QKV, and `Conv1D` weights, which are stored as `[in, out]`.
//!
//! `transformers` `modeling_gpt2.py`; Radford et al. 2019.

use super::{Transform::*, WeightMap, rule};

pub(super) static MAP: WeightMap = WeightMap {
    prefix: "transformer.",
    rules: &[
        rule("embedding.word_embeddings.weight", &["wte.weight"], Copy),
        rule("embedding.position_embeddings.weight", &["wpe.weight"], Copy),
        rule("decoder.layers.{}.input_layernorm.weight", &["h.{}.ln_1.weight"], Copy),
        rule("decoder.layers.{}.input_layernorm.bias", &["h.{}.ln_1.bias"], Copy),
        rule(
            "decoder.layers.{}.self_attention.linear_qkv.weight",
            &["h.{}.attn.c_attn.weight"],
            QkvFusedTransposed,
        ),
        rule(
            "decoder.layers.{}.self_attention.linear_qkv.bias",
            &["h.{}.attn.c_attn.bias"],
            QkvFused,
        ),
        rule(
            "decoder.layers.{}.self_attention.linear_proj.weight",
            &["h.{}.attn.c_proj.weight"],
            Transpose,
        ),
        rule("decoder.layers.{}.self_attention.linear_proj.bias", &["h.{}.attn.c_proj.bias"], Copy),
        rule("decoder.layers.{}.pre_mlp_layernorm.weight", &["h.{}.ln_2.weight"], Copy),
        rule("decoder.layers.{}.pre_mlp_layernorm.bias", &["h.{}.ln_2.bias"], Copy),
        rule("decoder.layers.{}.mlp.linear_fc1.weight", &["h.{}.mlp.c_fc.weight"], Transpose),
        rule("decoder.layers.{}.mlp.linear_fc1.bias", &["h.{}.mlp.c_fc.bias"], Copy),
        rule("decoder.layers.{}.mlp.linear_fc2.weight", &["h.{}.mlp.c_proj.weight"], Transpose),
        rule("decoder.layers.{}.mlp.linear_fc2.bias", &["h.{}.mlp.c_proj.bias"], Copy),
        rule("decoder.final_layernorm.weight", &["ln_f.weight"], Copy),
        rule("decoder.final_layernorm.bias", &["ln_f.bias"], Copy),
    ],
    ignorable: &["h.{}.attn.bias", "h.{}.attn.masked_bias"],
};
