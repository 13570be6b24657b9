//! Chooses the checkpoint that a run resumes from, and finds later ones in the folder that it saves
//! to.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::folder::{
    POINTER, checkpoints_folder, iterations, latest, locate, resumable, same_folder,
};
use crate::Result;
use crate::config::{CheckpointConfig, Takes};

/// The folder of the checkpoint that a run with these settings resumes from; `None` if it starts
/// fresh.
///
/// # Errors
/// As [`resumable`], or if the checkpoint of `ckpt_step` does not exist; the message lists the
/// existing ones.
pub fn to_load(config: &CheckpointConfig) -> Result<Option<PathBuf>> {
    match (&config.load, config.ckpt_step) {
        (None, _) => Ok(None),
        (Some(dir), None) => resumable(dir),
        (Some(dir), Some(step)) => locate(dir, Some(step)).map(Some),
    }
}

/// Checkpoints of later steps than the one that a run goes back to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Later {
    /// The iteration of the latest, as the folder's pointer names it.
    pub latest: u64,
    /// The iterations beyond the one that is loaded, ascending.
    pub iterations: Vec<u64>,
}

/// The checkpoints later than `iteration` in the folder to save to, if `path`, the one to load, is
/// in that folder. `None` if there are none.
///
/// # Errors
/// If a folder cannot be listed.
pub fn later(config: &CheckpointConfig, path: &Path, iteration: u64) -> Result<Option<Later>> {
    let Some(dir) = config.save.as_ref().filter(|_| config.takes != Takes::Weights) else {
        return Ok(None);
    };
    if !same_folder(&checkpoints_folder(path)?, dir) {
        return Ok(None);
    }
    let iterations: Vec<u64> =
        iterations(dir)?.into_iter().filter(|other| *other > iteration).collect();
    let latest = latest(dir)?.map_or(iteration, |latest| latest.iteration);
    Ok((!iterations.is_empty()).then_some(Later { latest, iterations }))
}

/// A value that changes with each save into `dir`: each save creates a new pointer file.
pub fn last_save(dir: &Path) -> String {
    match fs::metadata(dir.join(POINTER)) {
        Ok(pointer) => format!("{}.{}.{}", pointer.ino(), pointer.mtime(), pointer.mtime_nsec()),
        Err(_) => "none".into(),
    }
}
