//! Pipeline parallelism: who computes which microbatch when.
//!
//! Schedules are data ([`Schedule`]), made by generators ([`gpipe`], [`one_f_one_b`], [`interleaved`],
//! [`forward_only`]), proved by [`simulate`], and executed by one engine ([`Stage::run`]) over the layers of each virtual
//! stage ([`Chunk`]). [`partition`] deals layers to virtual stages.

mod chunk;
mod engine;
mod generators;
mod messages;
mod partition;
mod replay;
mod schedule;
mod simulator;

pub use chunk::{Chunk, ChunkOutput, SavedChunk};
pub use engine::{GradientListener, Losses, Results, Stage};
pub use generators::{forward_only, generate, gpipe, interleaved, one_f_one_b};
pub use partition::partition;
pub use replay::Replay;
pub use schedule::{Action, Pass, Payload, Schedule};
pub use simulator::{Report, Slot, render, simulate};
