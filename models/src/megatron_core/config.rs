//! Converts Megatron-LM's arguments, as its checkpoints record them, to a [`ModelConfig`]. A
//! setting that would change the result but is not supported is refused by name.
//!
//! `megatron/training/arguments.py` (`core_transformer_config_from_args`, `validate_args`),
//! `megatron/core/transformer/mlp.py`.

use megatron::config::{
    ModelConfig, Normalization, Origins, ParallelConfig, PositionEmbedding, RopeScaling,
};

use super::pickle::Value;

type Read<T> = std::result::Result<T, String>;

/// A larger number is considered a mistake.
const MOST_LAYERS: usize = 1 << 16;

/// Arguments that must be absent, None, False, 0 or empty.
const UNAVAILABLE: [&str; 30] = [
    "activation_func_clamp_value",
    "apply_layernorm_1p",
    "apply_residual_connection_post_layernorm",
    "attention_output_gate",
    "experimental_attention_variant",
    "glu_linear_offset",
    "heterogeneous_layers_config_encoded_json",
    "heterogeneous_layers_config_path",
    "hybrid_attention_ratio",
    "hybrid_layer_pattern",
    "hybrid_mlp_ratio",
    "hybrid_override_pattern",
    "is_hybrid_model",
    "layernorm_zero_centered_gamma",
    "linear_attention_freq",
    "linear_attention_type",
    "mtp_num_layers",
    "multi_latent_attention",
    "no_rope_freq",
    "num_experts",
    "qk_l2_norm",
    "qk_layernorm",
    "quick_geglu",
    "retro_add_retriever",
    "rotary_interleaved",
    "softmax_scale",
    "spec",
    "squared_relu",
    "use_mup",
    "window_size",
];

/// The number of tokens of a model, and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vocabulary {
    /// Given by the caller of the import.
    Given(usize),
    /// Recorded in `vocab_size`.
    Recorded(usize),
    /// Unknown; all rows of the padded matrix count as tokens.
    Padded(usize),
}

impl Vocabulary {
    /// The number of tokens, whatever the source.
    pub fn size(self) -> usize {
        let (Self::Given(size) | Self::Recorded(size) | Self::Padded(size)) = self;
        size
    }
}

/// The arguments of a run of Megatron-LM: an `argparse.Namespace`.
#[derive(Clone, Copy)]
pub struct Args<'p>(Value<'p>);

impl<'p> Args<'p> {
    /// The arguments in the common part of a checkpoint.
    ///
    /// # Errors
    /// If there are none.
    pub fn of(common: Value<'p>) -> Read<Self> {
        let args = common.get("args").ok_or(
            "has no args, which Megatron-LM records, so the architecture is unknown (NeMo and \
             direct use of dist_checkpointing write none); export the model to Hugging Face's \
             format with the tool that trained it, and import that",
        )?;
        match args.class() {
            Some(("argparse", "Namespace")) if args.state().and_then(Value::entries).is_some() => {
                Ok(Self(args))
            }
            _ => Err(format!("its args are {}, not an argparse.Namespace", args.shown())),
        }
    }

    fn get(self, name: &str) -> Option<Value<'p>> {
        self.0.attribute(name).filter(|value| !value.is_none())
    }

    fn read<T>(
        self,
        name: &str,
        kind: &str,
        read: impl Fn(Value<'p>) -> Option<T>,
    ) -> Read<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| format!("{name} is {}, not {kind}", value.shown()))
    }

    pub fn optional_int(self, name: &str) -> Read<Option<usize>> {
        // Larger numbers are not sizes of a model and would only overflow.
        self.read(name, "a whole number in the supported range", |value| {
            value.size().filter(|&size| size < 1 << 31)
        })
    }

    fn int(self, name: &str) -> Read<usize> {
        self.optional_int(name)?.ok_or_else(|| format!("has no {name}"))
    }

    fn optional_float(self, name: &str) -> Read<Option<f64>> {
        self.read(name, "a number", Value::float)
    }

    fn bool(self, name: &str, default: bool) -> Read<bool> {
        Ok(self.read(name, "True or False", Value::bool)?.unwrap_or(default))
    }

    fn name(self, name: &str) -> Read<Option<&'p str>> {
        self.read(name, "a name", Value::str)
    }

    fn refuse_unavailable(self) -> Read<()> {
        let silent = |value: Value| {
            value.bool() == Some(false)
                || value.float() == Some(0.0)
                || value.str() == Some("")
                || value.items().is_some_and(|i| i.len() == 0)
        };
        let set = UNAVAILABLE
            .into_iter()
            .filter_map(|name| Some((name, self.get(name).filter(|value| !silent(*value))?)));
        let set: Vec<String> =
            set.map(|(name, value)| format!("{name} = {}", value.shown())).collect();
        if set.is_empty() {
            Ok(())
        } else {
            Err(format!("has settings that are not supported: {}", set.join(", ")))
        }
    }

    /// How many of `padded` rows are tokens.
    fn vocabulary(self, padded: usize, given: Option<usize>) -> Read<Vocabulary> {
        if let Some(size) = given {
            return match size {
                0 => Err("--vocab-size 0: a vocabulary has at least one token".into()),
                _ if size > padded => Err(format!(
                    "--vocab-size {size} is more than the {padded} rows of its word embeddings"
                )),
                _ => Ok(Vocabulary::Given(size)),
            };
        }
        let Some(recorded) = self.optional_int("vocab_size")? else {
            return Ok(Vocabulary::Padded(padded));
        };
        // NullTokenizer adds an end-of-document token to this number.
        let size = if self.name("tokenizer_type")? == Some("NullTokenizer") {
            recorded + 1
        } else {
            recorded
        };
        let tp = self.optional_int("tensor_model_parallel_size")?.unwrap_or(1);
        let multiple = self
            .optional_int("make_vocab_size_divisible_by")?
            .unwrap_or(128)
            .saturating_mul(tp)
            .max(1);
        // In Megatron-LM, too, the tokenizer decides: a size that pads to a different number of
        // rows is not the model's.
        let same = size > 0 && size.checked_next_multiple_of(multiple) == Some(padded);
        Ok(if same { Vocabulary::Recorded(size) } else { Vocabulary::Padded(padded) })
    }

    /// The architecture of a model whose word embeddings have `padded` rows. `given` is the number
    /// of tokens among them.
    ///
    /// # Errors
    /// If it has an unsupported feature, or settings are missing or contradictory; the message
    /// names the argument.
    pub fn model(self, padded: usize, given: Option<usize>) -> Read<(ModelConfig, Vocabulary)> {
        self.refuse_unavailable()?;
        if let Some(recorded) = self.optional_int("padded_vocab_size")?
            && recorded != padded
        {
            return Err(format!(
                "padded_vocab_size is {recorded}, but its word embeddings have {padded} rows"
            ));
        }
        if let Some(kind) = self.name("softmax_type")?.filter(|kind| *kind != "vanilla") {
            return Err(format!("softmax_type {kind:?} is not supported; only \"vanilla\" is"));
        }
        let vocabulary = self.vocabulary(padded, given)?;
        let (layers, hidden, heads) =
            (self.int("num_layers")?, self.int("hidden_size")?, self.int("num_attention_heads")?);
        if layers > MOST_LAYERS {
            return Err(format!(
                "num_layers is {layers}; more than {MOST_LAYERS} count as a mistake"
            ));
        }
        // Without this flag num_query_groups has no meaning.
        let groups = if self.bool("group_query_attention", false)? {
            self.int("num_query_groups")?
        } else {
            heads
        };
        if heads == 0 || groups == 0 || !heads.is_multiple_of(groups) {
            return Err(format!(
                "num_attention_heads {heads} is not a multiple of {groups} query groups"
            ));
        }
        let bias_linear = self.bool("add_bias_linear", true)?;
        let positions = self.int("max_position_embeddings")?;
        let (position_embedding, rotary_base, rope_scaling) = self.positions()?;
        let epsilon =
            match (self.optional_float("norm_epsilon")?, self.optional_float("layernorm_epsilon")?)
            {
                (Some(one), Some(other)) if one != other => {
                    return Err(format!("norm_epsilon {one} and layernorm_epsilon {other} differ"));
                }
                (one, other) => one.or(other).ok_or("has no norm_epsilon")?,
            };
        let model = ModelConfig {
            num_layers: layers,
            hidden_size: hidden,
            ffn_hidden_size: self.int("ffn_hidden_size")?,
            num_attention_heads: heads,
            num_query_groups: groups,
            head_dim: self.optional_int("kv_channels")?.unwrap_or(hidden / heads),
            seq_length: self.optional_int("seq_length")?.unwrap_or(positions),
            max_position_embeddings: positions,
            position_embedding,
            rotary_base,
            rope_scaling,
            sliding_window: None,
            embed_layernorm: false,
            normalization: match self.name("normalization")?.unwrap_or("LayerNorm") {
                "LayerNorm" => Normalization::LayerNorm,
                "RMSNorm" => Normalization::RMSNorm,
                other => {
                    return Err(format!(
                        "normalization {other:?} is not supported; LayerNorm and RMSNorm are"
                    ));
                }
            },
            norm_epsilon: epsilon,
            swiglu: self.swiglu(bias_linear)?,
            bias_linear,
            qkv_bias: !bias_linear && self.bool("add_qkv_bias", false)?,
            untie_embeddings_and_output_weights: self
                .bool("untie_embeddings_and_output_weights", false)?,
            vocab_size: vocabulary.size(),
            make_vocab_size_divisible_by: self
                .optional_int("make_vocab_size_divisible_by")?
                .unwrap_or(128),
            attention_dropout: self.optional_float("attention_dropout")?.unwrap_or(0.1),
            hidden_dropout: self.optional_float("hidden_dropout")?.unwrap_or(0.1),
            init_method_std: self.optional_float("init_method_std")?.unwrap_or(0.02),
        };
        let valid = ParallelConfig::default().validate_with(&model, &Origins::default());
        valid.map_err(|e| format!("describes an impossible model: {e}"))?;
        Ok((model, vocabulary))
    }

    fn positions(self) -> Read<(PositionEmbedding, f64, RopeScaling)> {
        let kind = self.name("position_embedding_type")?.ok_or("has no position_embedding_type")?;
        let plain = |kind| Ok((kind, 10_000.0, RopeScaling::None));
        match kind {
            "learned_absolute" => return plain(PositionEmbedding::LearnedAbsolute),
            "none" => return plain(PositionEmbedding::None),
            "rope" => {}
            other => {
                return Err(format!(
                    "position_embedding_type {other:?} is not supported; learned_absolute, rope and none are"
                ));
            }
        }
        if let Some(part) = self.optional_float("rotary_percent")?.filter(|part| *part != 1.0) {
            return Err(format!("rotary_percent {part} is not supported; only 1 is"));
        }
        let interpolation = self.optional_float("rotary_seq_len_interpolation_factor")?;
        let scaling = match (self.bool("use_rope_scaling", false)?, interpolation) {
            (true, Some(factor)) => {
                return Err(format!(
                    "use_rope_scaling with rotary_seq_len_interpolation_factor {factor} is not supported"
                ));
            }
            (true, None) => {
                RopeScaling::llama3(self.optional_float("rope_scaling_factor")?.unwrap_or(8.0))
            }
            (false, Some(factor)) => RopeScaling::Linear { factor },
            (false, None) => RopeScaling::None,
        };
        Ok((
            PositionEmbedding::Rope,
            self.optional_float("rotary_base")?.unwrap_or(10_000.0),
            scaling,
        ))
    }

    /// Whether the MLP is SwiGLU. Megatron's GELU is exact (erf), except in its kernel with fused
    /// bias, which uses the tanh approximation, as the MLP here does.
    fn swiglu(self, bias_linear: bool) -> Read<bool> {
        if self.bool("swiglu", false)? {
            return Ok(true);
        }
        let fused = self.bool("bias_gelu_fusion", false)? && bias_linear;
        if !fused || self.bool("use_te_activation_func", false)? {
            return Err(
                "computes GELU exactly (bias_gelu_fusion False, or add_bias_linear False), which \
                 is not supported; GELU with tanh (bias_gelu_fusion True) and SwiGLU are"
                    .into(),
            );
        }
        Ok(false)
    }
}
