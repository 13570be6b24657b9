//! Contiguous copies of a head, in buffers that a thread keeps from one head to the next.

use std::cell::Cell;
use std::ops::Range;

use crate::tensor::arena;
use crate::tensor::element::{Elem, Float};
use crate::tensor::host::HostElem;

/// A cache line, for alignment.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _bytes: [u8; 64],
}

thread_local! {
    static LINES: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// Calls `f` with buffers of these lengths, which hold arbitrary numbers. Their memory is kept for
/// the thread's next call.
pub fn with_buffers<T: HostElem, const N: usize, R>(
    lengths: [usize; N],
    f: impl FnOnce([&mut [T]; N]) -> R,
) -> R {
    with_two_buffers::<T, T, N, 0, R>(lengths, [], |buffers, _| f(buffers))
}

/// As [`with_buffers`], of two types.
pub fn with_two_buffers<A: HostElem, B: HostElem, const N: usize, const M: usize, R>(
    lengths_a: [usize; N],
    lengths_b: [usize; M],
    f: impl FnOnce([&mut [A]; N], [&mut [B]; M]) -> R,
) -> R {
    let needed = lengths_a.iter().map(|&n| lines::<A>(n)).sum::<usize>()
        + lengths_b.iter().map(|&n| lines::<B>(n)).sum::<usize>();
    let mut lines = LINES.take();
    if lines.len() < needed {
        lines = Vec::new(); // free first, so that both never exist at once
        arena::outside(|| lines.resize(needed, Line { _bytes: [0; 64] }));
    }
    let mut rest = &mut lines[..];
    let a = lengths_a.map(|n| take(&mut rest, n));
    let b = lengths_b.map(|n| take(&mut rest, n));
    let result = f(a, b);
    LINES.set(lines);
    result
}

/// Number of cache lines that hold `n` elements.
fn lines<T>(n: usize) -> usize {
    (n * size_of::<T>()).div_ceil(size_of::<Line>())
}

/// Takes `n` elements from the beginning of `rest`.
fn take<'a, T: HostElem>(rest: &mut &'a mut [Line], n: usize) -> &'a mut [T] {
    let (own, others) = std::mem::take(rest).split_at_mut(lines::<T>(n));
    *rest = others;
    // SAFETY: the lines hold n elements and are aligned for them; T is a plain number, for which
    // any initialized bytes are a value.
    unsafe { std::slice::from_raw_parts_mut(own.as_mut_ptr().cast::<T>(), n) }
}

/// Rows of one head: positions are `stride` elements apart.
#[derive(Clone, Copy)]
pub struct Rows<'a, E> {
    pub elements: &'a [E],
    /// Offset of position 0.
    pub at: usize,
    pub stride: usize,
    pub width: usize,
}

impl<'a, E: Elem> Rows<'a, E> {
    pub fn row(&self, position: usize) -> &'a [E] {
        &self.elements[self.at + position * self.stride..][..self.width]
    }

    /// `to [positions, width] = scale ·` the rows.
    #[inline(always)]
    pub fn copy(&self, positions: Range<usize>, scale: E::Acc, to: &mut [E::Acc]) {
        for (position, to) in positions.zip(to.chunks_exact_mut(self.width)) {
            for (to, &from) in to.iter_mut().zip(self.row(position)) {
                *to = from.load() * scale;
            }
        }
    }
}

/// Transposes rows `[n, width]` tile by tile of `TILE` rows: `to [n / TILE][width][TILE]`. Elements
/// of `to` after the last row keep their values.
#[inline(always)]
pub fn transpose<T: Float, const TILE: usize>(rows: &[T], width: usize, to: &mut [T]) {
    const BLOCK: usize = 16;
    for (rows, to) in rows.chunks(TILE * width).zip(to.chunks_exact_mut(TILE * width)) {
        let n = rows.len() / width;
        for first_row in (0..n).step_by(BLOCK) {
            let block = BLOCK.min(n - first_row);
            if block == BLOCK {
                for c in 0..width {
                    let line: [T; BLOCK] =
                        std::array::from_fn(|r| rows[(first_row + r) * width + c]);
                    to[c * TILE + first_row..][..BLOCK].copy_from_slice(&line);
                }
            } else {
                for c in 0..width {
                    for r in first_row..n {
                        to[c * TILE + r] = rows[r * width + c];
                    }
                }
            }
        }
    }
}
