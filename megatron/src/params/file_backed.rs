//! Elements that are kept in files instead of memory, such as optimizer state that is read and written
//! once per step (Rajbhandari et al. 2021, "ZeRO-Infinity").

use std::fs::{self, File};
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Tensor};
use kernels::tensor::trace::kernel;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};
use rustix::io::{Errno, retry_on_intr};

use crate::{Error, Result};

/// Bytes that a thread reads or writes at a time, and the stripe size: each block of this size lies
/// contiguously in one file, and the next block lies in the next file. Larger blocks do not fit the
/// second-level cache; smaller blocks cost more system calls.
const BLOCK: usize = 256 << 10;
/// Number of files. Several are needed because file systems let only one thread write to a file at
/// a time.
const FILES: usize = 8;
const OP: &str = "optimizer-state";

/// `len` elements of a dtype in unnamed files. The system frees their space when the last handle is
/// dropped, or when the process ends for any reason.
#[derive(Clone, Debug)]
pub struct FileBacked {
    files: Arc<Files>,
    dtype: DType,
    /// Byte offset of the first element.
    at: usize,
    len: usize,
}

/// Blocks of bytes, striped over the files.
#[derive(Debug)]
struct Files {
    files: Vec<File>,
    /// The folder whose disk holds them.
    folder: PathBuf,
}

impl Files {
    /// Creates files of `len` zero bytes; see [`FileBacked::zeros`].
    fn zeros(folder: &Path, len: usize) -> Result<Self> {
        fs::create_dir_all(folder).map_err(|error| Error::io("create", folder, error))?;
        let each = len.div_ceil(BLOCK).div_ceil(FILES) * BLOCK;
        let file = || {
            let file = tempfile::tempfile_in(folder)
                .map_err(|error| Error::io("create a file in", folder, error))?;
            reserve(&file, each as u64).map_err(|error| {
                Error::config(format!(
                    "{}: no room for {:.2} GiB: {error}; free disk space, or give a folder on another disk",
                    folder.display(),
                    (FILES * each) as f64 / f64::from(1 << 30)
                ))
            })?;
            Ok(file)
        };
        Ok(Self {
            files: (0..FILES).map(|_| file()).collect::<Result<_>>()?,
            folder: folder.to_path_buf(),
        })
    }

    /// The file that holds byte `at`, and the byte's offset in that file.
    fn place(&self, at: usize) -> (&File, u64) {
        let (block, byte) = (at / BLOCK, at % BLOCK);
        (&self.files[block % FILES], (block / FILES * BLOCK + byte) as u64)
    }

    fn read(&self, at: usize, to: &mut [u8]) -> io::Result<()> {
        let (file, at) = self.place(at);
        file.read_exact_at(to, at)
    }

    fn write(&self, at: usize, from: &[u8]) -> io::Result<()> {
        let (file, at) = self.place(at);
        file.write_all_at(from, at)
    }
}

/// Splits the `len` bytes from byte `at` on at block boundaries. Yields the first byte and the
/// length of each part.
fn blocks(at: usize, len: usize) -> impl Iterator<Item = (usize, usize)> {
    let first = (BLOCK - at % BLOCK).min(len);
    let later = (at + first..at + len)
        .step_by(BLOCK)
        .map(move |start| (start, BLOCK.min(at + len - start)));
    std::iter::once((at, first)).filter(|&(_, len)| len > 0).chain(later)
}

impl FileBacked {
    /// Creates zeros: for each of `parts` that many elements of that dtype. All parts share the
    /// same files, on the disk of `folder`. Creates the folder if it does not exist.
    ///
    /// # Errors
    /// If the folder cannot be created or written to, or its disk has no room.
    pub fn zeros(folder: &Path, parts: &[(usize, DType)]) -> Result<Vec<Self>> {
        let mut end = 0;
        let places: Vec<_> = parts
            .iter()
            .map(|&(len, dtype)| {
                let at = end;
                end += (len * dtype.size_in_bytes()).next_multiple_of(BLOCK);
                (at, len, dtype)
            })
            .collect();
        let files = Arc::new(Files::zeros(folder, end)?);
        Ok(places
            .into_iter()
            .map(|(at, len, dtype)| Self { files: files.clone(), dtype, at, len })
            .collect())
    }

    /// Dtype of the elements in the file.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements `range`, as a view of the same files.
    ///
    /// # Errors
    /// If `range` exceeds the elements.
    pub fn narrow(&self, range: &Range<usize>) -> Result<Self> {
        let at = self.byte(range)?;
        Ok(Self { at, len: range.len(), ..self.clone() })
    }

    /// Fills all of `to`, a tensor on the host, with the first elements.
    ///
    /// # Errors
    /// If the files cannot be read, or `to` is longer or of another dtype.
    pub fn read(&self, to: &Tensor) -> Result<()> {
        let at = self.first_byte_of(to)?;
        let _span = kernel("read_state", 0, to.elem_count() * self.dtype.size_in_bytes());
        let mut done = Ok(());
        kernels::tensor::host::with_bytes_mut(to, OP, |bytes| {
            let (mut rest, mut parts) = (bytes, Vec::new());
            for (at, len) in blocks(at, rest.len()) {
                let part;
                (part, rest) = rest.split_at_mut(len);
                parts.push((at, part));
            }
            done = on_threads(parts, |(at, part)| self.files.read(at, part));
            Ok(())
        })?;
        done.map_err(|error| self.failed("read what is kept in", error))
    }

    /// Writes all of `from`, a tensor on the host, to the first elements.
    ///
    /// # Errors
    /// If the files cannot be written, or `from` is longer or of another dtype.
    pub fn write(&self, from: &Tensor) -> Result<()> {
        let at = self.first_byte_of(from)?;
        let _span = kernel("write_state", 0, from.elem_count() * self.dtype.size_in_bytes());
        let mut done = Ok(());
        kernels::tensor::host::with_bytes(from, OP, |bytes| {
            let parts: Vec<_> = blocks(at, bytes.len()).collect();
            done = on_threads(parts, |(start, len)| {
                self.files.write(start, &bytes[start - at..start - at + len])
            });
            Ok(())
        })?;
        done.map_err(|error| self.failed("write what is kept in", error))
    }

    /// Reads the bytes of the elements `range`.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn read_bytes(&self, range: &Range<usize>) -> Result<Vec<u8>> {
        let at = self.byte(range)?;
        let mut bytes = vec![0; range.len() * self.dtype.size_in_bytes()];
        let mut parts = blocks(at, bytes.len());
        let read = parts.try_for_each(|(start, len)| {
            self.files.read(start, &mut bytes[start - at..start - at + len])
        });
        read.map_err(|error| self.failed("read what is kept in", error))?;
        Ok(bytes)
    }

    /// Writes `bytes` of whole elements from element `first` on.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn write_bytes(&self, first: usize, bytes: &[u8]) -> Result<()> {
        let at = self.byte(&(first..first + bytes.len() / self.dtype.size_in_bytes()))?;
        let mut parts = blocks(at, bytes.len());
        let written = parts.try_for_each(|(start, len)| {
            self.files.write(start, &bytes[start - at..start - at + len])
        });
        written.map_err(|error| self.failed("write what is kept in", error))
    }

    /// Asks the system to read the elements `range` ahead, without waiting. Ignores what exceeds
    /// the elements.
    pub fn prefetch(&self, range: Range<usize>) {
        let range = range.start.min(self.len)..range.end.min(self.len);
        let size = self.dtype.size_in_bytes();
        for (at, len) in blocks(self.at + range.start * size, range.len() * size) {
            let (file, at) = self.files.place(at);
            // Errors are ignored, because the advice affects speed only.
            let _ = fadvise(file, at, NonZeroU64::new(len as u64), Advice::WillNeed);
        }
    }

    fn byte(&self, range: &Range<usize>) -> Result<usize> {
        if range.start > range.end || range.end > self.len {
            let message = format!("internal error: elements {range:?} of {} in a file", self.len);
            return Err(Error::config(message));
        }
        Ok(self.at + range.start * self.dtype.size_in_bytes())
    }

    fn first_byte_of(&self, tensor: &Tensor) -> Result<usize> {
        if tensor.dtype() != self.dtype {
            let dtypes = (tensor.dtype().as_str(), self.dtype.as_str());
            return Err(Error::config(format!(
                "internal error: a tensor of {} for a file of {}",
                dtypes.0, dtypes.1
            )));
        }
        self.byte(&(0..tensor.elem_count()))
    }

    fn failed(&self, action: &'static str, error: io::Error) -> Error {
        Error::io(action, &self.files.folder, error)
    }
}

/// Calls `f` with each of `parts`, in parallel. A rank that computes on one thread runs them on the
/// calling thread: the pool would hand them to a second thread.
pub(crate) fn on_threads<T: Send, E: Send>(
    parts: Vec<T>,
    f: impl Fn(T) -> std::result::Result<(), E> + Send + Sync,
) -> std::result::Result<(), E> {
    if rayon::current_num_threads() == 1 {
        parts.into_iter().try_for_each(f)
    } else {
        parts.into_par_iter().try_for_each(f)
    }
}

/// Makes `file` `len` bytes long and reserves the space, where the file system supports that.
fn reserve(file: &File, len: u64) -> io::Result<()> {
    if len == 0 {
        return Ok(());
    }
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, len)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(len),
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn values(n: usize, first: f32) -> Tensor {
        Tensor::arange(first, first + n as f32, &Device::Cpu).unwrap()
    }

    #[test]
    fn tensors_in_a_file_begin_as_zeros_and_keep_what_is_written_apart() {
        let folder = tempfile::tempdir().unwrap();
        // Longer than one block, and not a multiple of the block size.
        let n = (FILES + 2) * BLOCK / 4 + 77;
        let kept =
            FileBacked::zeros(folder.path(), &[(n, DType::F32), (5, DType::BF16), (0, DType::F32)])
                .unwrap();
        let read = |kept: &FileBacked| {
            let to = Tensor::ones(kept.len(), kept.dtype(), &Device::Cpu).unwrap();
            kept.read(&to).unwrap();
            to.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
        };
        assert_eq!([read(&kept[0]), read(&kept[1])], [vec![0.; n], vec![0.; 5]]);
        kept[0].write(&values(n, 1.)).unwrap();
        kept[1].write(&values(5, 3.).to_dtype(DType::BF16).unwrap()).unwrap();
        assert_eq!(read(&kept[0]), values(n, 1.).to_vec1::<f32>().unwrap());
        assert_eq!(read(&kept[1]), [3., 4., 5., 6., 7.]);
        assert_eq!(
            read(&kept[0].narrow(&(n - 3..n)).unwrap()),
            [n as f32 - 2., n as f32 - 1., n as f32]
        );
        kept[0].narrow(&(7..9)).unwrap().write(&values(2, -2.)).unwrap();
        kept[0].write_bytes(10, &5f32.to_ne_bytes()).unwrap();
        assert_eq!(read(&kept[0])[6..12], [7., -2., -1., 10., 5., 12.]);
        assert_eq!(kept[0].read_bytes(&(8..9)).unwrap(), (-1f32).to_ne_bytes());
        assert!(kept[2].is_empty() && kept[0].narrow(&(n - 1..n + 1)).is_err());
    }

    #[test]
    fn files_have_no_name() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("made/on/the/way");
        let kept = FileBacked::zeros(&inside, &[(1 << 20, DType::F32)]).unwrap();
        assert_eq!(fs::read_dir(&inside).unwrap().count(), 0);
        kept[0].write(&values(7, 1.)).unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let refused = FileBacked::zeros(&file, &[(1, DType::F32)]).unwrap_err().to_string();
        assert!(refused.contains("cannot create") && refused.contains("/file"), "{refused}");
    }

    #[test]
    fn room_that_is_not_there_is_missed_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let refused =
            FileBacked::zeros(folder.path(), &[(1 << 50, DType::F32)]).unwrap_err().to_string();
        assert!(refused.contains("no room for 4194304.00 GiB"), "{refused}");
    }
}
