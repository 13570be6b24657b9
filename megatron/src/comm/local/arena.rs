//! Memory that the ranks of one host share in addition to the rings: windows for collectives and a
//! heap for large messages.
//!
//! Every rank owns a part of it. Only the owner assigns windows and blocks in its part, and tells
//! the others where they are. Untouched pages take no memory.
#![allow(unsafe_code)]

use std::fs::{File, Permissions};
use std::os::fd::FromRawFd;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use memmap2::{MmapOptions, MmapRaw};

use super::PAGE;
use super::heap::Heap;
use super::window::{WINDOW_BYTES, Window};
use crate::comm::inbox::lock;

/// Maximum number of a rank's groups with a window at a time. Further groups exchange messages.
const WINDOWS: usize = 64;

/// Bytes of a rank's heap in a world of `size` ranks: room for several messages of the largest
/// usual size, but less with many ranks.
fn heap_bytes(size: usize) -> usize {
    ((4 << 30) / size.max(1)).clamp(32 << 20, 1 << 30).next_multiple_of(PAGE)
}

fn rank_bytes(size: usize) -> usize {
    WINDOWS * WINDOW_BYTES + heap_bytes(size)
}

/// An unnamed file of `len` bytes in memory (`memfd_create(2)`), mapped. The system frees it with
/// the last process that maps it.
pub fn unnamed(len: usize) -> std::io::Result<(File, MmapRaw)> {
    // SAFETY: the name is a C string; the result is checked.
    let fd = unsafe { libc::memfd_create(c"megatron-comm".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: `fd` was just created and has no other owner.
    let file = unsafe { File::from_raw_fd(fd) };
    // Accessible to this user alone, because `/proc` shows the descriptor to others, too.
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.set_len(len as u64)?;
    let map = MmapOptions::new().len(len).map_raw(&file)?;
    Ok((file, map))
}

/// A range of shared memory, which stays mapped while any handle exists.
#[derive(Clone)]
pub struct Memory {
    map: Arc<MmapRaw>,
    start: usize,
    len: usize,
}

impl Memory {
    /// The range of `len` bytes from `start`.
    ///
    /// # Panics
    /// If the range exceeds this one.
    pub fn part(&self, start: usize, len: usize) -> Self {
        assert!(
            start.checked_add(len).is_some_and(|end| end <= self.len),
            "beyond the shared memory"
        );
        Self { map: self.map.clone(), start: self.start + start, len }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// The `T` at `offset`.
    pub fn at<T: Shared>(&self, offset: usize) -> &T {
        let pointer = self.bytes(offset, size_of::<T>()).cast::<T>();
        assert!(pointer.is_aligned());
        // SAFETY: in bounds and aligned, as just checked. `T` consists of atomics, for which any
        // bytes are a value and which other processes may change at any time.
        unsafe { &*pointer }
    }

    /// A pointer to the first of `len` bytes from `offset` on. Callers that read or write through
    /// it must ensure that nothing else writes there.
    pub fn bytes(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "beyond the shared memory"
        );
        // SAFETY: this range lies within the mapping, and `offset` within this range.
        unsafe { self.map.as_mut_ptr().add(self.start + offset) }
    }
}

/// Types that consist only of atomics.
///
/// # Safety
/// Any bytes must be a value, and changes by others at any time must be allowed.
pub unsafe trait Shared {}

/// One rank's view of the windows and heaps of all ranks.
pub struct Arena {
    memory: Memory,
    rank: usize,
    size: usize,
    heap: Heap,
    uses: Mutex<Vec<Use>>,
}

/// The state of one of this rank's own windows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    InUse,
    /// Given back. Others may read it until this many members have left their group, too.
    Left(usize),
}

impl Arena {
    /// Bytes of the arena for a world of `size` ranks.
    pub fn bytes(size: usize) -> usize {
        size * rank_bytes(size)
    }

    /// Rank `rank`'s view of the arena that begins at byte `start` of `map`.
    pub fn new(map: Arc<MmapRaw>, start: usize, rank: usize, size: usize) -> Arc<Self> {
        let len = map.len();
        let memory = Memory { map, start: 0, len }.part(start, Self::bytes(size));
        let heap = Heap::new(Self::heap_of(&memory, rank, size));
        // The first window belongs to the world; every rank knows this.
        Arc::new(Self { memory, rank, size, heap, uses: Mutex::new(vec![Use::InUse]) })
    }

    /// The views of `size` ranks that are threads of this process; `None` if the system refuses the
    /// memory.
    pub fn of_threads(size: usize) -> Option<Vec<Arc<Self>>> {
        let (_, map) = unnamed(Self::bytes(size)).ok()?;
        let map = Arc::new(map);
        Some((0..size).map(|rank| Self::new(map.clone(), 0, rank, size)).collect())
    }

    fn heap_of(memory: &Memory, rank: usize, size: usize) -> Memory {
        memory.part(rank * rank_bytes(size) + WINDOWS * WINDOW_BYTES, heap_bytes(size))
    }

    /// Window `index` of `rank`; `None` if no rank can have such a window.
    pub fn window(&self, rank: usize, index: usize) -> Option<Window> {
        let exists = rank < self.size && index < WINDOWS;
        exists.then(|| {
            Window::new(
                self.memory.part(rank * rank_bytes(self.size) + index * WINDOW_BYTES, WINDOW_BYTES),
            )
        })
    }

    /// Takes a free window of this rank; `None` if there is none.
    pub fn take_window(&self) -> Option<usize> {
        let mut uses = lock(&self.uses);
        let is_free = |(index, of): (usize, &Use)| match of {
            Use::InUse => false,
            Use::Left(others) => self.window(self.rank, index).is_some_and(|window| {
                window.departed().load(Ordering::Acquire) as usize == *others
            }),
        };
        let index = match uses.iter().enumerate().position(is_free) {
            Some(index) => index,
            None if uses.len() < WINDOWS => {
                uses.push(Use::InUse);
                uses.len() - 1
            }
            None => return None,
        };
        uses[index] = Use::InUse;
        self.window(self.rank, index)?.reset();
        Some(index)
    }

    /// Gives back a window of this rank, which `others` members may still read.
    pub fn give_back(&self, index: usize, others: usize) {
        lock(&self.uses)[index] = Use::Left(others);
    }

    /// This rank's heap.
    pub fn heap(&self) -> &Heap {
        &self.heap
    }

    /// The memory of the heap of `rank`.
    pub fn heap_memory(&self, rank: usize) -> Memory {
        Self::heap_of(&self.memory, rank, self.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_given_again_only_after_all_have_left_it() {
        let arena = &Arena::of_threads(2).unwrap()[0];
        let first = arena.take_window().unwrap();
        arena.give_back(first, 1);
        assert_ne!(arena.take_window(), Some(first));
        arena.window(0, first).unwrap().departed().fetch_add(1, Ordering::Release);
        assert_eq!(arena.take_window(), Some(first));
    }

    #[test]
    fn a_rank_without_windows_left_is_told() {
        let arena = &Arena::of_threads(1).unwrap()[0];
        let taken: Vec<_> = std::iter::from_fn(|| arena.take_window()).collect();
        assert_eq!(taken, (1..WINDOWS).collect::<Vec<_>>());
    }
}
