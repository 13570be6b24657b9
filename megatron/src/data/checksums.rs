//! Checksums of cached files, so that a damaged file is rebuilt instead of used for training.
//!
//! They are in a separate file, because the formats of tokens and tokenizers are fixed by other
//! programs. It holds `MGTNSUM1`, then for each file its size in bytes (u64) and the CRC-32C of
//! every block, then the CRC-32C of all of this; little-endian.

use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rayon::prelude::*;

use super::cache::AtomicFile;
use crate::{Error, Result};

const MAGIC: &[u8; 8] = b"MGTNSUM1";
/// Bytes per checksum: enough for fast reading, few enough to occupy all threads.
const BLOCK: u64 = 4 << 20;
/// Checksums are 4 bytes for every [`BLOCK`]; a larger file is not ours.
const MOST: u64 = 64 << 20;

/// The checksums of `files` on disk.
fn of(files: &[&Path]) -> Result<Vec<u8>> {
    let mut sums = MAGIC.to_vec();
    for path in files {
        let read = |error| Error::io("read", *path, error);
        let file = crate::files::open(path).map_err(read)?;
        let len = file.metadata().map_err(read)?.len();
        let sum = |block: u64| -> std::io::Result<u32> {
            let start = block * BLOCK;
            let mut bytes = vec![0; (len - start).min(BLOCK) as usize];
            file.read_exact_at(&mut bytes, start)?;
            Ok(crc32c::crc32c(&bytes))
        };
        let blocks: Vec<u32> = (0..len.div_ceil(BLOCK))
            .into_par_iter()
            .map(sum)
            .collect::<std::io::Result<_>>()
            .map_err(read)?;
        sums.extend_from_slice(&len.to_le_bytes());
        blocks.iter().for_each(|sum| sums.extend_from_slice(&sum.to_le_bytes()));
    }
    let all = crc32c::crc32c(&sums);
    sums.extend_from_slice(&all.to_le_bytes());
    Ok(sums)
}

/// Writes the checksums of `files` to `path`.
///
/// # Errors
/// If a file cannot be read, or `path` cannot be written.
pub(super) fn write(path: &Path, files: &[&Path]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write(&of(files)?)?;
    file.commit()
}

/// Whether `files` are unchanged since their checksums were written to `path`. False if there are
/// no checksums.
///
/// # Errors
/// If an existing file cannot be read.
pub(super) fn hold(path: &Path, files: &[&Path]) -> Result<bool> {
    let expected = match crate::files::read(path, MOST) {
        Ok(expected) => expected,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(Error::io("read", path, error)),
    };
    match of(files) {
        Ok(sums) => Ok(sums == expected),
        // Removed or truncated a moment ago.
        Err(Error::Io { source, .. })
            if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::UnexpectedEof) =>
        {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_whose_every_byte_is_as_it_was_hold_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let [sums, a, b] = ["sums", "a", "b"].map(|name| folder.path().join(name));
        let files = [a.as_path(), &b];
        assert!(!hold(&sums, &files).unwrap());
        // More than one block, and an empty file.
        let long: Vec<u8> = (0..BLOCK + 5).map(|i| ((i * i) >> 5) as u8).collect();
        std::fs::write(&a, &long).unwrap();
        std::fs::write(&b, b"").unwrap();
        write(&sums, &files).unwrap();
        assert!(hold(&sums, &files).unwrap());
        assert!(!hold(&sums, &[&b, &a]).unwrap());
        for at in [0, BLOCK as usize, long.len() - 1] {
            let mut damaged = long.clone();
            damaged[at] ^= 1;
            std::fs::write(&a, damaged).unwrap();
            assert!(!hold(&sums, &files).unwrap(), "byte {at}");
        }
        std::fs::write(&a, &long[1..]).unwrap();
        assert!(!hold(&sums, &files).unwrap());
        std::fs::write(&a, &long).unwrap();
        std::fs::write(&b, b"x").unwrap();
        assert!(!hold(&sums, &files).unwrap());
        std::fs::remove_file(&b).unwrap();
        assert!(!hold(&sums, &files).unwrap());
        std::fs::write(&b, b"").unwrap();
        let whole = std::fs::read(&sums).unwrap();
        std::fs::write(&sums, &whole[..whole.len() - 1]).unwrap();
        assert!(!hold(&sums, &files).unwrap());
    }
}
