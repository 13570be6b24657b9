//! One run at a time saves into a folder: two would remove each other's half-written checkpoints and move one pointer.
//!
//! The lock is the operating system's (`flock`, of the folder itself, so that no file is left): it ends with the process
//! that holds it, however that dies.

use std::fs::{self, File, TryLockError};
use std::path::Path;

use crate::comm::Group;
use crate::{Error, Result};

/// The right to save into a folder, held until dropped. Rank 0 has the lock for all ranks.
#[derive(Debug)]
pub struct Claim {
    _lock: Option<File>,
}

/// Claims `dir`, which is created if need be, for the run of `world`. Collective over `world`.
///
/// Where a file system knows no locks of folders (some network file systems), the claim is granted unseen.
///
/// # Errors
/// On every rank, if another run holds `dir`, or rank 0 cannot create or open it.
pub fn claim(dir: &Path, world: &Group) -> Result<Claim> {
    let mine = if world.rank() == 0 { lock(dir) } else { Ok(None) };
    let refusal = mine.as_ref().err().map_or("", String::as_str);
    let refusals = world.all_gather_bytes(refusal.as_bytes())?;
    match refusals.iter().find(|refusal| !refusal.is_empty()) {
        Some(refusal) => Err(Error::checkpoint(dir, String::from_utf8_lossy(refusal))),
        None => Ok(Claim { _lock: mine.ok().flatten() }),
    }
}

/// Claims `dir` for this process, which is no rank: the one that imports or reshards.
///
/// # Errors
/// As [`claim`].
pub(super) fn claim_alone(dir: &Path) -> Result<Claim> {
    let lock = lock(dir).map_err(|refusal| Error::checkpoint(dir, refusal))?;
    Ok(Claim { _lock: lock })
}

/// The lock of `dir`, or why this run may not save there; none where there are no locks.
fn lock(dir: &Path) -> std::result::Result<Option<File>, String> {
    fs::create_dir_all(dir).map_err(|e| format!("cannot be created: {e}"))?;
    let folder = File::open(dir).map_err(|e| format!("cannot be opened: {e}"))?;
    match folder.try_lock() {
        Ok(()) => Ok(Some(folder)),
        Err(TryLockError::WouldBlock) => {
            Err("is where another run saves at this moment; wait until it has ended or stop it, or save elsewhere"
                .into())
        }
        Err(TryLockError::Error(_)) => Ok(None),
    }
}
