//! Cross entropy: the local computations between collectives.

use crate::support::{Input, check, check_with, runs};
use candle_core::{DType, Device, Tensor};
use kernels::ops::cross_entropy::{
    add_losses, cross_entropy_backward, cross_entropy_backward_into, cross_entropy_fused, rebase,
    row_statistics,
};

/// Rows, columns, number of real columns, and the first column's id; targets are below 1000.
const CASES: [(usize, usize, usize, usize); 9] = [
    (1, 1, 1, 0),
    (3, 7, 5, 0),
    (5, 40, 40, 10),
    (2, 1000, 1000, 0),
    (3, 1024, 1001, 0),
    (4, 520, 516, 300),
    (2, 3001, 2990, 0),
    (1, 9000, 8999, 0),
    (2, 64, 0, 960),
];

fn inputs(rows: usize, v: usize) -> [Input; 3] {
    [
        Input::data("logits", &[rows, v]).times(4.0),
        Input::ids("targets", &[rows], 1000),
        Input::wide("scale", &[rows]),
    ]
}

#[test]
fn statistics_of_rows() {
    for (rows, v, valid, first) in CASES {
        check("row_statistics", &inputs(rows, v), |t| {
            let (max, sums) = row_statistics(&t[0], &t[1], first, valid)?;
            // With no columns the maximum is −∞, which has no relative error.
            let max = if valid == 0 { max.exp()? } else { max };
            Ok(vec![max, sums])
        });
    }
}

#[test]
fn gradients_take_the_place_of_logits() {
    for (rows, v, valid, first) in CASES {
        check("cross_entropy_backward", &inputs(rows, v), |t| {
            let (max, sums) = row_statistics(&t[0], &t[1], first, valid)?;
            let sum_exp = sums.get(0)?.affine(1.0, 0.5)?;
            cross_entropy_backward(&t[0], &max, &sum_exp, &t[1], &t[2], first, valid)?;
            Ok(vec![t[0].clone()])
        });
    }
}

#[test]
fn gradients_are_rounded_into_another_tensor() {
    for (rows, v, valid, first) in CASES {
        let wide = Input::wide("logits", &[rows, v]).times(4.0);
        let [_, targets, scale] = inputs(rows, v);
        check(
            "cross_entropy_backward_into",
            &[wide, targets, scale, Input::data("to", &[rows, v])],
            |t| {
                let (max, sums) = row_statistics(&t[0], &t[1], first, valid)?;
                let sum_exp = sums.get(0)?.affine(1.0, 0.5)?;
                cross_entropy_backward_into(
                    &t[3], &t[0], &max, &sum_exp, &t[1], &t[2], first, valid,
                )?;
                Ok(vec![t[3].clone()])
            },
        );
    }
}

/// Rows for every number of blocks per multiprocessor: the cases that fit, and wide rows. In the
/// last one, threads have different numbers of whole batches.
fn whole_rows() -> impl Iterator<Item = (usize, usize, usize, usize)> {
    CASES.into_iter().chain([
        (2, 20_000, 19_990, 0),
        (2, 33_000, 33_000, 500),
        (1, 65_600, 60_123, 0),
    ])
}

#[test]
fn losses_and_gradients_of_whole_rows_are_made_at_once() {
    for (rows, v, valid, first) in whole_rows() {
        let wide = Input::wide("logits", &[rows, v]).times(4.0);
        let [_, targets, scale] = inputs(rows, v);
        check("cross_entropy_fused", &[wide, targets, scale, Input::data("to", &[rows, v])], |t| {
            let into = cross_entropy_fused(&t[0], Some(&t[3]), &t[1], &t[2], first, valid)?;
            let inplace = cross_entropy_fused(&t[0], None, &t[1], &t[2], first, valid)?;
            Ok(vec![into, t[3].clone(), inplace, t[0].clone()])
        });
    }
}

#[test]
fn at_once_gives_the_bits_of_statistics_and_backward() {
    let bits = |t: &Tensor| -> Vec<u32> {
        let t =
            t.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap().flatten_all().unwrap();
        t.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    };
    for ((rows, v, valid, first), dtype) in
        whole_rows().flat_map(|case| [(case, DType::F32), (case, DType::BF16)])
    {
        for (run, [apart, at_once]) in runs(|device| {
            let logits: Vec<f32> =
                (0..rows * v).map(|i| ((i * i) as f32 * 0.7).sin() * 9.0).collect();
            let logits = Tensor::from_vec(logits, (rows, v), device).unwrap();
            let targets: Vec<u32> = (0..rows as u32).map(|row| row * 417).collect();
            let targets = Tensor::from_vec(targets, rows, device).unwrap();
            let scale = Tensor::full(0.37f32, rows, device).unwrap();
            let to = || Tensor::zeros((rows, v), dtype, device).unwrap();
            let (apart, at_once) = (to(), to());
            let (max, sums) = row_statistics(&logits, &targets, first, valid).unwrap();
            let sum_exp = sums.get(0).unwrap();
            cross_entropy_backward_into(
                &apart, &logits, &max, &sum_exp, &targets, &scale, first, valid,
            )
            .unwrap();
            let own = cross_entropy_fused(&logits, Some(&at_once), &targets, &scale, first, valid)
                .unwrap();
            [(sums, apart), (own, at_once)].map(|(sums, gradient)| [bits(&sums), bits(&gradient)])
        }) {
            assert!(apart == at_once, "{run}: {rows} rows of {v} in {dtype:?}");
        }
    }
}

#[test]
fn losses_are_added_where_the_mask_counts_them() {
    for rows in [1, 33, 700] {
        let inputs = [
            Input::wide("sums", &[2, rows]),
            Input::ids("mask", &[rows], 3),
            Input::wide("total", &[1]),
        ];
        check_with("add_losses", &inputs, &[(DType::F32, 1e-5)], |t| {
            let sums = t[0].sqr()?.affine(1.0, 1.0)?;
            let total = t[2].to_dtype(DType::F64)?;
            add_losses(&total, &sums, &t[1].to_dtype(DType::F32)?)?;
            Ok(vec![total])
        });
    }
    for (run, total) in runs(|device| {
        let sums = Tensor::new(&[[f32::INFINITY, 1.0], [f32::NAN, -2.0]], device).unwrap();
        let total = Tensor::new(&[0.5f64], device).unwrap();
        add_losses(&total, &sums, &Tensor::new(&[0.0f32, 1.0], device).unwrap()).unwrap();
        total.to_vec1::<f64>().unwrap()[0]
    }) {
        assert_eq!(total, 2.5, "{run}: what the mask leaves out counts nothing");
    }
}

#[test]
fn sums_move_to_the_maximum_of_all_ranks() {
    let (rows, width, vocab) = (70, 24, 60);
    let inputs = [
        Input::data("logits", &[rows, 3 * width]).times(5.0),
        Input::ids("targets", &[rows], vocab as u32),
    ];
    check_with("rebase", &inputs, &[(DType::F32, 1e-5)], |t| {
        let (max, _) = row_statistics(&t[0], &t[1], 0, vocab)?;
        let mut moved = Vec::new();
        for first in (0..3 * width).step_by(width) {
            let part = t[0].narrow(1, first, width)?.force_contiguous()?;
            let valid = vocab.saturating_sub(first).min(width);
            let (own, sums) = row_statistics(&part, &t[1], first, valid)?;
            rebase(&sums, &own, &max, &t[1], first, valid)?;
            moved.push(sums);
        }
        Ok(moved)
    });
}

#[test]
fn a_thread_that_sees_only_minus_infinity_at_first_still_counts_what_follows() {
    // Wide enough that the first thread reads two vectors, or two elements without vectors.
    for v in [2500, 2501] {
        let sum = |device: &Device| {
            let logits: Vec<f32> =
                (0..v).map(|c| if c < 600 { f32::NEG_INFINITY } else { c as f32 / 1e4 }).collect();
            let logits = Tensor::from_vec(logits, (1, v), device).unwrap();
            let targets = Tensor::new(&[2499u32], device).unwrap();
            row_statistics(&logits, &targets, 0, v)
                .unwrap()
                .1
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()
        };
        let want = sum(&Device::Cpu);
        for (run, got) in runs(sum) {
            assert!(
                got.iter().zip(&want).all(|(g, w)| (g - w).abs() <= 1e-5 * w.abs()),
                "{run}: {got:?} {want:?}"
            );
        }
    }
}

#[test]
fn what_is_not_finite_shows_as_on_the_cpu() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let rows = [
        [1.0, nan, 0.0, 2.0],
        [1.0, 2.0, 3.0, 4.0],
        [-inf, -inf, -inf, -inf],
        [inf, 0.0, 1.0, 2.0],
        [-inf, 0.0, -inf, 1.0],
    ];
    let sums = |device: &Device| {
        let (logits, targets) = (
            Tensor::new(&rows, device).unwrap(),
            Tensor::new(&[0u32, 1, 2, 3, 0], device).unwrap(),
        );
        row_statistics(&logits, &targets, 0, 4).unwrap().1.get(0).unwrap().to_vec1::<f32>().unwrap()
    };
    let want = sums(&Device::Cpu);
    assert_eq!(
        want.iter().map(|v| v.is_nan()).collect::<Vec<_>>(),
        [true, false, true, true, false]
    );
    for (run, got) in runs(sums) {
        for (got, want) in got.iter().zip(&want) {
            assert!(
                got.is_nan() && want.is_nan() || (got - want).abs() < 1e-6,
                "{run}: {got}, want {want}"
            );
        }
    }
}
