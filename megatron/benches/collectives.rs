//! Collectives between two ranks of this machine, per backend:
//! `cargo bench --bench collectives`.
//!
//! Ranks are threads of this process. This makes no difference for `local` and `tcp`, which use
//! shared memory and sockets as between processes. Throughput counts the bytes of one rank's
//! tensor.

use std::hint::black_box;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use megatron::Result;
use megatron::comm::rendezvous::{Clients, StoreServer};
use megatron::comm::{Backend, CommOptions, Group, RankInfo, ReduceOp, Rendezvous, init, threads};

const BACKENDS: [&str; 3] = ["threads", "local", "tcp"];
const SIZES: [(&str, usize); 3] = [("4KB", 4 << 10), ("1MB", 1 << 20), ("16MB", 16 << 20)];
const OPERATIONS: [&str; 4] = ["all_reduce", "all_gather", "reduce_scatter", "send_recv"];

/// The work that both ranks do `rounds` times.
#[derive(Clone, Copy)]
struct Task {
    operation: &'static str,
    bytes: usize,
    rounds: u64,
}

fn run(g: &Group, task: Task) -> Result<Duration> {
    let zeros = |bytes: usize| Tensor::zeros(bytes / 4, DType::F32, &Device::Cpu);
    let (whole, part) = (zeros(task.bytes)?, zeros(task.bytes / 2)?);
    g.barrier()?;
    let start = Instant::now();
    for _ in 0..task.rounds {
        match task.operation {
            "all_reduce" => g.all_reduce(&whole, ReduceOp::Sum)?.wait()?,
            "all_gather" => g.all_gather(&part, &whole)?.wait()?,
            "reduce_scatter" => g.reduce_scatter(&whole, &part, ReduceOp::Sum)?.wait()?,
            // There and back, as neighbouring stages of a pipeline do.
            _ if g.rank() == 0 => {
                g.send(&whole, 1, 0)?.wait()?;
                g.recv(&whole, 1, 0)?.wait()?;
            }
            _ => {
                g.recv(&whole, 0, 0)?.wait()?;
                g.send(&whole, 0, 0)?.wait()?;
            }
        }
    }
    black_box(&whole);
    Ok(start.elapsed())
}

/// Two connected ranks.
fn world(backend: &str) -> Result<Vec<Group>> {
    if backend == "threads" {
        return Ok(threads::world(2));
    }
    let server = StoreServer::bind(
        "127.0.0.1",
        0,
        Clients { ranks: 2, one_host: true, ..Clients::default() },
    )?;
    let port = server.address().port();
    let join = |rank| -> Result<Group> {
        let info = RankInfo {
            rank,
            world_size: 2,
            local_rank: Some(rank),
            local_world_size: Some(2),
            ..RankInfo::alone()
        };
        let rendezvous = Rendezvous::Tcp { host: "127.0.0.1".into(), port, is_host: false };
        let backend = if backend == "local" { Backend::Local } else { Backend::Tcp };
        Ok(init(&info, &rendezvous, backend, CommOptions::default())?.group)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(move || join(1));
        Ok(vec![join(0)?, other.join().expect("rank 1 panicked")?])
    })
}

fn follow(g: &Group, tasks: &Receiver<Task>) -> Result<()> {
    tasks.iter().try_for_each(|task| run(g, task).map(drop))
}

fn bench(c: &mut Criterion) {
    for backend in BACKENDS {
        let mut groups = world(backend).expect("two ranks meet");
        let (second, first) = (groups.pop().expect("rank 1"), groups.pop().expect("rank 0"));
        let (tasks, received): (Sender<Task>, _) = channel();
        let other = std::thread::spawn(move || follow(&second, &received));
        for operation in OPERATIONS {
            let mut group = c.benchmark_group(format!("{operation}/{backend}"));
            group
                .sample_size(10)
                .measurement_time(Duration::from_secs(1))
                .warm_up_time(Duration::from_millis(300));
            for (name, bytes) in SIZES {
                group.throughput(Throughput::Bytes(bytes as u64));
                group.bench_function(BenchmarkId::from_parameter(name), |b| {
                    b.iter_custom(|rounds| {
                        let task = Task { operation, bytes, rounds };
                        tasks.send(task).expect("rank 1 follows");
                        run(&first, task).expect("both ranks run")
                    });
                });
            }
            group.finish();
        }
        drop(tasks);
        drop(first);
        other.join().expect("rank 1 ends").expect("rank 1 ran");
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
