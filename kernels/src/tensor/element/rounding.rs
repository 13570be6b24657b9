//! Rounds many f32 to 16 bits by dedicated instructions, where the machine has them. To bf16, one
//! instruction rounds two vectors and replaces eight per vector; to f16, one rounds one vector and
//! replaces fourteen.

use half::{bf16, f16};

use super::Elem;
use super::Uninit;
#[cfg(target_arch = "x86_64")]
use crate::tensor::simd::Isa;
use crate::tensor::simd::vectorize;

/// Writes [`Elem::store`] of each of `wide`, bit for bit.
pub fn store_bf16<'a>(wide: &[f32], out: Uninit<'a, bf16>) -> &'a mut [bf16] {
    #[cfg(target_arch = "x86_64")]
    if Isa::detected() >= Isa::Avx512Bf16 {
        assert_eq!(
            wide.len(),
            out.len(),
            "a kernel rounds another number of values than its result has"
        );
        // SAFETY: the features were detected, and there is room for `wide`.
        return unsafe { out.by(|out| x86::store_bf16(wide, out)) };
    }
    vectorize(
        #[inline(always)]
        || out.write(wide.iter().map(|&v| bf16::store(v))),
    )
}

/// Writes [`Elem::store`] of each of `wide`, bit for bit.
pub fn store_f16<'a>(wide: &[f32], out: Uninit<'a, f16>) -> &'a mut [f16] {
    #[cfg(target_arch = "x86_64")]
    {
        assert_eq!(
            wide.len(),
            out.len(),
            "a kernel rounds another number of values than its result has"
        );
        let isa = Isa::detected();
        // SAFETY: the features were detected, and there is room for `wide`.
        unsafe {
            if isa >= Isa::Avx512 {
                return out.by(|out| x86::store_f16(wide, out));
            } else if isa >= Isa::Avx2 {
                return out.by(|out| x86::store_f16_avx2(wide, out));
            }
        }
    }
    vectorize(
        #[inline(always)]
        || out.write(wide.iter().map(|&v| f16::store(v))),
    )
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Elem, bf16, f16};

    /// The instruction rounds as [`Elem::store`], also subnormal numbers and NaNs.
    ///
    /// # Safety
    /// The machine must have the features, and `out` room for as many elements as `wide` has.
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    pub unsafe fn store_f16(wide: &[f32], out: *mut f16) {
        const LANES: usize = 16;
        let (vectors, rest) = wide.as_chunks::<LANES>();
        // SAFETY: each vector, then the rest, and as many elements of `out`.
        unsafe {
            for (i, vector) in vectors.iter().enumerate() {
                let half =
                    _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(vector.as_ptr()));
                _mm256_storeu_si256(out.add(i * LANES).cast(), half);
            }
            if !rest.is_empty() {
                let mask = (1 << rest.len()) - 1;
                let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_maskz_loadu_ps(
                    mask,
                    rest.as_ptr(),
                ));
                _mm256_mask_storeu_epi16(out.add(vectors.len() * LANES).cast(), mask, half);
            }
        }
    }

    /// As [`store_f16`].
    ///
    /// # Safety
    /// As [`store_f16`].
    #[target_feature(enable = "avx2,fma,f16c")]
    pub unsafe fn store_f16_avx2(wide: &[f32], out: *mut f16) {
        const LANES: usize = 8;
        let (vectors, rest) = wide.as_chunks::<LANES>();
        // SAFETY: each vector, then the rest, and as many elements of `out`.
        unsafe {
            for (i, vector) in vectors.iter().enumerate() {
                let half =
                    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(vector.as_ptr()));
                _mm_storeu_si128(out.add(i * LANES).cast(), half);
            }
            let left = out.add(vectors.len() * LANES);
            rest.iter().enumerate().for_each(|(i, &v)| left.add(i).write(f16::store(v)));
        }
    }

    /// Number of f32 that one instruction rounds.
    const PAIR: usize = 32;

    /// # Safety
    /// The machine must have the features, and `out` room for as many elements as `wide` has.
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub unsafe fn store_bf16(wide: &[f32], out: *mut bf16) {
        const SUBNORMAL: i32 = 0x20;
        let (pairs, rest) = wide.as_chunks::<PAIR>();
        for (i, pair) in pairs.iter().enumerate() {
            // SAFETY: both halves of the pair, and as many elements of `out`.
            unsafe {
                let out = out.add(i * PAIR);
                let (low, high) =
                    (_mm512_loadu_ps(pair.as_ptr()), _mm512_loadu_ps(pair.as_ptr().add(PAIR / 2)));
                let subnormal = [
                    _mm512_fpclass_ps_mask::<SUBNORMAL>(low),
                    _mm512_fpclass_ps_mask::<SUBNORMAL>(high),
                ];
                if _kortestz_mask16_u8(subnormal[0], subnormal[1]) == 1 {
                    _mm512_storeu_si512(
                        out.cast(),
                        std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)),
                    );
                } else {
                    one_by_one(pair, out);
                }
            }
        }
        if !rest.is_empty() {
            // SAFETY: the rest of both.
            unsafe { one_by_one(rest, out.add(pairs.len() * PAIR)) };
        }
    }

    /// Rounds pairs with a subnormal number: the instruction treats a subnormal f32 as 0, whatever
    /// MXCSR says. It rounds everything else as [`Elem::store`], NaNs too.
    ///
    /// # Safety
    /// `out` must have room for as many elements as `wide` has.
    #[inline(never)]
    unsafe fn one_by_one(wide: &[f32], out: *mut bf16) {
        for (i, &v) in wide.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { out.add(i).write(bf16::store(v)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::Uninit;
    use super::{store_bf16, store_f16};
    use crate::tensor::element::Elem;

    fn bits(values: &[f32]) -> Vec<u16> {
        let mut out = vec![bf16::ZERO; values.len()];
        store_bf16(values, Uninit::over(&mut out)).iter().map(|v| v.to_bits()).collect()
    }

    fn want(values: &[f32]) -> Vec<u16> {
        values.iter().map(|&v| bf16::from_f32(v).to_bits()).collect()
    }

    /// Every sign, exponent and fraction of bf16, followed by the bits that decide about rounding.
    fn all_bf16() -> Vec<f32> {
        let lows = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        (0..1 << 16)
            .flat_map(|high: u32| lows.map(|low| f32::from_bits(high << 16 | low)))
            .collect()
    }

    #[test]
    fn many_values_are_rounded_as_each_by_itself() {
        let values = all_bf16();
        assert!(bits(&values) == want(&values));
    }

    #[test]
    fn subnormal_numbers_are_kept_wherever_they_lie_among_others() {
        let values = all_bf16();
        let n = values.len();
        // A step that shares no factor with n puts each pattern among very different ones.
        let mixed: Vec<f32> = (0..n).map(|i| values[i * 65_537 % n]).collect();
        assert!(bits(&mixed) == want(&mixed));
        for at in 0..32 {
            let mut ones = [1.0f32; 32];
            ones[at] = 1e-39;
            assert_eq!(bits(&ones), want(&ones), "at {at}");
        }
    }

    #[test]
    fn any_number_of_values_is_rounded() {
        let values: Vec<f32> = (0..200).map(|i| i as f32 / 3.0).collect();
        for n in 0..values.len() {
            assert_eq!(bits(&values[..n]), want(&values[..n]));
        }
    }

    fn bits_f16(values: &[f32]) -> Vec<u16> {
        let mut out = vec![f16::ZERO; values.len()];
        store_f16(values, Uninit::over(&mut out)).iter().map(|v| v.to_bits()).collect()
    }

    fn want_f16(values: &[f32]) -> Vec<u16> {
        values.iter().map(|&v| <f16 as Elem>::store(v).to_bits()).collect()
    }

    /// Every sign, exponent and fraction of f16, followed by the bits that decide about rounding;
    /// and samples of all other exponents.
    #[test]
    fn many_values_are_rounded_to_f16_as_each_by_itself() {
        let lows = [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff];
        let near = (0..1 << 19).flat_map(|high: u32| lows.map(|low| high << 13 | low));
        let values: Vec<f32> =
            near.chain((0..=u32::MAX).step_by(4093)).map(f32::from_bits).collect();
        assert!(bits_f16(&values) == want_f16(&values));
    }

    #[test]
    fn any_number_of_values_is_rounded_to_f16() {
        let values: Vec<f32> = (0..50).map(|i| i as f32 / 3.0).collect();
        for n in 0..values.len() {
            assert_eq!(bits_f16(&values[..n]), want_f16(&values[..n]));
        }
    }
}
