//! Arguments with which elementwise kernels find their rows: item counts, and divisors.

use candle_core::DType;

use super::DevicePointer;
use crate::{Error, Result};

/// A divisor, laid out as in `cuda/include/divider.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Divider {
    divisor: u32,
    factor: u32,
    shift: u32,
}

impl Divider {
    /// # Errors
    /// If the divisor is not in 1 ..= 2³¹.
    pub fn new(op: &'static str, divisor: usize) -> Result<Self> {
        if !(1..=1 << 31).contains(&divisor) {
            return Err(Error::shape(
                op,
                format!("rows of {divisor} items are nothing a GPU's kernel can have"),
            ));
        }
        let divisor = divisor as u64;
        let shift = divisor.next_power_of_two().trailing_zeros();
        let factor = (((1 << shift) - divisor) << 32) / divisor + 1;
        Ok(Self { divisor: divisor as u32, factor: factor as u32, shift })
    }
}

/// Checks a number of items, which kernels need below 2³¹ for division.
///
/// # Errors
/// If there are more.
pub fn items(op: &'static str, n: usize) -> Result<u32> {
    u32::try_from(n)
        .ok()
        .filter(|&n| n < 1 << 31)
        .ok_or_else(|| Error::shape(op, format!("{n} items are too many for one launch on a GPU")))
}

/// Number of elements in a vector of 16 bytes.
pub fn vector(dtype: DType) -> usize {
    16 / dtype.size_in_bytes().max(1)
}

/// Whether kernels may load 16-byte vectors from rows of `width` elements that begin at these
/// addresses.
pub fn in_vectors(width: usize, dtype: DType, pointers: &[Option<DevicePointer>]) -> bool {
    width.is_multiple_of(vector(dtype))
        && pointers.iter().flatten().all(|p| p.address().is_multiple_of(16))
}

/// Suffix of kernel names: for kernels that load vectors, or that take any width and address.
pub fn variant(vectors: bool) -> &'static str {
    if vectors { "" } else { "_any" }
}

#[cfg(test)]
mod tests {
    use super::Divider;

    #[test]
    fn multiplication_and_shift_divide_every_number_below_two_to_the_31() {
        let quotient = |d: Divider, n: u32| {
            let high = (u64::from(n) * u64::from(d.factor)) >> 32;
            (high as u32 + n) >> d.shift
        };
        let divisors = (1..300).chain([
            1000,
            4096,
            50_257,
            65_535,
            65_536,
            65_537,
            (1 << 30) + 1,
            (1 << 31) - 1,
            1 << 31,
        ]);
        for d in divisors {
            let divider = Divider::new("test", d).unwrap();
            let near = (1..=40u64).flat_map(|k| [k * d as u64 - 1, k * d as u64, k * d as u64 + 1]);
            let spread = (0..2000u64).map(|i| i * 1_073_741);
            for n in near.chain(spread).chain([(1 << 31) - 1]).filter(|&n| n < 1 << 31) {
                assert_eq!(u64::from(quotient(divider, n as u32)), n / d as u64, "{n} / {d}");
            }
        }
        assert!(Divider::new("test", 0).is_err());
    }
}
