//! `megatron bench machine`: measures the machine's ceilings of compute and memory.
//!
//! Compute is the rate of the instructions that products use, on registers alone, for every
//! instruction set of the machine. It is also the best of f32 matrix products of several sizes, the
//! inner loop of nearly all of a training step. Memory is a copy between arrays much larger than
//! the caches, counted as in STREAM (McCalpin 1995): bytes read plus bytes written.

use std::time::Duration;

use candle_core::{Device, Tensor};
use clap::Args;
use kernels::ops::linear::linear;
use kernels::peak::Instruction;
use kernels::tensor::philox::fill_normal;
use rayon::prelude::*;

use super::timing::{peak, repeat};
use super::{machine_line, positive};
use crate::error::{Error, Result};
use crate::ranks;
use crate::report::table::{Table, significant};

/// Edges of the square matrix products.
const EDGES: [usize; 4] = [512, 1024, 1536, 2048];
/// f32 elements of each array that is copied: 256 MiB.
const COPY: usize = 1 << 26;

/// Measure this machine's instructions, f32 matrix product and memory bandwidth
#[derive(Args, Clone, Debug)]
pub struct MachineArgs {
    /// Threads [default: RAYON_NUM_THREADS, or cores]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<usize>,
    /// Approximate time spent on each measurement
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    pub milliseconds: u64,
}

/// Measures and prints the table: on one thread, and on all.
///
/// # Errors
/// If threads cannot be started.
pub fn run(args: &MachineArgs) -> Result<()> {
    let threads = ranks::use_threads(args.threads, 1)?;
    let budget = Duration::from_millis(args.milliseconds);
    let alone = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .map_err(|error| Error::Launch(format!("cannot start a thread: {error}")))?;
    let mut table = Table::new(["ceiling", "1 thread", &format!("{threads} threads")]);
    let mut best = [0f64; 2];
    for n in EDGES {
        let rates = [alone.install(|| gemm(n, budget))?, gemm(n, budget)?];
        best = [best[0].max(rates[0]), best[1].max(rates[1])];
        table.row([
            format!("f32 product {n}×{n}×{n}, GFLOP/s"),
            significant(rates[0]),
            significant(rates[1]),
        ]);
    }
    table.row([
        "f32 product, best, GFLOP/s".to_string(),
        significant(best[0]),
        significant(best[1]),
    ]);
    for (dtype, instruction) in Instruction::all() {
        let rates = [alone.install(|| peak(instruction, budget)), peak(instruction, budget)];
        let name = format!("{} instructions of {}, GFLOP/s", dtype.as_str(), instruction.name());
        table.row([name, significant(rates[0]), significant(rates[1])]);
    }
    let copies = [alone.install(|| copy(budget))?, copy(budget)?];
    table.row([
        "copy of 256 MiB, GB/s read + written".to_string(),
        significant(copies[0]),
        significant(copies[1]),
    ]);
    crate::print_line(&machine_line());
    crate::print_line(&format!("\n{table}"));
    Ok(())
}

/// The rates of the best f32 product and of a copy on all threads, in 10⁹ operations and bytes per
/// second, measured for a few seconds.
///
/// # Errors
/// If a kernel fails.
pub fn ceilings() -> megatron::Result<(f64, f64)> {
    let budget = Duration::from_millis(300);
    let mut best = 0.0_f64;
    for n in EDGES {
        best = best.max(gemm(n, budget)?);
    }
    Ok((best, copy(budget)?))
}

/// 10⁹ operations per second of an n × n × n product on the threads of the current pool, in the
/// fastest call.
fn gemm(n: usize, budget: Duration) -> megatron::Result<f64> {
    let mut values = vec![0.0; n * n];
    fill_normal(&mut values, 1, 1, 0, 1.0);
    let x = Tensor::from_vec(values, (n, n), &Device::Cpu)?;
    let seconds = repeat(budget, || Ok(linear(&x, &x, None)?))?.fastest();
    Ok(2.0 * (n as f64).powi(3) / seconds / 1e9)
}

/// 10⁹ bytes per second, read plus written, on the threads of the current pool, in the fastest
/// call.
fn copy(budget: Duration) -> megatron::Result<f64> {
    let (from, mut to) = (vec![1f32; COPY], vec![0f32; COPY]);
    let part = COPY.div_ceil(rayon::current_num_threads());
    let timing = repeat(budget, || {
        to.par_chunks_mut(part)
            .zip(from.par_chunks(part))
            .for_each(|(to, from)| to.copy_from_slice(from));
        std::hint::black_box(&to);
        Ok(())
    })?;
    Ok(2.0 * 4.0 * COPY as f64 / timing.fastest() / 1e9)
}
