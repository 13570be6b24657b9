//! Converts a family's fields to a [`ModelConfig`].

use megatron::config::{ModelConfig, Normalization, PositionEmbedding, RopeScaling, SlidingWindow};
use serde_json::{Map, Value, json};

use crate::families::Family;
use crate::hf::fields::Fields;

/// Names of GELU's tanh approximation.
const GELU_TANH: [&str; 3] = ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"];
const SILU: [&str; 2] = ["silu", "swish"];
/// Kinds of attention in `layer_types`.
pub(super) const FULL: &str = "full_attention";
pub(super) const SLIDING: &str = "sliding_attention";
/// A larger number is considered a mistake: some settings are lists with one item per layer.
const MOST_LAYERS: usize = 1 << 16;
/// Sequence length for models with relative positions whose file names no length.
const UNLIMITED: usize = 2048;

pub(super) fn gpt2(f: &mut Fields) -> std::result::Result<ModelConfig, String> {
    let hidden = f.int(&["n_embd", "hidden_size"])?;
    let heads = f.int(&["n_head", "num_attention_heads"])?;
    let positions = f.int(&["n_positions", "max_position_embeddings"])?;
    f.must("activation_function", json!("gelu_new"), &GELU_TANH)?;
    f.must_be("scale_attn_weights", true, true)?;
    f.must_be("scale_attn_by_inverse_layer_idx", false, false)?;
    let (embedding, residual) = (f.float("embd_pdrop", 0.1)?, f.float("resid_pdrop", 0.1)?);
    if embedding != residual {
        return Err(format!(
            "embd_pdrop {embedding} and resid_pdrop {residual} differ; only one dropout for both is supported"
        ));
    }
    f.ignore(&["n_ctx", "reorder_and_upcast_attn"]);
    Ok(ModelConfig {
        num_layers: num_layers(f, &["n_layer", "num_hidden_layers"])?,
        hidden_size: hidden,
        ffn_hidden_size: f.int_or("n_inner", 4usize.saturating_mul(hidden))?,
        num_attention_heads: heads,
        num_query_groups: heads,
        head_dim: f.divided(hidden, heads)?,
        seq_length: positions,
        max_position_embeddings: positions,
        position_embedding: PositionEmbedding::LearnedAbsolute,
        rotary_base: 10_000.0,
        rope_scaling: RopeScaling::None,
        sliding_window: None,
        embed_layernorm: false,
        normalization: Normalization::LayerNorm,
        norm_epsilon: f.float("layer_norm_epsilon", 1e-5)?,
        swiglu: false,
        bias_linear: true,
        qkv_bias: false,
        untie_embeddings_and_output_weights: !f.bool("tie_word_embeddings", true)?,
        vocab_size: f.int(&["vocab_size"])?,
        make_vocab_size_divisible_by: 128,
        attention_dropout: f.float("attn_pdrop", 0.1)?,
        hidden_dropout: residual,
        init_method_std: f.float("initializer_range", 0.02)?,
    })
}

pub(super) fn llama(f: &mut Fields, family: Family) -> std::result::Result<ModelConfig, String> {
    let hidden = f.int(&["hidden_size"])?;
    let heads = f.int(&["num_attention_heads"])?;
    let layers = num_layers(f, &["num_hidden_layers"])?;
    let positions = f.int(&["max_position_embeddings"])?;
    f.must("hidden_act", json!("silu"), &SILU)?;
    let (rotary_base, rope_scaling) = rope(f)?;
    let biases = match family {
        Family::Llama => {
            let (attention, mlp) = (f.bool("attention_bias", false)?, f.bool("mlp_bias", false)?);
            if attention != mlp {
                return Err(format!(
                    "attention_bias {attention} with mlp_bias {mlp}: only biases in both or in neither are supported"
                ));
            }
            f.ignore(&["pretraining_tp"]); // the same sums, split
            attention
        }
        _ => false,
    };
    let sliding_window = sliding_window(f, family, layers)?;
    Ok(ModelConfig {
        num_layers: layers,
        hidden_size: hidden,
        ffn_hidden_size: f.int(&["intermediate_size"])?,
        num_attention_heads: heads,
        num_query_groups: f.int_or("num_key_value_heads", heads)?,
        head_dim: match f.optional_int("head_dim")? {
            Some(width) => width,
            None => f.divided(hidden, heads)?,
        },
        seq_length: positions,
        max_position_embeddings: positions,
        position_embedding: PositionEmbedding::Rope,
        rotary_base,
        rope_scaling,
        sliding_window,
        embed_layernorm: false,
        normalization: Normalization::RMSNorm,
        norm_epsilon: f.float("rms_norm_eps", 1e-6)?,
        swiglu: true,
        bias_linear: biases,
        qkv_bias: biases || family == Family::Qwen2,
        untie_embeddings_and_output_weights: !f.bool("tie_word_embeddings", false)?,
        vocab_size: f.int(&["vocab_size"])?,
        make_vocab_size_divisible_by: 128,
        attention_dropout: f.float("attention_dropout", 0.0)?,
        hidden_dropout: 0.0,
        init_method_std: f.float("initializer_range", 0.02)?,
    })
}

fn num_layers(f: &mut Fields, names: &[&str]) -> std::result::Result<usize, String> {
    match f.int(names)? {
        layers @ ..=MOST_LAYERS => Ok(layers),
        layers => Err(format!(
            "{} is {layers}; more than {MOST_LAYERS} count as a mistake",
            names.join(" or ")
        )),
    }
}

/// The attention's window, and the layers without one.
fn sliding_window(
    f: &mut Fields,
    family: Family,
    layers: usize,
) -> std::result::Result<Option<SlidingWindow>, String> {
    let mut size = match family {
        // The defaults of `MistralConfig` and `Qwen2Config` for an absent field. They read null as
        // no window.
        Family::Mistral | Family::Qwen2 => {
            let default = if f.is_null("sliding_window") { None } else { Some(4096) };
            f.optional_int("sliding_window")?.or(default)
        }
        _ => None,
    };
    let mut full_layers = Vec::new();
    if family == Family::Qwen2 {
        let first = f.optional_int("max_window_layers")?.unwrap_or(28);
        full_layers = (0..layers.min(first)).collect();
        let on = f.bool("use_sliding_window", false)?;
        size = size.filter(|_| on);
    }
    match f.take("layer_types") {
        Some(Value::Array(types)) => {
            let known = [FULL, SLIDING];
            if let Some(other) = types.iter().find(|t| !known.iter().any(|known| *t == known)) {
                return Err(format!("layer_types holds {other}, which is not supported"));
            }
            if types.iter().any(|t| t == SLIDING) && size.is_none() {
                return Err(format!("layer_types holds {SLIDING:?} without a sliding_window"));
            }
            if types.len() != layers {
                return Err(format!(
                    "layer_types names {} layers, but num_hidden_layers is {layers}",
                    types.len()
                ));
            }
            let listed: Vec<usize> = (0..layers).filter(|&layer| types[layer] == FULL).collect();
            // All layers of a Mistral are alike, whatever is listed.
            if family == Family::Mistral && size.is_some() && !listed.is_empty() {
                return Err(format!(
                    "layer_types holds {FULL:?}, but in a Mistral with a sliding_window all layers must use it"
                ));
            }
            full_layers = listed;
        }
        None => {}
        Some(other) => return Err(format!("layer_types is {other}, not a list")),
    }
    Ok(size.filter(|_| full_layers.len() < layers).map(|size| SlidingWindow { size, full_layers }))
}

/// Base and scaling of rotary frequencies: from `rope_theta` and `rope_scaling`, or both from
/// `rope_parameters`.
fn rope(f: &mut Fields) -> std::result::Result<(f64, RopeScaling), String> {
    let outer = f.float("rope_theta", 10_000.0)?;
    let mut found = None;
    for name in ["rope_parameters", "rope_scaling"] {
        let this = match f.take(name) {
            None => continue,
            Some(Value::Object(map)) => rope_of(name, map, outer)?,
            Some(other) => return Err(format!("{name} is {other}, not an object")),
        };
        // Depending on its version, transformers reads one or the other.
        if found.is_some_and(|other| other != this) {
            return Err(
                "rope_parameters and rope_scaling contradict each other; remove the wrong one"
                    .into(),
            );
        }
        found = Some(this);
    }
    Ok(found.unwrap_or((outer, RopeScaling::None)))
}

fn rope_of(
    name: &str,
    map: &Map<String, Value>,
    outer: f64,
) -> std::result::Result<(f64, RopeScaling), String> {
    let mut inner = Fields::new(map);
    let base = inner.float("rope_theta", outer)?;
    inner.must_number("partial_rotary_factor", 1.0)?;
    let kind = match inner.take("rope_type").or_else(|| inner.take("type")) {
        None => "default",
        Some(kind) => {
            kind.as_str().ok_or_else(|| format!("{name}: rope_type is {kind}, not a name"))?
        }
    };
    inner.ignore(&["type"]); // an older name of rope_type
    let need = |inner: &mut Fields, key: &str| {
        inner.optional_float(key)?.ok_or_else(|| format!("{name} of type {kind} has no {key}"))
    };
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: need(&mut inner, "factor")? },
        "llama3" => {
            let factor = need(&mut inner, "factor")?;
            let (low, high) =
                (need(&mut inner, "low_freq_factor")?, need(&mut inner, "high_freq_factor")?);
            if low >= high {
                return Err(format!(
                    "{name}: low_freq_factor {low} must be below high_freq_factor {high}"
                ));
            }
            let original_max_position = inner.int(&["original_max_position_embeddings"])?;
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position,
            }
        }
        other => {
            return Err(format!(
                "{name} of type {other:?} is not supported; supported are default, linear, llama3"
            ));
        }
    };
    inner.ignore(&["original_max_position_embeddings"]); // for other types only a note
    inner.finish().map_err(|why| format!("{name}: {why}"))?;
    Ok((base, scaling))
}

pub(super) fn bloom(f: &mut Fields) -> std::result::Result<ModelConfig, String> {
    let hidden = f.int(&["hidden_size", "n_embed"])?;
    let heads = f.int(&["n_head", "num_attention_heads"])?;
    let positions = f.int_or("seq_length", UNLIMITED)?;
    f.must_be("apply_residual_connection_post_layernorm", false, false)?;
    let ffn = 4usize.saturating_mul(hidden);
    let inner = f.int_or("n_inner", ffn)?;
    if inner != ffn {
        return Err(format!(
            "n_inner {inner} is not 4 · {hidden}, the only width that Bloom supports"
        ));
    }
    f.ignore(&[
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "offset_alibi",
        "pretraining_tp",
        "skip_bias_add",
        "skip_bias_add_qkv",
        "slow_but_exact",
    ]);
    Ok(ModelConfig {
        num_layers: num_layers(f, &["n_layer", "num_hidden_layers"])?,
        hidden_size: hidden,
        ffn_hidden_size: ffn,
        num_attention_heads: heads,
        num_query_groups: heads,
        head_dim: f.divided(hidden, heads)?,
        seq_length: positions,
        max_position_embeddings: positions,
        position_embedding: PositionEmbedding::Alibi,
        rotary_base: 10_000.0,
        rope_scaling: RopeScaling::None,
        sliding_window: None,
        embed_layernorm: true,
        normalization: Normalization::LayerNorm,
        norm_epsilon: f.float("layer_norm_epsilon", 1e-5)?,
        swiglu: false,
        bias_linear: true,
        qkv_bias: false,
        untie_embeddings_and_output_weights: !f.bool("tie_word_embeddings", true)?,
        vocab_size: f.int(&["vocab_size"])?,
        make_vocab_size_divisible_by: 128,
        attention_dropout: f.float("attention_dropout", 0.0)?,
        hidden_dropout: f.float("hidden_dropout", 0.0)?,
        init_method_std: f.float("initializer_range", 0.02)?,
    })
}
