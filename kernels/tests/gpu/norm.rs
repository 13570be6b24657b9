//! LayerNorm and RMSNorm.

use crate::support::{Input, check};
use candle_core::{DType, Tensor};
use kernels::Result;
use kernels::ops::norm::{layer_norm, layer_norm_backward, rms_norm, rms_norm_backward};

const EPS: f64 = 1e-5;

/// Rows and widths for every kernel: a row per warp (up to 2048 elements), per block (up to 16384),
/// of any width; the last vector of a lane, warp or block is whole, or missing.
const FORWARD: [[usize; 3]; 15] = [
    [3, 2, 1],
    [1, 1, 7],
    [4, 1, 33],
    [5, 3, 64],
    [3, 3, 100],
    [2, 1, 256],
    [2, 2, 264],
    [5, 1, 768],
    [1, 5, 1000],
    [2, 1, 1024],
    [1, 1, 2048],
    [2, 1, 2056],
    [1, 2, 4101],
    [1, 1, 16384],
    [1, 1, 16392],
];

/// Also several shares of rows, with a partial last share.
const BACKWARD: [[usize; 3]; 15] = [
    [1, 1, 7],
    [25, 3, 33],
    [7, 3, 64],
    [21, 1, 100],
    [9, 1, 256],
    [13, 1, 504],
    [5, 2, 768],
    [3, 3, 1024],
    [1, 5, 1032],
    [1, 2, 2048],
    [3, 1, 4104],
    [1, 1, 8192],
    [2, 1, 8200],
    [2, 1, 16384],
    // More rows than the minimum of a block.
    [4500, 1, 64],
];

#[test]
fn forward_and_statistics() {
    for shape in FORWARD {
        let h = shape[2];
        let inputs =
            [Input::data("x", &shape).times(3.0), Input::data("w", &[h]), Input::data("b", &[h])];
        check("layer_norm", &inputs, |t| {
            let (y, stats) = layer_norm(&t[0], &t[1], &t[2], EPS)?;
            Ok(vec![y, stats.mean.unwrap()])
        });
        check("rms_norm", &inputs[..2], |t| {
            let (y, stats) = rms_norm(&t[0], &t[1], EPS)?;
            assert!(stats.mean.is_none());
            Ok(vec![y, stats.rstd])
        });
        if h > 1 {
            check("layer_norm's rstd", &inputs, |t| {
                Ok(vec![layer_norm(&t[0], &t[1], &t[2], EPS)?.1.rstd])
            });
        }
    }
}

fn backward(t: &[Tensor], around: bool) -> Result<Vec<Tensor>> {
    let [x, w, dy, residual, dw, db] = t else { unreachable!() };
    let residual = around.then_some(residual);
    let (_, stats) = layer_norm(x, w, w, EPS)?;
    let dx = layer_norm_backward(dy, x, &stats, w, dw, db, residual)?;
    Ok(vec![dx, dw.clone(), db.clone()])
}

fn rms_backward(t: &[Tensor], around: bool) -> Result<Vec<Tensor>> {
    let [x, w, dy, residual, dw, _] = t else { unreachable!() };
    let residual = around.then_some(residual);
    let (_, stats) = rms_norm(x, w, EPS)?;
    let dx = rms_norm_backward(dy, x, &stats, w, dw, residual)?;
    Ok(vec![dx, dw.clone()])
}

fn inputs(shape: &[usize; 3]) -> [Input; 6] {
    let h = shape[2];
    [
        Input::data("x", shape).times(2.0),
        Input::data("w", &[h]),
        Input::data("dy", shape),
        Input::data("around", shape),
        Input::wide("dw", &[h]),
        Input::wide("db", &[h]),
    ]
}

#[test]
fn backward_adds_to_the_parameters_gradients() {
    for shape in BACKWARD {
        check("layer_norm_backward", &inputs(&shape), |t| backward(t, false));
        check("rms_norm_backward", &inputs(&shape), |t| rms_backward(t, false));
    }
}

#[test]
fn the_gradient_around_the_norm_is_added() {
    for shape in [[9, 2, 96], [2, 1, 1032], [3, 1, 77]] {
        check("layer_norm_backward", &inputs(&shape), |t| backward(t, true));
        check("rms_norm_backward", &inputs(&shape), |t| rms_backward(t, true));
    }
}

#[test]
fn gradients_of_weight_and_bias_may_be_views_of_one_buffer() {
    for shape in [[9, 2, 64], [3, 1, 13]] {
        let h = shape[2];
        let flat =
            [Input::data("x", &shape), Input::data("w", &[h]), Input::wide("flat", &[2 * h])];
        check("layer_norm_backward", &flat, |t| {
            let (dw, db) = (t[2].narrow(0, 0, h)?, t[2].narrow(0, h, h)?);
            let (_, stats) = layer_norm(&t[0], &t[1], &t[1], EPS)?;
            layer_norm_backward(&t[0], &t[0], &stats, &t[1], &dw, &db, None)?;
            Ok(vec![t[2].clone()])
        });
    }
}

#[test]
fn no_rows_are_no_work() {
    check("layer_norm_backward", &inputs(&[0, 2, 8]), |t| backward(t, true));
    check("rms_norm_backward", &inputs(&[0, 2, 8]), |t| rms_backward(t, true));
}

#[test]
fn wrong_shapes_and_dtypes_are_the_errors_of_the_cpu() {
    for (_, message) in crate::support::runs(|device| {
        let x = Tensor::zeros((2, 2, 8), DType::BF16, device).unwrap();
        let w = Tensor::zeros(8, DType::BF16, device).unwrap();
        let narrow = Tensor::zeros(4, DType::BF16, device).unwrap();
        let (_, stats) = rms_norm(&x, &w, EPS).unwrap();
        [
            rms_norm(&x, &narrow, EPS).unwrap_err().to_string(),
            rms_norm(&x, &w.to_dtype(DType::F32).unwrap(), EPS).unwrap_err().to_string(),
            rms_norm(&x.transpose(0, 1).unwrap(), &w, EPS).unwrap_err().to_string(),
            rms_norm_backward(&x, &x, &stats, &w, &w, None).unwrap_err().to_string(),
            layer_norm_backward(&x, &x, &stats, &w, &w, &w, None).unwrap_err().to_string(),
        ]
        .join("\n")
    }) {
        let wanted = [
            "weight has shape [4] where [8]",
            "does not support dtype F32",
            "needs a contiguous x",
        ];
        let wanted = wanted.iter().chain(&["does not support dtype BF16", "those of rms_norm"]);
        for (line, want) in message.lines().zip(wanted) {
            assert!(line.contains(want), "{line}: {want}");
        }
    }
}
