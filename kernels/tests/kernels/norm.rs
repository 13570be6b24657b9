//! LayerNorm and RMSNorm, compared with the same formulas in candle's differentiable operations.

use crate::common::{DTYPES, assert_close, assert_same_on_any_threads, bits, cast, oracle, randn};
use candle_core::{D, DType, Tensor};
use kernels::ops::norm::{layer_norm, layer_norm_backward, rms_norm, rms_norm_backward};

const EPS: f64 = 1e-5;
const SHAPES: [[usize; 3]; 4] = [[1, 1, 1], [3, 2, 7], [50, 3, 33], [5, 1, 100]];

fn layer_norm_oracle(t: &[Tensor]) -> Tensor {
    let centered = t[0].broadcast_sub(&t[0].mean_keepdim(D::Minus1).unwrap()).unwrap();
    let var = centered.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
    let y = centered.broadcast_div(&(var + EPS).unwrap().sqrt().unwrap()).unwrap();
    y.broadcast_mul(&t[1]).unwrap().broadcast_add(&t[2]).unwrap()
}

fn rms_norm_oracle(t: &[Tensor]) -> Tensor {
    let mean_square = t[0].sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
    t[0].broadcast_div(&(mean_square + EPS).unwrap().sqrt().unwrap())
        .unwrap()
        .broadcast_mul(&t[1])
        .unwrap()
}

#[test]
fn layer_norm_and_its_gradients_agree_with_autograd() {
    for shape in SHAPES {
        let h = shape[2];
        let (x, dy) = ((randn("x", &shape) + 3.0).unwrap(), randn("dy", &shape));
        let (x, w, bias) =
            (cast(&cast(&x, DType::F32), DType::F64), randn("w", &[h]), randn("bias", &[h]));
        let (y, grads) = oracle(&[&x, &w, &bias], &dy, layer_norm_oracle);
        for (dtype, tolerance) in DTYPES {
            let [x, w, bias, dy] = [&x, &w, &bias, &dy].map(|t| cast(t, dtype));
            let (got, stats) = layer_norm(&x, &w, &bias, EPS).unwrap();
            let (dw, db) = (w.zeros_like().unwrap(), bias.zeros_like().unwrap());
            let dx = layer_norm_backward(&dy, &x, &stats, &w, &dw, &db, None).unwrap();
            assert_close("y", &got, &y, tolerance);
            // A row of one element has variance 0, and gradient 0 up to rounding.
            if h > 1 {
                assert_close("dx", &dx, &grads[0], 2.0 * tolerance);
            }
            assert_close("dweight", &dw, &grads[1], tolerance);
            assert_close("dbias", &db, &grads[2], tolerance);
        }
    }
}

#[test]
fn rms_norm_and_its_gradients_agree_with_autograd() {
    for shape in SHAPES {
        let (x, dy, w) = (randn("x", &shape), randn("dy", &shape), randn("w", &[shape[2]]));
        let (y, grads) = oracle(&[&x, &w], &dy, rms_norm_oracle);
        for (dtype, tolerance) in DTYPES {
            let [x, w, dy] = [&x, &w, &dy].map(|t| cast(t, dtype));
            let (got, stats) = rms_norm(&x, &w, EPS).unwrap();
            let dw = w.zeros_like().unwrap();
            let dx = rms_norm_backward(&dy, &x, &stats, &w, &dw, None).unwrap();
            assert_close("y", &got, &y, tolerance);
            if shape[2] > 1 {
                assert_close("dx", &dx, &grads[0], 2.0 * tolerance);
            }
            assert_close("dweight", &dw, &grads[1], tolerance);
        }
    }
}

#[test]
fn gradients_of_weight_and_bias_may_be_views_of_one_buffer_and_accumulate() {
    let (x, w, bias, dy) =
        (randn("x", &[9, 2, 6]), randn("w", &[6]), randn("b", &[6]), randn("dy", &[9, 2, 6]));
    let flat = Tensor::ones(12, DType::F64, x.device()).unwrap();
    let (dw, db) = (flat.narrow(0, 0, 6).unwrap(), flat.narrow(0, 6, 6).unwrap());
    let (_, stats) = layer_norm(&x, &w, &bias, EPS).unwrap();
    layer_norm_backward(&dy, &x, &stats, &w, &dw, &db, None).unwrap();
    let (_, grads) = oracle(&[&x, &w, &bias], &dy, layer_norm_oracle);
    assert_close("dweight", &dw, &(&grads[1] + 1.0).unwrap(), 1e-12);
    assert_close("dbias", &db, &(&grads[2] + 1.0).unwrap(), 1e-12);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let shape = [333, 2, 97];
    let [x, w, bias, dy] =
        [randn("x", &shape), randn("w", &[97]), randn("b", &[97]), randn("dy", &shape)]
            .map(|t| cast(&t, DType::F32));
    assert_same_on_any_threads(|| {
        let (dw, db, dw_rms) =
            (w.zeros_like().unwrap(), w.zeros_like().unwrap(), w.zeros_like().unwrap());
        let (y, stats) = layer_norm(&x, &w, &bias, EPS).unwrap();
        let dx = layer_norm_backward(&dy, &x, &stats, &w, &dw, &db, None).unwrap();
        let (y_rms, stats) = rms_norm(&x, &w, EPS).unwrap();
        let dx_rms = rms_norm_backward(&dy, &x, &stats, &w, &dw_rms, None).unwrap();
        vec![y, dx, dw, db, y_rms, dx_rms, dw_rms]
    });
}

#[test]
fn statistics_of_the_other_norm_are_refused() {
    let (x, w) = (randn("x", &[2, 2, 4]), randn("w", &[4]));
    let (_, rms) = rms_norm(&x, &w, EPS).unwrap();
    assert!(
        layer_norm_backward(&x, &x, &rms, &w, &w, &w, None)
            .unwrap_err()
            .to_string()
            .contains("rms_norm")
    );
    let (_, layer) = layer_norm(&x, &w, &w, EPS).unwrap();
    assert!(
        rms_norm_backward(&x, &x, &layer, &w, &w, None)
            .unwrap_err()
            .to_string()
            .contains("layer_norm")
    );
}

#[test]
fn the_gradient_around_the_norm_is_added_to_its_own() {
    let shape = [40, 2, 37];
    let [x, w, bias, dy, around] = [
        randn("x", &shape),
        randn("w", &[37]),
        randn("b", &[37]),
        randn("dy", &shape),
        randn("around", &shape),
    ]
    .map(|t| cast(&t, DType::F32));
    let (dw, db) = (w.zeros_like().unwrap(), w.zeros_like().unwrap());
    let (_, stats) = layer_norm(&x, &w, &bias, EPS).unwrap();
    let dx = layer_norm_backward(&dy, &x, &stats, &w, &dw, &db, None).unwrap();
    let sum = layer_norm_backward(&dy, &x, &stats, &w, &dw, &db, Some(&around)).unwrap();
    assert_eq!(bits(&sum), bits(&(dx + &around).unwrap()));
    let (_, stats) = rms_norm(&x, &w, EPS).unwrap();
    let dx = rms_norm_backward(&dy, &x, &stats, &w, &dw, None).unwrap();
    let sum = rms_norm_backward(&dy, &x, &stats, &w, &dw, Some(&around)).unwrap();
    assert_eq!(bits(&sum), bits(&(dx + around).unwrap()));
}
