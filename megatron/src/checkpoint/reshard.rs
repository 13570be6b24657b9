//! Resharding: writes the same logical state as the files of another layout, streamed from disk to
//! disk.
//!
//! Chunks are read and checked one at a time, and written to all files that need elements of them.
//! Memory is bounded by a few chunks for models of any size. Other threads write, so that reading
//! and writing overlap.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::ops::{Deref, Range};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;

use super::block::{Block, blocks};
use super::folder::{Names, checkpoints_folder, refuse_checkpoint};
use super::folder_lock::lock_folder_alone;
use super::load::read_chunk;
use super::manifest::{Chunk, Manifest, TensorEntry, difference};
use super::rank_file::{RankFile, Share, Written};
use super::save::finish;
use super::shard_file::{CACHED_BYTES, ShardFile, preamble};
use super::sidecar_files::SidecarFiles;
use super::values::copy_run;
use crate::comm::lock;
use crate::params::{ParamShare, StateKind};
use crate::{Error, Result};

/// Bytes of chunks that are cached for other files; chunks beyond that are read again. Small in
/// tests, so that some are read again.
const CACHE_BYTES: usize = if cfg!(test) { 200 } else { 384 << 20 };
/// Most source files that are open at once.
const OPEN_FILES: usize = 64;
/// Writer threads: most of the time is spent in the kernel's copies of the written data.
const WRITERS: usize = 2;

/// Writes the state of `source` as `dir/iter_…` for a layout in which rank r writes `ranks[r]`, and
/// updates the pointer in `dir`. The files are those that a run of that layout would save. `state`
/// replaces the source's state. Files named in `sidecars`, such as a tokenizer, are copied too if
/// they are beside the source.
///
/// `progress` is called with the bytes of every part that was read and passed on,
/// [`Manifest::data_bytes`] in total; it returns whether to continue. Returns whether the
/// checkpoint was written, that is, whether `progress` always returned true.
///
/// # Errors
/// If `dir` holds a checkpoint, a run saves there, a sidecar file would replace a different file,
/// `source` is damaged or lacks a tensor, or a file operation fails. Nothing is left in these
/// cases; a killed process leaves a hidden folder that the next attempt removes.
pub fn reshard(
    source: &Manifest,
    dir: &Path,
    state: &serde_json::Value,
    ranks: Vec<Vec<ParamShare>>,
    sidecars: &[&str],
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<bool> {
    let files = plan(source, ranks)?;
    let _lock = lock_folder_alone(dir)?;
    refuse_checkpoint(dir)?;
    let beside = checkpoints_folder(source.folder())?;
    let sidecars =
        SidecarFiles::read(sidecars.iter().map(|name| (beside.join(name), dir.join(name))))?;
    sidecars.refuse_to_replace()?;
    let names = Names::new(dir, source.iteration);
    names.prepare()?;
    let written = convert(source, &names.temp, files, progress);
    let done = written.and_then(|written| match written {
        Some(written) => {
            sidecars.place()?;
            finish(&names, source.iteration, state, written).map(|()| true)
        }
        None => Ok(false),
    });
    if !matches!(done, Ok(true)) {
        names.discard();
    }
    done
}

/// The files of all ranks: every parameter with all its state in the source.
fn plan(source: &Manifest, ranks: Vec<Vec<ParamShare>>) -> Result<Vec<RankFile>> {
    let mut kinds: HashMap<&str, BTreeMap<StateKind, &TensorEntry>> = HashMap::new();
    for tensor in &source.tensors {
        kinds.entry(&tensor.name).or_default().insert(tensor.kind, tensor);
    }
    let mut files = Vec::with_capacity(ranks.len());
    for (rank, params) in ranks.into_iter().enumerate() {
        let mut shares = Vec::new();
        for ParamShare { name, global_shape: shape, pieces } in params {
            let held = kinds.get(name.as_str());
            let param = held.and_then(|held| held.get(&StateKind::Param)).copied();
            source.refuse_differences(&Vec::from_iter(difference(
                param,
                &name,
                StateKind::Param,
                &shape,
            )))?;
            for (&kind, tensor) in held.into_iter().flatten() {
                source.refuse_differences(&Vec::from_iter(difference(
                    Some(tensor),
                    &name,
                    kind,
                    &shape,
                )))?;
                let (name, shape, pieces) = (name.clone(), shape.clone(), pieces.clone());
                let (partition, dtype) = (tensor.partition, tensor.dtype);
                shares.push(Share { name, kind, shape, partition, dtype, pieces });
            }
        }
        files.push(RankFile::plan(rank, shares));
    }
    Ok(files)
}

/// A chunk to write.
struct Target {
    rank: usize,
    item: usize,
    /// Index of the chunk in the item.
    chunk: usize,
    /// Elements of the item's piece.
    flat: Range<usize>,
    /// Position in the file.
    position: u64,
}

/// A chunk on its way to the disk.
struct Job {
    target: Target,
    bytes: Buffer,
    /// The checksum, if it is already known.
    crc32c: Option<u32>,
}

/// Writes all files; `None` if `progress` asked to stop.
fn convert(
    source: &Manifest,
    folder: &Path,
    files: Vec<RankFile>,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<Option<Vec<Written>>> {
    let paths: Vec<PathBuf> = files.iter().map(|file| folder.join(&file.file)).collect();
    let mut sizes = Vec::with_capacity(files.len());
    // By tensor, in the order of the files, so that the first files are complete first.
    let mut order: Vec<(&str, StateKind)> = Vec::new();
    let mut targets: HashMap<(&str, StateKind), Vec<Target>> = HashMap::new();
    for (rank, (file, path)) in files.iter().zip(&paths).enumerate() {
        let mut position = create(path, file)?;
        for (item, stored) in file.items.iter().enumerate() {
            let share = &file.shares[file.sources[item].0];
            let key = (share.name.as_str(), share.kind);
            let targets = targets.entry(key).or_insert_with(|| {
                order.push(key);
                Vec::new()
            });
            let first = file.piece(item).flat.start;
            for (chunk, elements) in file.chunks(item).enumerate() {
                let flat = first + elements.start..first + elements.end;
                let bytes = (elements.len() * stored.dtype.size()) as u64;
                targets.push(Target { rank, item, chunk, flat, position });
                position += bytes;
            }
        }
        sizes.push(position);
    }

    let index = source.index();
    let (buffers, failed) = (Buffers::default(), AtomicBool::new(false));
    let checksums = thread::scope(|scope| -> Result<Option<Vec<Vec<Vec<u32>>>>> {
        // One chunk can wait while others are written and another is assembled.
        let (sender, receiver) = sync_channel::<Job>(1);
        let jobs = Arc::new(Mutex::new(receiver));
        let (paths, buffers, failed) = (&paths, &buffers, &failed);
        let writers: Vec<_> = (0..WRITERS)
            .map(|_| {
                let jobs = Arc::clone(&jobs);
                scope.spawn(move || {
                    write_all(&jobs, paths, buffers, failed)
                        .inspect_err(|_| failed.store(true, Ordering::SeqCst))
                })
            })
            .collect();
        drop(jobs); // after the writers have ended, sending fails
        let mut open = OpenFiles { folder: source.folder(), files: VecDeque::new(), buffers };
        let mut read = || -> Result<bool> {
            for key in &order {
                let Some(tensor) = index.get(key) else { continue };
                let mut stored = Stored::new(tensor);
                let mut targets = targets.remove(key).unwrap_or_default();
                // In the order of the tensor, so that repeated uses of a chunk are close in time.
                targets.sort_by_cached_key(|target| {
                    let piece = files[target.rank].piece(target.item);
                    blocks(&piece.offset, &piece.shape, target.flat.clone(), 0)
                        .first()
                        .map(|block| block.offset.clone())
                });
                for target in targets {
                    let piece = files[target.rank].piece(target.item);
                    let (bytes, crc32c) =
                        stored.gather(&mut open, &piece.offset, &piece.shape, &target.flat)?;
                    let len = bytes.len() as u64;
                    if sender.send(Job { target, bytes, crc32c }).is_err() {
                        return Ok(true); // the writer failed and reports why
                    }
                    if !progress(len) {
                        return Ok(false);
                    }
                }
            }
            Ok(true)
        };
        let finished = read();
        drop(sender);
        let mut checksums: Vec<Vec<Vec<u32>>> = files
            .iter()
            .map(|file| {
                (0..file.items.len()).map(|item| vec![0; file.chunks(item).count()]).collect()
            })
            .collect();
        let written = writers.into_iter().map(|writer| {
            for (target, crc32c) in
                writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?
            {
                checksums[target.rank][target.item][target.chunk] = crc32c;
            }
            Ok(())
        });
        // A failed reader is the cause; writers then only lack input.
        let written: Result<()> = written.collect();
        let finished = finished?;
        written?;
        Ok(finished.then_some(checksums))
    })?;
    let Some(checksums) = checksums else { return Ok(None) };
    for path in &paths {
        let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
        file.sync_all().map_err(|e| Error::io("sync", path, e))?;
    }
    let files = files.into_iter().zip(sizes).zip(checksums);
    Ok(Some(files.map(|((file, bytes), checksums)| file.written(bytes, &checksums)).collect()))
}

/// Creates a file of the right size without data; returns the position of the data.
fn create(path: &Path, plan: &RankFile) -> Result<u64> {
    let preamble = preamble(&plan.items).map_err(|message| Error::checkpoint(path, message))?;
    let data: usize = plan.items.iter().map(|item| item.len * item.dtype.size()).sum();
    let file = File::options()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(|e| Error::io("create", path, e))?;
    file.write_all_at(&preamble, 0)
        .and_then(|()| file.set_len((preamble.len() + data) as u64))
        .map_err(|e| Error::io("write", path, e))?;
    Ok(preamble.len() as u64)
}

/// Writes the jobs that arrive, until another writer has `failed`, and returns their checksums.
fn write_all(
    jobs: &Mutex<Receiver<Job>>,
    paths: &[PathBuf],
    buffers: &Buffers,
    failed: &AtomicBool,
) -> Result<Vec<(Target, u32)>> {
    let mut checksums = Vec::new();
    let next = || lock(jobs).recv().ok().filter(|_| !failed.load(Ordering::SeqCst));
    while let Some(Job { target, bytes, crc32c }) = next() {
        let path = &paths[target.rank];
        let refused = |e| Error::io("write", path, e);
        let file = File::options().write(true).open(path).map_err(refused)?;
        let (mut computed, mut position) = (0, target.position);
        for part in bytes.chunks(CACHED_BYTES) {
            if crc32c.is_none() {
                computed = crc32c::crc32c_append(computed, part);
            }
            file.write_all_at(part, position).map_err(refused)?;
            position += part.len() as u64;
        }
        start_writeback(&file, target.position, bytes.len());
        buffers.give(bytes);
        checksums.push((target, crc32c.unwrap_or(computed)));
    }
    Ok(checksums)
}

/// Asks the system to start writing this part of the file to disk, without waiting, so that little
/// is left for the final sync. This is only a hint: if it has no effect, the final sync does all
/// the work.
#[allow(unsafe_code)]
fn start_writeback(file: &File, from: u64, len: usize) {
    #[cfg(target_os = "linux")]
    if let (Ok(from), Ok(len)) = (from.try_into(), len.try_into()) {
        // SAFETY: the descriptor is open; no memory is passed.
        unsafe { libc::sync_file_range(file.as_raw_fd(), from, len, libc::SYNC_FILE_RANGE_WRITE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, from, len);
}

/// A source tensor with pieces that are requested one after another.
struct Stored<'a> {
    tensor: &'a TensorEntry,
    /// The boxes of each chunk.
    blocks: Vec<Vec<Block>>,
    /// Elements of each chunk that were not requested yet.
    left: Vec<usize>,
    /// Chunks that will be requested again, by index, with the time of their last use.
    kept: HashMap<usize, (u64, Buffer)>,
    kept_bytes: usize,
    now: u64,
}

impl<'a> Stored<'a> {
    fn new(tensor: &'a TensorEntry) -> Self {
        let blocks = tensor.chunks.iter().map(Chunk::blocks).collect();
        let left = tensor.chunks.iter().map(|chunk| chunk.flat.len()).collect();
        Self { tensor, blocks, left, kept: HashMap::new(), kept_bytes: 0, now: 0 }
    }

    /// The elements `flat` of a box of the tensor, and their checksum if it is known.
    fn gather(
        &mut self,
        open: &mut OpenFiles<'a>,
        offset: &[usize],
        shape: &[usize],
        flat: &Range<usize>,
    ) -> Result<(Buffer, Option<u32>)> {
        let tensor = self.tensor;
        let same =
            |chunk: &&Chunk| chunk.flat == *flat && chunk.offset == offset && chunk.shape == shape;
        if let Some(chunk) = tensor.chunks.iter().find(same) {
            return Ok((open.read(tensor, chunk)?, Some(chunk.crc32c)));
        }
        let wanted = blocks(offset, shape, flat.clone(), 0);
        let mut bytes = open.buffers.take(flat.len() * tensor.dtype.size());
        for i in 0..tensor.chunks.len() {
            let pairs = self.blocks[i]
                .iter()
                .flat_map(|stored| wanted.iter().map(move |wanted| (stored, wanted)));
            let pairs: Vec<_> = pairs.filter(|(stored, wanted)| stored.overlaps(wanted)).collect();
            if pairs.is_empty() {
                continue;
            }
            let chunk = match self.kept.remove(&i) {
                Some((_, chunk)) => {
                    self.kept_bytes -= chunk.len();
                    chunk
                }
                None => open.read(tensor, &tensor.chunks[i])?,
            };
            for (stored, wanted) in pairs {
                stored.for_each_run(wanted, |run| {
                    copy_run(&chunk, tensor.dtype, bytes.as_mut(), tensor.dtype, run);
                    self.left[i] = self.left[i].saturating_sub(run.len);
                });
            }
            if self.left[i] > 0 {
                self.keep(i, chunk);
            } else {
                open.buffers.give(chunk);
            }
        }
        Ok((bytes, None))
    }

    /// Caches a chunk, and drops the least recently used ones if the cache is too large.
    fn keep(&mut self, i: usize, chunk: Buffer) {
        self.now += 1;
        self.kept_bytes += chunk.len();
        self.kept.insert(i, (self.now, chunk));
        while self.kept_bytes > CACHE_BYTES {
            let Some(oldest) = self.kept.iter().min_by_key(|(_, (used, _))| used).map(|(&i, _)| i)
            else {
                return;
            };
            self.kept_bytes -= self.kept.remove(&oldest).map_or(0, |(_, chunk)| chunk.len());
        }
    }
}

/// The source's files; some of them are open.
struct OpenFiles<'a> {
    folder: &'a Path,
    /// By name, the most recently used last.
    files: VecDeque<(&'a str, ShardFile)>,
    buffers: &'a Buffers,
}

/// The first `len` bytes of an allocation that keeps its full length, so that it is not zeroed
/// again on reuse.
struct Buffer {
    memory: Vec<u8>,
    len: usize,
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[..self.len]
    }
}

impl Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.len]
    }
}

/// Memory of finished large chunks, for reuse: fresh memory costs more than the copy into it.
#[derive(Default)]
struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    /// Smaller buffers are not worth keeping.
    const LEAST_BYTES: usize = 1 << 20;
    /// One each for reading, assembling and waiting, and those being written.
    const MOST: usize = 5;

    /// A buffer of `len` bytes with arbitrary content.
    fn take(&self, len: usize) -> Buffer {
        let used = if len < Self::LEAST_BYTES { None } else { lock(&self.0).pop() };
        let mut memory = used.unwrap_or_default();
        if memory.len() < len {
            memory.resize(len, 0);
        }
        Buffer { memory, len }
    }

    fn give(&self, buffer: Buffer) {
        let mut free = lock(&self.0);
        if buffer.memory.len() >= Self::LEAST_BYTES && free.len() < Self::MOST {
            free.push(buffer.memory);
        }
    }
}

impl<'a> OpenFiles<'a> {
    /// The bytes of a chunk, checked.
    fn read(&mut self, tensor: &TensorEntry, chunk: &'a Chunk) -> Result<Buffer> {
        let file = match self
            .files
            .iter()
            .position(|(name, _)| *name == chunk.file)
            .and_then(|at| self.files.remove(at))
        {
            Some((_, file)) => file,
            None => ShardFile::open(&self.folder.join(&chunk.file))?,
        };
        let mut bytes = self.buffers.take(chunk.flat.len() * tensor.dtype.size());
        let read = read_chunk(&file, tensor, chunk, bytes.as_mut());
        self.files.push_back((&chunk.file, file));
        if self.files.len() > OPEN_FILES {
            self.files.pop_front();
        }
        read.map(|()| bytes)
    }
}
