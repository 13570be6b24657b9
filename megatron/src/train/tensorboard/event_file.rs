//! A file of events in a folder that TensorBoard reads as one run.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::event::{Event, What, write_record};
use crate::comm::rendezvous::this_host;
use crate::{Error, Result};

/// How names of event files begin; what follows is the second in which they were made.
const NAME: &str = "events.out.tfevents.";

/// One run's file. Its folder may have those of the run's parts before.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl EventFile {
    /// A new file in `folder`, which is made where it is missing. `number` tells the files apart
    /// that a process has. What earlier files have of `first_step` and later steps counts no more.
    ///
    /// # Errors
    /// If the folder or the file cannot be made or written to.
    pub fn create(folder: &Path, number: usize, first_step: u64) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
        // Readers take files in the order of their names, and clocks of machines differ.
        let second = match last_second(folder)? {
            Some(last) => (now() as u64).max(last.saturating_add(1)),
            None => now() as u64,
        };
        let path = folder.join(format!(
            "{NAME}{second:010}.{}.{}.{number}",
            this_host(),
            std::process::id()
        ));
        let file = OpenOptions::new().write(true).create_new(true).open(&path);
        let file = file.map_err(|e| Error::io("create", &path, e))?;
        let mut events = Self { path, file: BufWriter::new(file) };
        events.append(0, What::FileVersion)?;
        events.append(first_step, What::SessionStart)?;
        events.flush()?;
        Ok(events)
    }

    /// Appends a value of each curve; [`Self::flush`] shows them to readers.
    ///
    /// # Errors
    /// If they cannot be written, e.g. on a full disk.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> Result<()> {
        self.append(step, What::Scalars(values))
    }

    fn append(&mut self, step: u64, what: What<'_>) -> Result<()> {
        let event = Event { wall_time: now(), step, what };
        write_record(&mut self.file, &event.encode()).map_err(|e| Error::io("write", &self.path, e))
    }

    /// Hands what was appended to the operating system.
    ///
    /// # Errors
    /// If it cannot be written, e.g. on a full disk.
    pub fn flush(&mut self) -> Result<()> {
        self.file.flush().map_err(|e| Error::io("write", &self.path, e))
    }
}

/// Whether `folder` has event files.
///
/// # Errors
/// If it cannot be read.
pub fn has_events(folder: &Path) -> Result<bool> {
    Ok(last_second(folder)?.is_some())
}

/// The second that the last of the event files in `folder` has in its name.
fn last_second(folder: &Path) -> Result<Option<u64>> {
    let mut last = None;
    let unreadable = |e| Error::io("read", folder, e);
    let entries = match std::fs::read_dir(folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        entries => entries.map_err(unreadable)?,
    };
    for entry in entries {
        let name = entry.map_err(unreadable)?.file_name();
        let second =
            name.to_str().and_then(|name| name.strip_prefix(NAME)?.split('.').next()?.parse().ok());
        last = last.max(second);
    }
    Ok(last)
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_folder_are_in_order_whatever_the_clock_says() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("new/board");
        assert!(!has_events(&dir).unwrap());
        let paths: Vec<PathBuf> =
            (0..3).map(|_| EventFile::create(&dir, 0, 1).unwrap().path).collect();
        assert!(has_events(&dir).unwrap() && paths.is_sorted(), "{paths:?}");
        std::fs::write(dir.join(format!("{NAME}9000000000.far.1.0")), "").unwrap();
        let after = EventFile::create(&dir, 0, 1).unwrap().path;
        assert!(after.to_string_lossy().contains(&format!("{NAME}9000000001.")), "{after:?}");
    }

    #[test]
    fn a_full_disk_is_an_error_that_names_the_file() {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut events = EventFile { path: "board/events".into(), file: BufWriter::new(full) };
        events.scalars(1, &[("lm loss", 1.0)]).unwrap();
        let error = events.flush().unwrap_err().to_string();
        assert!(error.starts_with("cannot write board/events: No space left on device"), "{error}");
    }
}
