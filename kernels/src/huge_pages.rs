//! Large blocks of memory on huge pages.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout};
#[cfg(target_os = "linux")]
use std::ops::Range;
#[cfg(target_os = "linux")]
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::memory::LineAligned;

/// The system's allocator, whose large blocks begin with a cache line ([`LineAligned`]), and which asks for huge pages
/// (`madvise(2)`, `MADV_HUGEPAGE`): for the whole heap, with what small tensors and products' packed operands lie on, and for what lies elsewhere and is large
/// enough. Memory is then touched with few page faults, and found with few walks through page tables, which cost most in virtual machines. Many systems give huge
/// pages to those who ask only.
///
/// For the binary of a program: `#[global_allocator] static ALLOCATOR: HugePages = HugePages;`.
#[derive(Debug)]
pub struct HugePages;

/// Bytes of a huge page of x86-64, and of most kernels for aarch64.
const HUGE: usize = 2 << 20;
/// Smaller blocks do not ask; they lie beside larger ones.
#[cfg(target_os = "linux")]
const LARGE: usize = 64 << 10;

/// Up to which address the heap has asked.
#[cfg(target_os = "linux")]
static ASKED: AtomicUsize = AtomicUsize::new(0);

/// What to ask for because of a block of `len` bytes at `block`, on a heap that ends at `heap` and has asked up to `asked`, or elsewhere: all that the heap
/// has grown by, before anything but this block is touched there; elsewhere the whole huge pages within the block.
#[cfg(target_os = "linux")]
fn to_ask(block: usize, len: usize, heap: usize, asked: usize) -> Option<Range<usize>> {
    let range = match block + len {
        _ if len < LARGE => return None,
        end if end > heap => block.next_multiple_of(HUGE)..end / HUGE * HUGE,
        _ if asked >= heap => return None,
        _ => (if asked == 0 { block } else { asked }) / HUGE * HUGE..heap,
    };
    (!range.is_empty()).then_some(range)
}

#[cfg(target_os = "linux")]
fn advise(block: *mut u8, len: usize) -> *mut u8 {
    if len < LARGE || block.is_null() {
        return block;
    }
    // SAFETY: asks where the heap ends.
    let heap = unsafe { libc::sbrk(0) }.addr();
    if let Some(Range { start, end }) = to_ask(block.addr(), len, heap, ASKED.load(Ordering::Relaxed)) {
        if end == heap {
            ASKED.fetch_max(heap, Ordering::Relaxed);
        }
        let first = block.map_addr(|_| start).cast();
        // SAFETY: the call changes how pages are kept, not what they hold. Systems without huge pages refuse, which changes nothing.
        unsafe { libc::madvise(first, end - start, libc::MADV_HUGEPAGE) };
    }
    block
}

#[cfg(not(target_os = "linux"))]
fn advise(block: *mut u8, _: usize) -> *mut u8 {
    block
}

// SAFETY: every block is `LineAligned`'s.
unsafe impl GlobalAlloc for HugePages {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those that `LineAligned` asks for; so below.
        advise(unsafe { LineAligned.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        advise(unsafe { LineAligned.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        unsafe { LineAligned.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        advise(unsafe { LineAligned.realloc(block, layout, new_size) }, new_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_heap_asks_for_all_that_it_has_grown_by_once() {
        let mb = |n: usize| n << 20;
        assert_eq!(to_ask(mb(11), LARGE, mb(70), 0), Some(mb(10)..mb(70)));
        assert_eq!(to_ask(mb(30), mb(20), mb(70), mb(70)), None);
        assert_eq!(to_ask(mb(69), mb(2), mb(135), mb(71)), Some(mb(70)..mb(135)), "the page that the heap ended in");
        assert_eq!(to_ask(mb(11), LARGE - 1, mb(70), 0), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn blocks_that_are_not_on_the_heap_ask_for_the_huge_pages_within_them() {
        let mb = |n: usize| n << 20;
        assert_eq!(to_ask(mb(101), mb(7), mb(70), mb(70)), Some(mb(102)..mb(108)));
        assert_eq!(to_ask(mb(101), mb(2), mb(70), 0), None);
    }

    #[test]
    fn blocks_of_every_size_hold_what_is_written() {
        for len in [1, LARGE - 1, LARGE, HUGE, 2 * HUGE + 1, 5 * HUGE + 4097] {
            let layout = Layout::from_size_align(len, 64).unwrap();
            // SAFETY: the layout is not empty; the block is used within its length and given back once.
            unsafe {
                let block = HugePages.alloc_zeroed(layout);
                assert!(
                    block.addr().is_multiple_of(64)
                        && std::slice::from_raw_parts(block, len).iter().all(|byte| *byte == 0)
                );
                block.write_bytes(7, len);
                let larger = HugePages.realloc(block, layout, 2 * len);
                assert!(std::slice::from_raw_parts(larger, len).iter().all(|byte| *byte == 7));
                HugePages.dealloc(larger, Layout::from_size_align(2 * len, 64).unwrap());
            }
        }
    }
}
