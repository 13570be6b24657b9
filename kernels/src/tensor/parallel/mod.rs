//! Splits work over rayon's threads. Runs inline if there is one thread or little work.
//!
//! Partitions depend on sizes alone, or the pieces are independent of each other, so no result
//! depends on the number of threads. While all threads are equally fast, each gets the same pieces
//! in every operation ([`WorkQueue`]).

mod queue;
mod spin;

use std::marker::PhantomData;

pub use queue::WorkQueue;

/// Number of elements below which handing work to another thread costs more than it saves.
pub const GRAIN: usize = 16 * 1024;

/// Number of threads of the current pool.
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Calls `f` with the index of each of `threads` threads of the current pool, on the threads that
/// are idle. One thread may make several of these calls, and an index may come twice.
pub fn on_threads(threads: usize, f: impl Fn(usize) + Sync) {
    match rayon::current_thread_index() {
        Some(caller) => on_those_of(caller, threads, &f),
        None => {
            rayon::scope(|_| on_those_of(rayon::current_thread_index().unwrap_or(0), threads, &f))
        }
    }
}

/// As [`on_threads`], called from the pool's thread `caller`.
fn on_those_of(caller: usize, threads: usize, f: &(dyn Fn(usize) + Sync)) {
    let _call = spin::Call::begin();
    rayon::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|_| {
                let thread = rayon::current_thread_index().unwrap_or(caller);
                f(thread);
                if thread != caller {
                    spin::after_job();
                }
            });
        }
        f(caller);
    });
}

/// Calls `f` for 0..n.
pub fn for_each(n: usize, f: impl Fn(usize) + Sync) {
    with_queue(n, |queue, thread| queue.take_all(thread, &f));
}

/// Lets threads call `f`. Each call takes numbers of 0..n from the queue until none are left.
pub fn with_queue(n: usize, f: impl Fn(&WorkQueue, usize) + Sync) {
    if n <= 1 || threads() == 1 {
        f(&WorkQueue::new(n, 1), 0);
    } else {
        let queue = WorkQueue::new(n, threads());
        on_threads(threads().min(n), |thread| f(&queue, thread));
    }
}

/// Calls `f` for every block of `block` elements, with the index of its first element and the
/// elements.
pub fn blocks<T: Send>(out: &mut [T], block: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    let out = Blocks::of(out, block);
    // SAFETY: each number comes once.
    for_each(out.count, |i| f(i * out.block, unsafe { out.get(i) }));
}

/// Calls `f` with i, block i of `a` (`block_a` elements) and block i of `b` (`block_b` elements),
/// for every i.
pub fn blocks2<A: Send, B: Send>(
    a: &mut [A],
    block_a: usize,
    b: &mut [B],
    block_b: usize,
    f: impl Fn(usize, &mut [A], &mut [B]) + Sync,
) {
    let (a, b) = (Blocks::of(a, block_a), Blocks::of(b, block_b));
    // SAFETY: each number comes once.
    for_each(a.count.min(b.count), |i| unsafe { f(i, a.get(i), b.get(i)) });
}

/// A slice in blocks, for tasks that take each block once.
struct Blocks<'a, T> {
    slice: Shared<T>,
    len: usize,
    /// Elements of a block; the last one may have fewer.
    block: usize,
    count: usize,
    life: PhantomData<&'a mut ()>,
}

impl<'a, T> Blocks<'a, T> {
    fn of(slice: &'a mut [T], block: usize) -> Self {
        let (len, block) = (slice.len(), block.max(1));
        Self {
            slice: Shared(slice.as_mut_ptr()),
            len,
            block,
            count: len.div_ceil(block),
            life: PhantomData,
        }
    }

    /// # Safety
    /// `i` is less than the count, and no other code holds this block.
    #[allow(clippy::mut_from_ref, reason = "blocks are disjoint")]
    unsafe fn get(&self, i: usize) -> &mut [T] {
        let start = i * self.block;
        // SAFETY: elements of the slice, which is borrowed for as long as this lives; disjoint by
        // the caller's promise.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.slice.0.add(start),
                self.block.min(self.len - start),
            )
        }
    }
}

/// Number of rows of `width` elements in a block of about [`GRAIN`] elements.
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
