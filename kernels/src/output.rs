//! Results, allocated without being zeroed first and written block by block.
//!
//! Whoever fills a result gets it as [`Unwritten`] and has to hand back the same memory as a plain slice. Only the methods here
//! turn one into the other, and each writes every element; so no element is read before it was written.

use std::mem::MaybeUninit;

use crate::float::Elem;
use crate::par;

/// Elements of a result that hold nothing yet.
pub struct Unwritten<'a, T>(&'a mut [MaybeUninit<T>]);

impl<'a, T: Copy> Unwritten<'a, T> {
    /// As results whose old values nobody reads.
    #[inline(always)]
    pub fn over(values: &'a mut [T]) -> Self {
        // SAFETY: MaybeUninit<T> is laid out as T, and nothing here writes an uninitialized value through it.
        Self(unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), values.len()) })
    }

    /// Elements to write.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Writes `values`, of which there are at least as many as elements.
    #[inline(always)]
    pub fn write(self, values: impl Iterator<Item = T>) -> &'a mut [T] {
        let mut written = 0;
        for (place, value) in self.0.iter_mut().zip(values) {
            place.write(value);
            written += 1;
        }
        assert_eq!(written, self.0.len(), "a kernel has too few values for its result");
        // SAFETY: all of them were written just now.
        unsafe { self.0.assume_init_mut() }
    }

    /// Copies as many elements as there are.
    #[inline(always)]
    pub fn copy(self, values: &[T]) -> &'a mut [T] {
        self.0.write_copy_of_slice(values)
    }

    /// Has every part of `width` elements (of fewer the last) written by `f`, which also gets the number of its first element.
    #[inline(always)]
    pub fn parts(self, width: usize, mut f: impl for<'r> FnMut(usize, Unwritten<'r, T>) -> &'r mut [T]) -> &'a mut [T] {
        let width = width.clamp(1, self.0.len().max(1));
        for (i, part) in self.0.chunks_mut(width).enumerate() {
            check(part, |out| f(i * width, out));
        }
        // SAFETY: `check` saw all parts written.
        unsafe { self.0.assume_init_mut() }
    }

    /// Has the first `middle` elements and the others written by `f`.
    #[inline(always)]
    pub fn halves(
        self,
        middle: usize,
        f: impl for<'r> FnOnce(Unwritten<'r, T>, Unwritten<'r, T>) -> (&'r mut [T], &'r mut [T]),
    ) -> &'a mut [T] {
        {
            let (left, right) = self.0.split_at_mut(middle);
            let places = [place(left), place(right)];
            let (left, right) = f(Unwritten(left), Unwritten(right));
            assert_eq!([place(left), place(right)], places, "a kernel left a part of its result unwritten");
        }
        // SAFETY: both halves were handed back written.
        unsafe { self.0.assume_init_mut() }
    }
}

/// Where a slice lies: two slices that agree in it are the same memory.
#[inline(always)]
fn place<T>(slice: &[T]) -> (usize, usize) {
    (slice.as_ptr().addr(), slice.len())
}

/// Has `out` written by `f`.
#[inline(always)]
fn check<T>(out: &mut [MaybeUninit<T>], f: impl for<'r> FnOnce(Unwritten<'r, T>) -> &'r mut [T]) {
    let want = place(out);
    let written = f(Unwritten(out));
    // A plain slice of this very memory can only have come from a method that wrote it.
    assert_eq!(place(written), want, "a kernel left a part of its result unwritten");
}

/// `n` elements, of which every block of `block` is written by a call of `f`, which also gets the number of its first element.
pub fn blocks<T: Copy + Send>(
    n: usize,
    block: usize,
    f: impl for<'r> Fn(usize, Unwritten<'r, T>) -> &'r mut [T] + Sync,
) -> Vec<T> {
    let mut data = Vec::with_capacity(n);
    par::blocks(&mut data.spare_capacity_mut()[..n], block, |start, part| check(part, |out| f(start, out)));
    // SAFETY: `check` saw every block written, and the blocks are all of the first n elements.
    unsafe { data.set_len(n) };
    data
}

/// As [`blocks`] with blocks of `block` elements of the result and the blocks of `block_b` of `b` that have the same numbers; `f`
/// gets that number.
pub fn blocks2<T: Copy + Send, B: Send>(
    n: usize,
    block: usize,
    b: &mut [B],
    block_b: usize,
    f: impl for<'r> Fn(usize, Unwritten<'r, T>, &mut [B]) -> &'r mut [T] + Sync,
) -> Vec<T> {
    assert_eq!(n.div_ceil(block.max(1)), b.len().div_ceil(block_b.max(1)), "both have the same number of blocks");
    let mut data = Vec::with_capacity(n);
    par::blocks2(&mut data.spare_capacity_mut()[..n], block, b, block_b, |i, part, b| check(part, |out| f(i, out, b)));
    // SAFETY: as above; as many blocks of `b` keep the pairs from ending early.
    unsafe { data.set_len(n) };
    data
}

/// What a kernel does to some elements: writes results of as many operands.
pub trait Line<T>: for<'r> Fn(&[T], Unwritten<'r, T>) -> &'r mut [T] + Sync {}
impl<T, F: for<'r> Fn(&[T], Unwritten<'r, T>) -> &'r mut [T] + Sync> Line<T> for F {}

/// The same of pairs of operands.
pub trait Line2<T>: for<'r> Fn(&[T], &[T], Unwritten<'r, T>) -> &'r mut [T] + Sync {}
impl<T, F: for<'r> Fn(&[T], &[T], Unwritten<'r, T>) -> &'r mut [T] + Sync> Line2<T> for F {}

/// An elementwise function of `x`.
pub fn map<E: Elem>(x: &[E], f: impl Line<E::Acc>) -> Vec<E> {
    blocks(x.len(), par::GRAIN, |start, out| {
        let [mut wide, mut results] = [E::STAGE; 2].map(E::buffer);
        out.parts(E::STAGE, |at, out| {
            let x = E::widened(&x[start + at..][..out.len()], &mut wide);
            E::fill(out, &mut results, |out| f(x, out))
        })
    })
}

/// An elementwise function of `a` and `b`, which are equally long.
pub fn map2<E: Elem>(a: &[E], b: &[E], f: impl Line2<E::Acc>) -> Vec<E> {
    blocks(a.len(), par::GRAIN, |start, out| {
        let [mut wide_a, mut wide_b, mut results] = [E::STAGE; 3].map(E::buffer);
        out.parts(E::STAGE, |at, out| {
            let range = start + at..start + at + out.len();
            let (a, b) = (E::widened(&a[range.clone()], &mut wide_a), E::widened(&b[range], &mut wide_b));
            E::fill(out, &mut results, |out| f(a, b, out))
        })
    })
}
