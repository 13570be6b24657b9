//! What an instruction set brings: a micro-kernel, and the panels it reads.
// only micro-kernels of x86-64 prefetch, or do interleaved work
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

use super::Mat;
#[cfg(target_arch = "x86_64")]
use crate::tensor::allocator::LINE;
use crate::tensor::element::Elem;

/// Inner dimension that [`Kernel::pack_a`] and [`Kernel::pack_b`] take at a time, at most; panels
/// are made of pieces of it.
pub const PIECE: usize = 32;

/// Tasks that read A where it lies, through the cache that panels and unfinished sums are in, too.
#[derive(Clone, Copy, Debug)]
pub struct InPlace {
    /// Whether panels are packed ahead of their use, where that [pays](super::lookahead::pays);
    /// else before it, by the task that uses them.
    pub packs_ahead: bool,
    /// Most unfinished sums of a task.
    pub sums: usize,
}

impl InPlace {
    /// Beside a second-level cache of 1 MiB. (With twice as many sums, input gradients of 2048
    /// rows lose 0.5 to 1% on Zen 4.)
    pub const AHEAD: Self = Self { packs_ahead: true, sums: 128 << 10 };
    /// Beside one of 2 MiB, of Intel's cores. Panels packed ahead are fewer at a time, and A is
    /// read once for each few: that, and packing between tiles, costs forward products there 3 to
    /// 5%. Fewer sums are of fewer rows than a thread has, for each of which all panels are packed
    /// again: 2 to 4% of long inner dimensions (commit 3496bfc).
    pub const ALONE: Self = Self { packs_ahead: false, sums: 400 << 10 };
}

/// Sizes of blocks, after the levels of cache that hold them.
#[derive(Clone, Copy, Debug)]
pub struct Blocking {
    /// Inner dimension of a block, a multiple of [`PIECE`].
    pub kc: usize,
    /// The longest inner dimension, a multiple of [`PIECE`] and at least `kc`, that is one block:
    /// then no sums are put aside, which pays for operands that are a little too large for their
    /// caches.
    pub once: usize,
    /// Most rows of a task: its A (mc × kc) is to stay in L2.
    pub mc: usize,
    /// Most columns of a task: its B (kc × nc) is to stay in L2.
    pub nc: usize,
    /// As `nc`, of tasks whose thread packs its panels by itself; half as much again as L2 holds
    /// did no harm where kernels have what they need next fetched.
    pub nc_alone: usize,
    /// Whether panels are packed by tasks themselves, too, where one block is the whole inner
    /// dimension or A is read in place, so that a panel is in the caches of the thread that uses
    /// it.
    pub panels_alone: bool,
    pub in_place: InPlace,
    /// Bytes of B that stay in L2 while strips go by: a task may have more than nc columns if those
    /// of the whole inner dimension take no more.
    pub whole: usize,
    /// Floating-point operations below which a second thread costs more than it saves.
    pub alone: usize,
}

/// Where a micro-kernel finds a strip of A.
#[derive(Clone, Copy, Debug)]
pub enum Strip<E, P> {
    /// Packed.
    Packed(*const P),
    /// In A itself, with the distance of its rows; see [`Kernel::reads_rows`].
    Rows(*const E, usize),
}

/// Where [`Kernel::tile`] writes a tile.
#[derive(Clone, Copy, Debug)]
pub enum To<E> {
    /// The sums themselves, and the distance of their rows.
    Sums(*mut f32, usize),
    /// All NR columns, rounded once, and the distance of their rows; before that `add` is added,
    /// unless that is null. For a kernel that [`Kernel::ROUNDS`].
    Rounded { to: *mut E, stride: usize, add: *const E, add_stride: usize },
}

impl<E> To<E> {
    /// Has the lines of row `r` of so many columns, at most two, fetched to be written.
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
        // `_mm_prefetch` asks to write only where the compiler is told that every machine can.
        let ask = |line: *mut u8| {
            // SAFETY: it is no access, and machines that cannot ask to write, none of which has
            // AVX-512, do nothing.
            unsafe {
                std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly))
            };
        };
        ask(at);
        if bytes > LINE {
            ask(at.wrapping_add(LINE));
        }
    }

    /// For a kernel that writes nothing but sums.
    #[inline(always)]
    pub fn sums(self) -> (*mut f32, usize) {
        match self {
            Self::Sums(to, stride) => (to, stride),
            Self::Rounded { .. } => unreachable!("the kernel did not say that it rounds"),
        }
    }
}

/// How a kernel computes products of few rows whose columns lie in memory one behind the other
/// ([`super::skinny`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skinny {
    AsOthers,
    /// By [`Kernel::skinny`].
    InPlace,
    /// By [`Kernel::tile`], piece by piece of a panel.
    ByPieces,
}

/// Memory that will be needed soon, so that a kernel can have it fetched while it computes.
#[derive(Clone, Copy, Debug)]
pub struct Ahead {
    /// Where sums will be written.
    pub written: Next,
    /// What will be added to sums, where [`Kernel::ASKS_FOR_ADDED`].
    pub added: Next,
    /// What strips will be read from, where kernels read rows of A.
    pub read: Next,
}

/// What [`Kernel::tile`] does while it computes, where [`Kernel::INTERLEAVES`].
#[derive(Clone, Copy, Debug)]
pub enum Interleaved<E, P> {
    Pack(Pack<E, P>),
    /// Asks for memory that will be packed, so many rows in each of MR shares of the tile; for
    /// strips that are not packed.
    Fetch(Next, usize),
}

/// Packing of a part of a strip or a panel that lies as [`Kernel::can_overlap`] says; for packed
/// strips.
#[derive(Clone, Copy, Debug)]
pub struct Pack<E, P> {
    /// Rows of A, or columns of B as rows, along the inner dimension.
    pub from: Mat<*const E>,
    /// How many rows: MR of a strip, NR of a panel, or less, which is padded with zeros.
    pub width: usize,
    /// How long they are, a multiple of KQ.
    pub k: usize,
    /// The first element of what is packed after it, which is asked for.
    pub following: *const E,
    /// Where they go, in a strip or a panel.
    pub to: *mut P,
    pub is_panel: bool,
}

/// MR rows of at most two lines. Only addresses; need not be memory at all.
#[derive(Clone, Copy, Debug)]
pub struct Next {
    pub at: *const u8,
    /// Distance of the rows in bytes.
    pub row: usize,
    /// Distance of a row's second line in bytes, or 0 if it has only one.
    pub second: usize,
}

impl Next {
    /// Nothing in particular.
    pub fn nothing(at: *const u8) -> Self {
        Self { at, row: 0, second: 0 }
    }

    /// The lines of a row; turns to the next row.
    #[inline(always)]
    pub fn lines(&mut self) -> [*const i8; 2] {
        let first = self.at.cast::<i8>();
        self.at = self.at.wrapping_add(self.row);
        [first, first.wrapping_add(self.second)]
    }
}

/// The strip of a kernel that reads no other than packed ones.
#[inline(always)]
pub fn packed<E, P>(strip: Strip<E, P>) -> *const P {
    match strip {
        Strip::Packed(at) => at,
        Strip::Rows(..) => unreachable!("the kernel did not say that it reads rows"),
    }
}

/// A micro-kernel for tiles of C of MR × NR, of operands stored as `E`, with sums in f32.
///
/// A *strip* of A holds MR rows, a *panel* of B NR columns, padded with zeros up to those and,
/// along the inner dimension, to a multiple of KQ. How elements lie within a piece is the kernel's
/// business; pieces lie one behind the other.
pub trait Kernel<E: Elem<Acc = f32>> {
    /// What panels are made of.
    type Packed: Copy;
    const MR: usize;
    const NR: usize;
    const KQ: usize;

    /// Sizes of blocks. Where they differ between machines of one instruction set, no sum depends
    /// on them: each goes on where it was put aside.
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

    /// As [`Kernel::pack_a`], of any number of rows, whose strips are `stride` elements apart.
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

    /// As [`Kernel::pack_strips`], of columns and panels.
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

    /// Whether [`Kernel::tile`] can, and should, read whole strips of this A where it lies; `k` is
    /// a multiple of KQ.
    fn reads_rows(_: Mat<*const E>) -> bool {
        false
    }

    /// Whether [`Kernel::tile`] asks for [`Ahead::added`], between its products: asked for all at
    /// once, some thirty lines hold the products up.
    const ASKS_FOR_ADDED: bool = false;

    /// Whether [`Kernel::tile`] does interleaved work.
    const INTERLEAVES: bool = false;

    /// Whether, where it does such work, it packs these rows of A, or columns of B as rows.
    fn can_overlap(_: Mat<*const E>) -> bool {
        false
    }

    /// Whether [`Kernel::tile`] writes rounded elements, too: out of registers, which saves writing
    /// sums and reading them again.
    const ROUNDS: bool = false;

    /// `to [rows, NR] = strip · panel`, plus `from` (with a row stride, which may be 0) unless that
    /// is null. `k` is a multiple of KQ. Rows from `rows` to MR are written too unless
    /// [`Kernel::leaves_other_rows`]. A strip that is not packed has MR rows.
    ///
    /// # Safety
    /// The machine has the instruction set, the thread is within [`Kernel::enter`], and the memory
    /// is as said.
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

    /// `to [rows, columns] = scale · sums` (row stride NR), plus `add` unless that is null, which
    /// may be `to` itself; columns of both are contiguous.
    ///
    /// # Safety
    /// The machine has the instruction set, and the memory is as said.
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

    /// Writes `k` ≤ [`PIECE`] elements of a row of A as [`Kernel::skinny`] reads them, with zeros
    /// up to a multiple of KQ.
    ///
    /// # Safety
    /// As [`Kernel::pack_a`], for one row.
    unsafe fn pack_row(_: Mat<*const E>, _: usize, _: *mut Self::Packed) {
        unreachable!("the kernel did not say that it reads columns")
    }

    /// `sums [rows, columns] += rows · columns` for up to [`ROWS`](super::skinny::ROWS) rows and NR
    /// columns of `k` elements each, both where they lie, with terms in the order of
    /// [`Kernel::tile`]: rows as [`Kernel::pack_row`] writes them, `a.1` packed elements apart, and
    /// columns `b.1` elements apart. Rows of `sums` are NR apart.
    ///
    /// # Safety
    /// The machine has the instruction set, and the memory is as said.
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
