//! Prefetches rows before they are read or written, and copies them before they are multiplied: a
//! few at a time, between the products of the previous rows.
//!
//! Positions of a head lie many kilobytes apart. No hardware prefetcher predicts them, and copies
//! that wait for them took a quarter of attention's time. They also map to few sets of a cache.
//! Rows to copy are therefore prefetched only one call ahead.

use std::arch::x86_64::*;
use std::ops::Range;

use super::engine::Engine;
use super::weights::inner_product;
use crate::cpu::attention::buffers::Rows;
use crate::tensor::allocator::LINE;
use crate::tensor::simd::prefetch;

/// Rows that will soon be read or written.
pub struct Prefetcher<K: Engine> {
    pieces: Vec<Piece<K>>,
    /// Rows to prefetch per call.
    share: usize,
    asked: Cursor,
    copied: Cursor,
    /// Rows prefetched by the last call; the next call copies them.
    ready: usize,
}

/// A row of a piece.
#[derive(Clone, Copy, Default)]
struct Cursor {
    piece: usize,
    row: usize,
}

/// Rows `stride` elements apart, and the use of each.
struct Piece<K: Engine> {
    at: *const K::Elem,
    stride: usize,
    columns: usize,
    rows: usize,
    then: Then<K>,
}

enum Then<K: Engine> {
    /// Other code reads it.
    Nothing,
    /// Other code writes it.
    Written,
    /// It is copied to `to [rows, width]`.
    Copied { to: *mut K::Operand, width: usize },
    /// As `Copied`. The row's inner product with the row at `with` also goes to `product [rows]`;
    /// those rows have the same stride.
    Multiplied { to: *mut K::Operand, width: usize, with: *const K::Elem, product: *mut f32 },
}

impl<K: Engine> Prefetcher<K> {
    pub fn new() -> Self {
        Self {
            pieces: Vec::new(),
            share: 1,
            asked: Cursor::default(),
            copied: Cursor::default(),
            ready: 0,
        }
    }

    /// Removes all rows.
    pub fn clear(&mut self) {
        self.pieces.clear();
        (self.asked, self.copied, self.ready) = (Cursor::default(), Cursor::default(), 0);
    }

    /// Adds rows of a tensor that will be read.
    pub fn read(&mut self, rows: Rows<K::Elem>, positions: Range<usize>) {
        self.add(rows.elements.as_ptr(), rows, positions, Then::Nothing);
    }

    /// Adds rows that will be written to the tensor at `to`, at the same offsets as `rows` have in
    /// their tensor.
    pub fn write(&mut self, to: *const K::Elem, rows: Rows<K::Elem>, positions: Range<usize>) {
        self.add(to, rows, positions, Then::Written);
    }

    /// Adds the first `s` rows of a part of a tensor, to be copied to `to [n, width]`. All other
    /// rows and columns of `to` become zeros.
    ///
    /// # Safety
    /// Until the rows are copied or removed, nothing else uses `to`, and the tensor does not
    /// change.
    pub unsafe fn copy(
        &mut self,
        rows: Rows<K::Elem>,
        s: usize,
        to: &mut [K::Operand],
        width: usize,
    ) {
        let to = room::<K>(s, to, width);
        self.add(rows.elements.as_ptr(), rows, 0..s, Then::Copied { to, width });
    }

    /// As [`Prefetcher::copy`]; the inner products of its rows with those of `with` also go to
    /// `products [n]`, and the remaining products become zeros.
    ///
    /// # Safety
    /// As [`Prefetcher::copy`], for `products` and the other tensor, too.
    pub unsafe fn multiply(
        &mut self,
        [rows, with]: [Rows<K::Elem>; 2],
        s: usize,
        (to, width): (&mut [K::Operand], usize),
        products: &mut [f32],
    ) {
        assert!(rows.stride == with.stride && rows.width == with.width && rows.at == with.at);
        let to = room::<K>(s, to, width);
        products[s..].fill(0.0);
        let (with, product) = (with.elements.as_ptr().wrapping_add(with.at), products.as_mut_ptr());
        self.add(rows.elements.as_ptr(), rows, 0..s, Then::Multiplied { to, width, with, product });
    }

    fn add(
        &mut self,
        base: *const K::Elem,
        Rows { at, stride, width, .. }: Rows<K::Elem>,
        positions: Range<usize>,
        then: Then<K>,
    ) {
        if !positions.is_empty() {
            let at = base.wrapping_add(at + positions.start * stride);
            self.pieces.push(Piece { at, stride, columns: width, rows: positions.len(), then });
        }
    }

    /// Distributes the rows evenly over `calls` calls of [`Prefetcher::ask`]. The last call does
    /// not copy rows that it prefetches itself.
    pub fn spread(&mut self, calls: usize) {
        let rows: usize = self.pieces.iter().map(|piece| piece.rows).sum();
        self.share = rows.div_ceil(calls.saturating_sub(1).max(1)).max(1);
    }

    /// Copies the rows that the last call prefetched, and prefetches the next ones.
    ///
    /// # Safety
    /// As [`Engine`]'s functions.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub unsafe fn ask(&mut self) {
        let (share, ready) = (self.share, std::mem::take(&mut self.ready));
        while self.ready < share {
            let Some((piece, row)) = self.asked.next(&self.pieces) else { break };
            piece.ask(row);
            self.ready += 1;
        }
        for _ in 0..ready {
            let Some((piece, row)) = self.copied.next(&self.pieces) else { break };
            // SAFETY: the caller's promise, and the promise made when the piece was added.
            unsafe { piece.copy(row) };
        }
    }

    /// Copies all remaining rows.
    ///
    /// # Safety
    /// As [`Prefetcher::ask`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub unsafe fn finish(&mut self) {
        while self.copied.piece < self.pieces.len() {
            // SAFETY: the caller's promise.
            unsafe { self.ask() };
        }
    }
}

impl Cursor {
    /// Returns the row at the cursor and moves to the next.
    #[inline]
    fn next<'a, K: Engine>(&mut self, pieces: &'a [Piece<K>]) -> Option<(&'a Piece<K>, usize)> {
        let (piece, row) = (pieces.get(self.piece)?, self.row);
        self.row += 1;
        if self.row == piece.rows {
            *self = Self { piece: self.piece + 1, row: 0 };
        }
        Some((piece, row))
    }
}

impl<K: Engine> Piece<K> {
    #[inline]
    fn ask(&self, row: usize) {
        let lines = |at: *const K::Elem| {
            let at = at.wrapping_add(row * self.stride).cast::<i8>();
            (0..self.columns * size_of::<K::Elem>())
                .step_by(LINE)
                .map(move |line| at.wrapping_add(line))
        };
        // SAFETY: a prefetch is no access.
        unsafe {
            match self.then {
                Then::Nothing => lines(self.at).for_each(prefetch),
                Then::Written => lines(self.at).for_each(|line| _mm_prefetch::<_MM_HINT_ET0>(line)),
                Then::Copied { .. } => lines(self.at).for_each(prefetch),
                Then::Multiplied { with, .. } => {
                    lines(self.at).chain(lines(with)).for_each(prefetch)
                }
            }
        }
    }

    /// # Safety
    /// As [`Engine`]'s functions; the row and its destination exist.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn copy(&self, row: usize) {
        let from = self.at.wrapping_add(row * self.stride);
        // SAFETY: the caller's promise.
        unsafe {
            match self.then {
                Then::Nothing | Then::Written => (),
                Then::Copied { to, width } => {
                    K::row(from, self.columns, to.add(row * width), width)
                }
                Then::Multiplied { to, width, with, product } => {
                    K::row(from, self.columns, to.add(row * width), width);
                    let with = with.add(row * self.stride);
                    *product.add(row) = inner_product([from, with], self.columns);
                }
            }
        }
    }
}

/// The address of the first `s` rows of `to [n, width]`; zeroes the other rows.
fn room<K: Engine>(s: usize, to: &mut [K::Operand], width: usize) -> *mut K::Operand {
    let (rows, others) = to.split_at_mut(s * width);
    // SAFETY: operands are plain numbers, whose zeros are zero bytes.
    unsafe { others.as_mut_ptr().write_bytes(0, others.len()) };
    rows.as_mut_ptr()
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::attention::lanes::pairs::Dot;
    use crate::cpu::attention::lanes::wide::Wide;
    use crate::tensor::element::Elem;
    use crate::tensor::simd::Isa;

    /// Rows of 40 elements with gaps between them. 5 are copied to room for 8, with more or less of
    /// the work left to `finish`.
    fn check<K: Engine>(number: impl Fn(usize) -> K::Elem)
    where
        K::Operand: Elem<Acc = f32>,
    {
        let (stride, columns, s, n, width) = (96, 40, 5, 8, 64);
        let elements: Vec<K::Elem> = (0..s * stride).map(number).collect();
        let others: Vec<K::Elem> = elements.iter().rev().copied().collect();
        let rows = |elements| Rows { elements, at: 32, stride, width: columns };
        let (a, b) = (rows(&elements[..]), rows(&others[..]));
        for calls in [1, 2, 3, 100] {
            for asked in [0, 1, 2, 100] {
                let places = || vec![K::Operand::store(7.0); n * width];
                let (mut copied, mut multiplied, mut products) = (places(), places(), vec![7.0; n]);
                let mut ahead = Prefetcher::<K>::new();
                // SAFETY: the caller has checked the machine; the vectors outlive their uses.
                unsafe {
                    ahead.copy(b, s, &mut copied, width);
                    ahead.read(a, 0..s);
                    ahead.multiply([a, b], s, (&mut multiplied, width), &mut products);
                    ahead.write(elements.as_ptr(), a, 0..s);
                    ahead.spread(calls);
                    (0..asked).for_each(|_| ahead.ask());
                    ahead.finish();
                }
                for (got, of) in [(&copied, b), (&multiplied, a)] {
                    for (i, got) in got.iter().enumerate() {
                        let (row, column) = (i / width, i % width);
                        let want = if row < s && column < columns {
                            of.row(row)[column].load()
                        } else {
                            0.0
                        };
                        assert_eq!(
                            got.load(),
                            want,
                            "{calls} calls, {asked} made: row {row}, column {column}"
                        );
                    }
                }
                for (row, &got) in products.iter().enumerate() {
                    let product = |row| {
                        a.row(row)
                            .iter()
                            .zip(b.row(row))
                            .map(|(a, b)| a.load() * b.load())
                            .sum::<f32>()
                    };
                    assert_eq!(
                        got,
                        if row < s { product(row) } else { 0.0 },
                        "{calls} calls, {asked} made: row {row}"
                    );
                }
            }
        }
    }

    #[test]
    fn every_row_is_copied_however_often_memory_is_asked() {
        if Isa::supported() >= Isa::Avx512 {
            check::<Wide<f32>>(|i| (i % 11) as f32 - 5.0);
        }
        if Isa::supported() >= Isa::Avx512Bf16 {
            check::<Dot>(|i| bf16::from_f32((i % 11) as f32 - 5.0));
        }
    }
}
