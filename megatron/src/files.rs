//! Opens files by name: only regular files and, if they are read whole, only up to a limit on their
//! size.
//!
//! A pipe in place of a file would block until a process writes to it, and a device may never end.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Component, Path};

/// Start of a Git LFS pointer file, which stands in place of a large file until that is fetched.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
/// Longer files are not pointers.
const LONGEST_POINTER: u64 = 1024;

/// Opens a regular file for reading.
///
/// # Errors
/// If it cannot be opened, or is a folder, pipe, socket or device.
pub fn open(path: &Path) -> Result<File> {
    open_with(path, OpenOptions::new().read(true))
}

/// Opens a regular file with `options`, which may create it.
///
/// # Errors
/// As [`open`].
pub fn open_with(path: &Path, options: &mut OpenOptions) -> Result<File> {
    // Checked before opening, because opening a pipe affects the process that writes to it.
    if let Ok(there) = path.metadata() {
        require_regular(&there)?;
    }
    let file = options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    // Another file may have replaced it in the meantime.
    require_regular(&file.metadata()?)?;
    Ok(file)
}

/// Opens a file for writing, with `options`. It must be a regular file, or a character device such
/// as `/dev/null`, which accepts all data.
///
/// # Errors
/// As [`open`], except for character devices.
pub fn open_to_write(path: &Path, options: &mut OpenOptions) -> Result<File> {
    if is_character_device(path) { options.open(path) } else { open_with(path, options) }
}

/// Refuses an existing file that [`open_to_write`] would refuse.
///
/// # Errors
/// If there is such a file.
pub fn check_to_write(path: &Path) -> Result<()> {
    match path.metadata() {
        Ok(there) if !there.file_type().is_char_device() => require_regular(&there),
        _ => Ok(()),
    }
}

fn is_character_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|there| there.file_type().is_char_device())
}

/// Opens a regular binary file, as [`open`]. Refuses a Git LFS pointer in its place.
///
/// # Errors
/// As [`open`]; also if it is a Git LFS pointer.
pub fn open_binary(path: &Path) -> Result<File> {
    let file = open(path)?;
    let mut start = [0; POINTER.len()];
    let is_short = file.metadata()?.len() <= LONGEST_POINTER;
    if is_short && file.read_exact_at(&mut start, 0).is_ok() {
        refuse_pointer(&start)?;
    }
    Ok(file)
}

/// Reads a regular file of at most `most` bytes completely.
///
/// # Errors
/// As [`open`]; also if the file is longer, or is a Git LFS pointer.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let file = open(path)?;
    let too_long = |bytes: u64| {
        let message =
            format!("it has {bytes} bytes, but at most {most} are plausible for such a file");
        Error::new(ErrorKind::FileTooLarge, message)
    };
    let length = file.metadata()?.len();
    if length > most {
        return Err(too_long(length));
    }
    let mut bytes = Vec::with_capacity(length as usize);
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(too_long(bytes.len() as u64));
    }
    refuse_pointer(&bytes)?;
    Ok(bytes)
}

/// As [`read`], for a text file.
///
/// # Errors
/// As [`read`]; also if it is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> Result<String> {
    let not_utf8 = |_| Error::new(ErrorKind::InvalidData, "it is not UTF-8");
    String::from_utf8(read(path, most)?).map_err(not_utf8)
}

fn require_regular(there: &std::fs::Metadata) -> Result<()> {
    let kind = there.file_type();
    let what = match kind {
        _ if kind.is_file() => return Ok(()),
        _ if kind.is_dir() => {
            return Err(Error::new(
                ErrorKind::IsADirectory,
                "it is a folder, but a file is needed",
            ));
        }
        _ if kind.is_fifo() => "a pipe",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(Error::new(ErrorKind::InvalidInput, format!("it is {what}, but a regular file is needed")))
}

fn refuse_pointer(start: &[u8]) -> Result<()> {
    if !start.starts_with(POINTER) {
        return Ok(());
    }
    let message = "it is a Git LFS pointer, not the file itself; fetch the file with `git lfs pull` in its folder";
    Err(Error::new(ErrorKind::InvalidData, message))
}

/// File endings that no model name on the Hugging Face hub has.
const FILE_ENDINGS: [&str; 8] =
    ["json", "txt", "toml", "model", "tiktoken", "bin", "safetensors", "gguf"];

/// Whether a path looks like a model name on the Hugging Face hub: `gpt2`, `Qwen/Qwen2-0.5B`.
pub fn could_be_of_the_hub(path: &Path) -> bool {
    let is_name = |part: Component| match part {
        Component::Normal(part) => part.to_str().is_some_and(|part| {
            part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        }),
        _ => false,
    };
    let is_file =
        path.extension().is_some_and(|ending| FILE_ENDINGS.iter().any(|known| ending == *known));
    !is_file && (1..=2).contains(&path.components().count()) && path.components().all(is_name)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_regular_files_are_opened_and_nothing_waits_for_a_pipe() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            at("pipe"),
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        fs::write(at("file"), "text").unwrap();
        std::os::unix::fs::symlink(at("pipe"), at("link")).unwrap();
        std::os::unix::fs::symlink(at("file"), at("good")).unwrap();
        for (path, what) in [
            (at("pipe"), "a pipe"),
            (at("link"), "a pipe"),
            (at("socket"), "a socket"),
            (folder.path().to_path_buf(), "a folder"),
            ("/dev/zero".into(), "a device"),
        ] {
            let errors = [
                open(&path).unwrap_err(),
                open_binary(&path).unwrap_err(),
                read(&path, u64::MAX).unwrap_err(),
                open_with(&path, OpenOptions::new().write(true).create(true)).unwrap_err(),
            ];
            errors.iter().for_each(|error| {
                assert!(error.to_string().contains(what), "{}: {error}", path.display())
            });
        }
        assert_eq!(read_text(&at("good"), 4).unwrap(), "text");
        assert_eq!(read(&at("none"), 4).unwrap_err().kind(), ErrorKind::NotFound);
        open_with(&at("new"), OpenOptions::new().write(true).create_new(true)).unwrap();
        // Character devices accept what is written to them; other special files do not.
        for (path, is_fine) in [
            ("pipe", false),
            ("socket", false),
            ("file", true),
            ("later", true),
            ("/dev/null", true),
        ] {
            assert_eq!(check_to_write(&at(path)).is_ok(), is_fine, "{path}");
            let opened = open_to_write(&at(path), OpenOptions::new().write(true).create(true));
            assert_eq!(opened.is_ok(), is_fine, "{path}");
        }
    }

    #[test]
    fn what_is_read_whole_is_of_a_sensible_size() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        let error = read(&path, 1 << 20).unwrap_err().to_string();
        assert!(error.contains("1099511627776 bytes, but at most 1048576"), "{error}");
        // Longer than its reported size.
        assert!(
            read(Path::new("/proc/self/status"), 10)
                .unwrap_err()
                .to_string()
                .contains("at most 10")
        );
        assert!(read_text(Path::new("/proc/self/status"), 1 << 20).unwrap().contains("VmRSS"));
    }

    #[test]
    fn a_pointer_of_large_file_storage_is_told_for_what_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        fs::write(
            &path,
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n",
        )
        .unwrap();
        for error in
            [read(&path, 1 << 20).map(drop).unwrap_err(), open_binary(&path).map(drop).unwrap_err()]
        {
            assert!(error.to_string().contains("`git lfs pull`"), "{error}");
        }
        open(&path).unwrap();
    }
}
