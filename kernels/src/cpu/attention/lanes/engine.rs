//! The interface of an instruction set to attention.

use std::arch::x86_64::__m512;

use super::prefetch::Prefetcher;
use super::{BLOCK, LANES};
use crate::cpu::gemm::lanes::Lanes;
use crate::tensor::host::HostElem;

/// A left operand `[rows, inner]`: its beginning, the stride of rows, and the stride of pieces of
/// [`Engine::STEP`] elements along the inner dimension. The elements of a piece are contiguous.
#[derive(Clone, Copy)]
pub struct Left<T> {
    pub at: *const T,
    pub row: usize,
    pub step: usize,
}

impl<T> Left<T> {
    /// Rows `[rows, width]` without rearrangement; the width is the inner dimension.
    pub fn plain<K: Engine<Operand = T>>(rows: &[T], width: usize) -> Self {
        Self { at: rows.as_ptr(), row: width, step: K::STEP }
    }

    /// The operand with the rows of `[n, width]` as its inner dimension. If GROUP is 1, this reads
    /// `rows` along their columns; otherwise it reads `flipped`, made by [`super::operands::flip`].
    pub fn flipped<K: Engine<Operand = T>>(rows: &[T], flipped: &[T], width: usize) -> Self {
        if K::GROUP == 1 {
            Self { at: rows.as_ptr(), row: 1, step: width }
        } else {
            Self { at: flipped.as_ptr(), row: BLOCK, step: BLOCK * width }
        }
    }

    /// The operand from row `row` and inner element `inner` on. `inner` begins a piece.
    pub fn from<K: Engine<Operand = T>>(self, row: usize, inner: usize) -> Self {
        Self { at: self.at.wrapping_add(row * self.row + inner / K::STEP * self.step), ..self }
    }
}

/// The quarter of a diagonal block that is fully masked: the last 16 keys of the first 16 queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corner {
    /// Keys are the result's rows and queries its columns. The sums in the corner may be any finite
    /// values.
    Result,
    /// Keys are the inner dimension, and its last 32 belong to the diagonal. In the right operand,
    /// the corner holds zeros.
    Right,
    /// Keys are the rows and queries the inner dimension; its first 32 belong to the diagonal. In
    /// the left operand, the corner holds zeros.
    Left,
}

/// Inner elements that contribute to rows of a block: `first .. both` to all 32 columns, `both ..
/// end` to the last 16.
#[derive(Clone, Copy)]
pub struct Span {
    pub first: usize,
    pub both: usize,
    pub end: usize,
}

impl Span {
    /// The span of the rows from `row` on. These rows lie in one half, or both halves have the same
    /// span.
    pub fn new(inner: usize, corner: Option<Corner>, row: usize) -> Self {
        let all = Self { first: 0, both: inner, end: inner };
        match corner {
            Some(Corner::Result) if row >= LANES => Self { both: 0, ..all },
            Some(Corner::Right) => Self { both: inner - LANES, ..all },
            Some(Corner::Left) if row >= LANES => Self { first: LANES, ..all },
            _ => all,
        }
    }
}

/// Products of blocks of 32 × 32, and the layout of their operands.
///
/// A *right* operand is `[inner / GROUP][columns][GROUP]`: GROUP elements along the inner dimension
/// lie side by side.
///
/// # Safety
/// For all functions: the machine has the instructions, and the memory is as described.
pub trait Engine {
    /// Element type of tensors.
    type Elem: Lanes;
    /// Element type of operands; it represents the tensors' numbers exactly.
    type Operand: HostElem;
    const GROUP: usize;
    /// Elements per piece of a left operand; a divisor of 32.
    const STEP: usize;
    /// Calls of [`Prefetcher::ask`] per block.
    const ASKS: usize;

    /// Copies `n` elements of a row and pads it with zeros to `width`, a multiple of 32.
    unsafe fn row(from: *const Self::Elem, n: usize, to: *mut Self::Operand, width: usize);

    /// `c [32, 32] = a [32, inner] · b [inner, 32]`, plus the old `c` if `add`; the inner dimension
    /// is a multiple of 32. `b` comes with the stride of its rows of GROUP · columns, `c` with the
    /// stride of its rows. Products with the corner may be skipped. Calls [`Prefetcher::ask`] ASKS
    /// times in between.
    unsafe fn block(
        inner: usize,
        corner: Option<Corner>,
        a: Left<Self::Operand>,
        b: (*const Self::Operand, usize),
        c: (*mut f32, usize),
        add: bool,
        ahead: &mut Prefetcher<Self>,
    ) where
        Self: Sized;

    /// Rounds a probability to the precision in which it weights values.
    unsafe fn round(p: __m512) -> __m512;

    /// Stores two rows of 16 columns as a part of a right operand of 32 columns. The rows are its
    /// inner dimension.
    unsafe fn right(rows: [__m512; 2], to: *mut Self::Operand);

    /// Stores two rows of a left operand.
    unsafe fn left(rows: [__m512; 2], to: (*mut Self::Operand, usize));

    /// Prepares the thread for [`Engine::block`]; [`Engine::leave`] undoes it.
    unsafe fn enter() {}

    unsafe fn leave() {}
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, Corner, Engine, LANES, Left};
    use crate::cpu::attention::lanes::pairs::Dot;
    use crate::cpu::attention::lanes::prefetch::Prefetcher;
    use crate::cpu::attention::lanes::wide::Wide;
    use crate::tensor::element::{Elem, Float};
    use crate::tensor::simd::Isa;

    const INNER: usize = 96;

    /// Small whole numbers, and zeros at the places in the corner.
    fn operand<T: Elem>(n: usize, in_corner: impl Fn(usize) -> bool) -> Vec<T> {
        let number = |i: usize| if in_corner(i) { 0.0 } else { (i * 37 % 101) as f32 - 50.0 };
        (0..n).map(|i| T::store(T::Acc::of(number(i).into()))).collect()
    }

    fn check<K: Engine>()
    where
        K::Operand: Elem,
    {
        for corner in [Corner::Result, Corner::Right, Corner::Left] {
            // a [32, INNER], b [INNER / GROUP, 32, GROUP].
            let a = operand(BLOCK * INNER, |i| {
                corner == Corner::Left && i / INNER >= LANES && i % INNER < LANES
            });
            let b = operand(INNER * BLOCK, |i| {
                let (row, column) = (i / (BLOCK * K::GROUP) * K::GROUP, i / K::GROUP % BLOCK);
                corner == Corner::Right && row >= INNER - LANES && column < LANES
            });
            for add in [false, true] {
                let product = |corner| {
                    let mut c = [0.5_f32; BLOCK * BLOCK];
                    // SAFETY: the caller has checked the machine; the operands have INNER elements
                    // of 32 rows and columns.
                    unsafe {
                        let a = Left::plain::<K>(&a, INNER);
                        K::block(
                            INNER,
                            corner,
                            a,
                            (b.as_ptr(), BLOCK * K::GROUP),
                            (c.as_mut_ptr(), BLOCK),
                            add,
                            &mut Prefetcher::new(),
                        );
                    }
                    c
                };
                let (got, want) = (product(Some(corner)), product(None));
                for i in 0..BLOCK * BLOCK {
                    let wanted =
                        corner != Corner::Result || i / BLOCK < LANES || i % BLOCK >= LANES;
                    assert!(
                        !wanted || got[i].to_bits() == want[i].to_bits(),
                        "{corner:?}, {add}: {got:?} not {want:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_is_left_out_of_a_block_on_the_diagonal_changes_nothing_that_is_seen() {
        if Isa::supported() >= Isa::Avx512 {
            check::<Wide<f32>>();
        }
        if Isa::supported() >= Isa::Avx512Bf16 {
            check::<Dot>();
        }
    }
}
