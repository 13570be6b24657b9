//! Archives of `torch.save`: a zip whose `data.pkl` is a pickle, together with the raw bytes of
//! each storage.
//!
//! `torch/serialization.py`. An archive may be a part of a file, as in a distributed checkpoint.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};

use megatron::checkpoint::Float;
use zip::ZipArchive;

use super::pickle::{Pickle, Value};

type Found<T> = std::result::Result<T, String>;

/// Maximum bytes of a tensor's pickle, which usually has about 200.
const MAX_TENSOR_PICKLE: u64 = 1 << 20;
/// Maximum number of dimensions of a tensor.
pub const MAX_DIMS: usize = 8;

/// A range of a file's bytes.
struct Window {
    file: File,
    start: u64,
    length: u64,
    at: u64,
}

impl Read for Window {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.length.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let wanted = buffer.len().min(left);
        let read = self.file.read(&mut buffer[..wanted])?;
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for Window {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.length.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        let place = at.and_then(|at| Some((at, self.start.checked_add(at)?)));
        let (at, place) = place.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        self.file.seek(SeekFrom::Start(place))?;
        self.at = at;
        Ok(at)
    }
}

/// An archive of `torch.save`.
pub struct Archive {
    zip: ZipArchive<BufReader<Window>>,
    /// The folder that contains all of its entries.
    root: String,
}

impl Archive {
    /// Opens the archive in the `length` bytes of `file` from `start` on.
    ///
    /// # Errors
    /// If there is no archive.
    pub fn open(mut file: File, start: u64, length: u64) -> Found<Self> {
        file.seek(SeekFrom::Start(start)).map_err(|e| e.to_string())?;
        let window = BufReader::new(Window { file, start, length, at: 0 });
        let zip =
            ZipArchive::new(window).map_err(|e| format!("is not an archive of torch.save: {e}"))?;
        let root = zip.file_names_raw().find_map(|name| name.strip_suffix(b"data.pkl"));
        let root = root.filter(|root| root.is_empty() || root.ends_with(b"/"));
        let root = root.and_then(|root| String::from_utf8(root.to_vec()).ok());
        let root = root.ok_or("is not an archive of torch.save: it has no data.pkl")?;
        let mut archive = Self { zip, root };
        // Older versions do not record it; they wrote on little-endian machines.
        let order = archive.entry("byteorder", 16).unwrap_or_else(|_| b"little".to_vec());
        if order != b"little" {
            return Err("was written on a big-endian machine, which is not supported".into());
        }
        Ok(archive)
    }

    /// The bytes of `data.pkl`, at most `most`.
    ///
    /// # Errors
    /// If it is larger, or damaged.
    pub fn pickle(&mut self, most: u64) -> Found<Vec<u8>> {
        self.entry("data.pkl", most)
    }

    fn entry(&mut self, name: &str, most: u64) -> Found<Vec<u8>> {
        let path = format!("{}{name}", self.root);
        let entry = self.zip.by_name(&path).map_err(|e| format!("its {path}: {e}"))?;
        if entry.size() > most {
            return Err(format!(
                "its {path} has {} bytes, but at most {most} are plausible",
                entry.size()
            ));
        }
        let mut bytes = Vec::new();
        // The checksum is verified when the end of an entry is read.
        entry.take(most + 1).read_to_end(&mut bytes).map_err(|e| format!("its {path}: {e}"))?;
        Ok(bytes)
    }

    /// The tensor in the archive, which must have `dtype` and `shape`. Leading dimensions of 1 may
    /// be missing in the archive.
    ///
    /// # Errors
    /// If it holds another tensor or something else, or is damaged.
    pub fn tensor(&mut self, dtype: Float, shape: &[usize]) -> Found<Strided> {
        let bytes = self.pickle(MAX_TENSOR_PICKLE)?;
        let pickle = Pickle::parse(&bytes)?;
        let described = Described::read(pickle.root())
            .ok_or("does not hold a tensor as torch.save writes one")?;
        if described.dtype != dtype {
            return Err(format!(
                "holds a tensor of {}, but .metadata says {dtype}",
                described.dtype
            ));
        }
        let missing = shape.len().checked_sub(described.shape.len());
        let leading = missing
            .filter(|&n| shape[..n].iter().all(|&len| len == 1) && shape[n..] == described.shape);
        let Some(leading) = leading else {
            return Err(format!(
                "holds a tensor of shape {:?}, but .metadata says {shape:?}",
                described.shape
            ));
        };
        let bytes = self.entry(&format!("data/{}", described.key), described.bytes()?)?;
        if bytes.len() as u64 != described.bytes()?
            || described.end().is_none_or(|end| end > described.numel)
        {
            return Err(format!("has {} bytes, which do not match its tensor", bytes.len()));
        }
        let strides = vec![0; leading].into_iter().chain(described.strides).collect();
        Ok(Strided { bytes, offset: described.offset, strides })
    }
}

/// A tensor's bytes. Its elements start at element `offset` and are `strides` apart; all of them
/// are within the bytes.
pub struct Strided {
    pub bytes: Vec<u8>,
    pub offset: usize,
    pub strides: Vec<usize>,
}

/// The arguments of `torch._utils._rebuild_tensor_v2`.
struct Described<'p> {
    dtype: Float,
    key: &'p str,
    /// Number of elements in the storage.
    numel: usize,
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl<'p> Described<'p> {
    fn read(tensor: Value<'p>) -> Option<Self> {
        if tensor.class()? != ("torch._utils", "_rebuild_tensor_v2") {
            return None;
        }
        let arguments = tensor.arguments()?;
        let storage = arguments.item(0)?.persistent()?;
        if storage.item(0)?.str()? != "storage" {
            return None;
        }
        let dtype = match storage.item(1)?.global()? {
            ("torch", "FloatStorage") => Float::F32,
            ("torch", "BFloat16Storage") => Float::Bf16,
            ("torch", "HalfStorage") => Float::F16,
            _ => return None,
        };
        let (key, numel) = (storage.item(2)?.str()?, storage.item(4)?.size()?);
        let (shape, strides) = (extents(arguments.item(2)?)?, extents(arguments.item(3)?)?);
        let offset = arguments.item(1)?.size()?;
        (shape.len() == strides.len()).then_some(Self { dtype, key, numel, offset, shape, strides })
    }

    fn bytes(&self) -> Found<u64> {
        let bytes = (self.numel as u64)
            .checked_mul(self.dtype.size() as u64)
            .filter(|&bytes| bytes < 1 << 48);
        bytes.ok_or_else(|| {
            format!("holds a tensor of {} elements, which is impossible", self.numel)
        })
    }

    /// One past the tensor's last element in the storage.
    fn end(&self) -> Option<usize> {
        let mut last = self.offset;
        for (len, stride) in self.shape.iter().zip(&self.strides) {
            last = last.checked_add(len.checked_sub(1)?.checked_mul(*stride)?)?;
        }
        last.checked_add(1)
    }
}

/// A shape: a tuple of sizes, or a `torch.Size`.
pub fn extents(value: Value) -> Option<Vec<usize>> {
    let tuple = match value.class() {
        Some(("torch", "Size")) => value.arguments()?.item(0)?,
        _ => value,
    };
    let items = tuple.items()?;
    if items.len() > MAX_DIMS { None } else { items.map(Value::size).collect() }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// The result of requesting an f32 tensor of `shape` from an archive with a 2 × 3 tensor of
    /// `class` with `strides`, in 6 elements.
    fn ask(class: &str, strides: [u8; 2], bytes: usize, shape: &[usize]) -> Found<Strided> {
        let [rows, columns] = strides;
        let storage = [
            &b"(X\x07\0\0\0storagectorch\n"[..],
            class.as_bytes(),
            b"\nX\x01\0\0\x007X\x03\0\0\0cpuK\x06tQ",
        ]
        .concat();
        let sizes = [&b"K\0K\x02K\x03\x86K"[..], &[rows], b"K", &[columns], b"\x86\x89N"].concat();
        let pickle =
            [&b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("[..], &storage, &sizes, b"tR."]
                .concat();
        let mut file = tempfile::tempfile().unwrap();
        // Not at the start of the file, as in a distributed checkpoint.
        file.write_all(b"another").unwrap();
        let mut zip = Vec::new();
        let mut writer = zip::ZipWriter::new(io::Cursor::new(&mut zip));
        for (name, content) in
            [("archive/data.pkl", &pickle[..]), ("archive/data/7", &vec![1; bytes])]
        {
            writer.start_file(name, zip::write::SimpleFileOptions::default()).unwrap();
            writer.write_all(content).unwrap();
        }
        writer.finish().unwrap();
        file.write_all(&zip).unwrap();
        file.write_all(b"behind").unwrap();
        Archive::open(file, 7, zip.len() as u64)?.tensor(Float::F32, shape)
    }

    #[test]
    fn a_tensor_is_the_one_that_was_asked_for_and_within_its_bytes() {
        let tensor = ask("FloatStorage", [3, 1], 24, &[1, 2, 3]).unwrap();
        assert_eq!((tensor.bytes.len(), tensor.offset, tensor.strides), (24, 0, vec![0, 3, 1]));
        ask("FloatStorage", [1, 2], 24, &[2, 3]).unwrap();
        for (what, why) in [
            (ask("FloatStorage", [3, 1], 24, &[3, 2]), "shape [2, 3], but .metadata says [3, 2]"),
            (ask("FloatStorage", [3, 1], 24, &[2, 2, 3]), "shape [2, 3]"),
            (ask("FloatStorage", [3, 1], 24, &[3]), "shape [2, 3]"),
            (ask("HalfStorage", [3, 1], 12, &[2, 3]), "holds a tensor of"),
            (ask("LongStorage", [3, 1], 48, &[2, 3]), "does not hold a tensor"),
            (ask("FloatStorage", [4, 1], 24, &[2, 3]), "do not match its tensor"),
            (ask("FloatStorage", [3, 1], 20, &[2, 3]), "do not match its tensor"),
            (ask("FloatStorage", [3, 1], 28, &[2, 3]), "at most 24"),
        ] {
            let message = what.err().unwrap_or_default();
            assert!(message.contains(why), "{why}: {message}");
        }
    }
}
