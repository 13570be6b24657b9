//! An event file in a folder that TensorBoard reads as one run.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::event::{Event, What, write_record};
use crate::comm::rendezvous::this_host;
use crate::{Error, Result};

/// Prefix of the names of event files. The time of creation follows, in seconds.
const NAME: &str = "events.out.tfevents.";

/// One run's file. Its folder may hold files of earlier parts of the run.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl EventFile {
    /// Creates a new file in `folder`, and the folder if it does not exist. `number` distinguishes
    /// the files of one process. Readers ignore the values of `first_step` and later steps in
    /// earlier files.
    ///
    /// # Errors
    /// If the folder or the file cannot be created or written.
    pub fn create(folder: &Path, number: usize, first_step: u64) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
        // Readers order files by name, and the clocks of machines differ.
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

    /// Appends one value to each curve. Readers see them after [`Self::flush`].
    ///
    /// # Errors
    /// If the values cannot be written, e.g. on a full disk.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> Result<()> {
        self.append(step, What::Scalars(values))
    }

    fn append(&mut self, step: u64, what: What<'_>) -> Result<()> {
        let event = Event { wall_time: now(), step, what };
        write_record(&mut self.file, &event.encode()).map_err(|e| Error::io("write", &self.path, e))
    }

    /// Passes appended values to the operating system.
    ///
    /// # Errors
    /// If they cannot be written, e.g. on a full disk.
    pub fn flush(&mut self) -> Result<()> {
        self.file.flush().map_err(|e| Error::io("write", &self.path, e))
    }
}

/// Whether `folder` contains event files.
///
/// # Errors
/// If the folder cannot be read.
pub fn has_events(folder: &Path) -> Result<bool> {
    Ok(last_second(folder)?.is_some())
}

/// The largest time, in seconds, in the names of the event files in `folder`.
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
