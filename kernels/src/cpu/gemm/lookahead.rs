//! Packs panels ahead. While a task multiplies unpacked strips of A by a few panels of B, it packs
//! the next few panels: one piece every few tiles, from memory that earlier tiles have prefetched.
//!
//! This pays where packing waits for memory. One case is panels of columns that have to be
//! transposed, because a piece then touches lines of many rows. The main case is a B too large for
//! the caches.

use std::ops::Range;

use super::Mat;
use super::driver::{Order, pack_panels};
use super::kernel::{Interleaved, Kernel, Next, PIECE};
use super::overlap::Overlap;
use super::plan::Blocks;
use crate::tensor::allocator::LINE;
use crate::tensor::element::Elem;

/// Size in bytes from which B is not in the caches when its product begins. For a smaller B in 16
/// bits, packing ahead costs more than it saves (1 to 2% of a product of 2048 rows): its pieces
/// touch half as many lines, and A is read once for every step.
const FAR: usize = 4 << 20;
/// Most rows of a short product in 16 bits. Waiting for B, which other products have evicted from
/// the nearest caches, is a good part of its time. (On Zen 4 a pipeline's microbatches of 512 rows
/// gain 1% of a step; with 1024 it depends on the shape.) Products of less than a strip, as in text
/// generation, were not measured.
const FEW_ROWS: usize = 512;

/// Whether it is better to pack panels of B ahead than before their task, for a B of `elements`
/// elements and a product of `rows` rows.
pub fn pays<E: Elem<Acc = f32>, K: Kernel<E>>(
    b: Mat<*const E>,
    elements: usize,
    rows: usize,
) -> bool {
    let pays_in_16_bits = || elements * size_of::<E>() >= FAR || (K::MR..=FEW_ROWS).contains(&rows);
    K::INTERLEAVES && b.2 != 1 && (size_of::<E>() == size_of::<f32>() || pays_in_16_bits())
}

/// A step of a task: some panels of one block of the inner dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub columns: Range<usize>,
    pub block: usize,
}

/// The steps of a task of these `columns`, for all blocks: first one panel, then up to `group`
/// panels of `nr` columns each. So only one panel is packed before the first product.
pub fn steps(columns: &Range<usize>, nr: usize, group: usize, blocks: Blocks) -> Vec<Step> {
    let first = columns.len().min(nr);
    let rest = (columns.len() - first).div_ceil(nr);
    let each = rest.div_ceil(rest.div_ceil(group).max(1)).max(1) * nr;
    let begins = std::iter::once(0).chain((first..columns.len()).step_by(each));
    let groups = begins
        .map(|begin| begin..(begin + if begin == 0 { first } else { each }).min(columns.len()));
    groups
        .flat_map(|group| {
            let columns = columns.start + group.start..columns.start + group.end;
            (0..blocks.count).map(move |block| Step { columns: columns.clone(), block })
        })
        .collect()
}

/// The panels of a step, packed while another step is computed.
pub struct NextPanels<E, K: Kernel<E>>
where
    E: Elem<Acc = f32>,
{
    /// B from the step's first row and column on.
    b: Mat<*const E>,
    columns: usize,
    k: usize,
    to: *mut K::Packed,
    /// Pieces that are packed, and their total.
    packed: usize,
    pieces: usize,
    /// Tiles computed since the last piece was packed, tiles computed so far, and their total.
    since: usize,
    computed: usize,
    tiles: usize,
}

impl<E: Elem<Acc = f32>, K: Kernel<E>> NextPanels<E, K> {
    /// `columns` columns of `k` rows of `b`, to be packed while `tiles` tiles are computed.
    pub fn new(
        b: Mat<*const E>,
        columns: usize,
        k: usize,
        to: *mut K::Packed,
        tiles: usize,
    ) -> Self {
        let pieces = columns.div_ceil(K::NR) * k.div_ceil(PIECE);
        Self { b, columns, k, to, packed: 0, pieces, since: 0, computed: 0, tiles }
    }

    /// Packs all at once.
    ///
    /// # Safety
    /// As [`Kernel::pack_b`].
    pub unsafe fn at_once(self) {
        // SAFETY: the caller's promise.
        unsafe { pack_panels::<E, K>(self.b, self.columns, self.k, self.to) }
    }

    /// Panel and first row of a piece.
    fn place(&self, piece: usize) -> (usize, usize) {
        let each = self.k.div_ceil(PIECE);
        (piece / each, piece % each * PIECE)
    }

    unsafe fn pack(&self, piece: usize) {
        let (p, i) = self.place(piece);
        let columns = K::NR.min(self.columns - p * K::NR);
        let to = self.to.wrapping_add(p * K::NR * self.k.next_multiple_of(K::KQ) + i * K::NR);
        // SAFETY: the caller's promise.
        unsafe { K::pack_b(self.b.at(i, p * K::NR), columns, PIECE.min(self.k - i), to) }
    }

    /// The part of the next piece that a tile of MR shares prefetches, and the columns per share.
    fn ahead(&self) -> Option<Interleaved<E, K::Packed>> {
        if self.packed == self.pieces {
            return None;
        }
        let (p, i) = self.place(self.packed);
        let Mat(at, _, column) = self.b.at(i, p * K::NR);
        let second = if PIECE * size_of::<E>() > LINE { LINE } else { 0 };
        let share = K::NR.div_ceil(K::MR * (self.tiles / self.pieces).max(1));
        let first = self.since * K::MR * share;
        if first >= K::NR {
            return None;
        }
        let next = Next {
            at: at.wrapping_add(first * column).cast(),
            row: column * size_of::<E>(),
            second,
        };
        Some(Interleaved::Fetch(next, share))
    }
}

impl<E: Elem<Acc = f32>, K: Kernel<E>> Overlap<E, K::Packed> for NextPanels<E, K> {
    fn order(&self) -> Order {
        Order::ByStrips
    }

    unsafe fn tile(&mut self, _: usize, _: (usize, usize)) -> Option<Interleaved<E, K::Packed>> {
        self.computed += 1;
        self.since += 1;
        let due = self.pieces * self.computed / self.tiles;
        while self.packed < due {
            // SAFETY: the caller's promise.
            unsafe { self.pack(self.packed) };
            (self.packed, self.since) = (self.packed + 1, 0);
        }
        self.ahead()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_cover_columns_and_blocks_once_and_begin_with_one_panel() {
        for (n, k, group) in
            [(1, 1, 1), (32, 400, 4), (33, 400, 4), (1152, 384, 4), (8192, 384, 6), (390, 3000, 5)]
        {
            let (columns, blocks) = (7..7 + n, Blocks::new(k, 384, 384));
            let steps = steps(&columns, 32, group, blocks);
            assert_eq!(steps[0].columns, 7..7 + n.min(32));
            let (mut next, mut cells) = (7, 0);
            for (i, step) in steps.iter().enumerate() {
                assert_eq!(step.block, i % blocks.count);
                assert!(!step.columns.is_empty() && step.columns.len() <= group * 32);
                if step.block == 0 {
                    assert_eq!(step.columns.start, next);
                    next = step.columns.end;
                }
                cells += step.columns.len();
            }
            assert_eq!((next, cells), (7 + n, n * blocks.count));
        }
    }
}
