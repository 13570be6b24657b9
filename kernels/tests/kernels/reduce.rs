//! Sums of squares and in-place arithmetic on views.

use crate::common::{DTYPES, assert_same_on_any_threads, cast, randn, values};
use candle_core::{DType, Device, Tensor};
use kernels::ops::reduce::{
    add_inplace, count_zeros, scale_inplace, sum_of_squares, sums_of_squares, total_of_squares,
    zero,
};

#[test]
fn the_sum_of_squares_is_exact_to_f64() {
    for n in [0, 1, 7, 4096, 4097, 100_003] {
        let x = randn("x", &[n]);
        let want: f64 = values(&x).iter().map(|v| v * v).sum();
        for (dtype, _) in DTYPES {
            let got = sum_of_squares(&cast(&x, dtype)).unwrap();
            assert!((got - want).abs() <= 1e-13 * want, "{n}: {got} {want}");
        }
    }
}

#[test]
fn sums_of_squares_of_several_tensors_are_those_of_each_alone() {
    let all = Tensor::randn(0f32, 1.0, 40_000, &Device::Cpu).unwrap();
    let mut first = 0;
    let tensors = [1, 4095, 4096, 0, 4097, 9000, 1].map(|len| {
        first += len;
        all.narrow(0, first - len, len).unwrap()
    });
    let tensors: Vec<&Tensor> = tensors.iter().collect();
    let alone: Vec<f64> = tensors.iter().map(|x| sum_of_squares(x).unwrap()).collect();
    assert_eq!(sums_of_squares(&tensors).unwrap(), alone);
    let total = total_of_squares(&tensors, &Device::Cpu).unwrap().to_vec1::<f64>().unwrap();
    assert_eq!(total, [alone.iter().fold(0.0, |sum, v| sum + v)]);
    assert!(sums_of_squares(&[]).unwrap().is_empty());
}

#[test]
fn zeros_of_either_sign_are_counted_and_nothing_else() {
    for n in [0, 1, 4097, 100_003] {
        let value = |i: usize| match i % 5 {
            0 => 0.0f32,
            1 => -0.0,
            2 => f32::NAN,
            3 => 1e-7,
            _ => -2.0,
        };
        let x = Tensor::from_vec((0..n).map(value).collect::<Vec<_>>(), n, &Device::Cpu).unwrap();
        let want = (0..n).filter(|i| i % 5 < 2).count() as u64;
        for (dtype, _) in DTYPES {
            assert_eq!(count_zeros(&cast(&x, dtype)).unwrap(), want, "{n} of {dtype:?}");
        }
        let part = x.narrow(0, n / 2, n - n / 2).unwrap();
        assert_eq!(count_zeros(&part).unwrap(), (n / 2..n).filter(|i| i % 5 < 2).count() as u64);
    }
}

#[test]
fn small_blocks_after_a_large_one_are_not_lost() {
    // Each later block adds less than half a unit in the last place of the first.
    let blocks = 1000;
    let mut x = vec![0.0f64; 4096 * blocks];
    x[0] = 1e8; // square 1e16, unit 2
    (1..blocks).for_each(|b| x[4096 * b] = 0.9);
    let x = Tensor::from_vec(x, 4096 * blocks, &Device::Cpu).unwrap();
    let want = 1e16 + 999.0 * 0.81;
    assert!((sum_of_squares(&x).unwrap() - want).abs() <= 2.0);
}

#[test]
fn nan_and_infinity_show_in_the_sum() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut x = vec![1.0f32; 9000];
        x[5000] = bad;
        let sum = sum_of_squares(&Tensor::from_vec(x, 9000, &Device::Cpu).unwrap()).unwrap();
        assert_eq!(sum.is_nan(), bad.is_nan());
        assert!(!sum.is_finite());
    }
}

#[test]
fn in_place_arithmetic_changes_the_view_and_nothing_else() {
    let flat = Tensor::ones(10, DType::F32, &Device::Cpu).unwrap();
    scale_inplace(&flat.narrow(0, 1, 3).unwrap(), 3.0).unwrap();
    add_inplace(
        &flat.narrow(0, 3, 2).unwrap(),
        &Tensor::new(&[10.0f32, 20.0], &Device::Cpu).unwrap(),
    )
    .unwrap();
    zero(&flat.narrow(0, 8, 1).unwrap()).unwrap();
    assert_eq!(
        flat.to_vec1::<f32>().unwrap(),
        [1.0, 3.0, 3.0, 13.0, 21.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    );
}

#[test]
fn views_of_one_storage_may_be_added() {
    let flat = Tensor::new(&[1.0f64, 2.0, 3.0, 4.0], &Device::Cpu).unwrap();
    add_inplace(&flat.narrow(0, 0, 2).unwrap(), &flat.narrow(0, 2, 2).unwrap()).unwrap();
    assert_eq!(values(&flat), [4.0, 6.0, 3.0, 4.0]);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let x = cast(&randn("x", &[123_457]), DType::F32);
    assert_same_on_any_threads(|| {
        let y = x.copy().unwrap();
        add_inplace(&y, &x).unwrap();
        scale_inplace(&y, 0.3).unwrap();
        vec![Tensor::new(sum_of_squares(&x).unwrap(), &Device::Cpu).unwrap(), y]
    });
}

#[test]
fn lengths_that_differ_are_an_error() {
    let message = add_inplace(&randn("a", &[3]), &randn("b", &[4])).unwrap_err().to_string();
    assert!(message.contains("[4]") && message.contains('3'), "{message}");
}

#[test]
fn a_view_larger_than_caches_becomes_zero_and_nothing_beside_it() {
    let n = (64 << 20) / 2 + 5;
    let all = Tensor::ones(n + 4, DType::BF16, &Device::Cpu).unwrap();
    zero(&all.narrow(0, 3, n).unwrap()).unwrap();
    let values = all.to_vec1::<half::bf16>().unwrap();
    assert!(
        values
            .iter()
            .enumerate()
            .all(|(i, v)| v.to_f32() == if (3..n + 3).contains(&i) { 0.0 } else { 1.0 })
    );
}
