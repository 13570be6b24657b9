//! Stochastic rounding that is independent of the parallel layout.

use crate::tensor::philox::{philox4x32, stream_id, words};
use crate::{Error, Result};

/// How the elements of a range are rounded to bf16: each up or down by a random number.
///
/// The random number depends only on the step, the parameter, and the element's index in the whole
/// parameter, so that every partition of the parameter rounds it alike. On average nothing is lost.
/// With rounding to nearest, a second moment that changes by a thousandth per step would never
/// move, because that is less than half the distance between neighbours in bf16.
///
/// The range is a part of a box of the parameter, row by row, and may begin at any element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StochasticRounding {
    /// See [`StochasticRounding::key`].
    pub key: u32,
    /// Index in the parameter of the first element of the row in which the range begins.
    pub row: u64,
    /// Elements of that row before the range.
    pub column: u64,
    /// Elements of a row.
    pub width: u64,
    /// Distance between the indices of a row and the next row.
    pub pitch: u64,
}

impl Default for StochasticRounding {
    fn default() -> Self {
        Self::whole(0)
    }
}

impl StochasticRounding {
    /// Rounding of a parameter that is not partitioned.
    pub fn whole(key: u32) -> Self {
        Self { key, row: 0, column: 0, width: u64::MAX, pitch: 0 }
    }

    /// A key that distinguishes the random numbers of this step and parameter from others.
    pub fn key(seed: u64, parameter: &str, step: u64) -> u32 {
        let ([a, b], [c, d]) = (words(stream_id(parameter)), words(step));
        philox4x32([a, b, c, d], words(seed))[0]
    }

    /// Rounding of the same range without its first `n` elements.
    pub(crate) fn skip(self, n: usize) -> Self {
        let column = self.column + n as u64;
        Self {
            row: self.row + column / self.width * self.pitch,
            column: column % self.width,
            ..self
        }
    }

    /// The words of the first elements, and the number of these elements: at most `len`, and at
    /// least one if `len` is not 0.
    #[inline(always)]
    pub(crate) fn words(&self, len: usize) -> (usize, Words) {
        let first = self.row.wrapping_add(self.column);
        let n = (self.width - self.column).min((1 << 32) - (first & 0xFFFF_FFFF));
        // The high word of the index is common to all of them, so it goes into the key.
        let key = self.key ^ ((first >> 32) as u32).wrapping_mul(0x9E37_79B9);
        (usize::try_from(n).map_or(len, |n| n.min(len)), Words { key, first: first as u32 })
    }

    /// # Errors
    /// If the range begins beyond its row.
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        let Self { column, width, .. } = self;
        if column >= width {
            return Err(Error::shape(
                op,
                format!("a range that begins at element {column} of a row of {width}"),
            ));
        }
        Ok(())
    }
}

/// The random words of neighbouring elements of a row.
#[derive(Clone, Copy)]
pub(crate) struct Words {
    key: u32,
    first: u32,
}

impl Words {
    /// The words of the first `n` elements.
    #[inline(always)]
    pub fn take(self, n: usize) -> impl Iterator<Item = u32> {
        (0..n as u32).map(
            #[inline(always)]
            move |i| mixed(self.first.wrapping_add(i) ^ self.key),
        )
    }
}

/// A bijection with results that look random (two multiplications, "lowbias32" of C. Wellons 2018).
/// Philox would take longer than the step itself.
#[inline(always)]
fn mixed(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_words(mut rounding: StochasticRounding, len: usize) -> Vec<u32> {
        let mut words = Vec::new();
        while words.len() < len {
            let (n, some) = rounding.words(len - words.len());
            words.extend(some.take(n));
            rounding = rounding.skip(n);
        }
        words
    }

    /// A whole matrix of 7 × 10, and its columns 4 to 6, starting at any element.
    #[test]
    fn an_element_has_the_same_word_in_every_cut() {
        let key = StochasticRounding::key(1, "weight", 5);
        let whole = all_words(StochasticRounding::whole(key), 70);
        for begin in 0..21 {
            let cut =
                StochasticRounding { key, row: 4, column: 0, width: 3, pitch: 10 }.skip(begin);
            let want: Vec<u32> = (begin..21).map(|i| whole[i / 3 * 10 + 4 + i % 3]).collect();
            assert_eq!(all_words(cut, 21 - begin), want, "from {begin}");
        }
    }

    #[test]
    fn words_beyond_four_billion_elements_are_others() {
        let far = StochasticRounding::whole(7).skip(usize::MAX / 2 + 1).skip((1 << 32) - 5);
        let words = all_words(far, 10);
        let near = all_words(StochasticRounding::whole(7).skip((1 << 32) - 5), 10);
        assert!(words.iter().zip(&near).all(|(a, b)| a != b) && words[..5] != words[5..]);
        assert_ne!(near[5..], all_words(StochasticRounding::whole(7), 5));
    }

    /// The mean and the products of neighbours, of steps, and of the two 16-bit halves are those of
    /// independent uniform numbers.
    #[test]
    fn words_look_random() {
        const N: usize = 1 << 16;
        let uniform = |step| -> Vec<f64> {
            let words =
                all_words(StochasticRounding::whole(StochasticRounding::key(3, "w", step)), N);
            words.iter().map(|word| f64::from(word & 0xFFFF) / 65536.0 - 0.5).collect()
        };
        let (now, next) = (uniform(1), uniform(2));
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / N as f64;
        // Standard deviations: √(1/12/N) = 0.0011, 1/12/√N = 0.0003.
        assert!(mean(&mut now.iter().copied()).abs() < 0.005);
        assert!((mean(&mut now.iter().map(|u| u * u)) - 1.0 / 12.0).abs() < 0.002);
        assert!(mean(&mut now.iter().zip(&next).map(|(a, b)| a * b)).abs() < 0.0015);
        for apart in [1, 2, 16, 768] {
            assert!(
                mean(&mut now.iter().zip(&now[apart..]).map(|(a, b)| a * b)).abs() < 0.0015,
                "{apart}"
            );
        }
    }
}
