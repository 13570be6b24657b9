//! Cross entropy, assembled from its pieces as ranks do, compared with candle's operations.

use crate::common::{
    DTYPES, assert_close, assert_same_on_any_threads, cast, ids, oracle, randn, values,
};
use candle_core::{D, DType, Device, Tensor};
use kernels::ops::cross_entropy::{cross_entropy_backward, rebase, row_statistics};

/// Token losses and the gradient of Σ scale·loss, over a vocabulary split into `parts` equal parts.
/// Columns from `vocab` on are padding.
fn assembled(
    logits: &Tensor,
    targets: &Tensor,
    scale: &Tensor,
    vocab: usize,
    parts: usize,
) -> (Tensor, Tensor) {
    let width = logits.dim(D::Minus1).unwrap() / parts;
    let cut: Vec<(Tensor, usize, usize)> = (0..parts)
        .map(|i| {
            let part =
                logits.narrow(D::Minus1, i * width, width).unwrap().force_contiguous().unwrap();
            (part, i * width, vocab.saturating_sub(i * width).min(width))
        })
        .collect();
    let statistics: Vec<_> = cut
        .iter()
        .map(|(part, first, valid)| row_statistics(part, targets, *first, *valid).unwrap())
        .collect();
    let mut max = statistics[0].0.clone();
    for (own, _) in &statistics[1..] {
        max = max.maximum(own).unwrap();
    }
    let mut pieces = Tensor::zeros((2, max.elem_count()), max.dtype(), &Device::Cpu).unwrap();
    for ((own, sums), (_, first, valid)) in statistics.iter().zip(&cut) {
        rebase(sums, own, &max, targets, *first, *valid).unwrap();
        pieces = (pieces + sums).unwrap();
    }
    let (sum, target) = (pieces.get(0).unwrap().contiguous().unwrap(), pieces.get(1).unwrap());
    for (part, first, valid) in &cut {
        cross_entropy_backward(part, &max, &sum, targets, scale, *first, *valid).unwrap();
    }
    let parts: Vec<&Tensor> = cut.iter().map(|(part, ..)| part).collect();
    ((sum.log().unwrap() - target).unwrap(), Tensor::cat(&parts, D::Minus1).unwrap())
}

fn check(vocab: usize, padded: usize, parts: usize) {
    let (s, b) = (5, 3);
    let logits = (randn("logits", &[s, b, padded]) * 5.0).unwrap();
    let (targets, scale) = (ids("targets", &[s, b], vocab as u32), randn("scale", &[s * b]));
    let (want, grads) = oracle(&[&logits], &scale, |t| {
        let real = t[0].narrow(2, 0, vocab).unwrap().reshape((s * b, vocab)).unwrap();
        let max = real.max_keepdim(1).unwrap().detach();
        let shifted = real.broadcast_sub(&max).unwrap();
        let target = shifted.gather(&targets.reshape((s * b, 1)).unwrap(), 1).unwrap();
        (shifted.exp().unwrap().sum_keepdim(1).unwrap().log().unwrap() - target)
            .unwrap()
            .squeeze(1)
            .unwrap()
    });
    for (dtype, tolerance) in DTYPES {
        let (loss, grad) =
            assembled(&cast(&logits, dtype), &targets, &cast(&scale, dtype), vocab, parts);
        assert_close("loss", &loss, &want, tolerance);
        assert_close("gradient", &grad, &grads[0], tolerance);
    }
}

#[test]
fn loss_and_gradient_agree_with_autograd() {
    check(37, 37, 1);
}

#[test]
fn padding_columns_change_nothing_and_get_no_gradient() {
    check(37, 48, 1);
}

#[test]
fn a_vocabulary_cut_over_ranks_gives_the_same_loss_and_gradient() {
    check(37, 48, 4);
    check(33, 64, 4); // the last part is all padding, the one before it nearly
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let logits = cast(&randn("logits", &[70, 1, 1003]), DType::F32);
    let (targets, scale) =
        (ids("targets", &[70, 1], 1000), cast(&randn("scale", &[70]), DType::F32));
    assert_same_on_any_threads(|| {
        let (loss, grad) = assembled(&logits, &targets, &scale, 1000, 1);
        vec![loss, grad]
    });
}

#[test]
fn a_part_without_real_columns_has_a_maximum_of_minus_infinity() {
    let (max, sums) = row_statistics(&randn("logits", &[3, 4]), &ids("t", &[3], 4), 0, 0).unwrap();
    assert_eq!(values(&max), [f64::NEG_INFINITY; 3]);
    assert_eq!(values(&sums), [0.0; 6]);
}

#[test]
fn a_nan_logit_makes_its_row_nan() {
    let logits = Tensor::new(&[[1.0f32, f32::NAN, 0.0], [1.0, 2.0, 3.0]], &Device::Cpu).unwrap();
    let (_, sums) = row_statistics(&logits, &ids("t", &[2], 3), 0, 3).unwrap();
    let nan: Vec<bool> = values(&sums.get(0).unwrap()).iter().map(|v| v.is_nan()).collect();
    assert_eq!(nan, [true, false]);
}

#[test]
fn more_valid_columns_than_there_are_is_an_error() {
    let message = row_statistics(&randn("logits", &[3, 4]), &ids("t", &[3], 4), 0, 5)
        .unwrap_err()
        .to_string();
    assert!(message.contains("5 valid") && message.contains("[3, 4]"), "{message}");
}

#[test]
fn statistics_of_a_cut_vocabulary_rebased_to_the_common_maximum_are_those_of_the_whole() {
    let (rows, width, parts, vocab) = (7, 50, 4, 130); // the last part is all padding
    let logits = (randn("logits", &[rows, parts * width]) * 20.0).unwrap();
    let targets = ids("targets", &[rows], vocab as u32);
    for (dtype, tolerance) in DTYPES {
        let logits = cast(&logits, dtype);
        let (max, want) = row_statistics(&logits, &targets, 0, vocab).unwrap();
        let mut sums = want.zeros_like().unwrap();
        for first in (0..parts * width).step_by(width) {
            let part = logits.narrow(1, first, width).unwrap().force_contiguous().unwrap();
            let valid = vocab.saturating_sub(first).min(width);
            let (own, part) = row_statistics(&part, &targets, first, valid).unwrap();
            rebase(&part, &own, &max, &targets, first, valid).unwrap();
            sums = (sums + part).unwrap();
        }
        assert_close("sums", &sums, &want, tolerance);
    }
}
