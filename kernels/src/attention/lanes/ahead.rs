//! Asking memory for rows before they are read or written, a few at a time beside the products of what came before.
//!
//! Positions of a head lie many kilobytes apart: no hardware foresees them, and copies that wait for them took a quarter of attention's time.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::attention::buffers::Rows;

/// Rows that are soon read or written.
pub struct Ahead {
    pieces: Vec<Piece>,
    /// Rows asked for at a time.
    share: usize,
}

/// Rows `stride` bytes apart.
struct Piece {
    at: *const i8,
    stride: usize,
    bytes: usize,
    rows: usize,
    written: bool,
}

impl Ahead {
    pub fn new() -> Self {
        Self { pieces: Vec::new(), share: 0 }
    }

    /// Forgets what has not been asked for.
    pub fn clear(&mut self) {
        self.pieces.clear();
    }

    /// Adds rows of a tensor that will be read.
    pub fn read<E>(&mut self, rows: Rows<E>, positions: Range<usize>) {
        self.add(rows.elements.as_ptr(), rows, positions, false);
    }

    /// Adds rows that will be written to the tensor at `to`, which lie there as `rows` do in theirs.
    pub fn write<E>(&mut self, to: *const E, rows: Rows<E>, positions: Range<usize>) {
        self.add(to, rows, positions, true);
    }

    fn add<E>(
        &mut self,
        base: *const E,
        Rows { at, stride, width, .. }: Rows<E>,
        positions: Range<usize>,
        written: bool,
    ) {
        let (at, size) = (base.wrapping_add(at + positions.start * stride).cast(), size_of::<E>());
        self.pieces.push(Piece { at, stride: stride * size, bytes: width * size, rows: positions.len(), written });
    }

    /// Deals the rows evenly over `calls` calls of [`Ahead::ask`].
    pub fn deal(&mut self, calls: usize) {
        let rows: usize = self.pieces.iter().map(|piece| piece.rows).sum();
        self.share = rows.div_ceil(calls.max(1));
    }

    /// Asks for the next rows.
    #[inline]
    pub fn ask(&mut self) {
        let mut share = self.share;
        while share > 0 {
            let Some(piece) = self.pieces.last_mut() else { return };
            let now = share.min(piece.rows);
            for _ in 0..now {
                for line in (0..piece.bytes).step_by(64) {
                    let line = piece.at.wrapping_add(line);
                    // SAFETY: fetching ahead is no access.
                    unsafe {
                        if piece.written {
                            _mm_prefetch::<_MM_HINT_ET0>(line);
                        } else {
                            _mm_prefetch::<_MM_HINT_T1>(line);
                        }
                    }
                }
                piece.at = piece.at.wrapping_add(piece.stride);
            }
            (piece.rows, share) = (piece.rows - now, share - now);
            if piece.rows == 0 {
                self.pieces.pop();
            }
        }
    }
}
