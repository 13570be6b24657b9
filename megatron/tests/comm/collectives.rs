//! Compares each collective with a serial oracle, bit for bit, on every backend.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use megatron::comm::{Group, ReduceOp, Work};

use crate::support::{BACKENDS, DTYPES, bytes, ranks, tensor, zeros};

/// Element counts per rank: none, one, fewer than ranks, odd, and enough for the sliced algorithm.
const COUNTS: [usize; 5] = [0, 1, 3, 1001, 20_011];
const SIZES: [usize; 3] = [2, 3, 4];

/// Combines the tensors of `size` ranks element by element, in rank order; 16-bit elements in f32.
pub fn combined(size: usize, count: usize, dtype: DType, op: ReduceOp) -> Vec<u8> {
    macro_rules! fold {
        ($t:ty, $to:expr, $from:expr, $sum:expr) => {{
            let of = |rank| tensor(rank, count, dtype).to_vec1::<$t>().unwrap();
            let parts: Vec<Vec<$t>> = (0..size).map(of).collect();
            let element = |i: usize| {
                let values = parts.iter().map(|part| $to(part[i]));
                let folded = match op {
                    ReduceOp::Sum => values.reduce($sum),
                    ReduceOp::Max => values.reduce(|a, b| if b > a { b } else { a }),
                    ReduceOp::Min => values.reduce(|a, b| if b < a { b } else { a }),
                };
                $from(folded.unwrap())
            };
            (0..count).flat_map(|i| <$t>::to_ne_bytes(element(i))).collect()
        }};
    }
    match dtype {
        DType::U8 => fold!(u8, |x| x, |x| x, u8::wrapping_add),
        DType::U32 => fold!(u32, |x| x, |x| x, u32::wrapping_add),
        DType::I64 => fold!(i64, |x| x, |x| x, i64::wrapping_add),
        DType::F32 => fold!(f32, |x| x, |x| x, |a, b| a + b),
        DType::F64 => fold!(f64, |x| x, |x| x, |a, b| a + b),
        DType::BF16 => fold!(bf16, bf16::to_f32, bf16::from_f32, |a: f32, b: f32| a + b),
        DType::F16 => fold!(f16, f16::to_f32, f16::from_f32, |a: f32, b: f32| a + b),
        other => panic!("no oracle for {other:?}"),
    }
}

pub fn concatenated(size: usize, count: usize, dtype: DType) -> Vec<u8> {
    (0..size).flat_map(|rank| bytes(&tensor(rank, count, dtype))).collect()
}

/// Checks that rank r has `expected(r, size, count, dtype)` after `f`, for all sizes, counts and
/// dtypes.
fn check(
    f: impl Fn(&Group, usize, DType) -> megatron::Result<Tensor> + Sync,
    expected: impl Fn(usize, usize, usize, DType) -> Vec<u8>,
) {
    for backend in BACKENDS {
        for size in SIZES {
            let all = ranks(backend, size, |g| {
                let mut results = Vec::new();
                for count in COUNTS {
                    for dtype in DTYPES {
                        results.push((count, dtype, bytes(&f(&g, count, dtype)?)));
                    }
                }
                Ok(results)
            });
            for (rank, results) in all.into_iter().enumerate() {
                for (count, dtype, got) in results {
                    let expected = expected(rank, size, count, dtype);
                    assert!(
                        got == expected,
                        "{backend}: rank {rank} of {size}, {count} elements of {dtype:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn all_reduce_sums_in_rank_order() {
    check(
        |g, count, dtype| {
            let t = tensor(g.rank(), count, dtype);
            g.all_reduce(&t, ReduceOp::Sum)?.wait()?;
            Ok(t)
        },
        |_, size, count, dtype| combined(size, count, dtype, ReduceOp::Sum),
    );
}

#[test]
fn all_reduce_takes_the_maximum_and_the_minimum() {
    for op in [ReduceOp::Max, ReduceOp::Min] {
        check(
            |g, count, dtype| {
                let t = tensor(g.rank(), count, dtype);
                g.all_reduce(&t, op)?.wait()?;
                Ok(t)
            },
            |_, size, count, dtype| combined(size, count, dtype, op),
        );
    }
}

#[test]
fn a_sum_does_not_depend_on_how_the_tensor_is_sliced() {
    let count = 60_001;
    for backend in BACKENDS {
        let all = ranks(backend, 3, |g| {
            let (whole, pieces) =
                (tensor(g.rank(), count, DType::F32), tensor(g.rank(), count, DType::F32));
            g.all_reduce(&whole, ReduceOp::Sum)?.wait()?;
            for start in (0..count).step_by(777) {
                let piece = pieces.narrow(0, start, 777.min(count - start))?;
                g.all_reduce(&piece, ReduceOp::Sum)?.wait()?;
            }
            Ok((bytes(&whole), bytes(&pieces)))
        });
        assert!(
            all.iter().all(|(whole, pieces)| whole == pieces && *whole == all[0].0),
            "{backend}"
        );
    }
}

#[test]
fn all_gather_concatenates_in_rank_order() {
    check(
        |g, count, dtype| {
            let out = zeros(count * g.size(), dtype);
            g.all_gather(&tensor(g.rank(), count, dtype), &out)?.wait()?;
            Ok(out)
        },
        |_, size, count, dtype| concatenated(size, count, dtype),
    );
}

#[test]
fn all_gather_works_in_place() {
    check(
        |g, count, dtype| {
            let out = zeros(count * g.size(), dtype);
            let mine = out.narrow(0, g.rank() * count, count)?;
            mine.slice_set(&tensor(g.rank(), count, dtype), 0, 0)?;
            g.all_gather(&mine, &out)?.wait()?;
            Ok(out)
        },
        |_, size, count, dtype| concatenated(size, count, dtype),
    );
}

/// Part number `rank` of `size` equal parts.
fn part(whole: Vec<u8>, rank: usize, size: usize) -> Vec<u8> {
    let len = whole.len() / size;
    whole[rank * len..(rank + 1) * len].to_vec()
}

#[test]
fn reduce_scatter_leaves_each_rank_its_part_of_the_sum() {
    check(
        |g, count, dtype| {
            let out = zeros(count, dtype);
            g.reduce_scatter(&tensor(g.rank(), count * g.size(), dtype), &out, ReduceOp::Sum)?
                .wait()?;
            Ok(out)
        },
        |rank, size, count, dtype| {
            part(combined(size, count * size, dtype, ReduceOp::Sum), rank, size)
        },
    );
}

#[test]
fn reduce_scatter_works_in_place() {
    check(
        |g, count, dtype| {
            let input = tensor(g.rank(), count * g.size(), dtype);
            let out = input.narrow(0, g.rank() * count, count)?;
            g.reduce_scatter(&input, &out, ReduceOp::Max)?.wait()?;
            Ok(out)
        },
        |rank, size, count, dtype| {
            part(combined(size, count * size, dtype, ReduceOp::Max), rank, size)
        },
    );
}

#[test]
fn broadcast_copies_the_root() {
    check(
        |g, count, dtype| {
            let t = tensor(g.rank(), count, dtype);
            g.broadcast(&t, 1)?.wait()?;
            Ok(t)
        },
        |_, _, count, dtype| bytes(&tensor(1, count, dtype)),
    );
}

#[test]
fn reduce_changes_the_root_alone() {
    check(
        |g, count, dtype| {
            let t = tensor(g.rank(), count, dtype);
            g.reduce(&t, 1, ReduceOp::Sum)?.wait()?;
            Ok(t)
        },
        |rank, size, count, dtype| match rank {
            1 => combined(size, count, dtype, ReduceOp::Sum),
            rank => bytes(&tensor(rank, count, dtype)),
        },
    );
}

#[test]
fn gather_concatenates_at_the_root() {
    check(
        |g, count, dtype| {
            let out = zeros(count * g.size(), dtype);
            let at_root = (g.rank() == 0).then_some(&out);
            g.gather(&tensor(g.rank(), count, dtype), at_root, 0)?.wait()?;
            Ok(out)
        },
        |rank, size, count, dtype| match rank {
            0 => concatenated(size, count, dtype),
            _ => bytes(&zeros(count * size, dtype)),
        },
    );
}

#[test]
fn scatter_deals_the_parts_of_the_root() {
    check(
        |g, count, dtype| {
            let out = zeros(count, dtype);
            let input = tensor(9, count * g.size(), dtype);
            g.scatter((g.rank() == 1).then_some(&input), &out, 1)?.wait()?;
            Ok(out)
        },
        |rank, size, count, dtype| part(bytes(&tensor(9, count * size, dtype)), rank, size),
    );
}

#[test]
fn all_to_all_transposes_the_parts() {
    check(
        |g, count, dtype| {
            let out = zeros(count * g.size(), dtype);
            g.all_to_all(&tensor(g.rank(), count * g.size(), dtype), &out)?.wait()?;
            Ok(out)
        },
        |rank, size, count, dtype| {
            (0..size)
                .flat_map(|src| part(bytes(&tensor(src, count * size, dtype)), rank, size))
                .collect()
        },
    );
}

#[test]
fn messages_arrive_whole_at_their_receiver() {
    check(
        |g, count, dtype| {
            let out = zeros(count, dtype);
            let sent = g.send(&tensor(g.rank(), count, dtype), (g.rank() + 1) % g.size(), 3)?;
            g.recv(&out, (g.rank() + g.size() - 1) % g.size(), 3)?.wait()?;
            sent.wait()?;
            Ok(out)
        },
        |rank, size, count, dtype| bytes(&tensor((rank + size - 1) % size, count, dtype)),
    );
}

#[test]
fn messages_are_matched_by_tag_and_then_in_order() {
    for backend in BACKENDS {
        let all = ranks(backend, 2, |g| {
            if g.rank() == 0 {
                for (value, tag) in [(1u32, 7), (2, 8), (3, 7)] {
                    g.send(&Tensor::new(&[value], &Device::Cpu)?, 1, tag)?.wait()?;
                }
                return Ok(vec![]);
            }
            let received: Vec<Tensor> = (0..3).map(|_| zeros(1, DType::U32)).collect();
            let first = g.recv(&received[0], 0, 7)?;
            let second = g.recv(&received[1], 0, 7)?;
            g.recv(&received[2], 0, 8)?.wait()?;
            second.wait()?;
            first.wait()?;
            Ok(received.iter().map(|t| t.to_vec1::<u32>().unwrap()[0]).collect())
        });
        assert_eq!(all[1], [1, 3, 2], "{backend}");
    }
}

#[test]
fn a_receive_that_nobody_waits_for_still_takes_its_message() {
    for backend in BACKENDS {
        let all = ranks(backend, 2, |g| {
            let t = zeros(1, DType::U32);
            if g.rank() == 0 {
                for value in [1u32, 2] {
                    g.send(&Tensor::new(&[value], &Device::Cpu)?, 1, 0)?.wait()?;
                }
            } else {
                drop(g.recv(&zeros(1, DType::U32), 0, 0)?);
                g.recv(&t, 0, 0)?.wait()?;
            }
            g.barrier()?;
            Ok(t.to_vec1::<u32>()?[0])
        });
        assert_eq!(all[1], 2, "{backend}");
    }
}

#[test]
fn both_ranks_may_send_large_messages_before_either_receives() {
    for backend in BACKENDS {
        let count = 3 << 20;
        let all = ranks(backend, 2, |g| {
            let (mine, theirs) = (tensor(g.rank(), count, DType::F32), zeros(count, DType::F32));
            let sent = g.send(&mine, 1 - g.rank(), 0)?;
            g.barrier()?;
            g.recv(&theirs, 1 - g.rank(), 0)?.wait()?;
            sent.wait()?;
            Ok(bytes(&theirs))
        });
        assert!(all[0] == bytes(&tensor(1, count, DType::F32)), "{backend}");
    }
}

#[test]
fn operations_in_flight_complete_in_order_whoever_waits() {
    for backend in BACKENDS {
        let all = ranks(backend, 3, |g| {
            let tensors: Vec<Tensor> =
                (0..20).map(|i| tensor(g.rank() + i, 5000 * i, DType::F32)).collect();
            let mut works: Vec<Work> =
                tensors.iter().map(|t| g.all_reduce(t, ReduceOp::Sum)).collect::<Result<_, _>>()?;
            // The last operation first: it cannot complete before the others.
            works.pop().expect("20 operations").wait()?;
            drop(works);
            Ok(tensors.iter().map(bytes).collect::<Vec<_>>())
        });
        assert!(all.iter().all(|rank| *rank == all[0]), "{backend}");
    }
}

#[test]
fn an_operation_makes_progress_while_nobody_waits_for_it() {
    for backend in BACKENDS {
        ranks(backend, 2, |g| {
            let t = tensor(g.rank(), 100_000, DType::F32);
            let before = bytes(&t);
            let work = g.all_reduce(&t, ReduceOp::Sum)?;
            let start = std::time::Instant::now();
            while bytes(&t) == before {
                assert!(start.elapsed().as_secs() < 20, "no progress");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            work.wait()
        });
    }
}

#[test]
fn other_views_of_a_tensor_in_flight_stay_usable() {
    for backend in BACKENDS {
        ranks(backend, 2, |g| {
            let whole = zeros(2000, DType::F32);
            let (left, right) = (whole.narrow(0, 0, 1000)?, whole.narrow(0, 1000, 1000)?);
            if g.rank() == 0 {
                let work = g.all_reduce(&left, ReduceOp::Sum)?;
                std::thread::sleep(std::time::Duration::from_millis(50));
                // The peer has not arrived yet. If the operation held a lock while waiting, this
                // would block for ever.
                right.slice_set(&tensor(0, 1000, DType::F32), 0, 0)?;
                g.send(&zeros(1, DType::U8), 1, 0)?.wait()?;
                return work.wait();
            }
            g.recv(&zeros(1, DType::U8), 0, 0)?.wait()?;
            g.all_reduce(&left, ReduceOp::Sum)?.wait()
        });
    }
}

#[test]
fn split_makes_groups_by_color_in_order_of_key() {
    for backend in BACKENDS {
        let all = ranks(backend, 4, |g| {
            // Ranks 0 and 2 by descending key, 1 and 3 likewise; then rank 3 leaves.
            let pair = g.split("pair", Some(g.rank() % 2), 10 - g.rank())?.expect("a group");
            let trio = g.split("trio", (g.rank() != 3).then_some(0), 0)?;
            let t = Tensor::new(&[g.rank() as u32], &Device::Cpu)?;
            pair.broadcast(&t, 0)?.wait()?;
            let members = trio.map(|trio| trio.ranks().to_vec());
            Ok((
                pair.name().to_owned(),
                pair.ranks().to_vec(),
                pair.rank(),
                t.to_vec1::<u32>()?[0],
                members,
            ))
        });
        let trio = Some(vec![0, 1, 2]);
        assert_eq!(all[0], ("pair".into(), vec![2, 0], 1, 2, trio.clone()), "{backend}");
        assert_eq!(all[1], ("pair".into(), vec![3, 1], 1, 3, trio.clone()), "{backend}");
        assert_eq!(all[2], ("pair".into(), vec![2, 0], 0, 2, trio), "{backend}");
        assert_eq!(all[3], ("pair".into(), vec![3, 1], 0, 3, None), "{backend}");
    }
}

#[test]
fn groups_of_one_world_do_not_disturb_each_other() {
    for backend in BACKENDS {
        let all = ranks(backend, 2, |g| {
            let (a, b) =
                (g.split("a", Some(0), 0)?.expect("a"), g.split("b", Some(0), 0)?.expect("b"));
            let (x, y) =
                (tensor(g.rank(), 50_000, DType::F32), tensor(g.rank() + 5, 70, DType::F32));
            // Issued in opposite orders, because the order must agree only within a group.
            let works = match g.rank() {
                0 => [a.all_reduce(&x, ReduceOp::Sum)?, b.all_reduce(&y, ReduceOp::Sum)?],
                _ => [b.all_reduce(&y, ReduceOp::Sum)?, a.all_reduce(&x, ReduceOp::Sum)?],
            };
            for work in works {
                work.wait()?;
            }
            Ok((bytes(&x), bytes(&y)))
        });
        assert!(all[0] == all[1], "{backend}");
        assert!(all[0].0 == combined(2, 50_000, DType::F32, ReduceOp::Sum), "{backend}");
    }
}

#[test]
fn bytes_of_unequal_length_are_gathered() {
    for backend in BACKENDS {
        let all = ranks(backend, 3, |g| g.all_gather_bytes(&vec![g.rank() as u8; 2 * g.rank()]));
        for rank in all {
            assert_eq!(rank, [vec![], vec![1; 2], vec![2; 4]], "{backend}");
        }
    }
}

#[test]
fn a_world_of_one_rank_runs_every_operation() {
    let g = megatron::comm::solo();
    let (t, out) = (tensor(0, 10, DType::F32), zeros(10, DType::F32));
    let expected = bytes(&t);
    g.all_reduce(&t, ReduceOp::Sum).unwrap().wait().unwrap();
    g.reduce_scatter(&t, &out, ReduceOp::Max).unwrap().wait().unwrap();
    assert_eq!(bytes(&out), expected);
    g.send(&t, 0, 0).unwrap().wait().unwrap();
    let out = zeros(10, DType::F32);
    g.recv(&out, 0, 0).unwrap().wait().unwrap();
    g.barrier().unwrap();
    assert_eq!(g.split("tp", Some(0), 0).unwrap().expect("a group").size(), 1);
    assert_eq!((bytes(&t), bytes(&out)), (expected.clone(), expected));
}
