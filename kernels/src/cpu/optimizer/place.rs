//! Storage of a value in a step, and how the value is rounded to it.

use std::ops::Range;

use half::bf16;

use crate::cpu::remainders;
use crate::tensor::arguments::stochastic_rounding::Words;
use crate::tensor::element::{Elem, Float};

/// Storage of one value.
pub(super) trait Place<T> {
    fn get(&self) -> T;
    fn set(&mut self, value: T);
}

impl<T: Float> Place<T> for &mut T {
    #[inline(always)]
    fn get(&self) -> T {
        **self
    }

    #[inline(always)]
    fn set(&mut self, value: T) {
        **self = value;
    }
}

/// Two halves: see [`remainders`].
impl Place<f32> for (&mut bf16, &mut i16) {
    #[inline(always)]
    fn get(&self) -> f32 {
        remainders::join_value(*self.0, *self.1)
    }

    #[inline(always)]
    fn set(&mut self, value: f32) {
        (*self.0, *self.1) = remainders::split_value(value);
    }
}

/// The parameters of a block.
pub(super) trait Parameters<T> {
    /// The places of the parameters in `part`.
    fn places(&mut self, part: Range<usize>) -> impl Iterator<Item = impl Place<T>>;
}

impl<T: Float> Parameters<T> for &mut [T] {
    #[inline(always)]
    fn places(&mut self, part: Range<usize>) -> impl Iterator<Item = impl Place<T>> {
        self[part].iter_mut()
    }
}

/// High and low halves.
impl Parameters<f32> for (&mut [bf16], &mut [i16]) {
    #[inline(always)]
    fn places(&mut self, part: Range<usize>) -> impl Iterator<Item = impl Place<f32>> {
        self.0[part.clone()].iter_mut().zip(&mut self.1[part])
    }
}

/// The nearest bf16, ties to even.
pub(super) struct Nearest<'a>(&'a mut bf16);

impl Place<f32> for Nearest<'_> {
    #[inline(always)]
    fn get(&self) -> f32 {
        self.0.load()
    }

    #[inline(always)]
    fn set(&mut self, value: f32) {
        *self.0 = bf16::store(value);
    }
}

/// Rounded stochastically to one of the two neighbouring bf16: to the upper one if the value's low
/// 16 bits and the low half of the word add up to at least 2¹⁶.
pub(super) struct Random<'a>(&'a mut bf16, u32);

impl Place<f32> for Random<'_> {
    #[inline(always)]
    fn get(&self) -> f32 {
        self.0.load()
    }

    #[inline(always)]
    fn set(&mut self, value: f32) {
        *self.0 = round_by(value, self.1);
    }
}

/// `value` rounded by a random word; NaN stays NaN.
#[inline(always)]
pub(super) fn round_by(value: f32, word: u32) -> bf16 {
    let bits = value.to_bits();
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    let above = bits.wrapping_add(word & 0xffff) >> 16;
    bf16::from_bits(if is_nan { bits >> 16 | 0x40 } else { above } as u16)
}

/// The storage type of states.
pub(super) trait State<T>: Sized {
    /// Whether rounding depends on the element.
    const STOCHASTIC: bool;

    /// The places of `states`, rounded to the nearest.
    fn nearest(states: &mut [Self]) -> impl Iterator<Item = impl Place<T>>;

    /// The places of `states`, rounded by `words`.
    fn random(states: &mut [Self], words: Words) -> impl Iterator<Item = impl Place<T>>;
}

impl<T: Float> State<T> for T {
    const STOCHASTIC: bool = false;

    #[inline(always)]
    fn nearest(states: &mut [Self]) -> impl Iterator<Item = impl Place<T>> {
        states.iter_mut()
    }

    #[inline(always)]
    fn random(states: &mut [Self], _: Words) -> impl Iterator<Item = impl Place<T>> {
        states.iter_mut()
    }
}

impl State<f32> for bf16 {
    const STOCHASTIC: bool = true;

    #[inline(always)]
    fn nearest(states: &mut [Self]) -> impl Iterator<Item = impl Place<f32>> {
        states.iter_mut().map(Nearest)
    }

    #[inline(always)]
    fn random(states: &mut [Self], words: Words) -> impl Iterator<Item = impl Place<f32>> {
        let n = states.len();
        states.iter_mut().zip(words.take(n)).map(
            #[inline(always)]
            |(at, word)| Random(at, word),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_rounding_takes_one_of_two_neighbours_as_often_as_it_is_near() {
        for bits in [0x3f80_4000u32, 0x3f80_c000, 0xbf80_4000, 0x0000_4000, 0x3f80_0000] {
            let value = f32::from_bits(bits);
            let up = (0..1 << 16)
                .filter(|&word| round_by(value, word).to_bits() == (bits >> 16) as u16 + 1)
                .count();
            let down = (0..1 << 16)
                .filter(|&word| round_by(value, word).to_bits() == (bits >> 16) as u16)
                .count();
            assert_eq!((up, up + down), ((bits & 0xffff) as usize, 1 << 16), "{value}");
        }
    }

    #[test]
    fn random_rounding_keeps_what_is_no_number() {
        for word in [0, 0xffff, u32::MAX] {
            for value in [f32::NAN, f32::from_bits(0x7fff_ffff), f32::from_bits(0x7f80_0001)] {
                assert!(round_by(value, word).is_nan());
            }
            assert_eq!(round_by(f32::INFINITY, word), bf16::INFINITY);
            assert_eq!(round_by(0.0, word).to_bits(), 0);
        }
    }
}
