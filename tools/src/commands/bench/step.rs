//! `megatron bench step`: whole training steps on random tokens, over any layout.
//!
//! The last line before the table has the format of `tools/bench/torch_gpt.py`, which trains the
//! same shapes in PyTorch.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use clap::Args;
use kernels::tensor::philox::philox4x32;
use megatron::comm::{Group, RankInfo, ReduceOp};
use megatron::config::{Offload, Recompute, RunConfig};
use megatron::data::SampleSource;
use megatron::train::{self, Profile, Profiler, Sources, Trainer, peak_memory_of};
use models::Gpt;

use super::preset::{Preset, flops_per_token, matrix_params};
use super::timing::Timing;
use super::{STOP_LIMIT, machine_line, positive};
use crate::cli::flags::{MomentFlags, ParallelFlags, PrecisionFlags, RecomputeFlags};
use crate::cli::{Gathered, Resolved, resolve};
use crate::error::Result;
use crate::ranks::{self, Joined};
use crate::report::profile::render;
use crate::report::table::{Table, significant};

/// Steps before the first timed one, as in the PyTorch script.
const WARM_UP: usize = 3;
/// Steps that `--profile` records after the timed ones, so that it does not disturb them.
const PROFILED: usize = 4;

/// Time training steps of a preset on random tokens
///
/// Starts the ranks of the layout on this machine, as `pretrain` does, or joins as one rank under a
/// launcher.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  megatron bench step --preset gpt2-124m --bf16
  megatron bench step --data-parallel-size 2 --threads 1
  megatron bench step --pipeline-model-parallel-size 2 --global-batch-size 32
  megatron bench step --bf16 --profile")]
pub struct StepArgs {
    /// Model and microbatch
    #[arg(long, value_enum, default_value_t = Preset::Small)]
    pub preset: Preset,
    /// Timed steps, after 3 warm-up steps
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = positive)]
    pub steps: usize,
    /// Samples per forward pass of one replica [default: the preset's]
    #[arg(long, value_name = "B", value_parser = positive)]
    pub micro_batch_size: Option<usize>,
    /// Samples per step over all replicas [default: MBS·dp]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub global_batch_size: Option<usize>,
    /// Threads of every rank [default: RAYON_NUM_THREADS, or cores / ranks]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<usize>,
    /// Record and launch forward and backward of a microbatch as a CUDA graph
    #[arg(long)]
    pub enable_cuda_graph: bool,
    /// Record 4 more steps: a trace of every rank for Perfetto or chrome://tracing, and a table of
    /// where time is spent
    #[arg(long)]
    pub profile: bool,
    /// Folder of the traces
    #[arg(long, value_name = "DIR", default_value = "profile", requires = "profile")]
    pub profile_dir: PathBuf,
    #[command(flatten)]
    pub recompute: RecomputeFlags,
    #[command(flatten)]
    pub precision: PrecisionFlags,
    #[command(flatten)]
    pub moments: MomentFlags,
    #[command(flatten)]
    pub parallel: ParallelFlags,
}

/// Runs the benchmark and returns the exit code to end with.
///
/// # Errors
/// If the layout does not fit the preset or the world, or a step fails.
pub fn run(args: &StepArgs, origins: BTreeMap<String, String>) -> Result<u8> {
    let place = ranks::place()?;
    let resolved = resolve(&settings(args, origins)?, place.as_ref())?;
    let world_size = resolved.run.parallel.world_size();
    match place {
        Some(place) => rank(args, resolved, &place),
        None if world_size == 1 => {
            ranks::check_features(resolved.distributed.device, &resolved.run)?;
            rank(args, resolved, &RankInfo::alone())
        }
        None => {
            ranks::check_number(&resolved.run.parallel)?;
            ranks::check_device(resolved.distributed.device)?;
            ranks::check_features(resolved.distributed.device, &resolved.run)?;
            ranks::start(world_size, &resolved.distributed, Some(STOP_LIMIT), None, vec![])
        }
    }
}

/// The preset's settings under those of the command line.
fn settings(args: &StepArgs, mut origins: BTreeMap<String, String>) -> Result<Gathered> {
    let timed = WARM_UP + args.steps;
    let mut flags = args.preset.flags((timed + if args.profile { PROFILED } else { 0 }) as u64)?;
    if args.profile {
        flags.logging.profile = true;
        flags.logging.profile_dir = args.profile_dir.clone();
        flags.logging.profile_step_start = Some((timed + 1) as u64);
        flags.logging.profile_step_end = Some((timed + 1 + PROFILED) as u64);
    }
    flags.parallel = args.parallel.clone();
    flags.training.recompute = args.recompute.clone();
    flags.training.precision = args.precision.clone();
    flags.optimizer.moments = args.moments.clone();
    flags.training.enable_cuda_graph = args.enable_cuda_graph;
    flags.training.micro_batch_size = args.micro_batch_size.or(flags.training.micro_batch_size);
    flags.training.global_batch_size = args.global_batch_size;
    let preset = format!("--preset {}", args.preset.name());
    for key in [
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "seq_length",
        "micro_batch_size",
    ] {
        origins.entry(key.to_string()).or_insert_with(|| preset.clone());
    }
    Ok(Gathered::of(flags, origins))
}

/// Runs this rank's part.
fn rank(args: &StepArgs, resolved: Resolved, place: &RankInfo) -> Result<u8> {
    kernels::tensor::allocator::keep_freed();
    let Resolved { mut run, vocab_size, distributed, .. } = resolved;
    run.model.vocab_size = vocab_size.unwrap_or(args.preset.shape().vocab);
    let communicators = train::most_communicators(&run.parallel)?;
    let Joined { world, device, threads } =
        ranks::join(place, &distributed, args.threads, communicators)?;
    if let Some(why) =
        ranks::issued_late(&distributed, &device, communicators).filter(|_| place.rank == 0)
    {
        crate::print_line(&why);
    }
    let measured = measure(&run, (WARM_UP + args.steps) as u64, world.clone(), &device)
        .map_err(|error| ranks::failed(error.into(), &world, &device))?;
    if place.rank == 0 {
        report(args.preset, &run, threads, &device, &measured);
    }
    if let Some(profile) = &measured.profile {
        crate::print_line(&render(profile));
    }
    Ok(0)
}

/// Measurements of the steps of a run.
struct Measured {
    steps: Timing,
    /// Largest memory use of a rank, in bytes: of its tensors on a GPU, its resident set on a CPU.
    peak_memory: f64,
    loss: f64,
    /// Profile of the steps after the timed ones, on rank 0.
    profile: Option<Profile>,
}

/// Trains for the warm-up and timed steps (`timed` in total), then for the steps that the settings
/// record in a profile.
fn measure(
    run: &RunConfig,
    timed: u64,
    world: Group,
    device: &Device,
) -> megatron::Result<Measured> {
    let model = Gpt::of(run, device)?;
    let tokens =
        RandomTokens { vocab: run.model.vocab_size as u32, seq_length: run.model.seq_length };
    let sources = Sources {
        train: Arc::new(tokens),
        valid: None,
        test: None,
        document_ends: None,
        fingerprint: "random".to_string(),
    };
    let mut trainer = Trainer::new(run, &model, Arc::clone(&world), &sources, device)?;
    let mut seconds = Vec::new();
    let mut loss = f64::NAN;
    for step in 1..=timed {
        for metrics in trainer.advance(step == timed)? {
            loss = metrics.lm_loss;
            if metrics.iteration > WARM_UP as u64 {
                seconds.push(metrics.elapsed_ms / 1e3);
            }
        }
    }
    let memory = Tensor::new(&[peak_memory_of(device).allocated as f64], &Device::Cpu)?;
    world.all_reduce(&memory, ReduceOp::Max)?.wait()?;
    let mut profiler = Profiler::new(run.logging.profile.as_ref());
    for _ in timed..run.training.train_iters {
        profiler.before(&trainer)?;
        trainer.advance(true)?;
        profiler.after();
    }
    let profile = profiler.finish(&trainer)?;
    Ok(Measured {
        steps: Timing::new(seconds),
        peak_memory: memory.to_vec1::<f64>()?[0],
        loss,
        profile,
    })
}

fn report(preset: Preset, run: &RunConfig, threads: usize, device: &Device, measured: &Measured) {
    let p = &run.parallel;
    let tokens = (run.training.global_batch_size * run.model.seq_length) as f64;
    let rate = tokens / measured.steps.median();
    let tflops = rate * flops_per_token(&run.model) / 1e12;
    let gib = measured.peak_memory / f64::from(1 << 30);
    let mut layout = format!(
        "tp{}·pp{}·dp{}",
        p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.data_parallel_size
    );
    if p.context_parallel_size > 1 {
        layout.push_str(&format!("·cp{}", p.context_parallel_size));
    }
    let settings = [
        (p.sequence_parallel, "·sp"),
        (p.delay_wgrad_compute, "·delayed-wgrad"),
        (p.zero_stage == 1, "·zero1"),
        (p.zero_stage == 2, "·zero2"),
        (p.zero_stage == 3, "·zero3"),
        (run.training.recompute == Recompute::Selective, "·selective-recompute"),
        (matches!(run.training.recompute, Recompute::Full { .. }), "·full-recompute"),
        (run.training.distribute_saved_activations, "·distributed-activations"),
        (run.training.activation_offload == Offload::Cpu, "·activations-cpu"),
        (matches!(run.training.activation_offload, Offload::Nvme(_)), "·activations-nvme"),
    ];
    for (on, name) in settings {
        layout.push_str(if on { name } else { "" });
    }
    if p.extra_warmup > 0 {
        layout.push_str(&format!("·extra-warmup{}", p.extra_warmup));
    }
    let (kind, on) = if device.is_cpu() {
        ("cpu", String::new())
    } else {
        ("cuda", format!("; {}", kernels::tensor::device::name(device)))
    };
    crate::print_line(&format!("{}{on}", machine_line()));
    crate::print_line(&format!(
        "megatron {} {kind} {} {} layout={layout} world={} threads={threads} params={:.1}M tokens_per_second={rate:.0} \
         tflops={tflops:.4} peak_gib={gib:.2} loss={:.3}",
        env!("CARGO_PKG_VERSION"),
        preset.name(),
        run.training.precision,
        p.world_size(),
        matrix_params(&run.model) as f64 / 1e6,
        measured.loss,
    ));
    let ms = |seconds: f64| significant(seconds * 1e3);
    let mut table = Table::new([
        "step",
        "ranks × threads",
        "MBS",
        "GBS",
        "median ms",
        "fastest",
        "slowest",
        "tokens/s",
        "GFLOP/s",
        "peak GiB",
    ]);
    table.row([
        format!("{} {} {layout}", preset.name(), run.training.precision),
        format!("{} × {threads}", p.world_size()),
        run.training.micro_batch_size.to_string(),
        run.training.global_batch_size.to_string(),
        ms(measured.steps.median()),
        ms(measured.steps.fastest()),
        ms(measured.steps.slowest()),
        format!("{rate:.0}"),
        significant(tflops * 1e3),
        format!("{gib:.2}"),
    ]);
    crate::print_line(&format!("\n{table}"));
}

/// Uniformly random tokens; a sample is a function of its index.
struct RandomTokens {
    vocab: u32,
    seq_length: usize,
}

impl SampleSource for RandomTokens {
    fn seq_length(&self) -> usize {
        self.seq_length
    }

    fn num_samples(&self) -> u64 {
        1 << 40
    }

    fn sample(&self, index: u64, out: &mut [u32]) -> megatron::Result<()> {
        for (block, tokens) in out.chunks_mut(4).enumerate() {
            let random =
                philox4x32([block as u32, 0, index as u32, (index >> 32) as u32], [1234, 0]);
            for (token, random) in tokens.iter_mut().zip(random) {
                // The high half of a product maps the random number to 0 … V − 1.
                *token = ((u64::from(random) * u64::from(self.vocab)) >> 32) as u32;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_tokens_lie_in_the_vocabulary_and_depend_on_the_sample() {
        let source = RandomTokens { vocab: 8192, seq_length: 1023 };
        let (mut a, mut b) = ([0; 1024], [0; 1024]);
        source.sample(3, &mut a).unwrap();
        source.sample(4, &mut b).unwrap();
        assert!(a.iter().all(|&token| token < 8192));
        assert!(a.iter().max() > Some(&8000) && a.iter().min() < Some(&200));
        assert_ne!(a, b);
    }
}
