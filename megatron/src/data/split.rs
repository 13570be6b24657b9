//! Divides a corpus into train, valid and test by weights such as `969,30,1`.
//!
//! Source: Megatron-LM `core/datasets/blended_megatron_dataset_config.py` and `..._builder.py`: the
//! weights are normalized and summed from the left, and each bound is Python's `round(bound · N)`,
//! which rounds halves to even.

use std::ops::Range;

/// Sequences of a corpus that belong to each split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// The first sequences.
    pub train: Range<u64>,
    /// The sequences after those of `train`.
    pub valid: Range<u64>,
    /// The last sequences.
    pub test: Range<u64>,
}

/// Divides `num_sequences` by normalized weights.
pub fn split_sequences(weights: [f64; 3], num_sequences: u64) -> Split {
    let mut bounds = [0u64; 4];
    let mut sum = 0.0;
    for (bound, weight) in bounds[1..].iter_mut().zip(weights) {
        sum += weight;
        *bound = ((sum * num_sequences as f64).round_ties_even() as u64).min(num_sequences);
    }
    Split { train: bounds[0]..bounds[1], valid: bounds[1]..bounds[2], test: bounds[2]..bounds[3] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse_split;

    fn bounds(text: &str, n: u64) -> [u64; 4] {
        let split = split_sequences(parse_split(text).unwrap(), n);
        assert_eq!((split.train.end, split.valid.end), (split.valid.start, split.test.start));
        [split.train.start, split.train.end, split.valid.end, split.test.end]
    }

    /// Megatron divides the 7222 paragraphs of Tiny Shakespeare in this way.
    #[test]
    fn bounds_are_those_of_megatron() {
        assert_eq!(bounds("969,30,1", 7222), [0, 6998, 7215, 7222]);
    }

    #[test]
    fn halves_round_to_even() {
        assert_eq!(bounds("50,50,0", 5), [0, 2, 5, 5]);
        assert_eq!(bounds("50,50,0", 7), [0, 4, 7, 7]);
        assert_eq!(bounds("1,1,2", 2), [0, 0, 1, 2]);
        assert_eq!(bounds("1,1,2", 6), [0, 2, 3, 6]);
    }

    #[test]
    fn missing_weights_are_zero() {
        assert_eq!(bounds("1", 9), [0, 9, 9, 9]);
        assert_eq!(bounds("9, 1", 10), [0, 9, 10, 10]);
    }

    /// 0.1 + 0.2 + 0.7 is not 1 in binary, but the last bound is still N.
    #[test]
    fn every_sequence_is_in_one_split() {
        for n in [1u64, 3, 10, 1000, 999_999_937] {
            for text in ["1,2,7", "969,30,1", "0.1,0.2,0.7", "98,1,1", "1,1,1"] {
                assert_eq!(bounds(text, n)[3], n, "{text} of {n}");
            }
        }
    }

    #[test]
    fn bad_weights_are_refused_with_advice() {
        for text in ["", "a,b,c", "1,2,3,4", "-1,2,3", "0,0,0", "nan,1,1", "inf,1,1", "1,,2"] {
            let message = parse_split(text).unwrap_err().to_string();
            assert!(
                message.contains(&format!("\"{text}\"")) && message.contains("969,30,1"),
                "{message}"
            );
        }
    }
}
