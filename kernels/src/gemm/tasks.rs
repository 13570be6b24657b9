//! What a thread does for a task: the loops over blocks of the inner dimension and what is packed for each, one function for each [`Way`].

use super::ahead::{self, Coming};
use super::beside::{self, Both, Nothing};
use super::buffer::Own;
use super::crew::{Crew, Part};
use super::driver::{Order, Panels, Region, Strips, Sums, compute_region, pack_panels};
use super::kernel::Kernel;
use super::plan::{Phase, Plan, Way};
use crate::float::Elem;

impl<E: Elem<Acc = f32>, C: Elem<Acc = f32>, K: Kernel<E>> Crew<E, C, K> {
    /// A part of a task, or all of it.
    ///
    /// # Safety
    /// As [`super::crew::run`], within [`Kernel::enter`].
    pub unsafe fn compute(&self, phase: &Phase, part: Part, own: &mut Own) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.plan.way {
                Way::Shared => self.compute_packed(phase, part, own),
                Way::Alone => self.block_by_block(phase, part, false, own),
                Way::Beside => self.block_by_block(phase, part, true, own),
                Way::Ahead { group } => self.step_by_step(phase, part, group, own),
            }
        }
    }

    /// Of all blocks, block by block: panels, strips and sums stay in this thread's L2 and are written there, before the products or beside them.
    unsafe fn block_by_block(&self, phase: &Phase, mut part: Part, packs_beside: bool, own: &mut Own) {
        let blocks = self.plan.blocks;
        let (columns, _) = self.columns_of(phase, part.task);
        let panels_across = columns.len().div_ceil(K::NR);
        // One tile's place, or a place for every tile.
        let kept = if blocks.count == 1 { 0 } else { panels_across };
        let strips = if kept == 0 { 1 } else { part.rows.len().div_ceil(K::MR) };
        let room = strips * kept.max(1) * K::MR * K::NR;
        let sums = part.sums.unwrap_or_else(|| own.sums.room(room));
        let some_rows = K::BLOCKING.mc.next_multiple_of(K::MR);
        let order = beside::order(part.rows.len(), columns.len());
        let [strips, panels] = if packs_beside {
            beside::room::<E, K>(part.rows.len(), columns.len(), blocks.len)
        } else {
            let rows = some_rows.min(part.rows.len().next_multiple_of(K::MR));
            [rows * blocks.len, panels_across * K::NR * blocks.len]
        };
        let (strips, panels) = (own.strips.room(strips), own.panels.room(panels));
        for block in part.block..blocks.count {
            self.halve(&mut part, block, sums, kept);
            let inner = blocks.range(block);
            let k = inner.len().next_multiple_of(K::KQ);
            let b = self.b.at(inner.start, columns.start);
            if !packs_beside {
                // SAFETY: the caller's promise.
                unsafe { pack_panels::<E, K>(b, columns.len(), inner.len(), panels) };
            }
            let (begin, is_last) = (part.rows.start, block + 1 == blocks.count);
            let sums_of = |row: usize| sums.wrapping_add((row - begin) * kept * K::NR);
            // Once no other block follows, some rows at a time, so that some can be given away; before that only as many as are packed at once.
            let all_at_once = packs_beside && (!is_last || order == Order::ByPanels);
            let together = if all_at_once { part.rows.len() } else { some_rows };
            let mut first = begin;
            while first < part.rows.end {
                if is_last && first > begin {
                    let mut rest = Part { task: part.task, rows: first..part.rows.end, block, sums: None };
                    self.halve(&mut rest, block, sums_of(first), kept);
                    part.rows.end = rest.rows.end;
                }
                let some = first..(first + together).min(part.rows.end);
                let a = self.a.at(first, inner.start);
                let region = Region { rows: some.clone(), columns: columns.clone(), k, is_first: block == 0, is_last };
                let sums = Sums { at: sums_of(first), panels: kept };
                // SAFETY: the caller's promise.
                unsafe {
                    if packs_beside {
                        let (a, b, to) = ((a, some.len()), (b, columns.len()), (strips, panels));
                        let mut both = Both::new::<K>(a, b, k, to, order, first > begin);
                        let (strips, panels) = both.begin::<K>();
                        compute_region::<E, C, K>(&self.target, &region, &strips, &panels, sums, &mut both);
                    } else {
                        let following = self.a.at(some.end, inner.start);
                        let strips = Strips::prepare::<K>(a, some.len(), inner.len(), strips, following.0);
                        let panels = Panels::whole(panels, K::NR * k);
                        compute_region::<E, C, K>(&self.target, &region, &strips, &panels, sums, &mut Nothing);
                    }
                }
                first = some.end;
            }
        }
    }

    /// Step by step: panels of the next step are packed while those of the present one are used.
    unsafe fn step_by_step(&self, phase: &Phase, mut part: Part, group: usize, own: &mut Own) {
        let blocks = self.plan.blocks;
        let (columns, _) = self.columns_of(phase, part.task);
        let steps = ahead::steps(&columns, K::NR, group, blocks);
        let kept = if blocks.count == 1 { 0 } else { group };
        let strips = if kept == 0 { 1 } else { part.rows.len().div_ceil(K::MR) };
        let room = strips * kept.max(1) * K::MR * K::NR;
        let sums = part.sums.unwrap_or_else(|| own.sums.room(room));
        let step_room = group * K::NR * blocks.len;
        let panels = own.panels.room::<K::Packed>(2 * step_room);
        // A is read in place, but for rows that make no whole strip.
        let edge = own.strips.room(K::MR * blocks.len);
        let coming = |i: usize, tiles: usize| {
            let step = steps.get(i)?;
            let inner = blocks.range(step.block);
            let b = self.b.at(inner.start, step.columns.start);
            let to = panels.wrapping_add(i % 2 * step_room);
            Some(Coming::<E, K>::new(b, step.columns.len(), inner.len(), to, tiles))
        };
        if let Some(first) = coming(part.block, 1) {
            // SAFETY: the caller's promise.
            unsafe { first.at_once() };
        }
        for (i, step) in steps.iter().enumerate().skip(part.block) {
            self.halve(&mut part, i, sums, kept);
            let inner = blocks.range(step.block);
            let across = step.columns.len().div_ceil(K::NR);
            let next = coming(i + 1, part.rows.len().div_ceil(K::MR) * across);
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
            let panels = Panels::whole(panels.wrapping_add(i % 2 * step_room), K::NR * inner.len());
            let sums = Sums { at: sums, panels: kept };
            // SAFETY: the caller's promise.
            unsafe {
                let strips = Strips::prepare::<K>(a, part.rows.len(), inner.len(), edge, following.0);
                match next {
                    Some(mut next) => {
                        compute_region::<E, C, K>(&self.target, &region, &strips, &panels, sums, &mut next);
                    }
                    None => compute_region::<E, C, K>(&self.target, &region, &strips, &panels, sums, &mut Nothing),
                }
            }
        }
    }

    /// Of the blocks of the phase, whose panels are packed.
    unsafe fn compute_packed(&self, phase: &Phase, mut part: Part, own: &mut Own) {
        let Plan { blocks, task_columns, .. } = self.plan;
        let (columns, across) = self.columns_of(phase, part.task);
        let (panels_across, panels_in_phase) = (columns.len().div_ceil(K::NR), phase.columns.len().div_ceil(K::NR));
        // Where the panels of all blocks stay in L2, strip by strip: then unfinished sums stay there too. Columns of A are packed
        // for many strips at a time.
        let by_strips = self.sums.is_none() && self.plan.is_short && self.a.2 == 1;
        while !part.rows.is_empty() {
            let first_row = part.rows.start;
            if by_strips {
                self.halve(&mut part, phase.blocks.start, std::ptr::null_mut(), 0);
            }
            let end = if by_strips { (first_row + K::MR).min(part.rows.end) } else { part.rows.end };
            let mut some = Part { task: part.task, rows: first_row..end, block: part.block, sums: part.sums };
            let strips = some.rows.len().next_multiple_of(K::MR);
            let to = own.strips.room(strips * blocks.len);
            let sums = match self.sums {
                // One tile's place, or a place for every tile.
                None if blocks.count == 1 => Sums { at: own.sums.room(K::MR * K::NR), panels: 0 },
                None => {
                    let at = part.sums.unwrap_or_else(|| own.sums.room(strips * task_columns));
                    Sums { at, panels: panels_across }
                }
                Some(all) => {
                    let tile = first_row / K::MR * panels_in_phase + across * task_columns / K::NR;
                    Sums { at: all.wrapping_add(tile * K::MR * K::NR), panels: panels_in_phase }
                }
            };
            for block in part.block..phase.blocks.end {
                if !by_strips {
                    self.halve(&mut some, block, sums.at, sums.panels);
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
                // SAFETY: the caller's promise.
                unsafe {
                    let strips = Strips::prepare::<K>(a, rows.len(), inner.len(), to, following.0);
                    compute_region::<E, C, K>(
                        &self.target,
                        &region,
                        &strips,
                        &Panels::whole(panels, K::NR * k),
                        sums,
                        &mut Nothing,
                    );
                }
            }
            part.rows.start = end;
        }
    }
}
