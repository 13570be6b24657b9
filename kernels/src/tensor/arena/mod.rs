//! Where large blocks of a training process lie: in address space of their own, apart from small
//! ones.
//!
//! A step takes and drops the same large blocks over and over, in an order of its own. On the heap
//! small blocks come and go between them, and some stay: one that took a piece of the hole that a
//! large block had left would send the next such block to the heap's end, and the peak of memory
//! would depend on chance. Here only large blocks split holes.
//!
//! Blocks take the first hole that is large enough, from its beginning. What outlives the blocks
//! around it, as gradients do the activations of a backward pass, should lie [`at_the_end`] of the
//! last one: activations are then a pile that shrinks from its end, gradients one that grows
//! towards it, and what is free lies between them in one piece. Gradients of the sizes that
//! activations leave behind, but for a bias more, would fit none of their holes.

mod free_list;

use std::alloc::Layout;
use std::cell::Cell;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use self::free_list::{FreeList, Place};
use crate::tensor::allocator::LINE;

/// Blocks from this size on lie in the arena.
const LARGE: usize = 256 << 10;

/// Where the arena begins, and its length; 0 while there is none.
static BEGIN: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
static LEN: AtomicUsize = AtomicUsize::new(0);
/// What of it is free. None of the blocks that this needs itself is large.
static FREE: Mutex<FreeList> = Mutex::new(FreeList::new());

/// Where blocks lie.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    Beginning,
    End,
    /// On the heap.
    Outside,
}

thread_local! {
    /// Where this thread's blocks lie.
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

/// Calls `f`, whose blocks, on this thread, outlive those before and after it: they take the last
/// hole that is large enough, from its end.
pub fn at_the_end<T>(f: impl FnOnce() -> T) -> T {
    at(At::End, f)
}

/// Calls `f`, whose blocks, on this thread, stay for as long as it runs: they lie on the heap,
/// since wherever they lay in the arena, they would split for ever what is free there.
pub fn outside<T>(f: impl FnOnce() -> T) -> T {
    at(At::Outside, f)
}

fn free_list() -> MutexGuard<'static, FreeList> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reserves address space, as much as the machine has memory, for the large blocks of this process
/// from now on. What does not fit lies on the heap, and everything where address space is limited
/// (`ulimit -v`, `ulimit -d`) or the system reserves none without memory behind it.
///
/// Memory is taken when a block is written to, on huge pages where the system has them, and kept
/// for the next block.
pub fn open() {
    let mut free = free_list();
    if LEN.load(Ordering::Relaxed) != 0 || address_space_is_limited() {
        return;
    }
    // SAFETY: asks for two numbers.
    let (pages, page) =
        unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let (Ok(pages), Ok(page)) = (usize::try_from(pages), usize::try_from(page)) else { return };
    let len = pages.saturating_mul(page);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a mapping wherever the system has room for it.
    let begin = unsafe {
        libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if begin == libc::MAP_FAILED {
        return;
    }
    #[cfg(target_os = "linux")]
    // SAFETY: the call changes how pages are kept, not what they hold. Systems without huge pages
    // refuse, which changes nothing.
    unsafe {
        libc::madvise(begin, len, libc::MADV_HUGEPAGE);
    }
    free.give(0, len);
    BEGIN.store(begin.cast(), Ordering::Relaxed);
    LEN.store(len, Ordering::Release);
}

/// Whether this process may have only so much address space, or that cannot be known.
fn address_space_is_limited() -> bool {
    [libc::RLIMIT_AS, libc::RLIMIT_DATA].into_iter().any(|resource| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: writes the limits.
        unsafe {
            libc::getrlimit(resource, &raw mut limit) != 0 || limit.rlim_cur != libc::RLIM_INFINITY
        }
    })
}

/// Bytes that a block of `size` takes: whole lines, as all of the arena's blocks begin with one;
/// and `apart`.
fn room(size: usize) -> Option<usize> {
    size.checked_add(crate::tensor::allocator::APART)?.checked_next_multiple_of(LINE)
}

/// Whether a block for `layout` lies here, as long as there is room.
pub fn is_for(layout: Layout) -> bool {
    layout.size() >= LARGE
        && layout.align() <= LINE
        && LEN.load(Ordering::Acquire) != 0
        && AT.get() != At::Outside
}

/// A block for `layout`, and how much of its beginning may hold something else than zeros; none if
/// it is not for the arena, or has no place there.
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

/// Where in the arena a block lies; none if it does not.
fn offset(block: *mut u8) -> Option<usize> {
    let len = LEN.load(Ordering::Acquire);
    block.addr().checked_sub(BEGIN.load(Ordering::Relaxed).addr()).filter(|&offset| offset < len)
}

/// Whether a block lies here.
pub fn holds(block: *mut u8) -> bool {
    offset(block).is_some()
}

/// Gives back a block of `size` bytes; false if it does not lie in the arena.
///
/// # Safety
/// If it lies in the arena, it came from [`take`], was last asked for with `size`, and is not used
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

/// Makes a block of `old` bytes one of `new`, where it lies; false if it does not lie in the arena,
/// has no room, or is not large any more.
///
/// # Safety
/// As [`give`], but for the last: what the block holds, up to `new`, it holds afterwards.
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
