//! A thread's work on a task: the loops over blocks of the inner dimension, and the packing for
//! each block. One function per [`Strategy`].

use std::ops::Range;

use super::buffer::ThreadBuffers;
use super::driver::{Order, Panels, Region, Strips, Sums, compute_region, pack_panels};
use super::kernel::Kernel;
use super::lookahead::{self, NextPanels};
use super::overlap::{self, NoOverlap, Overlap, OverlapBoth};
use super::plan::{Phase, Plan, Strategy};
use super::workers::{Part, Workers};
use crate::tensor::element::Elem;

impl<E: Elem<Acc = f32>, C: Elem<Acc = f32>, K: Kernel<E>> Workers<E, C, K> {
    /// Computes a part of a task, or all of it.
    ///
    /// # Safety
    /// As [`super::workers::run`], within [`Kernel::enter`].
    pub unsafe fn compute(&self, phase: &Phase, part: Part<K::Packed>, own: &mut ThreadBuffers) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.plan.way {
                Strategy::Shared => self.compute_packed(phase, part, own),
                Strategy::Alone => self.block_by_block(part, false, own),
                Strategy::Overlap => self.block_by_block(part, true, own),
                Strategy::Ahead { group } => self.step_by_step(phase, part, group, own),
            }
        }
    }

    /// Computes all blocks, one by one. Panels, strips and sums stay in this thread's L2; the
    /// thread packs them there, before the products or between them.
    unsafe fn block_by_block(
        &self,
        mut part: Part<K::Packed>,
        overlaps: bool,
        own: &mut ThreadBuffers,
    ) {
        let blocks = self.plan.blocks;
        let panels_across = part.columns.len().div_ceil(K::NR);
        // Room for one tile, or for every tile.
        let kept = if blocks.count == 1 { 0 } else { panels_across };
        let all_sums = self.sums_of(&part, kept, own);
        let some_rows = K::blocking().mc.next_multiple_of(K::MR);
        let order = match part.packed {
            Some((order, _)) => order,
            None if overlaps => overlap::order(part.rows.len(), part.columns.len()),
            None => Order::ByStrips,
        };
        let [strips, panels] = if overlaps {
            overlap::room::<E, K>(part.rows.len(), part.columns.len(), blocks.len, order)
        } else {
            let rows = some_rows.min(part.rows.len().next_multiple_of(K::MR));
            [rows * blocks.len, panels_across * K::NR * blocks.len]
        };
        let (mut strips, mut panels) = (own.strips.room(strips), own.panels.room(panels));
        match part.packed {
            Some((Order::ByStrips, packed)) => panels = packed,
            Some((Order::ByPanels, packed)) => strips = packed,
            None => (),
        }
        let mut is_packed = part.packed.is_some();
        for block in part.block..blocks.count {
            if !is_packed {
                self.halve(&mut part, block, all_sums);
            }
            let inner = blocks.range(block);
            let k = inner.len().next_multiple_of(K::KQ);
            let b = self.b.at(inner.start, part.columns.start);
            if !overlaps && !is_packed {
                // SAFETY: the caller's promise.
                unsafe { pack_panels::<E, K>(b, part.columns.len(), inner.len(), panels) };
            }
            let (begin, is_last) = (part.rows.start, block + 1 == blocks.count);
            // Number of rows that are packed at once.
            let together = if overlaps || self.reads_rows(k) { part.rows.len() } else { some_rows };
            let mut first = begin;
            while first < part.rows.end {
                let rows = first..(first + together).min(part.rows.end);
                let a = self.a.at(first, inner.start);
                let columns = part.columns.clone();
                let region = Region {
                    rows: rows.clone(),
                    columns: columns.clone(),
                    k,
                    is_first: block == 0,
                    is_last,
                };
                let sums = all_sums.from((first - begin, 0), (K::MR, K::NR));
                let packed = match order {
                    Order::ByStrips => panels,
                    Order::ByPanels => strips,
                };
                let mut next = rows.end;
                // The other operand is packed during the first strip, or panel.
                let first_of_all = match order {
                    Order::ByStrips => rows.start,
                    Order::ByPanels => columns.start,
                };
                let lent = &mut own.lent;
                let may_give = |at: usize| is_last && (!overlaps || is_packed || at > first_of_all);
                let mut keep = |left: Range<usize>| {
                    let all = match order {
                        Order::ByStrips => left.start..part.rows.end,
                        Order::ByPanels => left.clone(),
                    };
                    if !may_give(left.start) {
                        return left.end;
                    }
                    let end =
                        self.halve_rest(&part, (order, all), (block, all_sums), Some(packed), lent);
                    match order {
                        Order::ByStrips => part.rows.end = end,
                        Order::ByPanels => part.columns.end = end,
                    }
                    next = next.min(part.rows.end);
                    left.end.min(end)
                };
                // SAFETY: the caller's promise.
                unsafe {
                    if overlaps {
                        let (a, b, to) = ((a, rows.len()), (b, columns.len()), (strips, panels));
                        let mut both = OverlapBoth::new::<K>(a, b, k, to, order, is_packed);
                        let (strips, panels) = both.begin::<K>();
                        compute_region::<E, C, K>(
                            &self.target,
                            &region,
                            &strips,
                            &panels,
                            sums,
                            &mut both,
                            &mut keep,
                        );
                    } else {
                        let following = self.a.at(rows.end, inner.start);
                        let strips =
                            Strips::prepare::<K>(a, rows.len(), inner.len(), strips, following.0);
                        let panels = Panels::whole(panels, K::NR * k);
                        let packing = &mut NoOverlap;
                        compute_region::<E, C, K>(
                            &self.target,
                            &region,
                            &strips,
                            &panels,
                            sums,
                            packing,
                            &mut keep,
                        );
                    }
                }
                first = next;
            }
            is_packed = false;
        }
    }

    /// Location of a part's unfinished sums: the ones that came with the part, if any. Otherwise
    /// this thread's own, with room for `kept` panels, or for one tile if that is 0. A thread that
    /// received sums leaves its own in place, because sums of a part that it gave away lie there.
    fn sums_of(&self, part: &Part<K::Packed>, kept: usize, own: &mut ThreadBuffers) -> Sums {
        part.sums.unwrap_or_else(|| {
            let places = if kept == 0 { 1 } else { part.rows.len().div_ceil(K::MR) * kept };
            Sums { at: own.sums.room(places * K::MR * K::NR), panels: kept }
        })
    }

    /// Whether strips of blocks of `k` are read unpacked.
    fn reads_rows(&self, k: usize) -> bool {
        k.is_multiple_of(K::KQ) && K::reads_rows(self.a)
    }

    /// Computes step by step: panels of the next step are packed while those of the current one are
    /// used.
    unsafe fn step_by_step(
        &self,
        phase: &Phase,
        mut part: Part<K::Packed>,
        group: usize,
        own: &mut ThreadBuffers,
    ) {
        let blocks = self.plan.blocks;
        let (columns, _) = self.columns_of(phase, part.task);
        let steps = lookahead::steps(&columns, K::NR, group, blocks);
        let kept = if blocks.count == 1 { 0 } else { group };
        let sums = self.sums_of(&part, kept, own);
        let step_room = group * K::NR * blocks.len;
        let both_panels = own.panels.room::<K::Packed>(2 * step_room);
        let packed: [_; 2] = std::array::from_fn(|i| match part.packed {
            Some((_, packed)) => packed,
            None => both_panels.wrapping_add(i * step_room),
        });
        // A is read in place, except for rows that make no whole strip.
        let edge = own.strips.room(K::MR * blocks.len);
        let coming = |i: usize, tiles: usize| {
            let step = steps.get(i)?;
            let inner = blocks.range(step.block);
            let b = self.b.at(inner.start, step.columns.start);
            Some(NextPanels::<E, K>::new(b, step.columns.len(), inner.len(), packed[i % 2], tiles))
        };
        if part.packed.is_none()
            && let Some(first) = coming(part.block, 1)
        {
            // SAFETY: the caller's promise.
            unsafe { first.at_once() };
        }
        for (i, step) in steps.iter().enumerate().skip(part.block) {
            let is_last = i + 1 == steps.len();
            if part.packed.is_none() {
                self.halve(&mut part, i, sums);
            }
            let inner = blocks.range(step.block);
            let across = step.columns.len().div_ceil(K::NR);
            let mut next = coming(i + 1, part.rows.len().div_ceil(K::MR) * across);
            let following = match steps.get(i + 1) {
                Some(next) => self.a.at(part.rows.start, blocks.range(next.block).start),
                None => self.a.at(part.rows.end, 0),
            };
            let region = Region {
                rows: part.rows.clone(),
                columns: step.columns.clone(),
                k: inner.len(),
                is_first: step.block == 0,
                is_last: step.block + 1 == blocks.count,
            };
            let a = self.a.at(part.rows.start, inner.start);
            let panels = Panels::whole(packed[i % 2], K::NR * inner.len());
            let whole = Part { columns: step.columns.clone(), ..part.clone() };
            let lent = &mut own.lent;
            let mut keep = |left: Range<usize>| match is_last {
                true => self.halve_rest(
                    &whole,
                    (Order::ByStrips, left),
                    (i, sums),
                    Some(packed[i % 2]),
                    lent,
                ),
                false => left.end,
            };
            // SAFETY: the caller's promise.
            unsafe {
                let strips =
                    Strips::prepare::<K>(a, part.rows.len(), inner.len(), edge, following.0);
                let mut nothing = NoOverlap;
                let packing: &mut dyn Overlap<E, K::Packed> = match &mut next {
                    Some(next) => next,
                    None => &mut nothing,
                };
                compute_region::<E, C, K>(
                    &self.target,
                    &region,
                    &strips,
                    &panels,
                    sums,
                    packing,
                    &mut keep,
                );
            }
        }
    }

    /// Computes the blocks of the phase; their panels are packed already.
    unsafe fn compute_packed(
        &self,
        phase: &Phase,
        mut part: Part<K::Packed>,
        own: &mut ThreadBuffers,
    ) {
        let Plan { blocks, task_columns, .. } = self.plan;
        let (columns, across) = self.columns_of(phase, part.task);
        let (panels_across, panels_in_phase) =
            (columns.len().div_ceil(K::NR), phase.columns.len().div_ceil(K::NR));
        // If the panels of all blocks fit into L2, go strip by strip: then unfinished sums stay in
        // L2, too. Columns of A are packed for many strips at a time.
        let by_strips = self.sums.is_none() && self.plan.is_short && self.a.2 == 1;
        while !part.rows.is_empty() {
            let first_row = part.rows.start;
            if by_strips {
                self.halve(&mut part, phase.blocks.start, Sums::of_a_tile(std::ptr::null_mut()));
            }
            let end =
                if by_strips { (first_row + K::MR).min(part.rows.end) } else { part.rows.end };
            let mut some = Part { rows: first_row..end, ..part.clone() };
            let strips = some.rows.len().next_multiple_of(K::MR);
            let to = own.strips.room(strips * blocks.len);
            let sums = match self.sums {
                // Room for one tile, or for every tile.
                None if blocks.count == 1 => Sums::of_a_tile(own.sums.room(K::MR * K::NR)),
                None => self.sums_of(&some, panels_across, own),
                Some(all) => {
                    let tile = first_row / K::MR * panels_in_phase + across * task_columns / K::NR;
                    Sums { at: all.wrapping_add(tile * K::MR * K::NR), panels: panels_in_phase }
                }
            };
            for block in part.block..phase.blocks.end {
                if !by_strips {
                    self.halve(&mut some, block, sums);
                }
                let rows = some.rows.clone();
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
                // Panels are shared by all threads, and stay.
                let (may_give, lent) = (!by_strips && block + 1 == phase.blocks.end, &mut own.lent);
                let mut keep = |left: Range<usize>| match may_give {
                    true => {
                        self.halve_rest(&some, (Order::ByStrips, left), (block, sums), None, lent)
                    }
                    false => left.end,
                };
                // SAFETY: the caller's promise.
                unsafe {
                    let strips = Strips::prepare::<K>(a, rows.len(), inner.len(), to, following.0);
                    let panels = Panels::whole(panels, K::NR * k);
                    compute_region::<E, C, K>(
                        &self.target,
                        &region,
                        &strips,
                        &panels,
                        sums,
                        &mut NoOverlap,
                        &mut keep,
                    );
                }
            }
            part.rows.start = end;
        }
    }
}
