//! `megatron bench collectives`: time and bandwidth of the operations between ranks.
//!
//! Sizes and bandwidths are defined as in NVIDIA's nccl-tests (its PERFORMANCE.md): the size is
//! that of the larger buffer; bus bandwidth is the load on the slowest link, independent of the
//! number of ranks: size / time · 2(n−1)/n for all_reduce, (n−1)/n for all_gather, reduce_scatter
//! and all_to_all, 1 for send/recv.

use std::str::FromStr;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use clap::{Args, ValueEnum};
use kernels::tensor::device::{Choice, seconds};
use kernels::tensor::host::with_bytes_mut;
use megatron::comm::{self, Communicator, Group, ReduceOp, threads};
use megatron::{Error, Result};

use super::timing::Timing;
use super::{STOP_LIMIT, machine_line};
use crate::error::{Error as CliError, Result as CliResult};
use crate::ranks::Distributed;
use crate::ranks::{self, Joined};
use crate::report::table::{Table, significant};

/// The operations that are timed.
const OPERATIONS: [&str; 5] =
    ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send/recv"];
/// Calls in the first batch, which is not timed.
const FIRST_BATCH: u64 = 3;
/// Largest growth of the number of calls from one batch to the next; the time of a batch determines
/// the size of the next.
const GROWTH: u64 = 4;
/// Number of timed batches; each has as many calls as the budget allows. Single calls would
/// mislead: a rank that arrives late finds its peers' data waiting and finishes at once.
const BATCHES: u32 = 5;

/// Time all_reduce, all_gather, reduce_scatter, all_to_all and send/recv between ranks
///
/// Starts the ranks on this machine, or joins as one rank under a launcher.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Example:
  megatron bench collectives --ranks 4 --backend tcp --sizes 4K,16M
  megatron bench collectives --ranks 8 --backend nccl --device cuda --dtype bf16")]
pub struct CollectivesArgs {
    /// Ranks [default: 2; under a launcher, its WORLD_SIZE]
    #[arg(long, value_name = "N", value_parser = number_of_ranks)]
    pub ranks: Option<usize>,
    /// How ranks exchange data
    #[arg(long, value_enum, default_value_t = Backend::Local)]
    pub backend: Backend,
    /// Device of the buffers; without `--backend nccl`, GPU buffers go through host memory
    #[arg(long, value_name = "auto|cpu|cuda|cuda:N", default_value = "cpu")]
    pub device: Choice,
    /// Bytes of the larger buffer of an operation, with the units K, M or G
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',', default_value = "4K,1M,16M,64M")]
    pub sizes: Vec<Size>,
    /// Dtype of the buffers
    #[arg(long, value_enum, default_value_t = Elements::F32)]
    pub dtype: Elements,
    /// Only operations whose names contain this
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub only: String,
    /// Approximate time spent on each operation and size
    #[arg(long, value_name = "MS", default_value_t = 300)]
    pub milliseconds: u64,
}

/// How ranks exchange data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// Shared memory between processes
    Local,
    /// TCP between processes
    Tcp,
    /// NCCL between GPUs, with `--device cuda`
    Nccl,
    /// Ranks are threads of one process
    Threads,
}

/// Types of elements to exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Elements {
    /// 32-bit floats
    F32,
    /// 16-bit brain floats, summed in 32 bits
    Bf16,
}

impl Elements {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// The name of a value as it is given on the command line.
fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or(String::new(), |value| value.get_name().to_string())
}

/// A number of bytes, written as on the command line: `4K`, `16M`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Size {
    text: String,
    bytes: usize,
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (digits, unit) =
            match text.char_indices().last().map(|(at, c)| (at, c.to_ascii_uppercase())) {
                Some((at, 'K')) => (&text[..at], 1 << 10),
                Some((at, 'M')) => (&text[..at], 1 << 20),
                Some((at, 'G')) => (&text[..at], 1 << 30),
                _ => (text, 1),
            };
        let bytes = digits
            .parse::<usize>()
            .ok()
            .and_then(|n| n.checked_mul(unit))
            .filter(|bytes| (4..=64 << 30).contains(bytes));
        let bytes = bytes.ok_or(
            "expected a number of bytes such as 4096, 4K or 16M, at least one f32 and at most 64G",
        )?;
        Ok(Self { text: text.to_string(), bytes })
    }
}

fn number_of_ranks(text: &str) -> std::result::Result<usize, String> {
    text.parse()
        .ok()
        .filter(|ranks| (2..=1024).contains(ranks))
        .ok_or_else(|| "expected 2 to 1024".to_string())
}

/// Runs the benchmark and returns the exit code to end with.
///
/// # Errors
/// If ranks cannot be started or cannot connect, or if an operation fails.
pub fn run(args: &CollectivesArgs) -> CliResult<u8> {
    if !OPERATIONS.iter().any(|operation| operation.contains(&args.only)) {
        return Err(CliError::usage(format!(
            "--only {}: no operation has this in its name; operations are {}",
            args.only,
            OPERATIONS.join(", ")
        )));
    }
    // Allocates tensors as a training process does: on huge pages, if the system provides them.
    kernels::tensor::allocator::keep_freed();
    let place = ranks::place()?;
    let (backend, ranks) = match (args.backend, &place) {
        (Backend::Threads, Some(_)) => {
            return Err(CliError::usage(
                "--backend threads runs all ranks in one process; start it without a launcher",
            ));
        }
        (Backend::Threads, None) => {
            if args.device != Choice::Cpu {
                return Err(CliError::usage(
                    "--backend threads measures the CPU's memory; leave out --device",
                ));
            }
            report(args, &on_threads(args)?);
            return Ok(0);
        }
        (Backend::Local, _) => (comm::Backend::Local, args.ranks),
        (Backend::Tcp, _) => (comm::Backend::Tcp, args.ranks),
        (Backend::Nccl, _) => (comm::Backend::Nccl, args.ranks),
    };
    let timeout = Duration::from_secs(600);
    let distributed = Distributed {
        device: args.device,
        backend,
        overlap: None,
        timeout,
        rendezvous: None,
        max_restarts: 0,
    };
    if args.backend == Backend::Nccl && args.device == Choice::Cpu {
        return Err(CliError::usage("--backend nccl needs GPU tensors: add --device cuda"));
    }
    ranks::check_device(args.device)?;
    let Some(place) = place else {
        return ranks::start(ranks.unwrap_or(2), &distributed, Some(STOP_LIMIT), None, vec![]);
    };
    if ranks.is_some_and(|ranks| ranks != place.world_size) || place.world_size < 2 {
        return Err(CliError::usage(format!(
            "{} = {} (environment) must be --ranks, and at least 2",
            place.variables.world_size, place.world_size
        )));
    }
    // Communicators for the world and for messages in both directions.
    let Joined { world, device, .. } = ranks::join(&place, &distributed, None, 3)?;
    let figures = measure(args, &world, &device)
        .map_err(|error| ranks::failed(error.into(), &world, &device))?;
    if place.rank == 0 {
        report(args, &figures);
    }
    Ok(0)
}

/// Runs the ranks as threads of this process; the results are rank 0's.
fn on_threads(args: &CollectivesArgs) -> Result<Vec<Figure>> {
    std::thread::scope(|scope| {
        let world = threads::world(args.ranks.unwrap_or(2));
        let ranks: Vec<_> = world
            .into_iter()
            .map(|rank| scope.spawn(move || measure(args, &rank, &Device::Cpu)))
            .collect();
        let mut figures = Vec::new();
        for (index, rank) in ranks.into_iter().enumerate() {
            let of_rank = rank.join().map_err(|_| Error::comm("a rank's thread panicked"))??;
            if index == 0 {
                figures = of_rank;
            }
        }
        Ok(figures)
    })
}

/// One row of the table.
struct Figure {
    operation: &'static str,
    ranks: usize,
    size: String,
    bytes: usize,
    /// Ratio of bus bandwidth to size / time.
    bus: f64,
    timing: Timing,
}

fn measure(args: &CollectivesArgs, world: &Group, device: &Device) -> Result<Vec<Figure>> {
    let ranks = world.size();
    let n = ranks as f64;
    let mut figures = Vec::new();
    for size in &args.sizes {
        let (dtype, width) = (args.dtype.dtype(), args.dtype.dtype().size_in_bytes());
        let part = (size.bytes / width).div_ceil(ranks);
        let (whole, share) = (buffer(part * ranks, dtype, device)?, buffer(part, dtype, device)?);
        let other = buffer(part * ranks, dtype, device)?;
        let mut figure = |operation: &'static str, bus, scale, call: &dyn Fn() -> Result<()>| {
            if !operation.contains(&args.only) {
                return Ok(());
            }
            let timing = time(
                world.as_ref(),
                device,
                Duration::from_millis(args.milliseconds),
                scale,
                call,
            )?;
            let bytes = width * part * ranks;
            figures.push(Figure { operation, ranks, size: size.text.clone(), bytes, bus, timing });
            Ok::<_, Error>(())
        };
        let [all_reduce, all_gather, reduce_scatter, all_to_all, send_recv] = OPERATIONS;
        figure(all_reduce, 2.0 * (n - 1.0) / n, 1.0, &|| {
            world.all_reduce(&whole, ReduceOp::Sum)?.wait()
        })?;
        figure(all_gather, (n - 1.0) / n, 1.0, &|| world.all_gather(&share, &whole)?.wait())?;
        figure(reduce_scatter, (n - 1.0) / n, 1.0, &|| {
            world.reduce_scatter(&whole, &share, ReduceOp::Sum)?.wait()
        })?;
        figure(all_to_all, (n - 1.0) / n, 1.0, &|| world.all_to_all(&whole, &other)?.wait())?;
        // A round trip between the first two ranks; one way is half of it.
        figure(send_recv, 1.0, 0.5, &|| match world.rank() {
            0 => {
                world.send(&whole, 1, 0)?.wait()?;
                world.recv(&whole, 1, 0)?.wait()
            }
            1 => {
                world.recv(&whole, 0, 0)?.wait()?;
                world.send(&whole, 0, 0)?.wait()
            }
            _ => Ok(()),
        })?;
    }
    Ok(figures)
}

/// A buffer of zeros, which remain zero in repeated sums, with all pages committed.
fn buffer(elements: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let zeros = Tensor::zeros(elements, dtype, device)?;
    if !device.is_cpu() {
        return Ok(zeros);
    }
    with_bytes_mut(&zeros, "benchmark", |bytes| {
        bytes.fill(0);
        Ok(())
    })?;
    Ok(zeros)
}

/// Times `call` on all ranks together. Returns seconds per call: means of batches that fill
/// `budget` on rank 0. On a GPU, GPU events measure the time.
fn time(
    world: &dyn Communicator,
    device: &Device,
    budget: Duration,
    scale: f64,
    call: &dyn Fn() -> Result<()>,
) -> Result<Timing> {
    let batch = |calls: u64| {
        world.barrier()?;
        let taken = seconds::<Error>(device, || (0..calls).try_for_each(|_| call()))?;
        Ok::<_, Error>(taken / calls as f64)
    };
    let calls = calls_of_a_batch(world, budget / BATCHES, batch)?;
    let mut seconds = Vec::new();
    for _ in 0..BATCHES {
        seconds.push(batch(calls)? * scale);
    }
    world.barrier()?;
    Ok(Timing::new(seconds))
}

/// How many calls fill `budget` on rank 0; `batch` returns the seconds of a batch with the given
/// number of calls. The first calls are much slower than later ones, so batches grow until one is
/// nearly long enough.
fn calls_of_a_batch(
    world: &dyn Communicator,
    budget: Duration,
    batch: impl Fn(u64) -> Result<f64>,
) -> Result<u64> {
    let mut calls = FIRST_BATCH;
    loop {
        let wanted = (budget.as_secs_f64() / batch(calls)?.max(1e-9)) as u64;
        // Rank 0 decides for all.
        let of_all = world.all_gather_bytes(&wanted.to_le_bytes())?;
        let bytes = of_all.first().and_then(|bytes| bytes.as_slice().try_into().ok());
        let wanted = u64::from_le_bytes(
            bytes.ok_or_else(|| Error::comm("rank 0 did not say how many calls to time"))?,
        );
        if wanted <= calls * GROWTH {
            return Ok(wanted.max(1));
        }
        calls *= GROWTH;
    }
}

fn report(args: &CollectivesArgs, figures: &[Figure]) {
    let (backend, dtype) = (name(args.backend), name(args.dtype));
    let ranks = figures.first().map_or(0, |figure| figure.ranks);
    crate::print_line(&machine_line());
    let place =
        if args.device == Choice::Cpu { String::new() } else { format!(" on {}", args.device) };
    crate::print_line(&format!(
        "{backend} backend, {ranks} ranks{place}, {dtype}; medians of {BATCHES} batches on rank 0"
    ));
    let mut table = Table::new(["operation", "size", "µs", "fastest", "GB/s", "bus GB/s"]);
    for figure in figures {
        let seconds = figure.timing.median();
        let rate = figure.bytes as f64 / seconds / 1e9;
        table.row([
            figure.operation.to_string(),
            figure.size.clone(),
            significant(seconds * 1e6),
            significant(figure.timing.fastest() * 1e6),
            significant(rate),
            significant(rate * figure.bus),
        ]);
    }
    crate::print_line(&format!("\n{table}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units() {
        let bytes = |text: &str| text.parse::<Size>().map(|size| size.bytes);
        assert_eq!(
            (bytes("4096"), bytes("4K"), bytes("16m"), bytes("1G")),
            (Ok(4096), Ok(4096), Ok(1 << 24), Ok(1 << 30))
        );
        for wrong in ["", "K", "4.5K", "-1", "3", "99999999999999999999", "4T", "16Mµ"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ranks_that_are_threads_time_every_operation_at_every_size() {
        let sizes = vec!["4".parse().unwrap(), "4K".parse().unwrap()];
        let args = CollectivesArgs {
            ranks: Some(3),
            backend: Backend::Threads,
            device: Choice::Cpu,
            sizes,
            dtype: Elements::F32,
            only: String::new(),
            milliseconds: 1,
        };
        let figures = on_threads(&args).unwrap();
        assert_eq!(figures.len(), 2 * OPERATIONS.len());
        assert!(figures.iter().all(|figure| figure.ranks == 3 && figure.timing.fastest() > 0.0));
        // The smallest buffer is rounded up to one f32 per rank.
        assert_eq!(figures[0].bytes, 12);
    }
}
