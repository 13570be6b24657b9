//! Starting and supervising ranks.

mod failure;
mod hostfile;
mod inherited;
mod local;
mod output;
mod plan;
mod process;
mod remote;
mod requests;
mod restarts;
mod started;
mod supervisor;
mod watch;

pub use hostfile::{Host, read as read_hostfile};
pub use inherited::{adjust, is_ignored};
#[cfg(test)]
pub use local::COMMANDS;
pub use local::{GPU_QUEUES, MOST_GPU_QUEUES, Ranks};
pub use plan::{MAX_RESTARTS, OWN_RANKS, Plan, STORE_SERVED, Style, Work};
pub use process::signal_name;
pub use remote::{Hosts, exported, is_here, is_loopback};
pub use requests::STOP_SIGNALS;
pub use restarts::{free_port, supervise};
pub use started::started;
pub use watch::watch_supervisor;
