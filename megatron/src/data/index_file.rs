//! Cached arrays of integers in one file, written as a stream and read by positioned reads.
//!
//! The file: `MGTNIDX1`, u64 number of arrays, per array u64 bytes of an element and u64 elements,
//! then the arrays, all little-endian. It appears completely or not at all, so only its length is
//! checked here ([`super::checksums`] checks the rest); the reader of an element checks the
//! element.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::cache::AtomicFile;
use crate::{Error, Result};

const MAGIC: &[u8; 8] = b"MGTNIDX1";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Bytes of an element: 2, 4 or 8.
    pub width: u64,
    pub len: u64,
}

impl Shape {
    /// `len` elements of the smallest width, 4 or 8, that holds every number below `bound`.
    pub fn of_values_below(bound: u64, len: u64) -> Self {
        Self { width: if bound <= 1 << 32 { 4 } else { 8 }, len }
    }

    fn bytes(self) -> Option<u64> {
        self.width.checked_mul(self.len)
    }
}

/// Reads the arrays of a file.
#[derive(Debug)]
pub(super) struct IndexFile {
    path: PathBuf,
    file: File,
    /// Shape and first byte of each array.
    arrays: Vec<(Shape, u64)>,
}

impl IndexFile {
    /// `None` if there is no file, or it is not complete with `num_arrays` arrays.
    pub fn open(path: &Path, num_arrays: usize) -> Result<Option<Self>> {
        let file = match crate::files::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io("open", path, error)),
        };
        let len = file.metadata().map_err(|error| Error::io("inspect", path, error))?.len();
        let mut header = vec![0; 16 + 16 * num_arrays];
        if file.read_exact_at(&mut header, 0).is_err() {
            return Ok(None);
        }
        let words: Vec<u64> = header[8..].chunks_exact(8).map(little_endian).collect();
        let mut next = Some(header.len() as u64);
        let mut arrays = Vec::with_capacity(num_arrays);
        for pair in words[1..].chunks_exact(2) {
            let shape = Shape { width: pair[0], len: pair[1] };
            arrays.push((shape, next.unwrap_or_default()));
            next = next.and_then(|first| first.checked_add(shape.bytes()?));
        }
        let widths = arrays.iter().all(|(shape, _)| matches!(shape.width, 2 | 4 | 8));
        let whole =
            &header[..8] == MAGIC && words[0] == num_arrays as u64 && widths && next == Some(len);
        Ok(whole.then(|| Self { path: path.to_path_buf(), file, arrays }))
    }

    /// Elements of an array.
    pub fn len(&self, array: usize) -> u64 {
        self.arrays[array].0.len
    }

    /// The `COUNT` elements from `first` on.
    pub fn get<const COUNT: usize>(&self, array: usize, first: u64) -> Result<[u64; COUNT]> {
        let (Shape { width, len }, start) = self.arrays[array];
        if first.checked_add(COUNT as u64).is_none_or(|end| end > len) {
            return Err(self.damaged());
        }
        let mut bytes = [[0u8; 8]; COUNT];
        let bytes = &mut bytes.as_flattened_mut()[..COUNT * width as usize];
        self.file.read_exact_at(bytes, start + first * width).map_err(|error| {
            match error.kind() {
                std::io::ErrorKind::UnexpectedEof => self.damaged(),
                _ => Error::io("read", &self.path, error),
            }
        })?;
        let mut values = [0; COUNT];
        values
            .iter_mut()
            .zip(bytes.chunks_exact(width as usize))
            .for_each(|(value, b)| *value = little_endian(b));
        Ok(values)
    }

    /// The error for an index that contradicts itself or its data.
    pub fn damaged(&self) -> Error {
        Error::data(
            &self.path,
            "is damaged or was replaced during the run; remove it, and the next run builds it again",
        )
    }
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// Writes such a file: the elements of all arrays, one after another.
pub(super) struct IndexWriter {
    file: AtomicFile,
    shapes: Vec<Shape>,
    array: usize,
    written: u64,
}

impl IndexWriter {
    pub fn create(path: &Path, shapes: &[Shape]) -> Result<Self> {
        let mut file = AtomicFile::create(path)?;
        file.write(MAGIC)?;
        file.write(&(shapes.len() as u64).to_le_bytes())?;
        for shape in shapes {
            file.write(&shape.width.to_le_bytes())?;
            file.write(&shape.len.to_le_bytes())?;
        }
        Ok(Self { file, shapes: shapes.to_vec(), array: 0, written: 0 })
    }

    /// Appends an element. It must fit its array.
    pub fn push(&mut self, value: u64) -> Result<()> {
        while self.written == self.shapes[self.array].len {
            self.array += 1;
            self.written = 0;
        }
        self.written += 1;
        self.file.write(&value.to_le_bytes()[..self.shapes[self.array].width as usize])
    }

    /// Finishes the file and makes it appear.
    pub fn finish(self) -> Result<()> {
        self.file.commit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPES: [Shape; 3] =
        [Shape { width: 4, len: 2 }, Shape { width: 8, len: 0 }, Shape { width: 8, len: 3 }];

    fn written(folder: &Path) -> PathBuf {
        let path = folder.join("x");
        let mut writer = IndexWriter::create(&path, &SHAPES).unwrap();
        for value in [1, u64::from(u32::MAX), 3, u64::MAX, 5] {
            writer.push(value).unwrap();
        }
        writer.finish().unwrap();
        path
    }

    #[test]
    fn arrays_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let file = IndexFile::open(&written(folder.path()), 3).unwrap().unwrap();
        assert_eq!(file.get::<2>(0, 0).unwrap(), [1, u64::from(u32::MAX)]);
        assert_eq!((file.len(1), file.get::<2>(2, 1).unwrap()), (0, [u64::MAX, 5]));
        assert!(
            file.get::<2>(0, 1).is_err()
                && file.get::<1>(1, 0).is_err()
                && file.get::<1>(2, u64::MAX).is_err()
        );
    }

    #[test]
    fn what_is_not_whole_is_as_if_it_were_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = written(folder.path());
        let whole = std::fs::read(&path).unwrap();
        assert!(IndexFile::open(&path, 2).unwrap().is_none());
        assert!(IndexFile::open(&folder.path().join("none"), 3).unwrap().is_none());
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert!(IndexFile::open(&path, 3).unwrap().is_none(), "{len} bytes");
        }
        for (at, byte) in [(0, 0), (8, 2), (16, 3), (24, 9), (31, 255)] {
            let mut lying = whole.clone();
            lying[at] = byte;
            std::fs::write(&path, lying).unwrap();
            assert!(IndexFile::open(&path, 3).unwrap().is_none(), "byte {at}");
        }
    }

    #[test]
    fn elements_are_as_wide_as_their_values_need() {
        assert_eq!(Shape::of_values_below(1 << 32, 5), Shape { width: 4, len: 5 });
        assert_eq!(Shape::of_values_below((1 << 32) + 1, 5), Shape { width: 8, len: 5 });
    }
}
