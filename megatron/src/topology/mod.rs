//! Which rank sits where, and the groups of ranks that work together.
//!
//! [`RankGrid`] is arithmetic without I/O; [`ProcessGroups`] turns it into communicators.

mod grid;
mod groups;

pub use grid::{Axis, Coords, GridSizes, RankGrid, Sourced};
pub use groups::ProcessGroups;
