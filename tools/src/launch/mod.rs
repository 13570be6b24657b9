//! Starting and supervising ranks.

mod failure;
mod inherited;
mod output;
mod plan;
mod process;
mod restarts;
mod supervisor;
mod watch;

pub use inherited::{adjust, is_ignored};
pub use plan::{MAX_RESTARTS, OWN_RANKS, Plan, STORE_SERVED, Style};
pub use restarts::{free_port, supervise};
pub use watch::watch_supervisor;
