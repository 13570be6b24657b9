//! Runs the program and waits for its effects.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Once;
use std::time::{Duration, Instant};

/// Lets the programs under test receive signals that the parent of the tests ignores, as shells do
/// for background jobs.
#[allow(unsafe_code)]
fn hear_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for signal in [libc::SIGINT, libc::SIGHUP, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2] {
            // SAFETY: no handler is installed.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
    });
}

/// The program, outside of any launcher.
pub fn megatron() -> Command {
    hear_signals();
    let mut command = Command::new(env!("CARGO_BIN_EXE_megatron"));
    let own = ["RAYON_NUM_THREADS", "MEGATRON_RUN_SECRET"];
    let of_torchrun =
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
    let of_launchers = std::env::vars_os().map(|(name, _)| name).filter(|name| {
        let name = name.to_string_lossy();
        ["SLURM_", "OMPI_", "PMI_", "MPI_LOCAL"].iter().any(|prefix| name.starts_with(prefix))
    });
    own.into_iter().chain(of_torchrun).map(OsString::from).chain(of_launchers).for_each(|name| {
        command.env_remove(name);
    });
    command
}

/// `megatron launch` of `ranks` shells.
pub fn shells(ranks: usize, script: &str) -> Command {
    let mut command = megatron();
    command.args(["launch", "--nproc-per-node", &ranks.to_string(), "--", "sh", "-c", script]);
    command
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Waits until `ready` returns something, at most ten seconds.
pub fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The process ids that `ranks` ranks wrote to the files pid.RANK in `folder`.
pub fn pids(folder: &Path, ranks: usize) -> Vec<u32> {
    let pid = |rank: usize| {
        std::fs::read_to_string(folder.join(format!("pid.{rank}"))).ok()?.trim().parse().ok()
    };
    (0..ranks).map(|rank| wait_for("a rank to start", || pid(rank))).collect()
}

/// Whether the process runs. A zombie does not.
pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

/// Makes a named pipe.
pub fn pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Sends `signal` to `pid`.
pub fn kill(pid: u32, signal: &str) {
    kill_together(&[pid], signal);
}

/// Sends `signal` to all `pids` at once, before the first receiver can end the others.
pub fn kill_together(pids: &[u32], signal: &str) {
    let pids = pids.iter().map(u32::to_string);
    let status = Command::new("kill").arg(format!("-{signal}")).args(pids).status().unwrap();
    assert!(status.success());
}
