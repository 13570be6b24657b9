//! Files that go along with checkpoints, such as a tokenizer: copied beside them, each whole or not
//! at all.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::shard_file::{sync_folder, write_synced};
use crate::{Error, Result, files};

/// Of a tokenizer for all languages, in its longest spelling.
const MAX_BYTES: u64 = 256 << 20;

/// A file, if it is there.
fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match files::read(path, MAX_BYTES) {
        Ok(contents) => Ok(Some(contents)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("read", path, error)),
    }
}

/// Small files on their way beside a checkpoint. They are in memory, so that it does not matter
/// where they came from.
pub struct SidecarFiles(Vec<SidecarFile>);

struct SidecarFile {
    from: PathBuf,
    to: PathBuf,
    contents: Vec<u8>,
    /// Whether there is another file in its place.
    replaces: bool,
}

impl SidecarFiles {
    /// Reads those files of `pairs` (from, to) that there are and that are not in their place yet.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn read(pairs: impl IntoIterator<Item = (PathBuf, PathBuf)>) -> Result<Self> {
        let mut sidecars = Vec::new();
        for (from, to) in pairs {
            let Some(contents) = read(&from)? else { continue };
            let there = read(&to)?;
            // Also where both are one file.
            if there.as_ref() != Some(&contents) {
                sidecars.push(SidecarFile { from, to, contents, replaces: there.is_some() });
            }
        }
        Ok(Self(sidecars))
    }

    /// Asserts that no other files are in their places.
    ///
    /// # Errors
    /// Naming the first one.
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

    /// Puts the files in their places.
    ///
    /// # Errors
    /// If the system refuses; every place has its old file then, or its new one.
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
