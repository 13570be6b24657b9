//! Attention, compared with the plain formula in candle's differentiable operations.

use std::process::Command;

use crate::common::{DTYPES, assert_close, assert_same_on_any_threads, bits, cast, oracle, randn};
use candle_core::{D, DType, Device, Tensor};
use kernels::Isa;
use kernels::ops::attention::{AttentionDropout, HeadShape, Scores, attention, attention_backward};
use kernels::ops::dropout::DropoutKey;

const PLAIN: Scores = Scores { scale: 1.0, alibi: None, window: None, first_keys: None };
const KEY: DropoutKey = DropoutKey { seed: 11, step: 3, layer: 2, site: 1 };

/// (s, b, shape): below, at and above tile sizes, grouped and not, odd widths.
fn cases() -> [(usize, usize, HeadShape); 9] {
    let shape = |groups, heads_per_group, head_dim| HeadShape { groups, heads_per_group, head_dim };
    [
        (1, 1, shape(1, 1, 4)),
        (5, 2, shape(2, 1, 3)),
        (64, 1, shape(1, 2, 8)),
        (65, 2, shape(1, 3, 5)),
        (128, 1, shape(1, 1, 16)),
        (129, 1, shape(2, 2, 8)),
        (300, 1, shape(1, 2, 8)),
        (70, 2, shape(5, 2, 40)),
        (161, 1, shape(3, 1, 100)),
    ]
}

/// Softmax attention with an S×S matrix per head; `mask [b, heads, s, s]` multiplies the
/// probabilities.
fn plain(qkv: &Tensor, shape: HeadShape, how: Scores, mask: Option<&Tensor>) -> (Tensor, Tensor) {
    let (s, b, _) = qkv.dims3().unwrap();
    let HeadShape { groups, heads_per_group: n, head_dim: d } = shape;
    let packed = qkv.reshape((s, b, groups, n + 2, d)).unwrap();
    let part = |first, len, copies| {
        let part = packed.narrow(3, first, len).unwrap();
        let part = part.broadcast_as((s, b, groups, len * copies, d)).unwrap();
        part.reshape((s, b, groups * n, d))
            .unwrap()
            .permute((1, 2, 0, 3))
            .unwrap()
            .contiguous()
            .unwrap()
    };
    let (q, k, v) = (part(0, n, 1), part(n, 1, n), part(n + 1, 1, n));
    let scores = (q.matmul(&k.t().unwrap().contiguous().unwrap()).unwrap() * how.scale).unwrap();
    let first_keys = how.first_keys.map(|first_keys| first_keys.to_vec2::<u32>().unwrap());
    let first = |sample: usize, query: usize| {
        let of_window = how.window.map_or(0, |window| (query + 1).saturating_sub(window));
        of_window.max(first_keys.as_ref().map_or(0, |first| first[sample][query] as usize))
    };
    let hidden = |i: usize| i % s > i / s % s || i % s < first(i / (s * s), i / s % s);
    let hidden: Vec<f64> = (0..b * s * s).map(|i| if hidden(i) { -1e300 } else { 0.0 }).collect();
    let hidden = Tensor::from_vec(hidden, (b, 1, s, s), &Device::Cpu).unwrap();
    let scores = scores.broadcast_add(&hidden).unwrap();
    let tilted = |slope: f64| (0..s * s).map(move |i| slope * ((i % s) as f64 - (i / s) as f64));
    let slopes = how.alibi.map_or(vec![0.0; groups * n], |slopes| slopes.to_vec());
    let tilts: Vec<f64> = slopes.into_iter().flat_map(tilted).collect();
    let tilts = Tensor::from_vec(tilts, (1, groups * n, s, s), &Device::Cpu).unwrap();
    let scores = scores.broadcast_add(&tilts).unwrap();
    let maximum = scores.max_keepdim(D::Minus1).unwrap().detach();
    let exp = scores.broadcast_sub(&maximum).unwrap().exp().unwrap();
    let sum = exp.sum_keepdim(D::Minus1).unwrap();
    let lse = (sum.log().unwrap() + maximum).unwrap().squeeze(3).unwrap();
    let mut p = exp.broadcast_div(&sum).unwrap();
    if let Some(mask) = mask {
        p = (p * mask).unwrap();
    }
    let out = p.matmul(&v).unwrap().permute((2, 0, 1, 3)).unwrap().contiguous().unwrap();
    (out.reshape((s, b, groups * n * d)).unwrap(), lse)
}

fn compare(s: usize, b: usize, shape: HeadShape, how: Scores, dropout: Option<&AttentionDropout>) {
    let scale = Scores { scale: 1.3 / (shape.head_dim as f64).sqrt(), ..how };
    let (qkv, dout) = (
        randn("qkv", &[s, b, shape.width()]),
        randn("dout", &[s, b, shape.heads() * shape.head_dim]),
    );
    let mask = dropout.map(|d| mask_of(d, s, b, shape.heads()));
    let (want, grads) = oracle(&[&qkv], &dout, |t| plain(&t[0], shape, scale, mask.as_ref()).0);
    let (_, want_lse) = plain(&qkv, shape, scale, None);
    for (dtype, tolerance) in DTYPES {
        let (qkv, dout) = (cast(&qkv, dtype), cast(&dout, dtype));
        let (out, lse) = attention(&qkv, shape, scale, dropout).unwrap();
        let dqkv = attention_backward(&dout, &qkv, &out, &lse, shape, scale, dropout).unwrap();
        assert_close("out", &out, &want, tolerance);
        assert_close("lse", &lse, &want_lse, tolerance);
        assert_close("dqkv", &dqkv, &grads[0], tolerance);
    }
}

/// The mask times 1/(1−p) as a tensor, read off attention itself: with equal scores and one-hot
/// values, output component j of query q is the (dropped) probability 1/(q+1) of key j.
fn mask_of(dropout: &AttentionDropout, s: usize, b: usize, heads: usize) -> Tensor {
    let shape = HeadShape { groups: heads, heads_per_group: 1, head_dim: s };
    let mut qkv = vec![0.0; s * b * heads * 3 * s];
    for (position, row) in qkv.chunks_exact_mut(b * heads * 3 * s).enumerate() {
        row.chunks_exact_mut(3 * s).for_each(|head| head[2 * s + position] = 1.0);
    }
    let qkv = Tensor::from_vec(qkv, (s, b, heads * 3 * s), &Device::Cpu).unwrap();
    let (out, _) = attention(&qkv, shape, 1.0, Some(dropout)).unwrap();
    let count =
        Tensor::from_vec((1..=s).map(|q| q as f64).collect::<Vec<_>>(), (s, 1, 1, 1), &Device::Cpu)
            .unwrap();
    let out = out.reshape((s, b, heads, s)).unwrap().broadcast_mul(&count).unwrap();
    out.permute((1, 2, 0, 3)).unwrap().contiguous().unwrap()
}

#[test]
fn forward_and_backward_agree_with_plain_attention() {
    for (s, b, shape) in cases() {
        compare(s, b, shape, PLAIN, None);
    }
}

#[test]
fn on_16_bit_tensors_they_agree_with_plain_attention_of_the_same_values() {
    // Besides the result, probabilities are rounded: half a unit in the last place of 8 and 11
    // bits, and a few sums of this error.
    for (dtype, tolerance) in [(DType::BF16, 8e-3), (DType::F16, 1e-3)] {
        for (s, b, shape) in cases() {
            let narrow = |name, width| cast(&randn(name, &[s, b, width]), dtype);
            let (qkv, dout) =
                (narrow("qkv", shape.width()), narrow("dout", shape.heads() * shape.head_dim));
            let how = Scores { scale: 1.0 / (shape.head_dim as f64).sqrt(), ..PLAIN };
            let samples = [7, 1 << 40];
            let dropout = AttentionDropout {
                p: 0.3,
                key: KEY,
                samples: &samples[..b],
                first_head: 2,
                step_and_samples: None,
            };
            for dropout in [None, Some(&dropout)] {
                let mask = dropout.map(|d| mask_of(d, s, b, shape.heads()));
                let (wide, wide_dout) = (cast(&qkv, DType::F64), cast(&dout, DType::F64));
                let (want, grads) =
                    oracle(&[&wide], &wide_dout, |t| plain(&t[0], shape, how, mask.as_ref()).0);
                let (out, lse) = attention(&qkv, shape, how, dropout).unwrap();
                let dqkv =
                    attention_backward(&dout, &qkv, &out, &lse, shape, how, dropout).unwrap();
                assert_eq!((out.dtype(), lse.dtype(), dqkv.dtype()), (dtype, DType::F32, dtype));
                assert_close("out", &out, &want, tolerance);
                assert_close("lse", &lse, &plain(&wide, shape, how, None).1, 2e-5);
                assert_close("dqkv", &dqkv, &grads[0], 2.0 * tolerance);
            }
        }
    }
}

#[test]
fn with_linear_biases_they_agree_with_plain_attention() {
    for (s, b, shape) in cases() {
        let slopes: Vec<f64> = (1..=shape.heads()).map(|head| 2f64.powi(-(head as i32))).collect();
        let how = Scores { alibi: Some(&slopes), ..PLAIN };
        compare(s, b, shape, how, None);
        // Scores rise with distance; beyond the sequence's end they exceed all numbers.
        let rising: Vec<f64> = slopes.iter().map(|slope| -slope).collect();
        compare(s, b, shape, Scores { alibi: Some(&rising), ..PLAIN }, None);
        let dropout = AttentionDropout {
            p: 0.3,
            key: KEY,
            samples: &[7, 1 << 40][..b],
            first_head: 2,
            step_and_samples: None,
        };
        compare(s, b, shape, how, Some(&dropout));
    }
}

#[test]
fn with_dropout_they_agree_with_plain_attention_under_the_same_mask() {
    for (s, b, shape) in cases() {
        let samples = [7, 1 << 40];
        compare(
            s,
            b,
            shape,
            PLAIN,
            Some(&AttentionDropout {
                p: 0.3,
                key: KEY,
                samples: &samples[..b],
                first_head: 2,
                step_and_samples: None,
            }),
        );
    }
}

/// Documents of these lengths, repeated; the second sample starts with the second length. Returns
/// `[b, s]` first keys.
fn first_keys(lengths: &[usize], s: usize, b: usize) -> Tensor {
    let first_keys: Vec<u32> = (0..b).flat_map(|sample| starts_of(lengths, sample, s)).collect();
    Tensor::from_vec(first_keys, (b, s), &Device::Cpu).unwrap()
}

fn starts_of(lengths: &[usize], skip: usize, s: usize) -> Vec<u32> {
    let mut starts = Vec::new();
    for length in lengths.iter().cycle().skip(skip) {
        let start = starts.len() as u32;
        starts.extend(std::iter::repeat_n(start, *length));
        if starts.len() >= s {
            starts.truncate(s);
            return starts;
        }
    }
    starts
}

#[test]
fn queries_see_no_further_than_their_window_and_their_document() {
    for (s, b, shape) in cases() {
        let slopes: Vec<f64> = (1..=shape.heads()).map(|head| 2f64.powi(-(head as i32))).collect();
        let dropout = AttentionDropout {
            p: 0.3,
            key: KEY,
            samples: &[7, 1 << 40][..b],
            first_head: 2,
            step_and_samples: None,
        };
        for window in [None, Some(1), Some(3), Some(64), Some(129)] {
            for lengths in [None, Some(&[1usize, 30, 2, 61, 7, 128][..]), Some(&[64, 128])] {
                let first_keys = lengths.map(|lengths| first_keys(lengths, s, b));
                let how = Scores { window, first_keys: first_keys.as_ref(), ..PLAIN };
                compare(s, b, shape, how, None);
                compare(s, b, shape, Scores { alibi: Some(&slopes), ..how }, Some(&dropout));
            }
        }
    }
}

#[test]
fn documents_side_by_side_are_as_each_alone() {
    let shape = HeadShape { groups: 2, heads_per_group: 2, head_dim: 8 };
    let lengths = [128, 1, 77, 200, 50];
    let s = lengths.iter().sum();
    let (qkv, dout) = (
        randn("qkv", &[s, 1, shape.width()]),
        randn("dout", &[s, 1, shape.heads() * shape.head_dim]),
    );
    let first_keys = first_keys(&lengths, s, 1);
    let how = Scores { scale: 0.4, first_keys: Some(&first_keys), ..PLAIN };
    let (out, lse) = attention(&qkv, shape, how, None).unwrap();
    let dqkv = attention_backward(&dout, &qkv, &out, &lse, shape, how, None).unwrap();
    let mut at = 0;
    for length in lengths {
        let alone = |t: &Tensor, dim| t.narrow(dim, at, length).unwrap().contiguous().unwrap();
        let (qkv, dout) = (alone(&qkv, 0), alone(&dout, 0));
        let (own, own_lse) = attention(&qkv, shape, 0.4, None).unwrap();
        let own_dqkv = attention_backward(&dout, &qkv, &own, &own_lse, shape, 0.4, None).unwrap();
        assert_close("out", &alone(&out, 0), &own, 1e-13);
        assert_close("lse", &alone(&lse, 2), &own_lse, 1e-13);
        assert_close("dqkv", &alone(&dqkv, 0), &own_dqkv, 1e-13);
        at += length;
    }
}

#[test]
fn a_hidden_key_may_even_be_no_number() {
    let shape = HeadShape { groups: 1, heads_per_group: 1, head_dim: 4 };
    let mut qkv = crate::common::values(&randn("qkv", &[150, 1, 12]));
    qkv[20 * 12 + 5] = f64::NAN; // in the first document
    let qkv = Tensor::from_vec(qkv, (150, 1, 12), &Device::Cpu).unwrap();
    let first_keys = first_keys(&[40, 110], 150, 1);
    let (out, _) =
        attention(&qkv, shape, Scores { first_keys: Some(&first_keys), ..PLAIN }, None).unwrap();
    for (i, v) in crate::common::values(&out).iter().enumerate() {
        assert_eq!(v.is_nan(), (20..40).contains(&(i / 4)), "position {}", i / 4);
    }
}

#[test]
fn dropout_keeps_the_right_fraction_scaled() {
    let dropout =
        AttentionDropout { p: 0.1, key: KEY, samples: &[0], first_head: 0, step_and_samples: None };
    let mask = mask_of(&dropout, 200, 1, 2).flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let visible: Vec<f64> =
        (0..mask.len()).filter(|i| i % 200 <= i / 200 % 200).map(|i| mask[i]).collect();
    let kept = visible.iter().filter(|&&m| m > 0.0).count();
    assert!(visible.iter().all(|&m| m == 0.0 || (m - 1.0 / 0.9).abs() < 1e-9));
    let fraction = kept as f64 / visible.len() as f64;
    assert!((fraction - 0.9).abs() < 0.006, "kept {fraction}"); // 4 standard errors
}

#[test]
fn the_mask_depends_on_sample_and_global_head_not_on_how_they_are_cut() {
    let mask = |samples: &[u64], first_head, heads| {
        mask_of(
            &AttentionDropout { p: 0.5, key: KEY, samples, first_head, step_and_samples: None },
            70,
            samples.len(),
            heads,
        )
    };
    let whole = mask(&[3, 9], 4, 4);
    for head in 0..4 {
        for (i, sample) in [3, 9].into_iter().enumerate() {
            let cut = mask(&[sample], 4 + head, 1);
            assert_eq!(
                bits(&whole.narrow(0, i, 1).unwrap().narrow(1, head, 1).unwrap()),
                bits(&cut)
            );
        }
    }
    assert_ne!(bits(&mask(&[3], 4, 1)), bits(&mask(&[3], 5, 1)));
    assert_ne!(bits(&mask(&[3], 4, 1)), bits(&mask(&[9], 4, 1)));
    assert_ne!(bits(&mask(&[3], 4, 1)), bits(&mask(&[3 + (1 << 32)], 4, 1)));
}

#[test]
fn the_mask_of_a_query_does_not_depend_on_the_length_of_the_sequence() {
    let dropout =
        AttentionDropout { p: 0.5, key: KEY, samples: &[3], first_head: 0, step_and_samples: None };
    let (long, short) = (mask_of(&dropout, 200, 1, 1), mask_of(&dropout, 77, 1, 1));
    assert_eq!(bits(&long.narrow(2, 0, 77).unwrap().narrow(3, 0, 77).unwrap()), bits(&short));
}

#[test]
fn masks_of_steps_layers_sites_and_seeds_differ() {
    let mask = |key| {
        bits(&mask_of(
            &AttentionDropout { p: 0.5, key, samples: &[3], first_head: 0, step_and_samples: None },
            40,
            1,
            1,
        ))
    };
    let keys = [
        KEY,
        DropoutKey { seed: 12, ..KEY },
        DropoutKey { step: 4, ..KEY },
        DropoutKey { layer: 3, ..KEY },
        DropoutKey { site: 2, ..KEY },
        DropoutKey { seed: 11 + (1 << 32), ..KEY },
        DropoutKey { step: 3 + (1 << 32), ..KEY },
    ];
    for (i, a) in keys.iter().enumerate() {
        keys[..i].iter().for_each(|b| assert_ne!(mask(*a), mask(*b), "{a:?} and {b:?}"));
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let shape = HeadShape { groups: 2, heads_per_group: 3, head_dim: 24 };
    let (s, b) = (150, 2);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let qkv = cast(&randn("qkv", &[s, b, shape.width()]), dtype);
        let dout = cast(&randn("dout", &[s, b, shape.heads() * shape.head_dim]), dtype);
        let dropout = AttentionDropout {
            p: 0.1,
            key: KEY,
            samples: &[0, 1],
            first_head: 0,
            step_and_samples: None,
        };
        assert_same_on_any_threads(|| {
            let (out, lse) = attention(&qkv, shape, 0.2, Some(&dropout)).unwrap();
            let dqkv =
                attention_backward(&dout, &qkv, &out, &lse, shape, 0.2, Some(&dropout)).unwrap();
            vec![out, lse, dqkv]
        });
    }
}

#[test]
fn all_of_this_holds_on_every_instruction_set() {
    if std::env::var_os("MEGATRON_SIMD").is_some_and(|value| !value.is_empty()) {
        return;
    }
    // The other tests of this file test the detected one.
    let others: Vec<Isa> = Isa::ALL.into_iter().filter(|&isa| isa < Isa::supported()).collect();
    std::thread::scope(|scope| {
        for isa in others {
            scope.spawn(move || {
                let mut program = Command::new(std::env::current_exe().unwrap());
                let output =
                    program.arg("attention::").env("MEGATRON_SIMD", isa.name()).output().unwrap();
                let text = String::from_utf8_lossy(&output.stdout);
                assert!(
                    output.status.success() && text.contains("test result: ok. "),
                    "{isa:?}: {text}"
                );
            });
        }
    });
}

#[test]
fn large_scores_do_not_overflow() {
    let shape = HeadShape { groups: 1, heads_per_group: 1, head_dim: 8 };
    let qkv = cast(&(randn("qkv", &[140, 1, 24]) * 100.0).unwrap(), DType::F32);
    let (out, lse) = attention(&qkv, shape, 1.0, None).unwrap();
    let dqkv = attention_backward(&out, &qkv, &out, &lse, shape, 1.0, None).unwrap();
    for t in [out, lse, dqkv] {
        assert!(crate::common::values(&t).iter().all(|v| v.is_finite()));
    }
}

#[test]
fn a_nan_is_seen_by_every_query_that_sees_it_and_by_no_other() {
    let shape = HeadShape { groups: 1, heads_per_group: 1, head_dim: 4 };
    let mut qkv = crate::common::values(&randn("qkv", &[150, 1, 12]));
    qkv[100 * 12 + 5] = f64::NAN; // a key
    let qkv = Tensor::from_vec(qkv, (150, 1, 12), &Device::Cpu).unwrap();
    let (out, _) = attention(&qkv, shape, 1.0, None).unwrap();
    for (i, v) in crate::common::values(&out).iter().enumerate() {
        assert_eq!(v.is_nan(), i / 4 >= 100, "position {}", i / 4);
    }
}

#[test]
fn shapes_that_contradict_are_errors_that_name_them() {
    let shape = HeadShape { groups: 2, heads_per_group: 2, head_dim: 4 };
    let message = attention(&randn("qkv", &[3, 1, 30]), shape, 1.0, None).unwrap_err().to_string();
    assert!(message.contains("[3, 1, 30]") && message.contains("= 32"), "{message}");
    let qkv = randn("qkv", &[3, 1, 32]);
    let dropout = AttentionDropout {
        p: 0.1,
        key: KEY,
        samples: &[1, 2],
        first_head: 0,
        step_and_samples: None,
    };
    assert!(
        attention(&qkv, shape, 1.0, Some(&dropout)).unwrap_err().to_string().contains("2 samples")
    );
    let dropout =
        AttentionDropout { p: 1.0, key: KEY, samples: &[1], first_head: 0, step_and_samples: None };
    assert!(
        attention(&qkv, shape, 1.0, Some(&dropout)).unwrap_err().to_string().contains("[0, 1)")
    );
    let refused = |how: Scores| attention(&qkv, shape, how, None).unwrap_err().to_string();
    assert!(refused(Scores { alibi: Some(&[0.5]), ..PLAIN }).contains("1 slopes for 4"));
    assert!(refused(Scores { window: Some(0), ..PLAIN }).contains("window of 0"));
    let refused_keys = |first_keys: &[u32]| {
        let first_keys =
            Tensor::from_slice(first_keys, (1, first_keys.len()), &Device::Cpu).unwrap();
        refused(Scores { first_keys: Some(&first_keys), ..PLAIN })
    };
    assert!(refused_keys(&[0, 0]).contains("first keys has shape [1, 2]"));
    assert!(refused_keys(&[0, 2, 2]).contains("query 1 of sample 0 sees nothing"));
    assert!(refused_keys(&[0, 1, 0]).contains("fall from 1 to 0"));
    let signed = Tensor::new(&[[0i64, 0, 0]], &Device::Cpu).unwrap();
    assert!(refused(Scores { first_keys: Some(&signed), ..PLAIN }).contains("I64"));
}
