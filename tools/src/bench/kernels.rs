//! `megatron bench kernels`: every kernel of a training step at the shapes of a preset, and its share of the step.

use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use clap::{Args, ValueEnum};
use kernels::attention::{HeadShape, RopeTable, attention, attention_backward, rope_inplace};
use kernels::device::{self, Choice};
use kernels::dropout::{Dropout, DropoutKey, Tokens, bias_dropout_add};
use kernels::memory::rows_apart;
use kernels::optimizer::{AdamW, adamw};
use kernels::peak::Instruction;
use kernels::philox::fill_normal;
use kernels::{Isa, activation, cross_entropy, embedding, linear, norm, reduce};
use megatron::Result;
use megatron::tensor_parallel::logits_room;

use super::preset::{Preset, Shape};
use super::timing::{Timing, peak, repeat, repeat_beside};
use super::{machine_line, positive};
use crate::error::Error;
use crate::ranks;
use crate::report::table::{Table, significant};

/// Elements of the flat ranges that the optimizer is timed on, at most; the time of a whole model follows by proportion.
const FLAT: usize = 1 << 24;

/// Time spent on the peak.
const PEAK_MS: u64 = 200;

/// Rows, columns and depth of the product that a GPU's peak is taken from.
const PEAK_SIZE: usize = 8192;

/// Elements of fp32 whose copy is the ceiling of kernels bound by memory, on a CPU and on a GPU: more than their caches hold.
const COPY: [usize; 2] = [1 << 24, 1 << 28];

/// Seconds of calls that a GPU is given before it is waited for.
const BATCH_SECONDS: f64 = 5e-3;

/// Time every kernel of a training step at a preset's shapes
#[derive(Args, Clone, Debug)]
pub struct KernelsArgs {
    /// Shapes
    #[arg(long, value_enum, default_value_t = Preset::Small)]
    pub preset: Preset,
    /// Samples of one forward pass [default: the preset's]
    #[arg(long, value_name = "B", value_parser = positive)]
    pub micro_batch_size: Option<usize>,
    /// Threads [default: RAYON_NUM_THREADS, or cores]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<usize>,
    /// Time spent on each kernel, about
    #[arg(long, value_name = "MS", default_value_t = 300)]
    pub milliseconds: u64,
    /// What weights and activations are stored in; logits, main gradients and the optimizer's state stay fp32
    #[arg(long, value_enum, default_value_t = Storage::Fp32)]
    pub dtype: Storage,
    /// What to measure on
    #[arg(long, value_name = "auto|cpu|cuda|cuda:N", default_value = "auto")]
    pub device: Choice,
    /// Only kernels whose names contain this
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub only: String,
}

/// A storage type, named as `pretrain`'s flags name it.
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
    kernels::memory::keep_freed();
    let threads = ranks::use_threads(args.threads, 1)?;
    let dtype = args.dtype.dtype();
    let device = args.device.open(0).map_err(|e| Error::usage(format!("--device {}: {e}", args.device)))?;
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
    if bench.table.is_empty() {
        return Err(Error::usage(format!(
            "--only {}: no kernel of {} has that in its name",
            args.only,
            args.preset.name()
        )));
    }
    bench.table.row(["all of the above", "", "", "", "", "", "", "", &significant(bench.total_ms)].map(str::to_string));
    crate::print_line(&machine_line());
    let Shape { seq, micro_batch, .. } = shape;
    crate::print_line(&format!(
        "{}, {seq} tokens × {micro_batch} samples, {}, {}",
        args.preset.name(),
        if bench.device.is_cpu() { format!("{threads} threads") } else { device::name(&bench.device) },
        args.dtype.name()
    ));
    if let Some(instruction) = instruction {
        let isa = instruction.name();
        let best = peak(instruction, Duration::from_millis(PEAK_MS));
        crate::print_line(&format!(
            "of peak: of what {isa} in registers alone does right before and after each call, the median; now {} GFLOP/s",
            significant(best)
        ));
    } else if !bench.device.is_cpu() {
        let peak = significant(bench.peak);
        crate::print_line(&format!("peak: {peak} GFLOP/s, a product of {PEAK_SIZE}³ in {}", args.dtype.name()));
    }
    let (copy, mib) = (significant(bench.copy), (4 * bench.copy_elements()) >> 20);
    crate::print_line(&format!("copy: {copy} GB/s, of {mib} MiB, each byte counted when read and when written"));
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
    /// The same, of fp32.
    Fp32(usize),
}

struct KernelBench {
    shape: Shape,
    dtype: DType,
    /// What products of the dtype are made of, on a CPU.
    instruction: Option<Instruction>,
    /// 10⁹ operations a second of a GPU's largest product.
    peak: f64,
    /// 10⁹ bytes a second that a large copy reads and writes.
    copy: f64,
    budget: Duration,
    only: String,
    total_ms: f64,
    table: Table,
    device: Device,
}

impl KernelBench {
    /// Times what kernels are compared with, where it is not known.
    fn measure_ceilings(&mut self) -> Result<()> {
        let n = self.copy_elements();
        let (to, from) = (self.zeros(n)?, self.zeros(n)?);
        self.copy = (8 * n) as f64 / self.seconds(|| reduce::copy(&to, &from))? / 1e9;
        if !self.device.is_cpu() {
            let (x, w) = (self.randn(&[PEAK_SIZE; 2])?, self.randn(&[PEAK_SIZE; 2])?);
            self.peak = 2.0 * (PEAK_SIZE as f64).powi(3) / self.seconds(|| linear::linear(&x, &w, None))? / 1e9;
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
        // A GPU computes after the call has returned: several calls, between two times that it notes itself.
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
                let (seconds, share) = repeat_beside(self.budget, instruction, n, || Ok(kernel()?))?;
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

    /// As activation functions make them, with rows that do not crowd a CPU's caches.
    fn activated(&self, width: usize) -> Result<Tensor> {
        let apart = if self.device.is_cpu() { rows_apart(width, self.dtype.size_in_bytes()) } else { width };
        Ok(self.activation(apart)?.narrow(2, 0, width)?)
    }

    fn randn(&self, shape: &[usize]) -> Result<Tensor> {
        Ok(self.wide_randn(shape)?.to_dtype(self.dtype)?)
    }

    /// As [`Self::randn`], in fp32: a few numbers, again and again.
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

    /// Of fp32.
    fn zeros(&self, shape: impl Into<candle_core::Shape>) -> Result<Tensor> {
        Ok(Tensor::zeros(shape, DType::F32, &self.device)?)
    }

    fn heads(&self) -> HeadShape {
        let s = &self.shape;
        HeadShape { groups: s.groups, heads_per_group: s.heads / s.groups, head_dim: s.hidden / s.heads }
    }

    fn linear_layers(&mut self) -> Result<()> {
        let Shape { layers, hidden: h, ffn, vocab, llama, .. } = self.shape;
        let up = if llama { 2 * ffn } else { ffn };
        let (calls, biased) = (layers as f64, !llama);
        type Make = fn(&KernelBench, usize) -> Result<Tensor>;
        // How x and dy are made.
        let (plain, activated): (Make, Make) = (KernelBench::activation, KernelBench::activated);
        let products = [
            ("qkv", h, self.heads().width(), [plain, plain]),
            ("attention output", h, h, [plain, plain]),
            ("mlp up", h, up, [plain, activated]),
            ("mlp down", ffn, h, [activated, plain]),
        ];
        for (what, k, n, [x, dy]) in products {
            let (x, w, dy) = (x(self, k)?, self.randn(&[n, k])?, dy(self, n)?);
            let dw = self.zeros(w.dims())?;
            let (rows, shape) = (self.rows(), format!("{}×{k}·{k}×{n}", self.rows()));
            let work = Work::Flops(2 * rows * k * n);
            // These are added to the residual stream: by the product but where ranks' sums come between.
            let joined = n == h && what != "qkv";
            let alone = if joined { 0.0 } else { calls };
            self.time(&format!("linear, {what}"), shape.clone(), alone, work, || linear::linear(&x, &w, None))?;
            if joined {
                let (bias, residual, y) = (self.randn(&[n])?, self.activation(n)?, self.activation(n)?);
                let bias = biased.then_some(&bias);
                self.time(&format!("linear and residual, {what}"), shape.clone(), calls, work, || {
                    linear::linear_add_into(&x, &w, bias, &residual, &y)
                })?;
            }
            self.time(&format!("linear_dgrad, {what}"), shape.clone(), calls, work, || linear::linear_dgrad(&dy, &w))?;
            self.time(&format!("linear_wgrad, {what}"), shape, calls, work, || linear::linear_wgrad(&dy, &x, &dw))?;
            if biased {
                let db = self.zeros(n)?;
                let work = Work::Elements(rows * n);
                self.time(&format!("bias_grad, {what}"), format!("{rows}×{n}"), calls, work, || {
                    linear::bias_grad(&dy, &db)
                })?;
            }
        }
        self.output_layer(h, vocab)
    }

    /// The products of the loss's chunks, as the head asks for them.
    fn output_layer(&mut self, k: usize, n: usize) -> Result<()> {
        let (rows, width) = logits_room(n, DType::F32, &self.device);
        let rows = rows.min(self.rows());
        let apart = |t: Tensor| -> Result<Tensor> { Ok(t.narrow(1, 0, n)?) };
        let (x, w, dx) = (self.randn(&[rows, k])?, self.randn(&[n, k])?, self.randn(&[rows, k])?);
        let (logits, dlogits) = (apart(self.zeros((rows, width))?)?, apart(self.randn(&[rows, width])?)?);
        let dw = self.zeros(w.dims())?;
        let (shape, calls) = (format!("{rows}×{k}·{k}×{n}"), self.rows() as f64 / rows as f64);
        let work = Work::Flops(2 * rows * k * n);
        let name = |product| format!("{product}, logits");
        self.time(&name("linear"), shape.clone(), calls, work, || linear::linear_into(&x, &w, None, &logits))?;
        self.time(&name("linear_dgrad"), shape.clone(), calls, work, || linear::linear_dgrad_into(&dlogits, &w, &dx))?;
        self.time(&name("linear_wgrad"), shape, calls, work, || linear::linear_wgrad(&dlogits, &x, &dw))
    }

    fn attention(&mut self) -> Result<()> {
        let (heads, Shape { layers, seq, micro_batch, llama, .. }) = (self.heads(), self.shape);
        let scale = 1.0 / (heads.head_dim as f64).sqrt();
        let qkv = self.activation(heads.width())?;
        if !["attention", "attention_backward", "rope"].iter().any(|name| name.contains(&self.only)) {
            return Ok(());
        }
        let (out, lse) = attention(&qkv, heads, scale, None)?;
        let shape = format!("{micro_batch}×{} heads×{seq}²×{}", heads.heads(), heads.head_dim);
        // A product of all queries with all keys, of which the causal half counts.
        let product = micro_batch * heads.heads() * seq * seq * heads.head_dim;
        let calls = layers as f64;
        self.time("attention", shape.clone(), calls, Work::Flops(2 * product), || attention(&qkv, heads, scale, None))?;
        self.time("attention_backward", shape, calls, Work::Flops(5 * product), || {
            attention_backward(&out, &qkv, &out, &lse, heads, scale, None)
        })?;
        if llama {
            let table = RopeTable::new(seq, heads.head_dim, 1e4, self.dtype, &self.device)?;
            let rotated = qkv.elem_count() / (heads.heads_per_group + 2) * (heads.heads_per_group + 1);
            let shape = format!("{}×{}", self.rows(), heads.width());
            self.time("rope", shape, 2.0 * calls, Work::Elements(2 * rotated), || {
                rope_inplace(&qkv, &table, heads, 0, false)
            })?;
        }
        Ok(())
    }

    fn elementwise(&mut self) -> Result<()> {
        let (rows, Shape { layers, hidden, ffn, llama, .. }) = (self.rows(), self.shape);
        let calls = layers as f64;
        let dy = self.activation(ffn)?;
        let n = rows * ffn;
        if llama {
            let (x, shape) = (self.activation(2 * ffn)?, format!("{rows}×2·{ffn}"));
            self.time("swiglu", shape.clone(), calls, Work::Elements(3 * n), || activation::swiglu(&x))?;
            self.time("swiglu_backward", shape, calls, Work::Elements(5 * n), || activation::swiglu_backward(&dy, &x))?;
        } else {
            let (x, shape) = (self.activation(ffn)?, format!("{rows}×{ffn}"));
            self.time("gelu", shape.clone(), calls, Work::Elements(2 * n), || activation::gelu(&x))?;
            self.time("gelu_backward", shape, calls, Work::Elements(3 * n), || activation::gelu_backward(&dy, &x))?;
        }
        let (x, residual, shape) = (self.activation(hidden)?, self.activation(hidden)?, format!("{rows}×{hidden}"));
        let bias = if llama { None } else { Some(self.randn(&[hidden])?) };
        let work = Work::Elements(3 * rows * hidden);
        // Presets train without dropout, one rank's products add the residual: no call of either is part of a step.
        self.time("bias_dropout_add", shape.clone(), 0.0, work, || {
            bias_dropout_add(&x, bias.as_ref(), Some(&residual), None)
        })?;
        let samples: Vec<u64> = (0..self.shape.micro_batch as u64).collect();
        let tokens = Tokens { samples: &samples, seq_offset: 0, seq_len: self.shape.seq, step_and_samples: None };
        let dropout = Dropout { p: 0.1, key: DropoutKey { seed: 1, step: 1, layer: 0, site: 0 }, tokens };
        self.time("bias_dropout_add, p = 0.1", shape, 0.0, work, || {
            bias_dropout_add(&x, bias.as_ref(), Some(&residual), Some(&dropout))
        })
    }

    fn norms(&mut self) -> Result<()> {
        let (rows, Shape { layers, hidden, llama, .. }) = (self.rows(), self.shape);
        let (x, dy, w, bias) =
            (self.activation(hidden)?, self.activation(hidden)?, self.randn(&[hidden])?, self.randn(&[hidden])?);
        let (dw, db, residual) = (self.zeros(hidden)?, self.zeros(hidden)?, self.activation(hidden)?);
        let (calls, shape, n) = ((2 * layers + 1) as f64, format!("{rows}×{hidden}"), rows * hidden);
        let (forward, backward) = (Work::Elements(2 * n), Work::Elements(4 * n));
        if llama {
            let (_, stats) = norm::rms_norm(&x, &w, 1e-5)?;
            self.time("rms_norm", shape.clone(), calls, forward, || norm::rms_norm(&x, &w, 1e-5))?;
            self.time("rms_norm_backward", shape, calls, backward, || {
                norm::rms_norm_backward(&dy, &x, &stats, &w, &dw, Some(&residual))
            })
        } else {
            let (_, stats) = norm::layer_norm(&x, &w, &bias, 1e-5)?;
            self.time("layer_norm", shape.clone(), calls, forward, || norm::layer_norm(&x, &w, &bias, 1e-5))?;
            self.time("layer_norm_backward", shape, calls, backward, || {
                norm::layer_norm_backward(&dy, &x, &stats, &w, &dw, &db, Some(&residual))
            })
        }
    }

    fn vocabulary(&mut self) -> Result<()> {
        let (rows, Shape { hidden, vocab, seq, micro_batch, .. }) = (self.rows(), self.shape);
        // Multiples of a large odd number: ids without an order that caches could use.
        let ids = (0..rows as u32).map(|i| i.wrapping_mul(2_654_435_761) % vocab as u32).collect();
        let ids = Tensor::from_vec(ids, (seq, micro_batch), &self.device)?;
        let (w, dy) = (self.randn(&[vocab, hidden])?, self.activation(hidden)?);
        let dw = self.zeros(w.dims())?;
        let (shape, n) = (format!("{rows}×{hidden}"), rows * hidden);
        self.time("embedding", shape.clone(), 1.0, Work::Elements(2 * n), || embedding::embedding(&ids, &w, 0))?;
        // Of rows of dweight, in fp32, one is read and written for every token.
        let work = Work::Elements(n + 2 * n * (4 / self.dtype.size_in_bytes()));
        self.time("embedding_backward", shape, 1.0, work, || embedding::embedding_backward(&dy, &ids, 0, &dw))?;
        let (shape, n) = (format!("{rows}×{vocab}"), rows * vocab);
        let (logits, dlogits) = (self.wide_randn(&[rows, vocab])?, self.activation(vocab)?.reshape((rows, vocab))?);
        let (max, _) = cross_entropy::row_statistics(&logits, &ids, 0, vocab)?;
        let ones = Tensor::ones(rows, DType::F32, &self.device)?;
        // A GPU makes both at once; they stand alone where the vocabulary is cut over ranks.
        let apart = if self.device.is_cpu() { 1.0 } else { 0.0 };
        self.time("row_statistics", shape.clone(), apart, Work::Fp32(n), || {
            cross_entropy::row_statistics(&logits, &ids, 0, vocab)
        })?;
        if self.dtype == DType::F32 {
            self.time("cross_entropy_backward", shape.clone(), apart, Work::Fp32(2 * n), || {
                cross_entropy::cross_entropy_backward(&logits, &max, &ones, &ids, &ones, 0, vocab)
            })?;
        } else {
            self.time("cross_entropy_backward_into", shape.clone(), apart, Work::Elements(3 * n), || {
                cross_entropy::cross_entropy_backward_into(&dlogits, &logits, &max, &ones, &ids, &ones, 0, vocab)
            })?;
        }
        if self.device.is_cpu() {
            return Ok(());
        }
        let (into, work) = match self.dtype {
            DType::F32 => (None, Work::Fp32(2 * n)),
            _ => (Some(&dlogits), Work::Elements(3 * n)),
        };
        self.time("cross_entropy_at_once", shape, 1.0, work, || {
            cross_entropy::cross_entropy_at_once(&logits, into, &ids, &ones, 0, vocab)
        })
    }

    fn optimizer(&mut self) -> Result<()> {
        let Shape { layers, hidden, ffn, vocab, llama, .. } = self.shape;
        let mlp = if llama { 3 * ffn } else { 2 * ffn };
        let params = layers * hidden * (self.heads().width() + hidden + mlp) + vocab * hidden;
        let n = params.min(FLAT);
        let g = self.wide_randn(&[n])?;
        let (m, v) = (g.zeros_like()?, g.zeros_like()?);
        // What bf16 weights lack of fp32 is kept by itself.
        let p =
            if self.dtype == DType::BF16 { Tensor::zeros(n, DType::I16, g.device())? } else { self.wide_randn(&[n])? };
        let (calls, shape) = (params as f64 / n as f64, n.to_string());
        let rule =
            AdamW { lr: 3e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, step: 1, grad_scale: 1.0 };
        let weight = (self.dtype != DType::F32).then(|| self.randn(&[n])).transpose()?;
        self.time("sum_of_squares", shape.clone(), calls, Work::Fp32(n), || reduce::sum_of_squares(&g))?;
        self.time("adamw", shape.clone(), calls, Work::Fp32(7 * n), || adamw(&p, weight.as_ref(), &g, &m, &v, &rule))?;
        let (m16, v16) = (m.to_dtype(DType::BF16)?, v.to_dtype(DType::BF16)?);
        self.time("adamw_moments_in_bf16", shape.clone(), 0.0, Work::Fp32(5 * n), || {
            adamw(&p, weight.as_ref(), &g, &m16, &v16, &rule)
        })?;
        self.time("zero", shape, calls, Work::Fp32(n), || reduce::zero(&g))
    }
}
