//! Shows a run's progress: a bar on a terminal, Megatron-LM's log lines elsewhere.

mod bar;
mod bytes;
mod lines;
pub mod profile;
pub mod table;
mod timers;
mod window;
mod words;

use std::io::IsTerminal;

use megatron::train::{Reporter, Silent};

pub use bytes::ByteBar;
pub use words::{count, duration};

/// The reporter of `rank`. Only rank 0 shows progress, every `log_interval` steps.
pub fn for_rank(rank: usize, log_interval: u64) -> Box<dyn Reporter> {
    if rank != 0 {
        Box::new(Silent)
    } else if std::io::stdout().is_terminal() {
        Box::new(bar::Bar::new(log_interval))
    } else {
        Box::new(lines::Lines::new(std::io::stdout(), log_interval))
    }
}
