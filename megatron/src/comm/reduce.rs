//! Element-wise reductions of byte buffers in rank order.
//!
//! Element i of the result is `((r0 + r1) + r2) + …`, whatever the length, alignment or slicing.
//! Its bits therefore depend only on the data and the order of the ranks. bf16 and f16 are combined
//! in f32 and rounded once.

use candle_core::DType;
use half::{bf16, f16};
use kernels::vectorize;

use super::ReduceOp;
use crate::{Error, Result};

/// Elements combined at a time. Partial results then stay in the first-level cache.
const BLOCK: usize = 256;
/// Elements combined at a time when fewer than a block are left: a few vectors.
const VECTOR: usize = 32;

trait Element {
    /// Type of partial results.
    type Acc: Copy + Default;
    const SIZE: usize;
    fn load(bytes: &[u8]) -> Self::Acc;
    fn store(acc: Self::Acc, bytes: &mut [u8]);
    fn sum(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn min(a: Self::Acc, b: Self::Acc) -> Self::Acc;
}

macro_rules! element {
    ($t:ty, $acc:ty, $to:expr, $from:expr, $sum:expr, $is_nan:expr) => {
        impl Element for $t {
            type Acc = $acc;
            const SIZE: usize = size_of::<$t>();
            #[inline(always)]
            fn load(bytes: &[u8]) -> $acc {
                let mut raw = [0; size_of::<$t>()];
                raw.copy_from_slice(bytes);
                $to(<$t>::from_ne_bytes(raw))
            }
            #[inline(always)]
            fn store(acc: $acc, bytes: &mut [u8]) {
                let value: $t = $from(acc);
                bytes.copy_from_slice(&value.to_ne_bytes());
            }
            #[inline(always)]
            fn sum(a: $acc, b: $acc) -> $acc {
                $sum(a, b)
            }
            // NaN in either operand wins: once `a` is NaN, no comparison replaces it.
            #[inline(always)]
            fn max(a: $acc, b: $acc) -> $acc {
                if b > a || $is_nan(b) { b } else { a }
            }
            #[inline(always)]
            fn min(a: $acc, b: $acc) -> $acc {
                if b < a || $is_nan(b) { b } else { a }
            }
        }
    };
}

macro_rules! integer {
    ($t:ty) => {
        element!($t, $t, |x| x, |x| x, |a: $t, b: $t| a.wrapping_add(b), |_| false);
    };
}
integer!(u8);
integer!(u32);
integer!(i64);
element!(f32, f32, |x| x, |x| x, |a, b| a + b, f32::is_nan);
element!(f64, f64, |x| x, |x| x, |a, b| a + b, f64::is_nan);
element!(bf16, f32, widen, narrow, |a, b| a + b, f32::is_nan);
element!(f16, f32, f16::to_f32, f16::from_f32, |a, b| a + b, f32::is_nan);

#[inline(always)]
fn widen(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// The nearest bf16, ties to even; NaN stays NaN. Without branches, so that loops vectorize.
#[inline(always)]
fn narrow(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let quiet = (bits >> 16) as u16 | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { rounded })
}

/// A rank's elements, or `None` if they are in `out` itself.
type Part<'a> = Option<&'a [u8]>;

/// Combines `N` elements of `parts` from byte `at` on into `out` and `copy`. The length of `copy`
/// is that of `out` or 0.
#[inline(always)]
fn fold_block<E: Element, const N: usize>(
    at: usize,
    parts: &[Part],
    out: &mut [u8],
    copy: &mut [u8],
    combine: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy,
) {
    let block = N * E::SIZE;
    let mut acc = [E::Acc::default(); N];
    let store = |acc: &[E::Acc; N], out: &mut [u8]| {
        for i in 0..N {
            E::store(acc[i], &mut out[i * E::SIZE..(i + 1) * E::SIZE]);
        }
    };
    // Indices with constant bounds, which LLVM vectorizes.
    for (r, part) in parts.iter().enumerate() {
        let part = &part.unwrap_or(&*out)[at..at + block];
        let element = |i: usize| E::load(&part[i * E::SIZE..(i + 1) * E::SIZE]);
        for i in 0..N {
            acc[i] = if r == 0 { element(i) } else { combine(acc[i], element(i)) };
        }
    }
    store(&acc, &mut out[at..at + block]);
    if let Some(copy) = copy.get_mut(at..at + block) {
        store(&acc, copy);
    }
}

/// Combines `parts` into `out` and `copy`. The length of `copy` is that of `out` or 0.
#[inline(always)]
fn fold<E: Element>(
    parts: &[Part],
    out: &mut [u8],
    copy: &mut [u8],
    combine: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy,
) {
    let mut at = 0;
    while out.len() - at >= BLOCK * E::SIZE {
        fold_block::<E, BLOCK>(at, parts, out, copy, combine);
        at += BLOCK * E::SIZE;
    }
    // In a small tensor, the remainder after full blocks is most of it.
    while out.len() - at >= VECTOR * E::SIZE {
        fold_block::<E, VECTOR>(at, parts, out, copy, combine);
        at += VECTOR * E::SIZE;
    }
    while at < out.len() {
        fold_block::<E, 1>(at, parts, out, copy, combine);
        at += E::SIZE;
    }
}

fn fold_by<E: Element>(parts: &[Part], out: &mut [u8], copy: &mut [u8], op: ReduceOp) {
    match op {
        ReduceOp::Sum => vectorize(
            #[inline(always)]
            || fold::<E>(parts, out, copy, E::sum),
        ),
        ReduceOp::Max => vectorize(
            #[inline(always)]
            || fold::<E>(parts, out, copy, E::max),
        ),
        ReduceOp::Min => vectorize(
            #[inline(always)]
            || fold::<E>(parts, out, copy, E::min),
        ),
    }
}

/// Number of parts that are listed without an allocation, which would take as long as combining
/// them.
const FEW: usize = 16;

/// Combines the elements of `parts` (one slice of equal length per rank, in rank order, native
/// endian) into `out`.
///
/// # Errors
/// If lengths differ or `dtype` cannot be reduced.
pub(crate) fn reduce_bytes<'a>(
    parts: impl IntoIterator<Item = &'a [u8]>,
    out: &mut [u8],
    dtype: DType,
    op: ReduceOp,
) -> Result<()> {
    reduce_in_place(parts.into_iter().map(Some), out, &mut [], dtype, op)
}

/// As [`reduce_bytes`], where `None` in `parts` stands for the elements in `inout`, which then
/// holds the result. `copy`, unless it is empty, receives the result, too.
///
/// # Errors
/// If lengths differ or `dtype` cannot be reduced.
pub(crate) fn reduce_in_place<'a>(
    parts: impl IntoIterator<Item = Option<&'a [u8]>>,
    inout: &mut [u8],
    copy: &mut [u8],
    dtype: DType,
    op: ReduceOp,
) -> Result<()> {
    if !copy.is_empty() && copy.len() != inout.len() {
        return Err(Error::comm(format!(
            "cannot combine {} bytes into a copy of {}",
            inout.len(),
            copy.len()
        )));
    }
    let (mut few, mut many, mut count) = ([None; FEW], Vec::new(), 0);
    for part in parts {
        if let Some(place) = few.get_mut(count) {
            *place = part;
        } else {
            if many.is_empty() {
                many.extend_from_slice(&few);
            }
            many.push(part);
        }
        count += 1;
    }
    reduce(if many.is_empty() { &few[..count] } else { &many }, inout, copy, dtype, op)
}

fn reduce(
    parts: &[Part],
    out: &mut [u8],
    copy: &mut [u8],
    dtype: DType,
    op: ReduceOp,
) -> Result<()> {
    if parts.is_empty() || parts.iter().flatten().any(|part| part.len() != out.len()) {
        return Err(Error::comm(format!(
            "cannot combine parts of unequal lengths into {} bytes",
            out.len()
        )));
    }
    match dtype {
        DType::U8 => fold_by::<u8>(parts, out, copy, op),
        DType::U32 => fold_by::<u32>(parts, out, copy, op),
        DType::I64 => fold_by::<i64>(parts, out, copy, op),
        DType::BF16 => fold_by::<bf16>(parts, out, copy, op),
        DType::F16 => fold_by::<f16>(parts, out, copy, op),
        DType::F32 => fold_by::<f32>(parts, out, copy, op),
        DType::F64 => fold_by::<f64>(parts, out, copy, op),
        dtype => {
            return Err(Error::comm(format!(
                "elements of dtype {} cannot be reduced",
                dtype.as_str()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(bytes: &[u8]) -> Vec<f32> {
        bytes.chunks_exact(4).map(f32::load).collect()
    }

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_ne_bytes()).collect()
    }

    #[test]
    fn sums_run_in_the_order_of_the_parts() {
        // (1e8 + -1e8) + 1 = 1, but 1e8 + (-1e8 + 1) = 0 in f32.
        let parts = [bytes(&[1e8; 3]), bytes(&[-1e8; 3]), bytes(&[1.0; 3])];
        let mut out = vec![0; 12];
        reduce_bytes(parts.each_ref().map(|p| &p[..]), &mut out, DType::F32, ReduceOp::Sum)
            .unwrap();
        assert_eq!(f32s(&out), [1.0; 3]);
    }

    #[test]
    fn sixteen_bit_sums_are_rounded_once() {
        // bf16 has 8 bits: 256 + 1 rounds to 256, so rounding after every addition would give 256.
        let part = |v: f32| bf16::from_f32(v).to_ne_bytes();
        let (big, one) = (part(256.0), part(1.0));
        let mut out = [0; 2];
        reduce_bytes([&big[..], &one, &one], &mut out, DType::BF16, ReduceOp::Sum).unwrap();
        assert_eq!(bf16::from_ne_bytes(out).to_f32(), 258.0);
    }

    #[test]
    fn bf16_is_rounded_as_the_reference_conversion_does() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(narrow(x).to_bits(), bf16::from_f32(x).to_bits(), "{:08x}", x.to_bits());
            }
        }
    }

    #[test]
    fn a_nan_wins_maximum_and_minimum_wherever_it_stands() {
        for op in [ReduceOp::Max, ReduceOp::Min] {
            for at in 0..3 {
                let mut values = [[1.0], [2.0], [3.0]];
                values[at] = [f32::NAN];
                let parts = values.map(|v| bytes(&v));
                let mut out = vec![0; 4];
                reduce_bytes(parts.each_ref().map(|p| &p[..]), &mut out, DType::F32, op).unwrap();
                assert!(f32s(&out)[0].is_nan(), "{op:?} at {at}");
            }
        }
    }

    #[test]
    fn in_place_the_result_is_the_same_and_its_copy_too() {
        let len = 2 * BLOCK + 2 * VECTOR + 5;
        let parts: Vec<_> = (0..3)
            .map(|r| bytes(&(0..len).map(|i| 0.1 * (i + 7 * r) as f32).collect::<Vec<_>>()))
            .collect();
        let mut expected = vec![0; 4 * len];
        reduce_bytes(parts.iter().map(|part| &part[..]), &mut expected, DType::F32, ReduceOp::Sum)
            .unwrap();
        for own in 0..3 {
            let (mut inout, mut copy) = (parts[own].clone(), vec![0; 4 * len]);
            let parts =
                || parts.iter().enumerate().map(move |(r, part)| (r != own).then_some(&part[..]));
            reduce_in_place(parts(), &mut inout, &mut copy, DType::F32, ReduceOp::Sum).unwrap();
            assert!(inout == expected && copy == expected, "own part {own}");
            assert!(
                reduce_in_place(parts(), &mut inout, &mut copy[4..], DType::F32, ReduceOp::Sum)
                    .is_err()
            );
        }
    }

    #[test]
    fn many_parts_are_combined_in_their_order_too() {
        for count in [FEW, FEW + 1, 2 * FEW + 3] {
            let parts: Vec<_> = (0..count).map(|r| bytes(&[1.0 / (r + 1) as f32])).collect();
            let mut out = vec![0; 4];
            reduce_bytes(parts.iter().map(|part| &part[..]), &mut out, DType::F32, ReduceOp::Sum)
                .unwrap();
            assert_eq!(
                f32s(&out)[0],
                (0..count).map(|r| 1.0 / (r + 1) as f32).sum::<f32>(),
                "{count}"
            );
        }
    }

    #[test]
    fn parts_longer_than_a_block_are_combined_whole() {
        let len = 2 * BLOCK + 2 * VECTOR + 5;
        let part: Vec<f32> = (0..len).map(|i| i as f32).collect();
        let mut out = vec![0; 4 * len];
        reduce_bytes([&bytes(&part)[..]; 2], &mut out, DType::F32, ReduceOp::Sum).unwrap();
        assert_eq!(f32s(&out), part.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
    }
}
