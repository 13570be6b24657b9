//! The manifest: the logical tensors of a checkpoint, and the location of their elements.
//!
//! It is JSON; its first line holds the CRC-32C of all other lines, so that a damaged manifest is
//! never used.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::block::{Block, blocks, check_cover, misfit, volume};
use super::folder::use_another;
use super::foreign::Found;
use super::values::Float;
use crate::params::{Partition, StateKind};
use crate::{Error, Result, files};

/// The version of the format this program writes, and the only one it reads.
pub const FORMAT_VERSION: u32 = 1;
pub(super) const MANIFEST: &str = "manifest.json";
/// Enough for the largest models on thousands of ranks.
const MAX_MANIFEST_BYTES: u64 = 4 << 30;
const CHECKSUM_LINE: &str = "{\"manifest_crc32c\":\"";
/// Most differences that a message about a mismatched checkpoint lists.
const SHOWN_DIFFERENCES: usize = 5;

/// A run of stored elements, and their place in a logical tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// Name of the file, in the checkpoint's folder.
    pub file: String,
    /// Name of the tensor in that file.
    pub key: String,
    /// Index of the chunk's first element in that tensor.
    pub start: usize,
    /// First index of the box in each dimension of the logical tensor.
    pub offset: Vec<usize>,
    /// Extent of the box in each dimension.
    pub shape: Vec<usize>,
    /// Which of the box's elements, in row-major order, the chunk holds.
    pub flat: Range<usize>,
    /// CRC-32C of the chunk's bytes.
    pub crc32c: u32,
}

impl Chunk {
    /// The chunk as full boxes, with starts counted from the chunk's first element.
    pub(super) fn blocks(&self) -> Vec<Block> {
        blocks(&self.offset, &self.shape, self.flat.clone(), 0)
    }
}

/// A logical tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Name of the parameter.
    pub name: String,
    /// The parameter itself, or one tensor of its optimizer state.
    pub kind: StateKind,
    /// Global shape, without padding.
    pub shape: Vec<usize>,
    /// How the parameter is sharded over tp, so that a tool can reshard it for another layout.
    /// Unknown for imported weights, and for checkpoints of early versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<Partition>,
    /// Dtype of the stored elements.
    pub dtype: Float,
    /// Together, the chunks hold every element exactly once.
    pub chunks: Vec<Chunk>,
}

/// The contents of a checkpoint. A manifest that was read is valid: boxes are within their tensors
/// and cover them exactly, and files exist with the right size. Only the contents of the files are
/// still unchecked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT_VERSION`] of the program that wrote it.
    pub format_version: u32,
    /// Steps the run had made; 0 of imported weights.
    pub iteration: u64,
    /// The trainer's state, as passed to `save`.
    pub state: serde_json::Value,
    /// Size in bytes of each file.
    pub files: BTreeMap<String, u64>,
    /// Sorted by name and kind.
    pub tensors: Vec<TensorEntry>,
    /// The checkpoint's folder.
    #[serde(skip)]
    pub(super) folder: PathBuf,
}

impl Manifest {
    /// Reads and checks the manifest of the checkpoint in folder `path` (`…/iter_0000100`).
    ///
    /// # Errors
    /// If it is missing, damaged, inconsistent or has another format version, or a file is missing
    /// or has another size.
    pub fn read(path: &Path) -> Result<Self> {
        let file = path.join(MANIFEST);
        let bytes = files::read(&file, MAX_MANIFEST_BYTES).map_err(|e| match e.kind() {
            ErrorKind::NotFound => match Found::at(path) {
                None | Some(Found::Ours) => Error::io("read", &file, e),
                Some(found) => Error::checkpoint(path, found.advice(path)),
            },
            _ => Error::io("read", &file, e),
        })?;
        let refuse = |message: String| Error::checkpoint(&file, message);
        check_checksum(&bytes).map_err(|what| refuse(format!("{what}; {}", use_another(path))))?;
        #[derive(Deserialize)]
        struct Version {
            format_version: u32,
        }
        let json = |e: serde_json::Error| refuse(format!("is not a manifest: {e}"));
        let Version { format_version } = serde_json::from_slice(&bytes).map_err(json)?;
        if format_version != FORMAT_VERSION {
            return Err(refuse(format!(
                "has format version {format_version}, but this program reads {FORMAT_VERSION}; use \
                 the version of the program that wrote it"
            )));
        }
        let mut manifest: Self = serde_json::from_slice(&bytes).map_err(json)?;
        manifest.folder = path.to_path_buf();
        manifest.validate().map_err(refuse)?;
        for (name, &expected) in &manifest.files {
            let file = path.join(name);
            let size = match fs::metadata(&file) {
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    return Err(Error::checkpoint(
                        &file,
                        format!("is missing; {}", use_another(path)),
                    ));
                }
                found => found.map_err(|e| Error::io("find", &file, e))?.len(),
            };
            if size != expected {
                let how = if size < expected { "truncated" } else { "changed" };
                let message =
                    format!("is {how}: it has {size} bytes of {expected}; {}", use_another(path));
                return Err(Error::checkpoint(&file, message));
            }
        }
        Ok(manifest)
    }

    /// The folder it was read from.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Bytes of all tensors' elements.
    pub fn data_bytes(&self) -> u64 {
        self.tensors.iter().map(TensorEntry::bytes).sum()
    }

    /// The manifest as it is written.
    pub(super) fn to_bytes(&self) -> serde_json::Result<Vec<u8>> {
        // One line per tensor, so that manifests can be read and compared by eye.
        let tensors: Vec<String> =
            self.tensors.iter().map(serde_json::to_string).collect::<serde_json::Result<_>>()?;
        let body = format!(
            "\"format_version\":{},\n\"iteration\":{},\n\"state\":{},\n\"files\":{},\n\"tensors\":[\n{}\n]}}\n",
            self.format_version,
            self.iteration,
            serde_json::to_string(&self.state)?,
            serde_json::to_string(&self.files)?,
            tensors.join(",\n"),
        );
        Ok(format!("{CHECKSUM_LINE}{:08x}\",\n{body}", crc32c::crc32c(body.as_bytes()))
            .into_bytes())
    }

    /// Checks everything that does not need the files.
    pub(super) fn validate(&self) -> std::result::Result<(), String> {
        for file in self.files.keys() {
            let mut parts = Path::new(file).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(name)), None) if name == file.as_str())
            {
                return Err(format!(
                    "names {file:?}, which is not a file in the checkpoint's own folder"
                ));
            }
        }
        let mut seen = BTreeSet::new();
        for tensor in &self.tensors {
            let of = |message: String| format!("{} ({}): {message}", tensor.name, tensor.kind);
            if !seen.insert((&tensor.name, tensor.kind)) {
                return Err(of("is listed twice".into()));
            }
            tensor.validate(&self.files).map_err(of)?;
        }
        Ok(())
    }

    /// The entries by name and kind.
    pub(super) fn index(&self) -> HashMap<(&str, StateKind), &TensorEntry> {
        self.tensors.iter().map(|tensor| ((tensor.name.as_str(), tensor.kind), tensor)).collect()
    }

    /// Checks that the checkpoint holds exactly the tensors `expected` (name, kind, unpadded
    /// shape), for the kinds that occur in `expected`; other kinds are ignored.
    ///
    /// # Errors
    /// The error lists the first differences.
    pub fn check_matches<'a>(
        &self,
        expected: impl IntoIterator<Item = (&'a str, StateKind, &'a [usize])>,
    ) -> Result<()> {
        let mut held = self.index();
        let mut kinds = BTreeSet::new();
        let mut differences = Vec::new();
        for (name, kind, shape) in expected {
            kinds.insert(kind);
            differences.extend(difference(held.remove(&(name, kind)), name, kind, shape));
        }
        let mut surplus: Vec<_> =
            held.into_keys().filter(|(_, kind)| kinds.contains(kind)).collect();
        surplus.sort_unstable();
        differences.extend(
            surplus.iter().map(|(name, kind)| {
                format!("it has {name} ({kind}), which the model does not have")
            }),
        );
        self.refuse_differences(&differences)
    }

    /// An error that lists the first of `differences`, if there are any.
    pub(super) fn refuse_differences(&self, differences: &[String]) -> Result<()> {
        if differences.is_empty() {
            return Ok(());
        }
        let shown = &differences[..differences.len().min(SHOWN_DIFFERENCES)];
        let more = match differences.len() - shown.len() {
            0 => String::new(),
            more => format!("; and {more} more differences"),
        };
        let message =
            format!("does not fit the model: {}{more}; the architectures differ", shown.join("; "));
        Err(Error::checkpoint(&self.folder, message))
    }
}

/// How an entry differs from the expected one.
pub(super) fn difference(
    entry: Option<&TensorEntry>,
    name: &str,
    kind: StateKind,
    shape: &[usize],
) -> Option<String> {
    match entry {
        None => Some(format!("it lacks {name} ({kind})")),
        Some(entry) if entry.shape != shape => Some(format!(
            "{name} ({kind}) has shape {:?} in it and {shape:?} in the model",
            entry.shape
        )),
        Some(_) => None,
    }
}

impl TensorEntry {
    /// Elements of the tensor.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of its elements.
    pub fn bytes(&self) -> u64 {
        (self.numel() * self.dtype.size()) as u64
    }

    fn validate(&self, files: &BTreeMap<String, u64>) -> std::result::Result<(), String> {
        let numel =
            volume(&self.shape).filter(|numel| numel.checked_mul(self.dtype.size()).is_some());
        let numel =
            numel.ok_or_else(|| format!("no machine holds a tensor of shape {:?}", self.shape))?;
        let mut boxes = Vec::new();
        let mut owners = Vec::new(); // the chunk of each box
        for (i, chunk) in self.chunks.iter().enumerate() {
            if let Some(why) = misfit(&self.shape, &chunk.offset, &chunk.shape, &chunk.flat) {
                return Err(why);
            }
            let end = chunk
                .start
                .checked_add(chunk.flat.len())
                .and_then(|end| end.checked_mul(self.dtype.size()));
            let size = files.get(&chunk.file).ok_or_else(|| {
                format!("is in {:?}, which the manifest does not list", chunk.file)
            })?;
            if end.is_none_or(|end| end as u64 > *size) {
                return Err(format!(
                    "a chunk of {} elements reaches past the end of {}",
                    chunk.flat.len(),
                    chunk.file
                ));
            }
            boxes.extend(chunk.blocks());
            owners.resize(boxes.len(), i);
        }
        check_cover(numel, &boxes, |i| {
            let chunk = &self.chunks[owners[i]];
            format!("{:?} of {}", chunk.key, chunk.file)
        })
    }
}

/// Checks the first line against the rest.
fn check_checksum(bytes: &[u8]) -> std::result::Result<(), String> {
    let line = bytes
        .iter()
        .position(|&b| b == b'\n')
        .ok_or("is not a manifest: its second line is missing")?;
    let (line, body) = (&bytes[..line], &bytes[line + 1..]);
    let recorded = std::str::from_utf8(line)
        .ok()
        .and_then(|line| line.strip_prefix(CHECKSUM_LINE)?.strip_suffix("\","))
        .and_then(|digits| u32::from_str_radix(digits, 16).ok())
        .ok_or("is not a manifest: its first line has no checksum")?;
    let actual = crc32c::crc32c(body);
    if actual != recorded {
        return Err(format!(
            "is damaged: its contents have checksum {actual:08x}, not {recorded:08x}"
        ));
    }
    Ok(())
}
