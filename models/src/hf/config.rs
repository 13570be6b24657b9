//! `config.json` ↔ [`ModelConfig`]. What would change the result and is not built is refused by name, never dropped.
//!
//! Fields and their defaults: `transformers` `configuration_{gpt2,llama,mistral,qwen2,bloom}.py`, versions 4 and 5.

use std::path::{Path, PathBuf};

use megatron::config::{ModelConfig, Normalization, PositionEmbedding, RopeScaling, SlidingWindow, Sources};
use megatron::{Error, Result};
use serde_json::{Map, Value, json};

use super::fields::Fields;
use crate::families::Family;
use crate::saved::single;

/// Name of the file in a Hugging Face folder.
pub const CONFIG: &str = "config.json";
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// The activations that are GELU's tanh approximation.
const GELU_TANH: [&str; 3] = ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"];
const SILU: [&str; 2] = ["silu", "swish"];
/// Kinds of attention in `layer_types`.
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";
/// More are taken for a mistake: some settings are lists with an item for each layer.
const MOST_LAYERS: usize = 1 << 16;
/// Sequences of models whose positions are relative and whose file names no length.
const UNLIMITED: usize = 2048;

/// The architecture that a `config.json` describes.
#[derive(Clone, Debug)]
pub struct HfConfig {
    pub family: Family,
    /// `seq_length` is the longest sequence the model accepts.
    pub model: ModelConfig,
    /// The file as it is.
    pub json: Map<String, Value>,
    path: PathBuf,
}

impl HfConfig {
    /// Reads `folder/config.json`.
    ///
    /// # Errors
    /// If it cannot be read, or describes something that this program does not build; the message names the field.
    pub fn read(folder: &Path) -> Result<Self> {
        Self::read_file(&folder.join(CONFIG))
    }

    /// Reads a file that holds what a `config.json` does.
    ///
    /// # Errors
    /// As [`HfConfig::read`].
    pub fn read_file(path: &Path) -> Result<Self> {
        let size = std::fs::metadata(path).map_err(|e| Error::io("find", path, e))?.len();
        if size > MAX_CONFIG_BYTES {
            return Err(Error::checkpoint(path, format!("has {size} bytes, which no config.json has")));
        }
        let bytes = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
        let json = serde_json::from_slice(&bytes).map_err(|e| Error::checkpoint(path, format!("is no config: {e}")))?;
        Self::from_json(path, json)
    }

    /// Understands `json`, read from `path`.
    ///
    /// # Errors
    /// As [`HfConfig::read`].
    pub fn from_json(path: &Path, json: Map<String, Value>) -> Result<Self> {
        let (family, model) = understand(&json).map_err(|why| Error::checkpoint(path, why))?;
        single()
            .validate_with(&model, &names(family))
            .map_err(|e| Error::checkpoint(path, format!("describes an impossible model: {e}")))?;
        Ok(Self { family, model, json, path: path.to_path_buf() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// What the settings that are checked are called in a family's file.
fn names(family: Family) -> Sources {
    let pairs: &[(&str, &str)] = match family {
        Family::Gpt2 => &[
            ("num_layers", "n_layer"),
            ("hidden_size", "n_embd"),
            ("ffn_hidden_size", "n_inner"),
            ("seq_length", "n_positions"),
            ("norm_epsilon", "layer_norm_epsilon"),
            ("attention_dropout", "attn_pdrop"),
            ("hidden_dropout", "resid_pdrop"),
        ],
        Family::Llama | Family::Mistral | Family::Qwen2 => &[
            ("num_layers", "num_hidden_layers"),
            ("ffn_hidden_size", "intermediate_size"),
            ("kv_channels", "head_dim"),
            ("seq_length", "max_position_embeddings"),
            ("rotary_base", "rope_theta"),
            ("rope_scaling_factor", "factor in rope_scaling"),
            ("norm_epsilon", "rms_norm_eps"),
        ],
        Family::Bloom => &[("num_layers", "n_layer"), ("norm_epsilon", "layer_norm_epsilon")],
    };
    let mut names = Sources::default();
    let pairs = pairs.iter().chain(&[("init_method_std", "initializer_range")]);
    pairs.for_each(|(key, name)| names.record(*key, *name));
    names
}

fn understand(json: &Map<String, Value>) -> std::result::Result<(Family, ModelConfig), String> {
    let known = || Family::ALL.map(Family::architecture).join(", ");
    let model_type = json.get("model_type").and_then(Value::as_str).ok_or("names no model_type")?;
    let family = Family::ALL.into_iter().find(|family| family.model_type() == model_type);
    let family = family.ok_or_else(|| format!("model_type {model_type:?} is not known; known are {}", known()))?;
    if let Some(Value::Array(names)) = json.get("architectures") {
        let bare = family.architecture().replace("LMHeadModel", "Model").replace("ForCausalLM", "Model");
        if let Some(other) = names.iter().find(|name| **name != family.architecture() && **name != bare.as_str()) {
            return Err(format!("architecture {other} is not known; known are {}", known()));
        }
    }
    let mut fields = Fields::new(json);
    let model = match family {
        Family::Gpt2 => gpt2(&mut fields)?,
        Family::Llama | Family::Mistral | Family::Qwen2 => llama(&mut fields, family)?,
        Family::Bloom => bloom(&mut fields)?,
    };
    fields.finish()?;
    if model.vocab_size == 0 {
        return Err("describes a vocabulary without tokens".into());
    }
    if model.num_attention_heads == 0 || model.num_query_groups == 0 || model.head_dim == 0 {
        return Err("describes attention without heads".into());
    }
    if !model.num_attention_heads.is_multiple_of(model.num_query_groups) {
        return Err(format!(
            "num_attention_heads {} is no multiple of num_key_value_heads {}",
            model.num_attention_heads, model.num_query_groups
        ));
    }
    Ok((family, model))
}

fn gpt2(f: &mut Fields) -> std::result::Result<ModelConfig, String> {
    let hidden = f.int(&["n_embd", "hidden_size"])?;
    let heads = f.int(&["n_head", "num_attention_heads"])?;
    let positions = f.int(&["n_positions", "max_position_embeddings"])?;
    f.must("activation_function", json!("gelu_new"), &GELU_TANH)?;
    f.must_be("scale_attn_weights", true, true)?;
    f.must_be("scale_attn_by_inverse_layer_idx", false, false)?;
    let (embedding, residual) = (f.float("embd_pdrop", 0.1)?, f.float("resid_pdrop", 0.1)?);
    if embedding != residual {
        return Err(format!("embd_pdrop {embedding} and resid_pdrop {residual} differ; one dropout serves both here"));
    }
    f.ignore(&[
        "n_ctx",
        "reorder_and_upcast_attn",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ]);
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

fn llama(f: &mut Fields, family: Family) -> std::result::Result<ModelConfig, String> {
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
                    "attention_bias {attention} with mlp_bias {mlp}: biases here are in both or in none"
                ));
            }
            f.ignore(&["pretraining_tp"]); // the same sums, cut
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
        layers => Err(format!("{} is {layers}; more than {MOST_LAYERS} are taken for a mistake", names.join(" or "))),
    }
}

/// The attention's window and the layers that have none.
fn sliding_window(f: &mut Fields, family: Family, layers: usize) -> std::result::Result<Option<SlidingWindow>, String> {
    let mut size = match family {
        // What `MistralConfig` and `Qwen2Config` assume where the field is absent; null is none.
        Family::Mistral | Family::Qwen2 if !f.has("sliding_window") => Some(4096),
        Family::Mistral | Family::Qwen2 => f.optional_int("sliding_window")?,
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
                return Err(format!("layer_types holds {other}, which is not known"));
            }
            if types.iter().any(|t| t == SLIDING) && size.is_none() {
                return Err(format!("layer_types holds {SLIDING:?} without a sliding_window"));
            }
            if types.len() != layers {
                return Err(format!("layer_types names {} layers, and num_hidden_layers is {layers}", types.len()));
            }
            let listed: Vec<usize> = (0..layers).filter(|&layer| types[layer] == FULL).collect();
            // Mistral's layers are alike whatever is listed.
            if family == Family::Mistral && size.is_some() && !listed.is_empty() {
                return Err(format!(
                    "layer_types holds {FULL:?}, but the layers of a Mistral with a sliding_window are alike"
                ));
            }
            full_layers = listed;
        }
        None | Some(Value::Null) => {}
        Some(other) => return Err(format!("layer_types is {other}, not a list")),
    }
    Ok(size.filter(|_| full_layers.len() < layers).map(|size| SlidingWindow { size, full_layers }))
}

/// Base and scaling of rotary frequencies: `rope_theta` and `rope_scaling`, or both in `rope_parameters`.
fn rope(f: &mut Fields) -> std::result::Result<(f64, RopeScaling), String> {
    let outer = f.float("rope_theta", 10_000.0)?;
    let mut found = None;
    for name in ["rope_parameters", "rope_scaling"] {
        match f.take(name) {
            None | Some(Value::Null) => {}
            Some(Value::Object(map)) => found = Some((name, map)),
            Some(other) => return Err(format!("{name} is {other}, not an object")),
        }
    }
    let Some((name, map)) = found else { return Ok((outer, RopeScaling::None)) };
    let mut inner = Fields::new(map);
    let base = inner.float("rope_theta", outer)?;
    inner.must_number("partial_rotary_factor", 1.0)?;
    let kind = match inner.take("rope_type").or_else(|| inner.take("type")) {
        None => "default",
        Some(kind) => kind.as_str().ok_or_else(|| format!("{name}: rope_type is {kind}, not a name"))?,
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
            let (low, high) = (need(&mut inner, "low_freq_factor")?, need(&mut inner, "high_freq_factor")?);
            if low >= high {
                return Err(format!("{name}: low_freq_factor {low} must be below high_freq_factor {high}"));
            }
            let original_max_position = inner.int(&["original_max_position_embeddings"])?;
            RopeScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_max_position }
        }
        other => return Err(format!("{name} of type {other:?} is not known; known are default, linear, llama3")),
    };
    inner.finish().map_err(|why| format!("{name}: {why}"))?;
    Ok((base, scaling))
}

fn bloom(f: &mut Fields) -> std::result::Result<ModelConfig, String> {
    let hidden = f.int(&["hidden_size", "n_embed"])?;
    let heads = f.int(&["n_head", "num_attention_heads"])?;
    let positions = f.int_or("seq_length", UNLIMITED)?;
    f.must_be("apply_residual_connection_post_layernorm", false, false)?;
    let ffn = 4usize.saturating_mul(hidden);
    let inner = f.int_or("n_inner", ffn)?;
    if inner != ffn {
        return Err(format!("n_inner {inner} is not 4 · {hidden}, the only width a Bloom has"));
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

/// The family that a model belongs to.
///
/// # Errors
/// If none has all of its settings; the message says what each lacks.
pub fn family_of(m: &ModelConfig) -> Result<Family> {
    let layer_norm = m.normalization == Normalization::LayerNorm;
    let plain = layer_norm && !m.swiglu && m.bias_linear && m.num_query_groups == m.num_attention_heads;
    let square = m.num_attention_heads * m.head_dim == m.hidden_size;
    let qwen2 = m.qkv_bias && !m.bias_linear;
    if let Some(window) = &m.sliding_window {
        let llama = m.position_embedding == PositionEmbedding::Rope && !layer_norm && m.swiglu && !m.embed_layernorm;
        return match llama {
            true if qwen2 => Ok(Family::Qwen2),
            true if !m.bias_linear && window.full_layers.is_empty() => Ok(Family::Mistral),
            _ => Err(Error::config(
                "no Hugging Face family has this architecture with a sliding window: Mistral has rotary positions, RMSNorm, \
                 SwiGLU, no biases, and the window in every layer; Qwen2 has a QKV bias besides",
            )),
        };
    }
    match m.position_embedding {
        PositionEmbedding::LearnedAbsolute if plain && square && !m.embed_layernorm => Ok(Family::Gpt2),
        PositionEmbedding::Alibi if plain && square && m.embed_layernorm && m.ffn_hidden_size == 4 * m.hidden_size => {
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
            // Read by versions 4 and 5 alike; 4 would pass over rope_parameters.
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
        Family::Mistral => json["sliding_window"] = json!(m.sliding_window.as_ref().map(|window| window.size)),
        Family::Qwen2 => {
            json["use_sliding_window"] = json!(m.sliding_window.is_some());
            if let Some(window) = &m.sliding_window {
                let full = |layer: &usize| window.full_layers.contains(layer);
                let types: Vec<_> = (0..m.num_layers).map(|layer| if full(&layer) { FULL } else { SLIDING }).collect();
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
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: Value) -> std::result::Result<(Family, ModelConfig), String> {
        understand(json.as_object().unwrap())
    }

    fn llama() -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
            "intermediate_size": 96, "max_position_embeddings": 128, "num_attention_heads": 8, "num_hidden_layers": 2,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 100, "torch_dtype": "bfloat16",
            "bos_token_id": 1, "use_cache": true
        })
    }

    fn with(mut json: Value, key: &str, value: Value) -> Value {
        json[key] = value;
        json
    }

    #[test]
    fn a_written_config_reads_as_the_same_model() {
        let mut bases = vec![llama()];
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64});
        bases.push(with(llama(), "rope_scaling", llama3));
        bases.push(with(llama(), "rope_parameters", json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})));
        bases.push(with(with(llama(), "attention_bias", json!(true)), "mlp_bias", json!(true)));
        bases.push(json!({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64,
            "intermediate_size": 96, "max_position_embeddings": 128, "num_attention_heads": 8, "num_hidden_layers": 2,
            "vocab_size": 100, "tie_word_embeddings": true, "rope_theta": 1e6}));
        bases.push(mistral());
        let sliding = json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1});
        for layer_types in [Value::Null, json!(["sliding_attention", "full_attention"])] {
            let mut qwen2 = with(bases[4].clone(), "layer_types", layer_types);
            sliding.as_object().unwrap().iter().for_each(|(key, value)| qwen2[key] = value.clone());
            bases.push(qwen2);
        }
        bases.push(json!({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32,
            "vocab_size": 100}));
        bases.push(json!({"model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100,
            "seq_length": 64}));
        for json in bases {
            let (family, model) = read(json.clone()).unwrap();
            assert_eq!(family_of(&model).unwrap(), family, "{json}");
            let (again, same) = read(to_json(&model, family).into()).unwrap();
            assert_eq!((again, &same), (family, &model), "{json}");
        }
    }

    #[test]
    fn what_would_change_the_result_is_refused_by_name() {
        let refusals = [
            (with(llama(), "model_type", json!("mamba")), "mamba"),
            (
                with(llama(), "architectures", json!(["LlamaForSequenceClassification"])),
                "LlamaForSequenceClassification",
            ),
            (with(llama(), "hidden_act", json!("relu")), "hidden_act"),
            (with(llama(), "attention_bias", json!(true)), "attention_bias"),
            (with(llama(), "rope_scaling", json!({"type": "dynamic", "factor": 2.0})), "dynamic"),
            (with(llama(), "rope_scaling", json!({"rope_type": "linear"})), "factor"),
            (with(llama(), "rope_scaling", json!({"rope_type": "linear", "factor": 2, "beta": 3})), "beta"),
            (with(llama(), "quantization_config", json!({"bits": 4})), "quantization_config"),
            (with(llama(), "num_key_value_heads", json!(3)), "num_key_value_heads"),
            (with(llama(), "hidden_size", json!("64")), "hidden_size"),
            (with(llama(), "layer_types", json!(["linear_attention", "full_attention"])), "linear_attention"),
        ];
        for (json, name) in refusals {
            let why = read(json).unwrap_err();
            assert!(why.contains(name), "{why}");
        }
        let gpt2 = json!({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32,
            "vocab_size": 100});
        for (key, value) in [
            ("activation_function", json!("gelu")),
            ("scale_attn_by_inverse_layer_idx", json!(true)),
            ("scale_attn_weights", json!(false)),
            ("add_cross_attention", json!(true)),
            ("embd_pdrop", json!(0.2)),
        ] {
            let why = read(with(gpt2.clone(), key, value)).unwrap_err();
            assert!(why.contains(key), "{why}");
        }
    }

    /// The refusal of a file with this content.
    fn refusal(json: Value) -> String {
        let json = json.as_object().unwrap().clone();
        HfConfig::from_json(Path::new("config.json"), json).map(|config| format!("{config:?}")).unwrap_err().to_string()
    }

    #[test]
    fn impossible_models_are_refused_by_the_files_own_names() {
        let scaling = |json| with(llama(), "rope_scaling", json);
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64});
        let bloom = json!({"model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100});
        for (json, name) in [
            (with(llama(), "rms_norm_eps", json!(-1)), "(rms_norm_eps) must be a finite number above 0"),
            (with(llama(), "rope_theta", json!(0)), "(rope_theta) must be a finite number above 0"),
            (scaling(json!({"rope_type": "linear", "factor": 0})), "(factor in rope_scaling) must be a finite"),
            (scaling(llama3), "low_freq_factor 4 must be below high_freq_factor 4"),
            (with(mistral(), "sliding_window", json!(0)), "sliding_window = 0 must be at least 1"),
            (with(llama(), "attention_dropout", json!(5)), "attention_dropout = 5 must lie in [0, 1)"),
            (with(llama(), "max_position_embeddings", json!(0)), "(max_position_embeddings) must be at least 1"),
            (with(llama(), "num_hidden_layers", json!(0)), "(num_hidden_layers) must be at least 1"),
            (with(llama(), "num_hidden_layers", json!(2_000_000_000)), "num_hidden_layers is 2000000000"),
            (with(llama(), "vocab_size", json!(0)), "vocabulary without tokens"),
            (with(bloom.clone(), "n_layer", json!(2_000_000_000)), "num_hidden_layers is 2000000000"),
            (with(bloom, "layer_norm_epsilon", json!(0)), "(layer_norm_epsilon) must be a finite"),
        ] {
            let why = refusal(json);
            assert!(why.contains("config.json") && why.contains(name), "{name}: {why}");
        }
    }

    fn mistral() -> Value {
        let mistral = with(llama(), "architectures", json!(["MistralForCausalLM"]));
        with(with(mistral, "model_type", json!("mistral")), "sliding_window", json!(32))
    }

    #[test]
    fn layers_have_the_windows_that_the_family_gives_them() {
        let windows = |json| {
            let model = read(json).unwrap().1;
            assert_eq!(model.max_position_embeddings, 128);
            [model.window(0), model.window(1)]
        };
        assert_eq!(windows(llama()), [None; 2]);
        assert_eq!(windows(mistral()), [Some(32); 2]);
        assert_eq!(windows(with(mistral(), "sliding_window", Value::Null)), [None; 2]);
        let mut unsaid = mistral();
        unsaid.as_object_mut().unwrap().remove("sliding_window");
        assert_eq!(windows(unsaid), [Some(4096); 2]);
        let mixed = json!(["sliding_attention", "full_attention"]);
        let why = read(with(mistral(), "layer_types", mixed.clone())).unwrap_err();
        assert!(why.contains("layer_types"), "{why}");
        let qwen = with(with(llama(), "model_type", json!("qwen2")), "architectures", json!(["Qwen2ForCausalLM"]));
        let qwen = with(qwen, "sliding_window", json!(16));
        assert_eq!(windows(qwen.clone()), [None; 2]);
        let on = with(qwen, "use_sliding_window", json!(true));
        assert_eq!(windows(on.clone()), [None; 2]); // only layers from 28 on
        assert_eq!(windows(with(on.clone(), "max_window_layers", json!(1))), [None, Some(16)]);
        assert_eq!(windows(with(on.clone(), "max_window_layers", json!(0))), [Some(16); 2]);
        assert_eq!(windows(with(on.clone(), "layer_types", mixed)), [Some(16), None]);
        let why = read(with(on.clone(), "layer_types", json!(["sliding_attention"]))).unwrap_err();
        assert!(why.contains("layer_types"), "{why}");
        let mut unsaid = with(on, "max_window_layers", json!(1));
        assert_eq!(windows(with(unsaid.clone(), "sliding_window", Value::Null)), [None; 2]);
        unsaid.as_object_mut().unwrap().remove("sliding_window");
        assert_eq!(windows(unsaid), [None, Some(4096)]);
    }
}
