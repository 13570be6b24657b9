//! The architecture: as set, or as a Hugging Face folder describes it.

use megatron::config::{ModelConfig, PositionEmbedding, RopeScaling, SlidingWindow};

use super::{Required, Resolver};
use crate::cli::Gathered;
use crate::error::{Error, Result};

impl Resolver<'_> {
    /// The architecture of `init_from_hf`. Given settings may repeat it. They may choose settings
    /// of training (sample length, dropout, padding), and those that the weights are adapted to:
    /// the vocabulary size, the rotary base and, with relative positions, the longest sequence.
    pub(super) fn model_from_hf(
        &mut self,
        gathered: &Gathered,
        seq_length: usize,
    ) -> Result<ModelConfig> {
        let Some(hf) = self.hf.clone() else {
            return Err(Error::usage("internal error: no init_from_hf"));
        };
        let (m, origin) = (&self.flags.model, hf.path().display().to_string());
        let mut model = hf.model.clone();
        self.override_hf(&mut model, gathered)?;
        let given = |key: &str| gathered.origins.contains_key(key);
        let scaling = if given("rotary_seq_len_interpolation_factor") || given("use_rope_scaling") {
            Some(self.rope_scaling()?)
        } else {
            None
        };
        let text = |value: Option<usize>| value.map(|value| value.to_string());
        let here = |key: &str, value: String| given(key).then_some(value);
        let settings = [
            ("num_layers", text(m.num_layers), model.num_layers.to_string()),
            ("hidden_size", text(m.hidden_size), model.hidden_size.to_string()),
            ("ffn_hidden_size", text(m.ffn_hidden_size), model.ffn_hidden_size.to_string()),
            (
                "num_attention_heads",
                text(m.num_attention_heads),
                model.num_attention_heads.to_string(),
            ),
            ("num_query_groups", text(m.num_query_groups), model.num_query_groups.to_string()),
            (
                "group_query_attention",
                here("group_query_attention", m.group_query_attention.to_string()),
                (model.num_query_groups < model.num_attention_heads).to_string(),
            ),
            ("kv_channels", text(m.kv_channels), model.head_dim.to_string()),
            (
                "max_position_embeddings",
                text(m.max_position_embeddings),
                model.max_position_embeddings.to_string(),
            ),
            (
                "position_embedding_type",
                here("position_embedding_type", format!("{:?}", m.position_embedding_type)),
                format!("{:?}", model.position_embedding),
            ),
            (
                "sliding_window",
                text(m.sliding_window),
                model
                    .sliding_window
                    .as_ref()
                    .map_or("none".into(), |window| window.size.to_string()),
            ),
            (
                "rotary_base",
                here("rotary_base", m.rotary_base.to_string()),
                model.rotary_base.to_string(),
            ),
            (
                "use_rope_scaling",
                scaling.map(|s| format!("{s:?}")),
                format!("{:?}", model.rope_scaling),
            ),
            (
                "embed_layernorm",
                here("embed_layernorm", m.embed_layernorm.to_string()),
                model.embed_layernorm.to_string(),
            ),
            (
                "normalization",
                here("normalization", format!("{:?}", m.normalization)),
                format!("{:?}", model.normalization),
            ),
            (
                "norm_epsilon",
                here("norm_epsilon", m.norm_epsilon.to_string()),
                model.norm_epsilon.to_string(),
            ),
            ("swiglu", here("swiglu", m.swiglu.to_string()), model.swiglu.to_string()),
            (
                "disable_bias_linear",
                here("disable_bias_linear", m.disable_bias_linear.to_string()),
                (!model.bias_linear).to_string(),
            ),
            (
                "add_qkv_bias",
                here("add_qkv_bias", m.add_qkv_bias.to_string()),
                model.qkv_bias.to_string(),
            ),
            (
                "untie_embeddings_and_output_weights",
                here(
                    "untie_embeddings_and_output_weights",
                    m.untie_embeddings_and_output_weights.to_string(),
                ),
                model.untie_embeddings_and_output_weights.to_string(),
            ),
        ];
        let mut contradictions = Vec::new();
        for (key, given, theirs) in settings {
            match given {
                Some(ours) if ours != theirs => {
                    contradictions
                        .push(format!("{}, but it has {theirs}", self.origins.cite(key, ours)));
                }
                Some(_) => {}
                None => self.origins.record(key, &origin),
            }
        }
        if !contradictions.is_empty() {
            return Err(Error::usage(format!(
                "contradicting {origin}: {}; leave out flags of the architecture (only \
                 --vocab-size may differ and, with relative positions, --max-position-embeddings \
                 and --rotary-base)",
                contradictions.join(", ")
            )));
        }
        model.seq_length = seq_length;
        model.make_vocab_size_divisible_by = m.make_vocab_size_divisible_by;
        if given("attention_dropout") {
            model.attention_dropout = m.attention_dropout;
        }
        if given("hidden_dropout") {
            model.hidden_dropout = m.hidden_dropout;
        }
        model.vocab_size = 0; // until the data are opened
        Ok(model)
    }

    /// Applies the changes to a Hugging Face model for which its weights can be used.
    fn override_hf(&self, model: &mut ModelConfig, gathered: &Gathered) -> Result<()> {
        let m = &self.flags.model;
        if model.position_embedding == PositionEmbedding::Rope
            && gathered.origins.contains_key("rotary_base")
        {
            model.rotary_base = m.rotary_base;
        }
        if let Some(positions) = m.max_position_embeddings {
            if model.position_embedding == PositionEmbedding::LearnedAbsolute
                && positions != model.max_position_embeddings
            {
                return Err(Error::usage(format!(
                    "{}, but the model has learned {} positions and has weights only for these",
                    self.origins.cite("max_position_embeddings", positions),
                    model.max_position_embeddings
                )));
            }
            model.max_position_embeddings = positions;
        }
        Ok(())
    }

    pub(super) fn model(&mut self, required: &Required) -> Result<ModelConfig> {
        let m = &self.flags.model;
        let (hidden, heads) = (required.hidden_size, required.num_attention_heads);
        let head_dim = match m.kv_channels {
            Some(width) => width,
            None if heads > 0 && !hidden.is_multiple_of(heads) => {
                return Err(Error::usage(format!(
                    "{} must be a multiple of {}: {hidden} mod {heads} = {}; change one, or set the width of a head \
                     with kv_channels",
                    self.origins.cite("hidden_size", hidden),
                    self.origins.cite("num_attention_heads", heads),
                    hidden % heads
                )));
            }
            None => {
                self.origins.record("kv_channels", "default: hidden_size / num_attention_heads");
                hidden / heads.max(1)
            }
        };
        let (ffn, rule) = match m.swiglu {
            true => (
                hidden.saturating_mul(8) / 3 / 64 * 64,
                "hidden_size · 8/3, rounded down to a multiple of 64",
            ),
            false => (hidden.saturating_mul(4), "4 · hidden_size"),
        };
        // As in Megatron-LM, the switch alone means one group for all heads.
        let groups = if m.group_query_attention {
            ("1 with group_query_attention", 1)
        } else {
            ("num_attention_heads", heads)
        };
        let rope_scaling = self.rope_scaling()?;
        Ok(ModelConfig {
            num_layers: required.num_layers,
            hidden_size: hidden,
            ffn_hidden_size: self.derived("ffn_hidden_size", m.ffn_hidden_size, rule, || ffn),
            num_attention_heads: heads,
            num_query_groups: self.derived(
                "num_query_groups",
                m.num_query_groups,
                groups.0,
                || groups.1,
            ),
            head_dim,
            seq_length: required.seq_length,
            max_position_embeddings: self.derived(
                "max_position_embeddings",
                m.max_position_embeddings,
                "seq_length",
                || required.seq_length,
            ),
            position_embedding: m.position_embedding_type,
            rotary_base: m.rotary_base,
            rope_scaling,
            sliding_window: m
                .sliding_window
                .map(|size| SlidingWindow { size, full_layers: Vec::new() }),
            embed_layernorm: m.embed_layernorm,
            normalization: m.normalization,
            norm_epsilon: m.norm_epsilon,
            swiglu: m.swiglu,
            bias_linear: !m.disable_bias_linear,
            qkv_bias: m.add_qkv_bias,
            untie_embeddings_and_output_weights: m.untie_embeddings_and_output_weights,
            vocab_size: 0,
            make_vocab_size_divisible_by: m.make_vocab_size_divisible_by,
            attention_dropout: m.attention_dropout,
            hidden_dropout: m.hidden_dropout,
            init_method_std: m.init_method_std,
        })
    }

    fn rope_scaling(&mut self) -> Result<RopeScaling> {
        let m = &self.flags.model;
        let linear = m.rotary_seq_len_interpolation_factor;
        self.at_most_one(&[
            ("rotary_seq_len_interpolation_factor", linear.is_some()),
            ("use_rope_scaling", m.use_rope_scaling),
        ])?;
        Ok(match (linear, m.use_rope_scaling) {
            (Some(factor), _) => {
                let cited = self.origins.cite("rotary_seq_len_interpolation_factor", factor);
                self.origins.record("rope_scaling_factor", cited);
                RopeScaling::Linear { factor }
            }
            (None, true) => RopeScaling::llama3(m.rope_scaling_factor),
            (None, false) => RopeScaling::None,
        })
    }
}
