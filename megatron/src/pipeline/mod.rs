//! Pipeline parallelism: the order in which stages compute microbatches.
//!
//! Schedules are data ([`Schedule`]). Generators make them ([`gpipe`], [`one_f_one_b`],
//! [`interleaved`], [`forward_only`]), [`delay_weight_gradients`] changes them, [`simulate`] proves
//! them, and one engine ([`Stage::run`]) executes them over the layers of each virtual stage
//! ([`Chunk`]). [`partition`] distributes layers over virtual stages.
//!
//! ```
//! use megatron::pipeline::{ChunkCosts, Costs, gpipe, one_f_one_b, render, simulate};
//!
//! # fn main() -> megatron::Result<()> {
//! let (stages, microbatches) = (2, 4);
//! // A backward takes twice as long as a forward.
//! let backward = ChunkCosts { input_gradients: 1, weight_gradients: 1, ..Default::default() };
//! let chunk = ChunkCosts { forward: 1, ..backward };
//! let costs = Costs::even(stages, 1, chunk)?;
//! let all_forwards_first = simulate(&gpipe(stages, microbatches)?, &costs)?;
//! let alternating = simulate(&one_f_one_b(stages, microbatches, 0)?, &costs)?;
//!
//! // Both take the same time; 1F1B keeps the activations of fewer microbatches.
//! assert_eq!(all_forwards_first.makespan, alternating.makespan);
//! assert_eq!(all_forwards_first.peak_in_flight, [4, 4]);
//! assert_eq!(alternating.peak_in_flight, [2, 1]);
//! println!("{}", render(&alternating));
//! # Ok(())
//! # }
//! ```

mod chunk;
mod costs;
mod delayed;
mod drawing;
mod engine;
mod generators;
mod messages;
mod partition;
mod replay;
mod saved_inputs;
mod schedule;
mod simulator;

pub use chunk::{Chunk, ChunkOutput, SavedChunk};
pub use costs::{ChunkCosts, Costs};
pub use delayed::delay_weight_gradients;
pub use drawing::{render, render_within};
pub use engine::{GradientListener, Losses, Results, Stage};
pub use generators::{forward_only, generate, gpipe, interleaved, one_f_one_b};
pub(crate) use partition::matches_of_types;
pub use partition::partition;
pub use replay::Replay;
pub use saved_inputs::SavedInputs;
pub use schedule::{Action, Pass, Payload, Schedule};
pub use simulator::{Report, Slot, simulate};
