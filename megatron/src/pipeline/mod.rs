//! Pipeline parallelism: who computes which microbatch when.
//!
//! Schedules are data ([`Schedule`]), made by generators ([`gpipe`], [`one_f_one_b`],
//! [`interleaved`], [`forward_only`]), changed by [`delay_weight_gradients`], proved by
//! [`simulate`], and executed by one engine ([`Stage::run`]) over the layers of each virtual stage
//! ([`Chunk`]). [`partition`] deals layers to virtual stages.

mod chunk;
mod costs;
mod delayed;
mod drawing;
mod engine;
mod generators;
mod messages;
mod partition;
mod replay;
mod schedule;
mod simulator;

pub use chunk::{Chunk, ChunkOutput, SavedChunk};
pub use costs::{ChunkCosts, Costs};
pub use delayed::delay_weight_gradients;
pub use drawing::render;
pub use engine::{GradientListener, Losses, Results, Stage};
pub use generators::{forward_only, generate, gpipe, interleaved, one_f_one_b};
pub use partition::partition;
pub use replay::Replay;
pub use schedule::{Action, Pass, Payload, Schedule};
pub use simulator::{Report, Slot, simulate};
