//! Optimizer steps, compared with the textbook formulas in f64.

use crate::common::{DTYPES, assert_close, assert_same_on_any_threads, cast, randn, values};
use candle_core::{DType, Device, Tensor};
use candle_nn::optim::{Optimizer, ParamsAdamW};
use kernels::ops::optimizer::{
    AdamW, Segment, Sgd, StochasticRounding, adamw, adamw_segments, sgd, sgd_segments,
};
use kernels::ops::remainders::{join_value, split};

const ADAM: AdamW = AdamW {
    lr: 0.01,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    step: 1,
    grad_scale: 1.0,
};

fn gradient(step: u64, n: usize) -> Tensor {
    randn(&format!("g{step}"), &[n])
}

fn zeros(n: usize, dtype: DType) -> Tensor {
    Tensor::zeros(n, dtype, &Device::Cpu).unwrap()
}

#[test]
fn ten_adamw_steps_agree_with_candle_nn() {
    let n = 37;
    let start = randn("p", &[n]);
    let var = candle_core::Var::from_tensor(&start).unwrap();
    let params = ParamsAdamW {
        lr: ADAM.lr,
        beta1: ADAM.beta1,
        beta2: ADAM.beta2,
        eps: ADAM.eps,
        weight_decay: 0.1,
    };
    let mut reference = candle_nn::AdamW::new(vec![var.clone()], params).unwrap();
    for step in 1..=10 {
        let loss = (var.as_tensor() * gradient(step, n)).unwrap().sum_all().unwrap();
        reference.step(&loss.backward().unwrap()).unwrap();
    }
    for (dtype, tolerance) in DTYPES {
        let p = cast(&start, dtype).copy().unwrap();
        let (m, v) = (zeros(n, dtype), zeros(n, dtype));
        for step in 1..=10 {
            adamw(&p, None, &cast(&gradient(step, n), dtype), &m, &v, &AdamW { step, ..ADAM })
                .unwrap();
        }
        assert_close("p", &p, var.as_tensor(), tolerance);
    }
}

#[test]
fn grad_scale_is_a_factor_on_the_gradient() {
    let (p1, p2) = (randn("p", &[9]), randn("p", &[9]));
    let g = gradient(1, 9);
    let state = || (zeros(9, DType::F64), zeros(9, DType::F64));
    let ((m1, v1), (m2, v2)) = (state(), state());
    adamw(&p1, None, &g, &m1, &v1, &AdamW { grad_scale: 0.25, ..ADAM }).unwrap();
    adamw(&p2, None, &(&g * 0.25).unwrap(), &m2, &v2, &ADAM).unwrap();
    for (a, b) in [(p1, p2), (m1, m2), (v1, v2)] {
        assert_close("state", &a, &b, 1e-15);
    }
}

#[test]
fn sgd_agrees_with_the_formula() {
    let h = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01, grad_scale: 0.5 };
    let (n, start) = (21, randn("p", &[21]));
    let (mut p, mut buf) = (values(&start), vec![0.0; n]);
    for step in 1..=5 {
        for (i, g) in values(&gradient(step, n)).iter().enumerate() {
            buf[i] = 0.9 * buf[i] + 0.5 * g + 0.01 * p[i];
            p[i] -= 0.1 * buf[i];
        }
    }
    let want = Tensor::from_vec(p, n, &Device::Cpu).unwrap();
    for (dtype, tolerance) in DTYPES {
        let (p, buf) = (cast(&start, dtype).copy().unwrap(), zeros(n, dtype));
        for step in 1..=5 {
            sgd(&p, None, &cast(&gradient(step, n), dtype), &buf, &h).unwrap();
        }
        assert_close("p", &p, &want, tolerance);
    }
}

#[test]
fn a_step_on_pieces_is_the_step_on_the_whole() {
    let n = 40_000;
    let g = cast(&gradient(1, n), DType::F32);
    let run = |cuts: &[usize]| {
        let p = cast(&randn("p", &[n]), DType::F32);
        let (m, v) = (zeros(n, DType::F32), zeros(n, DType::F32));
        for cut in cuts.windows(2) {
            let part = |t: &Tensor| t.narrow(0, cut[0], cut[1] - cut[0]).unwrap();
            adamw(&part(&p), None, &part(&g), &part(&m), &part(&v), &ADAM).unwrap();
        }
        [p, m, v].map(|t| values(&t))
    };
    assert!(run(&[0, n]) == run(&[0, 13, 20_001, n]));
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let n = 50_001;
    let g = cast(&gradient(1, n), DType::F32);
    assert_same_on_any_threads(|| {
        let p = cast(&randn("p", &[n]), DType::F32);
        let (m, v, buf) = (zeros(n, DType::F32), zeros(n, DType::F32), zeros(n, DType::F32));
        adamw(&p, None, &g, &m, &v, &ADAM).unwrap();
        sgd(
            &p,
            None,
            &g,
            &buf,
            &Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.1, grad_scale: 1.0 },
        )
        .unwrap();
        vec![p, m, v, buf]
    });
}

/// Zeroed halves of `n` values.
fn halves(n: usize) -> (Tensor, Tensor) {
    (zeros(n, DType::BF16), zeros(n, DType::I16))
}

fn joined((high, low): &(Tensor, Tensor)) -> Vec<u32> {
    let halves = high.to_vec1().unwrap().into_iter().zip(low.to_vec1().unwrap());
    halves.map(|(high, low)| join_value(high, low).to_bits()).collect()
}

#[test]
fn parameters_in_halves_are_stepped_as_whole_ones_bit_for_bit() {
    for n in [1, 15, 16_384, 50_001] {
        let p = cast(&randn("p", &[n]), DType::F32);
        let kept = halves(n);
        split(&p, &kept.0, Some(&kept.1)).unwrap();
        let (states, sgd_rule) = (
            [(); 6].map(|()| zeros(n, DType::F32)),
            Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.1, grad_scale: 0.5 },
        );
        let segments = [n / 3, n - n / 3].map(|len| Segment {
            len,
            decays: len == n / 3,
            rounding: StochasticRounding::default(),
        });
        for step in 1..=3 {
            let (g, rule) = (cast(&gradient(step, n), DType::F32), AdamW { step, ..ADAM });
            let [m, v, buf, other_m, other_v, other_buf] = &states;
            adamw_segments(&p, None, &g, m, v, &rule, None, &segments).unwrap();
            adamw_segments(&kept.1, Some(&kept.0), &g, other_m, other_v, &rule, None, &segments)
                .unwrap();
            sgd_segments(&p, None, &g, buf, &sgd_rule, None, &segments).unwrap();
            sgd_segments(&kept.1, Some(&kept.0), &g, other_buf, &sgd_rule, None, &segments)
                .unwrap();
        }
        let bits = |t: &Tensor| {
            t.to_vec1::<f32>().unwrap().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        };
        assert!(joined(&kept) == bits(&p));
        assert!(
            states[..3].iter().zip(&states[3..]).all(|(whole, halved)| bits(whole) == bits(halved))
        );
        let rounded = halves(n);
        split(&p, &rounded.0, None).unwrap();
        assert!(bits(&cast(&kept.0, DType::F32)) == bits(&cast(&rounded.0, DType::F32)));
    }
}

/// A step stores rounded moments: the nearest bf16 of the first, a neighbour of the second.
/// Parameters use both before rounding.
#[test]
fn moments_in_bf16_are_roundings_of_those_of_a_step_in_f32() {
    for n in [1, 17, 50_001] {
        for (first, second) in
            [(DType::BF16, DType::F32), (DType::F32, DType::BF16), (DType::BF16, DType::BF16)]
        {
            let p = cast(&randn("p", &[n]), DType::F32);
            let (m, v) =
                (cast(&randn("m", &[n]), first), cast(&randn("v", &[n]).sqr().unwrap(), second));
            let g = cast(&gradient(1, n), DType::F32);
            let [want_p, want_m, want_v] =
                [&p, &m, &v].map(|t| cast(t, DType::F32).copy().unwrap());
            let weight = zeros(n, DType::BF16);
            adamw(&p, Some(&weight), &g, &m, &v, &ADAM).unwrap();
            adamw(&want_p, None, &g, &want_m, &want_v, &ADAM).unwrap();
            assert!(
                values(&p) == values(&want_p) && values(&weight) == values(&cast(&p, DType::BF16))
            );
            assert!(values(&m) == values(&cast(&want_m, first)));
            for (v, want) in values(&v).into_iter().zip(values(&want_v)) {
                assert!(
                    if second == DType::F32 { v == want } else { (v - want).abs() <= want / 128.0 },
                    "{v} {want}"
                );
            }
        }
    }
}

/// Rounded to the nearest bf16, it would stay at 0.25, where a thousandth of the way to 1 is less
/// than half of the distance to the next number.
#[test]
fn second_moments_in_bf16_come_in_the_mean_to_where_those_in_f32_come() {
    let (n, steps) = (4096, 1500);
    let (p, m, v) = (
        zeros(n, DType::F32),
        zeros(n, DType::BF16),
        Tensor::full(0.25f32, n, &Device::Cpu).unwrap(),
    );
    let (v, g) = (cast(&v, DType::BF16), Tensor::ones(n, DType::F32, &Device::Cpu).unwrap());
    for step in 1..=steps {
        adamw(&p, None, &g, &m, &v, &AdamW { step, beta2: 0.999, ..ADAM }).unwrap();
    }
    let mean = values(&v).iter().sum::<f64>() / n as f64;
    let want = 1.0 - 0.75 * 0.999f64.powi(steps as i32);
    assert!((mean / want - 1.0).abs() < 0.003, "{mean} rather than {want}");
}

/// A matrix partitioned by columns, as in tensor parallelism, and by ranges of elements, as in
/// ZeRO.
#[test]
fn moments_in_bf16_are_the_same_bits_in_every_cut() {
    let (rows, columns, cut) = (40, 1000, 300);
    let n = rows * columns;
    let whole = StochasticRounding::whole(StochasticRounding::key(7, "weight", 3));
    let run = |t: &[Tensor; 4], segments: &[Segment]| {
        let [p, g, m, v] = t;
        adamw_segments(p, None, g, m, v, &AdamW { step: 3, ..ADAM }, None, segments).unwrap();
    };
    let make = || {
        let [p, g, m, v] = ["p", "g", "m", "v"].map(|name| randn(name, &[rows, columns]));
        let (p, g) = (cast(&p, DType::F32), cast(&g, DType::F32));
        [p, g, cast(&m, DType::BF16), cast(&v.sqr().unwrap(), DType::BF16)]
    };
    let flat = |t: [Tensor; 4]| t.map(|t| t.flatten_all().unwrap().copy().unwrap());
    let want = flat(make());
    run(&want, &[Segment { len: n, decays: true, rounding: whole }]);

    let ranges = flat(make());
    let halves = [0..17_777, 17_777..n].map(|range| Segment {
        len: range.len(),
        decays: true,
        rounding: StochasticRounding { column: range.start as u64, ..whole },
    });
    run(&ranges, &halves);
    assert!(values(&ranges[3]) == values(&want[3]));

    let part = |t: &Tensor| t.narrow(1, cut, columns - cut).unwrap().contiguous().unwrap();
    let columns_of = flat(make().map(|t| part(&t)));
    let rounding = StochasticRounding {
        row: cut as u64,
        width: (columns - cut) as u64,
        pitch: columns as u64,
        ..whole
    };
    run(&columns_of, &[Segment { len: rows * (columns - cut), decays: true, rounding }]);
    for (got, want) in columns_of.iter().zip(&want) {
        assert!(
            values(got)
                == values(&part(&want.reshape((rows, columns)).unwrap()).flatten_all().unwrap())
        );
    }
}

/// File-backed state is stepped part by part.
#[test]
fn a_step_on_parts_of_segments_is_the_step_on_all_of_them() {
    let n = 10_000;
    let rows = StochasticRounding { row: 40, column: 3, width: 70, pitch: 100, key: 9 };
    let segments = [
        (17, false, StochasticRounding::default()),
        (6_000, true, rows),
        (n - 6_017, false, StochasticRounding::whole(5)),
    ]
    .map(|(len, decays, rounding)| Segment { len, decays, rounding });
    let run = |part: usize| {
        let [p, g, m, v] = ["p", "g", "m", "v"].map(|name| randn(name, &[n]));
        let t = [
            cast(&p, DType::F32),
            cast(&g, DType::F32),
            cast(&m, DType::BF16),
            cast(&v.sqr().unwrap(), DType::BF16),
        ];
        for start in (0..n).step_by(part) {
            let range = start..n.min(start + part);
            let [p, g, m, v] = t.each_ref().map(|t| t.narrow(0, range.start, range.len()).unwrap());
            let segments = Segment::of_part(&segments, range);
            adamw_segments(&p, None, &g, &m, &v, &AdamW { step: 3, ..ADAM }, None, &segments)
                .unwrap();
        }
        t.map(|t| values(&t))
    };
    let whole = run(n);
    for part in [16, 17, 999, 6_017, n - 1] {
        assert!(run(part) == whole, "parts of {part}");
    }
}

#[test]
fn states_of_other_dtypes_are_refused() {
    let [p, g, m] = [(); 3].map(|()| zeros(4, DType::F32));
    for (m, v) in [(&m, DType::F16), (&m, DType::F64)] {
        adamw(&p, None, &g, m, &zeros(4, v), &ADAM).unwrap_err();
    }
    sgd(
        &p,
        None,
        &g,
        &zeros(4, DType::BF16),
        &Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.1, grad_scale: 1.0 },
    )
    .unwrap_err();
    let wide = zeros(4, DType::F64);
    adamw(&wide, None, &wide.copy().unwrap(), &zeros(4, DType::BF16), &wide.copy().unwrap(), &ADAM)
        .unwrap_err();
    let beyond = Segment {
        len: 4,
        decays: true,
        rounding: StochasticRounding { column: 4, width: 4, ..StochasticRounding::default() },
    };
    let error = adamw_segments(&p, None, &g, &m, &zeros(4, DType::F32), &ADAM, None, &[beyond])
        .unwrap_err();
    assert!(error.to_string().contains("element 4 of a row of 4"), "{error}");
}

#[test]
fn halves_that_do_not_fit_are_refused() {
    let (values, (high, low)) = (zeros(4, DType::F32), halves(4));
    let refused = |result: kernels::Result<()>, why: &str| {
        let message = result.unwrap_err().to_string();
        assert!(message.contains(why), "{message}");
    };
    refused(split(&values, &high, Some(&halves(5).1)), "low has shape [5]");
    refused(split(&zeros(5, DType::F32), &high, Some(&low)), "high has shape [4]");
    refused(split(&values, &low, Some(&low)), "I16");
    refused(split(&values, &high, Some(&values)), "F32");
    let (g, m, v) = (zeros(4, DType::F32), zeros(4, DType::F32), zeros(4, DType::F32));
    refused(adamw(&low, None, &g, &m, &v, &ADAM), "weight is wanted");
    refused(adamw(&low, Some(&zeros(4, DType::F16)), &g, &m, &v, &ADAM), "F16");
}

#[test]
fn operands_that_do_not_fit_are_errors_rather_than_deadlocks() {
    let (p, g, flat) = (randn("p", &[4]), gradient(1, 4), zeros(8, DType::F64));
    let (m, v) = (flat.narrow(0, 0, 4).unwrap(), flat.narrow(0, 4, 4).unwrap());
    assert!(
        adamw(&p, None, &g, &m, &v, &ADAM)
            .unwrap_err()
            .to_string()
            .contains("v shares its storage")
    );
    let v = zeros(4, DType::F64);
    assert!(
        adamw(&p, None, &gradient(1, 5), &m, &v, &ADAM).unwrap_err().to_string().contains("[5]")
    );
    assert!(
        adamw(&p, None, &g, &m, &v, &AdamW { step: 0, ..ADAM })
            .unwrap_err()
            .to_string()
            .contains("step 0")
    );

    // Segments of a transposed tensor would be parts of a copy.
    let p = randn("p", &[4, 6]).t().unwrap();
    let [g, m, v] = [(); 3].map(|()| Tensor::ones((6, 4), DType::F64, &Device::Cpu).unwrap());
    let segment = |len| Segment {
        len,
        decays: true,
        rounding: StochasticRounding::whole(StochasticRounding::key(0, "p", 1)),
    };
    for segments in [vec![segment(24)], vec![segment(10), segment(14)]] {
        let refused =
            adamw_segments(&p, None, &g, &m, &v, &ADAM, None, &segments).unwrap_err().to_string();
        assert!(refused.contains("contiguous"), "{refused}");
    }
}
