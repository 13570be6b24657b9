//! The element types that tensors are stored in and those that kernels compute in.

mod exponential;
mod rounding;
pub(in crate::tensor) mod uninit;

use std::ops::Neg;

use half::{bf16, f16};

use self::rounding::{store_bf16, store_f16};
pub use self::uninit::Uninit;
use self::uninit::staged;
use crate::tensor::host::HostElem;
use crate::tensor::simd::vectorize;

/// An element type that kernels compute in.
pub trait Float: Elem<Acc = Self> + Neg<Output = Self> {
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;
    /// eˣ; for f32, results below the smallest normal number are 0. (The name is not `exp`: on a
    /// type known to be f32, that would call the inherent method, which calls the C library.)
    fn fast_exp(self) -> Self;
    /// 2ˣ for x ≥ −126; for smaller x some value from 0 to 2⁻¹²⁶; ∞ for NaN. Used for the sums 1 +
    /// 2ˣ of sigmoids: cheaper than [`Float::fast_exp`], and as exact if the argument was rounded.
    fn fast_exp2(self) -> Self;
    /// self · a + b, rounded once.
    fn fused(self, a: Self, b: Self) -> Self;
    fn ln(self) -> Self;
    fn sqrt(self) -> Self;
    /// The nearest value to `v`.
    fn of(v: f64) -> Self;
    fn f64(self) -> f64;
    /// Writes the nearest values of a storage type to `wide`, each rounded once. `wide` and `out`
    /// are equally long.
    fn narrow_all<'a, E: Elem>(wide: &[Self], out: Uninit<'a, E>) -> &'a mut [E];
}

impl Float for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f32::NEG_INFINITY;

    #[inline(always)]
    fn fast_exp(self) -> Self {
        exponential::exp(self)
    }

    #[inline(always)]
    fn fast_exp2(self) -> Self {
        exponential::exp2(self)
    }

    #[inline(always)]
    fn fused(self, a: Self, b: Self) -> Self {
        self.mul_add(a, b)
    }

    #[inline(always)]
    fn ln(self) -> Self {
        f32::ln(self)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }

    #[inline(always)]
    fn of(v: f64) -> Self {
        v as f32
    }

    #[inline(always)]
    fn f64(self) -> f64 {
        f64::from(self)
    }

    #[inline(always)]
    fn narrow_all<'a, E: Elem>(wide: &[Self], out: Uninit<'a, E>) -> &'a mut [E] {
        E::of_f32s(wide, out)
    }
}

impl Float for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f64::NEG_INFINITY;

    #[inline(always)]
    fn fast_exp(self) -> Self {
        f64::exp(self)
    }

    #[inline(always)]
    fn fast_exp2(self) -> Self {
        if self.is_nan() { f64::INFINITY } else { f64::exp2(self) }
    }

    #[inline(always)]
    fn fused(self, a: Self, b: Self) -> Self {
        self.mul_add(a, b)
    }

    #[inline(always)]
    fn ln(self) -> Self {
        f64::ln(self)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }

    #[inline(always)]
    fn of(v: f64) -> Self {
        v
    }

    #[inline(always)]
    fn f64(self) -> f64 {
        self
    }

    #[inline(always)]
    fn narrow_all<'a, E: Elem>(wide: &[Self], out: Uninit<'a, E>) -> &'a mut [E] {
        out.write(wide.iter().map(|&v| E::of_f64(v)))
    }
}

/// An element type that activations and weights are stored in. Kernels load it into [`Elem::Acc`],
/// compute there, and round once when they store. Statistics and gradients of parameters stay in
/// `Acc`.
///
/// [`Uninit::each`] writes the results of elementwise functions; it widens in registers and rounds
/// many values at once. Loops that change values in place are written for slices of `Acc` alone.
/// [`Elem::widened`] and [`Elem::update`] provide such slices: for f32 and f64 the slices
/// themselves, for 16-bit types converted copies in buffers that stay in the L1 cache.
pub trait Elem: HostElem {
    /// The type that kernels compute in: f32 for 16-bit types, else the type itself.
    type Acc: Float;
    fn load(self) -> Self::Acc;
    /// The nearest value, ties to even; NaN stays NaN.
    fn store(v: Self::Acc) -> Self;
    /// The nearest value, ties to even; NaN stays NaN.
    fn of_f64(v: f64) -> Self;
    /// Writes the nearest value to each of `wide`, rounded as by [`Elem::store`]. `wide` and `out`
    /// are equally long.
    fn of_f32s<'a>(wide: &[f32], out: Uninit<'a, Self>) -> &'a mut [Self];
    /// Writes [`Elem::store`] of each of `wide`. `wide` and `out` are equally long.
    fn store_all<'a>(wide: &[Self::Acc], out: Uninit<'a, Self>) -> &'a mut [Self];
    /// Lets `f` write `outs`, equally long, in `Acc`, part by part, and rounds the results. `f`
    /// gets the index of the first element of its part.
    fn written<'a, const K: usize>(
        outs: [Uninit<'a, Self>; K],
        f: impl for<'r> FnMut(usize, [Uninit<'r, Self::Acc>; K]) -> [&'r mut [Self::Acc]; K],
    ) -> [&'a mut [Self]; K];
    /// Elements per call of the loops below, where elements are independent of each other.
    const STAGE: usize;
    /// A buffer for up to `n` elements, as the functions below need it.
    fn buffer(n: usize) -> Vec<Self::Acc>;
    /// `values` in `Acc`.
    fn widened<'a>(values: &'a [Self], buffer: &'a mut [Self::Acc]) -> &'a [Self::Acc];
    /// Lets `f` change `values` in `Acc`, and rounds the results.
    fn update(values: &mut [Self], buffer: &mut [Self::Acc], f: impl FnOnce(&mut [Self::Acc]));
}

macro_rules! computed_in_itself {
    ($($t:ty),*) => {$(
        impl Elem for $t {
            type Acc = Self;

            #[inline(always)]
            fn load(self) -> Self {
                self
            }

            #[inline(always)]
            fn store(v: Self) -> Self {
                v
            }

            #[inline(always)]
            fn of_f32s<'a>(wide: &[f32], out: Uninit<'a, Self>) -> &'a mut [Self] {
                out.write(wide.iter().map(|&v| v as Self))
            }

            #[inline(always)]
            fn of_f64(v: f64) -> Self {
                v as Self
            }

            #[inline(always)]
            fn store_all<'a>(wide: &[Self], out: Uninit<'a, Self>) -> &'a mut [Self] {
                out.copy(wide)
            }

            #[inline(always)]
            fn written<'a, const K: usize>(
                outs: [Uninit<'a, Self>; K],
                mut f: impl for<'r> FnMut(usize, [Uninit<'r, Self>; K]) -> [&'r mut [Self]; K],
            ) -> [&'a mut [Self]; K] {
                f(0, outs)
            }

            const STAGE: usize = usize::MAX;

            fn buffer(_: usize) -> Vec<Self> {
                Vec::new()
            }

            fn widened<'a>(values: &'a [Self], _: &'a mut [Self]) -> &'a [Self] {
                values
            }

            fn update(values: &mut [Self], _: &mut [Self], f: impl FnOnce(&mut [Self])) {
                f(values);
            }
        }
    )*};
}
computed_in_itself!(f32, f64);

/// `v` in f32, so that rounding the result again gives the same as rounding `v` directly. The last
/// bit records whether anything was cut off (Boldo & Melquiond 2008, "Emulation of FMA and
/// correctly rounded sums").
#[inline(always)]
fn rounded_to_odd(v: f64) -> f32 {
    let nearest = v as f32;
    let bits = nearest.to_bits();
    if f64::from(nearest) == v || v.is_nan() || bits & 1 == 1 {
        return nearest;
    }
    // `nearest` is even: take the odd neighbour on the other side of v.
    let outwards = f64::from(nearest).abs() < v.abs();
    f32::from_bits(if outwards { bits + 1 } else { bits - 1 })
}

/// The part of [`Elem`] that stages 16-bit values in f32.
macro_rules! computed_in_f32 {
    () => {
        #[inline(always)]
        fn of_f32s<'a>(wide: &[f32], out: Uninit<'a, Self>) -> &'a mut [Self] {
            Self::store_all(wide, out)
        }

        #[inline(always)]
        fn of_f64(v: f64) -> Self {
            Self::store(rounded_to_odd(v))
        }

        #[inline(always)]
        fn written<'a, const K: usize>(
            outs: [Uninit<'a, Self>; K],
            f: impl for<'r> FnMut(usize, [Uninit<'r, f32>; K]) -> [&'r mut [f32]; K],
        ) -> [&'a mut [Self]; K] {
            staged(outs, f)
        }

        const STAGE: usize = 1024;

        fn buffer(n: usize) -> Vec<f32> {
            vec![0.0; n]
        }

        fn widened<'a>(values: &'a [Self], buffer: &'a mut [f32]) -> &'a [f32] {
            let wide = &mut buffer[..values.len()];
            vectorize(
                #[inline(always)]
                || wide.iter_mut().zip(values).for_each(|(wide, v)| *wide = v.load()),
            );
            wide
        }

        fn update(values: &mut [Self], buffer: &mut [f32], f: impl FnOnce(&mut [f32])) {
            let n = values.len();
            Self::widened(values, buffer);
            f(&mut buffer[..n]);
            Self::store_all(&buffer[..n], Uninit::over(values));
        }
    };
}

// Conversions of 16-bit types have no branches and calls, so that loops over them vectorize.

impl Elem for bf16 {
    type Acc = f32;

    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn store(v: f32) -> Self {
        let bits = v.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        Self::from_bits(if v.is_nan() { quiet } else { rounded } as u16)
    }

    fn store_all<'a>(wide: &[f32], out: Uninit<'a, Self>) -> &'a mut [Self] {
        store_bf16(wide, out)
    }

    computed_in_f32!();
}

impl Elem for f16 {
    type Acc = f32;

    #[inline(always)]
    fn load(self) -> f32 {
        const INFINITY: u32 = 31 << 23; // f16's largest exponent, at the place of f32's exponent
        const SMALLEST: f32 = 6.103_515_6e-5; // 2⁻¹⁴, the smallest normal f16
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7fff) << 13;
        let exponent = magnitude & INFINITY;
        let biased = magnitude + ((127 - 15) << 23);
        // A subnormal's fraction counts units of 2⁻²⁴. Added to the implicit 2⁻¹⁴ it is exact.
        let subnormal = (f32::from_bits(biased + (1 << 23)) - SMALLEST).to_bits();
        let special = biased + ((128 - 16) << 23);
        let value = if exponent == INFINITY { special } else { biased };
        let value = if exponent == 0 { subnormal } else { value };
        f32::from_bits(value | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn store(v: f32) -> Self {
        // 2¹⁶: smaller values that round to infinity carry into f16's exponent.
        const OVERFLOW: u32 = (127 + 16) << 23;
        const SMALLEST: u32 = (127 - 14) << 23; // 2⁻¹⁴
        const HALF: u32 = 126 << 23; // 0.5: its last bit is 2⁻²⁴, as that of f16's subnormals
        let bits = v.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let odd = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + odd) >> 13;
        let subnormal =
            (f32::from_bits(magnitude) + f32::from_bits(HALF)).to_bits().wrapping_sub(HALF);
        let quiet = 0x7e00 | (magnitude >> 13) & 0x1ff;
        let value = if magnitude < SMALLEST { subnormal } else { normal };
        let value = if magnitude >= OVERFLOW { 0x7c00 } else { value };
        let value = if v.is_nan() { quiet } else { value };
        Self::from_bits((value | (bits >> 16) & 0x8000) as u16)
    }

    fn store_all<'a>(wide: &[f32], out: Uninit<'a, Self>) -> &'a mut [Self] {
        store_f16(wide, out)
    }

    computed_in_f32!();
}

/// Runs `$body` with `$T` the storage type of tensor `$t`; dtypes that are not floats are errors of
/// operation `$op`.
macro_rules! by_elem {
    ($t:expr, $op:expr, $T:ident => $body:expr) => {
        match $t.dtype() {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            dtype => Err($crate::Error::DType { op: $op, dtype }),
        }
    };
}
pub(crate) use by_elem;

/// Runs `$body` with `$T` the float type of tensor `$t`; other dtypes are errors of operation
/// `$op`.
macro_rules! by_float {
    ($t:expr, $op:expr, $T:ident => $body:expr) => {
        match $t.dtype() {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            dtype => Err($crate::Error::DType { op: $op, dtype }),
        }
    };
}
pub(crate) use by_float;

#[cfg(test)]
mod tests;
