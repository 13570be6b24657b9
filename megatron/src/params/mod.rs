//! Parameters: what they are regardless of layout ([`ParamSpec`]), and how one rank's share lies in the whole
//! ([`Piece`]).

mod piece;
mod spec;

pub use piece::{Piece, ShardRef, StateKind, clip_pieces};
pub use spec::{Init, ParamSpec, Partition};
