//! Runs a plan until its ranks end well, are asked to stop, or have failed once more often than
//! they may be started again.
//!
//! Source: torchrun's `--max-restarts` (torch/distributed/elastic/agent): the failure of any rank
//! ends all of them, all are started again, and each such round is one of those allowed.

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
    /// The exit code to end with, if this is the end.
    pub code: u8,
    /// Whether ranks are to be started again.
    pub again: bool,
}

/// From the end of the ranks on this machine to their start. On several machines the others' need
/// time to end: those that were sooner would meet the store of the round before.
const PAUSE: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(10)];
/// How often signals are looked at meanwhile.
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
        // Of this round alone: its ranks close it once they have met.
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
            // Another program may have taken the one before.
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

/// The signal that came meanwhile: there are no ranks that it would have to reach.
fn pause(time: Duration, requests: &mut Requests) -> Option<i32> {
    let since = Instant::now();
    while since.elapsed() < time {
        // SIGHUP comes with another.
        if let Some(signal) = requests.pending().min_by_key(|&signal| signal == SIGHUP) {
            return Some(signal);
        }
        std::thread::sleep(TICK);
    }
    None
}
