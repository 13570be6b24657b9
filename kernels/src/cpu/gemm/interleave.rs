//! Work that micro-kernels of x86-64 do between their products ([`super::kernel::Interleaved`]):
//! packing or prefetching data that is needed next.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::Mat;
use super::avx512_common::Word;
use super::kernel::{Next, Pack};
use super::lanes::first;
use crate::tensor::allocator::LINE;
use crate::tensor::simd::prefetch;

/// Prefetch distance of interleaved packing, in shares.
const SHARES_AHEAD: usize = 2;

/// Work of a tile between its shares.
pub trait Work {
    /// Whether there is nothing to do.
    const IS_NOTHING: bool = false;

    /// Does a share of the work.
    ///
    /// # Safety
    /// As [`super::kernel::Kernel::tile`].
    #[inline(always)]
    unsafe fn share(&mut self) {}

    /// Does a step of the work, after the products of each word.
    ///
    /// # Safety
    /// As [`super::kernel::Kernel::tile`].
    #[inline(always)]
    unsafe fn step(&mut self) {}
}

/// No work.
pub struct Idle;

impl Work for Idle {
    const IS_NOTHING: bool = true;
}

/// Prefetches rows of memory: so many per share.
pub struct Fetch(pub Next, pub usize);

impl Work for Fetch {
    #[inline(always)]
    unsafe fn share(&mut self) {
        for _ in 0..self.1 {
            self.0.lines().into_iter().for_each(prefetch);
        }
    }
}

/// A strip or panel of `R` words that is being packed from rows of memory.
struct Packer<E, W, const R: usize> {
    from: *const E,
    row: usize,
    masks: [u16; 2],
    to: *mut i32,
    word: PhantomData<W>,
}

impl<E, W: Word<E>, const R: usize> Packer<E, W, R> {
    fn new<P>(pack: Pack<E, P>) -> Self {
        let Pack { from: Mat(from, _, row), width, to, .. } = pack;
        let masks = [first(width), first(width.saturating_sub(16))];
        Self { from, row, masks, to: to.cast(), word: PhantomData }
    }

    /// Packs the next `R` words, and prefetches the `R` words that follow `ahead` calls later.
    ///
    /// # Safety
    /// As [`super::kernel::Kernel::tile`].
    #[inline(always)]
    unsafe fn pack(&mut self, ahead: usize) {
        let line = LINE / size_of::<E>();
        // SAFETY: the caller's promise.
        unsafe {
            for r in 0..W::ROWS {
                let ahead = self.from.wrapping_add((ahead * W::ROWS + r) * self.row);
                (0..R).step_by(line).for_each(|at| prefetch(ahead.wrapping_add(at)));
                // Strips may begin anywhere in a line, so the last element may be in another.
                if !R.is_multiple_of(line) {
                    prefetch(ahead.wrapping_add(R - 1));
                }
            }
            for (i, &mask) in self.masks.iter().enumerate().take(R.div_ceil(16)) {
                let words = W::words(self.from.wrapping_add(16 * i), self.row, mask);
                _mm512_mask_storeu_epi32(self.to.wrapping_add(16 * i), first(R - 16 * i), words);
            }
        }
        self.from = self.from.wrapping_add(W::ROWS * self.row);
        self.to = self.to.wrapping_add(R);
    }
}

/// Strips or panels of `R` words, packed in shares.
pub struct PackByShares<E, W, const R: usize> {
    packer: Packer<E, W, R>,
    left: usize,
    share: usize,
}

impl<E, W: Word<E>, const R: usize> PackByShares<E, W, R> {
    pub fn new<P>(pack: Pack<E, P>, shares: usize) -> Self {
        let left = pack.k / W::ROWS;
        Self { packer: Packer::new(pack), left, share: left.div_ceil(shares) }
    }
}

impl<E, W: Word<E>, const R: usize> Work for PackByShares<E, W, R> {
    #[inline(always)]
    unsafe fn share(&mut self) {
        let now = self.share.min(self.left);
        self.left -= now;
        for _ in 0..now {
            // SAFETY: the caller's promise.
            unsafe { self.packer.pack(SHARES_AHEAD * self.share) };
        }
    }
}

/// Prefetch distance, in steps.
const STEPS_AHEAD: usize = 24;

/// A strip or panel of `R` words, as long as the ones being multiplied, packed word by word.
pub struct PackBySteps<E, W, const R: usize>(Packer<E, W, R>);

impl<E, W: Word<E>, const R: usize> PackBySteps<E, W, R> {
    /// Whether a tile of `words` words has exactly one step for each word of `pack`.
    pub fn fits<P>(pack: &Pack<E, P>, words: usize) -> bool {
        pack.k == words * W::ROWS
    }

    pub fn new<P>(pack: Pack<E, P>) -> Self {
        Self(Packer::new(pack))
    }
}

impl<E, W: Word<E>, const R: usize> Work for PackBySteps<E, W, R> {
    #[inline(always)]
    unsafe fn step(&mut self) {
        // SAFETY: the caller's promise.
        unsafe { self.0.pack(STEPS_AHEAD) };
    }
}
