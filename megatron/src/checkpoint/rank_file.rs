//! The plan of one rank's file: its pieces of tensors, their names, their order, and their chunks.
//!
//! Saving and resharding share this plan, so that a resharded file equals the file that a run would
//! save.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::manifest::{Chunk, TensorEntry};
use super::shard_file::Item;
use super::values::Float;
use crate::params::{Partition, Piece, StateKind};

/// Most elements of a chunk; a reader holds one chunk in memory. Small in tests, so that tensors
/// have several chunks.
pub(super) const CHUNK_ELEMENTS: usize = if cfg!(test) { 16 } else { 1 << 24 };

/// One rank's share of one logical tensor.
pub(super) struct Share {
    pub name: String,
    pub kind: StateKind,
    /// Shape of the logical tensor.
    pub shape: Vec<usize>,
    pub partition: Option<Partition>,
    pub dtype: Float,
    pub pieces: Vec<Piece>,
}

/// The plan of one rank's file.
pub(super) struct RankFile {
    /// Its name.
    pub file: String,
    pub shares: Vec<Share>,
    /// One stored tensor per piece, large elements first so that all are aligned.
    pub items: Vec<Item>,
    /// The share and the piece of each item, by index.
    pub sources: Vec<(usize, usize)>,
}

/// The result of writing a rank's file.
#[derive(Serialize, Deserialize)]
pub(super) struct Written {
    pub file: String,
    pub bytes: u64,
    pub tensors: Vec<TensorEntry>,
}

impl RankFile {
    pub fn plan(rank: usize, shares: Vec<Share>) -> Self {
        let mut sources: Vec<(usize, usize)> = Vec::new();
        for (i, share) in shares.iter().enumerate() {
            let pieces =
                share.pieces.iter().enumerate().filter(|(_, piece)| !piece.flat.is_empty());
            sources.extend(pieces.map(|(p, _)| (i, p)));
        }
        sources.sort_by_key(|&(share, _)| Reverse(shares[share].dtype.size()));
        let mut counts = HashMap::new();
        let mut items = Vec::with_capacity(sources.len());
        for &(share, piece) in &sources {
            let Share { name, kind, dtype, pieces, .. } = &shares[share];
            let piece = &pieces[piece];
            let count = counts.entry((*kind, name.as_str())).or_insert(0);
            let whole = piece.flat.len() == piece.shape.iter().product::<usize>();
            items.push(Item {
                key: format!("{kind}/{name}/{count}"),
                dtype: *dtype,
                shape: if whole { piece.shape.clone() } else { vec![piece.flat.len()] },
                len: piece.flat.len(),
            });
            *count += 1;
        }
        Self { file: format!("rank_{rank:05}.safetensors"), shares, items, sources }
    }

    /// The piece that item `item` stores.
    pub fn piece(&self, item: usize) -> &Piece {
        let (share, piece) = self.sources[item];
        &self.shares[share].pieces[piece]
    }

    /// The chunks of an item, as ranges of its elements.
    pub fn chunks(&self, item: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let len = self.items[item].len;
        (0..len).step_by(CHUNK_ELEMENTS).map(move |start| start..len.min(start + CHUNK_ELEMENTS))
    }

    /// The description of the written file of `bytes` bytes; `checksums`: for each item, those of
    /// its chunks.
    pub fn written(self, bytes: u64, checksums: &[Vec<u32>]) -> Written {
        let entry = |share: &Share| TensorEntry {
            name: share.name.clone(),
            kind: share.kind,
            shape: share.shape.clone(),
            partition: share.partition,
            dtype: share.dtype,
            chunks: Vec::new(),
        };
        let mut tensors: Vec<TensorEntry> = self.shares.iter().map(entry).collect();
        for (item, sums) in checksums.iter().enumerate() {
            let piece = self.piece(item);
            let chunks = self.chunks(item).zip(sums).map(|(elements, &crc32c)| Chunk {
                file: self.file.clone(),
                key: self.items[item].key.clone(),
                start: elements.start,
                offset: piece.offset.clone(),
                shape: piece.shape.clone(),
                flat: piece.flat.start + elements.start..piece.flat.start + elements.end,
                crc32c,
            });
            tensors[self.sources[item].0].chunks.extend(chunks);
        }
        Written { file: self.file, bytes, tensors }
    }
}
