//! The element types that tensors are stored in, those that kernels compute in, and their transcendental functions.
//!
//! f32 `exp` is Cephes' `expf` (Moshier) in fused multiplications and additions, which round alike on every machine, and without
//! branches, so that loops over it vectorize; error below 2 ulp.

use std::ops::Neg;

use half::{bf16, f16};

use crate::host::HostElem;
use crate::simd::vectorize;

/// An element type that kernels compute in.
pub trait Float: Elem<Acc = Self> + Neg<Output = Self> {
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;
    /// eˣ; for f32, results below the smallest normal number are 0. (Not `exp`: where the type is known to be f32, that
    /// would be the inherent method, a call into the C library.)
    fn fast_exp(self) -> Self;
    fn ln(self) -> Self;
    fn sqrt(self) -> Self;
    /// The nearest value to `v`.
    fn of(v: f64) -> Self;
    fn f64(self) -> f64;
    /// The nearest value of a storage type, rounded once.
    fn narrow<E: Elem>(self) -> E;
}

impl Float for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f32::NEG_INFINITY;

    #[inline(always)]
    fn fast_exp(self) -> Self {
        const ROUND: f32 = 12_582_912.0; // 1.5·2²³: adding it leaves the nearest integer in the low bits
        const LN2_HI: f32 = 0.693_359_4;
        const LN2_LO: f32 = -2.121_944_4e-4;
        const UNDERFLOW: f32 = -87.336_54;
        const OVERFLOW: f32 = 88.722_84;
        let x = self;
        let t = x.mul_add(std::f32::consts::LOG2_E, ROUND);
        let n = t - ROUND;
        let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, x));
        let mut y = 1.987_569_1e-4f32;
        for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5, 1.0, 1.0] {
            y = y.mul_add(r, coefficient);
        }
        // n's low bits go to the exponent, ROUND's are beyond it. 2^128 is no f32, but then y < 1.
        let y = f32::from_bits(y.to_bits().wrapping_add(t.to_bits() << 23));
        let y = if x <= OVERFLOW { y } else { x + f32::INFINITY };
        if x < UNDERFLOW { 0.0 } else { y }
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
    fn narrow<E: Elem>(self) -> E {
        E::of_f32(self)
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
    fn narrow<E: Elem>(self) -> E {
        E::of_f64(self)
    }
}

/// An element type that activations and weights are stored in. Kernels load it into [`Elem::Acc`], compute there, and round
/// once when they store; statistics and gradients of parameters stay in `Acc`.
///
/// Results of elementwise functions are written by [`crate::output::Unwritten::each`], which converts in registers. Loops that need a row
/// several times are written for slices of `Acc` alone. [`Elem::widened`] and [`Elem::update`] give them those: of f32 and f64 the
/// slices themselves, of 16-bit types converted ones in buffers that stay in the L1 cache.
pub trait Elem: HostElem {
    /// What it is computed in: f32 for 16-bit types, else the type itself.
    type Acc: Float;
    fn load(self) -> Self::Acc;
    /// The nearest value, ties to even; NaN stays NaN.
    fn store(v: Self::Acc) -> Self;
    /// The nearest value, ties to even; NaN stays NaN.
    fn of_f32(v: f32) -> Self;
    /// The nearest value, ties to even; NaN stays NaN.
    fn of_f64(v: f64) -> Self;
    /// Elements that the loops below are given at a time, where elements are independent of each other.
    const STAGE: usize;
    /// What the functions below want as a buffer for up to `n` elements.
    fn buffer(n: usize) -> Vec<Self::Acc>;
    /// `values` in `Acc`.
    fn widened<'a>(values: &'a [Self], buffer: &'a mut [Self::Acc]) -> &'a [Self::Acc];
    /// Has `values` changed by `f` in `Acc`, and rounds.
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
            fn of_f32(v: f32) -> Self {
                v as Self
            }

            #[inline(always)]
            fn of_f64(v: f64) -> Self {
                v as Self
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

/// The part of [`Elem`] that stages 16-bit values in f32.
macro_rules! computed_in_f32 {
    () => {
        #[inline(always)]
        fn of_f32(v: f32) -> Self {
            Self::store(v)
        }

        #[inline(always)]
        fn of_f64(v: f64) -> Self {
            Self::from_f64(v)
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
            vectorize(
                #[inline(always)]
                || values.iter_mut().zip(buffer).for_each(|(v, &mut wide)| *v = Self::store(wide)),
            );
        }
    };
}

// 16-bit conversions are without branches and calls, so that loops over them vectorize.

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

    computed_in_f32!();
}

impl Elem for f16 {
    type Acc = f32;

    #[inline(always)]
    fn load(self) -> f32 {
        const INFINITY: u32 = 31 << 23; // f16's largest exponent, where f32's exponents lie
        const SMALLEST: f32 = 6.103_515_6e-5; // 2⁻¹⁴, the smallest normal f16
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7fff) << 13;
        let exponent = magnitude & INFINITY;
        let biased = magnitude + ((127 - 15) << 23);
        // A subnormal's fraction counts units of 2⁻²⁴: beside the implicit one of 2⁻¹⁴ it is exact.
        let subnormal = (f32::from_bits(biased + (1 << 23)) - SMALLEST).to_bits();
        let special = biased + ((128 - 16) << 23);
        let value = if exponent == INFINITY { special } else { biased };
        let value = if exponent == 0 { subnormal } else { value };
        f32::from_bits(value | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn store(v: f32) -> Self {
        const OVERFLOW: u32 = (127 + 16) << 23; // 2¹⁶: what rounds to infinity below it carries into f16's exponent
        const SMALLEST: u32 = (127 - 14) << 23; // 2⁻¹⁴
        const HALF: u32 = 126 << 23; // 0.5: its last bit is 2⁻²⁴, as f16's subnormals'
        let bits = v.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let odd = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + odd) >> 13;
        let subnormal = (f32::from_bits(magnitude) + f32::from_bits(HALF)).to_bits().wrapping_sub(HALF);
        let quiet = 0x7e00 | (magnitude >> 13) & 0x1ff;
        let value = if magnitude < SMALLEST { subnormal } else { normal };
        let value = if magnitude >= OVERFLOW { 0x7c00 } else { value };
        let value = if v.is_nan() { quiet } else { value };
        Self::from_bits((value | (bits >> 16) & 0x8000) as u16)
    }

    computed_in_f32!();
}

/// Runs `$body` with `$T` the storage type of tensor `$t`; dtypes that are no floats are errors of operation `$op`.
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

/// Runs `$body` with `$T` the float type of tensor `$t`; other dtypes are errors of operation `$op`.
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
mod tests {
    use half::{bf16, f16};

    use super::{Elem, Float};

    /// f32 patterns in small odd steps, and those where rounding decides between neighbours.
    fn patterns() -> impl Iterator<Item = f32> {
        let halfway = (0..1 << 16).flat_map(|high: u32| [0x7fff, 0x8000, 0x8001].map(|low| high << 16 | low));
        let halfway_f16 = (0..1 << 19).flat_map(|high: u32| [0xfff, 0x1000, 0x1001].map(|low| high << 13 | low));
        (0..=u32::MAX).step_by(1021).chain(halfway).chain(halfway_f16).map(f32::from_bits)
    }

    #[test]
    fn stores_are_the_reference_conversions() {
        for v in patterns() {
            let (b, h) = (<bf16 as Elem>::store(v), <f16 as Elem>::store(v));
            assert_eq!(b.to_bits(), bf16::from_f32(v).to_bits(), "{v}");
            let want = f16::from_f32_const(v);
            assert!(h.to_bits() == want.to_bits() || h.is_nan() && want.is_nan(), "{v}: {h}, want {want}");
            assert_eq!(h.is_sign_negative(), v.is_sign_negative());
        }
    }

    #[test]
    fn loads_are_exact_and_survive_storing() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
            assert!(b.load() == b.to_f32() || b.is_nan() && b.load().is_nan());
            assert!(h.load() == h.to_f32_const() || h.is_nan() && h.load().is_nan(), "{bits:x}: {}", h.load());
            assert!(<bf16 as Elem>::store(b.load()).to_bits() == bits || b.is_nan());
            assert!(<f16 as Elem>::store(h.load()).to_bits() == bits || h.is_nan());
        }
    }

    #[test]
    fn exp_is_within_two_ulp_of_the_exact_value() {
        for i in 0..2_000_000 {
            let x = -87.33 + i as f32 * (88.72 + 87.33) / 2e6;
            let (got, want) = (Float::fast_exp(x), f64::from(x).exp());
            let ulp = f64::from(f32::from_bits((want as f32).to_bits() + 1)) - f64::from(want as f32);
            assert!((f64::from(got) - want).abs() <= 2.0 * ulp, "exp({x}) = {got}, want {want}");
        }
    }

    #[test]
    fn exp_has_the_right_limits() {
        assert_eq!(Float::fast_exp(0.0f32), 1.0);
        assert_eq!(Float::fast_exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(Float::fast_exp(-1e30f32), 0.0);
        assert_eq!(Float::fast_exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(Float::fast_exp(88.73f32), f32::INFINITY);
        assert!(Float::fast_exp(f32::NAN).is_nan());
    }
}
