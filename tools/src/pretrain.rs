//! `megatron pretrain`: everything around the training loop.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use megatron::comm::{self, Group};
use megatron::config::RunConfig;
use megatron::data::{self, Datasets};
use megatron::train::Reporter;

use crate::cli::{Distributed, Gathered, Resolved, resolve};
use crate::error::{Error, Result};
use crate::launch::{LauncherEnv, Plan, Style, supervise};
use crate::launcher::free_port;
use crate::report;
use crate::signals::StopSignal;

/// More ranks on one machine are taken for a mistake.
const MOST_RANKS: usize = 1024;

/// How a rank's part of a run ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps were made, or `exit_interval` was reached.
    Finished,
    /// A signal asked to stop; what was to be saved is saved.
    Stopped,
}

/// Runs `pretrain` and returns the exit code to end with.
///
/// # Errors
/// If the settings or data cannot be used, or the run of this process failed.
pub fn run(settings: &Gathered) -> Result<u8> {
    let place = LauncherEnv::read()?;
    let resolved = resolve(settings, place.as_ref())?;
    let world_size = resolved.run.parallel.world_size();
    match place {
        Some(place) => rank(resolved, &place),
        None if world_size == 1 => {
            check_outputs(&resolved.run)?;
            rank(resolved, &LauncherEnv { rank: 0, world_size: 1, local_rank: 0, local_world_size: 1 })
        }
        None => start_ranks(resolved, world_size),
    }
}

/// Starts this program once per rank. Whatever can be wrong without ranks is found here, once.
fn start_ranks(mut resolved: Resolved, world_size: usize) -> Result<u8> {
    if world_size > MOST_RANKS {
        let p = &resolved.run.parallel;
        return Err(Error::usage(format!(
            "tp {} · cp {} · dp {} · pp {} = {world_size} ranks are too many for one machine; start them with a launcher",
            p.tensor_model_parallel_size, p.context_parallel_size, p.data_parallel_size, p.pipeline_model_parallel_size
        )));
    }
    check_outputs(&resolved.run)?;
    for line in open_data(&mut resolved)?.description {
        crate::print_line(&line);
    }
    let program = std::env::current_exe()
        .map_err(|source| Error::Io { action: "find the program that is running".to_string(), source })?;
    let mut command = vec![program.into_os_string()];
    command.extend(std::env::args_os().skip(1));
    supervise(&Plan {
        command,
        local_ranks: world_size,
        nodes: 1,
        node_rank: 0,
        master: ("127.0.0.1".to_string(), free_port()?),
        style: Style::Run,
        self_end: Duration::from_secs(5),
        stop_limit: None,
        advice: advice(&resolved.run),
    })
}

/// What to do after a rank died.
fn advice(run: &RunConfig) -> Option<String> {
    let save = run.checkpoint.save.as_ref()?;
    Some(match &run.checkpoint.load {
        Some(load) if load == save => {
            format!("The same command goes on from the last checkpoint in {}", save.display())
        }
        _ => format!("With --load {} the run goes on from the last checkpoint there", save.display()),
    })
}

/// Refuses, before anything is computed, folders that cannot be written to.
fn check_outputs(run: &RunConfig) -> Result<()> {
    let metrics = run.logging.metrics.as_deref().and_then(Path::parent).filter(|f| !f.as_os_str().is_empty());
    for folder in [run.checkpoint.save.as_deref(), metrics].into_iter().flatten() {
        std::fs::create_dir_all(folder)
            .and_then(|()| tempfile::tempfile_in(folder).map(drop))
            .map_err(|source| Error::Io { action: format!("write to the folder {}", folder.display()), source })?;
    }
    Ok(())
}

/// Opens the data, which tell the size of the vocabulary.
fn open_data(resolved: &mut Resolved) -> Result<Datasets> {
    let run = &mut resolved.run;
    let datasets = data::open(&run.data, run.model.seq_length, run.training.seed, resolved.vocab_size)?;
    run.model.vocab_size = datasets.vocab_size;
    Ok(datasets)
}

/// This process's part of the run.
fn rank(mut resolved: Resolved, place: &LauncherEnv) -> Result<u8> {
    let stop = StopSignal::listen()?;
    let datasets = open_data(&mut resolved)?;
    let world = connect(place, &resolved.distributed)?;
    let mut reporter = report::for_rank(place.rank, resolved.run.logging.log_interval);
    if place.world_size == 1 {
        datasets.description.iter().for_each(|line| reporter.message(line));
    }
    let outcome = run_rank(&resolved.run, world, datasets, reporter.as_mut(), Arc::clone(&stop.flag))?;
    Ok(match outcome {
        Outcome::Finished => 0,
        Outcome::Stopped => stop.exit_code(),
    })
}

/// Meets the other ranks.
fn connect(place: &LauncherEnv, _distributed: &Distributed) -> Result<Group> {
    if place.world_size == 1 {
        return Ok(comm::solo());
    }
    Err(Error::Launch("runs of several processes are not wired yet".to_string()))
}

/// Trains. (The trainer plugs in here.)
fn run_rank(
    _run: &RunConfig,
    _world: Group,
    _datasets: Datasets,
    _reporter: &mut dyn Reporter,
    _stop: Arc<AtomicBool>,
) -> Result<Outcome> {
    Err(Error::Launch("the trainer is not wired yet".to_string()))
}
