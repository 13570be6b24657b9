//! Collectives and messages over shared memory: block boundaries, many groups, and groups without a
//! window.

use std::time::Duration;

use candle_core::DType;
use megatron::comm::{CommOptions, Group, ReduceOp};
use megatron::{Error, Result};

use crate::collectives::{combined, concatenated};
use crate::support::{BACKENDS, bytes, options, ranks, tensor, try_ranks_with, zeros};

/// Bytes of a block.
const BLOCK: usize = 512 << 10;

/// Element counts around block boundaries.
fn borders(dtype: DType) -> [usize; 5] {
    let block = BLOCK / dtype.size_in_bytes();
    [block - 1, block, block + 1, 2 * block, 3 * block + 5]
}

/// Checks each rank's result of `f` around block boundaries, for several numbers of ranks.
fn check(
    f: impl Fn(&Group, usize, DType) -> Result<Vec<u8>> + Sync,
    expected: impl Fn(usize, usize, usize, DType) -> Vec<u8>,
) {
    for dtype in [DType::F32, DType::BF16, DType::U8] {
        for size in [1, 2, 3, 5] {
            let expected: Vec<Vec<Vec<u8>>> = (0..size)
                .map(|rank| {
                    borders(dtype)
                        .into_iter()
                        .map(|count| expected(rank, size, count, dtype))
                        .collect()
                })
                .collect();
            for backend in BACKENDS {
                // Otherwise tensors of this size use remote memory access.
                let options = |_| CommOptions {
                    remote_memory_access: false,
                    ..options(Duration::from_secs(30))
                };
                let all = try_ranks_with(backend, size, options, |g| {
                    borders(dtype).into_iter().map(|count| f(&g, count, dtype)).collect()
                });
                let all: Vec<Vec<Vec<u8>>> =
                    all.into_iter().map(|rank| rank.expect("a rank failed")).collect();
                assert!(all == expected, "{backend}: {size} ranks, {dtype:?}");
            }
        }
    }
}

#[test]
fn all_reduce_gives_the_same_bits_around_the_borders_of_blocks() {
    check(
        |g, count, dtype| {
            let t = tensor(g.rank(), count, dtype);
            g.all_reduce(&t, ReduceOp::Sum)?.wait()?;
            Ok(bytes(&t))
        },
        |_, size, count, dtype| combined(size, count, dtype, ReduceOp::Sum),
    );
}

#[test]
fn reduce_scatter_in_place_gives_the_same_bits_around_the_borders_of_blocks() {
    check(
        |g, count, dtype| {
            let input = tensor(g.rank(), count / g.size() * g.size(), dtype);
            let part = count / g.size();
            let output = input.narrow(0, g.rank() * part, part)?;
            g.reduce_scatter(&input, &output, ReduceOp::Sum)?.wait()?;
            Ok(bytes(&output))
        },
        |rank, size, count, dtype| {
            let whole = combined(size, count / size * size, dtype, ReduceOp::Sum);
            whole.chunks(whole.len() / size).nth(rank).unwrap().to_vec()
        },
    );
}

#[test]
fn copies_are_whole_around_the_borders_of_blocks() {
    check(
        |g, count, dtype| {
            let (mine, all) = (tensor(g.rank(), count, dtype), zeros(count * g.size(), dtype));
            g.all_gather(&mine, &all)?.wait()?;
            let dealt = zeros(count, dtype);
            g.scatter((g.rank() == 0).then_some(&all), &dealt, 0)?.wait()?;
            assert!(bytes(&dealt) == bytes(&mine), "scatter");
            g.broadcast(&dealt, g.size() - 1)?.wait()?;
            assert!(bytes(&dealt) == bytes(&tensor(g.size() - 1, count, dtype)), "broadcast");
            // After as many rounds as there are ranks, everything is back at its start.
            let back = zeros(count * g.size(), dtype);
            g.all_to_all(&all, &back)?.wait()?;
            let expected = bytes(&mine).repeat(g.size());
            assert!(bytes(&back) == expected, "all_to_all");
            let gathered = zeros(count * g.size(), dtype);
            g.gather(&mine, (g.rank() == 0).then_some(&gathered), 0)?.wait()?;
            assert!(g.rank() > 0 || bytes(&gathered) == bytes(&all), "gather");
            assert!(g.all_gather_bytes(&bytes(&mine))?.concat() == bytes(&all), "all_gather_bytes");
            Ok(bytes(&all))
        },
        |_, size, count, dtype| concatenated(size, count, dtype),
    );
}

#[test]
fn messages_in_flight_keep_their_bytes_apart() {
    for backend in BACKENDS {
        let counts = [7, 40_000, BLOCK / 4, 1_000_003, 9_000];
        ranks(backend, 2, |g| {
            for round in 0..3 {
                for (i, count) in counts.into_iter().enumerate() {
                    g.send(&tensor(10 * g.rank() + i + round, count, DType::F32), 1 - g.rank(), 0)?
                        .wait()?;
                }
                for (i, count) in counts.into_iter().enumerate() {
                    let t = zeros(count, DType::F32);
                    g.recv(&t, 1 - g.rank(), 0)?.wait()?;
                    let expected = tensor(10 * (1 - g.rank()) + i + round, count, DType::F32);
                    assert!(
                        bytes(&t) == bytes(&expected),
                        "{backend}: message {i} of round {round}"
                    );
                }
            }
            Ok(())
        });
    }
}

#[test]
fn messages_beyond_the_shared_memory_arrive_all_the_same() {
    for backend in ["threads", "local"] {
        ranks(backend, 32, |g| {
            // A rank's heap for messages has 128 MB in a world of 32.
            if g.rank() > 1 {
                return g.barrier();
            }
            let count = 24 << 20;
            if g.rank() == 0 {
                let sent = zeros(count, DType::U8);
                for _ in 0..8 {
                    g.send(&sent, 1, 0)?.wait()?;
                }
                return g.barrier();
            }
            for _ in 0..8 {
                let t = tensor(1, 1000, DType::U8);
                let whole = candle_core::Tensor::cat(&[&t, &zeros(count - 1000, DType::U8)], 0)?;
                g.recv(&whole, 0, 0)?.wait()?;
                assert!(bytes(&whole).iter().all(|byte| *byte == 0));
            }
            g.barrier()
        });
    }
}

/// The result on a group's ranks of adding `count` elements.
fn sum(g: &Group, count: usize) -> Result<Vec<u8>> {
    let t = tensor(g.rank(), count, DType::F32);
    g.all_reduce(&t, ReduceOp::Sum)?.wait()?;
    Ok(bytes(&t))
}

#[test]
fn many_groups_work_at_once() {
    for backend in BACKENDS {
        ranks(backend, 4, |g| {
            // Halves in every combination. Each group has its own thread.
            let half = |i: usize| g.split(&format!("half{i}"), Some((g.rank() >> (i % 2)) & 1), 0);
            let groups: Vec<Group> =
                (0..6).map(|i| Ok(half(i)?.expect("a group"))).collect::<Result<_>>()?;
            std::thread::scope(|scope| {
                let run = |group: &Group| {
                    (0..20).try_for_each(|i| {
                        let count = 1 + i * 7001;
                        assert!(
                            sum(group, count)? == combined(2, count, DType::F32, ReduceOp::Sum),
                            "{backend}"
                        );
                        Ok::<_, Error>(())
                    })
                };
                let threads: Vec<_> =
                    groups.iter().map(|group| scope.spawn(move || run(group))).collect();
                threads.into_iter().try_for_each(|thread| thread.join().unwrap())
            })
        });
    }
}

#[test]
fn groups_beyond_the_number_of_windows_work() {
    for backend in ["threads", "local"] {
        let expected = combined(3, 1000, DType::F32, ReduceOp::Sum);
        ranks(backend, 3, |g| {
            let split = |i: usize| Ok(g.split(&format!("group{i}"), Some(0), 0)?.expect("a group"));
            let groups: Vec<Group> = (0..70).map(split).collect::<Result<_>>()?;
            for group in &groups {
                assert!(sum(group, 1000)? == expected, "{backend}");
            }
            Ok(())
        });
    }
}

#[test]
fn windows_of_dropped_groups_serve_new_ones() {
    for backend in ["threads", "local"] {
        let expected = combined(3, 70_000, DType::F32, ReduceOp::Sum);
        ranks(backend, 3, |g| {
            for i in 0..150 {
                let group =
                    g.split(&format!("group{i}"), Some(0), g.rank() * i % 3)?.expect("a group");
                let t = tensor(group.ranks()[group.rank()], 70_000, DType::F32);
                group.broadcast(&t, 1)?.wait()?;
                assert!(
                    bytes(&t) == bytes(&tensor(group.ranks()[1], 70_000, DType::F32)),
                    "{backend}"
                );
                if g.rank() == i % 3 {
                    // This rank reads and leaves late.
                    std::thread::sleep(std::time::Duration::from_micros(300));
                }
            }
            assert!(sum(&g, 70_000)? == expected);
            Ok(())
        });
    }
}
