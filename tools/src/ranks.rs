//! Ranks of this program: starting them, and joining as one of them.

use std::time::Duration;

use candle_core::Device;
use kernels::device::Choice;
use megatron::comm::rendezvous::StoreServer;
use megatron::comm::{self, Backend, CommOptions, Group, RankInfo, Rendezvous};
use megatron::config::ParallelConfig;

use crate::cli::Distributed;
use crate::error::{Error, Result};
use crate::launch::{Plan, STORE_SERVED, Style, supervise};

/// More ranks on one machine are taken for a mistake.
const MOST_RANKS: usize = 1024;

/// The place that a launcher gave this process, if one did.
///
/// # Errors
/// If its variables are incomplete or contradict each other.
pub fn place() -> Result<Option<RankInfo>> {
    Ok(RankInfo::from_env(environment)?)
}

/// Refuses a layout that is too much for one machine.
///
/// # Errors
/// If it has more than 1024 ranks.
pub fn check_number(p: &ParallelConfig) -> Result<()> {
    if p.world_size() <= MOST_RANKS {
        return Ok(());
    }
    Err(Error::usage(format!(
        "tp {} · cp {} · dp {} · pp {} = {} ranks are too many for one machine; start them with a launcher",
        p.tensor_model_parallel_size,
        p.context_parallel_size,
        p.data_parallel_size,
        p.pipeline_model_parallel_size,
        p.world_size()
    )))
}

/// Runs this process's command line once per rank and returns the exit code to end with. Ranks that are asked to stop have `stop_limit` to do
/// so; `advice` is what to do after a rank died.
///
/// # Errors
/// If a rank cannot be started.
pub fn start(
    ranks: usize,
    distributed: &Distributed,
    stop_limit: Option<Duration>,
    advice: Option<String>,
) -> Result<u8> {
    // Serving the store here rather than in rank 0 leaves no moment in which another program can take the port.
    let store = match distributed.rendezvous {
        None => Some(StoreServer::bind("127.0.0.1", 0)?),
        Some(_) => None,
    };
    let program = std::env::current_exe()
        .map_err(|source| Error::Io { action: "find the program that is running".to_string(), source })?;
    let mut command = vec![program.into_os_string()];
    command.extend(std::env::args_os().skip(1));
    supervise(&Plan {
        command,
        local_ranks: ranks,
        nodes: 1,
        node_rank: 0,
        master: ("127.0.0.1".to_string(), store.as_ref().map_or(0, |store| store.address().port())),
        serves_store: store.is_some(),
        style: Style::Run,
        self_end: Duration::from_secs(5),
        stop_limit,
        advice,
        shares_gpus: share_gpus(ranks, distributed.device),
    })
}

/// Whether some of `ranks` on this machine compute on the same GPU.
pub fn share_gpus(ranks: usize, device: Choice) -> bool {
    match device {
        Choice::Cpu => false,
        Choice::Cuda(Some(_)) => ranks > 1,
        Choice::Auto | Choice::Cuda(None) => kernels::device::gpus().is_ok_and(|gpus| gpus > 0 && ranks > gpus),
    }
}

/// Gives this rank's kernels `threads` threads, or those that RAYON_NUM_THREADS asks for, or its share of the machine's cores. Returns how
/// many there are. Call before the first kernel.
///
/// # Errors
/// If threads cannot be started.
pub fn use_threads(threads: Option<usize>, place: &RankInfo) -> Result<usize> {
    if threads.is_some() || environment("RAYON_NUM_THREADS").is_none() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = threads.unwrap_or((cores / place.local_world_size).max(1));
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global()
            .map_err(|e| Error::Launch(format!("cannot start {threads} compute threads: {e}")))?;
    }
    Ok(rayon::current_num_threads())
}

/// Refuses a device that this machine or program does not have, before ranks are started for it.
///
/// # Errors
/// If there is none.
pub fn check_device(choice: Choice) -> Result<()> {
    if matches!(choice, Choice::Cuda(_)) {
        kernels::device::gpus().map_err(|e| Error::usage(format!("--device {choice}: {e}")))?;
    }
    Ok(())
}

/// What this rank computes on.
///
/// # Errors
/// If there is no such device.
pub fn device(place: &RankInfo, choice: Choice) -> Result<Device> {
    choice.open(place.local_rank).map_err(|e| Error::usage(format!("--device {choice}: {e}")))
}

/// Meets the other ranks.
///
/// # Errors
/// If they do not appear in time, or cannot be reached the way asked for.
pub fn connect(place: &RankInfo, distributed: &Distributed, device: &Device) -> Result<Group> {
    if place.world_size == 1 {
        return Ok(comm::solo());
    }
    let rendezvous = match (&distributed.rendezvous, Rendezvous::from_env(place.rank, environment)) {
        (Some(url), _) => Rendezvous::from_url(place.rank, url)?,
        (None, Ok(Rendezvous::Tcp { host, port, .. })) if environment(STORE_SERVED).is_some() => {
            Rendezvous::Tcp { host, port, is_host: false }
        }
        (None, from_environment) => from_environment?,
    };
    let (timeout, default) = (distributed.timeout, CommOptions::default());
    let options = CommOptions { timeout, connect_timeout: default.connect_timeout.min(timeout), ..default };
    let world = comm::init(place, &rendezvous, distributed.backend, options)?;
    over_gpus(world, distributed, device)
}

/// The world with NCCL for what is on GPUs, unless another transport was asked for.
#[cfg(feature = "nccl")]
fn over_gpus(world: Group, distributed: &Distributed, device: &Device) -> Result<Group> {
    match (distributed.backend, device.is_cuda()) {
        (Backend::Auto | Backend::Nccl, true) => Ok(comm::nccl::world(world, device, distributed.timeout)?),
        (Backend::Nccl, false) => Err(nccl_without_gpu("this run computes on the CPU")),
        _ => Ok(world),
    }
}

/// The world: what is on GPUs goes through the CPU's memory.
#[cfg(not(feature = "nccl"))]
fn over_gpus(world: Group, distributed: &Distributed, _device: &Device) -> Result<Group> {
    match distributed.backend {
        Backend::Nccl => {
            Err(nccl_without_gpu("this program was built without it (cargo build --release --features cuda)"))
        }
        _ => Ok(world),
    }
}

fn nccl_without_gpu(why: &str) -> Error {
    Error::usage(format!("--distributed-backend nccl: {why}; use auto, local or tcp"))
}

fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}
