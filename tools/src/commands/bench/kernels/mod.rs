//! `megatron bench kernels`: times every kernel of a training step at the shapes of a preset, with
//! its share of the step.

mod cases;

use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use clap::{Args, ValueEnum};
use kernels::Isa;
use kernels::ops::attention::HeadShape;
use kernels::ops::{linear, reduce};
use kernels::peak::Instruction;
use kernels::tensor::allocator::rows_apart;
use kernels::tensor::device::{self, Choice};
use kernels::tensor::philox::fill_normal;
use megatron::Result;

use super::preset::{Preset, Shape};
use super::timing::{Timing, peak, repeat, repeat_beside};
use super::{machine_line, positive};
use crate::error::Error;
use crate::ranks;
use crate::report::table::{Table, significant};

/// Milliseconds spent on measuring the peak.
const PEAK_MS: u64 = 200;

/// Rows, columns and depth of the product that measures a GPU's peak.
const PEAK_SIZE: usize = 8192;

/// fp32 elements of the copy that measures memory bandwidth, on a CPU and on a GPU: more than their
/// caches hold.
const COPY: [usize; 2] = [1 << 24, 1 << 28];

/// Seconds of work that are queued on a GPU before waiting for it.
const BATCH_SECONDS: f64 = 5e-3;

/// Time every kernel of a training step at a preset's shapes, and one token's attention during
/// generation
#[derive(Args, Clone, Debug)]
pub struct KernelsArgs {
    /// Shapes
    #[arg(long, value_enum, default_value_t = Preset::Small)]
    pub preset: Preset,
    /// Samples per forward pass [default: the preset's]
    #[arg(long, value_name = "B", value_parser = positive)]
    pub micro_batch_size: Option<usize>,
    /// Threads [default: RAYON_NUM_THREADS, or cores]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<usize>,
    /// Approximate time spent on each kernel
    #[arg(long, value_name = "MS", default_value_t = 300)]
    pub milliseconds: u64,
    /// Dtype of weights and activations; logits, main gradients and optimizer state stay fp32
    #[arg(long, value_enum, default_value_t = Storage::Fp32)]
    pub dtype: Storage,
    /// Device to measure
    #[arg(long, value_name = "auto|cpu|cuda|cuda:N", default_value = "auto")]
    pub device: Choice,
    /// Only kernels whose names contain this
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub only: String,
}

/// A storage type, with the names of `pretrain`'s flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Storage {
    Fp32,
    Bf16,
    Fp16,
}

impl Storage {
    fn dtype(self) -> DType {
        match self {
            Self::Fp32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::Fp16 => DType::F16,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
        }
    }
}

/// Times the kernels and prints the table.
///
/// # Errors
/// If a kernel refuses its input.
pub fn run(args: &KernelsArgs) -> crate::error::Result<()> {
    let mut shape = args.preset.shape();
    shape.micro_batch = args.micro_batch_size.unwrap_or(shape.micro_batch);
    kernels::tensor::allocator::keep_freed();
    let threads = ranks::use_threads(args.threads, 1)?;
    let dtype = args.dtype.dtype();
    let device =
        args.device.open(0).map_err(|e| Error::usage(format!("--device {}: {e}", args.device)))?;
    let instruction = if device.is_cpu() { Instruction::of(dtype, Isa::detected()) } else { None };
    let mut bench = KernelBench {
        shape,
        dtype,
        instruction,
        peak: f64::INFINITY,
        copy: f64::INFINITY,
        budget: Duration::from_millis(args.milliseconds),
        only: args.only.clone(),
        total_ms: 0.0,
        table: Table::new([
            "kernel",
            "shape",
            "ms",
            "GFLOP/s",
            "of peak",
            "GB/s",
            "of copy",
            "calls a step",
            "ms a step",
        ]),
        device,
    };
    bench.measure_ceilings()?;
    bench.linear_layers()?;
    bench.attention()?;
    bench.elementwise()?;
    bench.norms()?;
    bench.vocabulary()?;
    bench.optimizer()?;
    bench.generation()?;
    if bench.table.is_empty() {
        return Err(Error::usage(format!(
            "--only {}: no kernel of {} has this in its name",
            args.only,
            args.preset.name()
        )));
    }
    bench.table.row(
        ["all of the above", "", "", "", "", "", "", "", &significant(bench.total_ms)]
            .map(str::to_string),
    );
    crate::print_line(&machine_line());
    let Shape { seq, micro_batch, .. } = shape;
    crate::print_line(&format!(
        "{}, {seq} tokens × {micro_batch} samples, {}, {}",
        args.preset.name(),
        if bench.device.is_cpu() {
            format!("{threads} threads")
        } else {
            device::name(&bench.device)
        },
        args.dtype.name()
    ));
    if let Some(instruction) = instruction {
        let isa = instruction.name();
        let best = peak(instruction, Duration::from_millis(PEAK_MS));
        crate::print_line(&format!(
            "of peak: relative to the median rate of {isa} on registers alone, measured before and \
             after each call; now {} GFLOP/s",
            significant(best)
        ));
    } else if !bench.device.is_cpu() {
        let peak = significant(bench.peak);
        crate::print_line(&format!(
            "peak: {peak} GFLOP/s, a product of {PEAK_SIZE}³ in {}",
            args.dtype.name()
        ));
    }
    let (copy, mib) = (significant(bench.copy), (4 * bench.copy_elements()) >> 20);
    crate::print_line(&format!(
        "copy: {copy} GB/s, of {mib} MiB, each byte counted when read and when written"
    ));
    crate::print_line(&format!("\n{}", bench.table));
    Ok(())
}

/// What a kernel does in one call.
#[derive(Clone, Copy)]
enum Work {
    /// Floating-point operations.
    Flops(usize),
    /// Elements of activations and weights read or written, each counted once.
    Elements(usize),
    /// The same for fp32 elements.
    Fp32(usize),
}

struct KernelBench {
    shape: Shape,
    dtype: DType,
    /// The instruction that products of the dtype use on a CPU.
    instruction: Option<Instruction>,
    /// Rate of a GPU's largest product, in 10⁹ operations per second.
    peak: f64,
    /// Rate of a large copy, read plus written, in 10⁹ bytes per second.
    copy: f64,
    budget: Duration,
    only: String,
    total_ms: f64,
    table: Table,
    device: Device,
}

impl KernelBench {
    /// Measures the ceilings that kernels are compared with, if they are not known yet.
    fn measure_ceilings(&mut self) -> Result<()> {
        let n = self.copy_elements();
        let (to, from) = (self.zeros(n)?, self.zeros(n)?);
        self.copy = (8 * n) as f64 / self.seconds(|| reduce::copy(&to, &from))? / 1e9;
        if !self.device.is_cpu() {
            let (x, w) = (self.randn(&[PEAK_SIZE; 2])?, self.randn(&[PEAK_SIZE; 2])?);
            self.peak = 2.0 * (PEAK_SIZE as f64).powi(3)
                / self.seconds(|| linear::linear(&x, &w, None))?
                / 1e9;
        }
        Ok(())
    }

    fn copy_elements(&self) -> usize {
        COPY[usize::from(self.device.is_cuda())]
    }

    /// Seconds of one call of `kernel`.
    fn seconds<R>(&self, mut kernel: impl FnMut() -> kernels::Result<R>) -> Result<f64> {
        if self.device.is_cpu() {
            return Ok(repeat(self.budget, || Ok(kernel()?))?.median());
        }
        // A GPU computes after the call has returned, so GPU events around several calls measure
        // the time.
        let mut batch = |calls: usize| -> Result<f64> {
            let all = || (0..calls).try_for_each(|_| kernel().map(drop));
            Ok(device::seconds::<kernels::Error>(&self.device, all)? / calls as f64)
        };
        batch(2)?;
        let calls = ((BATCH_SECONDS / batch(3)?) as usize).clamp(1, 2000);
        let mut seconds = Vec::new();
        let start = std::time::Instant::now();
        while seconds.len() < 3 || start.elapsed() < self.budget {
            seconds.push(batch(calls)?);
        }
        Ok(Timing::new(seconds).median())
    }

    /// Times `kernel`, which a step of one microbatch calls `calls` times, and adds a row.
    fn time<R>(
        &mut self,
        name: &str,
        shape: String,
        calls: f64,
        work: Work,
        mut kernel: impl FnMut() -> kernels::Result<R>,
    ) -> Result<()> {
        if !name.contains(&self.only) {
            return Ok(());
        }
        let rate = |n: usize, seconds: f64| n as f64 / seconds / 1e9;
        let share = |rate: f64, ceiling: f64| match ceiling {
            f64::INFINITY => String::new(),
            ceiling => format!("{:.0}%", 100.0 * rate / ceiling),
        };
        let (seconds, of_peak) = match (work, self.instruction) {
            (Work::Flops(n), Some(instruction)) => {
                let (seconds, share) =
                    repeat_beside(self.budget, instruction, n, || Ok(kernel()?))?;
                (seconds.median(), format!("{:.0}%", 100.0 * share.median()))
            }
            (Work::Flops(n), None) => {
                let seconds = self.seconds(kernel)?;
                (seconds, share(rate(n, seconds), self.peak))
            }
            _ => (self.seconds(kernel)?, String::new()),
        };
        let moved = |n: usize| {
            let rate = rate(n, seconds);
            (String::new(), significant(rate), share(rate, self.copy))
        };
        let (flops, bytes, of_copy) = match work {
            Work::Flops(n) => (significant(rate(n, seconds)), String::new(), String::new()),
            Work::Elements(n) => moved(n * self.dtype.size_in_bytes()),
            Work::Fp32(n) => moved(4 * n),
        };
        let ms = seconds * 1e3;
        self.total_ms += ms * calls;
        self.table.row([
            name.to_string(),
            shape,
            significant(ms),
            flops,
            of_peak,
            bytes,
            of_copy,
            format!("{}", (calls * 100.0).round() / 100.0),
            significant(ms * calls),
        ]);
        Ok(())
    }

    fn rows(&self) -> usize {
        self.shape.seq * self.shape.micro_batch
    }

    /// An activation `[s, b, width]` of normal random numbers.
    fn activation(&self, width: usize) -> Result<Tensor> {
        self.randn(&[self.shape.seq, self.shape.micro_batch, width])
    }

    /// An activation as activation functions allocate it, with row strides that avoid cache
    /// conflicts on CPUs.
    fn activated(&self, width: usize) -> Result<Tensor> {
        let apart = if self.device.is_cpu() {
            rows_apart(width, self.dtype.size_in_bytes())
        } else {
            width
        };
        Ok(self.activation(apart)?.narrow(2, 0, width)?)
    }

    fn randn(&self, shape: &[usize]) -> Result<Tensor> {
        Ok(self.wide_randn(shape)?.to_dtype(self.dtype)?)
    }

    /// As [`Self::randn`], in fp32: a few numbers, repeated.
    fn wide_randn(&self, shape: &[usize]) -> Result<Tensor> {
        const DRAWN: usize = 1 << 22;
        let n = shape.iter().product::<usize>();
        let mut values = vec![0.0; n.min(DRAWN)];
        fill_normal(&mut values, 1, 1, 0, 1.0);
        let drawn = Tensor::from_vec(values, n.min(DRAWN), &self.device)?;
        if n <= DRAWN {
            return Ok(drawn.reshape(shape)?);
        }
        let all = self.zeros(n)?;
        for start in (0..n).step_by(DRAWN) {
            let len = DRAWN.min(n - start);
            reduce::copy(&all.narrow(0, start, len)?, &drawn.narrow(0, 0, len)?)?;
        }
        Ok(all.reshape(shape)?)
    }

    /// Zeros in fp32.
    fn zeros(&self, shape: impl Into<candle_core::Shape>) -> Result<Tensor> {
        Ok(Tensor::zeros(shape, DType::F32, &self.device)?)
    }

    fn heads(&self) -> HeadShape {
        let s = &self.shape;
        HeadShape {
            groups: s.groups,
            heads_per_group: s.heads / s.groups,
            head_dim: s.hidden / s.heads,
        }
    }
}
