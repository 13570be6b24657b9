//! A Hugging Face folder becomes a checkpoint: weights only, in the dtypes of the files, one parameter in memory at a time.

use std::path::{Path, PathBuf};

use megatron::checkpoint::{self, Companions, StreamWriter};
use megatron::params::StateKind;
use megatron::train::weights_only_state;
use megatron::{Error, Result};

use super::config::CONFIG;
use super::model::HfModel;
use super::{COMPANIONS, GENERATION_CONFIG, ORIGIN_CONFIG};
use crate::families::Family;

/// What an import did.
#[derive(Debug)]
pub struct Imported {
    /// The checkpoint's own folder.
    pub path: PathBuf,
    pub family: Family,
    /// Parameters in elements, a tied matrix counted once.
    pub elements: u64,
}

/// Writes the model in `folder` as a checkpoint of iteration 0 into `checkpoints`, with the files about tokens beside it.
/// `progress` hears of the elements done and in all.
///
/// # Errors
/// If `checkpoints` holds a checkpoint or a Hugging Face model, a run saves there, another file is where one about tokens goes,
/// [`HfModel::open`] refuses the folder, or a file cannot be read or written. `checkpoints` is as it was then.
pub fn import(folder: &Path, checkpoints: &Path, mut progress: impl FnMut(u64, u64)) -> Result<Imported> {
    refuse_model_folder(checkpoints)?;
    let model = HfModel::open(folder)?;
    let tensors = model.parameters().map(|(name, shape, dtype)| (name.into(), StateKind::Param, shape.to_vec(), dtype));
    let total = model.parameters().map(|(_, shape, _)| shape.iter().product::<usize>() as u64).sum();
    let mut writer = StreamWriter::create(checkpoints, 0, tensors.collect::<Vec<_>>())?;
    let companions = Companions::read(companions(folder, checkpoints, true))?;
    companions.refuse_to_replace()?;
    let mut done = 0;
    for (at, (_, shape, _)) in model.parameters().enumerate() {
        writer.write(&model.read(at)?.bytes)?;
        done += shape.iter().product::<usize>() as u64;
        progress(done, total);
    }
    companions.place()?;
    let path = writer.finish(&weights_only_state(model.model())?)?;
    Ok(Imported { path, family: model.config.family, elements: total })
}

/// Copies a Hugging Face folder's settings of generation, its `config.json` under the name that export looks for, and, if it has the
/// run's tokenizer (`with_tokenizer`), its files about tokens beside the checkpoints in `checkpoints`. Beside checkpoints that are there already,
/// so of a run that goes on, files that are there stay.
///
/// # Errors
/// If there is no checkpoint yet and another file is where one goes, or the system refuses. Nothing is replaced.
pub fn copy_companions(folder: &Path, checkpoints: &Path, with_tokenizer: bool) -> Result<()> {
    let all = companions(folder, checkpoints, with_tokenizer);
    if checkpoint::holds_any(checkpoints)? {
        return Companions::read(all.filter(|(_, to)| !to.exists()))?.place();
    }
    let companions = Companions::read(all)?;
    companions.refuse_to_replace()?;
    companions.place()
}

/// Where a Hugging Face folder's files come from and go to.
fn companions(folder: &Path, checkpoints: &Path, with_tokenizer: bool) -> impl Iterator<Item = (PathBuf, PathBuf)> {
    let names = COMPANIONS.into_iter().filter(move |name| with_tokenizer || *name == GENERATION_CONFIG);
    let pairs = names.map(|name| (name, name)).chain([(CONFIG, ORIGIN_CONFIG)]);
    pairs.map(|(from, to)| (folder.join(from), checkpoints.join(to)))
}

/// Asserts that `checkpoints` is not the folder of a Hugging Face model, with whose files checkpoints and theirs would mix.
///
/// # Errors
/// If it is.
pub fn refuse_model_folder(checkpoints: &Path) -> Result<()> {
    if !checkpoints.join(CONFIG).exists() {
        return Ok(());
    }
    let message =
        format!("is the folder of a Hugging Face model, as it has a {CONFIG}; name another one for checkpoints");
    Err(Error::checkpoint(checkpoints, message))
}
