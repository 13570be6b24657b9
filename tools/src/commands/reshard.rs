//! `megatron reshard`: writes a checkpoint's state as the files of another layout.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Instant;

use clap::Args;
use indicatif::DecimalBytes;
use megatron::checkpoint::{self, Manifest};
use megatron::config::{Origins, ParallelConfig};
use megatron::train::{GPT, reshard_tensors, saved_run};
use models::SavedGpt;

use crate::cli::flags::{self, LayoutFlags};
use crate::cli::resolve_layout;
use crate::error::Result;
use crate::report::{ByteBar, count, duration};
use crate::signals::StopSignal;

/// Rewrite a checkpoint for another layout
///
/// Resuming does not need this: any checkpoint resumes under any layout. This command writes the
/// files that a run with the new layout would save: each rank's parameters and optimizer state.
/// Flags and defaults are those of `pretrain`. Copied data are checked against their checksums.
/// Memory use is small for models of any size.
///
/// CKPT is not changed, and no file in CKPT2 is replaced. Nothing appears in CKPT2 until everything
/// is written. An interrupted attempt leaves only hidden files, and the next attempt removes them.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  megatron reshard checkpoints/gpt checkpoints/gpt-tp4 --tensor-model-parallel-size 4
  megatron reshard saved/iter_0001000 saved-zero --data-parallel-size 8 --use-distributed-optimizer")]
pub struct ReshardArgs {
    /// Folder that `pretrain --save` wrote, or one iter_… folder in it
    #[arg(value_name = "CKPT")]
    pub from: PathBuf,
    /// Folder for the new checkpoint; created if missing, and must not hold a checkpoint
    #[arg(value_name = "CKPT2")]
    pub to: PathBuf,
    /// Iteration of the checkpoint in CKPT [default: the latest]
    #[arg(long, value_name = "N")]
    pub iteration: Option<u64>,
    #[command(flatten, next_help_heading = "Layout of CKPT2")]
    pub layout: LayoutFlags,
}

/// Reshards and returns the exit code; `origins` are those of what was typed.
///
/// # Errors
/// If the layout does not fit, the checkpoint is damaged, CKPT2 holds a checkpoint, or a file
/// operation fails.
pub fn run(args: &ReshardArgs, given: &BTreeMap<String, String>) -> Result<u8> {
    let start = Instant::now();
    let path = checkpoint::locate(&args.from, args.iteration)?;
    let manifest = Manifest::read(&path)?;
    let run = saved_run(&path, &manifest.state)?;
    let mut origins = Origins::default();
    for (section, args) in flags::sections() {
        let origin = if section == "model" { "the checkpoint" } else { "default" };
        args.iter().for_each(|arg| origins.record(arg.get_id().as_str(), origin));
    }
    given.iter().for_each(|(key, origin)| origins.record(key, origin));
    let parallel = resolve_layout(&args.layout, &mut origins, None, run.model.num_layers, false)?;
    let is_gpt = run.architecture == GPT;
    let saved = if is_gpt { Some(SavedGpt::new(manifest.clone())?) } else { None };
    saved.iter().try_for_each(|saved| saved.fits(&parallel, &origins))?;

    let stop = StopSignal::listen(None)?;
    let bar = ByteBar::new("resharding", manifest.data_bytes());
    let progress = &mut |bytes| {
        bar.add(bytes);
        !stop.flag.load(Ordering::SeqCst)
    };
    let done = match &saved {
        Some(saved) => saved.reshard(&args.to, &parallel, &origins, progress)?,
        None => {
            reshard_tensors(&manifest, &args.to, &parallel, &models::hf::SIDECAR_FILES, progress)?
        }
    };
    bar.finish();
    if !done {
        return Ok(stop.exit_code());
    }
    crate::print_line(&format!(
        "{} ({}) → {} ({}): {} in {}, {}",
        path.display(),
        run.parallel.as_ref().map_or("of no run".to_string(), describe_layout),
        checkpoint::iteration_dir(&args.to, manifest.iteration).display(),
        describe_layout(&parallel),
        DecimalBytes(manifest.data_bytes()),
        count(parallel.world_size() as u64, "file"),
        duration(start.elapsed().as_secs_f64())
    ));
    Ok(0)
}

/// A layout in a few words: `tp 2 · pp 1 · dp 4 · ZeRO-1`.
pub fn describe_layout(p: &ParallelConfig) -> String {
    let mut text = format!("tp {}", p.tensor_model_parallel_size);
    if p.context_parallel_size > 1 {
        text.push_str(&format!(" · cp {}", p.context_parallel_size));
    }
    text.push_str(&format!(
        " · pp {} · dp {}",
        p.pipeline_model_parallel_size, p.data_parallel_size
    ));
    if p.virtual_pipeline_size > 1 {
        text.push_str(&format!(" · {} virtual stages each", p.virtual_pipeline_size));
    }
    if p.zero_stage > 0 {
        text.push_str(&format!(" · ZeRO-{}", p.zero_stage));
    }
    if p.num_distributed_optimizer_instances > 1 {
        text.push_str(&format!(" in {} copies", p.num_distributed_optimizer_instances));
    }
    text
}
