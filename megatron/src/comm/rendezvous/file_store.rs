//! A store in a folder that all ranks share, with one file per key.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Store, wire};
use crate::private::{create_folder, exposed, open_file, open_lock};
use crate::{Error, Result};

/// A key is a file in a folder. A value is written under another name and then renamed, so that
/// readers see a complete value or none. The folder belongs to this user alone: any user who can
/// write to it can join the run or end it.
pub struct FileStore {
    dir: PathBuf,
    written: AtomicU64,
}

impl FileStore {
    /// Opens the store in `dir`, and creates the folder if needed.
    ///
    /// # Errors
    /// If the folder cannot be created, or other users can write to it.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref().to_path_buf();
        create_folder(&dir).map_err(|e| Error::io("create", &dir, e))?;
        if let Some(why) = exposed(&dir).map_err(|e| Error::io("look at", &dir, e))? {
            let dir = dir.display();
            return Err(Error::config(format!(
                "rendezvous: the folder {dir} {why}, or give ranks another folder to meet in"
            )));
        }
        Ok(Self { dir, written: AtomicU64::new(0) })
    }

    /// The file of `key`. Every byte other than a letter, digit or `-` is written as `%XX`, so a
    /// name never starts with `.`.
    fn path(&self, key: &str) -> PathBuf {
        let mut name = String::from("key-");
        for byte in key.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' => name.push(char::from(byte)),
                other => name.push_str(&format!("%{other:02X}")),
            }
        }
        self.dir.join(name)
    }

    fn key(name: &str) -> Option<String> {
        let mut parts = name.strip_prefix("key-")?.split('%');
        let mut bytes = parts.next()?.as_bytes().to_vec();
        for part in parts {
            bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
            bytes.extend_from_slice(part.get(2..)?.as_bytes());
        }
        String::from_utf8(bytes).ok()
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let host = super::host::name();
        let (temporary, mut file) = loop {
            let number = self.written.fetch_add(1, Ordering::Relaxed);
            let temporary =
                self.dir.join(format!(".new-{host}-{}-{:p}-{number}", std::process::id(), self));
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary) {
                Ok(file) => break (temporary, file),
                // Left by a killed process that used the same name.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(Error::io("create", &temporary, e)),
            }
        };
        file.write_all(value).map_err(|e| Error::io("write", &temporary, e))?;
        let path = self.path(key);
        fs::rename(&temporary, &path).map_err(|e| Error::io("create", &path, e))
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path(key);
        let mut value = Vec::new();
        match open_file(&path)
            .and_then(|file| file.take(wire::MAX_VALUE as u64).read_to_end(&mut value))
        {
            Ok(_) => Ok(Some(value)),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io("read", path, e)),
        }
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let path = self.dir.join(".lock");
        let file = open_lock(&path).map_err(|e| Error::io("create", &path, e))?;
        // Closing the file unlocks it, even if the process is killed.
        file.lock().map_err(|e| Error::io("lock", &path, e))?;
        let sum = super::number(key, self.get(key)?.as_deref())?.wrapping_add(amount);
        self.set(key, sum.to_string().as_bytes())?;
        Ok(sum)
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>> {
        let entries = fs::read_dir(&self.dir).map_err(|e| Error::io("list", &self.dir, e))?;
        let names = entries.filter_map(|entry| Self::key(entry.ok()?.file_name().to_str()?));
        let mut keys: Vec<String> = names.filter(|key| key.starts_with(prefix)).collect();
        keys.sort();
        Ok(keys)
    }
}
