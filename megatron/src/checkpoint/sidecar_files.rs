//! Sidecar files of checkpoints, such as a tokenizer: copied beside them, each completely or not at
//! all.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::shard_file::{sync_folder, write_synced};
use crate::{Error, Result, files};

/// Enough for a tokenizer of all languages in its most verbose form.
const MAX_BYTES: u64 = 256 << 20;

/// A file's contents, if it exists.
fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match files::read(path, MAX_BYTES) {
        Ok(contents) => Ok(Some(contents)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("read", path, error)),
    }
}

/// Small files to be placed beside a checkpoint. They are held in memory, so their source may
/// change.
pub struct SidecarFiles(Vec<SidecarFile>);

struct SidecarFile {
    from: PathBuf,
    to: PathBuf,
    contents: Vec<u8>,
    /// Whether a different file is in its place.
    replaces: bool,
}

impl SidecarFiles {
    /// Reads the existing source files of `pairs` (from, to) that are not in their place yet.
    ///
    /// # Errors
    /// If a file operation fails.
    pub fn read(pairs: impl IntoIterator<Item = (PathBuf, PathBuf)>) -> Result<Self> {
        let mut sidecars = Vec::new();
        for (from, to) in pairs {
            let Some(contents) = read(&from)? else { continue };
            let there = read(&to)?;
            // Also skips pairs that name the same file.
            if there.as_ref() != Some(&contents) {
                sidecars.push(SidecarFile { from, to, contents, replaces: there.is_some() });
            }
        }
        Ok(Self(sidecars))
    }

    /// Checks that no different files are in their places.
    ///
    /// # Errors
    /// The error names the first such file.
    pub fn refuse_to_replace(&self) -> Result<()> {
        match self.0.iter().find(|sidecar| sidecar.replaces) {
            None => Ok(()),
            Some(SidecarFile { from, to, .. }) => Err(Error::checkpoint(
                to,
                format!(
                    "differs from the file that belongs to the checkpoint, {}, and would be lost; \
                     write to another folder, or move this file away",
                    from.display()
                ),
            )),
        }
    }

    /// Writes the files to their places.
    ///
    /// # Errors
    /// If a file operation fails. Each place then has its old or its new file.
    pub fn place(&self) -> Result<()> {
        for SidecarFile { to, contents, .. } in &self.0 {
            let (Some(folder), Some(name)) = (to.parent(), to.file_name()) else { continue };
            let temp = folder.join(format!(".{}.tmp", name.to_string_lossy()));
            fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
            write_synced(&temp, contents)?;
            fs::rename(&temp, to).map_err(|e| Error::io("create", to, e))?;
        }
        self.0.first().and_then(|sidecar| sidecar.to.parent()).map_or(Ok(()), sync_folder)
    }
}
