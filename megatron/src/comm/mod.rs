//! Communication between ranks.
//!
//! A [`Communicator`] is one rank's membership in one group. Every member issues operations in the
//! same order (as in NCCL and MPI), and they run asynchronously; [`Work::wait`] completes them.
//! Reductions add in rank order, never in order of arrival, and 16-bit data is summed in fp32. A
//! result thus depends only on the data and the group.
//!
//! ```text
//! group, collectives     one implementation of Communicator, over messages
//! executor               order and overlap of a group's operations
//! endpoint, inbox        waiting for messages: matching, deadlines, lost ranks
//! threads, local, tcp    how messages travel (trait Link)
//! staging                tensors on GPUs, copied through the host
//! nccl                   tensors on GPUs, by NCCL, with one of these (feature `nccl`)
//! rendezvous             how ranks find each other; init() makes a world
//! secret                 authentication of ranks
//! pending_connections    limits on unauthenticated connections
//! ```
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use megatron::comm::{Communicator, ReduceOp, threads};
//!
//! # fn main() -> megatron::Result<()> {
//! // Four ranks, here as threads; `spawn` starts processes.
//! let sums = threads::run(4, |world| {
//!     let sum = Tensor::new(&[world.rank() as f32, 1.0], &Device::Cpu)?;
//!     let work = world.all_reduce(&sum, ReduceOp::Sum)?;
//!     // Anything that does not need the sum …
//!     work.wait()?;
//!     Ok(sum.to_vec1::<f32>()?)
//! })?;
//! assert_eq!(sums, vec![[6.0, 4.0]; 4]);
//!
//! // Two groups: even ranks and odd ones.
//! let groups = threads::run(4, |world| {
//!     let group = world.split("parity", Some(world.rank() % 2), 0)?;
//!     Ok(group.map(|group| group.ranks().to_vec()))
//! })?;
//! assert_eq!(groups[1], Some(vec![1, 3]));
//! # Ok(())
//! # }
//! ```

mod collectives;
mod communicator;
mod endpoint;
mod executor;
#[doc(hidden)]
pub mod fuzz;
mod group;
mod inbox;
mod local;
mod message;
#[cfg(feature = "nccl")]
pub mod nccl;
mod operands;
mod options;
mod pending_connections;
mod reduce;
pub mod rendezvous;
mod secret;
mod staging;
mod tcp;
pub mod threads;

pub use communicator::{Communicator, Group, ReduceOp, Work};
pub(crate) use inbox::lock;
pub use local::Process;
pub use options::CommOptions;
pub use rendezvous::{Backend, RankInfo, Rendezvous, World, init, spawn, spawn_with};
pub use secret::{RUN_SECRET, Secret};
pub use threads::solo;
