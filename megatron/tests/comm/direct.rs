//! Large collectives, with ranks that access each other's memory. The bits equal those of a serial
//! sum and those of the windows.

use std::time::Duration;

use candle_core::{DType, Tensor};
use kernels::tensor::host::with_bytes;
use megatron::Result;
use megatron::comm::{CommOptions, Group, ReduceOp};

use crate::collectives::{combined, concatenated};
use crate::support::{bytes, options, ranks, tensor, try_ranks_with, zeros};

/// Numbers of elements around the minimum for remote memory access (64 KiB for two ranks, more for
/// more ranks), and larger ones with uneven slices and with several pieces.
fn counts(dtype: DType, ranks: usize) -> [usize; 5] {
    let part = (if ranks == 2 { 32 << 10 } else { 64 << 10 }) / dtype.size_in_bytes();
    [
        ranks * part - 1,
        ranks * part,
        2 * ranks * part + 1,
        (1 << 20) / dtype.size_in_bytes() + 1,
        (2 << 20) / dtype.size_in_bytes() + 7,
    ]
}

/// Whether each rank may access remote memory. If one rank may not, none does.
const WHO: [fn(usize) -> bool; 3] = [|_| true, |rank| rank != 1, |_| false];

/// The results of `f` on all ranks, which must not depend on who may access memory.
fn check<R: Send + PartialEq>(
    size: usize,
    f: impl Fn(&Group) -> Result<R> + Sync,
    expected: impl Fn(usize) -> R,
) {
    for (i, may) in WHO.into_iter().enumerate() {
        let options = |rank| CommOptions {
            remote_memory_access: may(rank),
            ..options(Duration::from_secs(30))
        };
        for backend in ["threads", "local"] {
            for (rank, got) in
                try_ranks_with(backend, size, options, |g| f(&g)).into_iter().enumerate()
            {
                assert!(
                    got.unwrap() == expected(rank),
                    "{backend}: rank {rank} of {size}, choice {i}"
                );
            }
        }
    }
}

#[test]
fn all_reduce_gives_the_bits_of_a_serial_sum() {
    for (size, dtype) in [(2, DType::F32), (3, DType::BF16), (5, DType::F32)] {
        let sums = |g: &Group| {
            let sum = |count| {
                let t = tensor(g.rank(), count, dtype);
                g.all_reduce(&t, ReduceOp::Sum)?.wait()?;
                Ok(bytes(&t))
            };
            counts(dtype, size).into_iter().map(sum).collect::<Result<Vec<_>>>()
        };
        let expected: Vec<_> =
            counts(dtype, size).map(|count| combined(size, count, dtype, ReduceOp::Sum)).into();
        check(size, sums, |_| expected.clone());
    }
}

#[test]
fn all_reduce_of_a_part_of_a_buffer_leaves_the_rest_as_it_was() {
    let (before, count, after) = (1000, (1 << 19) + 3, 500);
    let whole = before + count + after;
    let parts = |g: &Group| {
        let t = tensor(g.rank(), whole, DType::F32);
        g.all_reduce(&t.narrow(0, before, count)?, ReduceOp::Sum)?.wait()?;
        Ok(bytes(&t))
    };
    let sums = combined(3, whole, DType::F32, ReduceOp::Sum);
    let summed = 4 * before..4 * (before + count);
    check(3, parts, |rank| {
        let mut expected = bytes(&tensor(rank, whole, DType::F32));
        expected[summed.clone()].copy_from_slice(&sums[summed.clone()]);
        expected
    });
}

#[test]
fn the_memory_of_a_tensor_whose_sum_failed_is_not_used_again() {
    let count = 1 << 20;
    let place = |t: &Tensor| with_bytes(t, "test", |bytes| Ok(bytes.as_ptr_range())).unwrap();
    ranks("local", 2, |g| {
        // The system's allocator reuses memory of this size only after it has freed a larger block.
        drop(zeros(4 * count, DType::F32));
        let t = tensor(g.rank(), count, DType::F32);
        g.all_reduce(&t, ReduceOp::Sum)?.wait()?;
        if g.rank() == 0 {
            let was = place(&t);
            g.all_reduce(&t, ReduceOp::Sum)?.wait().expect_err("rank 1 left");
            drop((t, g));
            let others: Vec<_> = (0..8).map(|_| zeros(count, DType::F32)).collect();
            let apart =
                |other: &Tensor| place(other).end <= was.start || was.end <= place(other).start;
            assert!(others.iter().all(apart), "the memory was handed out again");
        }
        Ok(())
    });
}

#[test]
fn reduce_scatter_leaves_each_rank_its_part_in_place_or_elsewhere() {
    for (size, dtype) in [(2, DType::F32), (3, DType::BF16), (3, DType::F32)] {
        let count = |count: usize| count / size * size;
        let parts = |g: &Group| {
            let part = |whole: usize| {
                let (input, part) = (tensor(g.rank(), count(whole), dtype), count(whole) / size);
                let apart = zeros(part, dtype);
                g.reduce_scatter(&input, &apart, ReduceOp::Sum)?.wait()?;
                let inside = input.narrow(0, g.rank() * part, part)?;
                g.reduce_scatter(&input, &inside, ReduceOp::Sum)?.wait()?;
                assert!(bytes(&inside) == bytes(&apart), "{whole} elements");
                Ok(bytes(&apart))
            };
            counts(dtype, size).into_iter().map(part).collect::<Result<Vec<_>>>()
        };
        let sums =
            counts(dtype, size).map(|whole| combined(size, count(whole), dtype, ReduceOp::Sum));
        check(size, parts, |rank| {
            sums.iter()
                .map(|sum| sum.chunks(sum.len() / size).nth(rank).unwrap().to_vec())
                .collect()
        });
    }
}

#[test]
fn all_gather_is_whole_in_place_or_elsewhere() {
    for (size, dtype) in [(2, DType::F32), (3, DType::U8)] {
        let all = |g: &Group| {
            let gather = |count: usize| {
                let (mine, apart) = (tensor(g.rank(), count, dtype), zeros(size * count, dtype));
                g.all_gather(&mine, &apart)?.wait()?;
                let inside = zeros(size * count, dtype);
                let own = inside.narrow(0, g.rank() * count, count)?;
                own.slice_set(&mine, 0, 0)?;
                g.all_gather(&own, &inside)?.wait()?;
                assert!(bytes(&inside) == bytes(&apart), "{count} elements");
                Ok(bytes(&apart))
            };
            counts(dtype, size)
                .into_iter()
                .map(|all| gather(all / size))
                .collect::<Result<Vec<_>>>()
        };
        let expected: Vec<_> =
            counts(dtype, size).map(|all| concatenated(size, all / size, dtype)).into();
        check(size, all, |_| expected.clone());
    }
}

#[test]
fn all_to_all_transposes_the_parts_in_place_or_elsewhere() {
    for (size, dtype) in [(2, DType::F32), (3, DType::BF16), (4, DType::U8)] {
        let parts = |g: &Group| {
            let exchange = |all: usize| {
                let count = all / size * size;
                let (input, apart) = (tensor(g.rank(), count, dtype), zeros(count, dtype));
                g.all_to_all(&input, &apart)?.wait()?;
                g.all_to_all(&input, &input)?.wait()?;
                assert!(bytes(&input) == bytes(&apart), "{count} elements");
                Ok(bytes(&apart))
            };
            counts(dtype, size).into_iter().map(exchange).collect::<Result<Vec<_>>>()
        };
        let whole = |rank: usize, all: usize| bytes(&tensor(rank, all / size * size, dtype));
        check(size, parts, |rank| {
            let of = |all: usize, peer: usize| {
                let whole = whole(peer, all);
                whole.chunks(whole.len() / size).nth(rank).unwrap().to_vec()
            };
            counts(dtype, size)
                .map(|all| (0..size).flat_map(|peer| of(all, peer)).collect::<Vec<u8>>())
                .into()
        });
    }
}
