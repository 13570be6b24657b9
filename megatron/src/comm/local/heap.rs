//! Blocks of shared memory that carry large messages.
//!
//! The sender copies a message to a block of its own heap and tells the receiver its place. The
//! receiver copies the message out and marks the block as done. Both work at the same time, because
//! the sender publishes its progress.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::arena::{Memory, Shared};
use super::copy_out::copy_out;
use super::ring_position::RingPosition;
use crate::comm::inbox::lock;

/// Bytes that are copied and published at a time.
pub const PIECE: usize = 128 << 10;
/// Offset of the data in a block.
const DATA: usize = 128;

/// The header of a block.
#[repr(C)]
struct Control {
    /// Number of pieces that the sender has written.
    written: RingPosition,
    /// Whether the receiver is done with the block.
    done: AtomicU32,
}

// SAFETY: consists only of atomics.
unsafe impl Shared for Control {}

/// A rank's own heap. First fit, which touches few pages.
pub struct Heap {
    memory: Memory,
    /// Allocated blocks, ordered by position.
    live: Mutex<Vec<(Range<usize>, Arc<()>)>>,
}

/// A block that its owner is writing.
pub struct Draft {
    pub offset: usize,
    memory: Memory,
    /// While this handle lives, the block is not reused.
    _writing: Arc<()>,
}

/// A message in another rank's heap; dropping it frees the block.
pub struct Block {
    memory: Memory,
}

impl Heap {
    pub fn new(memory: Memory) -> Self {
        Self { memory, live: Mutex::default() }
    }

    /// Allocates a block for `len` bytes; `None` if there is no room now.
    pub fn allocate(&self, len: usize) -> Option<Draft> {
        let bytes = len.checked_add(DATA)?.next_multiple_of(DATA);
        let mut live = lock(&self.live);
        let is_read = |block: &Range<usize>| {
            self.memory.at::<Control>(block.start).done.load(Ordering::Acquire) != 0
        };
        live.retain(|(block, writing)| Arc::strong_count(writing) > 1 || !is_read(block));
        let mut offset = 0;
        let place = live.iter().position(|(block, _)| {
            let fits = block.start - offset >= bytes;
            if !fits {
                offset = block.end;
            }
            fits
        });
        if offset + bytes > self.memory.len() {
            return None;
        }
        let memory = self.memory.part(offset, bytes);
        let control = memory.at::<Control>(0);
        control.written.reset();
        control.done.store(0, Ordering::Release);
        let writing = Arc::new(());
        let place = place.unwrap_or(live.len());
        live.insert(place, (offset..offset + bytes, writing.clone()));
        Some(Draft { offset, memory, _writing: writing })
    }
}

impl Draft {
    /// Writes the message piece by piece; the receiver may read published pieces meanwhile.
    pub fn write(self, bytes: &[u8]) {
        let written = &self.memory.at::<Control>(0).written;
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            let to = self.memory.bytes(DATA + i * PIECE, piece.len());
            // SAFETY: `to` has room for the piece within this block, and the receiver does not read
            // it before it is published.
            let to = unsafe { std::slice::from_raw_parts_mut(to, piece.len()) };
            copy_out(to, piece);
            written.publish(i as u32 + 1);
        }
    }
}

impl Block {
    /// The block of `len` bytes at `offset` of `heap`; `None` if no block can be there.
    pub fn open(heap: &Memory, offset: usize, len: usize) -> Option<Self> {
        let bytes = len.checked_add(DATA)?;
        let fits = offset.is_multiple_of(DATA)
            && offset.checked_add(bytes).is_some_and(|end| end <= heap.len());
        fits.then(|| Self { memory: heap.part(offset, bytes) })
    }

    fn control(&self) -> &Control {
        self.memory.at(0)
    }

    pub fn len(&self) -> usize {
        self.memory.len() - DATA
    }

    /// The position that the sender advances.
    pub fn written(&self) -> &RingPosition {
        &self.control().written
    }

    /// Whether the `index`-th piece has been written.
    pub fn has(&self, index: usize) -> bool {
        self.written().position.load(Ordering::Acquire) as usize > index
    }

    /// The `index`-th piece, which must have been written.
    pub fn piece(&self, index: usize) -> &[u8] {
        let start = index * PIECE;
        let len = PIECE.min(self.len() - start);
        let from = self.memory.bytes(DATA + start, len);
        // SAFETY: `len` bytes of the block, which the sender has published and does not change
        // until this block is dropped.
        unsafe { std::slice::from_raw_parts(from, len) }
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a block of {} bytes", self.len())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.control().done.store(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::local::arena::Arena;

    fn contents(block: &Block) -> Vec<u8> {
        (0..block.len().div_ceil(PIECE)).flat_map(|i| block.piece(i).to_vec()).collect()
    }

    #[test]
    fn blocks_hold_messages_apart_and_are_given_again_once_read() {
        let arenas = Arena::of_threads(2).unwrap();
        let (heap, seen) = (arenas[0].heap(), arenas[1].heap_memory(0));
        let message = |seed: usize, len: usize| {
            (0..len).map(|i| ((i * seed) >> 3) as u8).collect::<Vec<u8>>()
        };
        let sizes = [1, PIECE, 3 * PIECE + 5, 77_777];
        let blocks: Vec<Block> = (1..)
            .zip(sizes)
            .map(|(seed, len)| {
                let draft = heap.allocate(len).unwrap();
                let block = Block::open(&seen, draft.offset, len).unwrap();
                assert!(!block.has(0));
                draft.write(&message(seed, len));
                block
            })
            .collect();
        for ((seed, len), block) in (1..).zip(sizes).zip(&blocks) {
            assert!(contents(block) == message(seed, len), "{len}");
        }
        let ends = heap.allocate(1).unwrap().offset;
        drop(blocks);
        assert!(heap.allocate(2 * PIECE).unwrap().offset < ends);
    }

    #[test]
    fn a_block_is_not_given_again_while_it_is_written_or_unread() {
        let arenas = Arena::of_threads(1).unwrap();
        let (heap, seen) = (arenas[0].heap(), arenas[0].heap_memory(0));
        let draft = heap.allocate(10).unwrap();
        let offset = draft.offset;
        drop(Block::open(&seen, offset, 10).unwrap());
        assert_ne!(heap.allocate(10).unwrap().offset, offset, "still written");
        drop(draft);
        assert_eq!(heap.allocate(10).unwrap().offset, offset);
        assert_ne!(heap.allocate(10).unwrap().offset, offset, "unread");
    }

    #[test]
    fn a_full_heap_says_so() {
        let arenas = Arena::of_threads(1).unwrap();
        let len = arenas[0].heap_memory(0).len();
        assert!(arenas[0].heap().allocate(len).is_none());
        let _most = arenas[0].heap().allocate(len - DATA).unwrap();
        assert!(arenas[0].heap().allocate(1).is_none());
        assert!(Block::open(&arenas[0].heap_memory(0), len - DATA, 1).is_none());
    }
}
