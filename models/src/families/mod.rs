//! Families of Hugging Face models. Each has one table of the tensors of each parameter, used in
//! both directions.
//!
//! Sources: `transformers` `modeling_{gpt2,llama,mistral,qwen2,bloom}.py`.
//!
//! ```
//! use megatron::config::{ModelConfig, Normalization, PositionEmbedding};
//! use models::Gpt;
//! use models::families::{Family, Transform};
//!
//! # fn main() -> megatron::Result<()> {
//! let llama = ModelConfig {
//!     position_embedding: PositionEmbedding::Rope,
//!     normalization: Normalization::RMSNorm,
//!     swiglu: true,
//!     bias_linear: false,
//!     ..Default::default()
//! };
//! let plan = Family::Llama.plan(&Gpt::specs(&llama)?).unwrap();
//! let qkv = plan.iter().find(|planned| planned.spec.name.ends_with("linear_qkv.weight")).unwrap();
//! // One parameter here, three tensors in the file.
//! assert_eq!(qkv.theirs[0], "model.layers.0.self_attn.q_proj.weight");
//! assert_eq!(qkv.theirs.len(), 3);
//! assert!(matches!(qkv.transform, Transform::QkvFromParts));
//!
//! // Llama has no learned positions.
//! let gpt2 = Gpt::specs(&ModelConfig::default())?;
//! assert!(Family::Llama.plan(&gpt2).unwrap_err().contains("position"));
//! assert!(Family::Gpt2.plan(&gpt2).is_ok());
//! # Ok(())
//! # }
//! ```

mod bloom;
mod gpt2;
mod llama;
mod transform;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use megatron::checkpoint::Float;
use megatron::params::ParamSpec;

pub use transform::{QkvShape, Transform};

/// A family of architectures with the same tensor names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// GPT-2: fused QKV, weights stored as `[in, out]`.
    Gpt2,
    /// Llama: rotary positions, RMSNorm, SwiGLU.
    Llama,
    /// Mistral: Llama with a sliding window.
    Mistral,
    /// Qwen2: Llama with QKV biases.
    Qwen2,
    /// Bloom: fused QKV, ALiBi.
    Bloom,
}

impl Family {
    /// All supported families.
    pub const ALL: [Self; 5] = [Self::Gpt2, Self::Llama, Self::Mistral, Self::Qwen2, Self::Bloom];

    /// `model_type` in `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Gpt2 => "gpt2",
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Bloom => "bloom",
        }
    }

    /// The class under `architectures` in `config.json`: the one with a language-model head.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Gpt2 => "GPT2LMHeadModel",
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Bloom => "BloomForCausalLM",
        }
    }

    fn map(self) -> &'static WeightMap {
        match self {
            Self::Gpt2 => &gpt2::MAP,
            Self::Llama | Self::Mistral | Self::Qwen2 => &llama::MAP,
            Self::Bloom => &bloom::MAP,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.model_type())
    }
}

/// The tensor names of a family. `{}` stands for the index of a layer.
struct WeightMap {
    /// Prefix of all names except the output matrix's. Files of a bare model omit it.
    prefix: &'static str,
    rules: &'static [Rule],
    /// Tensors in some files that affect nothing: masks, tables.
    ignorable: &'static [&'static str],
}

/// The conversion between a parameter and the tensors of a file.
struct Rule {
    ours: &'static str,
    theirs: &'static [&'static str],
    transform: Transform,
}

const fn rule(ours: &'static str, theirs: &'static [&'static str], transform: Transform) -> Rule {
    Rule { ours, theirs, transform }
}

/// The output matrix, whose name has no prefix.
pub const LM_HEAD: &str = "lm_head.weight";
pub(crate) const OUTPUT_LAYER: &str = "output_layer.weight";
pub(crate) const WORD_EMBEDDINGS: &str = "embedding.word_embeddings.weight";

/// A parameter and its tensors in a file.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The parameter, with this library's name and shape.
    pub spec: ParamSpec,
    /// Names in the file, in the order that `transform` takes.
    pub theirs: Vec<String>,
    /// The conversion between their values and the parameter's.
    pub transform: Transform,
}

/// The tensors of a file by name: dtype, if it is a floating-point dtype, and shape.
pub type Tensors = BTreeMap<String, (Option<Float>, Vec<usize>)>;

/// Maximum number of differences that a message lists.
const SHOWN: usize = 8;

/// The sources of a model's parameters.
#[derive(Debug)]
pub struct Plan {
    /// One entry per spec, in the same order.
    pub parameters: Vec<Planned>,
    /// Present if the file of a tied model has an output matrix, too: the name of the tensor that the
    /// matrix must equal.
    pub tied_head: Option<String>,
}

impl Family {
    /// The tensors of every parameter in `specs`, with the names of `transformers`.
    ///
    /// # Errors
    /// A sentence that names a parameter which the family does not have.
    pub fn plan(self, specs: &[ParamSpec]) -> Result<Vec<Planned>, String> {
        specs.iter().map(|spec| self.planned(spec, true)).collect()
    }

    fn planned(self, spec: &ParamSpec, prefixed: bool) -> Result<Planned, String> {
        let map = self.map();
        let (layer, pattern) = match split_layer(&spec.name) {
            Some((layer, part)) => (layer, format!("decoder.layers.{{}}.{part}")),
            None => ("", spec.name.clone()),
        };
        if spec.name == OUTPUT_LAYER {
            return Ok(Planned {
                spec: spec.clone(),
                theirs: vec![LM_HEAD.into()],
                transform: Transform::Copy,
            });
        }
        let rule = map.rules.iter().find(|rule| rule.ours == pattern);
        let rule = rule.ok_or_else(|| {
            format!("{self} models have no tensor for the parameter {}", spec.name)
        })?;
        let prefix = if prefixed { map.prefix } else { "" };
        let theirs = rule
            .theirs
            .iter()
            .map(|name| format!("{prefix}{}", name.replacen("{}", layer, 1)))
            .collect();
        Ok(Planned { spec: spec.clone(), theirs, transform: rule.transform })
    }

    /// As [`plan`](Self::plan), for the tensors of a file. Checks that the file holds all of them
    /// in the right shape and nothing else.
    ///
    /// # Errors
    /// A sentence that names the tensor that is missing, unknown, or of another shape.
    pub fn plan_file(
        self,
        specs: &[ParamSpec],
        qkv: &QkvShape,
        tensors: &Tensors,
    ) -> Result<Plan, String> {
        let prefix = self.map().prefix;
        let prefixed = tensors.keys().any(|name| name.starts_with(prefix));
        let parameters: Vec<Planned> =
            specs.iter().map(|spec| self.planned(spec, prefixed)).collect::<Result<_, _>>()?;
        let mut used = BTreeSet::new();
        let mut problems = Vec::new();
        for parameter in &parameters {
            let shapes = parameter.transform.their_shapes(&parameter.spec.shape, qkv);
            let mut dtypes = BTreeSet::new();
            for (name, shape) in parameter.theirs.iter().zip(shapes) {
                used.insert(name.as_str());
                match tensors.get(name) {
                    None => {
                        problems.push(format!("{name} is missing (for {})", parameter.spec.name))
                    }
                    Some((_, theirs)) if *theirs != shape => {
                        problems.push(format!(
                            "{name} has shape {theirs:?}, but config.json makes it {shape:?}"
                        ));
                    }
                    Some((None, _)) => problems
                        .push(format!("{name} is of a dtype other than f32, bf16, f16, f64")),
                    Some((Some(dtype), _)) => {
                        dtypes.insert(dtype.to_string());
                    }
                }
            }
            if dtypes.len() > 1 {
                problems.push(format!(
                    "{} form one parameter but have different dtypes",
                    parameter.theirs.join(", ")
                ));
            }
        }
        let tied = !specs.iter().any(|spec| spec.name == OUTPUT_LAYER);
        let head = tensors.contains_key(LM_HEAD) && tied;
        for name in tensors.keys().filter(|name| !used.contains(name.as_str())) {
            if !(head && name == LM_HEAD
                || self.ignorable(name.strip_prefix(prefix).unwrap_or(name)))
            {
                problems.push(format!("{name} belongs to no parameter"));
            }
        }
        if problems.is_empty() {
            let words = parameters.iter().find(|parameter| parameter.spec.name == WORD_EMBEDDINGS);
            let tied_head = words.filter(|_| head).map(|words| words.theirs[0].clone());
            return Ok(Plan { parameters, tied_head });
        }
        let more = problems.len().saturating_sub(SHOWN);
        problems.truncate(SHOWN);
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        Err(format!(
            "the tensors do not match the {self} model that config.json describes: {}{more}",
            problems.join("; ")
        ))
    }

    fn ignorable(self, name: &str) -> bool {
        self.map().ignorable.iter().any(|pattern| match pattern.split_once("{}") {
            Some((before, after)) => {
                name.strip_prefix(before).and_then(|rest| rest.strip_suffix(after)).is_some_and(
                    |layer| !layer.is_empty() && layer.bytes().all(|b| b.is_ascii_digit()),
                )
            }
            None => name == *pattern,
        })
    }
}

/// `decoder.layers.3.mlp.linear_fc1.weight` → (`3`, `mlp.linear_fc1.weight`)
fn split_layer(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix("decoder.layers.")?.split_once('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_and_tables_are_ignorable_and_near_misses_are_not() {
        assert!(Family::Gpt2.ignorable("h.11.attn.bias"));
        assert!(!Family::Gpt2.ignorable("h.11.attn.c_attn.bias"));
        assert!(!Family::Gpt2.ignorable("h.x.attn.bias"));
        assert!(Family::Llama.ignorable("layers.0.self_attn.rotary_emb.inv_freq"));
    }

    #[test]
    fn no_parameter_and_no_tensor_is_in_two_rules_of_a_family() {
        for family in Family::ALL {
            let rules = family.map().rules;
            let ours: BTreeSet<_> = rules.iter().map(|rule| rule.ours).collect();
            let theirs: BTreeSet<_> = rules.iter().flat_map(|rule| rule.theirs).collect();
            assert_eq!(ours.len(), rules.len());
            assert_eq!(theirs.len(), rules.iter().map(|rule| rule.theirs.len()).sum::<usize>());
        }
    }
}
