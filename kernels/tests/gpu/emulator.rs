//! The emulator itself finds mistakes in wrong kernels: `cuda/emulator_cases.cu`.

use candle_core::{DType, Device, Tensor};
use kernels::tensor::gpu::Gpu;
use kernels::tensor::gpu::emulated::{Order, run};

const FILE: &str = "emulator_cases";

/// Launches a kernel with parameters (float *out, uint32_t n), with blocks of `threads`. Returns
/// the values that it wrote.
fn launch(
    name: &str,
    order: Order,
    blocks: u32,
    threads: u32,
    shared: u32,
) -> kernels::Result<Vec<f32>> {
    let like = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
    run(order, || {
        let gpu = Gpu::of(&like, "test")?;
        let n = blocks * threads;
        let (out, pointer) = gpu.output(n as usize, DType::F32, "test")?;
        gpu.launch(FILE, name, [blocks, 1, 1], threads, shared, |args| {
            args.ptr(pointer).u32(n);
        })?;
        Ok(out.to_vec1()?)
    })
}

const ORDERS: [Order; 4] = [Order::Forward, Order::Backward, Order::Shuffled(7), Order::WarpByWarp];

#[track_caller]
fn assert_fails(name: &str, shared: u32, message: &str) {
    for order in ORDERS {
        let error =
            launch(name, order, 1, 64, shared).expect_err("a kernel that is wrong").to_string();
        assert!(error.contains(message), "{name}: {error}");
    }
}

#[test]
fn sums_by_shuffles_barriers_and_votes_are_right_in_every_order() {
    for order in ORDERS {
        for threads in [32, 64, 256, 1024] {
            let sum = (threads * (threads - 1) / 2) as f32;
            assert_eq!(
                launch("block_sum", order, 3, threads, 4 * 32).unwrap(),
                vec![sum; 3 * threads as usize]
            );
        }
    }
}

#[test]
fn lanes_of_one_warp_may_go_different_ways() {
    for order in ORDERS {
        let got = launch("halves_of_a_warp", order, 1, 32, 0).unwrap();
        assert_eq!(got, (0..32).map(|l| if l < 16 { 120.0 } else { 376.0 }).collect::<Vec<f32>>());
    }
}

#[test]
fn named_barriers_join_parts_of_a_block() {
    for order in ORDERS {
        let got = launch("producer_and_consumer", order, 1, 64, 0).unwrap();
        assert_eq!(got[32..], (0..32).map(|i| (100 + (i + 1) % 32) as f32).collect::<Vec<f32>>());
    }
}

#[test]
fn a_missing_barrier_shows() {
    let results = ORDERS.map(|order| launch("missing_barrier", order, 1, 64, 0).unwrap());
    let right: Vec<f32> = (0..64).map(|i| ((i + 1) % 64) as f32).collect();
    assert!(
        results.iter().any(|got| *got != right),
        "all orders gave what a barrier would have given"
    );
    assert!(
        results.iter().flatten().any(|v| v.is_nan()),
        "shared memory holds NaN before it is written"
    );
}

#[test]
fn threads_that_miss_a_barrier_are_an_error() {
    assert_fails("barrier_for_some", 0, "__syncthreads");
    assert_fails("shuffle_without_a_lane", 0, "__shfl_sync");
    assert_fails("mask_without_oneself", 0, "in which it is not");
}

#[test]
fn writing_behind_shared_memory_is_an_error() {
    assert_fails("behind_shared_memory", 64, "writes behind its 64 bytes");
    assert_fails("behind_shared_memory", 0, "no dynamic shared memory");
}

#[test]
fn wrong_arguments_are_an_error() {
    let like = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
    let gpu = Gpu::of(&like, "test").unwrap();
    let (_out, pointer) = gpu.output(1, DType::F32, "test").unwrap();
    let grid = [1, 1, 1];
    let launch = |wide: bool| {
        gpu.launch(FILE, "block_sum", grid, 32, 4 * 32, |args| {
            if wide {
                args.ptr(pointer).u64(1)
            } else {
                args.ptr(pointer)
            };
        })
    };
    for wide in [true, false] {
        let error = launch(wide).expect_err("other parameters").to_string();
        assert!(error.contains("its parameters have [8, 4]"), "{error}");
    }
    let error =
        gpu.launch(FILE, "nothing", grid, 32, 0, |_| ()).expect_err("no such kernel").to_string();
    assert!(error.contains("no such kernel in cuda/emulator_cases.cu"), "{error}");
}
