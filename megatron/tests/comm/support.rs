//! Worlds of rank threads on any backend, and tensors to send between them.

use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use kernels::tensor::host::with_bytes;
use megatron::Result;
use megatron::comm::rendezvous::{Clients, StoreServer};
use megatron::comm::{Backend, CommOptions, Group, RankInfo, Rendezvous, init, threads};

/// The backends that run with one thread per rank.
pub const BACKENDS: [&str; 3] = ["threads", "local", "tcp"];

/// Deadlines that are short enough for tests that wait for a timeout.
pub fn options(timeout: Duration) -> CommOptions {
    CommOptions { timeout, connect_timeout: Duration::from_secs(10), ..CommOptions::default() }
}

/// Rank `rank` of `size`, all on this host.
pub fn info(rank: usize, size: usize) -> RankInfo {
    let here = RankInfo { host: "this-host".into(), ..RankInfo::alone() };
    RankInfo {
        rank,
        world_size: size,
        local_rank: Some(rank),
        local_world_size: Some(size),
        ..here
    }
}

/// Runs `f` on one thread per rank and returns each rank's result. `local` ranks meet in a folder,
/// `tcp` ranks at a server.
pub fn try_ranks<R: Send>(
    backend: &str,
    size: usize,
    timeout: Duration,
    f: impl Fn(Group) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    try_ranks_with(backend, size, |_| options(timeout), f)
}

/// As [`try_ranks`], with separate options for each rank; `threads` uses those of rank 0.
pub fn try_ranks_with<R: Send>(
    backend: &str,
    size: usize,
    options: impl Fn(usize) -> CommOptions + Sync,
    f: impl Fn(Group) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let dir = tempfile::tempdir().expect("a folder");
    let server = StoreServer::bind(
        "127.0.0.1",
        0,
        Clients { ranks: size, one_host: true, ..Clients::default() },
    )
    .expect("a server");
    let (f, options, dir) = (&f, &options, dir.path().to_path_buf());
    let join = |rank: usize| -> Result<Group> {
        let (rendezvous, backend) = match backend {
            "local" => (Rendezvous::File { dir: dir.clone() }, Backend::Local),
            _ => {
                let port = server.address().port();
                (Rendezvous::Tcp { host: "127.0.0.1".into(), port, is_host: false }, Backend::Tcp)
            }
        };
        Ok(init(&info(rank, size), &rendezvous, backend, options(rank))?.group)
    };
    let mut threads =
        (backend == "threads").then(|| threads::world_with(size, options(0)).into_iter());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let (group, join) = (threads.as_mut().and_then(Iterator::next), &join);
                scope.spawn(move || f(group.map_or_else(|| join(rank), Ok)?))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

/// As [`try_ranks`], but every rank must succeed.
pub fn ranks<R: Send>(backend: &str, size: usize, f: impl Fn(Group) -> Result<R> + Sync) -> Vec<R> {
    try_ranks(backend, size, Duration::from_secs(30), f)
        .into_iter()
        .map(|rank| rank.expect("a rank failed"))
        .collect()
}

/// Every dtype that can be sent.
pub const DTYPES: [DType; 7] =
    [DType::U8, DType::U32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64];

/// Rank `rank`'s tensor of `count` elements: small numbers of varying size and, if the dtype
/// allows, sign.
pub fn tensor(rank: usize, count: usize, dtype: DType) -> Tensor {
    let integer = matches!(dtype, DType::U8 | DType::U32 | DType::I64);
    let value = |i: usize| {
        let x = ((i * 31 + rank * 17 + 7) % 61) as f64;
        if integer { x } else { (x - 30.0) * 10f64.powi((i + rank) as i32 % 5 - 2) }
    };
    let values: Vec<f64> = (0..count).map(value).collect();
    Tensor::from_vec(values, count, &Device::Cpu)
        .and_then(|t| t.to_dtype(dtype))
        .expect("a CPU tensor")
}

/// The bytes of a tensor.
pub fn bytes(t: &Tensor) -> Vec<u8> {
    with_bytes(t, "test", |bytes| Ok(bytes.to_vec())).expect("a contiguous tensor")
}

/// A zeroed tensor.
pub fn zeros(count: usize, dtype: DType) -> Tensor {
    Tensor::zeros(count, dtype, &Device::Cpu).expect("a CPU tensor")
}
