//! Windows: memory in which a rank shows blocks of bytes to the other members of a group.
//!
//! A window is a ring of [`SLOTS`] blocks with one writer and many readers. The members of a group
//! step through the blocks together: each member posts its k-th block and reads the k-th block of
//! every member. A slot is refilled after all members have read it. Blocks are small enough to be
//! read from a cache of the machine instead of its memory.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::PAGE;
use super::arena::{Arena, Memory, Shared};
use super::remote::Reach;
use super::ring_position::RingPosition;
use crate::comm::message::{Header, HeaderWords};

/// Bytes of a block. Larger blocks do not fit the cores' own caches; with smaller ones the ranks
/// wait for each other more often.
pub const BLOCK: usize = 512 << 10;
/// Number of blocks that a rank may be ahead of the slowest reader, at most. An all-reduce has
/// three in flight.
pub const SLOTS: u32 = 4;
/// Bytes of a window.
pub const WINDOW_BYTES: usize = PAGE + SLOTS as usize * BLOCK;
/// Offset of the slots' notes, each on its own cache line.
const NOTES: usize = 1024;

/// The header of a window. While no member sleeps, readers read only the slots' notes and leave
/// these cache lines to the owner.
#[repr(C)]
struct Control {
    /// Number of blocks that the owner has posted.
    posted: RingPosition,
    /// Number of rounds in which the owner has read everyone's blocks.
    taken: RingPosition,
    /// Number of members that have left the group.
    departed: AtomicU32,
}

// SAFETY: consists only of atomics.
unsafe impl Shared for Control {}

/// The facts about a slot's block, in one cache line, so that a reader needs no other line before
/// the block itself.
#[repr(C, align(64))]
struct Note {
    /// The encoded header of the block.
    header: [AtomicU64; Header::BYTES / 8],
    /// The owner's `taken` when it posted this block.
    taken: AtomicU32,
    /// The owner's `posted` including this block; written last.
    posted: AtomicU32,
}

// SAFETY: consists only of atomics.
unsafe impl Shared for Note {}

/// One rank's window.
pub struct Window(Memory);

impl Window {
    pub fn new(memory: Memory) -> Self {
        assert!(memory.len() == WINDOW_BYTES);
        Self(memory)
    }

    fn control(&self) -> &Control {
        self.0.at(0)
    }

    /// Number of other members that have left the group.
    pub fn departed(&self) -> &AtomicU32 {
        &self.control().departed
    }

    /// Resets the window before other members know of it.
    pub fn reset(&self) {
        let control = self.control();
        control.posted.reset();
        control.taken.reset();
        (0..SLOTS).for_each(|slot| self.note(slot).posted.store(0, Ordering::Relaxed));
        control.departed.store(0, Ordering::Release);
    }

    fn note(&self, round: u32) -> &Note {
        self.0.at(NOTES + (round % SLOTS) as usize * size_of::<Note>())
    }

    fn block(&self, round: u32) -> *mut u8 {
        self.0.bytes(PAGE + (round % SLOTS) as usize * BLOCK, BLOCK)
    }
}

/// Whether `position` has reached `goal`; both count modulo 2³².
fn reached(position: u32, goal: u32) -> bool {
    position.wrapping_sub(goal).cast_signed() >= 0
}

/// The windows of all members of a group, in group order, as seen by one of them.
pub struct Windows {
    arena: Arc<Arena>,
    all: Vec<Window>,
    me: usize,
    /// Index of the group's window among this rank's windows.
    index: usize,
    posted: u32,
    taken: u32,
    /// Each member's last known reading position. It is cached, because looking it up takes a cache
    /// line from its writer.
    taken_by: Vec<Cell<u32>>,
    /// Bytes of the next block of each member.
    lens: Vec<usize>,
    pub reach: Reach,
    pub scratch: Vec<u8>,
}

impl Windows {
    /// `members` are the world ranks and the indices of their windows; this rank is the `me`-th.
    /// `None` if a window does not exist.
    pub fn new(
        arena: Arc<Arena>,
        me: usize,
        members: impl IntoIterator<Item = (usize, usize)>,
    ) -> Option<Self> {
        let members: Vec<_> = members.into_iter().collect();
        let index = members.get(me)?.1;
        let all = members
            .into_iter()
            .map(|(rank, index)| arena.window(rank, index))
            .collect::<Option<Vec<_>>>()?;
        let n = all.len();
        Some(Self {
            arena,
            all,
            me,
            index,
            posted: 0,
            taken: 0,
            taken_by: vec![Cell::new(0); n],
            lens: vec![0; n],
            reach: Reach::default(),
            scratch: Vec::new(),
        })
    }

    /// The position that `peer` advances when it has read blocks.
    pub fn taken_by(&self, peer: usize) -> &RingPosition {
        &self.all[peer].control().taken
    }

    /// The position that `peer` advances when it posts blocks.
    pub fn posted_by(&self, peer: usize) -> &RingPosition {
        &self.all[peer].control().posted
    }

    /// Whether `peer` has read the present content of the next slot to fill.
    pub fn has_room(&self, peer: usize) -> bool {
        let (known, goal) = (&self.taken_by[peer], self.posted.wrapping_add(1).wrapping_sub(SLOTS));
        if !reached(known.get(), goal) {
            known.set(self.taken_by(peer).position.load(Ordering::Acquire));
        }
        reached(known.get(), goal)
    }

    /// Whether `peer` has posted the next block to read.
    pub fn has_block(&self, peer: usize) -> bool {
        let note = self.all[peer].note(self.taken);
        // Until then the slot holds an earlier block, because it is refilled only after all members
        // have read it.
        let is_there = note.posted.load(Ordering::Acquire) == self.taken.wrapping_add(1);
        if is_there {
            let (known, taken) = (&self.taken_by[peer], note.taken.load(Ordering::Relaxed));
            if reached(taken, known.get()) {
                known.set(taken);
            }
        }
        is_there
    }

    /// The next slot to fill. All members must have room.
    pub fn slot(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= BLOCK);
        // SAFETY: `len` bytes within this rank's own window. No other rank reads them now: as the
        // caller ensured, all have read the old content and wait for this round's block. This rank
        // does not read them either, because `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.all[self.me].block(self.posted), len) }
    }

    /// The header of the next block of `peer`, which must have been posted.
    pub fn header(&self, peer: usize) -> HeaderWords {
        self.all[peer].note(self.taken).header.each_ref().map(|word| word.load(Ordering::Relaxed))
    }

    /// Sets the number of bytes in the next block of `peer`.
    ///
    /// # Panics
    /// If `len` exceeds the size of a block.
    pub fn set_len(&mut self, peer: usize, len: usize) {
        assert!(len <= BLOCK);
        self.lens[peer] = len;
    }

    /// The next blocks of all members. All must have been posted, with their lengths set.
    pub fn blocks(&self) -> Blocks<'_> {
        Blocks(self)
    }

    /// As [`Windows::blocks`], together with the next slot to fill. All members must have room.
    pub fn blocks_and_slot(&mut self, len: usize) -> (Blocks<'_>, &mut [u8]) {
        assert!(
            self.posted != self.taken
                && self.posted.wrapping_sub(self.taken) < SLOTS
                && len <= BLOCK
        );
        let slot = self.all[self.me].block(self.posted);
        // SAFETY: as in `slot`. The slot differs from those of the blocks, which are less than
        // `SLOTS` rounds behind.
        let slot = unsafe { std::slice::from_raw_parts_mut(slot, len) };
        (Blocks(self), slot)
    }

    /// Publishes the slot as this rank's next block.
    pub fn post(&mut self, header: &HeaderWords) {
        let window = &self.all[self.me];
        let note = window.note(self.posted);
        self.posted = self.posted.wrapping_add(1);
        note.header
            .iter()
            .zip(header)
            .for_each(|(word, value)| word.store(*value, Ordering::Relaxed));
        note.taken.store(self.taken, Ordering::Relaxed);
        note.posted.store(self.posted, Ordering::Release);
        window.control().posted.publish(self.posted);
    }

    /// The first `len` bytes of the block that this rank posted last.
    pub fn last_posted(&self, len: usize) -> &[u8] {
        assert!(self.posted != self.taken && len <= BLOCK);
        // SAFETY: within this rank's own window. Only this rank writes there, and writing needs a
        // mutable borrow of `self`.
        unsafe {
            std::slice::from_raw_parts(self.all[self.me].block(self.posted.wrapping_sub(1)), len)
        }
    }

    /// Publishes that this rank has read the current blocks, so that their owners may refill the
    /// slots.
    pub fn take(&mut self) {
        self.taken = self.taken.wrapping_add(1);
        self.all[self.me].control().taken.publish(self.taken);
    }
}

/// One block of every member, in group order.
#[derive(Clone, Copy)]
pub struct Blocks<'a>(&'a Windows);

impl<'a> Blocks<'a> {
    /// The block of member `peer`.
    pub fn of(self, peer: usize) -> &'a [u8] {
        let Self(windows) = self;
        let from = windows.all[peer].block(windows.taken);
        // SAFETY: at most the size of a block within the window of `peer`. `peer` has posted the
        // block, as the caller ensured, and does not change it until this rank has taken it, which
        // needs a mutable borrow of `windows`.
        unsafe { std::slice::from_raw_parts(from, windows.lens[peer]) }
    }

    /// The blocks of all members, with `None` for member `me`, which has its own block elsewhere.
    pub fn but(self, me: usize) -> impl Iterator<Item = Option<&'a [u8]>> {
        (0..self.0.all.len()).map(move |peer| (peer != me).then(|| self.of(peer)))
    }

    /// The blocks of all members.
    pub fn iter(self) -> impl Iterator<Item = &'a [u8]> {
        (0..self.0.all.len()).map(move |peer| self.of(peer))
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        for (_, window) in self.all.iter().enumerate().filter(|(peer, _)| *peer != self.me) {
            window.departed().fetch_add(1, Ordering::AcqRel);
        }
        self.arena.give_back(self.index, self.all.len() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> [Windows; 2] {
        let arenas = Arena::of_threads(2).unwrap();
        [0, 1].map(|me| Windows::new(arenas[me].clone(), me, [(0, 0), (1, 0)]).unwrap())
    }

    #[test]
    fn a_slot_is_filled_again_only_after_all_have_read_it() {
        let [mut a, mut b] = pair();
        let header: HeaderWords = [7; Header::BYTES / 8];
        for round in 0..SLOTS {
            assert!(a.has_room(1));
            a.slot(1)[0] = round as u8;
            a.post(&header);
            b.post(&header);
        }
        // The blocks of `b` also show that it has read none.
        assert!(a.has_block(1) && !a.has_room(1) && b.has_block(0));
        b.set_len(0, 1);
        assert_eq!((b.header(0), b.blocks().of(0)), (header, &[0][..]));
        b.take();
        assert!(a.has_room(1));
        assert_eq!(b.blocks().of(0), [1]);
    }

    #[test]
    fn a_block_says_how_far_its_owner_has_read() {
        let [mut a, mut b] = pair();
        for round in 0..3 * SLOTS {
            assert!(a.has_room(1) && b.has_room(0));
            for windows in [&mut a, &mut b] {
                windows.post(&HeaderWords::default());
            }
            assert!(a.has_block(1) && b.has_block(0));
            assert_eq!((a.taken_by[1].get(), b.taken_by[0].get()), (round, round));
            a.take();
            b.take();
        }
    }

    #[test]
    fn a_window_used_again_shows_nothing_of_the_group_before() {
        let arenas = Arena::of_threads(2).unwrap();
        let mut indices = Vec::new();
        for _ in 0..2 {
            let taken = [0, 1].map(|rank| arenas[rank].take_window().unwrap());
            let [mut a, mut b] = [0, 1].map(|me| {
                Windows::new(arenas[me].clone(), me, [0, 1].into_iter().zip(taken)).unwrap()
            });
            assert!(!a.has_block(1) && !b.has_block(0));
            let _numbers = [&mut a, &mut b].map(|windows| windows.post(&HeaderWords::default()));
            assert!(a.has_block(1) && b.has_block(0));
            indices.push(taken);
        }
        assert_eq!(indices[0], indices[1]);
    }

    #[test]
    fn rounds_are_counted_beyond_the_range_of_the_counters() {
        let [mut a, mut b] = pair();
        for windows in [&mut a, &mut b] {
            (windows.posted, windows.taken) = (u32::MAX - 1, u32::MAX - 1);
            windows.taken_by.iter().for_each(|taken| taken.set(u32::MAX - 1));
            let mine = &windows.all[windows.me];
            mine.control().posted.publish(u32::MAX - 1);
            mine.control().taken.publish(u32::MAX - 1);
            (u32::MAX - 1 - SLOTS..u32::MAX - 1)
                .for_each(|round| mine.note(round).posted.store(round + 1, Ordering::Relaxed));
        }
        for _ in 0..5 {
            assert!(a.has_room(1) && !b.has_block(0));
            a.post(&HeaderWords::default());
            b.post(&HeaderWords::default());
            assert!(a.has_block(1) && b.has_block(0));
            a.take();
            b.take();
        }
    }
}
