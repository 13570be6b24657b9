//! Allocates results without zeroing them, and writes them block by block ([`Uninit`]).

use std::mem::MaybeUninit;

use candle_core::Tensor;

use crate::Result;
use crate::tensor::allocator::rows_apart;
pub use crate::tensor::element::Uninit;
use crate::tensor::element::uninit::{check, place};
use crate::tensor::element::{Elem, Float};
use crate::tensor::parallel;
use crate::tensor::view::tensor;

/// `n` elements with arbitrary contents: the memory is not cleared.
pub fn anything<E: Elem>(n: usize) -> Vec<E> {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    {
        let mut data: Vec<E> = Vec::with_capacity(n);
        // SAFETY: the empty assembly block has, as far as the compiler may assume, written the
        // elements; any bit pattern is a valid number.
        unsafe {
            std::arch::asm!("/* {0} */", in(reg) data.as_mut_ptr(), options(nostack, preserves_flags));
            data.set_len(n);
        }
        data
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    vec![E::store(E::Acc::ZERO); n]
}

/// `n` elements in blocks of `block`. `f` writes each block; it gets the index of the block's first
/// element.
pub fn blocks<T: Copy + Send>(
    n: usize,
    block: usize,
    f: impl for<'r> Fn(usize, Uninit<'r, T>) -> &'r mut [T] + Sync,
) -> Vec<T> {
    let mut data = Vec::with_capacity(n);
    parallel::blocks(&mut data.spare_capacity_mut()[..n], block, |start, part| {
        check(part, |out| f(start, out))
    });
    // SAFETY: `check` saw every block written, and the blocks are all of the first n elements.
    unsafe { data.set_len(n) };
    data
}

/// A tensor of shape `dims` for matrix products to read. As in [`blocks`], `f` writes it in blocks
/// of `block` elements, which are whole rows. Rows that would conflict in caches are written one by
/// one and padded by a cache line of zeros, which `f` does not see.
pub fn for_products<E: Elem>(
    dims: &[usize],
    block: usize,
    like: &Tensor,
    f: impl for<'r> Fn(usize, Uninit<'r, E>) -> &'r mut [E] + Sync,
) -> Result<Tensor> {
    let (leading, width) = match dims {
        [leading @ .., width] if rows_apart(*width, size_of::<E>()) > *width => (leading, *width),
        _ => return tensor(blocks(dims.iter().product(), block, f), dims, like),
    };
    let apart = rows_apart(width, size_of::<E>());
    let rows = leading.iter().product::<usize>();
    let data = blocks(rows * apart, (block / width).max(1) * apart, |start, block| {
        block.parts(apart, |at, row| {
            row.halves(width, |row, between| {
                (
                    f((start + at) / apart * width, row),
                    between.write(std::iter::repeat(E::store(E::Acc::ZERO))),
                )
            })
        })
    });
    Ok(tensor(data, [leading, &[apart]].concat(), like)?.narrow(leading.len(), 0, width)?)
}

/// Two tensors as by [`for_products`], row by row: one with rows of `K - 1` sections of `width`
/// elements, one with rows of one section. `f` gets a row's index and all of its sections; the last
/// section belongs to the second tensor.
pub fn rows_for_products<E: Elem, const K: usize>(
    leading: &[usize],
    width: usize,
    like: &Tensor,
    f: impl for<'r> Fn(usize, [Uninit<'r, E>; K]) -> [&'r mut [E]; K] + Sync,
) -> Result<[Tensor; 2]> {
    let rows = leading.iter().product::<usize>();
    let widths = [(K - 1) * width, width];
    let aparts = widths.map(|width| rows_apart(width, size_of::<E>()).max(1));
    let [mut a, mut b] = aparts.map(|apart| Vec::with_capacity(rows * apart));
    let (spare_a, spare_b) = (
        &mut a.spare_capacity_mut()[..rows * aparts[0]],
        &mut b.spare_capacity_mut()[..rows * aparts[1]],
    );
    let in_block = parallel::rows_per_block(widths[0]);
    parallel::blocks2(
        spare_a,
        in_block * aparts[0],
        spare_b,
        in_block * aparts[1],
        |block, a, b| {
            for (r, (a, b)) in a.chunks_mut(aparts[0]).zip(b.chunks_mut(aparts[1])).enumerate() {
                let ((a, after_a), (b, after_b)) =
                    (a.split_at_mut(widths[0]), b.split_at_mut(width));
                for between in [after_a, after_b] {
                    Uninit(between).write(std::iter::repeat(E::store(E::Acc::ZERO)));
                }
                let mut sections = a.chunks_mut(width.max(1)).chain([b]);
                let sections: [&mut [MaybeUninit<E>]; K] =
                    std::array::from_fn(|_| sections.next().unwrap_or_default());
                let places = sections.each_ref().map(|section| place(section));
                let written = f(block * in_block + r, sections.map(Uninit));
                assert_eq!(
                    written.map(|section| place(section)),
                    places,
                    "a kernel left a part of its results unwritten"
                );
            }
        },
    );
    // SAFETY: all rows of both tensors and the padding between them were written.
    unsafe {
        a.set_len(rows * aparts[0]);
        b.set_len(rows * aparts[1]);
    }
    let narrow = |data, i: usize| -> Result<Tensor> {
        Ok(tensor(data, [leading, &[aparts[i]]].concat(), like)?.narrow(
            leading.len(),
            0,
            widths[i],
        )?)
    };
    Ok([narrow(a, 0)?, narrow(b, 1)?])
}

/// As [`blocks`], together with `b`: block i of `block` elements of the result goes with block i of
/// `block_b` elements of `b`. `f` gets i.
pub fn blocks2<T: Copy + Send, B: Send>(
    n: usize,
    block: usize,
    b: &mut [B],
    block_b: usize,
    f: impl for<'r> Fn(usize, Uninit<'r, T>, &mut [B]) -> &'r mut [T] + Sync,
) -> Vec<T> {
    assert_eq!(
        n.div_ceil(block.max(1)),
        b.len().div_ceil(block_b.max(1)),
        "both have the same number of blocks"
    );
    let mut data = Vec::with_capacity(n);
    parallel::blocks2(&mut data.spare_capacity_mut()[..n], block, b, block_b, |i, part, b| {
        check(part, |out| f(i, out, b))
    });
    // SAFETY: as above; `b` has as many blocks, so the zipped iteration does not end early.
    unsafe { data.set_len(n) };
    data
}
