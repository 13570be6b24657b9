//! Imports a Hugging Face folder as a checkpoint: weights only, in the dtypes of the files, with
//! only one parameter in memory at a time.

use std::path::{Path, PathBuf};

use megatron::checkpoint::{SidecarFiles, StreamWriter};
use megatron::params::StateKind;
use megatron::train::weights_only_state;
use megatron::{Error, Result};

use super::carry::sidecars;
use super::config::CONFIG;
use super::model::HfModel;
use crate::families::Family;

/// The result of an import.
#[derive(Debug)]
pub struct Imported {
    /// The checkpoint's own folder.
    pub path: PathBuf,
    /// The family of the model.
    pub family: Family,
    /// A note about ignored fields of its configuration.
    pub note: Option<String>,
    /// Number of elements in all parameters; a tied matrix counts once.
    pub elements: u64,
}

/// Writes the model in `folder` to `checkpoints` as a checkpoint of iteration 0, with the tokenizer
/// files next to it. Calls `progress` with the number of elements done and in total.
///
/// # Errors
/// If `checkpoints` holds a checkpoint or a Hugging Face model, a run saves there, another file is
/// in the place of a tokenizer file, [`HfModel::open`] refuses the folder, or a file cannot be read
/// or written. `checkpoints` then stays unchanged.
pub fn import(
    folder: &Path,
    checkpoints: &Path,
    mut progress: impl FnMut(u64, u64),
) -> Result<Imported> {
    refuse_model_folder(checkpoints)?;
    let model = HfModel::open(folder)?;
    let tensors = model
        .parameters()
        .map(|(name, shape, dtype)| (name.into(), StateKind::Param, shape.to_vec(), dtype));
    let total =
        model.parameters().map(|(_, shape, _)| shape.iter().product::<usize>() as u64).sum();
    let mut writer = StreamWriter::create(checkpoints, 0, tensors.collect::<Vec<_>>())?;
    let sidecars = SidecarFiles::read(sidecars((folder, CONFIG), checkpoints, true))?;
    sidecars.refuse_to_replace()?;
    let mut done = 0;
    for (at, (_, shape, _)) in model.parameters().enumerate() {
        writer.write(&model.read(at)?.bytes)?;
        done += shape.iter().product::<usize>() as u64;
        progress(done, total);
    }
    sidecars.place()?;
    let path = writer.finish(&weights_only_state(model.model())?)?;
    Ok(Imported { path, family: model.config.family, note: model.config.note(), elements: total })
}

/// Checks that `checkpoints` is not the folder of a Hugging Face model, because checkpoints and
/// their sidecar files would mix with the model's files.
///
/// # Errors
/// If it is one.
pub fn refuse_model_folder(checkpoints: &Path) -> Result<()> {
    if !checkpoints.join(CONFIG).exists() {
        return Ok(());
    }
    let message = format!(
        "is the folder of a Hugging Face model (it has a {CONFIG}); give another folder for checkpoints"
    );
    Err(Error::checkpoint(checkpoints, message))
}
