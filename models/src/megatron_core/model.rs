//! A Megatron-LM checkpoint as a model's parameters, read one at a time.

use std::collections::BTreeSet;
use std::path::Path;

use megatron::checkpoint::Float;
use megatron::config::ModelConfig;
use megatron::params::ParamSpec;
use megatron::{Error, Result, files};

use super::archive::Archive;
use super::config::{Args, Vocabulary};
use super::folder::checkpoint_folder;
use super::pickle::Pickle;
use super::storage::Storage;
use crate::Gpt;
use crate::bounds::bounded;

const COMMON: &str = "common.pt";
/// Maximum bytes of the common part: the arguments, and groups of the optimizer's parameters.
const MAX_COMMON_BYTES: u64 = 64 << 20;
const WORD_EMBEDDINGS: &str = "embedding.word_embeddings.weight";
const OUTPUT_LAYER: &str = "output_layer.weight";
const LAYERS: &str = "decoder.layers.";
/// Names of a normalization that one kernel may fuse with the following product: theirs, ours.
const NORMS: [(&str, &str); 2] = [
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
];
/// Maximum number of differences that a message lists.
const SHOWN: usize = 8;

/// The model in a checkpoint. Every tensor belongs to a parameter, and every parameter has its
/// tensor.
pub struct MegatronModel {
    storage: Storage,
    model: ModelConfig,
    vocabulary: Vocabulary,
    iteration: Option<usize>,
    parameters: Vec<Planned>,
}

struct Planned {
    spec: ParamSpec,
    dtype: Float,
    /// Name of their tensor; if it holds all layers, `layer` is the layer's index in it.
    key: String,
    layer: Option<usize>,
}

impl MegatronModel {
    /// Opens the checkpoint in `folder` (`…/iter_0000100`), or the latest of those in it.
    /// `vocab_size` is the tokenizer's number of tokens, which the checkpoint may not record.
    /// Weights are not read yet.
    ///
    /// # Errors
    /// If its format is not supported, it is damaged, or its model has an unsupported feature;
    /// messages name what is wrong.
    pub fn open(folder: &Path, vocab_size: Option<usize>) -> Result<Self> {
        let folder = checkpoint_folder(folder)?;
        let path = folder.join(COMMON);
        let refuse = |why: String| Error::checkpoint(&path, why);
        let file = files::open_binary(&path).map_err(|e| Error::io("open", &path, e))?;
        let size = file.metadata().map_err(|e| Error::io("find", &path, e))?.len();
        let bytes = Archive::open(file, 0, size)
            .and_then(|mut common| common.pickle(MAX_COMMON_BYTES))
            .map_err(refuse)?;
        let common = Pickle::parse(&bytes).map_err(refuse)?;
        let args = Args::of(common.root()).map_err(refuse)?;
        let storage = Storage::open(&folder)?;
        let words = storage.tensors().get(WORD_EMBEDDINGS).and_then(|words| words.shape.first());
        let padded = *words
            .ok_or_else(|| Error::checkpoint(&folder, format!("{WORD_EMBEDDINGS} is missing")))?;
        let (model, vocabulary) = args.model(padded, vocab_size).map_err(refuse)?;
        let iteration = args.optional_int("iteration").map_err(refuse)?;
        let parameters =
            plan(&model, padded, &storage).map_err(|why| Error::checkpoint(&folder, why))?;
        Ok(Self { storage, model, vocabulary, iteration, parameters })
    }

    /// Names, shapes and dtypes of the parameters, in forward order.
    pub fn parameters(&self) -> impl Iterator<Item = (&str, &[usize], Float)> {
        self.parameters
            .iter()
            .map(|Planned { spec, dtype, .. }| (spec.name.as_str(), spec.shape.as_slice(), *dtype))
    }

    /// Reads the parameter at `index` of [`MegatronModel::parameters`]: global, unpadded,
    /// row-major, little-endian.
    ///
    /// # Errors
    /// If a file is damaged or cannot be read, or a tensor holds NaN or infinity.
    pub fn read(&self, index: usize) -> Result<Vec<u8>> {
        let Planned { spec, dtype, key, layer } = &self.parameters[index];
        let stacked = layer.map(|_| 1);
        let start: Vec<usize> = layer.iter().copied().chain(spec.shape.iter().map(|_| 0)).collect();
        let shape: Vec<usize> = stacked.into_iter().chain(spec.shape.iter().copied()).collect();
        let bytes = self.storage.read(key, *dtype, &start, &shape)?;
        match dtype.non_number(&bytes) {
            None => Ok(bytes),
            Some(what) => Err(Error::checkpoint(
                self.storage.folder(),
                format!(
                    "{key} holds {what} (in {}): training diverged before it was saved; use an earlier checkpoint",
                    spec.name
                ),
            )),
        }
    }

    /// Settings of the model.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// The size of the vocabulary and its source.
    pub fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    /// The iteration at which it was saved, if recorded.
    pub fn iteration(&self) -> Option<usize> {
        self.iteration
    }

    /// Whether it also holds an optimizer state.
    pub fn has_optimizer(&self) -> bool {
        self.storage.has_optimizer
    }
}

/// Assigns tensors, or layers of a tensor, to parameters.
fn plan(
    model: &ModelConfig,
    padded: usize,
    storage: &Storage,
) -> std::result::Result<Vec<Planned>, String> {
    let tensors = storage.tensors();
    let largest = tensors.values().flat_map(|tensor| &tensor.shape).copied().max().unwrap_or(0);
    // All layers may be in one tensor.
    bounded(model, largest, largest.max(tensors.len())).map_err(|why| {
        format!("its args describe a model that is too large for its tensors: {why}")
    })?;
    let specs = Gpt::specs(model).map_err(|e| e.to_string())?;
    let (mut parameters, mut used, mut problems) = (Vec::new(), BTreeSet::new(), Vec::new());
    for spec in specs {
        let (layer, stacked, own) = keys(&spec.name);
        // One tensor for all layers, or one tensor for each.
        let (key, layer) =
            if tensors.contains_key(&stacked) { (stacked, layer) } else { (own, None) };
        let mut shape = spec.shape.clone();
        if [WORD_EMBEDDINGS, OUTPUT_LAYER].contains(&key.as_str()) {
            shape[0] = padded;
        }
        if layer.is_some() {
            shape.insert(0, model.num_layers);
        }
        match tensors.get(&key) {
            None => problems.push(format!("{key} is missing (for {})", spec.name)),
            Some(stored) if stored.shape != shape => {
                problems.push(format!(
                    "{key} has shape {:?}, but its args make it {shape:?}",
                    stored.shape
                ));
            }
            Some(stored) => match stored.dtype {
                None => problems
                    .push(format!("{key} is of a dtype other than float32, bfloat16, float16")),
                Some(dtype) => parameters.push(Planned { spec, dtype, key: key.clone(), layer }),
            },
        }
        used.insert(key);
    }
    let unused = tensors.keys().filter(|key| !used.contains(*key));
    problems.extend(unused.map(|key| format!("{key} belongs to no parameter")));
    problems.dedup();
    if problems.is_empty() {
        return Ok(parameters);
    }
    let more = problems.len().saturating_sub(SHOWN);
    problems.truncate(SHOWN);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    Err(format!(
        "its tensors do not match the model that its args describe: {}{more}",
        problems.join("; ")
    ))
}

/// A parameter's layer, and the name of its tensor in two cases: if the tensor holds all layers,
/// and if it holds only this one.
fn keys(ours: &str) -> (Option<usize>, String, String) {
    let split = ours.strip_prefix(LAYERS).and_then(|rest| rest.split_once('.'));
    let Some((layer, part)) = split.and_then(|(layer, part)| Some((layer.parse().ok()?, part)))
    else {
        return (None, ours.into(), ours.into());
    };
    let norm = NORMS
        .iter()
        .find_map(|(theirs, ours)| Some(format!("{theirs}{}", part.strip_prefix(ours)?)));
    let part = norm.unwrap_or_else(|| part.into());
    (Some(layer), format!("{LAYERS}{part}"), format!("{LAYERS}{layer}.{part}"))
}
