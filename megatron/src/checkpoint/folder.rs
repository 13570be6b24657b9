//! File names in a checkpoint folder, the pointer to the latest checkpoint, and the atomic commit
//! of a checkpoint.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::foreign::Found;
use super::manifest::MANIFEST;
use super::shard_file::{sync_folder, write_synced};
use crate::{Error, Result, files};

pub(super) const POINTER: &str = "latest_checkpointed_iteration.txt";
const POINTER_TEMP: &str = ".latest_checkpointed_iteration.txt.tmp";
/// Longer pointer files are not iterations.
const MAX_POINTER_BYTES: u64 = 64;
/// Most iterations that a message lists.
const SHOWN_ITERATIONS: usize = 10;
/// Most alternatives that a message about a damaged checkpoint lists.
const SHOWN_OTHERS: usize = 2;

/// The checkpoint that the pointer names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latest {
    /// Steps the run had made when it was saved.
    pub iteration: u64,
    /// Its folder, to give to `Manifest::read` or `load`.
    pub path: PathBuf,
}

/// The names that belong to one iteration's checkpoint.
pub(super) struct Names {
    dir: PathBuf,
    iteration: u64,
    /// Its final folder.
    pub target: PathBuf,
    /// The temporary folder that it is written to.
    pub temp: PathBuf,
    /// The folder where an older checkpoint of the same iteration is set aside until the new one is
    /// in place.
    aside: PathBuf,
}

impl Names {
    pub fn new(dir: &Path, iteration: u64) -> Self {
        let path =
            |prefix: &str, suffix: &str| dir.join(format!("{prefix}iter_{iteration:07}{suffix}"));
        let (target, temp, aside) = (path("", ""), path(".", ".tmp"), path(".", ".old"));
        Self { dir: dir.to_path_buf(), iteration, target, temp, aside }
    }

    /// Creates an empty temporary folder, after removing leftovers of killed runs.
    pub fn prepare(&self) -> Result<()> {
        fs::create_dir_all(&self.dir).map_err(|e| Error::io("create", &self.dir, e))?;
        self.remove_leftovers()?;
        fs::create_dir(&self.temp).map_err(|e| Error::io("create", &self.temp, e))
    }

    fn remove_leftovers(&self) -> Result<()> {
        for entry in fs::read_dir(&self.dir).map_err(|e| Error::io("list", &self.dir, e))? {
            let path = entry.map_err(|e| Error::io("list", &self.dir, e))?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            let Some((iteration, suffix)) = hidden(name) else { continue };
            let target = Self::new(&self.dir, iteration).target;
            if suffix == "old" && !target.exists() {
                fs::rename(&path, &target).map_err(|e| Error::io("restore", &target, e))?;
            } else {
                let removed =
                    if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                removed.map_err(|e| Error::io("remove", &path, e))?;
            }
        }
        Ok(())
    }

    /// Removes the temporary folder, ignoring errors: the next save removes the rest.
    pub fn discard(&self) {
        let _ = fs::remove_dir_all(&self.temp);
        let _ = fs::remove_file(self.dir.join(POINTER_TEMP));
    }

    /// Moves the complete temporary folder into place, then points the pointer to it. After an
    /// error, only the temporary folder has changed.
    pub fn commit(&self) -> Result<()> {
        sync_folder(&self.temp)?;
        // All writes that need disk space come before the first rename.
        let (pointer, pointer_temp) = (self.dir.join(POINTER), self.dir.join(POINTER_TEMP));
        write_synced(&pointer_temp, format!("{}\n", self.iteration).as_bytes())?;
        let replaces = self.target.exists();
        if replaces {
            fs::rename(&self.target, &self.aside)
                .map_err(|e| Error::io("set aside", &self.target, e))?;
        }
        let moved = fs::rename(&self.temp, &self.target)
            .map_err(|e| Error::io("create", &self.target, e))
            .and_then(|()| sync_folder(&self.dir))
            .and_then(|()| {
                fs::rename(&pointer_temp, &pointer).map_err(|e| Error::io("update", &pointer, e))
            });
        if let Err(error) = moved {
            // Undo the renames; if this fails, the next save cleans up.
            let _ = fs::rename(&self.target, &self.temp);
            if replaces {
                let _ = fs::rename(&self.aside, &self.target);
            }
            return Err(error);
        }
        sync_folder(&self.dir)?;
        if replaces {
            let _ = fs::remove_dir_all(&self.aside); // the next save removes a leftover
        }
        Ok(())
    }
}

/// The folder in `dir` that holds the checkpoint of `iteration`.
pub fn iteration_dir(dir: &Path, iteration: u64) -> PathBuf {
    Names::new(dir, iteration).target
}

/// The folder of the checkpoint that `path` means: `path` itself if it is a checkpoint
/// (`…/iter_0000100`); else the one of `iteration` in it; else the one that its pointer names;
/// else, without a pointer, its only checkpoint.
///
/// # Errors
/// If there is no such checkpoint. With several checkpoints and no pointer, the error lists their
/// iterations.
pub fn locate(path: &Path, iteration: Option<u64>) -> Result<PathBuf> {
    let is_one = |folder: &Path| folder.join(MANIFEST).exists();
    if is_one(path) {
        return match iteration {
            None => Ok(path.to_path_buf()),
            Some(_) => Err(Error::checkpoint(
                path,
                "is the folder of one iteration; give its parent folder, or leave the iteration out",
            )),
        };
    }
    match iteration {
        Some(iteration) => {
            let folder = iteration_dir(path, iteration);
            if is_one(&folder) {
                return Ok(folder);
            }
            Err(Error::checkpoint(&folder, format!("does not exist; {}", those_in(path)?)))
        }
        None => match latest(path)? {
            Some(latest) => Ok(latest.path),
            None => match iterations(path)?.as_slice() {
                [] => Err(Error::checkpoint(
                    path,
                    match Found::at(path) {
                        None | Some(Found::Ours) => {
                            format!("holds no checkpoint: {POINTER} and {MANIFEST} are missing")
                        }
                        Some(Found::Missing)
                            if path
                                .file_name()
                                .and_then(|name| name.to_str())
                                .is_some_and(is_iteration) =>
                        {
                            "holds no checkpoint: it does not exist".into()
                        }
                        Some(found) => found.advice(path),
                    },
                )),
                [only] => Ok(iteration_dir(path, *only)),
                all => {
                    let message = format!(
                        "has no {POINTER}, but checkpoints of the iterations {}; give the folder \
                         of one of them, or write its number into that file",
                        listed(all)
                    );
                    Err(Error::checkpoint(path, message))
                }
            },
        },
    }
}

/// Iterations as a message lists them: the latest first, shortened if there are many.
fn listed(iterations: &[u64]) -> String {
    let shown: Vec<String> =
        iterations.iter().rev().take(SHOWN_ITERATIONS).map(u64::to_string).collect();
    format!("{}{}", shown.join(", "), if iterations.len() > SHOWN_ITERATIONS { ", …" } else { "" })
}

/// Describes the checkpoints in `dir`, for an error about a missing one.
fn those_in(dir: &Path) -> Result<String> {
    Ok(match iterations(dir)?.as_slice() {
        [] => format!("{} holds no checkpoint", dir.display()),
        all => format!("existing iterations are {}", listed(all)),
    })
}

/// The folder of the checkpoint that a run with `path` resumes from, found as by [`locate`]; `None`
/// if `path` neither is nor holds a checkpoint, so that a run starts fresh.
///
/// # Errors
/// If there are checkpoints but not the requested one, because a fresh run would replace them. If
/// there is a model of another program, because the user wants to start from it.
pub fn resumable(path: &Path) -> Result<Option<PathBuf>> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    // Only a save creates a folder with such a name, so a missing or empty one is a mistake.
    if is_iteration(name) || holds_any(path)? {
        return locate(path, None).map(Some);
    }
    match Found::at(path) {
        Some(
            found @ (Found::HuggingFace | Found::Adapter | Found::MegatronLm | Found::DeepSpeed),
        ) => Err(Error::checkpoint(path, found.advice(path))),
        Some(Found::Missing | Found::File | Found::Ours) | None => Ok(None),
    }
}

/// A checkpoint in `dir`: the one that the pointer names, otherwise any, finished or set aside.
///
/// # Errors
/// As [`latest`], or if `dir` cannot be listed.
pub fn existing(dir: &Path) -> Result<Option<PathBuf>> {
    Ok(match latest(dir)? {
        Some(latest) => Some(latest.path),
        None => any_checkpoint(dir)?,
    })
}

/// The parent folder of one checkpoint, `path` (`…/iter_0000100`). It holds files that belong to
/// all checkpoints, such as a tokenizer.
///
/// # Errors
/// If `path` does not exist.
pub fn checkpoints_folder(path: &Path) -> Result<PathBuf> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if let Some(parent) = path.parent().filter(|_| is_iteration(name)) {
        return Ok(if parent.as_os_str().is_empty() {
            PathBuf::from(".")
        } else {
            parent.to_path_buf()
        });
    }
    // `.`, or a link with another name, whose parent folder is unrelated.
    let real = fs::canonicalize(path).map_err(|e| Error::io("find", path, e))?;
    Ok(real.parent().unwrap_or(&real).to_path_buf())
}

/// Whether two paths name the same folder, however they are written.
pub fn same_folder(a: &Path, b: &Path) -> bool {
    // Also compares the paths as written, because neither may exist yet.
    let written =
        |path: &Path| std::path::absolute(path).map(|path| path.components().collect::<PathBuf>());
    a == b
        || written(a).is_ok_and(|a| written(b).is_ok_and(|b| a == b))
        || fs::canonicalize(a).is_ok_and(|a| fs::canonicalize(b).is_ok_and(|b| a == b))
}

/// Whether `name` is the name of a finished checkpoint's folder.
fn is_iteration(name: &str) -> bool {
    name.strip_prefix("iter_").is_some_and(|digits| digits.parse::<u64>().is_ok())
}

/// The iterations of the finished checkpoints in `dir`, ascending.
///
/// # Errors
/// If `dir` cannot be listed.
pub fn iterations(dir: &Path) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    match fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(Error::io("list", dir, error)),
        Ok(entries) => {
            for entry in entries {
                let name = entry.map_err(|e| Error::io("list", dir, e))?.file_name();
                let iteration =
                    name.to_str().and_then(|name| name.strip_prefix("iter_")?.parse().ok());
                found
                    .extend(iteration.filter(|&iteration| {
                        iteration_dir(dir, iteration).join(MANIFEST).exists()
                    }));
            }
        }
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// The advice for a damaged checkpoint `folder`: use another one, such as those beside it, the
/// latest first.
pub(super) fn use_another(folder: &Path) -> String {
    let beside = folder.parent().map_or_else(Vec::new, |dir| iterations(dir).unwrap_or_default());
    let dir = folder.parent().unwrap_or(folder);
    let others = beside
        .iter()
        .rev()
        .map(|&iteration| iteration_dir(dir, iteration))
        .filter(|other| other != folder);
    let shown: Vec<String> =
        others.take(SHOWN_OTHERS).map(|other| other.display().to_string()).collect();
    match shown.as_slice() {
        [] => "use another checkpoint".into(),
        shown => format!("use another checkpoint, for example {}", shown.join(" or ")),
    }
}

/// Whether `dir` holds a checkpoint, even if the pointer names none.
///
/// # Errors
/// If `dir` cannot be listed.
pub fn holds_any(dir: &Path) -> Result<bool> {
    Ok(any_checkpoint(dir)?.is_some())
}

/// A checkpoint in `dir`, finished or set aside, whether or not the pointer names it.
pub(super) fn any_checkpoint(dir: &Path) -> Result<Option<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("list", dir, error)),
    };
    for entry in entries {
        let path = entry.map_err(|e| Error::io("list", dir, e))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if is_iteration(name)
            || name == POINTER
            || name == MANIFEST
            || hidden(name).is_some_and(|(_, suffix)| suffix == "old")
        {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// Refuses a `dir` that holds a checkpoint, because a new one would replace it or take over the
/// pointer.
pub(super) fn refuse_checkpoint(dir: &Path) -> Result<()> {
    match any_checkpoint(dir)? {
        None => Ok(()),
        // It may be the checkpoint being read, so the message does not suggest removing it.
        Some(path) => Err(Error::checkpoint(&path, "already exists; write to a new folder")),
    }
}

/// The iteration and suffix of a temporary or set-aside folder's name.
fn hidden(name: &str) -> Option<(u64, &str)> {
    let (digits, suffix) = name.strip_prefix(".iter_")?.split_once('.')?;
    let ours = digits.bytes().all(|b| b.is_ascii_digit()) && matches!(suffix, "tmp" | "old");
    ours.then_some((digits.parse().ok()?, suffix))
}

/// The checkpoint to resume from: the one that the pointer in `dir` names; `None` if there is no
/// pointer (or no `dir`), that is, nothing was saved.
///
/// # Errors
/// If the pointer is not an iteration, names a missing checkpoint, or cannot be read.
pub fn latest(dir: &Path) -> Result<Option<Latest>> {
    let pointer = dir.join(POINTER);
    let text = match files::read(&pointer, MAX_POINTER_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read", &pointer, error)),
    };
    let text = String::from_utf8_lossy(&text);
    let iteration: u64 = text.trim().parse().map_err(|_| {
        if Found::at(dir) == Some(Found::MegatronLm) {
            return Error::checkpoint(dir, Found::MegatronLm.advice(dir));
        }
        let message = format!(
            "should hold the number of an iteration, but holds {:?}; write a number into it",
            text.trim()
        );
        Error::checkpoint(&pointer, message)
    })?;
    let names = Names::new(dir, iteration);
    // A run that was killed while replacing this checkpoint left the older one set aside.
    let path = [names.target.clone(), names.aside].into_iter().find(|path| path.is_dir()).ok_or_else(|| {
        let message = format!(
            "is missing, although {} names iteration {iteration}; write the number of an existing iteration into that file",
            pointer.display()
        );
        Error::checkpoint(&names.target, message)
    })?;
    Ok(Some(Latest { iteration, path }))
}
