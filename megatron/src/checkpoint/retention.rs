//! Which checkpoints of a run stay: older ones are removed once a newer one is there for good.
//!
//! Source: Megatron-LM's `--save-retain-interval` and `--most-recent-k`
//! (`training/checkpointing.py`).

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use super::folder::{Names, iterations, latest, same_folder};
use crate::config::Retention;
use crate::{Error, Result};

/// Removes from `dir` those checkpoints older than that of step `newest` that `retention` does not
/// keep, but not the one in `loaded`, and returns their steps. For one process, that of rank 0.
///
/// Only checkpoints whose folder `is_healthy` count as newer ones: what a run saved while it went
/// wrong takes no good one's place.
///
/// Nothing is removed unless the pointer names `newest`, which [`super::save`] has made durable. A
/// checkpoint gets the name of an unfinished one before anything of it is gone, so that what a
/// crash leaves is taken for none, and the next save removes it.
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
        // Beyond those that count nothing is read.
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
    // Of a link this is the link alone.
    fs::remove_dir_all(&names.temp).map_err(|error| Error::io("remove", &names.temp, error))
}
