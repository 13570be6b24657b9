//! Loading: fills a rank's shards from the chunks that hold their elements, and checks whole
//! checkpoints.
//!
//! Ranks load independently; each reads only the chunks that it needs, one at a time.

use std::collections::HashMap;
use std::path::Path;

use super::block::{Block, blocks};
use super::folder::use_another;
use super::manifest::{Chunk, Manifest, TensorEntry, difference};
use super::shard_file::ShardFile;
use super::values::{Pair, check_shard, write_shared};
use crate::params::ShardRef;
use crate::{Error, Result};

/// Fills `shards` in place from the checkpoint in folder `path` (`…/iter_0000100`); see
/// [`Manifest::load`].
///
/// # Errors
/// As [`Manifest::read`] and [`Manifest::load`].
pub fn load(path: &Path, shards: &[ShardRef]) -> Result<()> {
    Manifest::read(path)?.load(shards)
}

/// Reads everything in the checkpoint in folder `path` and checks it; returns its manifest.
///
/// # Errors
/// The error names the first missing or damaged file or tensor.
pub fn verify(path: &Path) -> Result<Manifest> {
    let manifest = Manifest::read(path)?;
    manifest.verify(&mut |_| {})?;
    Ok(manifest)
}

/// A chunk to read, with its destinations: pairs of blocks by index of the shard.
struct Job<'a> {
    tensor: &'a TensorEntry,
    chunk: &'a Chunk,
    targets: Vec<(usize, Vec<Pair>)>,
}

impl Manifest {
    /// Reads and checks all data; calls `progress` with the bytes of every intact chunk.
    ///
    /// # Errors
    /// The error names the first chunk that is damaged or cannot be read.
    pub fn verify(&self, progress: &mut dyn FnMut(u64)) -> Result<()> {
        let chunks = self
            .tensors
            .iter()
            .flat_map(|tensor| tensor.chunks.iter().map(move |chunk| (tensor, chunk)));
        let mut jobs: Vec<Job> =
            chunks.map(|(tensor, chunk)| Job { tensor, chunk, targets: Vec::new() }).collect();
        self.read_chunks(&mut jobs, |_, bytes| {
            progress(bytes.len() as u64);
            Ok(())
        })
    }

    /// Fills `shards` in place, converting to the dtype of each. After an error, some shards may be
    /// filled and others not.
    ///
    /// # Errors
    /// If the checkpoint lacks a tensor or has it with another shape, or a file is damaged.
    pub fn load(&self, shards: &[ShardRef]) -> Result<()> {
        let index = self.index();
        let mut differences = Vec::new();
        let mut wanted: HashMap<_, Vec<(usize, Vec<Block>)>> = HashMap::new();
        for (i, shard) in shards.iter().enumerate() {
            check_shard(shard)?;
            let key = (shard.name.as_str(), shard.kind);
            differences.extend(difference(
                index.get(&key).copied(),
                &shard.name,
                shard.kind,
                &shard.global_shape,
            ));
            let pieces = shard.pieces.iter();
            let boxes = pieces.flat_map(|piece| {
                blocks(&piece.offset, &piece.shape, piece.flat.clone(), piece.local)
            });
            wanted.entry(key).or_default().push((i, boxes.collect()));
        }
        self.refuse_differences(&differences)?;

        let mut jobs = Vec::new();
        let mut filled = vec![0; shards.len()];
        for tensor in &self.tensors {
            let Some(wanted) = wanted.get(&(tensor.name.as_str(), tensor.kind)) else { continue };
            for chunk in &tensor.chunks {
                let stored = chunk.blocks();
                let mut targets = Vec::new();
                for (shard, boxes) in wanted {
                    let pairs: Vec<Pair> = stored
                        .iter()
                        .flat_map(|stored| boxes.iter().map(move |wanted| (stored, wanted)))
                        .filter(|(stored, wanted)| stored.shared(wanted) > 0)
                        .map(|(stored, wanted)| (stored.clone(), wanted.clone()))
                        .collect();
                    filled[*shard] +=
                        pairs.iter().map(|(stored, wanted)| stored.shared(wanted)).sum::<usize>();
                    if !pairs.is_empty() {
                        targets.push((*shard, pairs));
                    }
                }
                if !targets.is_empty() {
                    jobs.push(Job { tensor, chunk, targets });
                }
            }
        }
        for (shard, filled) in shards.iter().zip(filled) {
            let wanted: usize = shard.pieces.iter().map(|piece| piece.flat.len()).sum();
            if filled != wanted {
                let message = format!(
                    "holds {filled} of the {wanted} elements of {} ({})",
                    shard.name, shard.kind
                );
                return Err(Error::checkpoint(&self.folder, message));
            }
        }
        self.read_chunks(&mut jobs, |job, bytes| {
            for (shard, pairs) in &job.targets {
                write_shared(&shards[*shard].data, bytes, job.tensor.dtype, pairs)?;
            }
            Ok(())
        })
    }

    /// Reads each job's chunk, file by file, checks it, and passes its bytes to `f`.
    fn read_chunks(
        &self,
        jobs: &mut [Job],
        mut f: impl FnMut(&Job, &[u8]) -> Result<()>,
    ) -> Result<()> {
        jobs.sort_by(|Job { chunk: a, .. }, Job { chunk: b, .. }| {
            (&a.file, &a.key, a.start).cmp(&(&b.file, &b.key, b.start))
        });
        let mut bytes = Vec::new();
        for jobs in jobs.chunk_by(|a, b| a.chunk.file == b.chunk.file) {
            let file = ShardFile::open(&self.folder.join(&jobs[0].chunk.file))?;
            for job in jobs {
                let len = job.chunk.flat.len() * job.tensor.dtype.size();
                if bytes.len() < len {
                    bytes.resize(len, 0);
                }
                read_chunk(&file, job.tensor, job.chunk, &mut bytes[..len])?;
                f(job, &bytes[..len])?;
            }
        }
        Ok(())
    }
}

/// Reads the bytes of a chunk in `file` into a buffer of the same size.
///
/// # Errors
/// If they cannot be read, or do not match their checksum.
pub(super) fn read_chunk(
    file: &ShardFile,
    tensor: &TensorEntry,
    chunk: &Chunk,
    bytes: &mut [u8],
) -> Result<()> {
    let Chunk { key, start, flat, crc32c, .. } = chunk;
    let actual = file.read_into(key, tensor.dtype, *start..*start + flat.len(), bytes)?;
    if actual != *crc32c {
        let message = format!(
            "tensor {key:?} is damaged: its elements from {start} on have checksum {actual:08x}, \
             but the manifest records {crc32c:08x}; {}",
            file.path().parent().map_or_else(String::new, use_another)
        );
        return Err(Error::checkpoint(file.path(), message));
    }
    Ok(())
}
