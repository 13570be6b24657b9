//! Our own matrix multiplication, blocked as in Goto and van de Geijn 2008 (*Anatomy of
//! high-performance matrix multiplication*) with micro-kernels per instruction set as in BLIS (Van
//! Zee and van de Geijn 2015).
//!
//! [`gemm`] takes strided operands in any storage type and sums in f32 (f64 for f64); its result is
//! in the storage type or in f32.
//!
//! An element's terms are summed in the same order wherever it lies: blocks of the inner dimension
//! depend on its length alone. So results depend neither on the number of threads nor on how rows
//! or columns are split into several products. bf16 × bf16 on AVX-512 BF16 and AMX treats subnormal
//! numbers as 0, in operands and sums, as the instructions do. On AMX, f32 and f16 are multiplied
//! as sums of bf16 (`amx_split`), as exactly as by FMA except for the smallest numbers.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_split;
#[cfg(target_arch = "x86_64")]
pub(crate) mod amx_tiles;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_common;
#[cfg(target_arch = "x86_64")]
mod avx512bf16;
#[cfg(target_arch = "x86_64")]
mod bf16_split;
mod buffer;
mod dispatch;
mod driver;
mod f64;
#[cfg(target_arch = "x86_64")]
mod interleave;
mod kernel;
#[cfg(target_arch = "x86_64")]
pub(crate) mod lanes;
mod layout;
mod lookahead;
mod overlap;
mod pack;
pub mod peak;
mod plan;
mod portable;
mod skinny;
mod strategies;
#[cfg(test)]
mod tests;
pub(crate) mod unpacked;
mod work_sharing;
mod workers;

use ::gemm::Parallelism;
use candle_core::DType;

use self::dispatch::WithKernel;
use self::kernel::Kernel;
use crate::tensor::element::{Elem, Float};
use crate::tensor::parallel;
use crate::tensor::simd::Isa;

/// A matrix in memory: pointer to element (0, 0), row stride, column stride.
#[derive(Clone, Copy, Debug)]
pub struct Mat<P>(pub P, pub usize, pub usize);

impl<T> Mat<*const T> {
    pub(crate) fn cast<U>(self) -> Mat<*const U> {
        Mat(self.0.cast(), self.1, self.2)
    }

    /// The transpose.
    pub fn t(self) -> Self {
        Self(self.0, self.2, self.1)
    }

    /// The matrix that begins at element (`row`, `column`) of this one. The element need not be
    /// readable.
    fn at(self, row: usize, column: usize) -> Self {
        Self(self.0.wrapping_add(row * self.1 + column * self.2), self.1, self.2)
    }
}

/// The initial value of a product's sums.
#[derive(Clone, Copy, Debug)]
pub enum Start<'a, E> {
    /// Nothing: the destination is overwritten, whatever it holds.
    Zero,
    /// The destination's old values.
    Old,
    /// This row, with as many elements as the destination has columns; the scale must be 1.
    Bias(&'a [E]),
}

impl<'a, E> Start<'a, E> {
    /// Reinterprets the element type. Only the number of elements is kept, even for a type of
    /// another size.
    fn cast<U>(self) -> Start<'a, U> {
        match self {
            Self::Zero => Start::Zero,
            Self::Old => Start::Old,
            // SAFETY: callers cast back to the elements' own type before they read them.
            Self::Bias(bias) => {
                Start::Bias(unsafe { std::slice::from_raw_parts(bias.as_ptr().cast(), bias.len()) })
            }
        }
    }
}

/// `true` accumulates.
impl<E> From<bool> for Start<'_, E> {
    fn from(accumulate: bool) -> Self {
        if accumulate { Self::Old } else { Self::Zero }
    }
}

/// All threads of the current pool, or only the caller.
pub fn all_threads() -> Parallelism {
    match parallel::threads() {
        1 => Parallelism::None,
        n => Parallelism::Rayon(n),
    }
}

/// `dst [m, n] = scale · a [m, k] · b [k, n]`, plus `start`.
///
/// # Safety
/// Every element of the three matrices must lie in memory that may be read (`a`, `b`) or written
/// (`dst`) during the call; `dst` must not overlap the others.
pub unsafe fn gemm<'a, E: Elem, C: Elem<Acc = E::Acc>>(
    shape: (usize, usize, usize),
    dst: Mat<*mut C>,
    start: impl Into<Start<'a, E>>,
    a: Mat<*const E>,
    b: Mat<*const E>,
    scale: E::Acc,
    threads: Parallelism,
) {
    // SAFETY: the caller's promise; the machine has the detected instruction set.
    unsafe { gemm_on(Isa::detected(), shape, dst, start.into(), None, a, b, scale, threads) }
}

/// As [`gemm`] with a scale of 1, plus a matrix of `dst`'s shape with contiguous columns and the
/// given row stride. Product and addition are rounded once.
///
/// # Safety
/// As [`gemm`], also for `plus`.
pub unsafe fn gemm_plus<'a, E: Elem, C: Elem<Acc = E::Acc>>(
    shape: (usize, usize, usize),
    dst: Mat<*mut C>,
    start: impl Into<Start<'a, E>>,
    plus: (*const C, usize),
    a: Mat<*const E>,
    b: Mat<*const E>,
    threads: Parallelism,
) {
    // SAFETY: the caller's promise; the machine has the detected instruction set.
    unsafe {
        gemm_on(Isa::detected(), shape, dst, start.into(), Some(plus), a, b, E::Acc::ONE, threads)
    }
}

/// # Safety
/// As [`gemm`], and the machine must have the instruction set.
unsafe fn gemm_on<E: Elem, C: Elem<Acc = E::Acc>>(
    isa: Isa,
    shape: (usize, usize, usize),
    dst: Mat<*mut C>,
    start: Start<'_, E>,
    plus: Option<(*const C, usize)>,
    a: Mat<*const E>,
    b: Mat<*const E>,
    scale: E::Acc,
    threads: Parallelism,
) {
    if let Start::Bias(bias) = start {
        assert_eq!(bias.len(), shape.1, "a bias must have an element for every column");
    }
    let (m, n, _) = shape;
    if m == 0 || n == 0 {
        return;
    }
    if E::DTYPE == DType::F64 {
        let (Mat(dst, row, column), start, scale) = (dst, start.cast(), scale.f64());
        let dst = Mat(dst.cast::<f64>(), row, column);
        // SAFETY: the caller's promise; E and C are f64.
        return unsafe {
            f64::gemm(shape, dst, start, a.cast(), b.cast(), scale, threads);
            if let Some((plus, stride)) = plus {
                f64::add(shape, dst, (plus.cast(), stride));
            }
        };
    }
    let threads = match threads {
        Parallelism::None => 1,
        Parallelism::Rayon(_) => parallel::threads(),
    };
    let call = Call { shape, dst, start, plus, a, b, scale: scale.f64() as f32, threads };
    // SAFETY: the caller's promise.
    unsafe { dispatch::with_kernel::<E, C, _>(isa, call.cast::<u8, u8>()) }
}

/// A product of at least one element: `dst [m, n] = scale · a [m, k] · b [k, n]`, plus `start` and
/// `plus`, for `shape` (m, n, k).
pub struct Call<'a, E, C> {
    pub shape: (usize, usize, usize),
    pub dst: Mat<*mut C>,
    pub start: Start<'a, E>,
    /// A matrix of dst's shape with contiguous columns, and its row stride.
    pub plus: Option<(*const C, usize)>,
    pub a: Mat<*const E>,
    pub b: Mat<*const E>,
    pub scale: f32,
    pub threads: usize,
}

impl<'a, E, C> Call<'a, E, C> {
    /// The same call with reinterpreted types ([`Start::cast`]).
    fn cast<F, D>(self) -> Call<'a, F, D> {
        let Self { shape, dst: Mat(dst, row, column), start, plus, a, b, scale, threads } = self;
        let plus = plus.map(|(at, stride)| (at.cast(), stride));
        Call {
            shape,
            dst: Mat(dst.cast(), row, column),
            start: start.cast(),
            plus,
            a: a.cast(),
            b: b.cast(),
            scale,
            threads,
        }
    }
}

impl WithKernel for Call<'_, u8, u8> {
    unsafe fn run<E: Elem<Acc = f32>, C: Elem<Acc = f32>, K: Kernel<E>>(self) {
        // E and C are the original types.
        let call = self.cast::<E, C>();
        // SAFETY: the caller's promise.
        unsafe {
            match skinny::fits::<E, C, K>(&call) {
                true => skinny::run::<E, C, K>(call),
                false => workers::run::<E, C, K>(call),
            }
        }
    }
}
