//! The layout of ranks, and the groups of ranks that work together.
//!
//! [`RankGrid`] is arithmetic without I/O; [`ProcessGroups`] turns it into communicators.
//!
//! ```
//! use megatron::comm::threads;
//! use megatron::topology::{Axis, ProcessGroups, RankGrid};
//!
//! # fn main() -> megatron::Result<()> {
//! // tp 2 × cp 1 × ep 1 × dp 2 × pp 2: tp varies fastest, pp slowest.
//! let grid = RankGrid::new(2, 1, 1, 2, 2)?;
//! assert_eq!(grid.world(), 8);
//! assert_eq!(grid.group(Axis::Tp, 5), [4, 5]);
//! assert_eq!(grid.group(Axis::Dp, 5), [5, 7]);
//! assert_eq!(grid.group(Axis::Pp, 5), [1, 5]);
//!
//! // The same groups as communicators.
//! let groups = threads::run(8, |world| {
//!     let groups = ProcessGroups::new(world, grid)?;
//!     Ok((groups.tp.ranks().to_vec(), groups.pp.ranks().to_vec()))
//! })?;
//! assert_eq!(groups[5], (vec![4, 5], vec![1, 5]));
//! # Ok(())
//! # }
//! ```

mod grid;
mod groups;

pub use grid::{Axis, Coords, GridSizes, RankGrid, Sourced};
pub use groups::{ProcessGroups, ReplicaGroups};
