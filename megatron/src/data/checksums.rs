//! Checksums of cached files, so that one that was damaged is made anew instead of trained on.
//!
//! They lie in a file of their own, since the formats of tokens and tokenizers are others'. It
//! holds `MGTNSUM1`, then of each file its u64 bytes and the CRC-32C of every block, then the
//! CRC-32C of all that; little-endian.

use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rayon::prelude::*;

use super::cache::AtomicFile;
use crate::{Error, Result};

const MAGIC: &[u8; 8] = b"MGTNSUM1";
/// Bytes that have a checksum together: as many as make reading quick, few enough for all threads
/// to have some.
const BLOCK: u64 = 4 << 20;
/// Checksums are 4 bytes for every [`BLOCK`]; more are no file of ours.
const MOST: u64 = 64 << 20;

/// The checksums of `files` as they lie on the disk.
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
/// If a file cannot be read, or that one not be written.
pub(super) fn write(path: &Path, files: &[&Path]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write(&of(files)?)?;
    file.commit()
}

/// Whether `files` are as they were when their checksums were written to `path`. Where there are
/// none, they are not.
///
/// # Errors
/// If the system refuses to read what is there.
pub(super) fn hold(path: &Path, files: &[&Path]) -> Result<bool> {
    let expected = match crate::files::read(path, MOST) {
        Ok(expected) => expected,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(Error::io("read", path, error)),
    };
    match of(files) {
        Ok(sums) => Ok(sums == expected),
        // Gone, or shorter than it was a moment ago.
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
        // More than a block, and nothing.
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
