//! Activations, compared with candle's.

use crate::common::{
    DTYPES, assert_close, assert_same_on_any_threads, bits, cast, oracle, randn, tanh_gelu,
};
use candle_core::{DType, Tensor};
use kernels::Result;
use kernels::ops::activation::{
    gelu, gelu_backward, gelu_backward_recompute, relu, relu_backward, relu_backward_recompute,
    squared_relu, squared_relu_backward, squared_relu_backward_recompute, swiglu, swiglu_backward,
    swiglu_backward_recompute,
};

/// Forward, backward, backward that also returns forward's result, and candle's function.
struct Case {
    name: &'static str,
    forward: fn(&Tensor) -> Result<Tensor>,
    backward: fn(&Tensor, &Tensor) -> Result<Tensor>,
    recompute: fn(&Tensor, &Tensor) -> Result<[Tensor; 2]>,
    candle: fn(&Tensor) -> Tensor,
}

const ELEMENTWISE: [Case; 3] = [
    Case {
        name: "gelu",
        forward: gelu,
        backward: gelu_backward,
        recompute: gelu_backward_recompute,
        candle: tanh_gelu,
    },
    Case {
        name: "relu",
        forward: relu,
        backward: relu_backward,
        recompute: relu_backward_recompute,
        candle: |x| x.relu().unwrap(),
    },
    Case {
        name: "squared_relu",
        forward: squared_relu,
        backward: squared_relu_backward,
        recompute: squared_relu_backward_recompute,
        candle: |x| x.relu().unwrap().sqr().unwrap(),
    },
];

/// Rows of the last shape would conflict in a cache, so its results have padded rows.
const SHAPES: [[usize; 3]; 4] = [[1, 1, 2], [7, 3, 34], [40, 2, 1000], [9, 2, 4096]];

fn wide(name: &str, shape: &[usize]) -> Tensor {
    (randn(name, shape) * 4.0).unwrap() // reaches the flat parts
}

#[test]
fn activations_and_their_gradients_agree_with_autograd() {
    for shape in SHAPES {
        let (x, dy) = (wide("x", &shape), randn("dy", &shape));
        for Case { name, forward, backward, candle, .. } in ELEMENTWISE {
            let (y, grads) = oracle(&[&x], &dy, |t| candle(&t[0]));
            for (dtype, tolerance) in DTYPES {
                let (x, dy) = (cast(&x, dtype), cast(&dy, dtype));
                assert_close(name, &forward(&x).unwrap(), &y, tolerance);
                assert_close(name, &backward(&dy, &x).unwrap(), &grads[0], tolerance);
            }
        }
    }
}

#[test]
fn swiglu_and_its_gradient_agree_with_autograd() {
    for shape in SHAPES {
        let f = shape[2] / 2;
        let (x, dy) = (wide("x", &shape), randn("dy", &[shape[0], shape[1], f]));
        let (y, grads) = oracle(&[&x], &dy, |t| {
            let (gate, up) = (t[0].narrow(2, 0, f).unwrap(), t[0].narrow(2, f, f).unwrap());
            (gate.silu().unwrap() * up).unwrap()
        });
        for (dtype, tolerance) in DTYPES {
            let (x, dy) = (cast(&x, dtype), cast(&dy, dtype));
            assert_close("y", &swiglu(&x).unwrap(), &y, tolerance);
            assert_close("dx", &swiglu_backward(&dy, &x).unwrap(), &grads[0], tolerance);
        }
    }
}

#[test]
fn what_backward_makes_again_has_the_bits_that_forward_had() {
    for shape in SHAPES.into_iter().chain([[301, 1, 50], [0, 3, 6]]) {
        let narrow = [shape[0], shape[1], shape[2] / 2];
        for (dtype, _) in DTYPES {
            let [x, dy] = [wide("x", &shape), randn("dy", &shape)].map(|t| cast(&t, dtype));
            let half = cast(&randn("half", &narrow), dtype);
            let elementwise = ELEMENTWISE.map(|of| {
                let apart = [(of.backward)(&dy, &x).unwrap(), (of.forward)(&x).unwrap()];
                ((of.recompute)(&dy, &x).unwrap(), apart)
            });
            let swiglu = (
                swiglu_backward_recompute(&half, &x).unwrap(),
                [swiglu_backward(&half, &x).unwrap(), swiglu(&x).unwrap()],
            );
            for (again, [dx, y]) in elementwise.into_iter().chain([swiglu]) {
                assert_eq!(
                    [bits(&again[0]), bits(&again[1])],
                    [bits(&dx), bits(&y)],
                    "{dtype:?} {shape:?}"
                );
            }
        }
    }
    let x = randn("x", &[3, 6]);
    assert!(gelu_backward_recompute(&randn("dy", &[3, 3]), &x).is_err());
    assert!(swiglu_backward_recompute(&x, &x).is_err());
}

#[test]
fn rows_that_would_crowd_a_cache_lie_a_line_further_apart() {
    for (dtype, size) in [(DType::F32, 4), (DType::BF16, 2), (DType::F64, 8)] {
        for width in [1000, 2048, 2050] {
            let x = cast(&randn("x", &[3, 5, 2 * width]), dtype);
            let halves = [x.narrow(2, 0, width).unwrap(), x.narrow(2, width, width).unwrap()];
            let [half, dy] = halves.map(|half| half.contiguous().unwrap());
            let results = [
                (gelu(&half).unwrap(), width),
                (gelu_backward(&dy, &half).unwrap(), width),
                (swiglu(&x).unwrap(), width),
                (swiglu_backward(&dy, &x).unwrap(), 2 * width),
            ];
            let again = [
                (gelu_backward_recompute(&dy, &half).unwrap(), [width, width]),
                (swiglu_backward_recompute(&dy, &x).unwrap(), [2 * width, width]),
            ];
            let again =
                again.into_iter().flat_map(|(results, widths)| results.into_iter().zip(widths));
            for (y, width) in results.into_iter().chain(again) {
                let apart = if width * size % 4096 == 0 { width + 64 / size } else { width };
                assert_eq!(
                    (y.dims(), y.stride()),
                    (&[3, 5, width][..], &[5 * apart, apart, 1][..]),
                    "{dtype:?}"
                );
            }
        }
    }
}

#[test]
fn activations_are_finite_far_from_zero() {
    let x = Tensor::new(&[-1e4f32, -100.0, -90.0, 90.0, 100.0, 1e4], &candle_core::Device::Cpu)
        .unwrap();
    let one = x.ones_like().unwrap();
    assert_eq!(gelu(&x).unwrap().to_vec1::<f32>().unwrap(), [0.0, 0.0, 0.0, 90.0, 100.0, 1e4]);
    assert_eq!(
        gelu_backward(&one, &x).unwrap().to_vec1::<f32>().unwrap(),
        [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    );
    // u′ overflows for the larger ones, x² for the last; the sigmoid of u is 0 or 1 there.
    let far = Tensor::new(&[-1e36f32, -1e20, -2e13, 2e13, 1e20, 1e36], x.device()).unwrap();
    assert_eq!(gelu(&far).unwrap().to_vec1::<f32>().unwrap(), [0.0, 0.0, 0.0, 2e13, 1e20, 1e36]);
    assert_eq!(
        gelu_backward(&one, &far).unwrap().to_vec1::<f32>().unwrap(),
        [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    );
    let pair = x.reshape((3, 2)).unwrap();
    let dx =
        swiglu_backward(&one.narrow(0, 0, 3).unwrap().reshape((3, 1)).unwrap(), &pair).unwrap();
    assert!(crate::common::values(&dx).iter().all(|v| v.is_finite()));
}

#[test]
fn activations_of_nan_are_nan() {
    for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7fc0_0001), f32::from_bits(0x7f80_01ff)] {
        let x = Tensor::full(nan, (2, 2), &candle_core::Device::Cpu).unwrap();
        let (one, one_of_two) =
            (x.ones_like().unwrap(), Tensor::ones((2, 1), DType::F32, x.device()).unwrap());
        let results = [
            gelu(&x).unwrap(),
            gelu_backward(&one, &x).unwrap(),
            swiglu(&x).unwrap(),
            swiglu_backward(&one_of_two, &x).unwrap(),
            relu(&x).unwrap(),
            squared_relu(&x).unwrap(),
            squared_relu_backward(&one, &x).unwrap(),
        ];
        assert!(
            results.iter().all(|y| crate::common::values(y).iter().all(|v| v.is_nan())),
            "{:x}",
            nan.to_bits()
        );
    }
}

#[test]
fn relu_is_nothing_at_zero_and_below() {
    let x = Tensor::new(&[-2f32, -0.0, 0.0, 3.0], &candle_core::Device::Cpu).unwrap();
    let dy = Tensor::new(&[5f32, 5.0, 5.0, 5.0], x.device()).unwrap();
    let numbers = |t: Result<Tensor>| t.unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(numbers(relu(&x)), [0.0, 0.0, 0.0, 3.0]);
    assert_eq!(numbers(relu_backward(&dy, &x)), [0.0, 0.0, 0.0, 5.0]);
    assert_eq!(numbers(squared_relu(&x)), [0.0, 0.0, 0.0, 9.0]);
    assert_eq!(numbers(squared_relu_backward(&dy, &x)), [0.0, 0.0, 0.0, 30.0]);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    for width in [167, 1024] {
        let x = cast(&wide("x", &[101, 3, 2 * width]), DType::F32);
        let dy = cast(&randn("dy", &[101, 3, width]), DType::F32);
        assert_same_on_any_threads(|| {
            let all = vec![
                gelu(&x).unwrap(),
                gelu_backward(&x, &x).unwrap(),
                swiglu(&x).unwrap(),
                swiglu_backward(&dy, &x).unwrap(),
                squared_relu(&x).unwrap(),
                squared_relu_backward(&x, &x).unwrap(),
            ];
            let again = [
                gelu_backward_recompute(&x, &x).unwrap(),
                swiglu_backward_recompute(&dy, &x).unwrap(),
            ];
            all.into_iter().chain(again.into_iter().flatten()).collect()
        });
    }
}

#[test]
fn an_odd_gate_up_dimension_is_an_error() {
    let message = swiglu(&randn("x", &[2, 3])).unwrap_err().to_string();
    assert!(message.contains("[2, 3]") && message.contains("even"), "{message}");
}
