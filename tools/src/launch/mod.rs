//! Starting and supervising ranks.

mod failure;
mod output;
mod process;
mod supervisor;

pub use supervisor::{Plan, STORE_SERVED, Style, supervise};
