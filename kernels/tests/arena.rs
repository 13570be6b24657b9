//! Large blocks of a training process lie in the arena, apart from the heap.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kernels::tensor::allocator::{LINE, LineAligned, keep_freed};
use kernels::tensor::arena::{at_the_end, outside};

#[global_allocator]
static ALLOCATOR: LineAligned = LineAligned;

const MB: usize = 1 << 20;

/// Runs one test at a time, with freed memory kept: each test sees the free memory of the earlier
/// ones.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    keep_freed();
    one
}

/// A block of uninitialized bytes.
fn block(len: usize) -> Vec<u8> {
    Vec::with_capacity(len)
}

fn begin(block: &[u8]) -> usize {
    block.as_ptr().addr()
}

#[test]
fn blocks_lie_where_the_first_large_enough_was_and_at_the_end_those_that_stay() {
    let _one = alone();
    let blocks = [4, 8, 4, 8, 4].map(|mb| block(mb * MB));
    let [first, a, between, b, last] = blocks;
    let (a_begins, b_begins) = (begin(&a), begin(&b));
    drop((a, b));
    let stays = at_the_end(|| block(3 * MB));
    let comes = block(3 * MB);
    assert!(
        (b_begins + 4 * MB..b_begins + 8 * MB).contains(&begin(&stays)),
        "at the end of b's place"
    );
    assert_eq!(begin(&comes), a_begins, "at the beginning of a's");
    let too_large = at_the_end(|| block(12 * MB));
    assert!(begin(&too_large) > begin(&last), "behind all");
    drop((first, between));
}

#[test]
fn what_stays_for_ever_lies_outside_and_splits_no_hole() {
    let _one = alone();
    let [first, between, last] = [4, 8, 4].map(|mb| block(mb * MB));
    let place = begin(&between);
    drop(between);
    let stays = outside(|| block(3 * MB));
    let comes = block(8 * MB);
    assert_eq!(begin(&comes), place, "all of the hole");
    let grown = {
        let mut grown = stays;
        outside(|| grown.reserve_exact(5 * MB));
        grown
    };
    let behind = block(40 * MB);
    let arena = begin(&first)..begin(&behind) + 40 * MB;
    assert!(!arena.contains(&begin(&grown)));
    drop((first, last, comes));
}

#[test]
fn what_is_asked_for_in_zeros_is_zero_where_other_blocks_were() {
    let _one = alone();
    for len in [MB, 5 * MB + 3, 40 * MB] {
        let used = vec![7_u8; len];
        let at = begin(&used);
        drop(used);
        let zeros = vec![0_u8; len + MB];
        assert_eq!(begin(&zeros), at, "the same place, and more behind it");
        assert!(zeros.iter().all(|&byte| byte == 0));
    }
}

#[test]
fn blocks_hold_what_they_held_when_they_grow_and_shrink_within_the_arena_into_it_and_out() {
    let _one = alone();
    let sizes = [100, 4096, 255 << 10, 256 << 10, (256 << 10) + 1, MB, 3 * MB + 5, 40 * MB];
    for align in [1, 16, 64, 4096] {
        for (i, &size) in sizes.iter().enumerate() {
            for &other in sizes.iter().cycle().skip(i + 1).step_by(3).take(5) {
                let layout = Layout::from_size_align(size, align).unwrap();
                let value = |i: usize| ((i * 31) >> 4) as u8;
                // SAFETY: blocks are used within their sizes and freed once, with their current
                // layouts.
                unsafe {
                    let at = LineAligned.alloc(layout);
                    let behind = block(2 * MB);
                    std::slice::from_raw_parts_mut(at, size)
                        .iter_mut()
                        .enumerate()
                        .for_each(|(i, b)| *b = value(i));
                    let at = LineAligned.realloc(at, layout, other);
                    assert!(
                        at.addr().is_multiple_of(align)
                            && (other < 4096 || at.addr().is_multiple_of(LINE))
                    );
                    let kept = std::slice::from_raw_parts(at, size.min(other));
                    assert!(
                        kept.iter().enumerate().all(|(i, &b)| b == value(i)),
                        "{size} -> {other}, {align}"
                    );
                    drop(behind);
                    LineAligned.dealloc(at, Layout::from_size_align(other, align).unwrap());
                }
            }
        }
    }
}

#[test]
fn blocks_of_many_threads_do_not_overlap() {
    let _one = alone();
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            scope.spawn(move || {
                let mut kept = Vec::new();
                for i in 0..200_usize {
                    let len = (256 << 10) + (i * 7919 + usize::from(thread) * 104_729) % MB;
                    let make = || vec![thread; len];
                    kept.push(if i % 3 == 0 { at_the_end(make) } else { make() });
                    if i % 2 == 1 {
                        let old = kept.swap_remove(i * 31 % kept.len());
                        assert!(old.iter().all(|&byte| byte == thread));
                    }
                }
                assert!(kept.iter().flatten().all(|&byte| byte == thread));
            });
        }
    });
}
