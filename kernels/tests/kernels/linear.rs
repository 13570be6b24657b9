//! Linear layers, compared with candle's matmul and autograd.

use crate::common::{
    DTYPES, assert_close, assert_same_on_any_threads, bits, cast, oracle, randn, tanh_gelu,
};
use candle_core::{DType, Device, Tensor};
use kernels::ops::activation::gelu;
use kernels::ops::linear::{
    bias_grad, linear, linear_add_into, linear_dgrad, linear_dgrad_gelu,
    linear_dgrad_gelu_recompute, linear_dgrad_into, linear_gelu, linear_into, linear_to_f32,
    linear_wgrad, linear_wgrad_into,
};

const SHAPES: [(usize, usize, usize, usize); 5] =
    [(1, 1, 1, 1), (3, 2, 5, 7), (33, 3, 65, 17), (1, 9, 130, 64), (70, 2, 16, 96)];

fn reference(x: &Tensor, w: &Tensor, bias: &Tensor, dy: &Tensor) -> (Tensor, Vec<Tensor>) {
    oracle(&[x, w, bias], dy, |t| {
        t[0].broadcast_matmul(&t[1].t().unwrap()).unwrap().broadcast_add(&t[2]).unwrap()
    })
}

#[test]
fn forward_and_gradients_agree_with_autograd() {
    for (s, b, k, n) in SHAPES {
        let (x, w) = (randn("x", &[s, b, k]), randn("w", &[n, k]));
        let (bias, dy) = (randn("bias", &[n]), randn("dy", &[s, b, n]));
        let (y, grads) = reference(&x, &w, &bias, &dy);
        for (dtype, tolerance) in DTYPES {
            let [x, w, bias, dy] = [&x, &w, &bias, &dy].map(|t| cast(t, dtype));
            let (dw, db) = (w.zeros_like().unwrap(), bias.zeros_like().unwrap());
            linear_wgrad(&dy, &x, &dw).unwrap();
            bias_grad(&dy, &db).unwrap();
            let fresh = (w.ones_like().unwrap() * f64::NAN).unwrap();
            linear_wgrad_into(&dy, &x, &fresh).unwrap();
            assert_eq!(
                bits(&fresh),
                bits(&dw),
                "in the place of what was there, and added to zeros"
            );
            assert_close("y", &linear(&x, &w, Some(&bias)).unwrap(), &y, tolerance);
            assert_close("dx", &linear_dgrad(&dy, &w).unwrap(), &grads[0], tolerance);
            assert_close("dw", &dw, &grads[1], tolerance);
            assert_close("db", &db, &grads[2], tolerance);
        }
    }
}

/// A layer with GELU, and the next layer; the next layer's input gradient becomes the gradient of
/// GELU's argument.
#[test]
fn layers_with_gelu_agree_with_autograd() {
    for (s, b, k, n) in SHAPES {
        let (x, w, bias) = (randn("x", &[s, b, k]), randn("w", &[n, k]), randn("bias", &[n]));
        let (dy, next) = (randn("dy", &[s, b, k]), randn("next", &[k, n]));
        let h = linear(&x, &w, Some(&bias)).unwrap();
        let (_, grads) = oracle(&[&h, &next], &dy, |t| {
            tanh_gelu(&t[0]).broadcast_matmul(&t[1].t().unwrap()).unwrap()
        });
        for (dtype, tolerance) in DTYPES {
            let [x, w, bias, dy, next] = [&x, &w, &bias, &dy, &next].map(|t| cast(t, dtype));
            let (hidden, y) = linear_gelu(&x, &w, Some(&bias)).unwrap();
            assert_close("h", &hidden, &h, tolerance);
            assert_close("y", &y, &tanh_gelu(&h), tolerance);
            assert_close(
                "dh",
                &linear_dgrad_gelu(&dy, &next, &cast(&h, dtype)).unwrap(),
                &grads[0],
                tolerance,
            );
            assert_eq!(bits(&y), bits(&gelu(&hidden).unwrap()));
            let [dh, again] = linear_dgrad_gelu_recompute(&dy, &next, &hidden).unwrap();
            assert_eq!(bits(&dh), bits(&linear_dgrad_gelu(&dy, &next, &hidden).unwrap()));
            assert_eq!(bits(&again), bits(&y));
        }
        assert!(linear_dgrad_gelu(&dy, &next, &w).is_err(), "h of another shape");
    }
}

#[test]
fn a_residual_is_added_to_the_product_and_its_bias() {
    for (s, b, k, n) in SHAPES {
        let (x, w, bias, residual) = (
            randn("x", &[s, b, k]),
            randn("w", &[n, k]),
            randn("bias", &[n]),
            randn("r", &[s, b, n]),
        );
        let sum = |bias: Option<&Tensor>| (linear(&x, &w, bias).unwrap() + &residual).unwrap();
        for (dtype, tolerance) in DTYPES {
            let [x, w, b, r] = [&x, &w, &bias, &residual].map(|t| cast(t, dtype));
            for (given, want) in [(Some(&b), sum(Some(&bias))), (None, sum(None))] {
                let y = (r.ones_like().unwrap() * f64::NAN).unwrap();
                linear_add_into(&x, &w, given, &r, &y).unwrap();
                assert_close("y", &y, &want, tolerance);
            }
        }
        let other = randn("other", &[s, b, n + 1]);
        assert!(
            linear_add_into(&x, &w, None, &other, &residual).is_err(),
            "a residual of another shape"
        );
        assert!(
            linear_add_into(&x, &w, None, &residual, &other).is_err(),
            "a result of another shape"
        );
        let narrow = cast(&residual, DType::BF16);
        assert!(
            linear_add_into(&x, &w, None, &narrow, &residual).is_err(),
            "a residual of another dtype"
        );
    }
}

#[test]
fn a_missing_bias_is_a_bias_of_zero() {
    let (x, w) = (randn("x", &[5, 2, 9]), randn("w", &[4, 9]));
    let zero = Tensor::zeros(4, DType::F64, &Device::Cpu).unwrap();
    assert_close("y", &linear(&x, &w, None).unwrap(), &linear(&x, &w, Some(&zero)).unwrap(), 1e-14);
}

#[test]
fn parameter_gradients_accumulate_into_views_of_a_flat_buffer() {
    let (x, dy) = (randn("x", &[6, 2, 3]), randn("dy", &[6, 2, 4]));
    let flat = Tensor::ones(20, DType::F64, &Device::Cpu).unwrap();
    let dw = flat.narrow(0, 2, 12).unwrap().reshape((4, 3)).unwrap();
    let db = flat.narrow(0, 15, 4).unwrap();
    for _ in 0..2 {
        linear_wgrad(&dy, &x, &dw).unwrap();
        bias_grad(&dy, &db).unwrap();
    }
    let (_, grads) = reference(&x, &randn("w", &[4, 3]), &randn("bias", &[4]), &dy);
    assert_close("dw", &dw, &((&grads[1] * 2.0).unwrap() + 1.0).unwrap(), 1e-13);
    assert_close("db", &db, &((&grads[2] * 2.0).unwrap() + 1.0).unwrap(), 1e-13);
    let outside = [0, 1, 14, 19].map(|i| flat.get(i).unwrap().to_scalar::<f64>().unwrap());
    assert_eq!(outside, [1.0; 4]);
}

/// Rows are added in order into sums of 64, and these in order into the gradient, however many rows
/// are read at once.
#[test]
fn a_bias_gradient_adds_rows_in_a_fixed_order() {
    for (rows, n) in [(150, 77), (64, 16), (7, 33)] {
        // In f32: sums of so few bf16 are mostly exact, in any order.
        let dy = cast(&randn("dy", &[rows, n]), DType::F32);
        let db = Tensor::zeros(n, DType::F32, dy.device()).unwrap();
        bias_grad(&dy, &db).unwrap();
        let dy = dy.to_vec2::<f32>().unwrap();
        let sum = |column: usize, rows: &[Vec<f32>]| {
            rows.iter().fold(0.0f32, |sum, row| sum + row[column])
        };
        let want: Vec<f32> = (0..n)
            .map(|column| dy.chunks(64).map(|rows| sum(column, rows)).fold(0.0, |a, b| a + b))
            .collect();
        assert_eq!(db.to_vec1::<f32>().unwrap(), want);
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    for (s, b, k, n) in [(100, 2, 300, 257), (64, 4, 64, 1000), (300, 1, 7, 130)] {
        let [x, w, bias, dy] = [
            randn("x", &[s, b, k]),
            randn("w", &[n, k]),
            randn("b", &[n]),
            randn("dy", &[s, b, n]),
        ]
        .map(|t| cast(&t, DType::F32));
        assert_same_on_any_threads(|| {
            let (dw, db) = (w.zeros_like().unwrap(), bias.zeros_like().unwrap());
            linear_wgrad(&dy, &x, &dw).unwrap();
            bias_grad(&dy, &db).unwrap();
            let joined = dy.zeros_like().unwrap();
            linear_add_into(&x, &w, Some(&bias), &dy, &joined).unwrap();
            vec![
                linear(&x, &w, Some(&bias)).unwrap(),
                joined,
                linear_dgrad(&dy, &w).unwrap(),
                dw,
                db,
            ]
        });
    }
}

#[test]
fn wrong_operands_are_errors_that_name_both_shapes() {
    let (x, w) = (randn("x", &[2, 3, 4]), randn("w", &[6, 5]));
    let message = linear(&x, &w, None).unwrap_err().to_string();
    assert!(message.contains("[2, 3, 4]") && message.contains("[6, 5]"), "{message}");
    let message = linear_wgrad(&randn("dy", &[2, 3, 6]), &x, &w).unwrap_err().to_string();
    assert!(message.contains("[6, 5]") && message.contains("[6, 4]"), "{message}");
    let whole = cast(&x.flatten(0, 1).unwrap(), DType::I64);
    assert_eq!(
        linear(&whole, &whole, None).unwrap_err().to_string(),
        "linear does not support dtype I64"
    );
    let mixed = linear(&x, &cast(&randn("w", &[6, 4]), DType::F32), None).unwrap_err().to_string();
    assert_eq!(mixed, "linear does not support dtype F32");
    let strided = x.transpose(0, 1).unwrap();
    assert!(
        linear(&strided, &randn("w", &[6, 4]), None)
            .unwrap_err()
            .to_string()
            .contains("contiguous x")
    );
}

/// 16-bit storage types, with the relative error of rounding to them.
const NARROW: [(DType, f64); 2] = [(DType::BF16, 1.0 / 256.0), (DType::F16, 1.0 / 2048.0)];

#[test]
fn sixteen_bit_results_are_rounded_once_and_gradients_of_parameters_stay_in_f32() {
    for (s, b, k, n) in SHAPES {
        for (dtype, unit) in NARROW {
            let names =
                [("x", vec![s, b, k]), ("w", vec![n, k]), ("bias", vec![n]), ("dy", vec![s, b, n])];
            let [x, w, bias, dy] = names.map(|(name, shape)| cast(&randn(name, &shape), dtype));
            let exact = [&x, &w, &bias, &dy].map(|t| cast(t, DType::F64));
            let (y, grads) = reference(&exact[0], &exact[1], &exact[2], &exact[3]);
            assert_close("y", &linear(&x, &w, Some(&bias)).unwrap(), &y, unit);
            assert_close("dx", &linear_dgrad(&dy, &w).unwrap(), &grads[0], unit);
            let logits = linear_to_f32(&x, &w, Some(&bias)).unwrap();
            assert_eq!(logits.dtype(), DType::F32);
            assert_close("logits", &logits, &y, 2e-5);
            let [dw, db] = [vec![n, k], vec![n]]
                .map(|shape| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap());
            linear_wgrad(&dy, &x, &dw).unwrap();
            bias_grad(&dy, &db).unwrap();
            assert_close("dw", &dw, &(&grads[1] + 1.0).unwrap(), 2e-5);
            assert_close("db", &db, &(&grads[2] + 1.0).unwrap(), 2e-5);
        }
    }
}

#[test]
fn results_may_go_into_views_and_are_the_same_there() {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let [x, w, dy] = [("x", [10, 9]), ("w", [7, 9]), ("dy", [10, 7])]
            .map(|(name, shape)| cast(&randn(name, &shape), dtype));
        let (y, logits) = (linear(&x, &w, None).unwrap(), linear_to_f32(&x, &w, None).unwrap());
        for want in [y, logits] {
            let flat = Tensor::ones((12, 7), want.dtype(), &Device::Cpu).unwrap();
            linear_into(&x, &w, None, &flat.narrow(0, 1, 10).unwrap()).unwrap();
            let ones = Tensor::ones((1, 7), want.dtype(), &Device::Cpu).unwrap();
            assert_eq!(bits(&flat), bits(&Tensor::cat(&[&ones, &want, &ones], 0).unwrap()));
        }
        let dx = linear_dgrad(&dy, &w).unwrap();
        let flat = Tensor::ones((12, 9), dtype, &Device::Cpu).unwrap();
        linear_dgrad_into(&dy, &w, &flat.narrow(0, 2, 10).unwrap()).unwrap();
        assert_eq!(bits(&flat.narrow(0, 2, 10).unwrap()), bits(&dx));
        assert!(linear_dgrad_into(&dy, &w, &flat.narrow(0, 2, 9).unwrap()).is_err());
        let other = Tensor::ones((10, 7), DType::U32, &Device::Cpu).unwrap();
        assert!(linear_into(&x, &w, None, &other).is_err());
        let narrow_dw = Tensor::ones((7, 9), dtype, &Device::Cpu).unwrap();
        assert_eq!(linear_wgrad(&dy, &x, &narrow_dw).is_ok(), dtype == wide);
    }
}

#[test]
fn a_contiguous_result_may_have_any_shape_and_one_with_gaps_only_that_of_the_result() {
    let (x, w) = (cast(&randn("x", &[4, 8]), DType::F32), cast(&randn("w", &[16, 8]), DType::F32));
    let want = bits(&linear(&x, &w, None).unwrap());
    for shape in [vec![64], vec![2, 32], vec![8, 8], vec![1, 4, 16]] {
        // Numbers before and after must stay.
        let room = Tensor::ones(192, DType::F32, &Device::Cpu).unwrap();
        let y = room.narrow(0, 64, 64).unwrap().reshape(shape).unwrap();
        linear_into(&x, &w, None, &y).unwrap();
        assert_eq!(bits(&y), want);
        let others =
            (room.sum_all().unwrap() - y.sum_all().unwrap()).unwrap().to_scalar::<f32>().unwrap();
        assert!((others - 128.0).abs() < 1e-3, "{others}");
    }
    for (rows, width) in [(2, 32), (8, 8)] {
        let y = Tensor::ones((rows, width + 3), DType::F32, &Device::Cpu)
            .unwrap()
            .narrow(1, 0, width)
            .unwrap();
        let refused = linear_into(&x, &w, None, &y).unwrap_err().to_string();
        assert!(refused.contains(&format!("[{rows}, {width}]")), "{refused}");
    }
}

#[test]
fn a_result_in_the_storage_of_an_operand_is_refused_rather_than_waited_for() {
    let (flat, w) =
        (cast(&randn("flat", &[24, 8]), DType::F32), cast(&randn("w", &[8, 8]), DType::F32));
    let [a, b, c] = [0, 8, 16].map(|at| flat.narrow(0, at, 8).unwrap());
    let refusals = [
        linear_into(&a, &w, None, &b),
        linear_into(&w, &a, None, &b),
        linear_add_into(&w, &w, None, &a, &b),
        linear_dgrad_into(&a, &w, &b),
        linear_wgrad(&a, &w, &c),
        linear_wgrad_into(&w, &b, &c),
    ];
    for refusal in refusals {
        assert!(refusal.unwrap_err().to_string().contains("shares its storage"));
    }
}

#[test]
fn a_result_without_elements_is_none_to_write() {
    let empty = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    linear_into(&empty(&[3, 0, 4]), &empty(&[5, 4]), None, &empty(&[3, 0, 5])).unwrap();
    linear_dgrad_into(&empty(&[3, 0, 5]), &empty(&[5, 4]), &empty(&[3, 0, 4])).unwrap();
}

/// Contiguous rows of 1024 lie a multiple of 4 KiB apart. Products pack such rows instead of
/// reading them in place.
#[test]
fn rows_of_results_and_of_their_gradients_may_lie_apart() {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let shapes = [("x", [70, 33]), ("w", [1024, 33]), ("dy", [70, 1024])];
        let [x, w, dy] = shapes.map(|(name, shape)| cast(&randn(name, &shape), dtype));
        for want in [linear(&x, &w, None).unwrap(), linear_to_f32(&x, &w, None).unwrap()] {
            let room = Tensor::ones((72, 1100), want.dtype(), &Device::Cpu).unwrap();
            let within = |t: &Tensor| t.narrow(0, 1, 70).unwrap().narrow(1, 3, 1024).unwrap();
            linear_into(&x, &w, None, &within(&room)).unwrap();
            assert_eq!(bits(&within(&room).contiguous().unwrap()), bits(&want));
            let others = cast(&room, DType::F64).sum_all().unwrap()
                - cast(&want, DType::F64).sum_all().unwrap();
            let others = others.unwrap().to_scalar::<f64>().unwrap();
            assert!(
                (others - (72 * 1100 - 70 * 1024) as f64).abs() < 1e-6,
                "what lies between was written: {others}"
            );
        }
        let apart = Tensor::cat(&[&dy, &dy.narrow(1, 0, 40).unwrap()], 1).unwrap();
        let apart = apart.narrow(1, 0, 1024).unwrap();
        assert!(!apart.is_contiguous());
        assert_eq!(bits(&linear_dgrad(&apart, &w).unwrap()), bits(&linear_dgrad(&dy, &w).unwrap()));
        let sums = [&dy, &apart].map(|dy| {
            let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
            let dw = Tensor::ones((1024, 33), wide, &Device::Cpu).unwrap();
            linear_wgrad(dy, &x, &dw).unwrap();
            bits(&dw)
        });
        assert_eq!(sums[0], sums[1]);
        // Also over several leading dimensions, and for both operands of a weight's gradient.
        let shaped = |t: &Tensor, apart: usize| {
            let (rows, width) = t.dims2().unwrap();
            let wider = Tensor::cat(&[t, &t.narrow(1, 0, apart).unwrap()], 1).unwrap();
            wider.reshape((rows / 7, 7, width + apart)).unwrap().narrow(2, 0, width).unwrap()
        };
        let whole = |t: &Tensor| shaped(t, 0).contiguous().unwrap();
        assert_eq!(
            bits(&linear(&shaped(&x, 5), &w, None).unwrap()),
            bits(&linear(&whole(&x), &w, None).unwrap())
        );
        let sums = [(whole(&dy), whole(&x)), (shaped(&dy, 40), shaped(&x, 5))].map(|(dy, x)| {
            let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
            let [dw, db] = [&[1024, 33][..], &[1024]]
                .map(|dims| Tensor::ones(dims, wide, &Device::Cpu).unwrap());
            linear_wgrad(&dy, &x, &dw).unwrap();
            bias_grad(&dy, &db).unwrap();
            (bits(&dw), bits(&db))
        });
        assert_eq!(sums[0], sums[1]);
        // With rows missing in between, the stride is not constant.
        let holes = whole(&x).narrow(1, 0, 5).unwrap();
        assert!(linear(&holes, &w, None).unwrap_err().to_string().contains("contiguous x"));
        // Strided columns are not rows.
        let turned = cast(&randn("dy", &[1024, 70]), dtype).t().unwrap();
        assert!(linear_dgrad(&turned, &w).unwrap_err().to_string().contains("contiguous dy"));
        assert!(linear_into(&x, &w, None, &turned).unwrap_err().to_string().contains("contiguous"));
    }
}
