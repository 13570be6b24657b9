//! Tools for caches: files that appear completely or not at all, a lock between processes, and keys
//! computed from content.
//!
//! Cached files are trusted if their checksums match, and only in a folder that no other user can
//! write to. Locks are the operating system's (`flock`): a lock ends with the process that holds
//! it, however that process dies.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use super::checksums;
use crate::private::{create_folder, exposed, open_file, open_lock};
use crate::{Error, Result};

/// Suffix of unfinished files.
const TEMPORARY: &str = ".tmp";
/// Extension of files with checksums of other files.
const SUMS: &str = "sums";
/// Name prefixes of cached files; see the callers of [`open_or_build`].
const CACHED: [&str; 5] = ["blend-", "gpt-", "mock-", "text-", "tokenizer-"];

/// A file under a temporary name, which [`Self::commit`] renames. If dropped before, it leaves
/// nothing behind. The next process that creates a file of the same name removes leftovers of
/// killed processes; a lock shows whether a file is still being written.
#[derive(Debug)]
pub(super) struct AtomicFile {
    path: PathBuf,
    temporary: PathBuf,
    writer: Option<BufWriter<File>>,
}

impl AtomicFile {
    pub fn create(path: &Path) -> Result<Self> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let name = path
            .file_name()
            .ok_or_else(|| Error::data(path, "is not a file name; give a file name"))?;
        let folder =
            path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        remove_unfinished(folder, name.to_str());
        loop {
            let mut temporary = name.to_owned();
            let number = COUNTER.fetch_add(1, Ordering::Relaxed);
            temporary.push(format!(".{}.{number}{TEMPORARY}", std::process::id()));
            let temporary = path.with_file_name(temporary);
            let file = match OpenOptions::new().write(true).create_new(true).open(&temporary) {
                Ok(file) => file,
                // Left by a process with the same id, perhaps in another container.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(Error::io("create", &temporary, error)),
            };
            match file.try_lock() {
                // Another process may have removed it before it was locked.
                Ok(()) if !temporary.exists() => continue,
                Err(TryLockError::WouldBlock) => continue,
                // On a file system without locks, no process removes unlocked files.
                Ok(()) | Err(TryLockError::Error(_)) => {}
            }
            let writer = Some(BufWriter::with_capacity(1 << 18, file));
            return Ok(Self { path: path.to_path_buf(), temporary, writer });
        }
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.writer {
            Some(writer) => {
                writer.write_all(bytes).map_err(|error| Error::io("write", &self.temporary, error))
            }
            None => Ok(()),
        }
    }

    /// Flushes to disk but keeps the temporary name.
    pub fn sync(&mut self) -> Result<()> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        writer
            .flush()
            .and_then(|()| writer.get_ref().sync_all())
            .map_err(|error| Error::io("write", &self.temporary, error))
    }

    /// Flushes to disk and gives the file its final name.
    pub fn commit(mut self) -> Result<()> {
        self.sync()?;
        fs::rename(&self.temporary, &self.path)
            .map_err(|error| Error::io("rename a temporary file to", &self.path, error))?;
        self.writer = None;
        // The rename is durable once the folder is synced. Some file systems refuse to sync
        // folders; the file is complete anyway.
        if let Some(folder) = self.path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        Ok(())
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(writer) = self.writer.take() {
            // Not flushed, because the content is discarded.
            drop(writer.into_parts());
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// The right to build in a cache folder, held until dropped.
#[derive(Debug)]
pub(super) struct CacheLock {
    _file: File,
}

impl CacheLock {
    /// Creates the folder if needed and waits for its lock. Removes leftovers of a killed builder.
    pub fn acquire(folder: &Path) -> Result<Self> {
        create_folder(folder).map_err(|error| unusable(folder, &error))?;
        refuse_exposed(folder)?;
        let path = folder.join(".lock");
        let file = open_lock(&path).map_err(|error| unusable(folder, &error))?;
        // On a file system without locks, several processes may do the same work; renames keep the
        // result intact.
        let locked = match file.lock() {
            Ok(()) => true,
            Err(error) if no_locks(&error) => false,
            Err(error) => return Err(Error::io("lock", &path, error)),
        };
        if locked {
            remove_leftovers(folder);
        }
        Ok(Self { _file: file })
    }
}

fn unusable(folder: &Path, error: &std::io::Error) -> Error {
    let message =
        format!("cannot be the cache folder: {error}; give a writable folder (cache_dir)");
    Error::data(folder, message)
}

/// # Errors
/// If other users can write files to `folder` that this run would trust.
fn refuse_exposed(folder: &Path) -> Result<()> {
    match exposed(folder) {
        Ok(None) => Ok(()),
        Ok(Some(why)) => {
            let message =
                format!("cannot be the cache folder: it {why}; or give another folder (cache_dir)");
            Err(Error::data(folder, message))
        }
        // The folder does not exist yet.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(unusable(folder, &error)),
    }
}

fn no_locks(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::Unsupported || error.raw_os_error() == Some(libc::ENOLCK)
}

/// Opens cached files, or builds them once for all processes that share `folder`: the others wait,
/// then open them.
///
/// `open` returns `None` if there is nothing usable; `build` must create `files` so that `open`
/// accepts them. Files that do not match their checksums are built again.
///
/// # Errors
/// Those of `open` and `build`; `Error::Data` if other users can write to `folder`.
pub(super) fn open_or_build<T>(
    folder: &Path,
    files: &[&Path],
    open: impl Fn() -> Result<Option<T>>,
    build: impl FnOnce() -> Result<()>,
) -> Result<T> {
    if fs::metadata(folder).is_ok_and(|there| !there.is_dir()) {
        return Err(unusable(folder, &ErrorKind::NotADirectory.into()));
    }
    refuse_exposed(folder)?;
    let sums = files.first().map_or_else(|| folder.to_path_buf(), |file| file.with_extension(SUMS));
    let open_whole = || if checksums::hold(&sums, files)? { open() } else { Ok(None) };
    if let Some(found) = open_whole()? {
        return Ok(found);
    }
    let _lock = CacheLock::acquire(folder)?;
    if let Some(found) = open_whole()? {
        return Ok(found);
    }
    build()?;
    checksums::write(&sums, files)?;
    open()?.ok_or_else(|| {
        Error::data(
            folder,
            "a file that was just cached here is gone; do not clean the cache during a run",
        )
    })
}

/// Removes unfinished files of the cache. Only the holder of the lock writes such files, so they
/// are leftovers; other files may belong to the user.
fn remove_leftovers(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_str().is_some_and(is_leftover) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Whether a name belongs to an unfinished file of a cache.
fn is_leftover(name: &str) -> bool {
    unfinished(name).is_some_and(|name| CACHED.iter().any(|kind| name.starts_with(kind)))
}

/// The final name of an unfinished file such as `text-KEY.bin.PID.NUMBER.tmp`; `None` for other
/// names.
pub fn unfinished(name: &str) -> Option<&str> {
    let (name, number) = name.strip_suffix(TEMPORARY)?.rsplit_once('.')?;
    let (name, pid) = name.rsplit_once('.')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(pid) && is_number(number)).then_some(name)
}

/// Removes unfinished files for `name` from `folder` if their writers are gone.
fn remove_unfinished(folder: &Path, name: Option<&str>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if name.is_some()
            && entry.file_name().to_str().and_then(unfinished) == name
            && open_file(&entry.path()).is_ok_and(|file| file.try_lock().is_ok())
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A key computed from content; equal content gives equal keys on every machine.
#[derive(Clone, Default)]
pub(super) struct KeyHasher(Sha256);

impl KeyHasher {
    /// Adds a part of known length.
    pub fn field(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    /// Adds bytes whose end the caller marks.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// 32 hexadecimal digits.
    pub fn finish(self) -> String {
        self.0.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::tests::names;

    #[test]
    fn a_file_appears_only_when_committed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let mut file = AtomicFile::create(&path).unwrap();
        file.write(b"abc").unwrap();
        file.sync().unwrap();
        assert!(!path.exists());
        file.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"abc");
        assert_eq!(names(folder.path()), ["x"]);
    }

    #[test]
    fn a_file_given_up_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = AtomicFile::create(&folder.path().join("x")).unwrap();
        file.write(b"abc").unwrap();
        drop(file);
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn what_a_killed_writer_left_of_a_file_goes_when_the_file_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["x.bin.123.0.tmp", "y.bin.123.0.tmp", "x.bin.a.0.tmp", "x.bin"] {
            fs::write(folder.path().join(name), b"").unwrap();
        }
        let alive = AtomicFile::create(&folder.path().join("x.bin")).unwrap();
        let before = names(folder.path());
        assert!(
            !before.contains(&"x.bin.123.0.tmp".to_string()) && before.len() == 4,
            "{before:?}"
        );
        AtomicFile::create(&folder.path().join("x.bin")).unwrap().commit().unwrap();
        assert_eq!(names(folder.path()), before, "one that is still written stays");
        drop(alive);
        assert_eq!(names(folder.path()), ["x.bin", "x.bin.a.0.tmp", "y.bin.123.0.tmp"]);
    }

    #[test]
    fn the_next_holder_of_the_lock_removes_what_a_killed_builder_left() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "text-0a.bin.123.0.tmp",
            "text-0a.idx.123.1.tmp",
            "tokenizer-300-0a.json.7.0.tmp",
            "gpt-0a.index.9.12.tmp",
        ] {
            fs::write(folder.path().join(name), b"half").unwrap();
        }
        // A cache folder may also hold other files: none of these belongs to the cache.
        let kept = [
            "corpus.bin.123.0.tmp",
            "notes.tmp",
            "text-0a.bin",
            "text-of-mine.1.tmp",
            "text-of-mine.a.1.tmp",
        ];
        kept.iter().for_each(|name| fs::write(folder.path().join(name), b"").unwrap());
        let _lock = CacheLock::acquire(folder.path()).unwrap();
        assert_eq!(names(folder.path()), [&[".lock"][..], &kept[..]].concat());
    }

    #[test]
    fn a_folder_that_others_can_write_into_is_no_cache() {
        use std::os::unix::fs::PermissionsExt;
        let outer = tempfile::tempdir().unwrap();
        let folder = outer.path().join("cache");
        let file = folder.join("gpt-0a.index");
        let opened = || {
            let open = || Ok(fs::read(&file).ok());
            open_or_build(&folder, &[&file], open, || {
                fs::write(&file, b"built").map_err(|e| Error::io("write", &file, e))
            })
        };
        assert_eq!(opened().unwrap(), b"built");
        assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        let message = opened().unwrap_err().to_string();
        assert!(
            message.contains("is writable by every user: fix this with `chmod go-w "),
            "{message}"
        );
        assert!(message.contains("or give another folder (cache_dir)"), "{message}");
        // Also through a link, and if only the lock file could be prepared by others.
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        fs::remove_file(folder.join(".lock")).unwrap();
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(outer.path().join("target"), folder.join(".lock")).unwrap();
        assert!(opened().is_err() && !outer.path().join("target").exists());
    }

    #[test]
    fn one_builder_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let (inside, most) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let _lock = CacheLock::acquire(folder.path()).unwrap();
                    most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(std::time::Duration::from_millis(5));
                    inside.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        assert_eq!(most.into_inner(), 1);
    }

    #[test]
    fn keys_depend_on_where_fields_end() {
        let key = |a: &[u8], b: &[u8]| {
            let mut hasher = KeyHasher::default();
            hasher.field(a).field(b);
            hasher.finish()
        };
        assert_ne!(key(b"ab", b"c"), key(b"a", b"bc"));
        assert_eq!(key(b"ab", b"c"), key(b"ab", b"c"));
        assert_eq!(key(b"ab", b"c").len(), 32);
    }
}
