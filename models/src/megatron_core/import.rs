//! Imports a Megatron-LM checkpoint as one of this program: weights only, in the dtypes of the
//! files, with only one parameter in memory at a time.

use std::path::{Path, PathBuf};

use megatron::checkpoint::{StreamWriter, holds_any};
use megatron::params::StateKind;
use megatron::train::weights_only_state;
use megatron::{Error, Result};

use super::config::Vocabulary;
use super::folder::is_megatron;
use super::model::MegatronModel;
use crate::hf::refuse_model_folder;

/// The result of an import.
#[derive(Debug)]
pub struct Imported {
    /// The checkpoint's own folder.
    pub path: PathBuf,
    /// Number of elements in all parameters; a tied matrix counts once.
    pub elements: u64,
    /// The size of the vocabulary and its source.
    pub vocabulary: Vocabulary,
    /// The iteration at which it was saved, if recorded.
    pub iteration: Option<usize>,
    /// Whether an optimizer state was left out.
    pub had_optimizer: bool,
}

/// Writes the model in `folder`, which is a checkpoint or contains some ([`MegatronModel::open`]),
/// to `checkpoints` as a checkpoint of iteration 0. Calls `progress` with the number of elements
/// done and in total.
///
/// # Errors
/// If `checkpoints` holds a checkpoint or a Hugging Face model, a run saves there,
/// [`MegatronModel::open`] refuses the folder, or a file cannot be read or written. `checkpoints`
/// then stays unchanged.
pub fn import(
    folder: &Path,
    checkpoints: &Path,
    vocab_size: Option<usize>,
    mut progress: impl FnMut(u64, u64),
) -> Result<Imported> {
    refuse_model_folder(checkpoints)?;
    if is_megatron(checkpoints) && !holds_any(checkpoints)? {
        let message =
            "holds checkpoints of Megatron-LM; give another folder for this program's checkpoints";
        return Err(Error::checkpoint(checkpoints, message));
    }
    let model = MegatronModel::open(folder, vocab_size)?;
    let tensors = model
        .parameters()
        .map(|(name, shape, dtype)| (name.into(), StateKind::Param, shape.to_vec(), dtype));
    let total =
        model.parameters().map(|(_, shape, _)| shape.iter().product::<usize>() as u64).sum();
    let mut writer = StreamWriter::create(checkpoints, 0, tensors.collect::<Vec<_>>())?;
    let mut done = 0;
    for (at, (_, shape, _)) in model.parameters().enumerate() {
        writer.write(&model.read(at)?)?;
        done += shape.iter().product::<usize>() as u64;
        progress(done, total);
    }
    let path = writer.finish(&weights_only_state(model.model())?)?;
    let (vocabulary, iteration, had_optimizer) =
        (model.vocabulary(), model.iteration(), model.has_optimizer());
    Ok(Imported { path, elements: total, vocabulary, iteration, had_optimizer })
}
