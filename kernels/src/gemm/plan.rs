//! How a product is cut: blocks of the inner dimension, phases that share panels of B, and tasks of a phase.

use std::ops::Range;

use super::kernel::{Blocking, PIECE};

/// Bytes of B's panels that are made and used at a time, about: what the last level of cache holds beside other things.
const PANEL_BYTES: usize = 8 << 20;
/// Columns that a phase has at least, if there are so many, so that each strip of A is packed for many columns.
const PHASE_COLUMNS: usize = 1024;
/// Panels, or strips, that are packed together: where they lie side by side in rows, rows are read in pieces long enough for the hardware to
/// fetch ahead.
pub const TOGETHER: usize = 8;
/// Unfinished sums of a task whose thread packs all of it alone, at most: half of a second-level cache of 2 MiB. (With one of 1 MiB, half
/// as many made no difference.)
const SUMS_ALONE: usize = 256 << 10;
/// What it costs to pack an element into panels that threads share, which are not in the thread's caches, and of A, where cache lines are
/// cut at strips, for one packed into panels that stay in L2 (measured on Sapphire Rapids: 21, 10 and 7 cycles a line).
const SHARED_COST: f64 = 3.0;
const STRIP_COST: f64 = 1.5;
/// What it costs to read an element of A where it lies, out of the thread's caches, while it is multiplied: little, since it is fetched ahead.
const READ_COST: f64 = 0.25;
/// Tasks per thread from which on it does not matter whether all threads get as many.
const MANY_TASKS: usize = 8;

/// The inner dimension of length `k` in blocks of equal length, the last one shorter. Depends on nothing but `k` and `kc`, since
/// it decides the order of summation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    pub k: usize,
    pub len: usize,
    pub count: usize,
}

impl Blocks {
    pub fn new(k: usize, kc: usize) -> Self {
        let len = k.div_ceil(k.div_ceil(kc).max(1)).next_multiple_of(PIECE).max(PIECE);
        Self { k, len, count: k.div_ceil(len).max(1) }
    }

    pub fn range(&self, block: usize) -> Range<usize> {
        block * self.len..((block + 1) * self.len).min(self.k)
    }
}

/// Columns × blocks of B whose panels are in memory together. First they are packed, then they are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    pub columns: Range<usize>,
    pub blocks: Range<usize>,
    /// Numbers of the items that pack (by block, then by group of panels), among the items of all phases.
    pub packing: Range<usize>,
    /// Numbers of the items that compute (by rows, then by columns).
    pub computing: Range<usize>,
}

#[derive(Debug)]
pub struct Plan {
    pub blocks: Blocks,
    pub phases: Vec<Phase>,
    /// Rows of a task, a multiple of MR.
    pub task_rows: usize,
    /// Columns of a task, a multiple of NR.
    pub task_columns: usize,
    /// Whether tasks are of the whole inner dimension and pack all that they need, panels, too, block by block.
    pub packs_alone: bool,
    /// Whether the panels of a task, of all blocks, stay in L2 together.
    pub is_short: bool,
    /// Columns of the widest phase, a multiple of NR.
    pub phase_columns: usize,
    /// Elements of the panels of the largest phase.
    pub panel_elements: usize,
}

impl Plan {
    /// For tiles of `mr` × `nr` and packed elements of `size` bytes; `packs_a` where strips of A are not read where they lie.
    pub fn new(
        (m, n, k): (usize, usize, usize),
        (mr, nr): (usize, usize),
        size: usize,
        blocking: Blocking,
        packs_a: bool,
        threads: usize,
    ) -> Self {
        let blocks = Blocks::new(k, blocking.kc);
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
            .find(|&each| {
                let tasks = strips.div_ceil(each) * tasks_across;
                tasks.is_multiple_of(threads) || tasks >= MANY_TASKS * threads
            });
        let task_rows = mr * rows_per_task.unwrap_or(1);

        let once = blocks.count == 1 && blocking.panels_alone;
        if once || packs_a && blocks.count > 1 {
            let strip = if packs_a { STRIP_COST } else { READ_COST };
            let shared = SHARED_COST * n as f64 + strip * (m * tasks_across * n.div_ceil(columns)) as f64;
            if let Some(plan) = Self::alone((m, n), (mr, nr), blocks, blocking, threads, (strip, shared)) {
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
                let computed = packed + m.div_ceil(task_rows) * columns.len().div_ceil(task_columns);
                phases.push(Phase { columns, blocks, packing: item..packed, computing: packed..computed });
                item = computed;
            }
        }
        Self {
            blocks,
            phases,
            task_rows,
            task_columns,
            packs_alone: false,
            is_short: task_columns <= whole,
            phase_columns: columns,
            panel_elements: columns * together * blocks.len,
        }
    }

    /// Tasks that pack alone, if a cut of them costs less than `most` for each of the inner dimension, where a row of A costs `strip`.
    fn alone(
        (m, n): (usize, usize),
        (mr, nr): (usize, usize),
        blocks: Blocks,
        blocking: Blocking,
        threads: usize,
        (strip, most): (f64, f64),
    ) -> Option<Self> {
        let (strips, panels) = (m.div_ceil(mr), n.div_ceil(nr));
        let mut best = (most, None);
        for across in 1..=panels {
            let columns = panels.div_ceil(across) * nr;
            if columns > blocking.nc_alone.max(nr) {
                continue;
            }
            for down in 1..=strips {
                let rows = strips.div_ceil(down) * mr;
                let (down, across) = (m.div_ceil(rows), n.div_ceil(columns));
                let cost = (n * down) as f64 + strip * (m * across) as f64;
                if cost >= best.0 {
                    break;
                }
                let tasks = down * across;
                let is_even = tasks.is_multiple_of(threads) || tasks >= MANY_TASKS * threads;
                if is_even && (blocks.count == 1 || rows * columns <= SUMS_ALONE) {
                    best = (cost, Some((rows, columns, tasks)));
                }
            }
        }
        let (task_rows, task_columns, tasks) = best.1?;
        let phase = Phase { columns: 0..n, blocks: 0..blocks.count, packing: 0..0, computing: 0..tasks };
        let packs_alone = true;
        let (phase_columns, is_short) = (n.next_multiple_of(nr), false);
        Some(Self {
            blocks,
            phases: vec![phase],
            task_rows,
            task_columns,
            packs_alone,
            is_short,
            phase_columns,
            panel_elements: 0,
        })
    }

    /// Whether the inner dimension is in several phases.
    pub fn sums_outlast_phases(&self) -> bool {
        self.phases.iter().any(|phase| phase.blocks.len() < self.blocks.count)
    }

    pub fn items(&self) -> usize {
        self.phases.last().map_or(0, |phase| phase.computing.end)
    }
}

/// The size of equal parts of `n`, of at most `most` each, that are multiples of `unit`.
fn equal_parts(n: usize, unit: usize, most: usize) -> usize {
    n.div_ceil(n.div_ceil(most.max(unit)).max(1)).next_multiple_of(unit).max(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_the_inner_dimension_and_none_is_longer_than_asked() {
        for k in 0..3000 {
            let blocks = Blocks::new(k, 512);
            assert!(blocks.len <= 512 && blocks.len.is_multiple_of(PIECE));
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
        let blocking = Blocking { kc: 384, mc: 252, nc: 256, nc_alone: 512, panels_alone: false, whole: 0, alone: 0 };
        for shape in [(1, 1, 1), (2048, 384, 1152), (1024, 50304, 768), (1024, 768, 50304), (7, 3000, 9000)] {
            for threads in [1, 2, 3, 7, 64] {
                let plan = Plan::new(shape, (14, 32), 4, blocking, false, threads);
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
                assert!(plan.panel_elements * 4 <= 2 * PANEL_BYTES, "{shape:?}: {}", plan.panel_elements);
            }
        }
    }

    #[test]
    fn two_threads_get_as_many_tasks_each_unless_there_are_many() {
        let blocking = Blocking { kc: 384, mc: 252, nc: 256, nc_alone: 512, panels_alone: false, whole: 0, alone: 0 };
        for shape in [(2048, 384, 384), (2048, 1152, 384), (1152, 384, 2048), (768, 768, 1024)] {
            let plan = Plan::new(shape, (14, 32), 4, blocking, false, 2);
            let tasks = plan.phases[0].computing.len();
            assert!(tasks.is_multiple_of(2) || tasks >= 16, "{shape:?}: {tasks}");
        }
    }

    #[test]
    fn tasks_that_pack_alone_cover_the_product_evenly_and_keep_their_sums_in_cache() {
        let blocking = Blocking { kc: 384, mc: 252, nc: 256, nc_alone: 512, panels_alone: true, whole: 0, alone: 0 };
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
                let plan = Plan::new(shape, (14, 32), 4, blocking, shape.2 > 384, threads);
                if !plan.packs_alone {
                    let once = plan.blocks.count == 1;
                    assert!(!once || threads > 2, "{shape:?}: panels of one block are packed by those who use them");
                    continue;
                }
                alone += 1;
                let tasks = shape.0.div_ceil(plan.task_rows) * shape.1.div_ceil(plan.task_columns);
                assert_eq!(plan.items(), tasks, "{shape:?}");
                assert!(tasks.is_multiple_of(threads) || tasks >= 8 * threads, "{shape:?}: {tasks}");
                let keeps_sums = plan.blocks.count > 1;
                assert!(!keeps_sums || plan.task_rows * plan.task_columns <= SUMS_ALONE, "{shape:?}");
                assert!(plan.task_columns <= blocking.nc_alone);
                assert!(plan.task_rows.is_multiple_of(14) && plan.task_columns.is_multiple_of(32));
            }
        }
        assert!(alone >= 8, "{alone}");
    }
}
