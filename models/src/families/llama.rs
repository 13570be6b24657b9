//! Llama, and Mistral and Qwen2, which use Llama's tensor names. The model determines which biases
//! exist.
//!
//! `transformers` `modeling_{llama,mistral,qwen2}.py`. The files already store the layout for
//! rotation of halves, so nothing is permuted.

use super::{Transform::*, WeightMap, rule};

pub(super) static MAP: WeightMap = WeightMap {
    prefix: "model.",
    rules: &[
        rule("embedding.word_embeddings.weight", &["embed_tokens.weight"], Copy),
        rule(
            "decoder.layers.{}.input_layernorm.weight",
            &["layers.{}.input_layernorm.weight"],
            Copy,
        ),
        rule(
            "decoder.layers.{}.self_attention.linear_qkv.weight",
            &[
                "layers.{}.self_attn.q_proj.weight",
                "layers.{}.self_attn.k_proj.weight",
                "layers.{}.self_attn.v_proj.weight",
            ],
            QkvFromParts,
        ),
        rule(
            "decoder.layers.{}.self_attention.linear_qkv.bias",
            &[
                "layers.{}.self_attn.q_proj.bias",
                "layers.{}.self_attn.k_proj.bias",
                "layers.{}.self_attn.v_proj.bias",
            ],
            QkvFromParts,
        ),
        rule(
            "decoder.layers.{}.self_attention.linear_proj.weight",
            &["layers.{}.self_attn.o_proj.weight"],
            Copy,
        ),
        rule(
            "decoder.layers.{}.self_attention.linear_proj.bias",
            &["layers.{}.self_attn.o_proj.bias"],
            Copy,
        ),
        rule(
            "decoder.layers.{}.pre_mlp_layernorm.weight",
            &["layers.{}.post_attention_layernorm.weight"],
            Copy,
        ),
        rule(
            "decoder.layers.{}.mlp.linear_fc1.weight",
            &["layers.{}.mlp.gate_proj.weight", "layers.{}.mlp.up_proj.weight"],
            GateUp,
        ),
        rule(
            "decoder.layers.{}.mlp.linear_fc1.bias",
            &["layers.{}.mlp.gate_proj.bias", "layers.{}.mlp.up_proj.bias"],
            GateUp,
        ),
        rule("decoder.layers.{}.mlp.linear_fc2.weight", &["layers.{}.mlp.down_proj.weight"], Copy),
        rule("decoder.layers.{}.mlp.linear_fc2.bias", &["layers.{}.mlp.down_proj.bias"], Copy),
        rule("decoder.final_layernorm.weight", &["norm.weight"], Copy),
    ],
    ignorable: &["layers.{}.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"],
};
