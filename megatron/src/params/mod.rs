//! Parameters: their layout-independent description ([`ParamSpec`]), the place of one rank's share
//! in the whole ([`Piece`]), their initial values, and the flat buckets that store them
//! ([`ParamStore`]).
//!
//! ```
//! use megatron::params::{Init, ParamSpec, Partition, initial_values};
//!
//! let spec = ParamSpec {
//!     name: "layers.0.weight".into(),
//!     shape: vec![6, 4],
//!     partition: Partition::Split { dim: 0, parts: 1 },
//!     padded_dim0: 6,
//!     init: Init::Normal { std: 0.02 },
//!     weight_decay: true,
//!     tie_group: None,
//!     grad_partial_over_tp: false,
//! };
//! assert_eq!(spec.local_shape(3), [2, 4]);
//!
//! // Initial values depend on seed and name alone: the rows of tp ranks are those of the whole.
//! let whole = initial_values(&spec, 0, 1, 1234);
//! let shares: Vec<f32> = (0..3).flat_map(|rank| initial_values(&spec, rank, 3, 1234)).collect();
//! assert_eq!(shares, whole);
//!
//! // Where the rows of tp rank 1 lie in the whole.
//! let pieces = spec.pieces(1, 3);
//! assert_eq!(pieces[0].offset, [2, 0]);
//! assert_eq!(pieces[0].shape, [2, 4]);
//! ```

mod bucket_layout;
mod file_backed;
mod gradients;
mod init;
mod local_part;
mod local_shard;
mod piece;
mod placement;
mod row_sums;
mod snapshot;
mod spec;
mod store;
mod unit_window;
mod weights;

pub use bucket_layout::{
    BucketLayout, BucketLimit, ElementCounts, ParamsBuilder, PlacedBucket, PlacedParam,
};
pub use file_backed::FileBacked;
pub(crate) use file_backed::on_threads;
pub use gradients::{GradientBuffer, GradientShard};
pub use init::{initial_values, initial_values_of};
pub use local_part::{LocalPart, Residence};
pub use local_shard::LocalShard;
pub use piece::{Elements, ParamShare, Piece, ShardRef, StateKind, clip_pieces};
pub use placement::{Placement, Placements, Replica};
pub(crate) use snapshot::copy_on_host;
pub use snapshot::snapshot;
pub use spec::{Init, ParamSpec, Partition};
pub(crate) use store::overlap;
pub use store::{Bucket, Param, ParamId, ParamStore, Role, StoreOptions};
pub use unit_window::UnitWindow;
pub use weights::Weights;
