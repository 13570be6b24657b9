//! Which rank writes which elements of a parameter and of its optimizer state into a checkpoint.
//!
//! This is arithmetic only, so the files of a layout can be planned without running that layout.

use crate::params::{
    BucketLayout, ParamShare, ParamSpec, Partition, PlacedParam, Replica, Role, clip_pieces,
    overlap,
};

/// Whether tp rank `tp_rank` is the one that counts and saves this parameter, among its tie group
/// and the tp ranks that hold the same values.
pub(super) fn speaks_for(spec: &ParamSpec, role: Role, tp_rank: usize) -> bool {
    role == Role::Primary && (spec.partition != Partition::Replicated || tp_rank == 0)
}

/// The parameters that tp rank `tp_rank` of `tp` and this replica of a stage with this layout write,
/// in the order of their file. They are those for which `Optimizer::shards` gives owned shards:
/// replicas share the work of writing, whether or not their optimizer state is sharded.
pub fn written(
    layout: &BucketLayout,
    (tp_rank, tp): (usize, usize),
    replica: Replica,
) -> Vec<ParamShare> {
    let of_param = |PlacedParam { spec, role, bucket, offset, numel }: &PlacedParam| {
        if !speaks_for(spec, *role, tp_rank) {
            return None;
        }
        let written = replica.written(layout.buckets[*bucket].len);
        let part = overlap(*offset..offset + numel, &written);
        let pieces = clip_pieces(&spec.pieces(tp_rank, tp), part.start - offset..part.end - offset);
        (!pieces.is_empty()).then(|| ParamShare {
            name: spec.name.clone(),
            global_shape: spec.shape.clone(),
            pieces,
        })
    };
    layout.params.iter().filter_map(of_param).collect()
}
