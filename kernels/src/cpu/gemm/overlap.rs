//! Packs both operands while products are computed. While a task multiplies one strip of A by all
//! of its panels of B, it packs the next strip between the shares of the micro-kernel, a few words
//! at a time. So nothing waits for memory. The roles of strips and panels may be exchanged.

use std::ops::Range;

use super::Mat;
use super::driver::{Order, Panels, Strips, Turns, pack_panels, pack_strips};
use super::kernel::{Interleaved, Kernel, Pack};
use crate::tensor::element::Elem;

/// Slots for strips, or panels, of the operand that is packed one by one: the one in use, and the
/// next.
const SLOTS: usize = 2;

/// Whether the kernel can pack these operands between its products.
pub fn is_possible<E: Elem<Acc = f32>, K: Kernel<E>>(
    a: Mat<*const E>,
    b: Mat<*const E>,
    k: usize,
) -> bool {
    K::INTERLEAVES && K::can_overlap(a) && K::can_overlap(b.t()) && k.is_multiple_of(K::KQ)
}

/// The order of tiles for a task of `rows` × `columns`. The shorter operand is packed as a whole,
/// while the first strip, or panel, of the longer one is used, and kept.
pub fn order(rows: usize, columns: usize) -> Order {
    if rows >= columns { Order::ByStrips } else { Order::ByPanels }
}

/// Elements of the memory for strips, and for panels, for tasks of `rows` × `columns` and blocks of
/// `k`, in the given order.
pub fn room<E: Elem<Acc = f32>, K: Kernel<E>>(
    rows: usize,
    columns: usize,
    k: usize,
    order: Order,
) -> [usize; 2] {
    let (strips, panels) = (rows.div_ceil(K::MR), columns.div_ceil(K::NR));
    let (strips, panels) = match order {
        Order::ByStrips => (SLOTS, panels),
        Order::ByPanels => (strips, SLOTS),
    };
    [strips * K::MR * k, panels * K::NR * k]
}

/// One of the two operands of a block.
struct Side<E, P> {
    /// The block's rows of A, or columns of B as rows.
    from: Mat<*const E>,
    /// Number of these rows.
    width: usize,
    /// Rows per strip, or panel.
    unit: usize,
    packed: *mut P,
    is_panel: bool,
    /// Whether all of it was packed before.
    is_packed: bool,
}

impl<E, P> Side<E, P> {
    fn units(&self) -> usize {
        self.width.div_ceil(self.unit)
    }

    /// Packing of part `inner` of strip or panel `i`, if it exists, into slot `slot` of `k`
    /// elements per row.
    fn part(&self, i: usize, slot: usize, k: usize, inner: Range<usize>) -> Option<Pack<E, P>> {
        let (row, column) =
            if inner.end == k { ((i + 1) * self.unit, 0) } else { (i * self.unit, inner.end) };
        (i < self.units() && !inner.is_empty()).then(|| Pack {
            from: self.from.at(i * self.unit, inner.start),
            following: self.from.at(row, column).0,
            width: self.unit.min(self.width - i * self.unit),
            k: inner.len(),
            to: self.packed.wrapping_add(slot * self.unit * k + inner.start * self.unit),
            is_panel: self.is_panel,
        })
    }
}

/// Packing that runs while a region is computed.
pub trait Overlap<E, P> {
    /// The order of the region's tiles.
    fn order(&self) -> Order;

    /// Called before tile `inner` of `tiles` of strip, or panel, `outer`, in that order. Packs what
    /// is due, and returns the work that the kernel does while it computes the tile.
    ///
    /// # Safety
    /// Operands can be read, and their packed form written.
    unsafe fn tile(&mut self, outer: usize, inner: (usize, usize)) -> Option<Interleaved<E, P>>;
}

/// Nothing to pack.
pub struct NoOverlap;

impl<E, P> Overlap<E, P> for NoOverlap {
    fn order(&self) -> Order {
        Order::ByStrips
    }

    unsafe fn tile(&mut self, _: usize, _: (usize, usize)) -> Option<Interleaved<E, P>> {
        None
    }
}

/// Both operands of a block of a task, packed while they are used.
pub struct OverlapBoth<E, P> {
    strips: Side<E, P>,
    panels: Side<E, P>,
    /// Length of the block, a multiple of KQ.
    k: usize,
    /// Granularity of the kernel's words along the inner dimension.
    kq: usize,
    order: Order,
}

impl<E: Elem<Acc = f32>, P: Copy> OverlapBoth<E, P> {
    /// `rows` rows of A and `columns` columns of B, from the matrices' first elements on. `kept`
    /// means that the kept operand was packed before.
    pub fn new<K: Kernel<E, Packed = P>>(
        (a, rows): (Mat<*const E>, usize),
        (b, columns): (Mat<*const E>, usize),
        k: usize,
        (strips, panels): (*mut P, *mut P),
        order: Order,
        kept: bool,
    ) -> Self {
        let by_strips = matches!(order, Order::ByStrips);
        let side = |from, width, unit, packed, is_panel| {
            let is_packed = kept && by_strips == is_panel;
            Side { from, width, unit, packed, is_panel, is_packed }
        };
        Self {
            strips: side(a, rows, K::MR, strips, false),
            panels: side(b.t(), columns, K::NR, panels, true),
            k,
            kq: K::KQ,
            order,
        }
    }

    /// Packs the operands of the first tile.
    ///
    /// # Safety
    /// As [`Kernel::pack_a`] and [`Kernel::pack_b`], for all of the block.
    pub unsafe fn begin<K: Kernel<E, Packed = P>>(&self) -> (Strips<E, P>, Panels<P>) {
        let Self { strips, panels, k, order, .. } = self;
        // SAFETY: the caller's promise.
        unsafe {
            if !strips.is_packed {
                pack_strips::<E, K>(strips.from, K::MR.min(strips.width), *k, strips.packed);
            }
            if !panels.is_packed {
                pack_panels::<E, K>(panels.from.t(), K::NR.min(panels.width), *k, panels.packed);
            }
        }
        let (some, all) = (Turns::of(SLOTS), Turns::ALL);
        let [strip_turns, panel_turns] = match order {
            Order::ByStrips => [some, all],
            Order::ByPanels => [all, some],
        };
        (
            Strips::packed(strips.packed, strip_turns),
            Panels { at: panels.packed, len: K::NR * k, turns: panel_turns },
        )
    }
}

impl<E, P> Overlap<E, P> for OverlapBoth<E, P> {
    fn order(&self) -> Order {
        self.order
    }

    unsafe fn tile(
        &mut self,
        outer: usize,
        (inner, tiles): (usize, usize),
    ) -> Option<Interleaved<E, P>> {
        self.pack(outer, (inner, tiles)).map(Interleaved::Pack)
    }
}

impl<E, P> OverlapBoth<E, P> {
    /// The packing to interleave with tile `inner` of `tiles` of strip, or panel, `outer`.
    fn pack(&self, outer: usize, (inner, tiles): (usize, usize)) -> Option<Pack<E, P>> {
        let Self { strips, panels, k, kq, order } = self;
        let (some, kept) = match order {
            Order::ByStrips => (strips, panels),
            Order::ByPanels => (panels, strips),
        };
        let next = outer + 1;
        let packs_kept = outer == 0 && !kept.is_packed;
        if packs_kept && inner + 1 < tiles {
            return kept.part(inner + 1, inner + 1, *k, 0..*k);
        }
        // All of it during the last tile, or a part during each tile.
        let each = if packs_kept { *k } else { k.div_ceil(tiles).next_multiple_of(*kq) };
        let first = if packs_kept { 0 } else { inner * each };
        some.part(next, next % SLOTS, *k, first.min(*k)..(first + each).min(*k))
    }
}
