//! Steps of AdamW and SGD.

use crate::support::{Input, check, runs};
use candle_core::{DType, Device, Tensor};
use kernels::Result;
use kernels::ops::optimizer::{
    AdamW, Segment, Sgd, StochasticRounding, adamw, adamw_segments, sgd, sgd_segments,
};
use kernels::ops::reduce::{cast, copy};
use kernels::ops::remainders::{join_value, split, split_value};
use kernels::tensor::device::{to_host, zeros};

const ADAM: AdamW = AdamW {
    lr: 0.01,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    step: 3,
    grad_scale: 0.25,
};
const SGD: Sgd = Sgd { lr: 0.02, momentum: 0.9, weight_decay: 0.1, grad_scale: 0.5 };
const SIZES: [usize; 6] = [1, 4, 77, 1024, 4097, 5000];

fn inputs(n: usize) -> [Input; 5] {
    let wide = |name| Input::wide(name, &[n]);
    [wide("p"), wide("g"), wide("m"), wide("v"), Input::data("weight", &[n])]
}

/// Makes `v` valid second moments.
fn square(v: &Tensor) -> Result<()> {
    copy(v, &v.sqr()?)
}

#[test]
fn adamw_steps_and_rounds() {
    for n in SIZES {
        for rounded in [false, true] {
            check("adamw", &inputs(n), |t| {
                let [p, g, m, v, weight] = t else { unreachable!() };
                square(v)?;
                adamw(p, rounded.then_some(weight), g, m, v, &ADAM)?;
                Ok(vec![p.clone(), m.clone(), v.clone(), weight.clone()])
            });
        }
    }
}

#[test]
fn sgd_steps_and_rounds() {
    for n in SIZES {
        for rounded in [false, true] {
            check("sgd", &inputs(n), |t| {
                let [p, g, buf, _, weight] = t else { unreachable!() };
                sgd(p, rounded.then_some(weight), g, buf, &SGD)?;
                Ok(vec![p.clone(), buf.clone(), weight.clone()])
            });
        }
    }
}

/// Rounding of a whole parameter, of one partitioned by columns, and of one with more elements than
/// 32 bits count.
fn rounding(i: usize) -> StochasticRounding {
    let whole = StochasticRounding::whole(StochasticRounding::key(5, "weight", i as u64));
    match i % 3 {
        0 => whole,
        1 => StochasticRounding { row: 40, column: 2, width: 5, pitch: 17, ..whole },
        _ => StochasticRounding { row: (7 << 32) - 3, ..whole },
    }
}

/// The CPU rounds sums at other places, so a few elements are rounded to the other neighbour.
#[test]
fn moments_in_bf16_are_rounded_by_the_words_of_the_cpu() {
    let n: usize = segments().iter().map(|s| s.len).sum();
    for (first, second) in
        [(DType::BF16, DType::F32), (DType::F32, DType::BF16), (DType::BF16, DType::BF16)]
    {
        // Also at an address that is not aligned for vectors.
        for (weights, offset) in
            [(None, 0), (Some(DType::F32), 4), (Some(DType::I16), 3), (Some(DType::BF16), 3)]
        {
            let step = |device: &Device| {
                let kept = |factor: f64, dtype| {
                    let part = zeros("state", n + offset, dtype, device)
                        .unwrap()
                        .narrow(0, offset, n)
                        .unwrap();
                    let values = Tensor::arange(1f32, 1.0 + n as f32, device)
                        .unwrap()
                        .affine(factor, 0.1)
                        .unwrap();
                    cast(&part, &values).unwrap();
                    part
                };
                let (p, g, m, v) = (
                    kept(1e-3, DType::F32),
                    kept(-0.03, DType::F32),
                    kept(-0.017, first),
                    kept(0.013, second),
                );
                let dtype = if weights == Some(DType::I16) {
                    DType::BF16
                } else {
                    weights.unwrap_or(DType::F32)
                };
                let weight = zeros("weight", n + offset, dtype, device)
                    .unwrap()
                    .narrow(0, offset, n)
                    .unwrap();
                let low = zeros("low", n + offset, DType::I16, device)
                    .unwrap()
                    .narrow(0, offset, n)
                    .unwrap();
                let in_halves = weights == Some(DType::I16);
                if in_halves {
                    split(&p, &weight, Some(&low)).unwrap();
                }
                let stepped = if in_halves { &low } else { &p };
                let weight = weights.map(|_| &weight);
                for step in 3..6 {
                    let rule = AdamW { step, ..ADAM };
                    adamw_segments(stepped, weight, &g, &m, &v, &rule, None, &segments()).unwrap();
                }
                let read = |t: &Tensor| {
                    to_host(t).unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
                };
                [Some(&m), Some(&v), weight, (!in_halves).then_some(&p)]
                    .map(|t| t.map(read).unwrap_or_default())
            };
            let want = step(&Device::Cpu);
            for (run, got) in runs(step) {
                for (got, want) in got.iter().zip(&want) {
                    let far = |(a, b): &(&f32, &f32)| (*a - *b).abs() > 1e-5 * b.abs();
                    let apart: Vec<_> = got.iter().zip(want).filter(far).collect();
                    assert!(apart.len() <= n / 50, "{run}: {} of {n} differ", apart.len());
                    assert!(
                        apart.iter().all(|(a, b)| (*a - *b).abs() <= b.abs() / 64.0),
                        "{run}: {apart:?}"
                    );
                }
            }
        }
    }
}

/// Some segments that vectors do not divide, an empty one, and more segments than one launch takes.
fn segments() -> Vec<Segment> {
    let lens = [64, 3, 0, 61, 128, 1, 1, 6].into_iter().chain((0..70).map(|i| 1 + i % 9));
    lens.enumerate()
        .map(|(i, len)| Segment { len, decays: i % 3 > 0, rounding: rounding(i) })
        .collect()
}

#[test]
fn segments_are_stepped_each_with_its_decay() {
    let n = segments().iter().map(|s| s.len).sum();
    check("adamw_segments", &inputs(n), |t| {
        let [p, g, m, v, weight] = t else { unreachable!() };
        square(v)?;
        adamw_segments(p, Some(weight), g, m, v, &ADAM, None, &segments())?;
        Ok(vec![p.clone(), m.clone(), v.clone(), weight.clone()])
    });
    check("sgd_segments", &inputs(n), |t| {
        let [p, g, buf, _, weight] = t else { unreachable!() };
        sgd_segments(p, Some(weight), g, buf, &SGD, None, &segments())?;
        Ok(vec![p.clone(), buf.clone(), weight.clone()])
    });
}

#[test]
fn an_element_has_the_same_bits_however_its_range_is_cut() {
    let step = |device: &Device, cuts: &[usize]| {
        let vector = |k: u32| {
            let value = |i: u32| {
                (((i + k).wrapping_mul(2_654_435_761) >> 9) as f32 / 8_388_608.0)
                    - if k > 2 { 0.0 } else { 0.5 }
            };
            Tensor::from_vec((0..300).map(value).collect::<Vec<f32>>(), 300, device).unwrap()
        };
        let [p, g, m, v] = [0, 1, 2, 3].map(vector);
        for cut in cuts.windows(2) {
            let [p, g, m, v] =
                [&p, &g, &m, &v].map(|t| t.narrow(0, cut[0], cut[1] - cut[0]).unwrap());
            adamw(&p, None, &g, &m, &v, &ADAM).unwrap();
        }
        p.to_device(&Device::Cpu)
            .unwrap()
            .to_vec1::<f32>()
            .unwrap()
            .iter()
            .map(|v| v.to_bits())
            .collect::<Vec<_>>()
    };
    let whole = runs(|device| step(device, &[0, 300]));
    let cut = runs(|device| step(device, &[0, 1, 7, 64, 129, 300]));
    for ((run, whole), (_, cut)) in whole.iter().zip(&cut) {
        assert!(whole == cut, "{run}");
    }
}

#[test]
fn parameters_in_halves_have_the_bits_of_whole_ones() {
    for (run, ()) in runs(|device| {
        let n = segments().iter().map(|s| s.len).sum::<usize>();
        let fill = |factor: f64| {
            Tensor::arange(0f32, n as f32, device).unwrap().affine(factor, 0.1).unwrap()
        };
        // Also at an address that is not aligned for vectors of 8 bytes.
        for offset in [0, 3] {
            let part = |dtype| {
                zeros("half", n + offset, dtype, device).unwrap().narrow(0, offset, n).unwrap()
            };
            let (p, g, high, low) =
                (fill(1.234_567e-3), fill(-0.01), part(DType::BF16), part(DType::I16));
            split(&p, &high, Some(&low)).unwrap();
            let state = || zeros("state", n, DType::F32, device).unwrap();
            let (whole, halved) = ([(); 3].map(|()| state()), [(); 3].map(|()| state()));
            adamw_segments(&p, None, &g, &whole[0], &whole[1], &ADAM, None, &segments()).unwrap();
            adamw_segments(&low, Some(&high), &g, &halved[0], &halved[1], &ADAM, None, &segments())
                .unwrap();
            sgd_segments(&p, None, &g, &whole[2], &SGD, None, &segments()).unwrap();
            sgd_segments(&low, Some(&high), &g, &halved[2], &SGD, None, &segments()).unwrap();
            let rounded = part(DType::BF16);
            split(&p, &rounded, None).unwrap();
            let here = |t: &Tensor| to_host(t).unwrap();
            let bits = |t: &Tensor| {
                here(t).to_vec1::<f32>().unwrap().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            };
            let highs = |t: &Tensor| here(t).to_vec1::<half::bf16>().unwrap();
            let joined = highs(&high).into_iter().zip(here(&low).to_vec1().unwrap());
            assert!(
                joined.map(|(high, low)| join_value(high, low).to_bits()).collect::<Vec<_>>()
                    == bits(&p)
            );
            assert!(highs(&high) == highs(&rounded));
            assert!(whole.iter().zip(&halved).all(|(whole, halved)| bits(whole) == bits(halved)));
        }
        // The same as the CPU's split, also for NaN and the largest number.
        let odd = [
            0x3f80_8000,
            0x3f81_8000,
            0x7f7f_ffff,
            0x7fff_ffff,
            0xff80_0001,
            0x7f80_0000,
            0x8000_0001_u32,
        ]
        .map(f32::from_bits);
        let values = Tensor::new(odd.as_slice(), device).unwrap();
        let (high, low) = (
            zeros("half", 7, DType::BF16, device).unwrap(),
            zeros("half", 7, DType::I16, device).unwrap(),
        );
        split(&values, &high, Some(&low)).unwrap();
        let highs = to_host(&high)
            .unwrap()
            .to_vec1::<half::bf16>()
            .unwrap()
            .into_iter()
            .map(half::bf16::to_bits);
        let halves: Vec<_> = highs.zip(to_host(&low).unwrap().to_vec1::<i16>().unwrap()).collect();
        assert_eq!(halves, odd.map(|value| (split_value(value).0.to_bits(), split_value(value).1)));
    }) {
        assert!(!run.is_empty());
    }
}

#[test]
fn operands_that_do_not_fit_are_the_errors_of_the_cpu() {
    for (_, message) in runs(|device| {
        let t = |n: usize| Tensor::zeros(n, DType::F32, device).unwrap();
        let (p, g, m, v) = (t(8), t(8), t(8), t(8));
        let segments = [Segment { len: 7, decays: true, rounding: StochasticRounding::default() }];
        [
            adamw(&p, None, &t(7), &m, &v, &ADAM).unwrap_err().to_string(),
            adamw(&p, None, &g, &p, &v, &ADAM).unwrap_err().to_string(),
            adamw(&p, None, &g, &m, &v, &AdamW { step: 0, ..ADAM }).unwrap_err().to_string(),
            adamw_segments(&p, None, &g, &m, &v, &ADAM, None, &segments).unwrap_err().to_string(),
        ]
        .join("\n")
    }) {
        let wanted = [
            "g has shape [7] where 8",
            "m shares its storage",
            "counted from 1",
            "segments of 7 elements",
        ];
        for (line, want) in message.lines().zip(wanted) {
            assert!(line.contains(want), "{line}: {want}");
        }
    }
}

#[test]
fn the_factor_of_a_verdict_is_that_of_the_rule_and_a_step_it_is_against_changes_nothing() {
    let segments = [Segment { len: 5000, decays: true, rounding: StochasticRounding::default() }];
    for (run, ()) in runs(|device| {
        let fill =
            |add: f64| Tensor::arange(0f32, 5000.0, device).unwrap().affine(1e-3, add).unwrap();
        let verdict = |share: f64, scale: f64| {
            kernels::ops::clip::Verdict::of(&Tensor::new(&[share], device).unwrap(), 0.0, scale)
                .unwrap()
        };
        let bits = |t: &Tensor| t.to_device(&Device::Cpu).unwrap().to_vec1::<f32>().unwrap();
        let g = fill(-2.0);
        // The rule's own factor without a verdict, a verdict's factor, and a verdict that rejects
        // the step.
        let results =
            [None, Some(verdict(1.0, 4.0)), Some(verdict(f64::NAN, 4.0))].map(|verdict| {
                let (p, m, v, buf, q) = (fill(1.0), fill(0.5), fill(0.25), fill(0.75), fill(3.0));
                let rule =
                    AdamW { grad_scale: if verdict.is_some() { 77.0 } else { 0.25 }, ..ADAM };
                adamw_segments(&p, None, &g, &m, &v, &rule, verdict.as_ref(), &segments).unwrap();
                let rule = Sgd { grad_scale: rule.grad_scale, ..SGD };
                sgd_segments(&q, None, &g, &buf, &rule, verdict.as_ref(), &segments).unwrap();
                [p, m, v, buf, q].map(|t| bits(&t))
            });
        assert!(results[0] == results[1]);
        let before = [fill(1.0), fill(0.5), fill(0.25), fill(0.75), fill(3.0)].map(|t| bits(&t));
        assert!(results[2] == before && results[0] != before);
    }) {
        assert!(!run.is_empty());
    }
}
