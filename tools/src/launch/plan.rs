//! What a supervisor starts, and how it treats it.

use std::process::Command;
use std::time::Duration;

use megatron::comm::Secret;
use megatron::comm::rendezvous::StoreServer;

use super::failure::Who;
use super::local::Ranks;
use super::process::Exit;
use super::remote::Hosts;
use crate::error::Result;

/// Set for ranks if their supervisor serves the store at MASTER_ADDR:MASTER_PORT.
pub const STORE_SERVED: &str = "MEGATRON_STORE_SERVED";

/// Set for ranks that a command of this program starts for itself.
pub const OWN_RANKS: &str = "MEGATRON_OWN_RANKS";

/// torchrun's variable: how often ranks may be restarted.
pub const MAX_RESTARTS: &str = "TORCHELASTIC_MAX_RESTARTS";
/// torchrun's variable: how often ranks were restarted.
pub const RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";

/// How ranks' output is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// For one run: rank 0 writes directly to this process's standard output; lines of other ranks
    /// have the prefix `[rank N] `.
    Run,
    /// For any command: every line has the prefix `[N]: `.
    Command,
}

/// What to start, and how to supervise it.
#[derive(Clone, Debug)]
pub struct Plan {
    pub work: Work,
    /// How long the other ranks may take to notice a failure by themselves.
    pub self_end: Duration,
    /// How long ranks may take to stop after a request; no limit if `None`.
    pub stop_limit: Option<Duration>,
    /// How often all ranks are restarted after one failed.
    pub max_restarts: u32,
    /// What to do after a rank died.
    pub advice: Option<String>,
    /// Whether ranks that are asked to stop save first, as far as this process knows.
    pub saves: bool,
    /// Whether the launcher of several machines started this process. That launcher sends requests
    /// over standard input, and reports to the user why ranks failed.
    pub over_stdin: bool,
}

/// The processes of a plan.
#[derive(Clone, Debug)]
pub enum Work {
    Ranks(Ranks),
    /// A supervisor on each of several machines.
    Hosts(Hosts),
}

impl Work {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Self::Ranks(ranks) => ranks.local_ranks,
            Self::Hosts(hosts) => hosts.hosts.len(),
        }
    }

    /// The secret with which ranks prove that they belong to this run.
    pub fn secret(&self) -> &Secret {
        match self {
            Self::Ranks(ranks) => &ranks.secret,
            Self::Hosts(hosts) => &hosts.secret,
        }
    }

    /// The store where the ranks of one round meet, if this process is to serve it.
    ///
    /// # Errors
    /// If the loopback interface refuses to listen.
    pub fn serve(&mut self) -> Result<Option<StoreServer>> {
        match self {
            Self::Ranks(ranks) => ranks.serve(),
            Self::Hosts(_) => Ok(None),
        }
    }

    /// Whether there are also ranks on other machines.
    pub fn is_part(&self) -> bool {
        matches!(self, Self::Ranks(ranks) if ranks.nodes > 1)
    }

    /// Process `index`, as messages call it.
    pub fn who(&self, index: usize) -> Who {
        match self {
            Self::Ranks(ranks) => Who::Rank(ranks.rank(index)),
            Self::Hosts(hosts) => Who::Host(hosts.hosts[index].name.clone()),
        }
    }

    /// The prefix of lines of process `index`.
    pub fn prefix(&self, index: usize) -> String {
        match self {
            Self::Ranks(ranks) => ranks.prefix(index),
            Self::Hosts(hosts) => format!("{}: ", hosts.hosts[index].name),
        }
    }

    /// Explains the exit of process `index`, if it could not report the reason itself.
    pub fn explain(&self, index: usize, exit: Exit, last_line: Option<&str>) -> Option<String> {
        match self {
            Self::Ranks(_) => None,
            Self::Hosts(hosts) => hosts.explain(index, exit, last_line),
        }
    }
}

impl Plan {
    /// The command of process `index`, for processes that were restarted `restarts` times.
    ///
    /// # Errors
    /// If the device does not exist.
    pub fn command(&self, index: usize, restarts: u32) -> Result<Command> {
        match &self.work {
            Work::Ranks(ranks) => ranks.command(index, restarts, self.max_restarts),
            Work::Hosts(hosts) => Ok(hosts.command(index)),
        }
    }
}
