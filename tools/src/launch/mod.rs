//! Starting and supervising ranks.

mod failure;
mod inherited;
mod output;
mod process;
mod supervisor;
mod watch;

pub use inherited::{adjust, is_ignored};
pub use supervisor::{Plan, STORE_SERVED, Style, supervise};
pub use watch::watch_supervisor;
