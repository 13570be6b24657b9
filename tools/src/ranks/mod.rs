//! Starts ranks of this program, or joins as one of them.

mod queues;

use std::ffi::OsString;
use std::time::Duration;

use candle_core::Device;
use kernels::tensor::device::Choice;
use megatron::comm::rendezvous::ignored_world;
use megatron::comm::{
    self, Backend, CommOptions, Group, RUN_SECRET, RankInfo, Rendezvous, Secret, World,
};
use megatron::config::{ParallelConfig, RunConfig};
use megatron::text::printable;

use self::queues::{Queues, overlaps};
use crate::error::{Error, Result};
use crate::fault::{self, tell};
use crate::launch::{GPU_QUEUES, Plan, Ranks, STORE_SERVED, Style, Work, supervise};

/// How ranks meet and communicate.
#[derive(Clone, Debug, PartialEq)]
pub struct Distributed {
    pub device: Choice,
    pub backend: Backend,
    /// Whether communication is issued before it is needed; `None`: where that helps.
    pub overlap: Option<bool>,
    pub timeout: Duration,
    pub rendezvous: Option<String>,
    /// How often ranks are restarted after one failed.
    pub max_restarts: u32,
}

/// A larger number of ranks on one machine counts as a mistake.
const MOST_RANKS: usize = 1024;

/// This process's place in the world of a launcher, if there is one.
///
/// # Errors
/// If its variables are incomplete or contradict each other.
pub fn place() -> Result<Option<RankInfo>> {
    let place = RankInfo::from_env(environment)?;
    if place.is_none() {
        ignored_world(environment).iter().for_each(|note| tell(note));
    }
    Ok(place)
}

/// Whether a launcher made this process a rank of a world.
///
/// # Errors
/// As [`place`].
pub fn is_in_world() -> Result<bool> {
    Ok(RankInfo::from_env(environment)?.is_some())
}

/// The secret of the run, as passed on by the launcher or the parent process.
///
/// # Errors
/// If it is not a valid secret.
pub fn secret() -> Result<Secret> {
    Ok(Secret::from_env(environment)?)
}

/// As [`secret`], or a new secret if none was passed on.
///
/// # Errors
/// As [`secret`]; if the system has no randomness.
pub fn secret_or_new() -> Result<Secret> {
    let given = secret()?;
    if given.is_none() { Ok(Secret::new()?) } else { Ok(given) }
}

/// Refuses a layout with too many ranks for one machine.
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

/// Runs this process's command line once per rank and returns the exit code to end with. Ranks that
/// are asked to stop have `stop_limit` to do so; `advice` is what to do after a rank died.
///
/// # Errors
/// If a rank cannot be started.
pub fn start(
    ranks: usize,
    distributed: &Distributed,
    stop_limit: Option<Duration>,
    advice: Option<String>,
    variables: Vec<(OsString, OsString)>,
) -> Result<u8> {
    let program = std::env::current_exe().map_err(|source| Error::Io {
        action: "find the program that is running".to_string(),
        source,
    })?;
    let mut command = vec![program.into_os_string()];
    command.extend(std::env::args_os().skip(1));
    supervise(&Plan {
        work: Work::Ranks(Ranks {
            command,
            local_ranks: ranks,
            nodes: 1,
            node_rank: 0,
            master: ("127.0.0.1".to_string(), 0),
            any_port: false,
            serves_store: distributed.rendezvous.is_none(),
            secret: secret_or_new()?,
            style: Style::Run,
            shares_gpus: share_gpus(ranks, distributed.device),
            variables,
        }),
        self_end: Duration::from_secs(5),
        stop_limit,
        max_restarts: distributed.max_restarts,
        // There is advice only for a run that saves.
        saves: advice.is_some(),
        advice,
        over_stdin: false,
    })
}

/// Whether some of `ranks` on this machine compute on the same GPU.
pub fn share_gpus(ranks: usize, device: Choice) -> bool {
    match device {
        Choice::Cpu => false,
        Choice::Cuda(Some(_)) => ranks > 1,
        Choice::Auto | Choice::Cuda(None) => {
            kernels::tensor::device::gpus().is_ok_and(|gpus| gpus > 0 && ranks > gpus)
        }
    }
}

/// The number of threads in RAYON_NUM_THREADS, or the share of this machine's cores for one of
/// `ranks` ranks.
fn share_of_cores(ranks: usize) -> usize {
    let asked = environment("RAYON_NUM_THREADS").and_then(|n| n.parse().ok()).filter(|&n| n > 0);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    asked.unwrap_or((cores / ranks).max(1))
}

fn no_threads(threads: usize) -> impl FnOnce(rayon::ThreadPoolBuildError) -> Error {
    move |e| {
        Error::Launch(format!(
            "cannot start {threads} compute threads: {e}; raise `ulimit -u` or the container's limit of processes, or ask for fewer with RAYON_NUM_THREADS"
        ))
    }
}

/// Runs `work`, before this rank has met the others, with its share of this machine's cores; with
/// all cores if the launcher did not tell how many ranks share them.
///
/// # Errors
/// Those of `work`; if threads cannot be started.
pub fn before_meeting<T: Send>(
    place: &RankInfo,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    with_threads(place.local_world_size.unwrap_or(1), work)
}

/// Runs `work` with the threads of one of `ranks` ranks on this machine; the threads end
/// afterwards.
///
/// # Errors
/// Those of `work`; if threads cannot be started.
pub fn with_threads<T: Send>(ranks: usize, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let threads = share_of_cores(ranks);
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(no_threads(threads))?;
    pool.install(work)
}

/// Gives the kernels of one of `ranks` ranks on this machine `threads` threads, or as many as
/// RAYON_NUM_THREADS says, or its share of the machine's cores. Returns their number. Call before
/// the first kernel, on the thread that calls the kernels, because that thread becomes part of the
/// pool.
///
/// # Errors
/// If threads cannot be started.
pub fn use_threads(threads: Option<usize>, ranks: usize) -> Result<usize> {
    let threads = threads.unwrap_or_else(|| share_of_cores(ranks));
    let mut pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    if threads > 1 {
        // A thread outside the pool would pass every kernel to the pool and sleep until it is done.
        // With one thread it stays outside, because work that other threads give to the pool would
        // wait for it.
        pool = pool.use_current_thread();
    }
    pool.build_global().map_err(no_threads(threads))?;
    Ok(threads)
}

/// Before ranks are started, refuses a device that this machine or program does not have.
///
/// # Errors
/// If the device does not exist.
pub fn check_device(choice: Choice) -> Result<()> {
    if matches!(choice, Choice::Cuda(_)) {
        kernels::tensor::device::gpus()
            .map_err(|e| Error::usage(format!("--device {choice}: {e}")))?;
    }
    Ok(())
}

/// Whether ranks on this machine with the device `choice` compute on GPUs.
pub fn on_gpus(choice: Choice) -> bool {
    choice != Choice::Cpu && kernels::tensor::device::gpus().is_ok_and(|gpus| gpus > 0)
}

/// Before ranks are started, refuses a run on CPUs that asks for GPU features, and the reverse.
///
/// # Errors
/// If flags contradict each other.
pub fn check_features(choice: Choice, run: &RunConfig) -> Result<()> {
    let on_gpus = on_gpus(choice);
    if run.training.enable_cuda_graph && !on_gpus {
        return Err(Error::usage(
            "--enable-cuda-graph records the work of a GPU, but this run computes on the CPU; \
             leave it out, or compute on a GPU: --device cuda in a program built with --features \
             cuda (docs/guide/install.md)",
        ));
    }
    Ok(())
}

/// This process, joined as one of the ranks.
pub struct Joined {
    pub world: Group,
    /// The device that it computes on.
    pub device: Device,
    /// Threads of its kernels.
    pub threads: usize,
}

/// Connects to the other ranks, then takes this rank's share of its machine: its device, and
/// `threads` threads or its share of the cores. Groups and messages will need `communicators`
/// ([`megatron::train::most_communicators`]). Call before the first kernel, on the thread that
/// calls the kernels.
///
/// # Errors
/// If ranks do not appear in time, or cannot be reached through the requested backend. If the
/// device does not exist (the other ranks are told so), or other ranks use another kind of device.
pub fn join(
    place: &RankInfo,
    distributed: &Distributed,
    threads: Option<usize>,
    communicators: usize,
) -> Result<Joined> {
    let World { group, local_rank, local_world_size } = meet(place, distributed, communicators)?;
    let choice = distributed.device;
    let sharers =
        sharers(&group.all_gather_bytes(own_cores().as_bytes())?, group.rank(), local_world_size);
    let open = || {
        let threads = use_threads(threads, sharers)?;
        let device =
            choice.open(local_rank).map_err(|e| Error::usage(format!("--device {choice}: {e}")))?;
        Ok((threads, device))
    };
    let (threads, device) = open().map_err(|error| failed(error, &group, &Device::Cpu))?;
    let here = if device.is_cuda() { ON_GPU } else { ON_CPU };
    check_alike(&group.all_gather_bytes(here.as_bytes())?)?;
    let world = over_gpus(group, distributed, &device)?;
    Ok(Joined { world, device, threads })
}

/// The cores of this machine that this process may run on.
fn own_cores() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let cores =
        status.lines().find(|line| line.starts_with("Cpus_allowed_list")).unwrap_or_default();
    format!("{} {cores}", megatron::comm::rendezvous::this_host())
}

/// How many ranks share the cores of rank `rank`, given the cores of every rank. `srun` and
/// `mpirun` may bind each rank to separate cores, and every rank then uses all of its own.
fn sharers(cores: &[Vec<u8>], rank: usize, local_world_size: usize) -> usize {
    // Machines may have the same name.
    cores.iter().filter(|other| **other == cores[rank]).count().min(local_world_size)
}

const ON_GPU: &str = "a GPU";
const ON_CPU: &str = "the CPU";

/// Refuses ranks on different kinds of devices, for example if one machine has no driver: they
/// would wait for each other in different transports. All ranks come to the same result.
fn check_alike(devices: &[Vec<u8>]) -> Result<()> {
    let Some(other) = devices.iter().position(|device| *device != devices[0]) else {
        return Ok(());
    };
    let [first, here] = [0, other].map(|rank| printable(&devices[rank]));
    let without = if here == ON_CPU { other } else { 0 };
    Err(Error::usage(format!(
        "rank 0 computes on {first}, but rank {other} on {here}: give all ranks the same --device. \
         `megatron doctor` on the machine of rank {without} shows why it has no GPU"
    )))
}

/// Connects the ranks for tensors on CPUs.
fn meet(place: &RankInfo, distributed: &Distributed, communicators: usize) -> Result<World> {
    if place.world_size == 1 {
        return Ok(World {
            group: comm::solo(),
            local_rank: place.local_rank.unwrap_or(0),
            local_world_size: 1,
        });
    }
    let rendezvous = match (&distributed.rendezvous, Rendezvous::from_env(place, environment)) {
        (Some(url), _) => Rendezvous::from_url(place.rank, url)?,
        (None, Ok(Rendezvous::Tcp { host, port, .. })) if environment(STORE_SERVED).is_some() => {
            Rendezvous::Tcp { host, port, is_host: false }
        }
        (None, from_environment) => from_environment?,
    };
    let timeout = distributed.timeout;
    let queues = Queues::found(environment(GPU_QUEUES), communicators);
    let overlap =
        overlaps(distributed.overlap, over_nccl(distributed, on_gpus(distributed.device)), queues)?;
    let connect_timeout = patience(place, timeout);
    let secret = secret()?;
    if secret.is_none() && place.rank == 0 {
        tell(&format!(
            "note: the ranks of this run are not authenticated: any process that reaches them can \
             join. To prevent this, give all ranks the same secret: `export {RUN_SECRET}=$(openssl \
             rand -hex 32)` where they are started"
        ));
    }
    // Each process has its own log, or a supervisor that prefixes its lines with the rank.
    let on_wait: Option<fn(&str)> = Some(tell);
    let options = CommOptions {
        timeout,
        connect_timeout,
        overlap,
        on_wait,
        secret,
        ..CommOptions::default()
    };
    // NCCL joins after all ranks have exchanged their devices, so that an error can name the ranks
    // without a GPU.
    let backend = match distributed.backend {
        Backend::Nccl => Backend::Auto,
        other => other,
    };
    Ok(comm::init(place, &rendezvous, backend, options)?)
}

/// How long this rank waits for the others at the start of a run whose operations have `timeout`.
/// With several machines, each opens the data at its own speed, and this rank is not told if
/// another one dies. On one machine, ranks start at the same time, and their supervisor ends them
/// all if one dies.
fn patience(place: &RankInfo, timeout: Duration) -> Duration {
    if place.one_host() { CommOptions::default().connect_timeout.min(timeout) } else { timeout }
}

/// Reports why this rank ends: first to the user, because ending pending GPU work may hang, then to
/// the other ranks, which would otherwise notice only when they miss this rank. A rank on a GPU
/// does not return from here: its GPU resources are freed with the process.
pub fn failed(error: Error, world: &Group, device: &Device) -> Error {
    failed_with_advice(error, None, world, device)
}

/// As [`failed`]; only the user also gets `advice`.
pub fn failed_with_advice(
    error: Error,
    advice: Option<String>,
    world: &Group,
    device: &Device,
) -> Error {
    let reason = error.to_string();
    let error = match advice {
        Some(advice) => Error::Launch(format!("{error}. {advice}")),
        None => error,
    };
    fault::report(&error);
    world.abort(&reason);
    if device.is_cuda() {
        world.leave();
        fault::leave(error.exit_code());
    }
    error
}

/// Tells the other ranks that this rank stops taking part, after a failure that came after all
/// important work. A rank on a GPU does not return from here, as in [`failed`].
pub fn leave_others(error: &Error, world: &Group, device: &Device) {
    world.abort(&error.to_string());
    if device.is_cuda() {
        world.leave();
        fault::leave(0);
    }
}

fn over_nccl(distributed: &Distributed, on_gpus: bool) -> bool {
    on_gpus
        && matches!(distributed.backend, Backend::Auto | Backend::Nccl)
        && cfg!(feature = "nccl")
}

/// Why operations are not issued early, if they would be with more GPU queues.
pub fn issued_late(
    distributed: &Distributed,
    device: &Device,
    communicators: usize,
) -> Option<String> {
    let queues = Queues::found(environment(GPU_QUEUES), communicators);
    let late = communicators > 0
        && distributed.overlap.is_none()
        && over_nccl(distributed, device.is_cuda())
        && !queues.suffice();
    late.then(|| {
        format!(
            "communication is issued only when it is needed, not in advance: {}",
            queues.missing()
        )
    })
}

/// The world with NCCL for GPU tensors, unless another backend is requested.
#[cfg(feature = "nccl")]
fn over_gpus(world: Group, distributed: &Distributed, device: &Device) -> Result<Group> {
    match (distributed.backend, device.is_cuda()) {
        (Backend::Auto | Backend::Nccl, true) => {
            Ok(comm::nccl::world(world, device, distributed.timeout)?)
        }
        (Backend::Nccl, false) => Err(nccl_without_gpu("this run computes on the CPU")),
        _ => Ok(world),
    }
}

/// The world; GPU tensors go through host memory.
#[cfg(not(feature = "nccl"))]
fn over_gpus(world: Group, distributed: &Distributed, _device: &Device) -> Result<Group> {
    match distributed.backend {
        Backend::Nccl => Err(nccl_without_gpu(
            "this program was built without it (cargo build --release --features cuda)",
        )),
        _ => Ok(world),
    }
}

fn nccl_without_gpu(why: &str) -> Error {
    Error::usage(format!("--distributed-backend nccl: {why}; use auto, local or tcp"))
}

fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use megatron::comm::RankInfo;

    use super::{ON_CPU, ON_GPU, check_alike, own_cores, patience, sharers, use_threads};

    #[test]
    fn ranks_that_are_bound_to_cores_of_their_own_share_them_with_nobody() {
        assert!(own_cores().contains("Cpus_allowed_list"));
        let told = |cores: [&str; 4], rank, local| {
            sharers(&cores.map(|cores| cores.as_bytes().to_vec()), rank, local)
        };
        assert_eq!(told(["a 0-7"; 4], 1, 4), 4);
        assert_eq!(told(["a 0-7"; 4], 1, 2), 2, "of machines called alike");
        assert_eq!(told(["a 0-3", "a 4-7", "a 0-3", "a 4-7"], 2, 4), 2);
        assert_eq!(told(["a 0-3", "a 4-7", "b 0-3", "b 4-7"], 2, 2), 1);
    }

    #[test]
    fn ranks_of_several_machines_wait_for_each_other_as_long_as_in_the_run() {
        let [minute, longer] = [60, 1200].map(Duration::from_secs);
        let place = |one_host: bool| RankInfo {
            world_size: 4,
            local_world_size: one_host.then_some(4),
            ..RankInfo::alone()
        };
        assert_eq!(patience(&place(false), longer), longer);
        assert_eq!(patience(&place(true), longer), minute);
        for one_host in [false, true] {
            assert_eq!(patience(&place(one_host), minute / 2), minute / 2);
        }
    }

    #[test]
    fn ranks_on_different_devices_are_refused_on_all() {
        let check = |devices: &[&str]| {
            let told: Vec<_> = devices.iter().map(|device| device.as_bytes().to_vec()).collect();
            check_alike(&told).map_err(|error| error.to_string())
        };
        assert_eq!([check(&[ON_CPU]), check(&[ON_GPU; 3])], [Ok(()), Ok(())]);
        let message = check(&[ON_GPU, ON_GPU, ON_CPU]).unwrap_err();
        assert!(message.contains("rank 0 computes on a GPU, but rank 2 on the CPU"), "{message}");
        assert!(message.contains("rank 2 shows why it has no GPU"), "{message}");
        assert!(check(&[ON_CPU, ON_GPU]).unwrap_err().contains("rank 0 shows why it has no GPU"));
    }

    #[test]
    fn whoever_hands_out_work_is_one_of_the_threads_unless_it_is_the_only_one() {
        const CHILD: &str = "TOOLS_TEST_THREADS";
        // The pool is global to the process.
        if let Ok(threads) = std::env::var(CHILD) {
            let threads = threads.parse().unwrap();
            assert_eq!(use_threads(Some(threads), 1).unwrap(), threads);
            assert_eq!(rayon::current_num_threads(), threads);
            assert_eq!(rayon::current_thread_index(), (threads > 1).then_some(0));
            return;
        }
        let name =
            "ranks::tests::whoever_hands_out_work_is_one_of_the_threads_unless_it_is_the_only_one";
        for threads in ["1", "2", "3"] {
            let mut test = std::process::Command::new(std::env::current_exe().unwrap());
            let output =
                test.args([name, "--exact", "--nocapture"]).env(CHILD, threads).output().unwrap();
            let stdout = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && stdout.contains("1 passed"),
                "{threads} threads: {stdout}"
            );
        }
    }
}
