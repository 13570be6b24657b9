//! 16-bit storage: the results of a kernel on bf16 or f16 tensors are its results on the same
//! values in f32, rounded once, bit for bit. Statistics and gradients of parameters equal the f32
//! ones.

use crate::common::{bits, cast, ids, randn};
use candle_core::{DType, Device, Tensor};
use kernels::ops::attention::{HeadShape, RopeTable, rope_inplace};
use kernels::ops::dropout::{Dropout, DropoutKey, Tokens, bias_dropout_add, dropout_backward};
use kernels::ops::norm::{layer_norm, layer_norm_backward, rms_norm, rms_norm_backward};
use kernels::ops::optimizer::{AdamW, Sgd, adamw, sgd};
use kernels::ops::{activation, cross_entropy, embedding, reduce};

const DTYPES: [DType; 2] = [DType::BF16, DType::F16];
/// Rows for several blocks and a remainder, of a width for vectors and a remainder.
const SHAPE: [usize; 3] = [150, 3, 77];

/// Results of a kernel: those in its operands' dtype, and statistics or gradients of parameters in
/// f32.
type Results = (Vec<Tensor>, Vec<Tensor>);

/// Runs `kernel` on `inputs` in each 16-bit dtype and on the same values in f32, and compares.
#[track_caller]
fn assert_rounds_once(inputs: &[Tensor], kernel: impl Fn(&[Tensor]) -> kernels::Result<Results>) {
    for dtype in DTYPES {
        let narrow: Vec<Tensor> = inputs.iter().map(|t| cast(t, dtype)).collect();
        let wide: Vec<Tensor> = narrow.iter().map(|t| cast(t, DType::F32)).collect();
        let (results, statistics) = kernel(&narrow).unwrap();
        let (want, want_statistics) = kernel(&wide).unwrap();
        assert_eq!((results.len(), statistics.len()), (want.len(), want_statistics.len()));
        for (i, (got, want)) in results.iter().zip(&want).enumerate() {
            assert_eq!((got.dtype(), got.dims()), (dtype, want.dims()));
            assert!(
                bits(got) == bits(&cast(want, dtype)),
                "{dtype:?}: result {i} is not the rounded one of f32"
            );
        }
        for (i, (got, want)) in statistics.iter().zip(&want_statistics).enumerate() {
            assert_eq!(got.dtype(), DType::F32);
            assert!(bits(got) == bits(want), "{dtype:?}: statistic {i} differs");
        }
    }
}

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn norms_round_once() {
    assert_norms_round_once(SHAPE);
}

#[test]
fn norms_of_rows_that_are_rounded_in_parts_round_once() {
    assert_norms_round_once([70, 1, 601]);
}

fn assert_norms_round_once(shape: [usize; 3]) {
    let h = shape[2];
    let inputs = [randn("x", &shape), randn("dy", &shape), randn("w", &[h]), randn("b", &[h])];
    assert_rounds_once(&inputs, |t| {
        let [x, dy, w, bias] = t else { unreachable!() };
        let (y, stats) = layer_norm(x, w, bias, 1e-5)?;
        let (dw, db, dw_rms) = (zeros(&[h]), zeros(&[h]), zeros(&[h]));
        let dx = layer_norm_backward(dy, x, &stats, w, &dw, &db, None)?;
        let (y_rms, rms) = rms_norm(x, w, 1e-5)?;
        let dx_rms = rms_norm_backward(dy, x, &rms, w, &dw_rms, None)?;
        let statistics = vec![stats.mean.unwrap(), stats.rstd, rms.rstd, dw, db, dw_rms];
        Ok((vec![y, dx, y_rms, dx_rms], statistics))
    });
}

#[test]
fn activations_round_once() {
    let wide = |name, shape: &[usize]| (randn(name, shape) * 4.0).unwrap();
    let inputs = [wide("x", &[150, 3, 154]), randn("dy", &[150, 3, 154]), randn("dy", &SHAPE)];
    assert_rounds_once(&inputs, |t| {
        let [x, dy, dhalf] = t else { unreachable!() };
        let results = vec![
            activation::gelu(x)?,
            activation::gelu_backward(dy, x)?,
            activation::swiglu(x)?,
            activation::swiglu_backward(dhalf, x)?,
            activation::relu(x)?,
            activation::relu_backward(dy, x)?,
            activation::squared_relu(x)?,
            activation::squared_relu_backward(dy, x)?,
        ];
        Ok((results, vec![]))
    });
}

#[test]
fn dropout_rounds_once_and_drops_the_same_elements() {
    let samples = [3, 1, 4];
    let tokens = Tokens { samples: &samples, seq_offset: 5, seq_len: 1000, step_and_samples: None };
    let dropout =
        Dropout { p: 0.3, key: DropoutKey { seed: 1, step: 2, layer: 3, site: 4 }, tokens };
    let inputs = [randn("x", &SHAPE), randn("residual", &SHAPE), randn("b", &[SHAPE[2]])];
    assert_rounds_once(&inputs, |t| {
        let [x, residual, bias] = t else { unreachable!() };
        let results = vec![
            bias_dropout_add(x, Some(bias), Some(residual), Some(&dropout))?,
            bias_dropout_add(x, Some(bias), Some(residual), None)?,
            bias_dropout_add(x, None, None, Some(&dropout))?,
            dropout_backward(x, &dropout)?,
        ];
        Ok((results, vec![]))
    });
}

#[test]
fn embeddings_round_nothing() {
    let (rows, h) = (40, 130);
    let tokens = ids("tokens", &[150, 3], 50);
    assert_rounds_once(&[randn("w", &[rows, h]), randn("dy", &[150, 3, h])], |t| {
        let [w, dy] = t else { unreachable!() };
        let dw = zeros(&[rows, h]);
        embedding::embedding_backward(dy, &tokens, 5, &dw)?;
        Ok((vec![embedding::embedding(&tokens, w, 5)?], vec![dw]))
    });
}

#[test]
fn rope_rounds_once() {
    let shape = HeadShape { groups: 2, heads_per_group: 2, head_dim: 18 };
    let table = RopeTable::new(150, 18, 1e4, DType::BF16, &Device::Cpu).unwrap();
    assert_eq!(table.cos.dtype(), DType::F32, "tables are f32 whatever the activations are");
    assert_rounds_once(&[randn("qkv", &[150, 3, shape.width()])], |t| {
        let (forward, back) = (t[0].copy()?, t[0].copy()?);
        rope_inplace(&forward, &table, shape, 0, false)?;
        rope_inplace(&back, &table, shape, 0, true)?;
        Ok((vec![forward, back], vec![]))
    });
}

#[test]
fn cross_entropy_rounds_once() {
    let (rows, v, first, valid) = (33, 700, 100, 690);
    let (targets, scale) =
        (ids("targets", &[rows], 900), cast(&randn("scale", &[rows]), DType::F32));
    assert_rounds_once(&[randn("logits", &[rows, v])], |t| {
        let (max, sums) = cross_entropy::row_statistics(&t[0], &targets, first, valid)?;
        let sum_exp = sums.narrow(0, 0, 1)?.flatten_all()?;
        let gradient = t[0].copy()?;
        cross_entropy::cross_entropy_backward(
            &gradient, &max, &sum_exp, &targets, &scale, first, valid,
        )?;
        Ok((vec![gradient], vec![max, sums]))
    });
}

#[test]
fn a_gradient_of_f32_logits_is_written_in_16_bits_rounded_once() {
    let (rows, v, first, valid) = (33, 700, 100, 690);
    let (targets, scale) =
        (ids("targets", &[rows], 900), cast(&randn("scale", &[rows]), DType::F32));
    let logits = cast(&randn("logits", &[rows, v]), DType::F32);
    let (max, sums) = cross_entropy::row_statistics(&logits, &targets, first, valid).unwrap();
    let sum_exp = sums.narrow(0, 0, 1).unwrap().flatten_all().unwrap();
    let gradient = |dtype| {
        // Overwrites the contents that another chunk left.
        let dlogits = cast(&randn("old", &[rows, v]), dtype);
        cross_entropy::cross_entropy_backward_into(
            &dlogits, &logits, &max, &sum_exp, &targets, &scale, first, valid,
        )
        .unwrap();
        dlogits
    };
    let wide = gradient(DType::F32);
    for dtype in DTYPES {
        assert_eq!(bits(&gradient(dtype)), bits(&cast(&wide, dtype)));
    }
    cross_entropy::cross_entropy_backward(&logits, &max, &sum_exp, &targets, &scale, first, valid)
        .unwrap();
    assert_eq!(bits(&wide), bits(&logits), "in place and elsewhere");
}

#[test]
fn in_place_arithmetic_rounds_once() {
    assert_rounds_once(&[randn("a", &[50_003]), randn("b", &[50_003])], |t| {
        let [a, b] = t else { unreachable!() };
        let (sum, scaled, copied) = (a.copy()?, a.copy()?, a.zeros_like()?);
        reduce::add_inplace(&sum, b)?;
        reduce::scale_inplace(&scaled, 1.0 / 3.0)?;
        reduce::copy(&copied, a)?;
        let squares = Tensor::new(reduce::sum_of_squares(a)? as f32, &Device::Cpu)?;
        reduce::zero(&a.narrow(0, 1, 50_000)?)?;
        Ok((vec![sum, scaled, copied, a.clone()], vec![squares]))
    });
}

#[test]
fn casts_agree_with_the_reference_conversions_and_stay_in_their_view() {
    let special = [
        0.0,
        -0.0,
        f64::INFINITY,
        f64::NEG_INFINITY,
        1e300,
        70_000.0,
        65_519.9,
        6e-8,
        1.0 + 1.0 / 256.0,
    ];
    let values: Vec<f64> =
        crate::common::values(&randn("x", &[40_000])).into_iter().chain(special).collect();
    let n = values.len();
    let exact = Tensor::from_vec(values, n, &Device::Cpu).unwrap();
    let all = [DType::F32, DType::F64, DType::BF16, DType::F16];
    for (from, to) in all.iter().flat_map(|from| all.map(|to| (*from, to))) {
        let src = cast(&exact, from);
        let flat = Tensor::ones(n + 2, to, &Device::Cpu).unwrap();
        reduce::cast(&flat.narrow(0, 1, n).unwrap(), &src).unwrap();
        // candle rounds between bf16 and f16 through f32, as here. From f64 it drops 32 bits before
        // it rounds to 16. So the reference goes through f32 first, in which these numbers lie on
        // the same side of all midpoints.
        let reference = if from == DType::F64 && to.size_in_bytes() == 2 {
            cast(&src, DType::F32)
        } else {
            src
        };
        assert_eq!(
            bits(&flat.narrow(0, 1, n).unwrap()),
            bits(&cast(&reference, to)),
            "{from:?} to {to:?}"
        );
        let ends = crate::common::values(&flat);
        assert_eq!((ends[0], ends[n + 1]), (1.0, 1.0), "beyond the view");
    }
}

/// Values just beyond the midpoint between two numbers round to the further one, even if the excess
/// is less than f32 resolves.
#[test]
fn f64_is_rounded_to_16_bits_once() {
    for (to, ulp) in [(DType::BF16, 2f64.powi(-7)), (DType::F16, 2f64.powi(-10))] {
        for scale in [1.0, -1.0, 2f64.powi(-9), 2f64.powi(12)] {
            for excess in [2f64.powi(-45), -2f64.powi(-45), 0.0] {
                for n in 0..4 {
                    let below = 1.0 + f64::from(n) * ulp;
                    let exact = (below + ulp / 2.0 + excess) * scale;
                    let up = excess > 0.0 || (excess == 0.0 && n % 2 == 1);
                    let want = if up { below + ulp } else { below } * scale;
                    let got = Tensor::zeros(1, to, &Device::Cpu).unwrap();
                    reduce::cast(&got, &Tensor::new(&[exact], &Device::Cpu).unwrap()).unwrap();
                    assert_eq!(crate::common::values(&got), [want], "{exact} to {to:?}");
                }
            }
        }
    }
}

#[test]
fn an_optimizer_step_rounds_its_parameters_to_the_weights() {
    let n = 50_003;
    let adam = AdamW {
        lr: 0.1,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 1,
        grad_scale: 0.5,
    };
    let momentum = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.1, grad_scale: 0.5 };
    for dtype in DTYPES {
        let g = cast(&randn("g", &[n]), DType::F32);
        let step = |weight: Option<&Tensor>, use_adam: bool| {
            let p = cast(&randn("p", &[n]), DType::F32).copy().unwrap();
            let (m, v) = (zeros(&[n]), zeros(&[n]));
            match use_adam {
                true => adamw(&p, weight, &g, &m, &v, &adam).unwrap(),
                false => sgd(&p, weight, &g, &m, &momentum).unwrap(),
            }
            p
        };
        for use_adam in [true, false] {
            let flat = Tensor::zeros(n + 2, dtype, &Device::Cpu).unwrap();
            let weight = flat.narrow(0, 1, n).unwrap();
            let p = step(Some(&weight), use_adam);
            assert_eq!(bits(&weight), bits(&cast(&p, dtype)));
            assert_eq!(
                bits(&p),
                bits(&step(None, use_adam)),
                "weights change nothing about the step"
            );
        }
    }
}
