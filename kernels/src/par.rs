//! Splitting work over rayon's threads: inline where there is one thread or little to do.
//!
//! Cuts depend on sizes alone, or the pieces are independent of each other; so no result depends on the number of
//! threads.

use rayon::prelude::*;

/// Elements below which handing work to another thread costs more than it saves.
pub const GRAIN: usize = 16 * 1024;

/// Threads of the current pool.
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Calls `f` for 0..n.
pub fn for_each(n: usize, f: impl Fn(usize) + Sync) {
    if n <= 1 || threads() == 1 {
        (0..n).for_each(f);
    } else {
        (0..n).into_par_iter().for_each(&f);
    }
}

/// Calls `f` with the number of the first element and the elements of every block of `block` of them.
pub fn blocks<T: Send>(out: &mut [T], block: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    let block = block.max(1);
    if out.len() <= block || threads() == 1 {
        out.chunks_mut(block).enumerate().for_each(|(i, part)| f(i * block, part));
    } else {
        out.par_chunks_mut(block).enumerate().for_each(|(i, part)| f(i * block, part));
    }
}

/// Calls `f` with the number of the block and the blocks of `a` (`block_a` elements) and `b` (`block_b`) of that number.
pub fn blocks2<A: Send, B: Send>(
    a: &mut [A],
    block_a: usize,
    b: &mut [B],
    block_b: usize,
    f: impl Fn(usize, &mut [A], &mut [B]) + Sync,
) {
    let (block_a, block_b) = (block_a.max(1), block_b.max(1));
    if a.len() <= block_a || threads() == 1 {
        a.chunks_mut(block_a).zip(b.chunks_mut(block_b)).enumerate().for_each(|(i, (a, b))| f(i, a, b));
    } else {
        let blocks = a.par_chunks_mut(block_a).zip(b.par_chunks_mut(block_b));
        blocks.enumerate().for_each(|(i, (a, b))| f(i, a, b));
    }
}

/// Rows of `width` elements that make a block of about [`GRAIN`] elements.
pub fn rows_per_block(width: usize) -> usize {
    (GRAIN / width.max(1)).max(1)
}

/// A pointer that tasks share to write disjoint elements.
#[derive(Clone, Copy)]
pub struct Shared<T>(pub *mut T);

// SAFETY: users write disjoint elements from different tasks; `T` is a plain number.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The pointer `offset` elements further.
    ///
    /// # Safety
    /// The element must lie in the allocation.
    pub unsafe fn at(self, offset: usize) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(offset) }
    }
}
