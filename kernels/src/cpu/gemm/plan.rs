//! Partitions a product: into blocks of the inner dimension, phases that share panels of B, and
//! tasks within a phase.

use std::ops::Range;

use super::driver::Order;
use super::kernel::{Blocking, PIECE};
use super::overlap;

/// Approximate bytes of B's panels that are made and used at a time: the part of the last-level
/// cache that they can take.
const PANEL_BYTES: usize = 8 << 20;
/// Least number of columns of a phase, if there are that many, so that each strip of A is packed
/// for many columns.
const PHASE_COLUMNS: usize = 1024;
/// Panels, or strips, that are packed together. Where they lie side by side in rows, the pieces of
/// rows are then long enough for the hardware prefetcher.
pub const TOGETHER: usize = 8;
/// Most unfinished sums of a task that packs everything alone: half of an L2 of 2 MiB. (With an L2
/// of 1 MiB, half as many made no difference.)
const SUMS_ALONE: usize = 256 << 10;
/// Relative costs of packing an element: into panels that threads share, which are not in the
/// thread's caches; and of A, where strips cut cache lines. The unit is packing into panels that
/// stay in L2 (measured on Sapphire Rapids: 21, 10 and 7 cycles per line).
const SHARED_COST: f64 = 3.0;
const STRIP_COST: f64 = 1.5;
/// As `SUMS_ALONE`, for tasks that pack between their products and need less L2 for operands.
const SUMS_OVERLAPPED: usize = 320 << 10;
/// Cost of packing an element between products, for the operand that is packed little by little.
/// The other operand costs as much as alone.
const OVERLAP_COST: f64 = 0.25;
/// Cost of reading an element of unpacked A from outside the thread's caches during products. It is
/// small because the element is prefetched.
const READ_COST: f64 = 0.25;
/// Additional cost, once per reading thread. Rows of A, and of results computed from them, are best
/// left to the thread that made them. (On Zen 4, products partitioned by rows are 1 to 3% faster
/// than those partitioned by columns, although each thread then has to pack all panels.)
const READER_COST: f64 = 0.4;
/// Most bytes of the panels of a step, unless one panel takes more. Two steps' panels exist at a
/// time.
const STEP_BYTES: usize = 200 << 10;
/// Tasks per thread from which on an uneven distribution does not matter.
const MANY_TASKS: usize = 8;

/// The inner dimension of length `k` in blocks of equal length; the last one may be shorter.
/// Depends only on `k` and the kernel's blocking, because it decides the order of summation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    pub k: usize,
    pub len: usize,
    pub count: usize,
}

impl Blocks {
    /// Blocks of at most `kc`, or one block of at most `once`.
    pub fn new(k: usize, kc: usize, once: usize) -> Self {
        let count = if k <= once { 1 } else { k.div_ceil(kc) };
        let len = k.div_ceil(count).next_multiple_of(PIECE).max(PIECE);
        Self { k, len, count: k.div_ceil(len).max(1) }
    }

    pub fn range(&self, block: usize) -> Range<usize> {
        block * self.len..((block + 1) * self.len).min(self.k)
    }
}

/// The operands that have to be packed, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// B: strips of A are read unpacked.
    Panels,
    /// B, and the kernel prefetches memory that is packed soon.
    Ahead,
    /// Both operands.
    OverlapBoth,
    /// Both, and the kernel can pack between its products.
    Overlap,
}

/// Columns × blocks of B with panels that are in memory together. The panels are first packed, then
/// used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    pub columns: Range<usize>,
    pub blocks: Range<usize>,
    /// Numbers of the items that pack (by block, then by group of panels), among the items of all
    /// phases.
    pub packing: Range<usize>,
    /// Numbers of the items that compute (by rows, then by columns).
    pub computing: Range<usize>,
}

/// How tasks get their packed operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// All threads pack panels, before the tasks that use them.
    Shared,
    /// Tasks cover the whole inner dimension and pack everything themselves, block by block.
    Alone,
    /// As `Alone`, but packing runs between the products ([`super::overlap`]).
    Overlap,
    /// Tasks cover the whole inner dimension. Panels are packed ahead of their use, at most `group`
    /// at a time ([`super::lookahead`]).
    Ahead { group: usize },
}

#[derive(Debug)]
pub struct Plan {
    pub blocks: Blocks,
    pub phases: Vec<Phase>,
    /// Rows of a task, a multiple of MR if panels are shared.
    pub task_rows: usize,
    /// Columns of a task, a multiple of NR.
    pub task_columns: usize,
    pub way: Strategy,
    /// Whether the panels of a task, over all blocks, fit into L2 together.
    pub is_short: bool,
    /// Columns of the widest phase, a multiple of NR.
    pub phase_columns: usize,
    /// Elements of the panels of the largest phase.
    pub panel_elements: usize,
}

impl Plan {
    /// Plans for tiles of `mr` × `nr` and packed elements of `size` bytes.
    pub fn new(
        (m, n, k): (usize, usize, usize),
        (mr, nr): (usize, usize),
        size: usize,
        blocking: Blocking,
        packing: Packing,
        threads: usize,
    ) -> Self {
        let blocks = Blocks::new(k, blocking.kc, blocking.once);
        let budget = PANEL_BYTES / size;
        let columns = equal_parts(n, nr, (budget / (blocks.count * blocks.len)).max(PHASE_COLUMNS));
        let together = equal_parts(blocks.count, 1, (budget / (columns * blocks.len)).max(1));
        let whole = blocking.whole / (size * blocks.count * blocks.len) / nr * nr;
        let task_columns = equal_parts(columns, nr, blocking.nc.max(whole));
        let tasks_across = columns.div_ceil(task_columns);
        let strips = m.div_ceil(mr);
        let rows_per_task = (1..=strips)
            .skip(m.div_ceil(blocking.mc.max(mr)).max(1) - 1)
            .map(|tasks| strips.div_ceil(tasks))
            .find(|&each| is_even(strips.div_ceil(each) * tasks_across, threads));
        let task_rows = mr * rows_per_task.unwrap_or(1);

        if packing == Packing::Ahead {
            return Self::ahead((m, n), (mr, nr), size, (blocks, blocking.in_place.sums), threads);
        }
        let packs_a = packing != Packing::Panels;
        if blocking.panels_alone || packs_a && blocks.count > 1 {
            let strip = if packs_a { STRIP_COST } else { READ_COST };
            let shared = SHARED_COST * n as f64
                + strip * (m * tasks_across * n.div_ceil(columns)) as f64
                + if packs_a { 0.0 } else { READER_COST * m as f64 };
            if let Some(plan) =
                Self::alone((m, n), (mr, nr), blocks, blocking, threads, packing, (strip, shared))
            {
                return plan;
            }
        }

        let mut phases = Vec::new();
        let mut item = 0;
        for first in (0..n).step_by(columns) {
            for block in (0..blocks.count).step_by(together) {
                let columns = first..(first + columns).min(n);
                let blocks = block..(block + together).min(blocks.count);
                let packed = item + columns.len().div_ceil(nr * TOGETHER) * blocks.len();
                let computed =
                    packed + m.div_ceil(task_rows) * columns.len().div_ceil(task_columns);
                phases.push(Phase {
                    columns,
                    blocks,
                    packing: item..packed,
                    computing: packed..computed,
                });
                item = computed;
            }
        }
        Self {
            blocks,
            phases,
            task_rows,
            task_columns,
            way: Strategy::Shared,
            is_short: task_columns <= whole,
            phase_columns: columns,
            panel_elements: columns * together * blocks.len,
        }
    }

    /// Tasks that pack alone, if their packing costs less than `most` per element of the inner
    /// dimension. A row of A costs `strip`.
    fn alone(
        (m, n): (usize, usize),
        (mr, nr): (usize, usize),
        blocks: Blocks,
        blocking: Blocking,
        threads: usize,
        packing: Packing,
        (strip, most): (f64, f64),
    ) -> Option<Self> {
        let (strips, panels) = (m.div_ceil(mr), n.div_ceil(nr));
        let sums = match packing {
            Packing::Overlap => SUMS_OVERLAPPED,
            Packing::Panels => blocking.in_place.sums,
            _ => SUMS_ALONE,
        };
        let mut best = (most, None);
        for across in 1..=panels {
            let columns = panels.div_ceil(across) * nr;
            if packing != Packing::Overlap && columns > blocking.nc_alone.max(nr) {
                continue;
            }
            for down in 1..=strips {
                let rows = strips.div_ceil(down) * mr;
                let (down, across) = (m.div_ceil(rows), n.div_ceil(columns));
                let (panels, strips) = ((n * down) as f64, strip * (m * across) as f64);
                // Size of the operand that stays packed, and the cost of packing.
                let (kept, cost) = match (packing, overlap::order(rows, columns)) {
                    (Packing::Overlap, Order::ByStrips) => {
                        (columns, panels + OVERLAP_COST * strips)
                    }
                    (Packing::Overlap, Order::ByPanels) => (rows, OVERLAP_COST * panels + strips),
                    (Packing::Panels, _) => {
                        let readers = threads.div_ceil(down).min(across);
                        (columns, panels + strips + READER_COST * (m * readers) as f64)
                    }
                    _ => (columns, panels + strips),
                };
                // More tasks down cost more, with two exceptions: the kept operand may change, and
                // threads may no longer share rows.
                let least = if packing == Packing::Overlap {
                    OVERLAP_COST * panels
                } else {
                    panels + strips
                };
                if least >= best.0 {
                    break;
                }
                if kept > blocking.nc_alone.max(nr) || cost >= best.0 {
                    continue;
                }
                if is_even(down * across, threads) && (blocks.count == 1 || rows * columns <= sums)
                {
                    best = (cost, Some((rows, columns)));
                }
            }
        }
        let way = if packing == Packing::Overlap { Strategy::Overlap } else { Strategy::Alone };
        Some(Self::of_whole((m, n), nr, blocks, way, best.1?))
    }

    /// Tasks that pack panels ahead.
    fn ahead(
        (m, n): (usize, usize),
        (mr, nr): (usize, usize),
        size: usize,
        (blocks, sums): (Blocks, usize),
        threads: usize,
    ) -> Self {
        let (strips, panels) = (m.div_ceil(mr), n.div_ceil(nr));
        let group = (STEP_BYTES / (nr * blocks.len * size)).clamp(1, panels);
        let least_down =
            if blocks.count == 1 { 1 } else { strips.div_ceil((sums / (group * nr * mr)).max(1)) };
        let (mut least, mut tasks) = (f64::INFINITY, (mr, nr));
        for across in 1..=panels.min(MANY_TASKS * threads) {
            for down in least_down..=strips.min(least_down * MANY_TASKS * threads) {
                let (rows, columns) = (strips.div_ceil(down) * mr, panels.div_ceil(across) * nr);
                let (down, across) = (m.div_ceil(rows), n.div_ceil(columns));
                let cost = OVERLAP_COST * (n * down) as f64 + READ_COST * (m * across) as f64;
                if is_even(down * across, threads) && cost < least {
                    (least, tasks) = (cost, (rows, columns));
                }
            }
        }
        Self::of_whole((m, n), nr, blocks, Strategy::Ahead { group }, tasks)
    }

    /// Tasks of `rows` × `columns` and the whole inner dimension.
    fn of_whole(
        (m, n): (usize, usize),
        nr: usize,
        blocks: Blocks,
        way: Strategy,
        (rows, columns): (usize, usize),
    ) -> Self {
        let down = m.div_ceil(rows);
        let tasks = down * n.div_ceil(columns);
        Self {
            blocks,
            phases: vec![Phase {
                columns: 0..n,
                blocks: 0..blocks.count,
                packing: 0..0,
                computing: 0..tasks,
            }],
            // Rows are equal to within one: a few edge rows in each task cost less than one more
            // strip in some.
            task_rows: m.div_ceil(down),
            task_columns: columns,
            way,
            is_short: false,
            phase_columns: n.next_multiple_of(nr),
            panel_elements: 0,
        }
    }

    /// Whether the inner dimension spans several phases.
    pub fn sums_outlast_phases(&self) -> bool {
        self.phases.iter().any(|phase| phase.blocks.len() < self.blocks.count)
    }

    pub fn items(&self) -> usize {
        self.phases.last().map_or(0, |phase| phase.computing.end)
    }
}

/// Whether all threads get equally many tasks, or so many that the difference does not matter.
fn is_even(tasks: usize, threads: usize) -> bool {
    tasks.is_multiple_of(threads) || tasks >= MANY_TASKS * threads
}

/// The size of equal parts of `n`: at most `most` each, and multiples of `unit`.
fn equal_parts(n: usize, unit: usize, most: usize) -> usize {
    n.div_ceil(n.div_ceil(most.max(unit)).max(1)).next_multiple_of(unit).max(unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::gemm::kernel::InPlace;

    const SHARED: Blocking = Blocking {
        kc: 384,
        once: 384,
        mc: 252,
        nc: 256,
        nc_alone: 512,
        panels_alone: false,
        in_place: InPlace::AHEAD,
        whole: 0,
        alone: 0,
    };
    /// The blocking of a kernel with tasks that pack their own panels.
    const ALONE: Blocking = Blocking { panels_alone: true, ..SHARED };

    #[test]
    fn blocks_cover_the_inner_dimension_and_none_is_longer_than_asked() {
        for k in 0..3000 {
            let blocks = Blocks::new(k, 512, 704);
            assert!(
                blocks.len.is_multiple_of(PIECE)
                    && if k <= 704 { blocks.count == 1 } else { blocks.len <= 512 }
            );
            let mut next = 0;
            for block in 0..blocks.count {
                let range = blocks.range(block);
                assert!(range.start == next && (k == 0 || !range.is_empty()));
                next = range.end;
            }
            assert_eq!(next, k);
        }
    }

    #[test]
    fn phases_cover_all_columns_and_blocks_and_keep_to_the_panels_memory() {
        for shape in
            [(1, 1, 1), (2048, 384, 1152), (1024, 50304, 768), (1024, 768, 50304), (7, 3000, 9000)]
        {
            for threads in [1, 2, 3, 7, 64] {
                let plan = Plan::new(shape, (14, 32), 4, SHARED, Packing::Panels, threads);
                let mut cells = 0;
                let mut item = 0;
                for phase in &plan.phases {
                    cells += phase.columns.len() * phase.blocks.len();
                    let padded = phase.columns.len().next_multiple_of(32);
                    assert!(padded * phase.blocks.len() * plan.blocks.len <= plan.panel_elements);
                    assert_eq!(phase.packing.start, item);
                    assert_eq!(phase.computing.start, phase.packing.end);
                    item = phase.computing.end;
                }
                assert_eq!(cells, shape.1 * plan.blocks.count);
                assert!(
                    plan.panel_elements * 4 <= 2 * PANEL_BYTES,
                    "{shape:?}: {}",
                    plan.panel_elements
                );
            }
        }
    }

    #[test]
    fn two_threads_get_as_many_tasks_each_unless_there_are_many() {
        for shape in [(2048, 384, 384), (2048, 1152, 384), (1152, 384, 2048), (768, 768, 1024)] {
            let plan = Plan::new(shape, (14, 32), 4, SHARED, Packing::Panels, 2);
            let tasks = plan.phases[0].computing.len();
            assert!(tasks.is_multiple_of(2) || tasks >= 16, "{shape:?}: {tasks}");
        }
    }

    #[test]
    fn tasks_that_pack_beside_and_ahead_cover_the_product_evenly_and_keep_their_sums_in_cache() {
        for shape in [
            (1152, 384, 2048),
            (384, 1536, 2048),
            (8192, 384, 512),
            (3072, 768, 1024),
            (2048, 1152, 384),
        ] {
            for threads in [1, 2, 3, 7] {
                for packing in [Packing::Overlap, Packing::Ahead] {
                    let plan = Plan::new(shape, (14, 32), 4, ALONE, packing, threads);
                    let (rows, columns) = (plan.task_rows, plan.task_columns);
                    let tasks = shape.0.div_ceil(rows) * shape.1.div_ceil(columns);
                    assert_eq!(plan.items(), tasks, "{shape:?}");
                    assert!(
                        tasks.is_multiple_of(threads) || tasks >= 8 * threads,
                        "{shape:?}: {tasks}"
                    );
                    assert!(
                        rows == shape.0.div_ceil(shape.0.div_ceil(rows)),
                        "{shape:?}: {rows} rows are no equal part"
                    );
                    assert!(columns.is_multiple_of(32));
                    let (kept, sums) = match plan.way {
                        Strategy::Overlap => {
                            (rows.min(columns) <= 512, rows * columns <= SUMS_OVERLAPPED)
                        }
                        Strategy::Ahead { group } => (
                            group * 32 * plan.blocks.len * 4 <= STEP_BYTES,
                            rows * group * 32 <= ALONE.in_place.sums,
                        ),
                        way => panic!("{way:?}"),
                    };
                    assert!(
                        kept && (sums || plan.blocks.count == 1),
                        "{shape:?}, {threads} threads: {plan:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn long_inner_dimensions_beside_few_columns_are_cut_so_that_no_panel_is_packed_twice() {
        let plan = |shape| Plan::new(shape, (14, 32), 4, ALONE, Packing::Panels, 2);
        let logits = plan((512, 384, 8192));
        assert_eq!((logits.way, logits.items()), (Strategy::Alone, 2));
        assert!(logits.task_rows >= 512 && logits.task_columns == 192);
        // Sums of half of 2048 rows and 192 columns would not fit into L2.
        assert_eq!(plan((2048, 384, 1536)).way, Strategy::Shared);
    }

    #[test]
    fn rows_that_are_read_in_place_are_cut_before_columns_unless_they_are_few() {
        let plan = |shape| Plan::new(shape, (14, 32), 2, ALONE, Packing::Panels, 2);
        for shape in [(2048, 384, 384), (2048, 640, 384), (2048, 1152, 384)] {
            let plan = plan(shape);
            assert_eq!((plan.way, plan.task_rows), (Strategy::Alone, shape.0 / 2), "{shape:?}");
        }
        assert_eq!(
            plan((512, 384, 384)).task_rows,
            512,
            "packing all panels twice costs more than reading so few rows twice"
        );
    }

    #[test]
    fn a_threads_rows_are_one_task_where_as_many_sums_may_be_unfinished() {
        let plan = |in_place| {
            Plan::new(
                (2048, 384, 1536),
                (14, 32),
                4,
                Blocking { in_place, ..ALONE },
                Packing::Panels,
                2,
            )
        };
        let (few, many) = (plan(InPlace::AHEAD), plan(InPlace::ALONE));
        assert_eq!((many.way, many.task_rows, many.task_columns), (Strategy::Alone, 1024, 384));
        assert_eq!(few.way, Strategy::Shared);
    }

    #[test]
    fn tasks_that_pack_alone_cover_the_product_evenly_and_keep_their_sums_in_cache() {
        let mut alone = 0;
        for shape in [
            (1152, 384, 2048),
            (384, 1536, 2048),
            (8192, 384, 2048),
            (768, 768, 1024),
            (50304, 768, 1024),
            (65, 33, 4000),
            (2048, 1152, 384),
            (512, 8192, 384),
        ] {
            for threads in [1, 2, 3, 7] {
                let plan = Plan::new(
                    shape,
                    (14, 32),
                    4,
                    ALONE,
                    if shape.2 > 384 { Packing::OverlapBoth } else { Packing::Panels },
                    threads,
                );
                if plan.way == Strategy::Shared {
                    let once = plan.blocks.count == 1;
                    assert!(
                        !once || threads > 2,
                        "{shape:?}: panels of one block are packed by those who use them"
                    );
                    continue;
                }
                alone += 1;
                let tasks = shape.0.div_ceil(plan.task_rows) * shape.1.div_ceil(plan.task_columns);
                assert_eq!(plan.items(), tasks, "{shape:?}");
                assert!(
                    tasks.is_multiple_of(threads) || tasks >= 8 * threads,
                    "{shape:?}: {tasks}"
                );
                let keeps_sums = plan.blocks.count > 1;
                assert!(
                    !keeps_sums || plan.task_rows * plan.task_columns <= SUMS_ALONE,
                    "{shape:?}"
                );
                assert!(plan.task_columns <= ALONE.nc_alone);
                assert!(plan.task_columns.is_multiple_of(32));
            }
        }
        assert!(alone >= 8, "{alone}");
    }
}
