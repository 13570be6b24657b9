//! Starting and supervising ranks.

mod env;
mod failure;
mod output;
mod process;
mod supervisor;

pub use env::LauncherEnv;
pub use supervisor::{Plan, Style, supervise};
