//! What a checkpoint holds.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use indicatif::{DecimalBytes, HumanCount};
use megatron::checkpoint::{Manifest, TensorEntry};
use megatron::config::{ModelConfig, PositionEmbedding};
use megatron::params::StateKind;
use megatron::train::{GPT, saved_run};
use models::SavedGpt;

use super::{fact, short};
use crate::commands::reshard::describe_layout;
use crate::error::Result;
use crate::report::ByteBar;

/// Prints what the checkpoint in folder `path` (`…/iter_0000100`) holds; with `verify`, reads all
/// of it.
pub fn inspect(path: &Path, verify: bool) -> Result<()> {
    let manifest = Manifest::read(path)?;
    let on_disk: u64 = manifest.files.values().sum();
    fact("checkpoint", path.display());
    fact("iteration", HumanCount(manifest.iteration));
    fact("files", format!("{} with {}", manifest.files.len(), DecimalBytes(on_disk)));
    parameters(&manifest);
    for (kind, tensors) in by(&manifest.tensors, |tensor| tensor.kind) {
        let dtypes: BTreeSet<String> =
            tensors.iter().map(|tensor| tensor.dtype.to_string()).collect();
        let bytes = tensors.iter().map(|tensor| tensor.bytes()).sum();
        let dtypes = Vec::from_iter(dtypes).join(", ");
        fact(
            "state",
            format!("{kind:<12}{dtypes}, {} tensors, {}", tensors.len(), DecimalBytes(bytes)),
        );
    }
    let run = saved_run(path, &manifest.state)?;
    let saved = if run.architecture == GPT { Some(SavedGpt::new(manifest.clone())?) } else { None };
    let progress = run.progress;
    fact(
        "model",
        match &saved {
            Some(saved) => model(&saved.run.model),
            None => {
                format!("'{}', of another program: only its tensors are known", run.architecture)
            }
        },
    );
    fact(
        "progress",
        format!(
            "{} samples, {} updates, {} skipped steps",
            HumanCount(progress.consumed_samples),
            HumanCount(progress.updates),
            HumanCount(progress.skipped_iterations)
        ),
    );
    fact("written by", run.parallel.as_ref().map_or("no run".to_string(), describe_layout));
    saved.iter().for_each(fits);
    let chunks: usize = manifest.tensors.iter().map(|tensor| tensor.chunks.len()).sum();
    if verify {
        let bar = ByteBar::new("checking", manifest.data_bytes());
        manifest.verify(&mut |bytes| bar.add(bytes))?;
        bar.finish();
        let chunks = HumanCount(chunks as u64);
        fact(
            "whole",
            format!(
                "yes: every element is present once, and the checksums of all {chunks} chunks match"
            ),
        );
    } else {
        fact("whole", "every element is present once; checksums were not checked (--verify=false)");
    }
    Ok(())
}

/// Prints the layouts that a run of the model can use.
fn fits(saved: &SavedGpt) {
    let sizes = saved.tensor_parallel_sizes();
    let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
    let layers = saved.run.model.num_layers;
    let groups = saved.run.model.num_query_groups;
    let cp =
        if groups > 1 { format!(" · cp where tp · cp divides {groups}") } else { String::new() };
    fact(
        "fits",
        format!("tp {}{cp} · pp 1 to {layers} · any dp, with any stage of ZeRO", sizes.join(", ")),
    );
}

/// Prints the tensors grouped by a property.
fn by<K: Ord>(
    tensors: &[TensorEntry],
    key: impl Fn(&TensorEntry) -> K,
) -> BTreeMap<K, Vec<&TensorEntry>> {
    let mut groups: BTreeMap<K, Vec<&TensorEntry>> = BTreeMap::new();
    tensors.iter().for_each(|tensor| groups.entry(key(tensor)).or_default().push(tensor));
    groups
}

fn parameters(manifest: &Manifest) {
    let params: Vec<TensorEntry> =
        manifest.tensors.iter().filter(|tensor| tensor.kind == StateKind::Param).cloned().collect();
    let count = |tensors: &[&TensorEntry]| tensors.iter().map(|tensor| tensor.numel() as u64).sum();
    let all: Vec<&TensorEntry> = params.iter().collect();
    fact("parameters", format!("{} in {} tensors", short(count(&all)), all.len()));
    for (group, tensors) in by(&params, |tensor| group(&tensor.name)) {
        fact(
            "",
            format!("{:<12}{:>9} in {} tensors", group.1, short(count(&tensors)), tensors.len()),
        );
    }
}

/// The part of a model that a parameter belongs to, with its place in the order of the model.
fn group(name: &str) -> (u8, &'static str) {
    if name.contains("norm") {
        (3, "norms")
    } else if name.starts_with("embedding.") {
        (0, "embedding")
    } else if name.contains(".self_attention.") {
        (1, "attention")
    } else if name.contains(".mlp.") {
        (2, "MLP")
    } else if name.starts_with("output_layer.") {
        (4, "output")
    } else {
        (5, "other")
    }
}

fn model(m: &ModelConfig) -> String {
    let positions = match m.position_embedding {
        PositionEmbedding::LearnedAbsolute => "learned positions",
        PositionEmbedding::Rope => "rotary positions",
        PositionEmbedding::Alibi => "ALiBi",
        PositionEmbedding::None => "no positions",
    };
    format!(
        "{} layers, hidden {}, {} heads in {} groups of width {}, MLP {}{}, {:?}, {positions}, sequences of {}, vocabulary \
         {}, {} output matrix",
        m.num_layers,
        m.hidden_size,
        m.num_attention_heads,
        m.num_query_groups,
        m.head_dim,
        m.ffn_hidden_size,
        if m.swiglu { " (SwiGLU)" } else { " (GELU)" },
        m.normalization,
        m.seq_length,
        m.vocab_size,
        if m.untie_embeddings_and_output_weights { "own" } else { "tied" }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_belong_to_the_parts_of_a_model() {
        for (name, part) in [
            ("embedding.word_embeddings.weight", "embedding"),
            ("embedding.layernorm.weight", "norms"),
            ("decoder.layers.3.input_layernorm.weight", "norms"),
            ("decoder.layers.3.self_attention.linear_qkv.bias", "attention"),
            ("decoder.layers.3.mlp.linear_fc1.weight", "MLP"),
            ("output_layer.weight", "output"),
        ] {
            assert_eq!(group(name).1, part, "{name}");
        }
    }
}
