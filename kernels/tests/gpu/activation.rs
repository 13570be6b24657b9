//! GELU, ReLU, squared ReLU and SwiGLU.

use crate::support::{Input, check};
use kernels::ops::activation::{
    gelu, gelu_backward, gelu_backward_recompute, relu, relu_backward, relu_backward_recompute,
    squared_relu, squared_relu_backward, squared_relu_backward_recompute, swiglu, swiglu_backward,
    swiglu_backward_recompute,
};

#[test]
fn gelu_and_its_gradient() {
    for shape in [vec![1], vec![7, 3, 5], vec![2, 3, 688], vec![5, 1, 1023]] {
        let (x, dy) = (Input::data("x", &shape).times(3.0), Input::data("dy", &shape));
        check("gelu", std::slice::from_ref(&x), |t| Ok(vec![gelu(&t[0])?]));
        let operands = [dy, x];
        check("gelu_backward", &operands, |t| Ok(vec![gelu_backward(&t[0], &t[1])?]));
        check("gelu_backward_recompute", &operands, |t| {
            Ok(gelu_backward_recompute(&t[0], &t[1])?.to_vec())
        });
    }
}

#[test]
fn relu_and_squared_relu_and_their_gradients() {
    for shape in [vec![1], vec![2, 3, 688], vec![5, 1, 1023]] {
        let (x, dy) = (Input::data("x", &shape), Input::data("dy", &shape));
        check("relu", std::slice::from_ref(&x), |t| Ok(vec![relu(&t[0])?]));
        check("squared_relu", std::slice::from_ref(&x), |t| Ok(vec![squared_relu(&t[0])?]));
        let operands = [dy, x];
        check("relu_backward", &operands, |t| Ok(vec![relu_backward(&t[0], &t[1])?]));
        check("squared_relu_backward", &operands, |t| {
            Ok(vec![squared_relu_backward(&t[0], &t[1])?])
        });
        check("relu, recomputed", &operands, |t| {
            Ok(relu_backward_recompute(&t[0], &t[1])?.to_vec())
        });
        check("squared_relu, recomputed", &operands, |t| {
            Ok(squared_relu_backward_recompute(&t[0], &t[1])?.to_vec())
        });
    }
}

/// u′ overflows in f32, but not in the reference's f64.
#[test]
fn gelu_and_its_gradient_far_from_zero() {
    let (x, dy) = (Input::wide("x", &[3, 40]).times(1e14), Input::wide("dy", &[3, 40]));
    check("gelu", std::slice::from_ref(&x), |t| Ok(vec![gelu(&t[0])?]));
    check("gelu_backward", &[dy, x], |t| Ok(vec![gelu_backward(&t[0], &t[1])?]));
    let (x, dy) = (Input::wide("x", &[3, 40]).times(1e25), Input::wide("dy", &[3, 40]));
    check("gelu_backward_recompute", &[dy, x], |t| {
        Ok(gelu_backward_recompute(&t[0], &t[1])?.to_vec())
    });
}

#[test]
fn swiglu_and_its_gradient() {
    for (leading, f) in [([1, 1], 1), ([3, 2], 17), ([2, 1], 64), ([1, 2], 1100)] {
        let (wide, narrow) = ([leading[0], leading[1], 2 * f], [leading[0], leading[1], f]);
        let (x, dy) = (Input::data("x", &wide).times(3.0), Input::data("dy", &narrow));
        check("swiglu", std::slice::from_ref(&x), |t| Ok(vec![swiglu(&t[0])?]));
        let operands = [dy, x];
        check("swiglu_backward", &operands, |t| Ok(vec![swiglu_backward(&t[0], &t[1])?]));
        check("swiglu_backward_recompute", &operands, |t| {
            Ok(swiglu_backward_recompute(&t[0], &t[1])?.to_vec())
        });
    }
}

#[test]
fn nothing_is_nothing() {
    check("gelu", &[Input::data("x", &[0, 4])], |t| Ok(vec![gelu(&t[0])?]));
    check("swiglu", &[Input::data("x", &[0, 4])], |t| Ok(vec![swiglu(&t[0])?]));
}
