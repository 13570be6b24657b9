//! Runs a plan until its ranks succeed, are asked to stop, or fail after the last allowed restart.
//!
//! Source: torchrun's `--max-restarts` (torch/distributed/elastic/agent): the failure of any rank
//! ends all ranks, all are restarted, and each such round counts as one restart.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use signal_hook::consts::SIGHUP;

use super::plan::{Plan, Work};
use super::process::Exit;
use super::requests::Requests;
use super::supervisor::attempt;
use crate::error::{Error, Result};

/// How a round of ranks ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The exit code, if the run ends here.
    pub code: u8,
    /// Whether to restart the ranks.
    pub again: bool,
}

/// Pause between the end of the ranks on this machine and their restart. With several machines, the
/// other ranks need time to end; otherwise early ranks would connect to the previous round's store.
const PAUSE: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(10)];
/// Interval at which signals are checked meanwhile.
const TICK: Duration = Duration::from_millis(20);

/// Runs `plan` to its end and returns the exit code to end with: 0, that of the first rank that
/// failed (after printing why), or 128 + the signal that stopped the run.
///
/// # Errors
/// If a rank cannot be started.
pub fn supervise(plan: &Plan) -> Result<u8> {
    let mut requests = Requests::listen(plan.over_stdin)?;
    let mut plan = plan.clone();
    if plan.over_stdin
        && let Work::Ranks(ranks) = &mut plan.work
    {
        match requests.secret()? {
            Ok(secret) => ranks.secret = secret,
            Err(signal) => return Ok(Exit::Signal(signal).code()),
        }
    }
    let mut restarts = 0;
    loop {
        // Used in this round only: its ranks close it once they have met.
        let store = plan.work.serve()?;
        let End { code, again } = attempt(&plan, restarts, &mut requests)?;
        drop(store);
        if !again {
            return Ok(code);
        }
        if let Some(signal) = pause(PAUSE[usize::from(plan.work.is_part())], &mut requests) {
            return Ok(Exit::Signal(signal).code());
        }
        restarts += 1;
        if let Work::Ranks(ranks) = &mut plan.work
            && ranks.any_port
        {
            // Another program may have taken the previous port.
            ranks.master.1 = free_port()?;
        }
    }
}

/// A port that was free a moment ago.
///
/// # Errors
/// If the loopback interface refuses to listen.
pub fn free_port() -> Result<u16> {
    TcpListener::bind(("127.0.0.1", 0))
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(|source| Error::Io { action: "find a free port on 127.0.0.1".to_string(), source })
}

/// The signal that came during the pause, when there are no ranks to pass it to.
fn pause(time: Duration, requests: &mut Requests) -> Option<i32> {
    let since = Instant::now();
    while since.elapsed() < time {
        // SIGHUP accompanies another signal.
        if let Some(signal) = requests.pending().min_by_key(|&signal| signal == SIGHUP) {
            return Some(signal);
        }
        std::thread::sleep(TICK);
    }
    None
}
