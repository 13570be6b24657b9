//! Powers and logarithms of sixteen f32.

use std::arch::x86_64::*;
use std::f32::consts::LN_2;

/// 2ˣ to about 1e-7 relative. Results below 2⁻¹²⁶ become 2⁻¹²⁶; NaN stays NaN.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn exp2(x: __m512) -> __m512 {
    // If one operand is NaN, MAXPS returns the second.
    let x = _mm512_max_ps(_mm512_set1_ps(-126.0), x);
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let r = _mm512_sub_ps(x, n);
    // The minimax polynomial of 2ʳ on [−½, ½].
    let mut y = _mm512_set1_ps(EXP2[0]);
    for &coefficient in &EXP2[1..] {
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(coefficient));
    }
    _mm512_scalef_ps(y, n)
}

const EXP2: [f32; 7] =
    [1.534_581_2e-4, 1.339_993_1e-3, 9.618_489e-3, 5.550_328_6e-2, 0.240_226_46, LN_2, 1.0];

/// ln x to about 1e-7 relative to the larger of 1 and the result: 2·artanh((m − 1)/(m + 1)) + e·ln
/// 2 for x = m·2ᵉ.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn ln(x: __m512) -> __m512 {
    // m in [¾, 3/2).
    let m = _mm512_getmant_ps::<_MM_MANT_NORM_P75_1P5, _MM_MANT_SIGN_SRC>(x);
    let one = _mm512_set1_ps(1.0);
    // GETEXP returns the exponent for a mantissa in [1, 2).
    let e = _mm512_getexp_ps(x);
    let e = _mm512_mask_add_ps(e, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(m, one), e, one);
    let s = _mm512_div_ps(_mm512_sub_ps(m, one), _mm512_add_ps(m, one));
    let s2 = _mm512_mul_ps(s, s);
    let mut y = _mm512_set1_ps(2.0 / 11.0);
    for k in [9.0, 7.0, 5.0, 3.0, 1.0] {
        y = _mm512_fmadd_ps(y, s2, _mm512_set1_ps(2.0 / k));
    }
    _mm512_fmadd_ps(e, _mm512_set1_ps(LN_2), _mm512_mul_ps(s, y))
}

#[cfg(test)]
mod tests {
    use std::arch::x86_64::*;

    use super::{exp2, ln};
    use crate::tensor::simd::Isa;

    /// `f` of sixteen equal values.
    fn one(f: unsafe fn(__m512) -> __m512, x: f32) -> f32 {
        // SAFETY: the tests return early if the machine has no AVX-512.
        unsafe { _mm512_cvtss_f32(f(_mm512_set1_ps(x))) }
    }

    #[test]
    fn powers_are_within_two_units_in_the_last_place_of_the_exact_value() {
        if Isa::supported() < Isa::Avx512 {
            return;
        }
        for i in 0..500_000 {
            let x = -126.0 + i as f32 * (128.0 + 126.0 - 1e-4) / 5e5;
            let (got, want) = (one(exp2, x), f64::from(x).exp2());
            assert!(
                (f64::from(got) / want - 1.0).abs() <= 2.0 * f64::from(f32::EPSILON),
                "2^{x} = {got}, want {want}"
            );
        }
        assert_eq!(
            [one(exp2, 0.0), one(exp2, -3.0), one(exp2, 200.0)],
            [1.0, 0.125, f32::INFINITY]
        );
        assert_eq!([one(exp2, f32::NEG_INFINITY), one(exp2, -1e30)], [f32::MIN_POSITIVE; 2]);
        assert!(one(exp2, f32::NAN).is_nan());
    }

    #[test]
    fn logarithms_agree_with_f64() {
        if Isa::supported() < Isa::Avx512 {
            return;
        }
        for bits in (f32::MIN_POSITIVE.to_bits()..f32::MAX.to_bits()).step_by(4099) {
            let x = f32::from_bits(bits);
            let (got, want) = (one(ln, x), f64::from(x).ln());
            let error = (f64::from(got) - want).abs();
            assert!(
                error <= 2.0 * f64::from(f32::EPSILON) * want.abs().max(0.5),
                "ln {x} = {got}, want {want}"
            );
        }
        assert_eq!([one(ln, 1.0), one(ln, 0.0)], [0.0, f32::NEG_INFINITY]);
        assert!(one(ln, f32::INFINITY).is_infinite() && one(ln, f32::NAN).is_nan());
    }
}
