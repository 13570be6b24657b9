//! What an instruction set brings to attention.

use std::arch::x86_64::__m512;

use super::BLOCK;
use crate::gemm::lanes::Lanes;
use crate::host::HostElem;

/// A left operand `[rows, inner]`: where it begins, and the distances of rows and of pieces of [`Engine::STEP`] elements of the inner
/// dimension. The elements of a piece are contiguous.
#[derive(Clone, Copy)]
pub struct Left<T> {
    pub at: *const T,
    pub row: usize,
    pub step: usize,
}

impl<T> Left<T> {
    /// Rows `[rows, width]` as they lie; the width is the inner dimension.
    pub fn plain<K: Engine<Operand = T>>(rows: &[T], width: usize) -> Self {
        Self { at: rows.as_ptr(), row: width, step: K::STEP }
    }

    /// Of rows `[n, width]`, the operand whose inner dimension are the rows: themselves seen along their columns where GROUP is 1, else what
    /// [`super::operands::flip`] made of them.
    pub fn flipped<K: Engine<Operand = T>>(rows: &[T], flipped: &[T], width: usize) -> Self {
        if K::GROUP == 1 {
            Self { at: rows.as_ptr(), row: 1, step: width }
        } else {
            Self { at: flipped.as_ptr(), row: BLOCK, step: BLOCK * width }
        }
    }

    /// The operand from row `row` and inner element `inner` on, which begins a piece.
    pub fn from<K: Engine<Operand = T>>(self, row: usize, inner: usize) -> Self {
        Self { at: self.at.wrapping_add(row * self.row + inner / K::STEP * self.step), ..self }
    }
}

/// Products of blocks of 32 × 32, and the operands they want.
///
/// A *right* operand is `[inner / GROUP][columns][GROUP]`: GROUP elements along the inner dimension lie side by side.
///
/// # Safety
/// Of all functions: the machine has the instructions, and the memory is as said.
pub trait Engine {
    /// What tensors hold.
    type Elem: Lanes;
    /// What operands hold: the numbers of tensors, exactly.
    type Operand: HostElem;
    const GROUP: usize;
    /// Of left operands; 32 is a multiple of it.
    const STEP: usize;

    /// Copies `n` elements of a row, and fills it up with zeros to `width`, a multiple of 32.
    unsafe fn row(from: *const Self::Elem, n: usize, to: *mut Self::Operand, width: usize);

    /// `c [32, 32] = a [32, inner] · b [inner, 32]`, plus the old `c` where `add`; the inner dimension is a multiple of 32. `b` is given
    /// with the distance of its rows of GROUP · columns, `c` with that of its rows.
    unsafe fn block(
        inner: usize,
        a: Left<Self::Operand>,
        b: (*const Self::Operand, usize),
        c: (*mut f32, usize),
        add: bool,
    );

    /// What a probability is rounded to before it weighs values.
    unsafe fn round(p: __m512) -> __m512;

    /// Stores two rows, of 16 columns, as a part of a right operand of 32 columns, whose inner dimension are the rows.
    unsafe fn right(rows: [__m512; 2], to: *mut Self::Operand);

    /// Stores two rows of a left operand.
    unsafe fn left(rows: [__m512; 2], to: (*mut Self::Operand, usize));

    /// Prepares the thread for [`Engine::block`]; [`Engine::leave`] undoes it.
    unsafe fn enter() {}

    unsafe fn leave() {}
}
