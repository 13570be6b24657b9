//! Dropout fused with bias and residual: values, gradients, and masks that are independent of how
//! the batch is partitioned.

use crate::common::{DTYPES, assert_close, assert_same_on_any_threads, bits, cast, randn, values};
use candle_core::{DType, Device, Tensor};
use kernels::ops::dropout::{Dropout, DropoutKey, Tokens, bias_dropout_add, dropout_backward};
use kernels::tensor::philox::philox4x32;

const KEY: DropoutKey = DropoutKey { seed: 5, step: 1, layer: 0, site: 0 };

fn dropout(samples: &[u64], seq_offset: usize, seq_len: usize) -> Dropout<'_> {
    Dropout {
        p: 0.25,
        key: KEY,
        tokens: Tokens { samples, seq_offset, seq_len, step_and_samples: None },
    }
}

/// 1/(1−p) where kept, 0 where dropped.
fn mask(s: usize, h: usize, dropout: &Dropout) -> Tensor {
    let ones =
        Tensor::ones((s, dropout.tokens.samples.len(), h), DType::F64, &Device::Cpu).unwrap();
    bias_dropout_add(&ones, None, None, Some(dropout)).unwrap()
}

#[test]
fn value_is_residual_plus_dropped_sum_and_backward_drops_the_same() {
    let (samples, dims) = ([3, 8], [6, 2, 21]);
    let dropout = dropout(&samples, 2, 32);
    let (x, bias, residual) = (randn("x", &dims), randn("bias", &[21]), randn("residual", &dims));
    let mask = mask(6, 21, &dropout);
    let want = (x.broadcast_add(&bias).unwrap() * &mask).unwrap();
    for (dtype, tolerance) in DTYPES {
        let [x, bias, residual_] = [&x, &bias, &residual].map(|t| cast(t, dtype));
        let y = bias_dropout_add(&x, Some(&bias), Some(&residual_), Some(&dropout)).unwrap();
        assert_close("y", &y, &(&want + &residual).unwrap(), tolerance);
        let y = bias_dropout_add(&x, Some(&bias), None, Some(&dropout)).unwrap();
        assert_close("y without residual", &y, &want, tolerance);
        let y = bias_dropout_add(&x, None, Some(&residual_), None).unwrap();
        assert_close(
            "y without dropout",
            &y,
            &(cast(&x, DType::F64) + &residual).unwrap(),
            tolerance,
        );
        let dx = dropout_backward(&residual_, &dropout).unwrap();
        assert_close("dx", &dx, &(&residual * &mask).unwrap(), tolerance);
    }
}

#[test]
fn the_right_fraction_is_kept_and_scaled() {
    let mask = values(&mask(64, 1024, &dropout(&[0], 0, 64)));
    assert!(mask.iter().all(|&m| m == 0.0 || m == 1.0 / 0.75));
    let kept = mask.iter().filter(|&&m| m > 0.0).count() as f64 / mask.len() as f64;
    assert!((kept - 0.75).abs() < 0.007, "kept {kept}"); // 4 standard errors
}

#[test]
fn a_mask_does_not_depend_on_how_sequence_and_batch_are_cut() {
    let samples = [4, 9, (1 << 33) + 1];
    let whole = mask(16, 10, &dropout(&samples, 0, 16));
    for (first, len) in [(0, 8), (8, 8), (5, 3)] {
        for b in 0..3 {
            let part = mask(len, 10, &dropout(&samples[b..=b], first, 16));
            assert_eq!(
                bits(&whole.narrow(0, first, len).unwrap().narrow(1, b, 1).unwrap()),
                bits(&part)
            );
        }
    }
}

#[test]
fn tokens_steps_layers_sites_and_seeds_have_masks_of_their_own() {
    let base = dropout(&[4], 0, 16);
    let with = |key| Dropout { key, ..base };
    let masks = [
        base,
        dropout(&[5], 0, 16),
        dropout(&[4], 1, 16),
        dropout(&[4 + (1 << 40)], 0, 16),
        with(DropoutKey { seed: 6, ..KEY }),
        with(DropoutKey { step: 2, ..KEY }),
        with(DropoutKey { layer: 1, ..KEY }),
        with(DropoutKey { site: 1, ..KEY }),
    ]
    .map(|d| bits(&mask(1, 200, &d)));
    for (i, a) in masks.iter().enumerate() {
        masks[..i].iter().enumerate().for_each(|(j, b)| assert_ne!(a, b, "masks {i} and {j}"));
    }
}

#[test]
fn an_element_is_dropped_by_the_documented_word() {
    let mask = values(&mask(1, 9, &dropout(&[2], 3, 16)));
    let derived = philox4x32([1, 0, 0, 0], [!5, !0]);
    for (i, m) in mask.iter().enumerate() {
        let token = 2 * 16 + 3;
        let word =
            philox4x32([token, 0, i as u32 / 4, derived[2]], [derived[0], derived[1]])[i % 4];
        assert_eq!(*m == 0.0, word < 1 << 30);
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let x = cast(&randn("x", &[301, 2, 77]), DType::F32);
    let samples = [0, 1];
    assert_same_on_any_threads(|| {
        vec![bias_dropout_add(&x, None, Some(&x), Some(&dropout(&samples, 0, 301))).unwrap()]
    });
}

#[test]
fn wrong_batches_and_probabilities_are_errors() {
    let x = randn("x", &[4, 2, 3]);
    let message = dropout_backward(&x, &dropout(&[1], 0, 4)).unwrap_err().to_string();
    assert!(message.contains("[4, 2, 3]") && message.contains("b = 1"), "{message}");
    let all = Dropout { p: 1.0, ..dropout(&[1, 2], 0, 4) };
    assert!(dropout_backward(&x, &all).unwrap_err().to_string().contains("[0, 1)"));
}
