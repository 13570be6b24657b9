//! Sums of squares and of columns, and arithmetic on flat buffers.

use crate::support::{Input, check, runs};
use candle_core::{DType, Device, Tensor};
use kernels::ops::clip::Verdict;
use kernels::ops::linear::bias_grad;
use kernels::ops::reduce::{
    add_inplace, cast, copy, scale_inplace, sum_in_order, sum_of_squares, sums_of_squares,
    total_of_squares, zero,
};
use kernels::tensor::device::to_host;

/// Less than a vector, whole vectors, one block's worth and more, each with and without a
/// remainder.
const SIZES: [usize; 8] = [1, 7, 64, 1001, 4096, 7173, 8192, 9005];

#[test]
fn columns_are_summed_into_the_bias_gradient() {
    let shapes = [
        [1, 1, 1],
        [5, 1, 7],
        [33, 2, 64],
        [150, 1, 24],
        [9, 3, 264],
        [70, 1, 1001],
        [0, 2, 16],
        [30_000, 1, 8],
    ];
    for shape in shapes {
        check("bias_grad", &[Input::data("dy", &shape), Input::wide("db", &shape[2..])], |t| {
            bias_grad(&t[0], &t[1])?;
            Ok(vec![t[1].clone()])
        });
    }
}

#[test]
fn arithmetic_in_place() {
    for n in SIZES {
        let inputs = [Input::data("a", &[n]), Input::data("b", &[n])];
        check("add_inplace", &inputs, |t| {
            add_inplace(&t[0], &t[1])?;
            Ok(vec![t[0].clone()])
        });
        check("scale_inplace", &inputs[..1], |t| {
            scale_inplace(&t[0], 1.0 / 3.0)?;
            Ok(vec![t[0].clone()])
        });
        check("zero", &inputs[..1], |t| {
            zero(&t[0])?;
            Ok(vec![t[0].clone()])
        });
    }
}

#[test]
fn views_of_one_storage_add_as_if_the_source_were_read_before() {
    for (to, from, n) in [(0, 5, 100), (5, 0, 5000), (0, 0, 300), (0, 128, 128)] {
        check("add_inplace", &[Input::data("flat", &[n + 128])], |t| {
            add_inplace(&t[0].narrow(0, to, n)?, &t[0].narrow(0, from, n)?)?;
            Ok(vec![t[0].clone()])
        });
    }
}

#[test]
fn copies_are_bit_for_bit() {
    for n in SIZES {
        check("copy", &[Input::data("a", &[n]), Input::data("b", &[n])], |t| {
            copy(&t[0], &t[1])?;
            Ok(vec![t[0].clone()])
        });
    }
    let bits: Vec<u32> = (0..5003).map(|i: u32| i.wrapping_mul(2_654_435_761)).collect();
    for (run, got) in runs(|device| {
        let src = Tensor::from_vec(bits.clone(), bits.len(), device).unwrap();
        let dst = src.zeros_like().unwrap();
        copy(&dst, &src).unwrap();
        dst.to_device(&Device::Cpu).unwrap().to_vec1::<u32>().unwrap()
    }) {
        assert!(got == bits, "{run}");
    }
}

#[test]
fn casts_round_to_nearest_even_as_the_cpu_does() {
    let special = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        3e38,
        70_000.0,
        65_519.9,
        6e-8,
        1.003_906_3,
        1e-40,
    ];
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    for n in [3, 2048, 2051, 5000] {
        let value = |i: usize| special.get(i).copied().unwrap_or((i as f32 - 900.0) * 0.013_7);
        let values: Vec<f32> = (0..n).map(value).collect();
        for (from, to) in dtypes.iter().flat_map(|from| dtypes.map(|to| (*from, to))) {
            let bits = |device: &Device| {
                let src =
                    Tensor::from_vec(values.clone(), n, device).unwrap().to_dtype(from).unwrap();
                let flat = Tensor::ones(n + 2, to, device).unwrap();
                cast(&flat.narrow(0, 1, n).unwrap(), &src).unwrap();
                let wide = flat.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
                let whole = Tensor::ones(n, to, device).unwrap();
                cast(&whole, &src).unwrap();
                let whole = whole.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
                let bits = |t: Tensor| {
                    t.to_vec1::<f32>().unwrap().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
                };
                (bits(wide), bits(whole))
            };
            let want = bits(&Device::Cpu);
            for (run, got) in runs(bits) {
                assert!(got == want, "{from:?} to {to:?}, {n} elements, {run}");
            }
        }
    }
}

#[test]
fn sums_of_squares_are_those_of_f64_wherever_tensors_lie() {
    let sizes = [1, 4095, 4096, 4097, 20_000, 0, 77];
    let make = |device: &Device, dtype: DType, offset: usize| -> Vec<Tensor> {
        let value = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e6 - 8.0;
        let one = |n: usize| {
            let flat =
                Tensor::from_vec((0..n as u32).map(value).collect::<Vec<f32>>(), n, &Device::Cpu)
                    .unwrap();
            // The driver does not allocate zero bytes.
            let before = if n == 0 { offset.max(1) } else { offset };
            let pad = Tensor::full(f32::NAN, before, &Device::Cpu).unwrap();
            let flat = Tensor::cat(&[&pad, &flat], 0)
                .unwrap()
                .to_dtype(dtype)
                .unwrap()
                .to_device(device)
                .unwrap();
            flat.narrow(0, offset, n).unwrap()
        };
        // More tensors than one launch takes.
        sizes.into_iter().chain((0..140).map(|i| i % 5)).map(one).collect()
    };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let exact = |t: Tensor| sum_of_squares(&t.to_dtype(DType::F64).unwrap()).unwrap();
        let want: Vec<f64> = make(&Device::Cpu, dtype, 0).into_iter().map(exact).collect();
        let mut first: Option<Vec<f64>> = None;
        for offset in [0, 3] {
            for (run, got) in runs(|device| {
                let tensors = make(device, dtype, offset);
                let sums = sums_of_squares(&tensors.iter().collect::<Vec<_>>()).unwrap();
                assert_eq!(sum_of_squares(&tensors[4]).unwrap(), sums[4]);
                sums
            }) {
                for (got, want) in got.iter().zip(&want) {
                    assert!(
                        (got - want).abs() <= 1e-14 * want,
                        "{dtype:?}, {run}: {got}, want {want}"
                    );
                }
                assert_eq!(
                    first.get_or_insert_with(|| got.clone()),
                    &got,
                    "{dtype:?}, {run}, offset {offset}"
                );
            }
        }
    }
}

#[test]
fn what_large_partial_sums_swallow_is_added_at_the_end() {
    let (block, blocks) = (4096, 21);
    for (run, got) in runs(|device| {
        let mut values = vec![0.0f32; block * blocks];
        values[0] = 1e8;
        (1..blocks).for_each(|b| values[b * block] = 1.0);
        sum_of_squares(&Tensor::from_vec(values, block * blocks, device).unwrap()).unwrap()
    }) {
        assert_eq!(got, 1e16 + 20.0, "{run}"); // 1e16 + 1 is 1e16
    }
}

#[test]
fn what_is_not_finite_shows_in_the_sum_of_squares() {
    for (run, (nan, infinite)) in runs(|device| {
        let with = |value: f32| {
            let mut values = vec![1.0; 5000];
            values[4321] = value;
            sum_of_squares(&Tensor::from_vec(values, 5000, device).unwrap()).unwrap()
        };
        (with(f32::NAN), with(f32::NEG_INFINITY))
    }) {
        assert!(nan.is_nan() && infinite == f64::INFINITY, "{run}: {nan} {infinite}");
    }
}

/// f64 values with a sum that depends on their order.
fn shares(n: usize, device: &Device) -> Tensor {
    let value = |i: usize| ((i * 7919) % 1013) as f64 * 10f64.powi((i % 23) as i32 - 11);
    Tensor::from_vec((0..n).map(value).collect::<Vec<_>>(), n, device).unwrap()
}

#[test]
fn shares_are_added_in_order_and_judged_bit_for_bit_as_on_the_cpu() {
    for n in [1, 2, 255, 256, 257, 1000] {
        let results = |device: &Device| {
            let shares = shares(n, device);
            let sum =
                to_host(&sum_in_order(&shares).unwrap()).unwrap().to_vec1::<f64>().unwrap()[0];
            let judged =
                [(1.0, 1.0), (0.0, 3.0), (1e30, 65536.0), (0.37, 1.1)].map(|(max_norm, scale)| {
                    let decided = Verdict::of(&shares, max_norm, scale).unwrap().decided().unwrap();
                    (decided.norm.to_bits(), decided.factor.to_bits(), decided.applied)
                });
            (sum.to_bits(), judged)
        };
        let want = results(&Device::Cpu);
        for (run, got) in runs(results) {
            assert_eq!(got, want, "{n} shares, {run}");
        }
    }
}

#[test]
fn what_is_not_finite_is_judged_so() {
    for share in [f64::NAN, f64::INFINITY, 1e80] {
        for (run, decided) in runs(|device| {
            let shares = Tensor::new(&[1.0, share, 2.0], device).unwrap();
            Verdict::of(&shares, 1.0, 1.0).unwrap().decided().unwrap()
        }) {
            assert!(!decided.applied && !decided.norm.is_finite(), "{share}, {run}: {decided:?}");
        }
    }
}

#[test]
fn the_total_of_squares_is_that_of_the_sums() {
    for count in [0, 1, 3, 300] {
        for (run, (total, sums)) in runs(|device| {
            let tensor = |i: usize| Tensor::arange(0f32, 1.0 + (i % 7) as f32, device).unwrap();
            let tensors: Vec<Tensor> = (0..count).map(tensor).collect();
            let tensors: Vec<&Tensor> = tensors.iter().collect();
            let total = to_host(&total_of_squares(&tensors, device).unwrap()).unwrap();
            (total.to_vec1::<f64>().unwrap()[0], sums_of_squares(&tensors).unwrap())
        }) {
            assert_eq!(total, sums.iter().sum::<f64>(), "{count} tensors, {run}");
        }
    }
}
