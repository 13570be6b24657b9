//! The interface of an instruction set to products: a micro-kernel, and the panels it reads.
// Only micro-kernels of x86-64 prefetch or do interleaved work.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

use super::Mat;
#[cfg(target_arch = "x86_64")]
use crate::tensor::allocator::LINE;
use crate::tensor::element::Elem;

/// Largest inner dimension that [`Kernel::pack_a`] and [`Kernel::pack_b`] take at a time. Panels
/// consist of pieces of this length.
pub const PIECE: usize = 32;

/// Limits of tasks that read A unpacked. A then passes through the cache that also holds panels and
/// unfinished sums.
#[derive(Clone, Copy, Debug)]
pub struct InPlace {
    /// Whether panels are packed ahead of their use, where that [pays](super::lookahead::pays).
    /// Otherwise the task that uses them packs them before.
    pub packs_ahead: bool,
    /// Largest number of unfinished sums per task.
    pub sums: usize,
}

impl InPlace {
    /// For an L2 of 1 MiB. (With twice as many sums, input gradients of 2048 rows lose 0.5 to 1% on
    /// Zen 4.)
    pub const AHEAD: Self = Self { packs_ahead: true, sums: 128 << 10 };
    /// For the L2 of 2 MiB of Intel's cores. Packing ahead costs forward products 3 to 5% there:
    /// fewer panels exist at a time, so A is read more often, and packing runs between tiles. Fewer
    /// sums cost long inner dimensions 2 to 4%: tasks then have fewer rows than a thread's share,
    /// and each task packs all panels again (commit 3496bfc).
    pub const ALONE: Self = Self { packs_ahead: false, sums: 400 << 10 };
}

/// Sizes of blocks, chosen by the cache level that holds them.
#[derive(Clone, Copy, Debug)]
pub struct Blocking {
    /// Inner dimension of a block, a multiple of [`PIECE`].
    pub kc: usize,
    /// The longest inner dimension, a multiple of [`PIECE`] and at least `kc`, that is one block.
    /// Then no sums are put aside, which pays for operands that are a little too large for their
    /// caches.
    pub once: usize,
    /// Most rows of a task: its A (mc × kc) must stay in L2.
    pub mc: usize,
    /// Most columns of a task: its B (kc × nc) must stay in L2.
    pub nc: usize,
    /// As `nc`, for tasks that pack their own panels. Half as much again as L2 holds did no harm
    /// with kernels that prefetch.
    pub nc_alone: usize,
    /// Whether tasks may pack panels themselves also if the whole inner dimension is one block, or
    /// A is read in place. A panel is then in the caches of the thread that uses it.
    pub panels_alone: bool,
    pub in_place: InPlace,
    /// Bytes of B that stay in L2 while strips pass through. A task may have more than nc columns
    /// if its columns over the whole inner dimension take no more.
    pub whole: usize,
    /// Floating-point operations below which a second thread costs more than it saves.
    pub alone: usize,
}

/// Location of a strip of A for a micro-kernel.
#[derive(Clone, Copy, Debug)]
pub enum Strip<E, P> {
    /// Packed.
    Packed(*const P),
    /// In A itself, with the row stride; see [`Kernel::reads_rows`].
    Rows(*const E, usize),
}

/// Destination of [`Kernel::tile`].
#[derive(Clone, Copy, Debug)]
pub enum To<E> {
    /// The sums themselves, and their row stride.
    Sums(*mut f32, usize),
    /// All NR columns, rounded once, and their row stride. `add`, unless null, is added before
    /// rounding. Only for a kernel that [`Kernel::ROUNDS`].
    Rounded { to: *mut E, stride: usize, add: *const E, add_stride: usize },
}

impl<E> To<E> {
    /// Prefetches the lines of row `r` for writing: at most two, for `columns` columns.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub fn ask_for_row(self, r: usize, columns: usize) {
        let (at, bytes) = match self {
            Self::Sums(to, stride) => {
                (to.wrapping_add(r * stride).cast::<u8>(), columns * size_of::<f32>())
            }
            Self::Rounded { to, stride, .. } => {
                (to.wrapping_add(r * stride).cast::<u8>(), columns * size_of::<E>())
            }
        };
        // `_mm_prefetch` can prefetch for writing only if the compiler's target always supports it.
        let ask = |line: *mut u8| {
            // SAFETY: a prefetch is no access. Machines without the instruction ignore it; none of
            // them has AVX-512.
            unsafe {
                std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly))
            };
        };
        ask(at);
        if bytes > LINE {
            ask(at.wrapping_add(LINE));
        }
    }

    /// The destination, for a kernel that writes only sums.
    #[inline(always)]
    pub fn sums(self) -> (*mut f32, usize) {
        match self {
            Self::Sums(to, stride) => (to, stride),
            Self::Rounded { .. } => unreachable!("the kernel did not say that it rounds"),
        }
    }
}

/// How a kernel computes products of few rows, if the columns are contiguous in memory
/// ([`super::skinny`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skinny {
    AsOthers,
    /// By [`Kernel::skinny`].
    InPlace,
    /// By [`Kernel::tile`], piece by piece of a panel.
    ByPieces,
}

/// Memory that will be needed soon, for the kernel to prefetch while it computes.
#[derive(Clone, Copy, Debug)]
pub struct Ahead {
    /// Where sums will be written.
    pub written: Next,
    /// Memory that will be added to sums, if [`Kernel::ASKS_FOR_ADDED`].
    pub added: Next,
    /// Memory that strips will be read from, if kernels read rows of A.
    pub read: Next,
}

/// Work that [`Kernel::tile`] does while it computes, if [`Kernel::INTERLEAVES`].
#[derive(Clone, Copy, Debug)]
pub enum Interleaved<E, P> {
    Pack(Pack<E, P>),
    /// Prefetches memory that will be packed: so many rows in each of MR shares of the tile. For
    /// strips that are not packed.
    Fetch(Next, usize),
}

/// Packing of a part of a strip or a panel. The part is laid out as [`Kernel::can_overlap`]
/// requires. For packed strips.
#[derive(Clone, Copy, Debug)]
pub struct Pack<E, P> {
    /// Rows of A, or columns of B as rows, along the inner dimension.
    pub from: Mat<*const E>,
    /// Number of rows: MR for a strip, NR for a panel; fewer are padded with zeros.
    pub width: usize,
    /// Length of the rows, a multiple of KQ.
    pub k: usize,
    /// The first element of the part that is packed next; it is prefetched.
    pub following: *const E,
    /// Destination in a strip or a panel.
    pub to: *mut P,
    pub is_panel: bool,
}

/// MR rows of at most two lines. Only addresses: they need not be valid memory.
#[derive(Clone, Copy, Debug)]
pub struct Next {
    pub at: *const u8,
    /// Stride of the rows in bytes.
    pub row: usize,
    /// Distance of a row's second line in bytes, or 0 if it has only one.
    pub second: usize,
}

impl Next {
    /// A placeholder without effect.
    pub fn nothing(at: *const u8) -> Self {
        Self { at, row: 0, second: 0 }
    }

    /// The lines of a row; advances to the next row.
    #[inline(always)]
    pub fn lines(&mut self) -> [*const i8; 2] {
        let first = self.at.cast::<i8>();
        self.at = self.at.wrapping_add(self.row);
        [first, first.wrapping_add(self.second)]
    }
}

/// The strip, for a kernel that reads only packed ones.
#[inline(always)]
pub fn packed<E, P>(strip: Strip<E, P>) -> *const P {
    match strip {
        Strip::Packed(at) => at,
        Strip::Rows(..) => unreachable!("the kernel did not say that it reads rows"),
    }
}

/// A micro-kernel for tiles of C of MR × NR, with operands stored as `E` and sums in f32.
///
/// A *strip* of A holds MR rows, a *panel* of B NR columns. Both are padded with zeros to this
/// width and, along the inner dimension, to a multiple of KQ. The kernel chooses the layout within
/// a piece; pieces are contiguous.
pub trait Kernel<E: Elem<Acc = f32>> {
    /// Element type of strips and panels.
    type Packed: Copy;
    const MR: usize;
    const NR: usize;
    const KQ: usize;

    /// Sizes of blocks. They may differ between machines of one instruction set without changing
    /// any sum: each sum continues where it was put aside.
    fn blocking() -> Blocking;

    /// Packs `rows` ≤ MR rows of `k` ≤ [`PIECE`] columns into a piece of a strip.
    ///
    /// # Safety
    /// The machine has the instruction set; `a` can be read, and `to` has MR · (`k` rounded up to
    /// KQ) elements.
    unsafe fn pack_a(a: Mat<*const E>, rows: usize, k: usize, to: *mut Self::Packed);

    /// Packs `k` ≤ [`PIECE`] rows of `columns` ≤ NR columns into a piece of a panel.
    ///
    /// # Safety
    /// As [`Kernel::pack_a`], with NR.
    unsafe fn pack_b(b: Mat<*const E>, columns: usize, k: usize, to: *mut Self::Packed);

    /// As [`Kernel::pack_a`], for any number of rows; strips are `stride` elements apart.
    ///
    /// # Safety
    /// As [`Kernel::pack_a`], for every strip.
    unsafe fn pack_strips(
        a: Mat<*const E>,
        rows: usize,
        k: usize,
        to: *mut Self::Packed,
        stride: usize,
    ) {
        for (s, r) in (0..rows).step_by(Self::MR).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { Self::pack_a(a.at(r, 0), Self::MR.min(rows - r), k, to.add(s * stride)) };
        }
    }

    /// As [`Kernel::pack_strips`], for columns and panels.
    ///
    /// # Safety
    /// As [`Kernel::pack_b`], for every panel.
    unsafe fn pack_panels(
        b: Mat<*const E>,
        columns: usize,
        k: usize,
        to: *mut Self::Packed,
        stride: usize,
    ) {
        for (p, c) in (0..columns).step_by(Self::NR).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { Self::pack_b(b.at(0, c), Self::NR.min(columns - c), k, to.add(p * stride)) };
        }
    }

    /// Whether [`Kernel::tile`] can and should read whole strips of this A unpacked; `k` is a
    /// multiple of KQ.
    fn reads_rows(_: Mat<*const E>) -> bool {
        false
    }

    /// Whether [`Kernel::tile`] prefetches [`Ahead::added`] between its products. Prefetching all
    /// of it at once, some thirty lines, would delay the products.
    const ASKS_FOR_ADDED: bool = false;

    /// Whether [`Kernel::tile`] does interleaved work.
    const INTERLEAVES: bool = false;

    /// Whether such interleaved work can pack these rows of A, or columns of B as rows.
    fn can_overlap(_: Mat<*const E>) -> bool {
        false
    }

    /// Whether [`Kernel::tile`] can also write rounded elements from registers, which saves writing
    /// sums and reading them again.
    const ROUNDS: bool = false;

    /// `to [rows, NR] = strip · panel`, plus `from` (with a row stride, which may be 0) unless that
    /// is null. `k` is a multiple of KQ. Rows from `rows` to MR are written too unless
    /// [`Kernel::leaves_other_rows`]. A strip that is not packed has MR rows.
    ///
    /// # Safety
    /// The machine has the instruction set, the thread is within [`Kernel::enter`], and the memory
    /// is as described.
    unsafe fn tile(
        rows: usize,
        k: usize,
        strip: Strip<E, Self::Packed>,
        panel: *const Self::Packed,
        from: (*const f32, usize),
        to: To<E>,
        ahead: Ahead,
        interleaved: Option<Interleaved<E, Self::Packed>>,
    );

    /// Whether [`Kernel::tile`] reads and writes no row from `rows` on.
    fn leaves_other_rows(rows: usize) -> bool;

    /// `to [rows, columns] = scale · sums` (row stride NR), plus `add` unless that is null; `add`
    /// may be `to` itself. Columns of both are contiguous.
    ///
    /// # Safety
    /// The machine has the instruction set, and the memory is as described.
    unsafe fn finish<C: Elem<Acc = f32>>(
        sums: *const f32,
        rows: usize,
        columns: usize,
        to: (*mut C, usize),
        scale: f32,
        add: (*const C, usize),
    );

    /// How products of few rows are computed.
    const THIN: Skinny = Skinny::AsOthers;

    /// Writes `k` ≤ [`PIECE`] elements of a row of A in the layout that [`Kernel::skinny`] reads,
    /// padded with zeros to a multiple of KQ.
    ///
    /// # Safety
    /// As [`Kernel::pack_a`], for one row.
    unsafe fn pack_row(_: Mat<*const E>, _: usize, _: *mut Self::Packed) {
        unreachable!("the kernel did not say that it reads columns")
    }

    /// `sums [rows, columns] += rows · columns` for up to [`ROWS`](super::skinny::ROWS) rows and NR
    /// columns of `k` elements each, with terms in the order of [`Kernel::tile`]. Rows are in the
    /// layout of [`Kernel::pack_row`], `a.1` packed elements apart; columns are unpacked, `b.1`
    /// elements apart. Rows of `sums` are NR apart.
    ///
    /// # Safety
    /// The machine has the instruction set, and the memory is as described.
    unsafe fn skinny(
        _rows: usize,
        _columns: usize,
        _k: usize,
        _a: (*const Self::Packed, usize),
        _b: (*const E, usize),
        _sums: *mut f32,
    ) {
        unreachable!("the kernel did not say that it reads columns")
    }

    /// Prepares the thread for [`Kernel::tile`]; [`Kernel::leave`] undoes it.
    ///
    /// # Safety
    /// The machine has the instruction set.
    unsafe fn enter() {}

    /// # Safety
    /// After [`Kernel::enter`], on the same thread.
    unsafe fn leave() {}
}
