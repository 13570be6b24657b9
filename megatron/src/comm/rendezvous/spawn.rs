//! A world in one call: the world of the launcher that started this process, or one of processes
//! that this process starts.

use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::Duration;

use super::super::{CommOptions, RUN_SECRET, Secret};
use super::{Backend, RankInfo, Rendezvous, World, init};
use crate::{Error, Result};

/// Interval at which the ranks are checked.
const INTERVAL: Duration = Duration::from_millis(20);

impl World {
    /// The world in which `megatron launch`, torchrun, mpirun or srun made this process a rank;
    /// `None` if none of them did.
    ///
    /// # Errors
    /// If the launcher's variables are incomplete or contradictory, or as [`init`].
    pub fn from_env() -> Result<Option<Self>> {
        let lookup = |name: &str| std::env::var(name).ok();
        let Some(info) = RankInfo::from_env(lookup)? else { return Ok(None) };
        let rendezvous = Rendezvous::from_env(&info, lookup)?;
        let options = CommOptions { secret: Secret::from_env(lookup)?, ..CommOptions::default() };
        init(&info, &rendezvous, Backend::Auto, options).map(Some)
    }
}

/// Runs `rank` in `ranks` processes of this machine and returns when all have ended. It resembles
/// torch's `mp.spawn`, but every process runs the program from its start, with the same arguments,
/// up to this call.
///
/// In a process that a launcher made a rank, it runs `rank` in that world instead. The same program
/// thus works when started by hand and under a launcher.
///
/// ```standalone_crate
/// use candle_core::{Device, Tensor};
/// use megatron::comm::{ReduceOp, spawn};
///
/// # fn main() -> megatron::Result<()> {
/// spawn(4, |world| {
///     let sum = Tensor::new(&[world.group.rank() as f32], &Device::Cpu)?;
///     world.group.all_reduce(&sum, ReduceOp::Sum)?.wait()?;
///     assert_eq!(sum.to_vec1::<f32>()?, [6.0]);
///     Ok(())
/// })
/// # }
/// ```
///
/// # Errors
/// In a rank: as `rank`, or as [`init`]. In the starting process: if a rank cannot be started or
/// fails, which ends the others.
pub fn spawn(ranks: usize, rank: impl FnOnce(World) -> Result<()>) -> Result<()> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    spawn_with(ranks, &mut |command| _ = command.args(&arguments), rank)
}

/// As [`spawn`]; `prepare` sets the arguments of each process, and may change other options of its
/// start.
///
/// # Errors
/// As [`spawn`].
pub fn spawn_with(
    ranks: usize,
    prepare: &mut dyn FnMut(&mut Command),
    rank: impl FnOnce(World) -> Result<()>,
) -> Result<()> {
    if let Some(world) = World::from_env()? {
        let group = world.group.clone();
        let result = rank(world);
        if let Err(error) = &result {
            group.abort(&error.to_string());
        }
        return result;
    }
    if ranks == 0 {
        return Err(Error::config("a world has at least one rank"));
    }
    let failed = |what: &str, source| Error::comm(format!("cannot {what}: {source}"));
    let program = std::env::current_exe().map_err(|e| failed("find this program", e))?;
    // Rank 0 binds the port after it is freed here, as in torch's own helper.
    let port = std::net::TcpListener::bind(("127.0.0.1", 0))
        .and_then(|listener| listener.local_addr())
        .map_err(|e| failed("find a free port", e))?
        .port();
    let secret = Secret::new()?;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let mut children = Children(Vec::new());
    for rank in 0..ranks {
        let mut command = Command::new(&program);
        for (name, value) in [
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            ("WORLD_SIZE", ranks),
            ("LOCAL_WORLD_SIZE", ranks),
            ("MASTER_PORT", port.into()),
        ] {
            command.env(name, value.to_string());
        }
        command.env("MASTER_ADDR", "127.0.0.1");
        command.env(RUN_SECRET, secret.reveal().unwrap_or_default());
        if std::env::var_os("RAYON_NUM_THREADS").is_none() {
            command.env("RAYON_NUM_THREADS", (cores / ranks).max(1).to_string());
        }
        prepare(&mut command);
        let child = command.spawn().map_err(|e| failed(&format!("start rank {rank}"), e))?;
        children.0.push((rank, child));
    }
    children.wait()
}

/// Running ranks. Dropping it kills those that still run.
struct Children(Vec<(usize, Child)>);

impl Children {
    fn wait(mut self) -> Result<()> {
        while !self.0.is_empty() {
            for (rank, status) in self.ended()? {
                if !status.success() {
                    return Err(Error::comm(format!(
                        "rank {rank} ended with {status}; the other ranks are stopped"
                    )));
                }
            }
            thread::sleep(INTERVAL);
        }
        Ok(())
    }

    /// The ranks that have ended since the last call.
    fn ended(&mut self) -> Result<Vec<(usize, ExitStatus)>> {
        let mut ended = Vec::new();
        for (rank, child) in &mut self.0 {
            let status = child.try_wait();
            let status =
                status.map_err(|e| Error::comm(format!("cannot wait for rank {rank}: {e}")))?;
            ended.extend(status.map(|status| (*rank, status)));
        }
        self.0.retain(|(rank, _)| ended.iter().all(|(other, _)| other != rank));
        Ok(ended)
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for (_, child) in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
