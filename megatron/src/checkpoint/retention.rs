//! Removes old checkpoints of a run once a newer one is durable.
//!
//! Source: Megatron-LM's `--save-retain-interval` and `--most-recent-k`
//! (`training/checkpointing.py`).

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use super::folder::{Names, iterations, latest, same_folder};
use crate::config::Retention;
use crate::{Error, Result};

/// Removes from `dir` the checkpoints older than step `newest` that `retention` does not keep,
/// except the one in `loaded`, and returns their steps. Only rank 0 calls this.
///
/// Only checkpoints with a folder that `is_healthy` count as newer ones, so that checkpoints saved
/// during divergence do not replace good ones.
///
/// Nothing is removed unless the pointer names `newest`, which [`super::save`] has made durable. A
/// checkpoint is renamed like an unfinished one before its files are deleted, so that the rest
/// after a crash does not count as a checkpoint and the next save removes it.
///
/// # Errors
/// If the folder cannot be read, or a checkpoint cannot be removed.
pub fn remove_old(
    dir: &Path,
    newest: u64,
    retention: &Retention,
    loaded: Option<&Path>,
    is_healthy: impl Fn(&Path) -> bool,
) -> Result<Vec<u64>> {
    if latest(dir)?.is_none_or(|latest| latest.iteration != newest) {
        return Ok(Vec::new());
    }
    let older = iterations(dir)?.into_iter().rev().filter(|&iteration| iteration < newest);
    let (mut newer, mut removed) = (1, Vec::new());
    for iteration in older {
        let names = Names::new(dir, iteration);
        let stays = retention.keeps(iteration, newer);
        // Stops reading folders once enough newer ones are counted.
        if retention.most_recent.is_some_and(|most| newer < most) && is_healthy(&names.target) {
            newer += 1;
        }
        if !stays && loaded.is_none_or(|loaded| !same_folder(loaded, &names.target)) {
            remove(&names)?;
            removed.push(iteration);
        }
    }
    Ok(removed)
}

fn remove(names: &Names) -> Result<()> {
    match fs::remove_dir_all(&names.temp) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(Error::io("remove", &names.temp, error));
        }
        _ => {}
    }
    fs::rename(&names.target, &names.temp)
        .map_err(|error| Error::io("remove", &names.target, error))?;
    // For a link, this removes only the link.
    fs::remove_dir_all(&names.temp).map_err(|error| Error::io("remove", &names.temp, error))
}
