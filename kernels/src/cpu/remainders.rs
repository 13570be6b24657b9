//! fp32 values as two halves of 16 bits: see [`ops::remainders`](crate::ops::remainders).

use candle_core::Tensor;
use half::bf16;

use crate::Result;
use crate::tensor::host::with_slice_mut;
use crate::tensor::parallel;
use crate::tensor::simd::vectorize;
use crate::tensor::view::View;

/// The halves of a value. For NaN the high half is a NaN and the low half 0.
#[inline(always)]
pub fn split_value(value: f32) -> (bf16, i16) {
    let bits = value.to_bits();
    let nan = value.is_nan();
    let high = if nan { bits >> 16 | 0x40 } else { bits.wrapping_add(0x8000) >> 16 };
    (bf16::from_bits(high as u16), if nan { 0 } else { bits as u16 as i16 })
}

/// Joins two halves to their value.
#[inline(always)]
pub fn join_value(high: bf16, low: i16) -> f32 {
    f32::from_bits((u32::from(high.to_bits()) << 16).wrapping_add_signed(i32::from(low)))
}

/// Operands must have been checked.
pub fn split(values: &Tensor, high: &Tensor, low: Option<&Tensor>, op: &'static str) -> Result<()> {
    let values = View::<f32>::new(values, op, "values")?;
    let values: &[f32] = &values;
    with_slice_mut::<bf16, _>(high, op, |high| match low {
        None => {
            parallel::blocks(high, parallel::GRAIN, |start, high| {
                vectorize(
                    #[inline(always)]
                    || {
                        high.iter_mut()
                            .zip(&values[start..])
                            .for_each(|(high, value)| *high = split_value(*value).0)
                    },
                );
            });
            Ok(())
        }
        Some(low) => with_slice_mut::<i16, _>(low, op, |low| {
            parallel::blocks2(high, parallel::GRAIN, low, parallel::GRAIN, |block, high, low| {
                let values = &values[block * parallel::GRAIN..][..high.len()];
                vectorize(
                    #[inline(always)]
                    || {
                        for ((value, high), low) in values.iter().zip(high).zip(low) {
                            (*high, *low) = split_value(*value);
                        }
                    },
                );
            });
            Ok(())
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_lose_nothing_and_the_high_one_is_the_nearest() {
        let patterns = (0..=u32::MAX).step_by(40_503).chain([
            0,
            0x8000,
            0x1_8000,
            0x7f7f_8000,
            0x7f7f_ffff,
            0x7f80_0000,
        ]);
        for bits in patterns.flat_map(|bits| [bits, bits ^ 1 << 31]) {
            let value = f32::from_bits(bits);
            let (high, low) = split_value(value);
            if value.is_nan() {
                assert!(high.is_nan() && join_value(high, low).is_nan(), "{bits:x}");
                continue;
            }
            assert_eq!(join_value(high, low).to_bits(), bits);
            let tie = bits & 0xffff == 0x8000;
            let nearest =
                if tie { bf16::from_bits((bits >> 16) as u16 + 1) } else { bf16::from_f32(value) };
            assert_eq!(high.to_bits(), nearest.to_bits(), "{bits:x}");
        }
    }
}
