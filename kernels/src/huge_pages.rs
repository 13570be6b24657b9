//! Large blocks of memory on huge pages.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout};

use crate::memory::LineAligned;

/// The system's allocator, whose large blocks begin with a cache line ([`LineAligned`]), and which asks for huge pages
/// (`madvise(2)`, `MADV_HUGEPAGE`) where a block is large enough to hold some: tensors of many megabytes are then touched with few
/// page faults, and found with few walks through page tables, which cost most in virtual machines. Many systems give huge pages to those who ask only.
///
/// For the binary of a program: `#[global_allocator] static ALLOCATOR: HugePages = HugePages;`.
#[derive(Debug)]
pub struct HugePages;

/// Bytes of a huge page of x86-64, and of most kernels for aarch64.
const HUGE: usize = 2 << 20;
/// Smaller blocks hold a whole huge page rarely.
const LARGE: usize = 2 * HUGE;

fn advise(block: *mut u8, len: usize) -> *mut u8 {
    #[cfg(target_os = "linux")]
    if len >= LARGE && !block.is_null() {
        let start = block.map_addr(|address| address.next_multiple_of(HUGE));
        let end = (block.addr() + len) / HUGE * HUGE;
        // SAFETY: whole pages within the block; the call changes how they are kept, not what they hold. Systems without huge pages
        // refuse, which changes nothing.
        unsafe { libc::madvise(start.cast(), end.saturating_sub(start.addr()), libc::MADV_HUGEPAGE) };
    }
    let _ = len;
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

    #[test]
    fn blocks_of_every_size_hold_what_is_written() {
        for len in [1, HUGE, LARGE - 1, LARGE, LARGE + 1, 5 * HUGE + 4097] {
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
