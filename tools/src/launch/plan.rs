//! What is started, and how it is treated.

use std::process::Command;
use std::time::Duration;

use megatron::comm::Secret;
use megatron::comm::rendezvous::StoreServer;

use super::failure::Who;
use super::local::Ranks;
use super::process::Exit;
use super::remote::Hosts;
use crate::error::Result;

/// Set for ranks whose supervisor serves the store at MASTER_ADDR:MASTER_PORT.
pub const STORE_SERVED: &str = "MEGATRON_STORE_SERVED";

/// Set for ranks that a command of ours starts for itself.
pub const OWN_RANKS: &str = "MEGATRON_OWN_RANKS";

/// torchrun's variable: how often ranks may be started again.
pub const MAX_RESTARTS: &str = "TORCHELASTIC_MAX_RESTARTS";
/// torchrun's variable: how often they were.
pub const RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";

/// How ranks' output is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Of one run: rank 0 writes to this process's standard output itself; other ranks' lines are
    /// prefixed `[rank N] `.
    Run,
    /// Of any command: every line is prefixed `[N]: `.
    Command,
}

/// What to start, and how to treat it.
#[derive(Clone, Debug)]
pub struct Plan {
    pub work: Work,
    /// How long the others may take to notice a failure by themselves.
    pub self_end: Duration,
    /// How long they may take to stop when asked to; as long as they need if `None`.
    pub stop_limit: Option<Duration>,
    /// How often all ranks are started again after one failed.
    pub max_restarts: u32,
    /// What to do after a rank died.
    pub advice: Option<String>,
    /// Whether ranks that are asked to stop save first, as far as this process knows.
    pub saves: bool,
    /// Whether the launcher of several machines started this process, speaks to it over its
    /// standard input, and tells its user why ranks failed.
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

    /// What the ranks prove to each other with that they are of this run.
    pub fn secret(&self) -> &Secret {
        match self {
            Self::Ranks(ranks) => &ranks.secret,
            Self::Hosts(hosts) => &hosts.secret,
        }
    }

    /// The store where the ranks of one round meet, if it is for this process to serve.
    ///
    /// # Errors
    /// If the loopback interface refuses to listen.
    pub fn serve(&mut self) -> Result<Option<StoreServer>> {
        match self {
            Self::Ranks(ranks) => ranks.serve(),
            Self::Hosts(_) => Ok(None),
        }
    }

    /// Whether ranks are on other machines, too.
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

    /// What lines of process `index` begin with.
    pub fn prefix(&self, index: usize) -> String {
        match self {
            Self::Ranks(ranks) => ranks.prefix(index),
            Self::Hosts(hosts) => format!("{}: ", hosts.hosts[index].name),
        }
    }

    /// Why process `index` ended so, where it could not say so itself and that tells.
    pub fn explain(&self, index: usize, exit: Exit, last_line: Option<&str>) -> Option<String> {
        match self {
            Self::Ranks(_) => None,
            Self::Hosts(hosts) => hosts.explain(index, exit, last_line),
        }
    }
}

impl Plan {
    /// The command of process `index`, for processes that were started again `restarts` times.
    ///
    /// # Errors
    /// If there is none.
    pub fn command(&self, index: usize, restarts: u32) -> Result<Command> {
        match &self.work {
            Work::Ranks(ranks) => ranks.command(index, restarts, self.max_restarts),
            Work::Hosts(hosts) => Ok(hosts.command(index)),
        }
    }
}
