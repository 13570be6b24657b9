//! Starting and supervising ranks.

mod failure;
mod inherited;
mod output;
mod plan;
mod process;
mod supervisor;
mod watch;

pub use inherited::{adjust, is_ignored};
pub use plan::{Plan, STORE_SERVED, Style};
pub use supervisor::supervise;
pub use watch::watch_supervisor;
