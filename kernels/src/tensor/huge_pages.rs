//! Memory on huge pages.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout};

use crate::tensor::allocator::LineAligned;

/// The system's allocator, with large blocks that begin with a cache line ([`LineAligned`]) and lie
/// on huge pages (`madvise(2)`, `MADV_HUGEPAGE`). It asks for huge pages for the whole heap, which
/// holds small tensors and packed operands, and for large blocks elsewhere. Huge pages save page
/// faults and page-table walks, which cost most in virtual machines. Many systems give huge pages
/// only to programs that ask.
///
/// For the binary of a program: `#[global_allocator] static ALLOCATOR: HugePages = HugePages;`.
#[derive(Debug)]
pub struct HugePages;

// SAFETY: every block comes from `LineAligned`.
unsafe impl GlobalAlloc for HugePages {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are the ones that `LineAligned` asks for; the same below.
        advised(unsafe { LineAligned.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        advised(unsafe { LineAligned.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        unsafe { LineAligned.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        advised(unsafe { LineAligned.realloc(block, layout, new_size) }, new_size)
    }
}

/// Returns `block`, of `len` bytes, after asking for huge pages.
fn advised(block: *mut u8, len: usize) -> *mut u8 {
    #[cfg(target_os = "linux")]
    linux::advise(block, len);
    let _ = len;
    block
}

#[cfg(target_os = "linux")]
mod linux {
    use std::ops::Range;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Bytes of a huge page of x86-64, and of most kernels for aarch64.
    const HUGE: usize = 2 << 20;
    /// Smaller blocks do not ask: they share pages with larger ones.
    const LARGE: usize = 64 << 10;

    /// The address up to which the heap has asked. As a static, this variable itself lies before
    /// the heap, and so bounds the heap from below.
    static ASKED: AtomicUsize = AtomicUsize::new(0);

    pub fn advise(block: *mut u8, len: usize) {
        if len < LARGE || block.is_null() || crate::tensor::arena::holds(block) {
            return;
        }
        // SAFETY: only asks where the heap ends.
        let end = unsafe { libc::sbrk(0) }.addr();
        let heap = (&raw const ASKED).addr()..end;
        if let Some(pages) =
            to_ask(block.addr()..block.addr() + len, heap, ASKED.load(Ordering::Relaxed))
        {
            if pages.end == end {
                ASKED.fetch_max(end, Ordering::Relaxed);
            }
            let first = block.map_addr(|_| pages.start).cast();
            // SAFETY: the call changes the kind of pages, not their contents. Systems without huge
            // pages refuse, which changes nothing.
            unsafe { libc::madvise(first, pages.len(), libc::MADV_HUGEPAGE) };
        }
    }

    /// The range to ask for when a block is allocated. For a block on the heap: everything that the
    /// heap has grown by since `asked`, before anything but this block is touched there. Elsewhere:
    /// the whole huge pages within the block.
    fn to_ask(block: Range<usize>, heap: Range<usize>, asked: usize) -> Option<Range<usize>> {
        let is_on_heap = heap.start <= block.start && block.end <= heap.end;
        let pages = match is_on_heap {
            true if asked >= heap.end => return None,
            true => (if asked == 0 { block.start } else { asked }) / HUGE * HUGE..heap.end,
            false => block.start.next_multiple_of(HUGE)..block.end / HUGE * HUGE,
        };
        (!pages.is_empty()).then_some(pages)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn mb(range: Range<usize>) -> Range<usize> {
            range.start << 20..range.end << 20
        }

        #[test]
        fn a_heap_asks_once_for_all_that_it_has_grown_by() {
            assert_eq!(to_ask(mb(11..12), mb(5..70), 0), Some(mb(10..70)));
            assert_eq!(to_ask(mb(30..50), mb(5..70), 70 << 20), None);
            let grown = to_ask(mb(69..72), mb(5..135), 71 << 20);
            assert_eq!(grown, Some(mb(70..135)), "from the page on in which the heap ended");
        }

        #[test]
        fn blocks_that_are_not_on_the_heap_ask_for_the_huge_pages_within_them() {
            for heap in [mb(5..70), mb(200..300)] {
                assert_eq!(to_ask(mb(101..108), heap.clone(), 0), Some(mb(102..108)));
                assert_eq!(to_ask(mb(101..108), heap.clone(), heap.end), Some(mb(102..108)));
                assert_eq!(to_ask(mb(101..103), heap, 0), None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_every_size_hold_what_is_written() {
        for len in [1, (64 << 10) - 1, 64 << 10, 2 << 20, (4 << 20) + 1, (10 << 20) + 4097] {
            let layout = Layout::from_size_align(len, 64).unwrap();
            // SAFETY: the layout is not empty; the block is used within its length and freed once.
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
