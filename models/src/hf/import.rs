//! A Hugging Face folder becomes a checkpoint: weights only, in the dtypes of the files, one
//! parameter in memory at a time.

use std::path::{Path, PathBuf};

use megatron::checkpoint::{SidecarFiles, StreamWriter};
use megatron::params::StateKind;
use megatron::train::weights_only_state;
use megatron::{Error, Result};

use super::carry::sidecars;
use super::config::CONFIG;
use super::model::HfModel;
use crate::families::Family;

/// What an import did.
#[derive(Debug)]
pub struct Imported {
    /// The checkpoint's own folder.
    pub path: PathBuf,
    /// The family the model is of.
    pub family: Family,
    /// What was passed over in its configuration.
    pub note: Option<String>,
    /// Parameters in elements, a tied matrix counted once.
    pub elements: u64,
}

/// Writes the model in `folder` as a checkpoint of iteration 0 into `checkpoints`, with the files
/// about tokens beside it. `progress` hears of the elements done and in all.
///
/// # Errors
/// If `checkpoints` holds a checkpoint or a Hugging Face model, a run saves there, another file is
/// where one about tokens goes, [`HfModel::open`] refuses the folder, or a file cannot be read or
/// written. `checkpoints` is as it was then.
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

/// Asserts that `checkpoints` is not the folder of a Hugging Face model, with whose files
/// checkpoints and theirs would mix.
///
/// # Errors
/// If it is.
pub fn refuse_model_folder(checkpoints: &Path) -> Result<()> {
    if !checkpoints.join(CONFIG).exists() {
        return Ok(());
    }
    let message = format!(
        "is the folder of a Hugging Face model (it has a {CONFIG}); give another folder for checkpoints"
    );
    Err(Error::checkpoint(checkpoints, message))
}
