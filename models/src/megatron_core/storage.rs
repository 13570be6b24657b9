//! A distributed checkpoint's tensors: finds their pieces through `.metadata`, and assembles any
//! box of a tensor from them.
//!
//! `torch/distributed/checkpoint/{metadata,filesystem}.py`;
//! `megatron/core/dist_checkpointing/strategies/torch.py`.

use std::collections::{BTreeMap, HashMap};
use std::path::{Component, Path, PathBuf};

use megatron::checkpoint::Float;
use megatron::{Error, Result, files};

use super::archive::{Archive, extents};
use super::pickle::{Pickle, Value};

pub const METADATA: &str = ".metadata";
/// Maximum bytes of `.metadata`, enough for the largest models with the optimizer of a thousand
/// ranks.
const MAX_METADATA_BYTES: u64 = 512 << 20;
/// Maximum number of comparisons between a tensor's pieces. Layers separate pieces, so real tensors
/// need few.
const MOST_COMPARISONS: usize = 1 << 24;

type Found<T> = std::result::Result<T, String>;

/// The tensors of a checkpoint, without those of its optimizer.
pub struct Storage {
    folder: PathBuf,
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, Stored>,
    /// Whether the checkpoint has tensors of an optimizer.
    pub has_optimizer: bool,
}

/// A tensor that is exactly covered by its pieces.
#[derive(Debug)]
pub struct Stored {
    /// The dtype, if weights can have it.
    pub dtype: Option<Float>,
    pub shape: Vec<usize>,
    pieces: Vec<Piece>,
}

#[derive(Debug)]
struct Piece {
    offset: Vec<usize>,
    shape: Vec<usize>,
    item: Item,
}

/// The location of a piece.
#[derive(Clone, Copy, Debug)]
struct Item {
    /// Index of the file.
    file: usize,
    start: u64,
    length: u64,
}

impl Storage {
    /// Reads `.metadata` in `folder`, and compares it with the sizes of the files that it names.
    /// Reads no tensor.
    ///
    /// # Errors
    /// If it is missing or damaged, a file is missing or too short, or pieces do not exactly cover
    /// their tensor.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(METADATA);
        let bytes =
            files::read(&path, MAX_METADATA_BYTES).map_err(|e| Error::io("read", &path, e))?;
        let pickle = Pickle::parse(&bytes).map_err(|why| Error::checkpoint(&path, why))?;
        let mut storage = Self {
            folder: folder.to_path_buf(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
            has_optimizer: false,
        };
        storage.read_metadata(pickle.root()).map_err(|why| Error::checkpoint(&path, why))?;
        storage.check_files()?;
        Ok(storage)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn tensors(&self) -> &BTreeMap<String, Stored> {
        &self.tensors
    }

    fn read_metadata(&mut self, metadata: Value) -> Found<()> {
        if metadata.class() != Some(("torch.distributed.checkpoint.metadata", "Metadata")) {
            return Err(format!(
                "holds {} and not the Metadata of a distributed checkpoint",
                metadata.shown()
            ));
        }
        let part = |name: &str| {
            let entries = metadata.attribute(name).and_then(Value::entries);
            entries.ok_or_else(|| format!("has no dictionary {name}"))
        };
        let mut items = self.items(part("storage_data")?)?;
        for (key, tensor) in part("state_dict_metadata")? {
            let key = key.str().ok_or("has a tensor without a name")?;
            if of_optimizer(key) {
                self.has_optimizer = true;
                continue;
            }
            match tensor.class() {
                Some((_, "TensorStorageMetadata")) => {
                    let stored =
                        stored(key, tensor, &mut items).map_err(|why| format!("{key}: {why}"))?;
                    self.tensors.insert(key.into(), stored);
                }
                // Objects: states of Transformer Engine and of random number generators.
                Some((_, "BytesStorageMetadata")) => {}
                _ => return Err(format!("{key}: is {}, which is unknown", tensor.shown())),
            }
        }
        Ok(())
    }

    /// The location of each piece, by its tensor's name and its offset there.
    fn items<'p>(
        &mut self,
        entries: impl Iterator<Item = (Value<'p>, Value<'p>)>,
    ) -> Found<Items<'p>> {
        let mut files = HashMap::new();
        let mut items = Items::new();
        for (index, info) in entries {
            let name =
                index.attribute("fqn").and_then(Value::str).ok_or("has data without a name")?;
            // Objects have no offset.
            let Some(offset) = index.attribute("offset").filter(|offset| !offset.is_none()) else {
                continue;
            };
            if of_optimizer(name) {
                continue;
            }
            let read = || {
                let size = |key| u64::try_from(info.attribute(key)?.int()?).ok();
                Some((
                    extents(offset)?,
                    info.attribute("relative_path")?.str()?,
                    size("offset")?,
                    size("length")?,
                ))
            };
            let (offset, path, start, length) =
                read().ok_or_else(|| format!("does not say where {name} is stored"))?;
            let transforms = info.attribute("transform_descriptors");
            if transforms.is_some_and(|list| {
                !list.is_none() && list.items().is_none_or(|list| list.len() > 0)
            }) {
                return Err(format!(
                    "{name} is stored compressed or otherwise transformed, which is not supported"
                ));
            }
            let mut parts = Path::new(path).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == path)
            {
                return Err(format!("names {path:?}, which is not a file in its own folder"));
            }
            let file = *files.entry(path).or_insert_with(|| {
                self.files.push(self.folder.join(path));
                self.files.len() - 1
            });
            items.insert((name, offset), Item { file, start, length });
        }
        Ok(items)
    }

    /// Compares sizes, so that the bytes to read do not exceed the existing bytes.
    fn check_files(&self) -> Result<()> {
        let size = |path: &PathBuf| {
            Ok(std::fs::metadata(path).map_err(|e| Error::io("find", path, e))?.len())
        };
        let sizes = self.files.iter().map(size).collect::<Result<Vec<u64>>>()?;
        let mut used = vec![0u64; sizes.len()];
        for (name, stored) in &self.tensors {
            for Piece { shape, item, .. } in &stored.pieces {
                let (path, held) = (&self.files[item.file], sizes[item.file]);
                if item.start.checked_add(item.length).is_none_or(|end| end > held) {
                    let message = format!(
                        "has {held} bytes, but {name} is stored after them; the file was truncated \
                         or belongs to another checkpoint"
                    );
                    return Err(Error::checkpoint(path, message));
                }
                let least = (shape.iter().product::<usize>() as u64)
                    .checked_mul(stored.element_size() as u64);
                if least.is_none_or(|least| least > item.length) {
                    return Err(Error::checkpoint(
                        path,
                        format!(
                            "has {} bytes for {shape:?} of {name}, which do not match",
                            item.length
                        ),
                    ));
                }
                used[item.file] = used[item.file].saturating_add(item.length);
                if used[item.file] > held {
                    return Err(Error::checkpoint(
                        path,
                        format!("has {held} bytes, but {METADATA} places more in it"),
                    ));
                }
            }
        }
        Ok(())
    }

    /// The elements of tensor `name` in a box of `shape` at offset `start`, row-major and
    /// little-endian, with `dtype`.
    ///
    /// # Errors
    /// If there is no such box, or a file is damaged.
    pub fn read(
        &self,
        name: &str,
        dtype: Float,
        start: &[usize],
        shape: &[usize],
    ) -> Result<Vec<u8>> {
        let missing =
            || Error::checkpoint(&self.folder, format!("has no {shape:?} of {name} at {start:?}"));
        let stored = self.tensors.get(name).ok_or_else(missing)?;
        let inside = |dim: usize| {
            start[dim].checked_add(shape[dim]).is_some_and(|end| end <= stored.shape[dim])
        };
        if stored.shape.len() != shape.len()
            || start.len() != shape.len()
            || !(0..shape.len()).all(inside)
        {
            return Err(missing());
        }
        let mut out = vec![0; shape.iter().product::<usize>() * dtype.size()];
        for piece in &stored.pieces {
            let Some(common) = Common::of(piece, start, shape) else { continue };
            let path = &self.files[piece.item.file];
            let file = files::open_binary(path).map_err(|e| Error::io("open", path, e))?;
            let tensor = Archive::open(file, piece.item.start, piece.item.length)
                .and_then(|mut archive| archive.tensor(dtype, &piece.shape));
            let tensor = tensor.map_err(|why| {
                Error::checkpoint(
                    path,
                    format!("its piece of {name} at byte {} {why}", piece.item.start),
                )
            })?;
            common.copy(
                &tensor.bytes,
                tensor.offset,
                &tensor.strides,
                &mut out,
                shape,
                dtype.size(),
            );
        }
        Ok(out)
    }
}

type Items<'p> = HashMap<(&'p str, Vec<usize>), Item>;

fn of_optimizer(key: &str) -> bool {
    key.starts_with("optimizer.") || key.starts_with("chained_")
}

impl Stored {
    fn element_size(&self) -> usize {
        self.dtype.map_or(1, Float::size)
    }

    /// Checks that the pieces cover the tensor and do not overlap.
    fn check_cover(&self) -> Found<()> {
        let mut sorted: Vec<&Piece> = self.pieces.iter().collect();
        sorted.sort_unstable_by(|a, b| a.offset.cmp(&b.offset));
        for piece in &sorted {
            let ends =
                piece.offset.iter().zip(&piece.shape).map(|(from, len)| from.checked_add(*len));
            let inside =
                ends.zip(&self.shape).all(|(end, whole)| end.is_some_and(|end| end <= *whole));
            if piece.offset.len() != self.shape.len()
                || piece.shape.len() != self.shape.len()
                || !inside
            {
                return Err(format!(
                    "a piece of {:?} at {:?} is not within {:?}",
                    piece.shape, piece.offset, self.shape
                ));
            }
        }
        let (mut covered, mut comparisons) = (0usize, 0);
        for (at, piece) in sorted.iter().enumerate() {
            covered = covered.saturating_add(piece.shape.iter().product());
            for other in &sorted[at + 1..] {
                if piece.offset.first().is_none_or(|from| other.offset[0] >= from + piece.shape[0])
                {
                    break;
                }
                comparisons += 1;
                if comparisons > MOST_COMPARISONS {
                    return Err("has more pieces than any layout writes".into());
                }
                if Common::of(other, &piece.offset, &piece.shape).is_some() {
                    return Err(format!(
                        "its pieces at {:?} and {:?} overlap",
                        piece.offset, other.offset
                    ));
                }
            }
        }
        let numel: usize = self.shape.iter().product();
        if covered != numel {
            return Err(format!(
                "its pieces have {covered} of its {numel} elements; the checkpoint is incomplete"
            ));
        }
        Ok(())
    }
}

fn stored<'p>(key: &'p str, tensor: Value, items: &mut Items<'p>) -> Found<Stored> {
    let dtype = tensor
        .attribute("properties")
        .and_then(Value::state)
        .and_then(|properties| properties.item(0));
    let dtype = match dtype.and_then(Value::global).ok_or("has no dtype")? {
        ("torch", "float32") => Some(Float::F32),
        ("torch", "bfloat16") => Some(Float::Bf16),
        ("torch", "float16") => Some(Float::F16),
        _ => None,
    };
    let shape = tensor.attribute("size").and_then(extents).ok_or("has no shape")?;
    if shape.contains(&0)
        || shape
            .iter()
            .try_fold(1usize, |all, &len| all.checked_mul(len))
            .is_none_or(|n| n >> 48 > 0)
    {
        return Err(format!("has shape {shape:?}, which is impossible"));
    }
    let chunks = tensor.attribute("chunks").and_then(Value::items).ok_or("has no pieces")?;
    let mut pieces = Vec::new();
    for chunk in chunks {
        let of = |name| chunk.attribute(name).and_then(extents);
        let (offset, shape) =
            of("offsets").zip(of("sizes")).ok_or("has a piece without a location")?;
        // Removed from the map, so that a list of pieces cannot cost more than the existing data.
        let item = items.remove(&(key, offset.clone()));
        let item =
            item.ok_or_else(|| format!("its piece at {offset:?} has no data, or data twice"))?;
        pieces.push(Piece { offset, shape, item });
    }
    let stored = Stored { dtype, shape, pieces };
    stored.check_cover()?;
    Ok(stored)
}

/// The intersection of a piece and a box of a tensor.
struct Common {
    /// Offset of the intersection within the piece and within the box.
    in_piece: Vec<usize>,
    in_box: Vec<usize>,
    shape: Vec<usize>,
}

impl Common {
    /// `None` if they do not intersect. Both lie within the tensor.
    fn of(piece: &Piece, start: &[usize], shape: &[usize]) -> Option<Self> {
        let mut common = Self { in_piece: Vec::new(), in_box: Vec::new(), shape: Vec::new() };
        for (((&a, &a_len), &b), &b_len) in
            piece.offset.iter().zip(&piece.shape).zip(start).zip(shape)
        {
            let (from, to) = (a.max(b), a.saturating_add(a_len).min(b.saturating_add(b_len)));
            if from >= to {
                return None;
            }
            common.in_piece.push(from - a);
            common.in_box.push(from - b);
            common.shape.push(to - from);
        }
        Some(common)
    }

    /// Copies elements of `size` bytes from a piece, laid out by `offset` and `strides`, to a
    /// row-major box.
    fn copy(
        &self,
        piece: &[u8],
        offset: usize,
        strides: &[usize],
        out: &mut [u8],
        shape: &[usize],
        size: usize,
    ) {
        let Some((&columns, outer)) = self.shape.split_last() else { return };
        let (last, row_major) = (outer.len(), row_major(shape));
        for row in 0..outer.iter().product::<usize>() {
            let (mut from, mut to) =
                (offset + self.in_piece[last] * strides[last], self.in_box[last]);
            let mut rest = row;
            for dim in (0..last).rev() {
                let index = rest % outer[dim];
                rest /= outer[dim];
                from += (self.in_piece[dim] + index) * strides[dim];
                to += (self.in_box[dim] + index) * row_major[dim];
            }
            if strides[last] == 1 {
                out[to * size..(to + columns) * size]
                    .copy_from_slice(&piece[from * size..(from + columns) * size]);
                continue;
            }
            for column in 0..columns {
                let (from, to) = (from + column * strides[last], to + column);
                out[to * size..(to + 1) * size]
                    .copy_from_slice(&piece[from * size..(from + 1) * size]);
            }
        }
    }
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tensor with these pieces: offsets and shapes.
    fn check<const N: usize>(
        shape: [usize; N],
        pieces: &[([usize; N], [usize; N])],
    ) -> Option<String> {
        let item = Item { file: 0, start: 0, length: 0 };
        let pieces = pieces.iter().map(|(offset, shape)| Piece {
            offset: offset.to_vec(),
            shape: shape.to_vec(),
            item,
        });
        Stored { dtype: Some(Float::F32), shape: shape.to_vec(), pieces: pieces.collect() }
            .check_cover()
            .err()
    }

    #[test]
    fn pieces_cover_their_tensor_exactly() {
        assert_eq!(check([2, 4], &[([0, 0], [1, 4]), ([1, 2], [1, 2]), ([1, 0], [1, 2])]), None);
        let hole = check([2, 4], &[([0, 0], [1, 4]), ([1, 0], [1, 2])]).unwrap();
        assert!(hole.contains("6 of its 8 elements"), "{hole}");
        let twice = check([2, 4], &[([0, 0], [2, 3]), ([1, 1], [1, 2]), ([0, 3], [1, 1])]).unwrap();
        assert!(twice.contains("[0, 0] and [1, 1] overlap"), "{twice}");
        let outside = check([2, 4], &[([0, 0], [2, 3]), ([0, 3], [1, 2])]).unwrap();
        assert!(outside.contains("not within [2, 4]"), "{outside}");
        let far = check([2, 4], &[([usize::MAX, 0], [2, 4])]).unwrap();
        assert!(far.contains("not within"), "{far}");
    }

    #[test]
    fn a_box_is_put_together_from_pieces_of_any_strides() {
        // 4 × 6; columns 2.. lie transposed in a piece after 3 other elements.
        let whole: Vec<u8> = (0..24).collect();
        let item = Item { file: 0, start: 0, length: 0 };
        let left = Piece { offset: vec![0, 0], shape: vec![4, 2], item };
        let right = Piece { offset: vec![0, 2], shape: vec![4, 4], item };
        let left_bytes: Vec<u8> = whole.chunks(6).flat_map(|row| row[..2].to_vec()).collect();
        let right_bytes: Vec<u8> = vec![99; 3]
            .into_iter()
            .chain((0..16).map(|i| whole[(i % 4) * 6 + 2 + i / 4]))
            .collect();
        let (start, shape) = ([1, 1], [2, 4]);
        let mut out = vec![0; 8];
        Common::of(&left, &start, &shape).unwrap().copy(
            &left_bytes,
            0,
            &[2, 1],
            &mut out,
            &shape,
            1,
        );
        Common::of(&right, &start, &shape).unwrap().copy(
            &right_bytes,
            3,
            &[1, 4],
            &mut out,
            &shape,
            1,
        );
        assert_eq!(out, [7, 8, 9, 10, 13, 14, 15, 16]);
        assert!(Common::of(&left, &[0, 2], &[4, 4]).is_none());
    }
}
