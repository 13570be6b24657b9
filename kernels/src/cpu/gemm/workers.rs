//! The threads of a product, and their work.
//!
//! Threads draw numbered items ([`WorkQueue`]): for each phase, first the items that pack B, then
//! those that compute tasks; for a task, a thread packs A itself. A thread that draws an item waits
//! until all items of earlier stages are done. Running threads hold those items, so a thread that
//! comes late, or not at all, delays nothing, and a product costs one fork and join. Once all items
//! are drawn, threads without items help the others ([`WorkSharing`]).

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::buffer::{SharedBuffers, with_shared_buffers, with_thread_buffers};
use super::driver::{First, Order, Sums, Target, pack_panels};
use super::kernel::Kernel;
use super::plan::{Packing, Phase, Plan, TOGETHER};
use super::work_sharing::{WorkSharing, or_end_process, wait_until};
use super::{Call, Mat, lookahead, overlap};
use crate::tensor::element::Elem;
use crate::tensor::parallel::{self, WorkQueue};

/// Fewest strips of a task that is halved. The receiving thread may have to pack panels for its
/// half, which costs as much as two strips.
const LEAST_STRIPS: usize = 8;
/// Fewest tiles for halving: half is given to a thread that finds everything packed.
const LEAST_TILES: usize = 8;

/// # Safety
/// The product's memory is as for [`super::gemm`]; the machine has the kernel's instruction set.
pub unsafe fn run<E: Elem<Acc = f32>, C: Elem<Acc = f32>, K: Kernel<E>>(call: Call<'_, E, C>) {
    let Call { shape, dst, start, plus, a, b, scale, threads } = call;
    let (m, n, k) = shape;
    let blocking = K::blocking();
    let threads = if 2 * m * n * k < blocking.alone { 1 } else { threads };
    let packs_a = !(k.is_multiple_of(K::KQ) && K::reads_rows(a));
    let packing = match packs_a {
        true if overlap::is_possible::<E, K>(a, b, k) => Packing::Overlap,
        true => Packing::OverlapBoth,
        false if blocking.in_place.packs_ahead && lookahead::pays::<E, K>(b, n * k, m) => {
            Packing::Ahead
        }
        false => Packing::Panels,
    };
    let plan = Plan::new(shape, (K::MR, K::NR), size_of::<K::Packed>(), blocking, packing, threads);
    with_shared_buffers(|SharedBuffers { panels, sums, bias }| {
        let workers = Workers::<E, C, K> {
            rows: m,
            a,
            b,
            target: Target { dst, first: First::new(start, n, K::NR, bias), plus, scale },
            panels: panels.room(plan.panel_elements),
            sums: plan
                .sums_outlast_phases()
                .then(|| sums.room(m.next_multiple_of(K::MR) * plan.phase_columns)),
            stages: plan
                .phases
                .iter()
                .map(|phase| {
                    [&phase.packing, &phase.computing]
                        .map(|items| WorkQueue::new(items.len(), threads))
                })
                .collect(),
            plan,
            done: AtomicUsize::new(0),
            sharing: WorkSharing::new(),
        };
        if threads == 1 {
            workers.work(0);
        } else {
            parallel::on_threads(threads, |thread| or_end_process(|| workers.work(thread)));
        }
    });
}

/// Shared by the threads of a product.
pub struct Workers<E, C, K: Kernel<E>>
where
    E: Elem<Acc = f32>,
{
    rows: usize,
    pub a: Mat<*const E>,
    pub b: Mat<*const E>,
    pub target: Target<C>,
    pub plan: Plan,
    panels: *mut K::Packed,
    /// The sums of all tasks, if sums outlast a phase.
    pub sums: Option<*mut f32>,
    /// For every phase, the items that pack and those that compute.
    stages: Vec<[WorkQueue; 2]>,
    done: AtomicUsize,
    sharing: WorkSharing<Part<K::Packed>>,
}

/// Rows and columns of a task, from one block of the inner dimension on, or from one of its steps
/// ([`super::lookahead`]); a step has its own columns.
#[derive(Clone)]
pub struct Part<P> {
    /// Index of the task within its phase.
    pub task: usize,
    pub rows: Range<usize>,
    pub columns: Range<usize>,
    pub block: usize,
    /// Location of the unfinished sums, if there are any and another thread keeps them.
    pub sums: Option<Sums>,
    /// Set if another thread has packed the last block, or step: the order of tiles, and the packed
    /// operand that this order keeps. These are panels from the first column on, or strips from the
    /// first row on.
    pub packed: Option<(Order, *mut P)>,
}

// SAFETY: items, and parts of items, write disjoint parts of the panels, of the sums and of dst.
// They read panels only after all were packed. The sums of a part stay in place until every part is
// computed.
unsafe impl<E: Elem<Acc = f32>, C, K: Kernel<E>> Sync for Workers<E, C, K> {}

impl<E: Elem<Acc = f32>, C: Elem<Acc = f32>, K: Kernel<E>> Workers<E, C, K> {
    /// Takes items until there are none, then parts of other threads' items until all is computed.
    fn work(&self, thread: usize) {
        let items = self.plan.items();
        let is_done = || self.done.load(Ordering::Acquire) == items;
        let Some(last) = self.plan.phases.last() else { return };
        if is_done() {
            return;
        }
        with_thread_buffers(|own| {
            // SAFETY: the machine has the instruction set; `leave` follows.
            unsafe { K::enter() };
            for (phase, [packing, computing]) in self.plan.phases.iter().zip(&self.stages) {
                // Once items of earlier stages are done, panels are free for writing, or complete.
                packing.take_all(thread, |item| {
                    self.wait_for(phase.packing.start);
                    // SAFETY: the caller's promise.
                    unsafe { self.pack(phase, item) };
                    self.done.fetch_add(1, Ordering::Release);
                });
                computing.take_all(thread, |task| {
                    self.wait_for(phase.computing.start);
                    let (columns, _) = self.columns_of(phase, task);
                    let (rows, block) = (self.rows_of(phase, task), phase.blocks.start);
                    let part = Part { task, rows, columns, block, sums: None, packed: None };
                    // SAFETY: the caller's promise.
                    unsafe { self.compute(phase, part, own) };
                    self.done.fetch_add(1, Ordering::Release);
                });
            }
            // A part is given only once all items are drawn; its panels are complete then.
            while let Some(part) = self.sharing.take(is_done) {
                own.keep_lent();
                // SAFETY: the caller's promise.
                unsafe { self.compute(last, part, own) };
                self.sharing.finished();
            }
            own.all_is_back();
            // SAFETY: after `enter`.
            unsafe { K::leave() };
        });
    }

    /// Waits until the first `items` items are done. Later items cannot be done before them.
    fn wait_for(&self, items: usize) {
        wait_until(|| self.done.load(Ordering::Acquire) >= items);
    }

    /// Whether no thread will draw another item.
    fn is_empty(&self) -> bool {
        self.stages.last().is_none_or(|[_, computing]| computing.is_empty())
    }

    /// Gives the second half of `part` to a waiting thread, if there is one. All of the part is at
    /// the beginning of `block`, and its unfinished sums are at `sums`. This thread keeps those
    /// sums until everything is computed, so it gives nothing while it may still draw another item.
    pub fn halve(&self, part: &mut Part<K::Packed>, block: usize, sums: Sums) {
        if part.rows.len().div_ceil(K::MR) < LEAST_STRIPS {
            return;
        }
        let begin = part.rows.start;
        part.rows.end = self.keep(part.rows.clone(), K::MR, |rows| {
            let sums = sums.of_all().then(|| sums.from((rows.start - begin, 0), (K::MR, K::NR)));
            Part { rows, block, sums, packed: None, ..part.clone() }
        });
    }

    /// As [`Workers::halve`], for the remaining range `left` while the last block, or step, of a
    /// part is computed in `order`. If tasks pack their own operands, the kept operand is at
    /// `packed`, from the part's first row or column on, and becomes `lent`. Returns the end of the
    /// range that stays.
    pub fn halve_rest(
        &self,
        part: &Part<K::Packed>,
        (order, left): (Order, Range<usize>),
        (block, sums): (usize, Sums),
        packed: Option<*mut K::Packed>,
        lent: &mut bool,
    ) -> usize {
        let (unit, across) = match order {
            Order::ByStrips => (K::MR, part.columns.len().div_ceil(K::NR)),
            Order::ByPanels => (K::NR, part.rows.len().div_ceil(K::MR)),
        };
        let units = left.len().div_ceil(unit);
        if !self.sharing.is_wanted() || units < 2 || units * across < LEAST_TILES {
            return left.end;
        }
        self.keep(left, unit, |given| {
            *lent = packed.is_some();
            let (rows, columns) = match order {
                Order::ByStrips => (given, part.columns.clone()),
                Order::ByPanels => (part.rows.clone(), given),
            };
            let (down, right) = (rows.start - part.rows.start, columns.start - part.columns.start);
            let sums = sums.of_all().then(|| sums.from((down, right), (K::MR, K::NR)));
            Part {
                task: part.task,
                rows,
                columns,
                block,
                sums,
                packed: packed.map(|packed| (order, packed)),
            }
        })
    }

    /// Gives the second half of `all`, in whole units, to a waiting thread, if there is one; `part`
    /// makes the part. Returns the end of the range that stays.
    fn keep(
        &self,
        all: Range<usize>,
        unit: usize,
        part: impl FnOnce(Range<usize>) -> Part<K::Packed>,
    ) -> usize {
        let middle = all.start + all.len().div_ceil(unit).div_ceil(2) * unit;
        if self.is_empty() && self.sharing.give(|| part(middle..all.end)) {
            middle
        } else {
            all.end
        }
    }

    /// Address of the panels of a block of the phase; each has `k · NR` elements.
    pub fn panels_of(&self, phase: &Phase, block: usize) -> *mut K::Packed {
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

    /// Number of tasks side by side.
    fn tasks_across(&self, phase: &Phase) -> usize {
        phase.columns.len().div_ceil(self.plan.task_columns)
    }

    fn rows_of(&self, phase: &Phase, task: usize) -> Range<usize> {
        let (rows, down) = (self.plan.task_rows, task / self.tasks_across(phase));
        down * rows..((down + 1) * rows).min(self.rows)
    }

    /// Columns of a task, and its index across the phase.
    pub fn columns_of(&self, phase: &Phase, task: usize) -> (Range<usize>, usize) {
        let (columns, across) = (self.plan.task_columns, task % self.tasks_across(phase));
        let first = phase.columns.start + across * columns;
        (first..(first + columns).min(phase.columns.end), across)
    }
}
