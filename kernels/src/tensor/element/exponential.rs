//! eˣ and 2ˣ of f32: Cephes' `expf` and `exp2f` (Moshier). They use fused multiplications and
//! additions, which round alike on every machine, and no branches, so that loops over them
//! vectorize. Errors are below 2 ulp.

/// 1.5·2²³: adding it leaves the nearest integer in the low bits.
const ROUND: f32 = 12_582_912.0;

/// eˣ; 0 where the result is below the smallest normal number.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    const UNDERFLOW: f32 = -87.336_54;
    const OVERFLOW: f32 = 88.722_84;
    let t = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = t - ROUND;
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, x));
    let mut y = 1.987_569_1e-4f32;
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5, 1.0, 1.0] {
        y = y.mul_add(r, coefficient);
    }
    // The low bits of n move into the exponent; ROUND's bits are shifted out. 2^128 is not an f32,
    // but then y < 1.
    let y = f32::from_bits(y.to_bits().wrapping_add(t.to_bits() << 23));
    let y = if x <= OVERFLOW { y } else { x + f32::INFINITY };
    if x < UNDERFLOW { 0.0 } else { y }
}

/// 2ˣ for x ≥ −126; for smaller x some value from 0 to 2⁻¹²⁶; ∞ for NaN.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    // At these limits the exponents below add up to exactly ∞ and 0, so that larger magnitudes need
    // no case of their own.
    let x = if x < 128.0 { x } else { 128.0 };
    let x = if x > -127.0 { x } else { -127.0 };
    let t = x + ROUND;
    let r = x - (t - ROUND);
    let mut y = 1.535_336_2e-4f32;
    for coefficient in
        [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 0.240_226_48, std::f32::consts::LN_2, 1.0]
    {
        y = y.mul_add(r, coefficient);
    }
    f32::from_bits(y.to_bits().wrapping_add(t.to_bits() << 23))
}

#[cfg(test)]
mod tests {
    use super::{exp, exp2};
    use crate::tensor::element::Float;

    fn assert_within_two_ulp(f: fn(f32) -> f32, exact: fn(f64) -> f64, first: f32, last: f32) {
        for i in 0..2_000_000 {
            let x = first + i as f32 * (last - first) / 2e6;
            let (got, want) = (f(x), exact(f64::from(x)));
            let ulp =
                f64::from(f32::from_bits((want as f32).to_bits() + 1)) - f64::from(want as f32);
            assert!((f64::from(got) - want).abs() <= 2.0 * ulp, "of {x}: {got}, want {want}");
        }
    }

    #[test]
    fn exp_is_within_two_ulp_of_the_exact_value() {
        assert_within_two_ulp(exp, f64::exp, -87.33, 88.72);
    }

    #[test]
    fn exp2_is_within_two_ulp_of_the_exact_value() {
        assert_within_two_ulp(exp2, f64::exp2, -125.99, 127.99);
    }

    #[test]
    fn exp2_saturates_at_both_ends() {
        assert_eq!(exp2(0.0), 1.0);
        assert!(exp2(127.99).is_finite());
        for x in [128.0, 1e30, f32::INFINITY, f32::NAN, f32::from_bits(0x7fc0_0001)] {
            assert_eq!(exp2(x), f32::INFINITY, "{x}");
        }
        for x in [-127.0, -1e30, f32::NEG_INFINITY] {
            assert_eq!(exp2(x), 0.0, "{x}");
        }
        for i in 0..1000 {
            let y = exp2(-127.0 + i as f32 / 1000.0);
            assert!((0.0..=f32::MIN_POSITIVE).contains(&y), "{y:e}");
        }
        assert_eq!(Float::fast_exp2(f64::NAN), f64::INFINITY);
    }

    #[test]
    fn exp_has_the_right_limits() {
        assert_eq!(exp(0.0f32), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30f32), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(88.73f32), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }
}
