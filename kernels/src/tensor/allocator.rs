//! Aligns the memory of tensors to cache lines, and reuses it between steps.

use std::alloc::{GlobalAlloc, Layout, System};

use crate::tensor::arena;

/// Bytes of a cache line, and of the longest vector.
pub const LINE: usize = 64;
/// Blocks of at least this size begin with a cache line.
const LARGE: usize = 4096;
/// Blocks of at least this size are kept further apart, by [`APART`]. Otherwise two neighbouring
/// blocks on huge pages, each a multiple of 2 MiB long, begin a line or two after such a multiple.
/// A pass that reads one and writes the other then takes 2.4 times as long, because stores to
/// aliasing lines hold up loads. A distance of three lines already removes the effect.
const APART_FROM: usize = 1 << 20;
/// Additional bytes between large blocks.
pub(crate) const APART: usize = 16 * LINE;

/// Whether rows `distance` bytes apart conflict in a CPU's L1 cache. Rows a multiple of 4 KiB apart
/// map to so few sets that a tile's rows do not stay there together.
pub fn rows_crowd(distance: usize) -> bool {
    distance.is_multiple_of(4096)
}

/// Row stride, in elements of `size` bytes, for rows of `width` elements that matrix products will
/// read: one cache line longer than a row, if the rows would otherwise conflict.
pub fn rows_apart(width: usize, size: usize) -> usize {
    if width > 0 && rows_crowd(width * size) { width + LINE / size } else { width }
}

/// The system's allocator, with large blocks that begin with a cache line. The system itself aligns
/// to 16 bytes: then every load and store of a whole line touches two lines, which costs matrix
/// products in bf16 a quarter of their speed.
///
/// Programs use it below [`crate::tensor::huge_pages::HugePages`]; without it kernels work, but
/// slower. A large block is a system block with a few more bytes, so that a freed block fits the
/// next of its size exactly. The address of the system block is stored just before the aligned
/// address. After [`keep_freed`], blocks of 256 KiB and more come from [`crate::tensor::arena`].
#[derive(Clone, Copy, Debug, Default)]
pub struct LineAligned;

impl LineAligned {
    /// The layout to request from the system instead of `layout`; none if `layout` is small or
    /// already aligned to a cache line.
    fn around(layout: Layout) -> Option<Layout> {
        if layout.size() < LARGE || layout.align() >= LINE {
            return None;
        }
        let room = if layout.size() < APART_FROM { LINE } else { LINE + APART };
        Layout::from_size_align(
            layout.size().checked_add(room)?,
            align_of::<usize>().max(layout.align()),
        )
        .ok()
    }

    /// The first cache line in a system block. Stores the block's address just before the line;
    /// null for null.
    ///
    /// # Safety
    /// `block` is null, or aligned to `usize` with room for a line more than will be used.
    unsafe fn first_line(block: *mut u8) -> *mut u8 {
        if block.is_null() {
            return block;
        }
        let line = block.wrapping_add(LINE - block.addr() % LINE);
        // SAFETY: the line begins at least the block's alignment, so at least a pointer, after the
        // block's beginning.
        unsafe { line.cast::<*mut u8>().sub(1).write(block) };
        line
    }

    /// The system block that contains `line`.
    ///
    /// # Safety
    /// `line` comes from [`LineAligned::first_line`].
    unsafe fn block_of(line: *mut u8) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { line.cast::<*mut u8>().sub(1).read() }
    }

    /// Moves the contents of the block at `at` to a new block for `wanted`, and frees the old one.
    /// If there is no memory, returns null and keeps the block at `at`.
    ///
    /// # Safety
    /// As [`GlobalAlloc::realloc`].
    unsafe fn moved(at: *mut u8, layout: Layout, wanted: Layout) -> *mut u8 {
        // SAFETY: the caller's promise; the new block lies apart from the old one.
        unsafe {
            let new = LineAligned.alloc(wanted);
            if !new.is_null() {
                std::ptr::copy_nonoverlapping(at, new, layout.size().min(wanted.size()));
                LineAligned.dealloc(at, layout);
            }
            new
        }
    }
}

// SAFETY: the system's allocator does the work. Its block for `around(layout)` has room for
// `layout` from the first line on, and the choice depends on the layout alone.
unsafe impl GlobalAlloc for LineAligned {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if let Some((block, _)) = arena::take(layout) {
            return block;
        }
        // SAFETY: the caller's promise.
        unsafe {
            Self::around(layout).map_or_else(
                || System.alloc(layout),
                |around| Self::first_line(System.alloc(around)),
            )
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if let Some((block, used)) = arena::take(layout) {
            // SAFETY: the used part lies within the block.
            unsafe { block.write_bytes(0, used) };
            return block;
        }
        // SAFETY: the caller's promise.
        unsafe {
            match Self::around(layout) {
                Some(around) => Self::first_line(System.alloc_zeroed(around)),
                None => System.alloc_zeroed(layout),
            }
        }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe {
            if arena::give(at, layout.size()) {
                return;
            }
            match Self::around(layout) {
                Some(around) => System.dealloc(Self::block_of(at), around),
                None => System.dealloc(at, layout),
            }
        }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise: `size` rounded up to the alignment does not overflow.
        unsafe {
            if arena::resize(at, layout.size(), size) {
                return at;
            }
            let wanted = Layout::from_size_align_unchecked(size, layout.align());
            match (Self::around(layout), Self::around(wanted)) {
                _ if arena::holds(at) || arena::is_for(wanted) => Self::moved(at, layout, wanted),
                (None, None) => System.realloc(at, layout, size),
                (Some(old), Some(new)) => {
                    let block = Self::block_of(at);
                    let offset = at.addr() - block.addr();
                    let block = System.realloc(block, old, new.size());
                    if block.is_null() {
                        return block;
                    }
                    // The aligned address may have another offset in the new block. Move the
                    // elements before writing the block's address in front of them.
                    let line = block.wrapping_add(LINE - block.addr() % LINE);
                    std::ptr::copy(block.add(offset), line, layout.size().min(size));
                    Self::first_line(block)
                }
                _ => Self::moved(at, layout, wanted),
            }
        }
    }
}

/// Keeps the memory of dropped tensors in this process for the next ones. A training step allocates
/// and drops the same sizes over and over. By default glibc returns blocks above 32 MiB to the
/// system at once, and each comes back page by page, zeroed.
///
/// For processes that train: memory use stays at its peak. Does nothing if the allocator is not
/// glibc's.
pub fn keep_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: mallopt only sets parameters of malloc, under its lock.
        unsafe {
            libc::mallopt(libc::M_MMAP_MAX, 0);
            libc::mallopt(libc::M_TRIM_THRESHOLD, -1);
            // A huge page is granted only if all of it is in the heap when it is first touched, so
            // the heap grows by many at a time.
            libc::mallopt(libc::M_TOP_PAD, 64 << 20);
        }
    }
    arena::open();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All tests of this crate run with it: some kernel paths need tensors that begin with a cache
    /// line.
    #[global_allocator]
    static ALLOCATOR: LineAligned = LineAligned;

    #[test]
    fn large_blocks_begin_with_a_line_and_hold_what_they_held() {
        let sizes = [1, 100, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE + 7, 1 << 20, (40 << 20) + 1];
        for align in [1, 8, 16, 64, 4096] {
            for (i, &size) in sizes.iter().enumerate() {
                let layout = Layout::from_size_align(size, align).unwrap();
                let check = |at: *mut u8, size: usize| {
                    assert!(
                        !at.is_null()
                            && at.addr().is_multiple_of(if size >= LARGE {
                                align.max(LINE)
                            } else {
                                align
                            })
                    );
                };
                // SAFETY: blocks are used within their sizes and freed once, with their current
                // layouts.
                unsafe {
                    let zeros = LineAligned.alloc_zeroed(layout);
                    check(zeros, size);
                    assert!(std::slice::from_raw_parts(zeros, size).iter().all(|&byte| byte == 0));
                    for &other in sizes.iter().cycle().skip(i + 1).step_by(3).take(4) {
                        let at = LineAligned.alloc(layout);
                        check(at, size);
                        std::slice::from_raw_parts_mut(at, size)
                            .iter_mut()
                            .enumerate()
                            .for_each(|(i, byte)| *byte = i as u8);
                        let at = LineAligned.realloc(at, layout, other);
                        check(at, other);
                        let kept = std::slice::from_raw_parts(at, size.min(other));
                        assert!(
                            kept.iter().enumerate().all(|(i, &byte)| byte == i as u8),
                            "{size} -> {other}, {align}"
                        );
                        LineAligned.dealloc(at, Layout::from_size_align(other, align).unwrap());
                    }
                    LineAligned.dealloc(zeros, layout);
                }
            }
        }
    }
}
