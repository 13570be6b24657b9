//! An arena for the large blocks of a training process: its own address space, apart from small
//! blocks.
//!
//! A step takes and drops the same large blocks over and over, in its own order. On the heap, small
//! blocks come and go between them, and some stay. A small block in the hole that a large one left
//! would send the next large block to the heap's end, so the peak of memory would depend on chance.
//! In the arena only large blocks split holes.
//!
//! A block takes the first hole that is large enough, from the hole's beginning. Blocks that
//! outlive the blocks around them belong [`at_the_end`] of the last hole: gradients, for example,
//! outlive the activations of a backward pass. Then activations are a pile that shrinks from its
//! end, gradients a pile that grows towards it, and the free memory between them is one piece. In
//! the holes of activations, gradients of the same size plus a bias would not fit.

mod free_list;

use std::alloc::Layout;
use std::cell::Cell;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use self::free_list::{FreeList, Place};
use crate::tensor::allocator::LINE;

/// Blocks of at least this size lie in the arena.
const LARGE: usize = 256 << 10;

/// Where the arena begins, and its length; 0 while there is none.
static BEGIN: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
static LEN: AtomicUsize = AtomicUsize::new(0);
/// The free ranges. The list's own blocks are never large, so locking it cannot recurse.
static FREE: Mutex<FreeList> = Mutex::new(FreeList::new());

/// Where new blocks are placed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    Beginning,
    End,
    /// On the heap.
    Outside,
}

thread_local! {
    /// Where this thread's blocks are placed.
    static AT: Cell<At> = const { Cell::new(At::Beginning) };
}

fn at<T>(at: At, f: impl FnOnce() -> T) -> T {
    struct Until(At);
    impl Drop for Until {
        fn drop(&mut self) {
            AT.set(self.0);
        }
    }
    let _until = Until(AT.replace(at));
    f()
}

/// Calls `f`. This thread's blocks from within `f` outlive those before and after it, so they take
/// the last hole that is large enough, from the hole's end.
pub fn at_the_end<T>(f: impl FnOnce() -> T) -> T {
    at(At::End, f)
}

/// Calls `f`. This thread's blocks from within `f` stay for as long as the process runs, so they
/// lie on the heap. Anywhere in the arena they would split its free memory for ever.
pub fn outside<T>(f: impl FnOnce() -> T) -> T {
    at(At::Outside, f)
}

fn free_list() -> MutexGuard<'static, FreeList> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reserves address space for the large blocks of this process from now on: as much as the machine
/// has memory. Blocks that do not fit lie on the heap. So do all blocks if address space is limited
/// (`ulimit -v`, `ulimit -d`) or the system only reserves address space together with memory.
///
/// Memory is taken when a block is first written to, on huge pages where the system has them, and
/// kept for the next block.
pub fn open() {
    let mut free = free_list();
    if LEN.load(Ordering::Relaxed) != 0 || address_space_is_limited() {
        return;
    }
    // SAFETY: only asks for two numbers.
    let (pages, page) =
        unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let (Ok(pages), Ok(page)) = (usize::try_from(pages), usize::try_from(page)) else { return };
    let len = pages.saturating_mul(page);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address that the system chooses.
    let begin = unsafe {
        libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if begin == libc::MAP_FAILED {
        return;
    }
    #[cfg(target_os = "linux")]
    // SAFETY: the call changes the kind of pages, not their contents. Systems without huge pages
    // refuse, which changes nothing.
    unsafe {
        libc::madvise(begin, len, libc::MADV_HUGEPAGE);
    }
    free.give(0, len);
    BEGIN.store(begin.cast(), Ordering::Relaxed);
    LEN.store(len, Ordering::Release);
}

/// Whether this process has a limit on address space, or the limit cannot be read.
fn address_space_is_limited() -> bool {
    [libc::RLIMIT_AS, libc::RLIMIT_DATA].into_iter().any(|resource| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: writes only `limit`.
        unsafe {
            libc::getrlimit(resource, &raw mut limit) != 0 || limit.rlim_cur != libc::RLIM_INFINITY
        }
    })
}

/// Bytes that a block of `size` takes: [`APART`](crate::tensor::allocator::APART) more, in whole
/// cache lines, because all blocks of the arena begin with a line.
fn room(size: usize) -> Option<usize> {
    size.checked_add(crate::tensor::allocator::APART)?.checked_next_multiple_of(LINE)
}

/// Whether a block for `layout` belongs in the arena, as long as there is room.
pub fn is_for(layout: Layout) -> bool {
    layout.size() >= LARGE
        && layout.align() <= LINE
        && LEN.load(Ordering::Acquire) != 0
        && AT.get() != At::Outside
}

/// A block for `layout`, and the length of its leading part that may hold other values than zero;
/// none if the block does not belong in the arena, or has no room there.
pub fn take(layout: Layout) -> Option<(*mut u8, usize)> {
    if !is_for(layout) {
        return None;
    }
    let room = room(layout.size())?;
    let Place { begin, used } = if AT.get() == At::End {
        free_list().take_last(room)
    } else {
        free_list().take_first(room)
    }?;
    // SAFETY: the place lies within the arena.
    Some((unsafe { BEGIN.load(Ordering::Relaxed).add(begin) }, used.min(layout.size())))
}

/// A block's offset in the arena; none if the block does not lie there.
fn offset(block: *mut u8) -> Option<usize> {
    let len = LEN.load(Ordering::Acquire);
    block.addr().checked_sub(BEGIN.load(Ordering::Relaxed).addr()).filter(|&offset| offset < len)
}

/// Whether a block lies in the arena.
pub fn holds(block: *mut u8) -> bool {
    offset(block).is_some()
}

/// Gives back a block of `size` bytes; false if it does not lie in the arena.
///
/// # Safety
/// A block in the arena must come from [`take`], have `size` as its latest size, and not be used
/// any more.
pub unsafe fn give(block: *mut u8, size: usize) -> bool {
    match (offset(block), room(size)) {
        (Some(begin), Some(room)) => {
            free_list().give(begin, room);
            true
        }
        _ => false,
    }
}

/// Resizes a block from `old` to `new` bytes in place. False if the block does not lie in the
/// arena, has no room to grow, or would no longer be large.
///
/// # Safety
/// As [`give`], except that the block stays in use. It keeps its contents up to `new`.
pub unsafe fn resize(block: *mut u8, old: usize, new: usize) -> bool {
    let (Some(begin), Some(old), Some(room)) = (offset(block), room(old), room(new)) else {
        return false;
    };
    if new < LARGE {
        return false;
    }
    match room.checked_sub(old) {
        Some(0) => true,
        Some(more) => free_list().extend(begin + old, more).is_some(),
        None => {
            free_list().give(begin + room, old - room);
            true
        }
    }
}
