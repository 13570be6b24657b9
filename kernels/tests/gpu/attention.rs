//! Attention, its gradient, and steps of generation.

use std::ops::Range;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::{Input, check};
use candle_core::{DType, Device, Tensor};
use kernels::Result;
use kernels::ops::attention::{
    AttentionDropout, HeadShape, RopeTable, Rotation, Scores, attention, attention_backward,
    attention_backward_rotated, attention_cached,
};
use kernels::ops::dropout::{DropoutKey, step_and_samples};
use kernels::tensor::philox::{fill_normal, stream_id};

const KEY: DropoutKey = DropoutKey { seed: 11, step: 3, layer: 2, site: 1 };
const SAMPLES: [u64; 2] = [7, 1 << 40];

fn shape(groups: usize, heads_per_group: usize, head_dim: usize) -> HeadShape {
    HeadShape { groups, heads_per_group, head_dim }
}

/// How the keys that a query sees are restricted; by default, not at all.
#[derive(Clone, Default)]
struct How {
    alibi: bool,
    window: Option<usize>,
    /// Documents of these lengths, repeated; the second sample starts with the second length.
    documents: Option<Vec<usize>>,
    dropout: f64,
}

fn first_keys(lengths: &[usize], s: usize, b: usize) -> Tensor {
    let of_sample = |sample: usize| {
        let mut first = Vec::new();
        for &length in lengths.iter().cycle().skip(sample) {
            if first.len() >= s {
                break;
            }
            let start = first.len() as u32;
            first.extend(std::iter::repeat_n(start, length.min(s - first.len())));
        }
        first
    };
    let first_keys: Vec<u32> = (0..b).flat_map(of_sample).collect();
    Tensor::from_vec(first_keys, (b, s), &Device::Cpu).unwrap()
}

/// Compares forward and backward.
#[track_caller]
fn compare(s: usize, b: usize, shape: HeadShape, how: &How) {
    let qkv = Input::data("qkv", &[s, b, shape.width()]);
    let dout = Input::data("dout", &[s, b, shape.heads() * shape.head_dim]);
    let slopes: Vec<f64> = (1..=shape.heads()).map(|head| 2f64.powi(-(head as i32))).collect();
    let first_keys = how.documents.as_ref().map(|lengths| first_keys(lengths, s, b));
    let scores = Scores {
        scale: 1.3 / (shape.head_dim as f64).sqrt(),
        alibi: how.alibi.then_some(&slopes),
        window: how.window,
        first_keys: None,
    };
    let dropout = AttentionDropout {
        p: how.dropout,
        key: KEY,
        samples: &SAMPLES[..b],
        first_head: 2,
        step_and_samples: None,
    };
    let dropout = (how.dropout > 0.0).then_some(&dropout);
    check("attention", &[qkv, dout], |t| {
        let first_keys =
            first_keys.as_ref().map(|keys| keys.to_device(t[0].device())).transpose()?;
        let scores = Scores { first_keys: first_keys.as_ref(), ..scores };
        let (out, lse) = attention(&t[0], shape, scores, dropout)?;
        let dqkv = attention_backward(&t[1], &t[0], &out, &lse, shape, scores, dropout)?;
        Ok(vec![out, lse, dqkv])
    });
}

/// Compares gradients of queries and keys before their rotation; kernels may rotate them back.
#[track_caller]
fn compare_rotated(s: usize, b: usize, shape: HeadShape, listed: bool) {
    let qkv = Input::data("qkv", &[s, b, shape.width()]);
    let dout = Input::data("dout", &[s, b, shape.heads() * shape.head_dim]);
    let scale = 1.0 / (shape.head_dim as f64).sqrt();
    check("attention of rotated heads", &[qkv, dout], |t| {
        let device = t[0].device();
        // With a list, the table has exactly the positions that the list may use.
        let table = RopeTable::new(
            if listed { 50 } else { s + 3 },
            shape.head_dim,
            1e4,
            t[0].dtype(),
            device,
        )?;
        let positions: Vec<u32> = (0..(s * b) as u32).map(|row| row * 7 % 50).collect();
        let positions = listed.then(|| Tensor::from_vec(positions, (s, b), device)).transpose()?;
        let (out, lse) = attention(&t[0], shape, scale, None)?;
        let rotation = Rotation { table: &table, positions: positions.as_ref() };
        Ok(vec![attention_backward_rotated(
            [&t[1], &t[0], &out, &lse],
            shape,
            scale,
            None,
            &rotation,
        )?])
    });
}

#[test]
fn gradients_of_rotated_heads_are_turned_back() {
    for listed in [false, true] {
        compare_rotated(150, 2, shape(1, 2, 64), listed);
        compare_rotated(70, 1, shape(2, 1, 128), listed);
    }
    compare_rotated(20, 1, shape(1, 1, 16), true);
}

#[test]
fn tables_that_do_not_fit_the_heads_are_refused() {
    let (s, shape) = (8, shape(1, 1, 64));
    check("attention", &[Input::data("qkv", &[s, 1, shape.width()])], |t| {
        let (out, lse) = attention(&t[0], shape, 0.1, None)?;
        for (positions, head_dim, part) in
            [(s - 1, 64, "exceed the table's 7"), (s, 32, "[positions, 32] is needed")]
        {
            let table = RopeTable::new(positions, head_dim, 1e4, t[0].dtype(), t[0].device())?;
            let rotation = Rotation { table: &table, positions: None };
            let error =
                attention_backward_rotated([&out, &t[0], &out, &lse], shape, 0.1, None, &rotation)
                    .unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
        Ok(vec![out])
    });
}

#[test]
fn one_token_and_lengths_around_a_tile() {
    for s in [1, 2, 63, 64, 65] {
        compare(s, 1, shape(1, 1, 64), &How::default());
    }
    compare(129, 1, shape(1, 1, 128), &How::default());
}

#[test]
fn heads_of_every_width_and_grouping() {
    compare(33, 2, shape(2, 2, 64), &How::default());
    compare(37, 1, shape(1, 3, 96), &How::default());
    compare(40, 2, shape(2, 1, 128), &How::default());
    compare(35, 1, shape(1, 2, 256), &How::default());
}

#[test]
fn heads_of_other_widths_are_padded() {
    for head_dim in [1, 8, 40, 100, 200] {
        compare(21, 1, shape(1, 2, head_dim), &How::default());
    }
}

#[test]
fn queries_see_no_further_than_their_window_and_their_document() {
    compare(130, 1, shape(1, 1, 64), &How { window: Some(3), ..How::default() });
    compare(150, 1, shape(1, 1, 64), &How { window: Some(70), ..How::default() });
    compare(
        100,
        2,
        shape(1, 1, 64),
        &How { documents: Some(vec![1, 30, 2, 61, 7]), ..How::default() },
    );
    compare(
        130,
        1,
        shape(1, 1, 128),
        &How { window: Some(50), documents: Some(vec![64, 66]), ..How::default() },
    );
}

/// Normal deviates `[s, b, width]`, with NaN at these positions.
fn with_nan(name: &str, dims: [usize; 3], nan: &[Range<usize>], dtype: DType) -> Tensor {
    let [s, b, width] = dims;
    let mut values = vec![0.0; s * b * width];
    fill_normal(&mut values, 77, stream_id(name), 0, 1.0);
    for positions in nan {
        values[positions.start * b * width..positions.end * b * width].fill(f32::NAN);
    }
    Tensor::from_vec(values, &dims, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Three documents of whole tiles: the first and the third do not affect the second, not even
/// multiplied by a weight of 0. So tiles that no query sees are skipped, not masked.
#[track_caller]
fn other_documents_are_not_read(shape: HeadShape, dtype: DType) {
    const TILE: usize = 128;
    let (s, b) = (3 * TILE, 1);
    let first_keys = first_keys(&[TILE], s, b);
    let second = |nan: &[Range<usize>], device: &Device| {
        let qkv = with_nan("qkv", [s, b, shape.width()], nan, dtype).to_device(device)?;
        let dout = with_nan("dout", [s, b, shape.heads() * shape.head_dim], nan, dtype)
            .to_device(device)?;
        let first_keys = first_keys.to_device(device)?;
        let scores = Scores { first_keys: Some(&first_keys), ..Scores::from(0.1) };
        let (out, lse) = attention(&qkv, shape, scores, None)?;
        let dqkv = attention_backward(&dout, &qkv, &out, &lse, shape, scores, None)?;
        let bits = |t: &Tensor, dim: usize| -> Result<Vec<u64>> {
            let part = t
                .narrow(dim, TILE, TILE)?
                .contiguous()?
                .to_device(&Device::Cpu)?
                .to_dtype(DType::F64)?;
            let values: Vec<f64> = part.flatten_all()?.to_vec1()?;
            assert!(values.iter().all(|v| v.is_finite()), "{shape:?} {dtype:?}: not finite");
            Ok(values.into_iter().map(f64::to_bits).collect())
        };
        Ok::<_, kernels::Error>([bits(&out, 0)?, bits(&lse, 2)?, bits(&dqkv, 0)?])
    };
    for (run, (clean, poisoned)) in crate::support::runs(|device| {
        (second(&[], device).unwrap(), second(&[0..TILE, 2 * TILE..s], device).unwrap())
    }) {
        assert!(clean == poisoned, "{run}: {shape:?} {dtype:?}");
    }
}

#[test]
fn tiles_outside_of_a_document_are_left_out() {
    for head_dim in [64, 96, 128, 256] {
        other_documents_are_not_read(
            shape(1, if head_dim == 64 { 2 } else { 1 }, head_dim),
            DType::BF16,
        );
    }
    other_documents_are_not_read(shape(1, 1, 64), DType::F32);
}

/// The host would refuse these tables, but it does not read a GPU's. A kernel that waits for a tile
/// of keys that no query sees, or that is never copied, would not end.
#[test]
fn a_query_sees_itself_whatever_the_table_says() {
    for head_dim in [64, 96, 128, 256] {
        let (shape, s) = (shape(1, 2, head_dim), 270);
        for (run, [own, wrong, falling]) in crate::support::runs(|device| {
            let qkv =
                with_nan("qkv", [s, 1, shape.width()], &[], DType::BF16).to_device(device).unwrap();
            let dout = with_nan("dout", [s, 1, shape.heads() * head_dim], &[], DType::BF16)
                .to_device(device)
                .unwrap();
            // One query that sees no other query, in a tile with later queries that see all.
            let falls = (0..s as u32).map(|query| if query == 256 { query } else { 0 }).collect();
            let tables = [(0..s as u32).collect(), vec![u32::MAX; s], falls];
            tables.map(|table: Vec<u32>| {
                let table = Tensor::from_vec(table, (1, s), &Device::Cpu)
                    .unwrap()
                    .to_device(device)
                    .unwrap();
                let scores = Scores { first_keys: Some(&table), ..Scores::from(0.1) };
                let (out, lse) = attention(&qkv, shape, scores, None).unwrap();
                let dqkv =
                    attention_backward(&dout, &qkv, &out, &lse, shape, scores, None).unwrap();
                [out, dqkv].map(|t| {
                    let t = t.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
                    t.flatten_all().unwrap().to_vec1::<f32>().unwrap()
                })
            })
        }) {
            assert!(
                own == wrong && falling.iter().flatten().all(|v| v.is_finite()),
                "{run}: {shape:?}"
            );
        }
    }
}

#[test]
fn linear_biases_and_dropped_weights_are_those_of_the_cpu() {
    let dropped = How { dropout: 0.3, ..How::default() };
    for shape in [shape(1, 2, 64), shape(1, 1, 96), shape(1, 2, 128), shape(1, 1, 256)] {
        compare(40, 2, shape, &dropped);
    }
    compare(70, 1, shape(1, 2, 64), &How { alibi: true, ..How::default() });
    compare(
        70,
        1,
        shape(2, 1, 128),
        &How { alibi: true, window: Some(40), documents: Some(vec![50, 20]), dropout: 0.3 },
    );
}

#[test]
fn dropout_reads_step_and_samples_on_the_device_instead_of_the_hosts() {
    for (head_dim, dtype) in [(64, DType::BF16), (128, DType::F16), (32, DType::F32)] {
        let (s, b, shape) = (40, 2, shape(1, 2, head_dim));
        for (run, [there, here, other]) in crate::support::runs(|device| {
            let both = step_and_samples(KEY.step, &SAMPLES[..b], device).unwrap();
            let given = AttentionDropout {
                p: 0.3,
                key: KEY,
                samples: &SAMPLES[..b],
                first_head: 2,
                step_and_samples: None,
            };
            let wrong = AttentionDropout {
                key: DropoutKey { step: KEY.step + 1, ..KEY },
                samples: &[50, 60],
                ..given
            };
            let data =
                |what, width| with_nan(what, [s, b, width], &[], dtype).to_device(device).unwrap();
            let (qkv, dout) = (data("qkv", shape.width()), data("dout", shape.heads() * head_dim));
            [&AttentionDropout { step_and_samples: Some(&both), ..wrong }, &given, &wrong].map(
                |dropout| {
                    let (out, lse) = attention(&qkv, shape, 0.2, Some(dropout)).unwrap();
                    let dqkv =
                        attention_backward(&dout, &qkv, &out, &lse, shape, 0.2, Some(dropout))
                            .unwrap();
                    [out, dqkv].map(|t| {
                        let wide = t.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
                        wide.flatten_all().unwrap().to_vec1::<f64>().unwrap()
                    })
                },
            )
        }) {
            assert!(there == here && here != other, "{run} {head_dim} {dtype:?}");
        }
    }
}

#[test]
fn scales_need_not_be_positive() {
    let shape = shape(1, 1, 64);
    for scale in [0.0, -0.2] {
        let qkv = Input::data("qkv", &[20, 1, shape.width()]);
        check("attention", &[qkv], |t| {
            let (out, lse) = attention(&t[0], shape, scale, None)?;
            Ok(vec![out, lse])
        });
    }
}

/// Feeds tokens in these portions through a cache.
fn in_portions(
    qkv: &Tensor,
    portions: &[usize],
    shape: HeadShape,
    scores: Scores,
) -> Result<Vec<Tensor>> {
    let (positions, b, _) = qkv.dims3()?;
    let cache = Tensor::zeros(
        (positions, b, 2 * shape.groups * shape.head_dim),
        qkv.dtype(),
        qkv.device(),
    )?;
    let (mut at, mut outs) = (0, Vec::new());
    for &n in portions {
        let part = qkv.narrow(0, at, n)?.contiguous()?;
        outs.push(attention_cached(&part, &cache, &vec![at; b], shape, scores)?);
        at += n;
    }
    outs.push(cache);
    Ok(outs)
}

#[test]
fn tokens_fed_in_any_portions_see_those_before() {
    let slopes = [0.5, 0.25, 0.125, 0.06];
    for (shape, alibi, window) in [
        (shape(2, 2, 64), None, None),
        (shape(1, 4, 40), Some(&slopes[..]), None),
        (shape(1, 10, 5), None, Some(3)),
        (shape(4, 1, 128), Some(&slopes), Some(9)),
        // Head widths that no power of two of threads can share, and more heads than are processed
        // side by side; the widest heads.
        (shape(1, 9, 96), None, None),
        (shape(1, 2, 256), None, Some(7)),
    ] {
        let scores = Scores { scale: 0.2, alibi, window, first_keys: None };
        let qkv = Input::data("qkv", &[13, 2, shape.width()]);
        check("attention_cached", &[qkv], |t| in_portions(&t[0], &[9, 1, 1, 2], shape, scores));
    }
}

#[test]
fn long_caches_are_read_in_pieces() {
    let shape = shape(1, 2, 8);
    for window in [None, Some(100)] {
        let scores = Scores { scale: 0.4, alibi: None, window, first_keys: None };
        let qkv = Input::data("qkv", &[519, 1, shape.width()]);
        check("attention_cached", &[qkv], |t| in_portions(&t[0], &[518, 1], shape, scores));
    }
}

#[test]
fn samples_may_be_at_different_positions() {
    let shape = shape(1, 2, 64);
    let (prompt, next) =
        (Input::data("qkv", &[5, 2, shape.width()]), Input::data("next", &[1, 2, shape.width()]));
    check("attention_cached", &[prompt, next], |t| {
        let cache = Tensor::zeros((6, 2, 2 * shape.head_dim), t[0].dtype(), t[0].device())?;
        attention_cached(&t[0], &cache, &[0, 0], shape, 0.2)?;
        Ok(vec![attention_cached(&t[1], &cache, &[5, 2], shape, 0.2)?, cache])
    });
}

#[test]
fn heads_that_are_too_wide_are_refused_by_name() {
    let shape = shape(1, 1, 257);
    for (run, result) in crate::support::runs(|device| {
        let qkv = Tensor::zeros((2, 1, shape.width()), candle_core::DType::F32, device).unwrap();
        attention(&qkv, shape, 1.0, None).map(|_| ()).map_err(|e| e.to_string())
    }) {
        assert!(result.as_ref().is_err_and(|e| e.contains("257")), "{run}: {result:?}");
    }
}

/// Multiprocessors of the GPU that the tests run on.
#[cfg(all(feature = "cuda", not(feature = "emulated")))]
fn multiprocessors() -> usize {
    kernels::ops::survey::survey().unwrap().gpus[0].multiprocessors as usize
}

/// As many as the emulator has.
#[cfg(feature = "emulated")]
fn multiprocessors() -> usize {
    3
}

/// Cases for the Hopper kernels, which have their own tile sizes.
#[test]
fn tiles_of_whole_warpgroups() {
    let (narrow, wide) = (|heads| shape(1, heads, 64), |heads| shape(1, heads, 128));
    compare(1, 1, narrow(1), &How::default());
    compare(65, 2, shape(2, 1, 64), &How::default());
    compare(129, 1, wide(2), &How::default());
    let documents = Some(vec![1, 30, 2, 61, 7, 128]);
    compare(
        257,
        1,
        narrow(2),
        &How { alibi: true, window: Some(100), documents: documents.clone(), ..How::default() },
    );
    // Several groups of several heads, several samples; whole tiles of queries and of keys, and one
    // row more.
    compare(128, 2, shape(2, 2, 64), &How::default());
    compare(193, 2, shape(2, 2, 128), &How { documents, ..How::default() });
    compare(256, 1, wide(1), &How { window: Some(65), ..How::default() });
    compare(320, 1, narrow(3), &How { documents: Some(vec![64, 128, 63]), ..How::default() });
    // More than one head, and tiles after the first: a compiler once kept values in the wrong
    // registers from one tile to the next.
    compare(150, 2, shape(2, 2, 64), &How::default());
    // With narrow heads, forward's tiles have three warpgroups of queries. The first tile is the
    // partial one, which leaves some of its warpgroups idle.
    for s in [192, 193, 255] {
        compare(s, 1, narrow(2), &How::default());
    }
    // Warpgroups begin and end at different tiles of keys.
    compare(400, 1, narrow(1), &How { window: Some(20), ..How::default() });
    compare(385, 1, wide(1), &How { documents: Some(vec![190, 3]), ..How::default() });
    for shape in [narrow(2), wide(1)] {
        other_documents_are_not_read(shape, DType::BF16);
    }
    // More than twice as many tiles of queries as multiprocessors, so that blocks of forward
    // continue with another tile: the emulator and the stand-ins have few multiprocessors.
    if multiprocessors() > 16 {
        let heads = 2 * multiprocessors() / 4 + 3;
        compare(129, 2, narrow(heads), &How::default());
        compare(129, 2, wide(heads), &How { alibi: true, ..How::default() });
        compare(2049, 1, shape(2, 4, 64), &How::default());
        // Partial tiles, some before whole ones and some alone.
        for documents in [None, Some(vec![100, 60, 33])] {
            compare(193, 2, narrow(heads), &How { documents, ..How::default() });
        }
        compare(65, 2, narrow(4 * heads), &How::default());
    }
    // Cases that these kernels do not support are left to the others.
    compare(20, 1, wide(1), &How { dropout: 0.3, ..How::default() });
    compare(20, 1, shape(1, 1, 96), &How::default());
}

/// Runs tests of this program with other kernels, in a new process, because a process chooses them
/// once. A process that waits for ever is ended, and fails.
#[track_caller]
fn with_kernels(which: &str, tests: &[&str]) {
    // The emulator and the stand-ins take minutes.
    let patience = Duration::from_secs(if multiprocessors() > 16 { 60 } else { 1800 });
    let mut program = Command::new(std::env::current_exe().unwrap());
    program
        .args(tests)
        .env("MEGATRON_ATTENTION", which)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let (child, (told, ended)) = (program.spawn().unwrap(), std::sync::mpsc::channel());
    let id = child.id();
    let waiter = std::thread::spawn(move || {
        let output = child.wait_with_output().unwrap();
        let _ = told.send(());
        output
    });
    let is_late = ended.recv_timeout(patience).is_err();
    if is_late {
        Command::new("kill").args(["-9", &id.to_string()]).status().unwrap();
    }
    let output = waiter.join().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(!is_late, "{which} has not ended after {patience:?}: {said}");
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(!said.contains("running 0 tests"), "the tests were not found");
}

#[test]
fn kernels_for_every_gpu_agree_too() {
    with_kernels("mma", &[&OF_ATTENTION[..], &["--skip", "tiles_of_whole_warpgroups"]].concat());
}

#[test]
fn kernels_of_one_pass_agree_too() {
    with_kernels("one-pass", &OF_ATTENTION);
}

/// All tests except those that start processes and those of generation, which has kernels of its
/// own.
const OF_ATTENTION: [&str; 9] = [
    "attention::",
    "--skip",
    "kernels_",
    "--skip",
    "tokens_",
    "--skip",
    "caches_",
    "--skip",
    "samples_may",
];

#[test]
fn kernels_that_are_not_there_are_named() {
    let test = ["attention::one_token_and_lengths_around_a_tile", "--exact", "--nocapture"];
    let mut program = Command::new(std::env::current_exe().unwrap());
    let output = program.args(test).env("MEGATRON_ATTENTION", "hoper").output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(
        message.contains(
            "MEGATRON_ATTENTION=hoper names no kernels; there are mma, hopper and one-pass"
        ),
        "{message}"
    );
}

/// Operations of the products per second, for the causal half only: 4 · s² / 2 · d of each head
/// forward, 2.5 times as many backward.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "a measurement: attention::speed --exact --ignored --nocapture, with and without MEGATRON_ATTENTION=mma"]
fn speed() {
    use candle_core::DType;
    let device = kernels::tensor::gpu::open(0).unwrap();
    for (s, head_dim) in [(4096, 128), (8192, 128), (16384, 128), (4096, 64), (16384, 64)] {
        let (shape, b) = (shape(16, 1, head_dim), 16384 / s);
        let random = |width: usize| {
            Tensor::randn(0.0_f32, 1.0, (s, b, width), &device)
                .unwrap()
                .to_dtype(DType::BF16)
                .unwrap()
        };
        let (qkv, dout) = (random(shape.width()), random(shape.heads() * head_dim));
        let scale = 1.0 / (head_dim as f64).sqrt();
        let (out, lse) = attention(&qkv, shape, scale, None).unwrap();
        let seconds = |run: &dyn Fn()| {
            let measure = |times: usize| {
                device.synchronize().unwrap();
                let start = std::time::Instant::now();
                (0..times).for_each(|_| run());
                device.synchronize().unwrap();
                start.elapsed().as_secs_f64() / times as f64
            };
            measure(3);
            measure(20)
        };
        let forward = seconds(&|| drop(attention(&qkv, shape, scale, None).unwrap()));
        let backward = seconds(&|| {
            drop(attention_backward(&dout, &qkv, &out, &lse, shape, scale, None).unwrap())
        });
        let operations = 2.0 * (s * s * head_dim * shape.heads() * b) as f64;
        let rate = |operations: f64, seconds: f64| operations / seconds / 1e12;
        let (forward, backward) = (rate(operations, forward), rate(2.5 * operations, backward));
        println!(
            "| {s} tokens, d {head_dim} | forward {forward:.0} TFLOP/s | backward {backward:.0} TFLOP/s |"
        );
    }
}
