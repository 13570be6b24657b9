//! The loops around the micro-kernel on one thread: packing, and regions of packed operands.

use std::ops::Range;

use candle_core::DType;

use super::buffer::Buffer;
use super::kernel::{Ahead, Kernel, Next, PIECE, Strip, To};
use super::overlap::Overlap;
use super::plan::TOGETHER;
use super::{Mat, Start};
use crate::tensor::allocator::LINE;
use crate::tensor::element::Elem;
use crate::tensor::simd::prefetch;

/// Prefetch distance for the memory of sums, in tiles.
const TILES_AHEAD: usize = 2;

/// Initial values of sums; see [`Start`].
#[derive(Clone, Copy)]
pub enum First {
    Zero,
    Old,
    /// f32, padded with zeros to a multiple of NR.
    Bias(*const f32),
}

impl First {
    /// Converts `start`; widens a bias of `n` elements into `memory`.
    pub fn new<E: Elem<Acc = f32>>(
        start: Start<'_, E>,
        n: usize,
        nr: usize,
        memory: &mut Buffer,
    ) -> Self {
        match start {
            Start::Zero => Self::Zero,
            Start::Old => Self::Old,
            Start::Bias(bias) => {
                let padded = memory.room::<f32>(n.next_multiple_of(nr));
                let values = bias.iter().map(|&e| e.load()).chain(std::iter::repeat(0.0));
                for (i, value) in values.take(n.next_multiple_of(nr)).enumerate() {
                    // SAFETY: there is room for that many.
                    unsafe { padded.add(i).write(value) };
                }
                Self::Bias(padded)
            }
        }
    }
}

/// Destination of a product, and its epilogue.
pub struct Target<C> {
    pub dst: Mat<*mut C>,
    pub first: First,
    /// Added to the finished sums: a matrix of dst's shape with contiguous columns, and its row
    /// stride.
    pub plus: Option<(*const C, usize)>,
    pub scale: f32,
}

/// The rows and columns of the product that one thread computes at a time, from packed columns of
/// A's inner dimension.
pub struct Region {
    pub rows: Range<usize>,
    pub columns: Range<usize>,
    /// Length of the block of the inner dimension, a multiple of KQ.
    pub k: usize,
    pub is_first: bool,
    pub is_last: bool,
}

/// Unfinished sums of a region: tile (strip, panel) lies at `at + (strip · panels + panel) · MR ·
/// NR`.
#[derive(Clone, Copy)]
pub struct Sums {
    pub at: *mut f32,
    pub panels: usize,
}

impl Sums {
    /// Room for one tile, which tiles use one after the other.
    pub fn of_a_tile(at: *mut f32) -> Self {
        Self { at, panels: 0 }
    }

    /// Whether every tile has its own place.
    pub fn of_all(self) -> bool {
        self.panels > 0
    }

    /// The sums from a row and a column on, for tiles of mr × nr.
    pub fn from(self, (row, column): (usize, usize), (mr, nr): (usize, usize)) -> Self {
        Self { at: self.at.wrapping_add(row * self.panels * nr + column * mr), ..self }
    }
}

/// The order of a region's tiles: strip by strip, or panel by panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    ByStrips,
    ByPanels,
}

/// The panels of a region.
#[derive(Clone, Copy)]
pub struct Panels<P> {
    pub at: *const P,
    /// Elements per panel.
    pub len: usize,
    /// Number of panels that there is room for.
    pub turns: Turns,
}

/// Number of places that strips, or panels, use in turn, stored as a mask: the number is a power of
/// two, or there is a place for each.
#[derive(Clone, Copy)]
pub struct Turns(usize);

impl Turns {
    /// One place for each.
    pub const ALL: Self = Self(usize::MAX);

    pub const fn of(places: usize) -> Self {
        assert!(places.is_power_of_two());
        Self(places - 1)
    }

    /// Place of strip or panel `i`.
    #[inline(always)]
    fn place(self, i: usize) -> usize {
        i & self.0
    }
}

impl<P> Panels<P> {
    /// Panels of `len` elements, one directly after the other.
    pub fn whole(at: *const P, len: usize) -> Self {
        Self { at, len, turns: Turns::ALL }
    }
}

/// The strips of a region.
pub struct Strips<E, P> {
    /// A, if the kernel reads whole strips there.
    rows: Option<(*const E, usize)>,
    packed: *const P,
    turns: Turns,
    /// Address in A of the next region's first strip.
    following: *const E,
}

impl<E: Elem<Acc = f32>, P: Copy> Strips<E, P> {
    /// Packs the strips that `K` does not read in `a` directly: only the remaining rows that make
    /// no whole strip, or all strips.
    ///
    /// # Safety
    /// As [`Kernel::pack_a`], for those strips.
    pub unsafe fn prepare<K: Kernel<E, Packed = P>>(
        a: Mat<*const E>,
        rows: usize,
        k: usize,
        to: *mut P,
        following: *const E,
    ) -> Self {
        let in_place = k.is_multiple_of(K::KQ) && K::reads_rows(a);
        let (whole, turns) =
            if in_place { (rows / K::MR * K::MR, Turns::of(1)) } else { (0, Turns::ALL) };
        // SAFETY: the caller's promise.
        unsafe { pack_strips::<E, K>(a.at(whole, 0), rows - whole, k, to) };
        Self { rows: in_place.then_some((a.0, a.1)), packed: to, turns, following }
    }

    /// Strips that were packed elsewhere.
    pub fn packed(packed: *const P, turns: Turns) -> Self {
        Self { rows: None, packed, turns, following: std::ptr::null() }
    }

    /// Strip `s`, of the `mr` rows per strip; `rows` is the number of its rows that the product
    /// has.
    #[inline(always)]
    fn strip(&self, s: usize, rows: usize, mr: usize, k: usize) -> Strip<E, P> {
        match self.rows {
            Some((a, row)) if rows == mr => Strip::Rows(a.wrapping_add(s * mr * row), row),
            _ => Strip::Packed(self.packed.wrapping_add(self.turns.place(s) * mr * k)),
        }
    }

    /// Number of cache lines in a row of `k` elements, and number of lines to prefetch per panel:
    /// with enough panels, all lines are prefetched while one strip goes over `panels` panels.
    fn lines(k: usize, panels: usize) -> (usize, usize) {
        let lines = (k * size_of::<E>()).div_ceil(LINE).max(1);
        (lines, lines.div_ceil(panels.max(1)).min(2))
    }

    /// The part of the strip after `strip` to prefetch while panel `p` is used.
    #[inline(always)]
    fn ahead(
        &self,
        strip: Strip<E, P>,
        is_last: bool,
        mr: usize,
        (lines, each): (usize, usize),
        p: usize,
    ) -> Next {
        let Strip::Rows(at, row) = strip else { return Next::nothing(self.packed.cast()) };
        let next = if is_last { self.following } else { at.wrapping_add(mr * row) };
        let at = next.cast::<u8>().wrapping_add((p * each).min(lines - each) * LINE);
        Next { at, row: row * size_of::<E>(), second: (each - 1) * LINE }
    }
}

/// Packs `columns` columns of `k` rows of `b` into panels, one directly after the other.
///
/// # Safety
/// As [`Kernel::pack_b`].
pub unsafe fn pack_panels<E: Elem<Acc = f32>, K: Kernel<E>>(
    b: Mat<*const E>,
    columns: usize,
    k: usize,
    to: *mut K::Packed,
) {
    let padded = k.next_multiple_of(K::KQ);
    let step = K::NR * if b.2 == 1 { TOGETHER } else { 1 };
    let piece = |i: usize, c: usize| {
        if b.2 != 1 {
            // Hardware prefetchers cannot follow this many columns. So the lines of the next panel
            // are prefetched while this one is packed.
            for next in c + step..(c + 2 * step).min(columns) {
                (0..PIECE * size_of::<E>())
                    .step_by(LINE)
                    .for_each(|line| prefetch(b.at(i, next).0.wrapping_byte_add(line)));
            }
        }
        let (b, columns, to) =
            (b.at(i, c), step.min(columns - c), to.wrapping_add(c * padded + i * K::NR));
        // SAFETY: the caller's promise.
        unsafe { K::pack_panels(b, columns, PIECE.min(k - i), to, padded * K::NR) };
    };
    pieces((columns, step), k, b.2 == 1, piece);
}

/// Packs `rows` rows of `k` columns of `a` into strips, one directly after the other.
///
/// # Safety
/// As [`Kernel::pack_a`].
pub unsafe fn pack_strips<E: Elem<Acc = f32>, K: Kernel<E>>(
    a: Mat<*const E>,
    rows: usize,
    k: usize,
    to: *mut K::Packed,
) {
    let padded = k.next_multiple_of(K::KQ);
    let step = K::MR * if a.1 == 1 { TOGETHER } else { 1 };
    let piece = |i: usize, r: usize| {
        let (a, rows, to) =
            (a.at(r, i), step.min(rows - r), to.wrapping_add(r * padded + i * K::MR));
        // SAFETY: the caller's promise.
        unsafe { K::pack_strips(a, rows, PIECE.min(k - i), to, padded * K::MR) };
    };
    pieces((rows, step), k, a.1 == 1, piece);
}

/// Calls `piece` for all pieces, in the order that reads memory along its lines.
#[inline(always)]
fn pieces(
    (width, step): (usize, usize),
    k: usize,
    across_first: bool,
    piece: impl Fn(usize, usize),
) {
    if across_first {
        for i in (0..k).step_by(PIECE) {
            (0..width).step_by(step).for_each(|r| piece(i, r));
        }
    } else {
        for r in (0..width).step_by(step) {
            (0..k).step_by(PIECE).for_each(|i| piece(i, r));
        }
    }
}

/// Multiplies strips by panels, does the work of `packing` meanwhile, and finishes complete sums.
/// Before each strip, or panel, calls `keep` with the remaining rows, or columns. `keep` returns
/// the end of the part that is still to be computed.
///
/// # Safety
/// Strips and panels hold the region, or will when they are used; the rest as
/// [`super::workers::run`].
pub unsafe fn compute_region<E: Elem<Acc = f32>, C: Elem<Acc = f32>, K: Kernel<E>>(
    target: &Target<C>,
    region: &Region,
    strips: &Strips<E, K::Packed>,
    panels: &Panels<K::Packed>,
    sums: Sums,
    packing: &mut dyn Overlap<E, K::Packed>,
    keep: &mut dyn FnMut(Range<usize>) -> usize,
) {
    let &Target { dst: Mat(dst, row_stride, column_stride), first, plus, scale } = target;
    let unscaled = scale == 1.0;
    let as_it_is = column_stride == 1 && unscaled;
    let in_place = as_it_is && C::DTYPE == DType::F32 && plus.is_none();
    let rounds = as_it_is && !in_place && K::ROUNDS && C::DTYPE == E::DTYPE && region.is_last;
    let touches_dst = region.is_last || region.is_first && matches!(first, First::Old);
    let second = if K::NR * size_of::<C>() > LINE { LINE } else { 0 };
    let order = packing.order();
    let (mut down, mut across) =
        (region.rows.len().div_ceil(K::MR), region.columns.len().div_ceil(K::NR));
    let inner = match order {
        Order::ByStrips => across,
        Order::ByPanels => down,
    };
    let place = |o: usize, i: usize| match order {
        Order::ByStrips => (o, i),
        Order::ByPanels => (i, o),
    };
    let dst_tile = |s: usize, p: usize| {
        let (row, column) = (region.rows.start + s * K::MR, region.columns.start + p * K::NR);
        dst.wrapping_add(row * row_stride + column * column_stride)
    };
    let plus = plus.filter(|_| region.is_last);
    let plus_tile = |s: usize, p: usize| {
        let (row, column) = (region.rows.start + s * K::MR, region.columns.start + p * K::NR);
        plus.map(|(at, stride)| (at.wrapping_add(row * stride + column), stride))
    };
    let sums_tile = |s: usize, p: usize| {
        let tile = if sums.panels == 0 { 0 } else { s * sums.panels + p };
        sums.at.wrapping_add(tile * K::MR * K::NR)
    };
    let lines = Strips::<E, K::Packed>::lines(region.k, across);
    let (mut all_rows, mut all_columns) = (region.rows.clone(), region.columns.clone());
    for o in 0.. {
        let outer = match order {
            Order::ByStrips => {
                all_rows.end = keep((all_rows.start + o * K::MR).min(all_rows.end)..all_rows.end);
                down = all_rows.len().div_ceil(K::MR);
                down
            }
            Order::ByPanels => {
                all_columns.end =
                    keep((all_columns.start + o * K::NR).min(all_columns.end)..all_columns.end);
                across = all_columns.len().div_ceil(K::NR);
                across
            }
        };
        if o == outer {
            break;
        }
        for i in 0..inner {
            let (s, p) = place(o, i);
            let rows = K::MR.min(all_rows.len() - s * K::MR);
            let columns = K::NR.min(all_columns.len() - p * K::NR);
            let strip = strips.strip(s, rows, K::MR, region.k);
            let panel = panels.at.wrapping_add(panels.turns.place(p) * panels.len);
            let later = i + TILES_AHEAD;
            let (s_ahead, p_ahead) =
                if later < inner { place(o, later) } else { place(o + 1, later - inner) };
            let written = if touches_dst {
                let at = dst_tile(s_ahead, p_ahead).cast_const().cast();
                Next { at, row: row_stride * size_of::<C>(), second }
            } else {
                let at = sums_tile(s_ahead, p_ahead).cast_const().cast();
                Next { at, row: K::NR * size_of::<f32>(), second: LINE }
            };
            let mut added = match plus_tile(s_ahead, p_ahead) {
                Some((at, stride)) => Next { at: at.cast(), row: stride * size_of::<C>(), second },
                None => Next::nothing(panel.cast()),
            };
            if plus.is_some() && !K::ASKS_FOR_ADDED {
                (0..K::MR).for_each(|_| added.lines().into_iter().for_each(prefetch));
            }
            // SAFETY: the caller's promise.
            let interleaved = unsafe { packing.tile(o, (i, inner)) };
            let read = strips.ahead(strip, s + 1 == down, K::MR, lines, p);
            let ahead = Ahead { written, added, read };
            // Whether dst can be read and written as a tile. It is read and written once each; in
            // between, sums lie elsewhere.
            let is_whole = K::leaves_other_rows(rows) && columns == K::NR;
            let (in_place, rounds) = (in_place && is_whole, rounds && is_whole);
            let (to, sums) = (dst_tile(s, p), (sums_tile(s, p), K::NR));
            let tile = (to.cast::<f32>(), row_stride);
            // SAFETY: the caller's promise; sums have MR rows of NR, and so has dst's tile, or the
            // kernel does not touch other rows.
            unsafe {
                let from = match first {
                    _ if !region.is_first => (sums.0.cast_const(), sums.1),
                    First::Bias(row) => (row.add(region.columns.start + p * K::NR), 0),
                    First::Old if unscaled && in_place => (tile.0.cast_const(), tile.1),
                    First::Old if unscaled => {
                        load(Mat(to, row_stride, column_stride), rows, columns, sums);
                        (sums.0.cast_const(), sums.1)
                    }
                    First::Zero | First::Old => (std::ptr::null(), 0),
                };
                let tile_to = if rounds {
                    let (add, add_stride) = plus_tile(s, p).unwrap_or((std::ptr::null(), 0));
                    To::Rounded { to: to.cast(), stride: row_stride, add: add.cast(), add_stride }
                } else if region.is_last && in_place {
                    To::Sums(tile.0, tile.1)
                } else {
                    To::Sums(sums.0, sums.1)
                };
                K::tile(rows, region.k, strip, panel, from, tile_to, ahead, interleaved);
                if region.is_last && !in_place && !rounds {
                    let to = Mat(to, row_stride, column_stride);
                    let old = matches!(first, First::Old) && !unscaled;
                    let add = match plus_tile(s, p) {
                        Some((at, stride)) => Mat(at, stride, 1),
                        None => {
                            Mat(if old { to.0.cast_const() } else { std::ptr::null() }, to.1, to.2)
                        }
                    };
                    if column_stride == 1 {
                        K::finish(sums.0, rows, columns, (to.0, to.1), scale, (add.0, add.1));
                    } else {
                        scatter(sums, rows, columns, to, scale, add);
                    }
                }
            }
        }
    }
}

/// Loads old values at an edge of dst as initial sums.
unsafe fn load<C: Elem<Acc = f32>>(
    from: Mat<*mut C>,
    rows: usize,
    columns: usize,
    (to, stride): (*mut f32, usize),
) {
    for r in 0..rows {
        for c in 0..columns {
            // SAFETY: the caller's promise.
            unsafe { *to.add(r * stride + c) = (*from.0.add(r * from.1 + c * from.2)).load() };
        }
    }
}

/// As [`Kernel::finish`], for a dst with strided columns.
unsafe fn scatter<C: Elem<Acc = f32>>(
    (sums, stride): (*mut f32, usize),
    rows: usize,
    columns: usize,
    to: Mat<*mut C>,
    scale: f32,
    add: Mat<*const C>,
) {
    for r in 0..rows {
        for c in 0..columns {
            // SAFETY: the caller's promise.
            unsafe {
                let to = to.0.add(r * to.1 + c * to.2);
                let old =
                    if add.0.is_null() { 0.0 } else { (*add.0.add(r * add.1 + c * add.2)).load() };
                *to = C::store(old + scale * *sums.add(r * stride + c));
            }
        }
    }
}
