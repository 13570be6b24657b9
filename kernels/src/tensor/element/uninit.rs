//! Uninitialized elements of results.
//!
//! A function that fills a result gets it as [`Uninit`] and has to return the same memory as a
//! plain slice. Only the methods here convert one to the other, and each writes every element. So
//! no element is read before it was written.

use std::mem::MaybeUninit;

use super::{Elem, Float};
use crate::tensor::simd::{AHEAD, LANES, prefetch};

/// Uninitialized elements of a result.
pub struct Uninit<'a, T>(pub(in crate::tensor) &'a mut [MaybeUninit<T>]);

impl<'a, T: Copy> Uninit<'a, T> {
    /// Treats `values` as a result: their old values are never read.
    #[inline(always)]
    pub fn over(values: &'a mut [T]) -> Self {
        // SAFETY: MaybeUninit<T> has the layout of T, and nothing here writes an uninitialized
        // value through it.
        Self(unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), values.len()) })
    }

    /// Number of elements to write.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Writes `values`, which must be at least as many as the elements.
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

    /// Lets `f` write all elements; `f` gets the address of the first.
    ///
    /// # Safety
    /// `f` must write as many elements as there are.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub unsafe fn by(self, f: impl FnOnce(*mut T)) -> &'a mut [T] {
        f(self.0.as_mut_ptr().cast());
        // SAFETY: the caller's promise.
        unsafe { self.0.assume_init_mut() }
    }

    /// Copies as many elements as there are.
    #[inline(always)]
    pub fn copy(self, values: &[T]) -> &'a mut [T] {
        self.0.write_copy_of_slice(values)
    }

    /// Lets `f` write each part of `width` elements (the last part may be shorter). `f` also gets
    /// the index of the part's first element.
    #[inline(always)]
    pub fn parts(
        self,
        width: usize,
        mut f: impl for<'r> FnMut(usize, Uninit<'r, T>) -> &'r mut [T],
    ) -> &'a mut [T] {
        let width = width.clamp(1, self.0.len().max(1));
        for (i, part) in self.0.chunks_mut(width).enumerate() {
            check(part, |out| f(i * width, out));
        }
        // SAFETY: `check` saw all parts written.
        unsafe { self.0.assume_init_mut() }
    }

    /// Lets `f` write the first `middle` elements and the others.
    #[inline(always)]
    pub fn halves(
        self,
        middle: usize,
        f: impl for<'r> FnOnce(Uninit<'r, T>, Uninit<'r, T>) -> (&'r mut [T], &'r mut [T]),
    ) -> &'a mut [T] {
        {
            let (left, right) = self.0.split_at_mut(middle);
            let places = [place(left), place(right)];
            let (left, right) = f(Uninit(left), Uninit(right));
            assert_eq!(
                [place(left), place(right)],
                places,
                "a kernel left a part of its result unwritten"
            );
        }
        // SAFETY: both halves were returned written.
        unsafe { self.0.assume_init_mut() }
    }
}

impl<'a, E: Elem> Uninit<'a, E> {
    /// Writes `f` of the elements at the same place of `stored`, widened, and of `wide`, rounded
    /// once.
    ///
    /// Works in blocks of [`LANES`] elements, which LLVM turns into whole vectors however long `f`
    /// is. The remainder is a block padded with zeros. Must be inlined into
    /// [`crate::tensor::simd::vectorize`].
    #[inline(always)]
    pub fn each<const N: usize, const M: usize>(
        self,
        stored: [&[E]; N],
        wide: [&[E::Acc]; M],
        f: impl Fn([E::Acc; N], [E::Acc; M]) -> E::Acc,
    ) -> &'a mut [E] {
        let [written] = each_of([self], stored, wide, |s, w| [f(s, w)]);
        written
    }

    /// As [`Uninit::each`], `K` results at once.
    #[inline(always)]
    pub fn all<const K: usize, const N: usize>(
        results: [Self; K],
        stored: [&[E]; N],
        f: impl Fn([E::Acc; N]) -> [E::Acc; K],
    ) -> [&'a mut [E]; K] {
        let n = results[0].len();
        assert!(
            results.iter().all(|result| result.len() == n),
            "results of one kernel differ in length"
        );
        each_of(results, stored, [], |s, []| f(s))
    }

    /// As [`Uninit::each`], two results at once.
    #[inline(always)]
    pub fn both<const N: usize>(
        self,
        other: Uninit<'a, E>,
        stored: [&[E]; N],
        f: impl Fn([E::Acc; N]) -> [E::Acc; 2],
    ) -> (&'a mut [E], &'a mut [E]) {
        assert_eq!(self.len(), other.len(), "two results of one kernel differ in length");
        let [a, b] = each_of([self, other], stored, [], |s, []| f(s));
        (a, b)
    }
}

/// Writes results, equally long, by blocks.
#[inline(always)]
fn each_of<'a, E: Elem, const K: usize, const N: usize, const M: usize>(
    outs: [Uninit<'a, E>; K],
    stored: [&[E]; N],
    wide: [&[E::Acc]; M],
    f: impl Fn([E::Acc; N], [E::Acc; M]) -> [E::Acc; K],
) -> [&'a mut [E]; K] {
    let n = outs[0].len();
    let (stored, wide) = (stored.map(|s| &s[..n]), wide.map(|w| &w[..n]));
    E::written(
        outs,
        #[inline(always)]
        |first, mut outs| {
            let n = outs[0].len();
            let (stored, wide) =
                (stored.map(|s| &s[first..first + n]), wide.map(|w| &w[first..first + n]));
            let whole = n - n % LANES;
            let mut at = 0;
            while at < whole {
                stored
                    .iter()
                    .for_each(|s| prefetch(s.as_ptr().wrapping_add(at).wrapping_byte_add(AHEAD)));
                let values = of_block::<E, K, N, M>(
                    stored.map(|s| block(s, at)),
                    wide.map(|w| block(w, at)),
                    &f,
                );
                for (out, values) in outs.iter_mut().zip(&values) {
                    out.0[at..at + LANES].write_copy_of_slice(values);
                }
                at += LANES;
            }
            if whole < n {
                let (s, w) =
                    (stored.map(|s| padded(&s[whole..])), wide.map(|w| padded(&w[whole..])));
                for (out, values) in outs.iter_mut().zip(of_block::<E, K, N, M>(s, w, &f)) {
                    out.0[whole..].write_copy_of_slice(&values[..n - whole]);
                }
            }
            // SAFETY: every block of each result was written; the results are equally long.
            outs.map(|out| unsafe { out.0.assume_init_mut() })
        },
    )
}

/// Applies `f` at every place of a block.
#[inline(always)]
fn of_block<E: Elem, const K: usize, const N: usize, const M: usize>(
    stored: [[E; LANES]; N],
    wide: [[E::Acc; LANES]; M],
    f: &impl Fn([E::Acc; N], [E::Acc; M]) -> [E::Acc; K],
) -> [[E::Acc; LANES]; K] {
    let mut values = [[E::Acc::ZERO; LANES]; K];
    for l in 0..LANES {
        let of_place =
            f(std::array::from_fn(|i| stored[i][l].load()), std::array::from_fn(|i| wide[i][l]));
        for (values, value) in values.iter_mut().zip(of_place) {
            values[l] = value;
        }
    }
    values
}

/// Number of results staged at a time.
const STAGE: usize = 16 * LANES;

/// Aligned to a cache line; otherwise every 64-byte vector would touch two lines.
#[repr(align(64))]
struct Stage([MaybeUninit<f32>; STAGE]);

/// Lets `f` write `outs`, equally long, in f32, and rounds the results. `f` gets the index of the
/// first element of its parts.
///
/// The f32 lie in buffers that stay in the L1 cache. Rounding many at once ([`Elem::store_all`]) is
/// faster than rounding each as it is computed, although it reads them again: the dependency chain
/// is shorter.
#[inline(always)]
pub fn staged<'a, E: Elem<Acc = f32>, const K: usize>(
    mut outs: [Uninit<'a, E>; K],
    mut f: impl for<'r> FnMut(usize, [Uninit<'r, f32>; K]) -> [&'r mut [f32]; K],
) -> [&'a mut [E]; K] {
    let mut buffers = [const { Stage([MaybeUninit::uninit(); STAGE]) }; K];
    let n = outs[0].len();
    for at in (0..n).step_by(STAGE) {
        let end = n.min(at + STAGE);
        let wide = f(at, buffers.each_mut().map(|buffer| Uninit(&mut buffer.0[..end - at])));
        for (out, wide) in outs.iter_mut().zip(wide) {
            check(&mut out.0[at..end], |out| E::store_all(wide, out));
        }
    }
    // SAFETY: every part of each result was written; the results are equally long.
    outs.map(|out| unsafe { out.0.assume_init_mut() })
}

/// [`LANES`] elements from `at` on.
#[inline(always)]
fn block<T: Elem>(from: &[T], at: usize) -> [T; LANES] {
    let mut block = [T::store(T::Acc::ZERO); LANES];
    block.copy_from_slice(&from[at..at + LANES]);
    block
}

/// Fewer elements than a block, padded with zeros.
#[inline(always)]
fn padded<T: Elem>(from: &[T]) -> [T; LANES] {
    let mut block = [T::store(T::Acc::ZERO); LANES];
    block[..from.len()].copy_from_slice(from);
    block
}

/// Address and length of a slice: two slices that agree in both are the same memory.
#[inline(always)]
pub(in crate::tensor) fn place<T>(slice: &[T]) -> (usize, usize) {
    (slice.as_ptr().addr(), slice.len())
}

/// Lets `f` write `out`, and checks that it did.
#[inline(always)]
pub(in crate::tensor) fn check<T>(
    out: &mut [MaybeUninit<T>],
    f: impl for<'r> FnOnce(Uninit<'r, T>) -> &'r mut [T],
) {
    let want = place(out);
    let written = f(Uninit(out));
    // A plain slice of this very memory can only come from a method that wrote it.
    assert_eq!(place(written), want, "a kernel left a part of its result unwritten");
}
