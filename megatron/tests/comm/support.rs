//! Worlds of rank threads on any backend, and tensors to send between them.

use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use kernels::host::with_bytes;
use megatron::Result;
use megatron::comm::{CommOptions, Group, threads};

/// The backends that run with one thread per rank.
pub const BACKENDS: [&str; 1] = ["threads"];

/// Deadlines short enough for a test that waits for one to pass.
pub fn options(timeout: Duration) -> CommOptions {
    CommOptions { timeout, connect_timeout: Duration::from_secs(10) }
}

/// Runs `f` on one thread per rank and returns what each rank got.
pub fn try_ranks<R: Send>(
    backend: &str,
    size: usize,
    timeout: Duration,
    f: impl Fn(Group) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    assert_eq!(backend, "threads");
    let f = &f;
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            threads::world_with(size, options(timeout)).into_iter().map(|g| scope.spawn(move || f(g))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

/// As [`try_ranks`], where every rank must succeed.
pub fn ranks<R: Send>(backend: &str, size: usize, f: impl Fn(Group) -> Result<R> + Sync) -> Vec<R> {
    try_ranks(backend, size, Duration::from_secs(30), f).into_iter().map(|rank| rank.expect("a rank failed")).collect()
}

/// Every dtype that can be sent.
pub const DTYPES: [DType; 7] = [DType::U8, DType::U32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64];

/// Rank `rank`'s tensor of `count` elements: small numbers of varying size and, where the dtype allows, sign.
pub fn tensor(rank: usize, count: usize, dtype: DType) -> Tensor {
    let integer = matches!(dtype, DType::U8 | DType::U32 | DType::I64);
    let value = |i: usize| {
        let x = ((i * 31 + rank * 17 + 7) % 61) as f64;
        if integer { x } else { (x - 30.0) * 10f64.powi((i + rank) as i32 % 5 - 2) }
    };
    let values: Vec<f64> = (0..count).map(value).collect();
    Tensor::from_vec(values, count, &Device::Cpu).and_then(|t| t.to_dtype(dtype)).expect("a CPU tensor")
}

/// The bytes of a tensor.
pub fn bytes(t: &Tensor) -> Vec<u8> {
    with_bytes(t, "test", |bytes| Ok(bytes.to_vec())).expect("a contiguous tensor")
}

/// A zeroed tensor.
pub fn zeros(count: usize, dtype: DType) -> Tensor {
    Tensor::zeros(count, dtype, &Device::Cpu).expect("a CPU tensor")
}
