//! Products of linear layers. Without a GPU the CPU computes them: the emulator has no cuBLASLt.

use candle_core::DType;

use crate::support::{Input, check, check_with};
use kernels::ops::linear::{
    linear, linear_add_into, linear_dgrad, linear_dgrad_gelu, linear_dgrad_into, linear_gelu,
    linear_into, linear_to_f32, linear_wgrad, linear_wgrad_into,
};

/// Rows, k, n: small, odd, and multiples of the tensor cores' sizes.
const DIMS: [([usize; 2], usize, usize); 4] =
    [([1, 1], 1, 1), ([5, 3], 33, 17), ([16, 2], 64, 96), ([3, 43], 200, 136)];

#[test]
fn forward_with_and_without_a_bias() {
    for ([s, b], k, n) in DIMS {
        let (x, w) = (Input::data("x", &[s, b, k]), Input::data("w", &[n, k]).times(0.1));
        let bias = Input::data("bias", &[n]);
        let with_bias = [x.clone(), w.clone(), bias];
        check("linear", &[x.clone(), w.clone()], |t| Ok(vec![linear(&t[0], &t[1], None)?]));
        check("linear with bias", &with_bias, |t| Ok(vec![linear(&t[0], &t[1], Some(&t[2]))?]));
        check("linear_into", &[x, w, Input::data("y", &[s, b, n])], |t| {
            linear_into(&t[0], &t[1], None, &t[2])?;
            Ok(vec![t[2].clone()])
        });
    }
}

/// By the product itself if cuBLASLt has a faster one, else after it.
#[test]
fn a_residual_is_added() {
    for ([s, b], k, n) in DIMS {
        let (x, w) = (Input::data("x", &[s, b, k]), Input::data("w", &[n, k]).times(0.1));
        let joined = [
            x,
            w,
            Input::data("residual", &[s, b, n]),
            Input::data("y", &[s, b, n]),
            Input::data("bias", &[n]),
        ];
        check("linear_add_into", &joined[..4], |t| {
            linear_add_into(&t[0], &t[1], None, &t[2], &t[3])?;
            Ok(vec![t[3].clone()])
        });
        check("linear_add_into with bias", &joined, |t| {
            linear_add_into(&t[0], &t[1], Some(&t[4]), &t[2], &t[3])?;
            Ok(vec![t[3].clone()])
        });
    }
}

/// In one kernel with the product if cuBLASLt has a faster one, else after it.
#[test]
fn gelu_of_a_layer_and_its_gradient() {
    for ([s, b], k, n) in DIMS {
        let (x, w) = (Input::data("x", &[s, b, k]), Input::data("w", &[n, k]).times(0.1));
        let bias = Input::data("bias", &[n]);
        check("linear_gelu", &[x.clone(), w.clone()], |t| {
            let (h, y) = linear_gelu(&t[0], &t[1], None)?;
            Ok(vec![h, y])
        });
        check("linear_gelu with bias", &[x, w.clone(), bias], |t| {
            let (h, y) = linear_gelu(&t[0], &t[1], Some(&t[2]))?;
            Ok(vec![h, y])
        });
        let (dy, h) = (Input::data("dy", &[s, b, n]), Input::data("h", &[s, b, k]));
        check("linear_dgrad_gelu", &[dy, w, h], |t| {
            Ok(vec![linear_dgrad_gelu(&t[0], &t[1], &t[2])?])
        });
    }
}

#[test]
fn results_in_f32_are_not_rounded() {
    let exact = [(DType::F32, 1e-5), (DType::BF16, 1e-5), (DType::F16, 1e-5)];
    for ([s, b], k, n) in DIMS {
        let (x, w) = (Input::data("x", &[s, b, k]), Input::data("w", &[n, k]).times(0.1));
        let with_bias = [x.clone(), w.clone(), Input::data("bias", &[n])];
        check_with("linear_to_f32", &with_bias, &exact, |t| {
            Ok(vec![linear_to_f32(&t[0], &t[1], Some(&t[2]))?])
        });
        check_with("linear_into f32", &[x, w, Input::wide("y", &[s, b, n])], &exact, |t| {
            linear_into(&t[0], &t[1], None, &t[2])?;
            Ok(vec![t[2].clone()])
        });
    }
}

#[test]
fn input_gradients() {
    for ([s, b], k, n) in DIMS {
        let (dy, w) = (Input::data("dy", &[s, b, n]), Input::data("w", &[n, k]).times(0.1));
        check("linear_dgrad", &[dy.clone(), w.clone()], |t| Ok(vec![linear_dgrad(&t[0], &t[1])?]));
        check("linear_dgrad_into", &[dy, w, Input::data("dx", &[s, b, k])], |t| {
            linear_dgrad_into(&t[0], &t[1], &t[2])?;
            Ok(vec![t[2].clone()])
        });
    }
}

/// Sums of 16-bit operands in f32, accumulated into the gradient: as exact as in f32.
#[test]
fn weight_gradients_accumulate_unrounded() {
    let exact = [(DType::F32, 1e-5), (DType::BF16, 1e-5), (DType::F16, 1e-5)];
    for ([s, b], k, n) in DIMS {
        let inputs = [
            Input::data("dy", &[s, b, n]),
            Input::data("x", &[s, b, k]),
            Input::wide("dw", &[n, k]),
        ];
        check_with("linear_wgrad", &inputs, &exact, |t| {
            linear_wgrad(&t[0], &t[1], &t[2])?;
            linear_wgrad(&t[0], &t[1], &t[2])?;
            Ok(vec![t[2].clone()])
        });
        check_with("linear_wgrad_into", &inputs, &exact, |t| {
            linear_wgrad_into(&t[0], &t[1], &t[2])?;
            Ok(vec![t[2].clone()])
        });
    }
}

/// The sum over no rows.
#[test]
fn weight_gradients_of_nothing_are_zeros() {
    let exact = [(DType::F32, 1e-9), (DType::BF16, 1e-9), (DType::F16, 1e-9)];
    let inputs =
        [Input::data("dy", &[0, 1, 5]), Input::data("x", &[0, 1, 7]), Input::wide("dw", &[5, 7])];
    check_with("linear_wgrad_into", &inputs, &exact, |t| {
        linear_wgrad_into(&t[0], &t[1], &t[2])?;
        Ok(vec![t[2].clone()])
    });
}
