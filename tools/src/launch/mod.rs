//! Starting and supervising ranks.

mod env;

pub use env::LauncherEnv;
