//! Converts a [`ModelConfig`] to its family and that family's fields.

use megatron::config::{ModelConfig, Normalization, PositionEmbedding, RopeScaling};
use megatron::{Error, Result};
use serde_json::{Map, Value, json};

use super::read::{FULL, SLIDING};
use crate::families::Family;

/// The family of a model.
///
/// # Errors
/// If no family has all of its settings; the message says what each family lacks.
pub fn family_of(m: &ModelConfig) -> Result<Family> {
    let layer_norm = m.normalization == Normalization::LayerNorm;
    let plain =
        layer_norm && !m.swiglu && m.bias_linear && m.num_query_groups == m.num_attention_heads;
    let square = m.num_attention_heads * m.head_dim == m.hidden_size;
    let qwen2 = m.qkv_bias && !m.bias_linear;
    if let Some(window) = &m.sliding_window {
        let llama = m.position_embedding == PositionEmbedding::Rope
            && !layer_norm
            && m.swiglu
            && !m.embed_layernorm;
        return match llama {
            true if qwen2 => Ok(Family::Qwen2),
            true if !m.bias_linear && window.full_layers.is_empty() => Ok(Family::Mistral),
            _ => Err(Error::config(
                "no Hugging Face family has this architecture with a sliding window: Mistral has \
                 rotary positions, RMSNorm, SwiGLU, no biases, and the window in every layer; \
                 Qwen2 also has a QKV bias",
            )),
        };
    }
    match m.position_embedding {
        PositionEmbedding::LearnedAbsolute if plain && square && !m.embed_layernorm => {
            Ok(Family::Gpt2)
        }
        PositionEmbedding::Alibi
            if plain && square && m.embed_layernorm && m.ffn_hidden_size == 4 * m.hidden_size =>
        {
            Ok(Family::Bloom)
        }
        PositionEmbedding::Rope if !layer_norm && m.swiglu && !m.embed_layernorm => {
            Ok(if qwen2 { Family::Qwen2 } else { Family::Llama })
        }
        _ => Err(Error::config(
            "no Hugging Face family has this architecture: GPT-2 has learned positions, LayerNorm, GELU and biases; Llama \
             and Qwen2 have rotary positions, RMSNorm and SwiGLU; Bloom has ALiBi, a normalized embedding, LayerNorm, \
             GELU, biases and an MLP of 4 · hidden_size",
        )),
    }
}

/// The `config.json` of a model of `family`, without dtype and special tokens.
pub fn to_json(m: &ModelConfig, family: Family) -> Map<String, Value> {
    let tied = !m.untie_embeddings_and_output_weights;
    let mut json = match family {
        Family::Gpt2 => json!({
            "activation_function": "gelu_new",
            "attn_pdrop": m.attention_dropout,
            "embd_pdrop": m.hidden_dropout,
            "layer_norm_epsilon": m.norm_epsilon,
            "n_embd": m.hidden_size,
            "n_head": m.num_attention_heads,
            "n_inner": m.ffn_hidden_size,
            "n_layer": m.num_layers,
            "n_positions": m.max_position_embeddings,
            "resid_pdrop": m.hidden_dropout,
        }),
        Family::Bloom => json!({
            "apply_residual_connection_post_layernorm": false,
            "attention_dropout": m.attention_dropout,
            "hidden_dropout": m.hidden_dropout,
            "hidden_size": m.hidden_size,
            "layer_norm_epsilon": m.norm_epsilon,
            "n_head": m.num_attention_heads,
            "n_layer": m.num_layers,
            "seq_length": m.max_position_embeddings,
        }),
        Family::Llama | Family::Mistral | Family::Qwen2 => json!({
            "attention_dropout": m.attention_dropout,
            "head_dim": m.head_dim,
            "hidden_act": "silu",
            "hidden_size": m.hidden_size,
            "intermediate_size": m.ffn_hidden_size,
            "max_position_embeddings": m.max_position_embeddings,
            "num_attention_heads": m.num_attention_heads,
            "num_hidden_layers": m.num_layers,
            "num_key_value_heads": m.num_query_groups,
            "rms_norm_eps": m.norm_epsilon,
            // Versions 4 and 5 both read this; version 4 would ignore rope_parameters.
            "rope_scaling": rope_json(m.rope_scaling),
            "rope_theta": m.rotary_base,
        }),
    };
    json["architectures"] = json!([family.architecture()]);
    json["model_type"] = json!(family.model_type());
    json["vocab_size"] = json!(m.vocab_size);
    json["initializer_range"] = json!(m.init_method_std);
    json["tie_word_embeddings"] = json!(tied);
    match family {
        Family::Llama => {
            json["attention_bias"] = json!(m.bias_linear);
            json["mlp_bias"] = json!(m.bias_linear);
        }
        Family::Mistral => {
            json["sliding_window"] = json!(m.sliding_window.as_ref().map(|window| window.size))
        }
        Family::Qwen2 => {
            json["use_sliding_window"] = json!(m.sliding_window.is_some());
            if let Some(window) = &m.sliding_window {
                let full = |layer: &usize| window.full_layers.contains(layer);
                let types: Vec<_> = (0..m.num_layers)
                    .map(|layer| if full(&layer) { FULL } else { SLIDING })
                    .collect();
                json["sliding_window"] = json!(window.size);
                json["max_window_layers"] = json!((0..m.num_layers).take_while(full).count());
                json["layer_types"] = json!(types);
            }
        }
        Family::Gpt2 | Family::Bloom => {}
    }
    match json {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

fn rope_json(scaling: RopeScaling) -> Value {
    match scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position,
        }),
    }
}
