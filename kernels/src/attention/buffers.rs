//! Copies of a head in memory of its own, and where a thread keeps them from one head to the next.

use std::cell::Cell;
use std::ops::Range;

use crate::float::{Elem, Float};

/// A cache line, for its alignment.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [u8; 64]);

thread_local! {
    static LINES: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// Calls `f` with buffers of these lengths, whose contents are arbitrary numbers. Their memory is kept for the thread's next call.
pub fn with_buffers<T: Float, const N: usize, R>(lengths: [usize; N], f: impl FnOnce([&mut [T]; N]) -> R) -> R {
    let per_line = size_of::<Line>() / size_of::<T>();
    let lines_of = lengths.map(|length| length.div_ceil(per_line));
    let mut lines = LINES.take();
    let needed = lines_of.iter().sum();
    if lines.len() < needed {
        lines = vec![Line([0; 64]); needed];
    }
    let mut at = lines.as_mut_ptr();
    let mut next = 0;
    let buffers = [(); N].map(|()| {
        // SAFETY: the ranges follow each other within `lines`, which outlives the call; T is a plain number, for which any
        // initialized bytes are a value, and a line is aligned for it.
        let buffer = unsafe { std::slice::from_raw_parts_mut(at.cast::<T>(), lengths[next]) };
        at = at.wrapping_add(lines_of[next]);
        next += 1;
        buffer
    });
    let result = f(buffers);
    LINES.set(lines);
    result
}

/// Rows of one head, wherever they lie: positions are `stride` elements apart.
#[derive(Clone, Copy)]
pub struct Rows<'a, E> {
    pub elements: &'a [E],
    /// Of position 0.
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

/// Transposes rows `[n, width]` tile by tile of `TILE` rows: `to [n / TILE][width][TILE]`. What lies behind the last row is kept.
#[inline(always)]
pub fn transpose<T: Float, const TILE: usize>(rows: &[T], width: usize, to: &mut [T]) {
    const BLOCK: usize = 16;
    for (rows, to) in rows.chunks(TILE * width).zip(to.chunks_exact_mut(TILE * width)) {
        let n = rows.len() / width;
        for first_row in (0..n).step_by(BLOCK) {
            let block = BLOCK.min(n - first_row);
            if block == BLOCK {
                for c in 0..width {
                    let line: [T; BLOCK] = std::array::from_fn(|r| rows[(first_row + r) * width + c]);
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
