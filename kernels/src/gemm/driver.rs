//! The loops around the micro-kernel, shared by threads.
//!
//! Threads draw numbered items: of each phase first those that pack B, then those that compute tasks, for which a thread packs A
//! by itself. Who draws an item waits until the items of all earlier stages are done; those are in the hands of threads that
//! run, so a thread that comes late, or not at all, holds up nobody, and a product costs one fork and join.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::DType;
use rayon::prelude::*;

use super::buffer::{Buffer, Common, Own, with_common, with_own};
use super::kernel::{Ahead, Kernel, Next, PIECE, Strip};
use super::plan::{Phase, Plan, TOGETHER};
use super::{Mat, Start};
use crate::float::Elem;

/// Bytes of a cache line.
const LINE: usize = 64;
/// How many tiles ahead of its use the memory of sums is fetched.
const TILES_AHEAD: usize = 2;
/// Spins of a waiting thread before it lets others run.
const SPINS: usize = 10_000;

/// What sums start from; see [`Start`].
#[derive(Clone, Copy)]
pub enum First {
    Zero,
    Old,
    /// f32, with zeros up to a multiple of NR.
    Bias(*const f32),
}

impl First {
    /// With the bias of `n` elements widened into `memory`.
    pub fn new<E: Elem<Acc = f32>>(start: Start<'_, E>, n: usize, nr: usize, memory: &mut Buffer) -> Self {
        match start {
            Start::Zero => Self::Zero,
            Start::Old => Self::Old,
            Start::Bias(bias) => {
                let padded = memory.room::<f32>(n.next_multiple_of(nr));
                let values = bias.iter().map(|&e| e.load()).chain(std::iter::repeat(0.0));
                for (i, value) in values.take(n.next_multiple_of(nr)).enumerate() {
                    // SAFETY: there is room for so many.
                    unsafe { padded.add(i).write(value) };
                }
                Self::Bias(padded)
            }
        }
    }
}

/// Where a product goes, and how.
pub struct Target<C> {
    pub dst: Mat<*mut C>,
    pub first: First,
    pub scale: f32,
}

/// Rows and columns of the product that one thread computes at a time, from columns of A's inner dimension that are packed.
pub struct Region {
    pub rows: Range<usize>,
    pub columns: Range<usize>,
    /// Length of the block of the inner dimension, a multiple of KQ.
    pub k: usize,
    pub is_first: bool,
    pub is_last: bool,
}

/// Where unfinished sums of a region lie: tile (strip, panel) at `at + (strip · panels + panel) · MR · NR`.
#[derive(Clone, Copy)]
pub struct Sums {
    pub at: *mut f32,
    pub panels: usize,
}

/// # Safety
/// The product's memory is as [`super::gemm`] says; the machine has the kernel's instruction set.
pub unsafe fn run<E: Elem<Acc = f32>, C: Elem<Acc = f32>, K: Kernel<E>>(
    shape: (usize, usize, usize),
    dst: Mat<*mut C>,
    start: Start<'_, E>,
    a: Mat<*const E>,
    b: Mat<*const E>,
    scale: f32,
    threads: usize,
) {
    let (m, n, k) = shape;
    if m == 0 || n == 0 {
        return;
    }
    let threads = if 2 * m * n * k < K::BLOCKING.alone { 1 } else { threads };
    let packs_a = !(k.is_multiple_of(K::KQ) && K::reads_rows(a));
    let plan = Plan::new(shape, (K::MR, K::NR), size_of::<K::Packed>(), K::BLOCKING, packs_a, threads);
    with_common(|Common { panels, sums, bias }| {
        let crew = Crew::<E, C, K> {
            rows: m,
            a,
            b,
            target: Target { dst, first: First::new(start, n, K::NR, bias), scale },
            panels: panels.room(plan.panel_elements),
            sums: plan.sums_outlast_phases().then(|| sums.room(m.next_multiple_of(K::MR) * plan.phase_columns)),
            plan,
            next: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
        };
        if threads == 1 {
            crew.work();
        } else {
            (0..threads).into_par_iter().with_max_len(1).for_each(|_| crew.work());
        }
    });
}

/// What the threads of a product share.
struct Crew<E, C, K: Kernel<E>>
where
    E: Elem<Acc = f32>,
{
    rows: usize,
    a: Mat<*const E>,
    b: Mat<*const E>,
    target: Target<C>,
    plan: Plan,
    panels: *mut K::Packed,
    /// Where sums outlast a phase: those of all tasks.
    sums: Option<*mut f32>,
    next: AtomicUsize,
    done: AtomicUsize,
}

// SAFETY: items write disjoint parts of the panels, of the sums and of dst, and read panels only after all were packed.
unsafe impl<E: Elem<Acc = f32>, C, K: Kernel<E>> Sync for Crew<E, C, K> {}

impl<E: Elem<Acc = f32>, C: Elem<Acc = f32>, K: Kernel<E>> Crew<E, C, K> {
    /// Takes items until there are none.
    fn work(&self) {
        let items = self.plan.items();
        let mut phases = self.plan.phases.iter();
        let Some(mut phase) = phases.next() else { return };
        let mut item = self.next.fetch_add(1, Ordering::Relaxed);
        if item >= items {
            return;
        }
        with_own(|own| {
            // SAFETY: the machine has the instruction set; `leave` follows.
            unsafe { K::enter() };
            while item < items {
                while item >= phase.computing.end {
                    phase = phases.next().expect("the last phase ends with the last item");
                }
                // SAFETY: items of earlier stages are done, so panels are free to write, or complete.
                if item < phase.packing.end {
                    self.wait_for(phase.packing.start);
                    unsafe { self.pack(phase, item - phase.packing.start) };
                } else {
                    self.wait_for(phase.computing.start);
                    let task = item - phase.computing.start;
                    unsafe {
                        if self.plan.packs_alone {
                            self.pack_and_compute(task, own)
                        } else {
                            self.compute(phase, task, own)
                        }
                    };
                }
                self.done.fetch_add(1, Ordering::Release);
                item = self.next.fetch_add(1, Ordering::Relaxed);
            }
            // SAFETY: after `enter`.
            unsafe { K::leave() };
        });
    }

    /// Waits until the first `items` items are done: no later one can be before.
    fn wait_for(&self, items: usize) {
        let mut spins = 0;
        while self.done.load(Ordering::Acquire) < items {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Where the panels of a block of the phase begin; each is `k · NR` elements.
    fn panels_of(&self, phase: &Phase, block: usize) -> *mut K::Packed {
        let columns = phase.columns.len().next_multiple_of(K::NR);
        self.panels.wrapping_add((block - phase.blocks.start) * self.plan.blocks.len * columns)
    }

    unsafe fn pack(&self, phase: &Phase, item: usize) {
        let groups = phase.columns.len().div_ceil(K::NR * TOGETHER);
        let (block, group) = (phase.blocks.start + item / groups, item % groups);
        let inner = self.plan.blocks.range(block);
        let first = phase.columns.start + group * K::NR * TOGETHER;
        let columns = first..(first + K::NR * TOGETHER).min(phase.columns.end);
        let panel = K::NR * inner.len().next_multiple_of(K::KQ);
        let to = self.panels_of(phase, block).wrapping_add(group * TOGETHER * panel);
        let b = self.b.at(inner.start, columns.start);
        // SAFETY: the caller's promise.
        unsafe { pack_panels::<E, K>(b, columns.len(), inner.len(), to) }
    }

    /// Rows and columns of a task, and which one it is across the phase.
    fn task(&self, phase: &Phase, item: usize) -> (Range<usize>, Range<usize>, usize) {
        let Plan { task_rows, task_columns, .. } = self.plan;
        let tasks_across = phase.columns.len().div_ceil(task_columns);
        let (down, across) = (item / tasks_across, item % tasks_across);
        let rows = down * task_rows..((down + 1) * task_rows).min(self.rows);
        let first = phase.columns.start + across * task_columns;
        (rows, first..(first + task_columns).min(phase.columns.end), across)
    }

    /// A task of all blocks, block by block: panels, strips and sums stay in this thread's L2 and are written there.
    unsafe fn pack_and_compute(&self, item: usize, own: &mut Own) {
        let blocks = self.plan.blocks;
        let (rows, columns, _) = self.task(&self.plan.phases[0], item);
        let panels_across = columns.len().div_ceil(K::NR);
        // One tile's place, or a place for every tile.
        let kept = if blocks.count == 1 { 0 } else { panels_across };
        let sums = own.sums.room::<f32>(rows.len().next_multiple_of(K::MR) * kept.max(1) * K::NR);
        let panels = own.panels.room(panels_across * K::NR * blocks.len);
        let together = K::BLOCKING.mc.next_multiple_of(K::MR).min(rows.len().next_multiple_of(K::MR));
        let strips = own.strips.room(together * blocks.len);
        for block in 0..blocks.count {
            let inner = blocks.range(block);
            let k = inner.len().next_multiple_of(K::KQ);
            // SAFETY: the caller's promise.
            unsafe { pack_panels::<E, K>(self.b.at(inner.start, columns.start), columns.len(), inner.len(), panels) };
            for first in rows.clone().step_by(together) {
                let some = first..(first + together).min(rows.end);
                let a = self.a.at(first, inner.start);
                let at = sums.wrapping_add((first - rows.start) * kept * K::NR);
                let region = Region {
                    rows: some.clone(),
                    columns: columns.clone(),
                    k,
                    is_first: block == 0,
                    is_last: block + 1 == blocks.count,
                };
                let following = self.a.at(some.end, inner.start);
                // SAFETY: the caller's promise.
                unsafe {
                    let strips = Strips::prepare::<K>(a, some.len(), inner.len(), strips, following.0);
                    let sums = Sums { at, panels: kept };
                    compute_region::<E, C, K>(&self.target, &region, &strips, (panels, K::NR * k), sums);
                }
            }
        }
    }

    unsafe fn compute(&self, phase: &Phase, item: usize, own: &mut Own) {
        let Plan { blocks, task_columns, .. } = self.plan;
        let (rows, columns, across) = self.task(phase, item);
        let panels_in_phase = phase.columns.len().div_ceil(K::NR);
        // Where the panels of all blocks stay in L2, strip by strip: then unfinished sums stay there too. Columns of A are packed
        // for many strips at a time.
        let together = if self.sums.is_none() && self.plan.is_short && self.a.2 == 1 { K::MR } else { rows.len() };
        for first_row in rows.clone().step_by(together) {
            let rows = first_row..(first_row + together).min(rows.end);
            let strips = rows.len().next_multiple_of(K::MR);
            let to = own.strips.room(strips * blocks.len);
            let sums = match self.sums {
                // One tile's place, or a place for every tile.
                None if blocks.count == 1 => Sums { at: own.sums.room(K::MR * K::NR), panels: 0 },
                None => Sums { at: own.sums.room(strips * task_columns), panels: columns.len().div_ceil(K::NR) },
                Some(all) => {
                    let tile = rows.start / K::MR * panels_in_phase + across * task_columns / K::NR;
                    Sums { at: all.wrapping_add(tile * K::MR * K::NR), panels: panels_in_phase }
                }
            };
            for block in phase.blocks.clone() {
                let inner = blocks.range(block);
                let k = inner.len().next_multiple_of(K::KQ);
                let panels = self.panels_of(phase, block).wrapping_add(across * task_columns * k);
                let a = self.a.at(rows.start, inner.start);
                let region = Region {
                    rows: rows.clone(),
                    columns: columns.clone(),
                    k,
                    is_first: block == 0,
                    is_last: block + 1 == blocks.count,
                };
                let following = if block + 1 < phase.blocks.end {
                    self.a.at(rows.start, blocks.range(block + 1).start)
                } else {
                    self.a.at(rows.end, blocks.range(phase.blocks.start).start)
                };
                // SAFETY: the caller's promise.
                unsafe {
                    let strips = Strips::prepare::<K>(a, rows.len(), inner.len(), to, following.0);
                    compute_region::<E, C, K>(&self.target, &region, &strips, (panels, K::NR * k), sums);
                }
            }
        }
    }
}

/// The strips of a region.
pub struct Strips<E, P> {
    /// A, where the kernel reads whole strips there.
    rows: Option<(*const E, usize)>,
    packed: *const P,
    /// Where the first strip of what comes next lies in A.
    following: *const E,
}

impl<E: Elem<Acc = f32>, P: Copy> Strips<E, P> {
    /// Packs what `K` does not read in `a` itself.
    ///
    /// # Safety
    /// As [`Kernel::pack_a`], for all strips.
    pub unsafe fn prepare<K: Kernel<E, Packed = P>>(
        a: Mat<*const E>,
        rows: usize,
        k: usize,
        to: *mut P,
        following: *const E,
    ) -> Self {
        let in_place = k.is_multiple_of(K::KQ) && K::reads_rows(a);
        let whole = if in_place { rows / K::MR * K::MR } else { 0 };
        // SAFETY: the caller's promise.
        unsafe { pack_strips::<E, K>(a.at(whole, 0), rows - whole, k, to.wrapping_add(whole * k)) };
        Self { rows: in_place.then_some((a.0, a.1)), packed: to, following }
    }

    /// Strip number `s` of `mr` rows, of which the product has `rows`.
    fn strip(&self, s: usize, rows: usize, mr: usize, k: usize) -> Strip<E, P> {
        match self.rows {
            Some((a, row)) if rows == mr => Strip::Rows(a.wrapping_add(s * mr * row), row),
            _ => Strip::Packed(self.packed.wrapping_add(s * mr * k)),
        }
    }

    /// What of the strip after `strip`, which begins at `row` of `rows`, is fetched while panel `p` of `panels` is used: if all of them
    /// are, all of it, where there are panels enough.
    fn ahead(&self, strip: Strip<E, P>, is_last: bool, mr: usize, k: usize, (p, panels): (usize, usize)) -> Next {
        let Strip::Rows(at, row) = strip else { return Next::nothing(self.packed.cast()) };
        let next = if is_last { self.following } else { at.wrapping_add(mr * row) };
        let lines = (k * size_of::<E>()).div_ceil(LINE).max(1);
        let each = lines.div_ceil(panels).min(2);
        let at = next.cast::<u8>().wrapping_add((p * each).min(lines - each) * LINE);
        Next { at, row: row * size_of::<E>(), second: (each - 1) * LINE }
    }
}

/// Packs `columns` columns of `k` rows of `b` into panels one behind the other.
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
        let (b, columns, to) = (b.at(i, c), step.min(columns - c), to.wrapping_add(c * padded + i * K::NR));
        // SAFETY: the caller's promise.
        unsafe { K::pack_panels(b, columns, PIECE.min(k - i), to, padded * K::NR) };
    };
    pieces((columns, step), k, b.2 == 1, piece);
}

/// Packs `rows` rows of `k` columns of `a` into strips one behind the other.
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
        let (a, rows, to) = (a.at(r, i), step.min(rows - r), to.wrapping_add(r * padded + i * K::MR));
        // SAFETY: the caller's promise.
        unsafe { K::pack_strips(a, rows, PIECE.min(k - i), to, padded * K::MR) };
    };
    pieces((rows, step), k, a.1 == 1, piece);
}

/// Calls `piece` for all pieces, in the order in which memory is read along its lines.
#[inline(always)]
fn pieces((width, step): (usize, usize), k: usize, across_first: bool, piece: impl Fn(usize, usize)) {
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

/// Multiplies packed strips with packed panels (the pointer, and the elements of one) and finishes what is complete.
///
/// # Safety
/// Strips and panels hold the region; the rest as [`run`].
pub unsafe fn compute_region<E: Elem<Acc = f32>, C: Elem<Acc = f32>, K: Kernel<E>>(
    target: &Target<C>,
    region: &Region,
    strips: &Strips<E, K::Packed>,
    (panels, panel): (*const K::Packed, usize),
    sums: Sums,
) {
    let &Target { dst: Mat(dst, row_stride, column_stride), first, scale } = target;
    let unscaled = scale == 1.0;
    let in_place = C::DTYPE == DType::F32 && column_stride == 1 && unscaled;
    let touches_dst = region.is_last || region.is_first && matches!(first, First::Old);
    let second = if K::NR * size_of::<C>() > LINE { LINE } else { 0 };
    let panels_across = region.columns.len().div_ceil(K::NR);
    for (s, row) in region.rows.clone().step_by(K::MR).enumerate() {
        let rows = K::MR.min(region.rows.end - row);
        let strip = strips.strip(s, rows, K::MR, region.k);
        let whole_rows = in_place && K::leaves_other_rows(rows);
        for (p, column) in region.columns.clone().step_by(K::NR).enumerate() {
            let columns = K::NR.min(region.columns.end - column);
            let panel = panels.wrapping_add(p * panel);
            let to = dst.wrapping_add(row * row_stride + column * column_stride);
            let written = if touches_dst {
                let ahead = column + TILES_AHEAD * K::NR;
                let (row, ahead) =
                    if ahead < region.columns.end { (row, ahead) } else { (row + K::MR, ahead - region.columns.len()) };
                let at = dst.wrapping_add(row * row_stride + ahead * column_stride);
                Next { at: at.cast_const().cast(), row: row_stride * size_of::<C>(), second }
            } else {
                let tile = sums.at.wrapping_add((s * sums.panels + p + TILES_AHEAD) * K::MR * K::NR);
                Next { at: tile.cast_const().cast(), row: K::NR * size_of::<f32>(), second: LINE }
            };
            let is_last = row + K::MR >= region.rows.end;
            let ahead = Ahead { written, read: strips.ahead(strip, is_last, K::MR, region.k, (p, panels_across)) };
            // Whether dst can be read and written as a tile. It is, once each; sums lie elsewhere in between.
            let in_place = whole_rows && columns == K::NR;
            let at = if sums.panels == 0 { 0 } else { s * sums.panels + p };
            let sums = (sums.at.wrapping_add(at * K::MR * K::NR), K::NR);
            let tile = (to.cast::<f32>(), row_stride);
            // SAFETY: the caller's promise; sums have MR rows of NR, and so has dst's tile, or the kernel leaves other rows.
            unsafe {
                let from = match first {
                    _ if !region.is_first => (sums.0.cast_const(), sums.1),
                    First::Bias(row) => (row.add(column), 0),
                    First::Old if unscaled && in_place => (tile.0.cast_const(), tile.1),
                    First::Old if unscaled => {
                        load(Mat(to, row_stride, column_stride), rows, columns, sums);
                        (sums.0.cast_const(), sums.1)
                    }
                    First::Zero | First::Old => (std::ptr::null(), 0),
                };
                let tile_to = if region.is_last && in_place { tile } else { sums };
                K::tile(rows, region.k, strip, panel, from, tile_to, ahead);
                if region.is_last && !in_place {
                    let add = matches!(first, First::Old) && !unscaled;
                    if column_stride == 1 {
                        K::finish(sums.0, rows, columns, (to, row_stride), scale, add);
                    } else {
                        let to = Mat(to, row_stride, column_stride);
                        scatter(sums, rows, columns, to, scale, add);
                    }
                }
            }
        }
    }
}

/// Old values of an edge of dst as the start of sums.
unsafe fn load<C: Elem<Acc = f32>>(from: Mat<*mut C>, rows: usize, columns: usize, (to, stride): (*mut f32, usize)) {
    for r in 0..rows {
        for c in 0..columns {
            // SAFETY: the caller's promise.
            unsafe { *to.add(r * stride + c) = (*from.0.add(r * from.1 + c * from.2)).load() };
        }
    }
}

/// As [`Kernel::finish`] for a dst whose columns are apart.
unsafe fn scatter<C: Elem<Acc = f32>>(
    (sums, stride): (*mut f32, usize),
    rows: usize,
    columns: usize,
    to: Mat<*mut C>,
    scale: f32,
    add: bool,
) {
    for r in 0..rows {
        for c in 0..columns {
            // SAFETY: the caller's promise.
            unsafe {
                let to = to.0.add(r * to.1 + c * to.2);
                let old = if add { (*to).load() } else { 0.0 };
                *to = C::store(old + scale * *sums.add(r * stride + c));
            }
        }
    }
}
