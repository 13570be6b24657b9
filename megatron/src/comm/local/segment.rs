//! The shared memory of one world: its members, the verdict on the run, and the rings.
//!
//! Layout, in pages: one page with the world's facts and the verdict, the pages with one slot per
//! rank, then, per ordered pair of ranks, one page with the ring's positions and the ring's bytes,
//! then the arena. Untouched pages take no memory.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};

use super::PAGE;
use super::arena::{Arena, unnamed};
use super::process::Process;
use super::ring_position::RingPosition;
use crate::comm::inbox::Loss;
use crate::text::printable;
use crate::{Error, Result};

const SLOT: usize = 64;
/// Longest reason that a verdict carries, in bytes.
const REASON: usize = 1024;

const ABSENT: u32 = 0;
const PRESENT: u32 = 1;
/// The rank reads no more, but may still be writing.
const LEAVING: u32 = 2;
const LEFT: u32 = 3;

/// The first page.
#[repr(C)]
struct Facts {
    nonce: AtomicU64,
    /// 0 while the run continues, 1 while a rank writes a verdict, 2 when the verdict can be read.
    verdict: AtomicU32,
    verdict_rank: AtomicU32,
    reason_len: AtomicU32,
    reason: [AtomicU8; REASON],
}

/// The state that a rank publishes about itself.
#[repr(C)]
struct Slot {
    state: AtomicU32,
    pid: AtomicU32,
    start: AtomicU64,
    /// The rank that it waits for, plus one; 0 if none.
    awaits: AtomicU32,
    /// Increases while it waits, which distinguishes a waiting rank from one that hangs.
    beats: AtomicU32,
}

/// The memory that all ranks of a host map.
pub struct Segment {
    map: Arc<MmapRaw>,
    /// Kept by rank 0 until all others have opened it.
    file: Option<File>,
    rank: usize,
    size: usize,
    ring_bytes: usize,
}

/// Bytes of one ring: enough for full speed, but less with many pairs of ranks.
fn ring_bytes(size: usize) -> usize {
    ((4 << 20) / size.max(1)).next_power_of_two().clamp(64 << 10, 1 << 20)
}

fn arena_start(size: usize) -> usize {
    rings_start(size) + size * size * (PAGE + ring_bytes(size))
}

fn total_bytes(size: usize) -> usize {
    arena_start(size) + Arena::bytes(size)
}

fn rings_start(size: usize) -> usize {
    PAGE + (size * SLOT).next_multiple_of(PAGE)
}

impl Segment {
    /// Creates the memory for a world of `size` ranks, as rank 0.
    ///
    /// # Errors
    /// If the system refuses the memory.
    pub fn create(size: usize, nonce: u64) -> Result<Self> {
        let refused = |e: std::io::Error| {
            // The file is sparse, but limits on file sizes count its full length.
            let advice = if e.raw_os_error() == Some(libc::EFBIG) {
                "; the limit on file sizes applies to it: run `ulimit -f unlimited` where rank 0 starts"
            } else {
                ""
            };
            Error::comm(format!(
                "cannot create {} B of shared memory: {e}{advice}",
                total_bytes(size)
            ))
        };
        let (file, map) = unnamed(total_bytes(size)).map_err(refused)?;
        let mut segment = Self::over(map, 0, size);
        segment.file = Some(file);
        segment.facts().nonce.store(nonce, Ordering::Release);
        segment.register()?;
        Ok(segment)
    }

    /// The file descriptor by which others find the memory in `/proc/PID/fd`.
    pub fn fd(&self) -> Option<i32> {
        self.file.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Closes the descriptor after all ranks have mapped the memory.
    pub fn close(&mut self) {
        self.file = None;
    }

    /// Joins the memory that rank 0, process `pid`, holds open as descriptor `fd`.
    ///
    /// # Errors
    /// If it cannot be opened, belongs to another world, or another process has joined as this
    /// rank.
    pub fn join(pid: u32, fd: i32, rank: usize, size: usize, nonce: u64) -> Result<Self> {
        let path = format!("/proc/{pid}/fd/{fd}");
        let refused = |why: String| {
            Error::comm(format!(
                "cannot open rank 0's shared memory {path}: {why}; ranks in different containers or of different users \
                 need the tcp backend"
            ))
        };
        let file = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|e| refused(e.to_string()))?;
        let there = file.metadata().map_err(|e| refused(e.to_string()))?;
        if there.uid() != crate::private::user() {
            return Err(refused(format!("it belongs to another user ({})", there.uid())));
        }
        let len = there.len();
        if len != total_bytes(size) as u64 {
            return Err(refused(format!(
                "it has {len} bytes, but a world of {size} ranks needs {}",
                total_bytes(size)
            )));
        }
        let map = MmapOptions::new()
            .len(total_bytes(size))
            .map_raw(&file)
            .map_err(|e| refused(e.to_string()))?;
        let segment = Self::over(map, rank, size);
        if segment.facts().nonce.load(Ordering::Acquire) != nonce {
            return Err(refused("it belongs to another run".into()));
        }
        segment.register()?;
        Ok(segment)
    }

    fn over(map: MmapRaw, rank: usize, size: usize) -> Self {
        Self { map: Arc::new(map), file: None, rank, size, ring_bytes: ring_bytes(size) }
    }

    /// The windows and heaps that follow the rings.
    pub fn arena(&self) -> Arc<Arena> {
        Arena::new(self.map.clone(), arena_start(self.size), self.rank, self.size)
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn size(&self) -> usize {
        self.size
    }

    pub fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }

    /// The `T` at `offset`.
    fn at<T>(&self, offset: usize) -> &T {
        assert!(
            offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= self.map.len()
        );
        // SAFETY: in bounds and aligned (checked above; the mapping starts on a page). Every `T`
        // used here consists of atomics, for which any bytes are a value and which other processes
        // may change at any time.
        unsafe { &*self.map.as_mut_ptr().add(offset).cast::<T>() }
    }

    fn facts(&self) -> &Facts {
        self.at(0)
    }

    fn slot(&self, rank: usize) -> &Slot {
        self.at(PAGE + rank * SLOT)
    }

    fn ring_start(&self, src: usize, dst: usize) -> usize {
        rings_start(self.size) + (src * self.size + dst) * (PAGE + self.ring_bytes)
    }

    /// The writer's and the reader's position in the ring from `src` to `dst`.
    pub fn ring_positions(&self, src: usize, dst: usize) -> (&RingPosition, &RingPosition) {
        let start = self.ring_start(src, dst);
        (self.at(start), self.at(start + size_of::<RingPosition>()))
    }

    /// The first of the `ring_bytes` bytes of the ring from `src` to `dst`.
    pub fn ring_data(&self, src: usize, dst: usize) -> *mut u8 {
        let start = self.ring_start(src, dst) + PAGE;
        assert!(start + self.ring_bytes <= self.map.len());
        // SAFETY: in bounds of the mapping, as checked above.
        unsafe { self.map.as_mut_ptr().add(start) }
    }

    fn register(&self) -> Result<()> {
        let (this, slot) = (Process::this(), self.slot(self.rank));
        // Two processes writing the same rings and windows would corrupt the results of all ranks.
        slot.pid.compare_exchange(0, this.pid, Ordering::AcqRel, Ordering::Acquire).map_err(|other| {
            Error::config(format!(
                "another process (pid {other}) also joined as rank {}; give every process a different rank",
                self.rank
            ))
        })?;
        slot.start.store(this.start, Ordering::Relaxed);
        slot.state.store(PRESENT, Ordering::Release);
        Ok(())
    }

    /// Publishes that this rank reads no more messages.
    pub fn start_leaving(&self) {
        self.slot(self.rank).state.store(LEAVING, Ordering::Release);
    }

    /// Publishes that this rank waits for `src`; must be repeated while it waits.
    pub fn awaits(&self, src: usize) {
        self.slot(self.rank).awaits.store(src as u32 + 1, Ordering::Relaxed);
        self.beat();
    }

    /// Publishes that this rank is still waiting.
    pub fn beat(&self) {
        self.slot(self.rank).beats.fetch_add(1, Ordering::Release);
    }

    /// Publishes that this rank has what it waited for.
    pub fn awaits_nobody(&self) {
        self.slot(self.rank).awaits.store(0, Ordering::Relaxed);
    }

    /// Each rank's number of reports that it waits.
    pub fn beats(&self) -> Vec<u32> {
        (0..self.size).map(|rank| self.slot(rank).beats.load(Ordering::Acquire)).collect()
    }

    /// The rank that `rank` waits for.
    pub fn awaited_by(&self, rank: usize) -> Option<usize> {
        let awaited = (self.slot(rank).awaits.load(Ordering::Relaxed) as usize).checked_sub(1)?;
        (awaited < self.size).then_some(awaited)
    }

    /// Publishes that this rank needs no other rank any more and has written everything.
    pub fn leave(&self) {
        self.slot(self.rank).state.store(LEFT, Ordering::Release);
    }

    /// Ranks that have not joined.
    pub fn absent(&self) -> Vec<usize> {
        (0..self.size)
            .filter(|rank| self.slot(*rank).state.load(Ordering::Acquire) == ABSENT)
            .collect()
    }

    /// How `rank` died, unless it left regularly.
    pub fn died(&self, rank: usize) -> Option<String> {
        let slot = self.slot(rank);
        let takes_part = || matches!(slot.state.load(Ordering::Acquire), PRESENT | LEAVING);
        if !takes_part() {
            return None;
        }
        let process = Process {
            pid: slot.pid.load(Ordering::Relaxed),
            start: slot.start.load(Ordering::Relaxed),
        };
        // It may have left between the two checks.
        let dead = !process.is_alive() && takes_part();
        dead.then(|| format!("died (pid {})", process.pid))
    }

    /// Whether `rank` will read messages sent to it.
    pub fn reads(&self, rank: usize) -> bool {
        matches!(self.slot(rank).state.load(Ordering::Acquire), ABSENT | PRESENT)
            && self.died(rank).is_none()
    }

    /// The reason why nothing more will come from `rank`, if that is so.
    pub fn gone(&self, rank: usize) -> Option<String> {
        if self.slot(rank).state.load(Ordering::Acquire) == LEFT {
            return Some("left the run".into());
        }
        self.died(rank)
    }

    /// Ends the run for all ranks, unless it has already ended.
    pub fn condemn(&self, loss: &Loss) {
        let facts = self.facts();
        if facts.verdict.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        let reason = &loss.how.as_bytes()[..loss.how.floor_char_boundary(REASON)];
        facts.reason.iter().zip(reason).for_each(|(to, from)| to.store(*from, Ordering::Relaxed));
        facts.reason_len.store(reason.len() as u32, Ordering::Relaxed);
        facts.verdict_rank.store(loss.rank as u32, Ordering::Relaxed);
        facts.verdict.store(2, Ordering::Release);
    }

    /// The reason why the run is over, if it is.
    pub fn verdict(&self) -> Option<Loss> {
        let facts = self.facts();
        if facts.verdict.load(Ordering::Acquire) != 2 {
            return None;
        }
        let len = (facts.reason_len.load(Ordering::Relaxed) as usize).min(REASON);
        let reason: Vec<u8> =
            facts.reason[..len].iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
        let rank = facts.verdict_rank.load(Ordering::Relaxed) as usize;
        Some(Loss { rank, how: printable(&reason) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_joined_by_one_process_only() {
        let segment = Segment::create(2, 7).unwrap();
        let join = || Segment::join(std::process::id(), segment.fd().unwrap(), 1, 2, 7);
        let _joined = join().unwrap();
        let message = join().err().unwrap().to_string();
        assert!(
            message.contains(&format!("pid {}", std::process::id())) && message.contains("rank 1"),
            "{message}"
        );
    }
}
