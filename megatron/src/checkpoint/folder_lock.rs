//! Lets only one run at a time save into a folder: two runs would remove each other's half-written
//! checkpoints and move the same pointer.
//!
//! The lock is the operating system's (`flock` on the folder itself, so that no file is left). It
//! ends with the process that holds it, however that process dies.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::comm::Group;
use crate::text::printable;
use crate::{Error, Result};

/// How long a file created on one machine may be invisible on another.
const MOST_DELAY: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// Name prefix of the file that rank 0 creates for the other ranks to find.
const MARK: &str = ".seen-by-all-ranks-";

/// The right to save into a folder, held until dropped. Rank 0 holds the lock for all ranks.
#[derive(Debug)]
pub struct FolderLock {
    dir: PathBuf,
    /// The open folder, independent of later changes to its path; locked if the file system
    /// supports locks.
    folder: Option<File>,
}

impl FolderLock {
    /// Whether `dir`, as written, is the locked path.
    pub fn is_of(&self, dir: &Path) -> bool {
        self.dir == dir
    }

    /// Checks that the path still leads to the locked folder: saving into a moved or replaced
    /// folder would mix two runs' checkpoints. Collective over `world`.
    ///
    /// # Errors
    /// On every rank, if the path leads elsewhere or nowhere.
    pub fn require_in_place(&self, world: &Group) -> Result<()> {
        let refusal = self.folder.as_ref().and_then(|folder| {
            let there = fs::metadata(&self.dir).map(|there| (there.dev(), there.ino()));
            let mine = folder.metadata().map(|mine| (mine.dev(), mine.ino()));
            let what = match (mine, there) {
                (Ok(mine), Ok(there)) if mine == there => return None,
                (_, Err(error)) if error.kind() == ErrorKind::NotFound => "is gone",
                (_, Err(_)) => "cannot be found",
                _ => "is now a different folder",
            };
            Some(format!(
                "{what}: the folder that this run saves into was moved, removed or replaced during \
                 the run, so nothing was saved; move it back, or continue from its last checkpoint \
                 with --load and --save at its new path"
            ))
        });
        agree(&self.dir, world, refusal.as_ref())
    }
}

/// Locks `dir`, created if missing, for the run of `world`. Also checks that it is the same folder
/// for all ranks, which otherwise only the first save would detect. Collective over `world`.
///
/// On file systems without folder locks (some network file systems), the lock is always granted.
///
/// # Errors
/// On every rank, if another run holds `dir`, rank 0 cannot create it or write into it, or a rank
/// does not see the file of rank 0.
pub fn lock_folder(dir: &Path, world: &Group) -> Result<FolderLock> {
    let mine = if world.rank() == 0 { lock(dir).map(Some) } else { Ok(None) };
    agree(dir, world, mine.as_ref().err())?;
    let held = FolderLock { dir: dir.to_path_buf(), folder: mine.ok().flatten() };
    if world.size() > 1 {
        see_together(dir, world)?;
    }
    Ok(held)
}

/// # Errors
/// On every rank, if a rank does not see the file that rank 0 writes into `dir`.
fn see_together(dir: &Path, world: &Group) -> Result<()> {
    let mark = if world.rank() == 0 {
        remove_marks(dir);
        let mark = tempfile::Builder::new().prefix(MARK).tempfile_in(dir);
        // Closed, because some file systems hide open files from other machines.
        mark.map(|mark| Some(mark.into_temp_path()))
            .map_err(|error| format!("cannot be written to: {error}"))
    } else {
        Ok(None)
    };
    agree(dir, world, mark.as_ref().err())?;
    // Removed when this function ends: on rank 0, after all ranks have looked.
    let mark = mark.ok().flatten();
    let name = mark.as_ref().and_then(|mark| mark.file_name()).unwrap_or_default();
    let names = world.all_gather_bytes(name.as_encoded_bytes())?;
    let is_seen =
        names.first().is_some_and(|name| appears(&dir.join(&*String::from_utf8_lossy(name))));
    let refusal = format!(
        "is not the same folder for all ranks: rank {} does not see the files of rank 0; give a folder that all machines share",
        world.rank()
    );
    agree(dir, world, (!is_seen).then_some(&refusal))
}

/// Removes leftovers of killed runs. A running one cannot own them, because the lock is held here.
fn remove_marks(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(MARK) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Whether a file exists now or soon: network file systems may show it late.
fn appears(path: &Path) -> bool {
    let start = Instant::now();
    while !path.exists() {
        if start.elapsed() > MOST_DELAY {
            return false;
        }
        thread::sleep(Duration::from_millis(100));
    }
    true
}

/// # Errors
/// On every rank, the first refusal of any rank.
fn agree(dir: &Path, world: &Group, refusal: Option<&String>) -> Result<()> {
    let refusals = world.all_gather_bytes(refusal.map_or(&[], |refusal| refusal.as_bytes()))?;
    match refusals.iter().find(|refusal| !refusal.is_empty()) {
        Some(refusal) => Err(Error::checkpoint(dir, printable(refusal))),
        None => Ok(()),
    }
}

/// Locks `dir` for this process, which is not a rank but imports or reshards.
///
/// # Errors
/// As [`lock_folder`].
pub(super) fn lock_folder_alone(dir: &Path) -> Result<FolderLock> {
    let folder = lock(dir).map_err(|refusal| Error::checkpoint(dir, refusal))?;
    Ok(FolderLock { dir: dir.to_path_buf(), folder: Some(folder) })
}

/// `dir`, locked if the file system supports it, or the reason why this run may not save there.
fn lock(dir: &Path) -> std::result::Result<File, String> {
    fs::create_dir_all(dir).map_err(|e| format!("cannot be created: {e}"))?;
    let folder = File::open(dir).map_err(|e| format!("cannot be opened: {e}"))?;
    match folder.try_lock() {
        Ok(()) | Err(TryLockError::Error(_)) => Ok(folder),
        Err(TryLockError::WouldBlock) => {
            Err("is in use: another run is saving there; wait until it ends, stop it, or save elsewhere"
                .into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::threads;

    /// Each rank locks its own folder, or all lock the same.
    fn lock_folders(dirs: &[&Path]) -> Vec<Result<FolderLock>> {
        let world = threads::world(dirs.len());
        thread::scope(|scope| {
            let ranks: Vec<_> = world
                .iter()
                .zip(dirs)
                .map(|(rank, dir)| scope.spawn(move || lock_folder(dir, rank)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn a_folder_that_all_ranks_share_is_claimed_and_nothing_is_left_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("saved");
        fs::create_dir(&dir).unwrap();
        // A leftover of a run that was killed during the check.
        fs::write(dir.join(format!("{MARK}abc")), "").unwrap();
        assert!(lock_folders(&[&dir, &dir, &dir]).iter().all(Result::is_ok));
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_is_moved_removed_or_replaced_is_told_from_the_one_that_was_claimed() {
        let folder = tempfile::tempdir().unwrap();
        let (dir, elsewhere) = (folder.path().join("saved"), folder.path().join("elsewhere"));
        let world = threads::world(2);
        thread::scope(|scope| {
            let ranks: Vec<_> = world
                .iter()
                .map(|rank| {
                    let (dir, elsewhere) = (&dir, &elsewhere);
                    scope.spawn(move || {
                        let held = lock_folder(dir, rank).unwrap();
                        // Rank 0 changes the folder, and both ranks check.
                        let told = |change: &dyn Fn()| {
                            if rank.rank() == 0 {
                                change();
                            }
                            held.require_in_place(rank)
                                .err()
                                .map_or(String::new(), |error| error.to_string())
                        };
                        let moved = told(&|| fs::rename(dir, elsewhere).unwrap());
                        let linked = told(&|| std::os::unix::fs::symlink(elsewhere, dir).unwrap());
                        let replaced = told(&|| {
                            fs::remove_file(dir).unwrap();
                            fs::create_dir(dir).unwrap();
                        });
                        let back = told(&|| {
                            fs::remove_dir(dir).unwrap();
                            fs::rename(elsewhere, dir).unwrap();
                        });
                        [moved, linked, replaced, back]
                    })
                })
                .collect();
            for rank in ranks {
                let [moved, linked, replaced, back] = rank.join().unwrap();
                assert!(
                    moved.contains("saved: is gone") && moved.contains("with --load and --save"),
                    "{moved}"
                );
                assert!(replaced.contains("saved: is now a different folder"), "{replaced}");
                assert_eq!([linked, back], ["", ""]);
            }
        });
    }

    #[test]
    fn folders_of_the_same_name_on_several_machines_are_told_apart_on_every_rank() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for refused in lock_folders(&[here.path(), here.path(), there.path()]) {
            let message = refused.unwrap_err().to_string();
            assert!(
                message.contains("is not the same folder for all ranks: rank 2 does not see"),
                "{message}"
            );
        }
        assert_eq!(fs::read_dir(here.path()).unwrap().count(), 0);
    }
}
