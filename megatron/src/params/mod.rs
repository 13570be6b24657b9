//! Parameters: what they are regardless of layout ([`ParamSpec`]), how one rank's share lies in the
//! whole ([`Piece`]), their first values, and the flat buckets they live in ([`ParamStore`]).

mod file_backed;
mod gradients;
mod init;
mod piece;
mod row_sums;
mod snapshot;
mod spec;
mod store;

pub use file_backed::FileBacked;
pub(crate) use file_backed::on_threads;
pub use gradients::GradientBuffer;
pub use init::{initial_values, initial_values_of};
pub use piece::{Elements, ParamShare, Piece, ShardRef, StateKind, clip_pieces};
pub(crate) use snapshot::copy_on_host;
pub use snapshot::snapshot;
pub use spec::{Init, ParamSpec, Partition};
pub(crate) use store::overlap;
pub use store::{
    Bucket, Master, Param, ParamId, ParamStore, ParamsBuilder, PlacedBucket, PlacedParam,
    Placement, Role, StoreOptions,
};
