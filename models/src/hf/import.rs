//! A Hugging Face folder becomes a checkpoint: weights only, in the dtypes of the files, one parameter in memory at a time.

use std::fs;
use std::path::{Path, PathBuf};

use megatron::checkpoint::StreamWriter;
use megatron::params::StateKind;
use megatron::train::weights_only_state;
use megatron::{Error, Result};

use super::config::CONFIG;
use super::model::HfModel;
use super::{COMPANIONS, ORIGIN_CONFIG};
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
/// If `checkpoints` holds a checkpoint already, or [`HfModel::open`] refuses the folder, or a file cannot be read or written.
pub fn import(folder: &Path, checkpoints: &Path, mut progress: impl FnMut(u64, u64)) -> Result<Imported> {
    if let Some(path) = megatron::checkpoint::existing(checkpoints)? {
        return Err(Error::checkpoint(path, "is there already; import into another folder"));
    }
    let model = HfModel::open(folder)?;
    let tensors = model.parameters().map(|(name, shape, dtype)| (name.into(), StateKind::Param, shape.to_vec(), dtype));
    let total = model.parameters().map(|(_, shape, _)| shape.iter().product::<usize>() as u64).sum();
    let mut writer = StreamWriter::create(checkpoints, 0, tensors.collect::<Vec<_>>())?;
    let mut done = 0;
    for (at, (_, shape, _)) in model.parameters().enumerate() {
        writer.write(&model.read(at)?.bytes)?;
        done += shape.iter().product::<usize>() as u64;
        progress(done, total);
    }
    copy_companions(folder, checkpoints)?;
    let path = writer.finish(&weights_only_state(model.model())?)?;
    Ok(Imported { path, family: model.config.family, elements: total })
}

/// Copies a Hugging Face folder's files about tokens and generation, and its `config.json` under the name that export looks
/// for, beside the checkpoints in `checkpoints`.
///
/// # Errors
/// If the system refuses.
pub fn copy_companions(folder: &Path, checkpoints: &Path) -> Result<()> {
    fs::create_dir_all(checkpoints).map_err(|e| Error::io("create", checkpoints, e))?;
    let pairs = COMPANIONS.iter().map(|name| (*name, *name)).chain([(CONFIG, ORIGIN_CONFIG)]);
    for (from, to) in pairs {
        let (from, to) = (folder.join(from), checkpoints.join(to));
        if from.is_file() {
            fs::copy(&from, &to).map_err(|e| Error::io("write", &to, e))?;
        }
    }
    Ok(())
}
