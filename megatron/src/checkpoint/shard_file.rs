//! One rank's safetensors file: written tensor by tensor, and read in parts.
//!
//! The layout is safetensors' (<https://github.com/huggingface/safetensors#format>): u64 length of
//! a JSON header, the header, then the tensors' bytes without gaps. The crate's own functions need
//! all tensors of a file in memory at once.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Metadata, TensorInfo};

use super::values::{Float, read_bytes};
use crate::params::Elements;
use crate::private::replace;
use crate::{Error, Result, files};

/// Bytes before the header.
const LENGTH_BYTES: u64 = 8;
/// The longest header that safetensors' readers accept.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const BUFFER_BYTES: usize = 1 << 20;
/// Bytes to read or write at once before computing their checksum, few enough to be still in the
/// cache.
pub(super) const CACHED_BYTES: usize = 256 << 10;

/// A tensor as described in the file's header.
pub(super) struct Item {
    pub key: String,
    pub dtype: Float,
    /// The shape under which the elements are stored.
    pub shape: Vec<usize>,
    /// Number of elements.
    pub len: usize,
}

/// The elements of an item: `range` of `data`.
pub(super) struct Content<'a> {
    pub data: &'a Elements,
    pub range: Range<usize>,
}

/// Writes a file of `items` in their order and syncs it. Returns its size in bytes, and for each
/// item the CRC-32C of each group of `elements_per_checksum` elements; the last group may be
/// smaller.
///
/// # Errors
/// If a file operation fails (a full disk, permissions), or the file exists.
pub(super) fn write(
    path: &Path,
    items: &[Item],
    contents: &[Content],
    elements_per_checksum: usize,
) -> Result<(u64, Vec<Vec<u32>>)> {
    let preamble = preamble(items).map_err(|message| Error::checkpoint(path, message))?;
    let failed = |source| Error::io("write", path, source);
    let file = File::options()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(|e| Error::io("create", path, e))?;
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, file);
    out.write_all(&preamble).map_err(failed)?;
    let mut size = preamble.len() as u64;
    let mut checksums = Vec::with_capacity(items.len());
    for Content { data, range } in contents {
        let mut sums = Vec::new();
        for start in range.clone().step_by(elements_per_checksum) {
            let end = range.end.min(start + elements_per_checksum);
            let mut sum = 0;
            read_bytes(data, start..end, |bytes| {
                sum = crc32c::crc32c_append(sum, bytes);
                size += bytes.len() as u64;
                out.write_all(bytes).map_err(failed)
            })?;
            sums.push(sum);
        }
        checksums.push(sums);
    }
    let file = out.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(|e| Error::io("sync", path, e))?;
    Ok((size, checksums))
}

/// Everything before the data: the header and its length. Padded with spaces so that the data are
/// aligned for items in order of descending element size.
pub(super) fn preamble(items: &[Item]) -> std::result::Result<Vec<u8>, String> {
    let mut tensors = Vec::with_capacity(items.len());
    let mut at = 0;
    for item in items {
        let end = at + item.len * item.dtype.size();
        let info = TensorInfo {
            dtype: item.dtype.safetensors(),
            shape: item.shape.clone(),
            data_offsets: (at, end),
        };
        tensors.push((item.key.clone(), info));
        at = end;
    }
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let metadata = Metadata::new(Some(metadata), tensors).map_err(|e| e.to_string())?;
    let mut header = serde_json::to_vec(&metadata).map_err(|e| e.to_string())?;
    header.resize(header.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
    Ok([(header.len() as u64).to_le_bytes().as_slice(), &header].concat())
}

/// A safetensors file that is written tensor by tensor, with only one tensor in memory.
pub struct SafetensorsWriter {
    path: PathBuf,
    out: BufWriter<File>,
    /// Bytes written, and bytes that the header promises.
    size: u64,
    promised: u64,
}

impl SafetensorsWriter {
    /// Starts a new file of `tensors` (name, dtype, shape). Their bytes must follow in this order.
    ///
    /// # Errors
    /// If the file exists or cannot be written.
    pub fn create<'a>(
        path: &Path,
        tensors: impl Iterator<Item = (&'a str, Float, &'a [usize])>,
    ) -> Result<Self> {
        let item = |(key, dtype, shape): (&str, Float, &[usize])| Item {
            key: key.to_string(),
            dtype,
            shape: shape.to_vec(),
            len: shape.iter().product(),
        };
        let items: Vec<Item> = tensors.map(item).collect();
        let preamble = preamble(&items).map_err(|message| Error::checkpoint(path, message))?;
        let file = File::options()
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(|e| Error::io("create", path, e))?;
        let data: usize = items.iter().map(|item| item.len * item.dtype.size()).sum();
        let promised = (preamble.len() + data) as u64;
        let out = BufWriter::with_capacity(BUFFER_BYTES, file);
        let mut writer = Self { path: path.to_path_buf(), out, size: 0, promised };
        writer.write(&preamble)?;
        Ok(writer)
    }

    /// Appends the next bytes, little-endian.
    ///
    /// # Errors
    /// If a file operation fails.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.size += bytes.len() as u64;
        self.out.write_all(bytes).map_err(|e| Error::io("write", &self.path, e))
    }

    /// Syncs the file; returns its size in bytes.
    ///
    /// # Errors
    /// If a file operation fails, or more or fewer bytes were written than the tensors have.
    pub fn finish(self) -> Result<u64> {
        if self.size != self.promised {
            let message =
                format!("internal error: {} of {} bytes were written", self.size, self.promised);
            return Err(Error::checkpoint(&self.path, message));
        }
        let file =
            self.out.into_inner().map_err(|e| Error::io("write", &self.path, e.into_error()))?;
        file.sync_all().map_err(|e| Error::io("sync", &self.path, e))?;
        Ok(self.size)
    }
}

/// A safetensors file opened for reading. Its header is checked against its size.
pub struct ShardFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// Position of the tensors' bytes.
    data: u64,
}

impl ShardFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// If it cannot be read, or is not a complete safetensors file.
    pub fn open(path: &Path) -> Result<Self> {
        let mut file = files::open_binary(path).map_err(|e| Error::io("open", path, e))?;
        let size = file.metadata().map_err(|e| Error::io("inspect", path, e))?.len();
        let damaged = |what: String| {
            Error::checkpoint(path, format!("not a complete safetensors file: {what}"))
        };
        let mut length = [0; LENGTH_BYTES as usize];
        if size < LENGTH_BYTES {
            return Err(damaged(format!("it has only {size} bytes")));
        }
        let read = |e| Error::io("read", path, e);
        file.read_exact(&mut length).map_err(read)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER_BYTES || length > size - LENGTH_BYTES {
            return Err(damaged(format!("its header claims {length} bytes of the file's {size}")));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(read)?;
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|e| damaged(format!("its header: {e}")))?;
        let data = LENGTH_BYTES + length;
        if metadata.data_len() as u64 != size - data {
            let expected = metadata.data_len() as u64 + data;
            return Err(damaged(format!(
                "it has {size} bytes, but its header describes {expected}"
            )));
        }
        Ok(Self { path: path.to_path_buf(), file, metadata, data })
    }

    /// Stored dtypes and shapes of its tensors, by name; no dtype if checkpoints do not support it.
    pub fn tensors(&self) -> BTreeMap<String, (Option<Float>, Vec<usize>)> {
        let float = |dtype| {
            [Float::F32, Float::Bf16, Float::F16, Float::F64]
                .into_iter()
                .find(|f| f.safetensors() == dtype)
        };
        let tensors = self.metadata.tensors().into_iter();
        tensors.map(|(name, info)| (name, (float(info.dtype), info.shape.clone()))).collect()
    }

    /// The path it was opened under.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes of `elements` of the tensor `key`.
    ///
    /// # Errors
    /// If there is no such tensor of this dtype, it has fewer elements, or reading fails.
    pub fn read(&self, key: &str, dtype: Float, elements: Range<usize>) -> Result<Vec<u8>> {
        let at = self.place(key, dtype, &elements)?;
        let mut bytes = vec![0; elements.len() * dtype.size()];
        self.file.read_exact_at(&mut bytes, at).map_err(|e| Error::io("read", &self.path, e))?;
        Ok(bytes)
    }

    /// As [`Self::read`], into a buffer of the same size. Returns the CRC-32C of the bytes.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(super) fn read_into(
        &self,
        key: &str,
        dtype: Float,
        elements: Range<usize>,
        bytes: &mut [u8],
    ) -> Result<u32> {
        let mut at = self.place(key, dtype, &elements)?;
        let mut crc32c = 0;
        for part in bytes.chunks_mut(CACHED_BYTES) {
            self.file.read_exact_at(part, at).map_err(|e| Error::io("read", &self.path, e))?;
            crc32c = crc32c::crc32c_append(crc32c, part);
            at += part.len() as u64;
        }
        Ok(crc32c)
    }

    /// Position of `elements` of a tensor in the file.
    fn place(&self, key: &str, dtype: Float, elements: &Range<usize>) -> Result<u64> {
        let refuse = |message: String| Error::checkpoint(&self.path, message);
        let info =
            self.metadata.info(key).ok_or_else(|| refuse(format!("has no tensor {key:?}")))?;
        if info.dtype != dtype.safetensors() {
            return Err(refuse(format!(
                "tensor {key:?} is {:?}, but the manifest says {dtype}",
                info.dtype
            )));
        }
        let (begin, end) = info.data_offsets;
        let held = (end - begin) / dtype.size();
        if elements.start > elements.end || elements.end > held {
            let Range { start, end } = elements;
            return Err(refuse(format!(
                "tensor {key:?} has {held} elements, but the manifest needs {start}..{end}"
            )));
        }
        Ok(self.data + (begin + elements.start * dtype.size()) as u64)
    }
}

/// Syncs a folder, so that the names in it survive a loss of power.
///
/// # Errors
/// If a file operation fails.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    let folder = File::open(path).map_err(|e| Error::io("open", path, e))?;
    folder.sync_all().map_err(|e| Error::io("sync", path, e))
}

/// Writes a small file completely and syncs it. Always creates a new file: an existing file or
/// link, left by a killed run or put there by someone, is removed and not written through.
///
/// # Errors
/// If a file operation fails.
pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = replace(path).map_err(|e| Error::io("create", path, e))?;
    file.write_all(bytes).map_err(|e| Error::io("write", path, e))?;
    file.sync_all().map_err(|e| Error::io("sync", path, e))
}
