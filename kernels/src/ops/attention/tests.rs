//! Attention over a cache gives the same results as over a whole sequence.

use super::*;
use candle_core::{DType, Device};

/// A deterministic spread of values.
fn values(shape: &[usize], dtype: DType) -> Tensor {
    let n: usize = shape.iter().product();
    let v: Vec<f64> = (0..n).map(|i| ((i * 2_654_435_761) % 1000) as f64 / 500.0 - 1.0).collect();
    Tensor::from_vec(v, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn difference(a: &Tensor, b: &Tensor) -> f64 {
    let d = (a - b).unwrap().abs().unwrap().to_dtype(DType::F64).unwrap();
    d.flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

#[test]
fn tokens_fed_in_any_portions_give_what_the_whole_sequence_gives() {
    let slopes = [0.5, 0.25, 0.125, 0.06, 0.03, 0.015];
    // One case has fewer positions than are computed at a time, one more.
    let lengths: [(usize, usize, &[&[usize]]); 2] = [
        (5, 11, &[&[11], &[4, 7], &[1; 11]]),
        (40, 71, &[&[71], &[34, 37], &[64, 1, 1, 1, 4], &[1; 71]]),
    ];
    let b = 2;
    let dtypes =
        [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::BF16, 1.6e-2), (DType::F16, 2e-3)];
    for ((head_dim, s, portions), (dtype, tolerance)) in
        lengths.into_iter().flat_map(|length| dtypes.into_iter().map(move |dtype| (length, dtype)))
    {
        let shape = HeadShape { groups: 2, heads_per_group: 3, head_dim };
        let qkv = values(&[s, b, shape.width()], dtype);
        for (alibi, window) in [
            (None, None),
            (Some(&slopes[..]), None),
            (None, Some(3)),
            (Some(&slopes), Some(1)),
            (None, Some(35)),
        ] {
            let scores = Scores { alibi, window, ..Scores::from(0.4) };
            let (whole, _) = attention(&qkv, shape, scores, None).unwrap();
            for &portions in portions {
                let cache = Tensor::zeros((s, b, 2 * 2 * head_dim), dtype, &Device::Cpu).unwrap();
                let mut at = 0;
                for &n in portions {
                    let part = qkv.narrow(0, at, n).unwrap().contiguous().unwrap();
                    let out = attention_cached(&part, &cache, &[at, at], shape, scores).unwrap();
                    let expected = whole.narrow(0, at, n).unwrap();
                    assert!(difference(&out, &expected) < tolerance);
                    at += n;
                }
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_how_heads_are_dealt_to_threads() {
    let shape = HeadShape { groups: 2, heads_per_group: 5, head_dim: 24 };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let cache = values(&[80, 1, 2 * 2 * 24], dtype);
            let qkv = values(&[2, 1, shape.width()], dtype);
            let out = pool.install(|| attention_cached(&qkv, &cache, &[75], shape, 0.5)).unwrap();
            out.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        let one = with(1);
        for threads in [2, 3, 8, 16] {
            assert!(with(threads) == one, "{dtype:?}, {threads} threads");
        }
    }
}

#[test]
fn keys_of_endless_distance_weigh_nothing_wherever_they_are() {
    let shape = HeadShape { groups: 1, heads_per_group: 1, head_dim: 4 };
    let qkv = (values(&[1, 1, 12], DType::F32).abs().unwrap() + 1.0).unwrap();
    let (far, near) = (40, 30);
    let others = values(&[near, 1, 8], DType::F32);
    let attend = |far: usize| {
        let cache = [(far, -f32::MAX), (1, 0.0)]
            .map(|(n, of)| Tensor::full(of, (n, 1, 8), &Device::Cpu).unwrap());
        let cache = Tensor::cat(&[&cache[0], &others, &cache[1]], 0).unwrap();
        attention_cached(&qkv, &cache, &[far + near], shape, 1.0).unwrap()
    };
    assert!(difference(&attend(far), &attend(0)) < 1e-6);
}

#[test]
fn samples_may_be_at_different_positions() {
    let shape = HeadShape { groups: 1, heads_per_group: 2, head_dim: 4 };
    let qkv = values(&[6, 2, shape.width()], DType::F64);
    let (whole, _) = attention(&qkv, shape, 0.5, None).unwrap();
    let cache = Tensor::zeros((6, 2, 8), DType::F64, &Device::Cpu).unwrap();
    // Both prompts are fed padded to 4 tokens; the second sample's real prompt has 2.
    attention_cached(
        &qkv.narrow(0, 0, 4).unwrap().contiguous().unwrap(),
        &cache,
        &[0, 0],
        shape,
        0.5,
    )
    .unwrap();
    let next = |sample: usize, position: usize| {
        qkv.narrow(0, position, 1).unwrap().narrow(1, sample, 1).unwrap()
    };
    let new = Tensor::cat(&[next(0, 4), next(1, 2)], 1).unwrap().contiguous().unwrap();
    let out = attention_cached(&new, &cache, &[4, 2], shape, 0.5).unwrap();
    let expected = |sample: usize, position: usize| {
        whole.narrow(0, position, 1).unwrap().narrow(1, sample, 1).unwrap().contiguous().unwrap()
    };
    assert!(
        difference(&out.narrow(1, 0, 1).unwrap().contiguous().unwrap(), &expected(0, 4)) < 1e-12
    );
    assert!(
        difference(&out.narrow(1, 1, 1).unwrap().contiguous().unwrap(), &expected(1, 2)) < 1e-12
    );
}

#[test]
fn a_full_cache_is_refused() {
    let shape = HeadShape { groups: 1, heads_per_group: 1, head_dim: 4 };
    let cache = Tensor::zeros((3, 1, 8), DType::F32, &Device::Cpu).unwrap();
    let beyond = [usize::MAX, usize::MAX - 1];
    for start in beyond {
        let error =
            attention_cached(&values(&[2, 1, 12], DType::F32), &cache, &[start], shape, 0.5)
                .unwrap_err();
        assert!(error.to_string().contains("2 tokens from positions"), "{error}");
    }
    let error =
        attention_cached(&values(&[2, 1, 12], DType::F32), &cache, &[2], shape, 0.5).unwrap_err();
    assert!(error.to_string().contains("cache of 3 positions"), "{error}");
}
