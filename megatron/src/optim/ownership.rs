//! Which rank writes which elements of a parameter and of its optimizer state into a checkpoint.
//!
//! This is arithmetic only, so the files of a layout can be planned without running that layout.

use std::ops::Range;

use crate::data_parallel::shard;
use crate::params::{
    ParamShare, ParamSpec, Partition, PlacedParam, Placement, Role, clip_pieces, overlap,
};

/// Whether tp rank `tp_rank` is the one that counts and saves this parameter, among its tie group
/// and the tp ranks that hold the same values.
pub(super) fn speaks_for(spec: &ParamSpec, role: Role, tp_rank: usize) -> bool {
    role == Role::Primary && (spec.partition != Partition::Replicated || tp_rank == 0)
}

/// The part of a parameter that replica `dp_rank` of `dp` writes, as a range of the bucket. The
/// parameter lies at `whole` in a bucket of `bucket_len` elements. Replicas share the work of
/// writing, whether or not their optimizer state is sharded.
pub(super) fn written_part(
    whole: Range<usize>,
    bucket_len: usize,
    dp_rank: usize,
    dp: usize,
) -> Range<usize> {
    overlap(whole, &shard(bucket_len, dp_rank, dp))
}

/// The parameters that the rank at (`tp_rank`, `dp_rank`) of a stage with this placement writes, in
/// the order of its file. They are those for which `Optimizer::shards` gives owned shards.
pub fn written(
    placement: &Placement,
    (tp_rank, tp): (usize, usize),
    (dp_rank, dp): (usize, usize),
) -> Vec<ParamShare> {
    let of_param = |PlacedParam { spec, role, bucket, offset, numel }: &PlacedParam| {
        if !speaks_for(spec, *role, tp_rank) {
            return None;
        }
        let part =
            written_part(*offset..offset + numel, placement.buckets[*bucket].len, dp_rank, dp);
        let pieces = clip_pieces(&spec.pieces(tp_rank, tp), part.start - offset..part.end - offset);
        (!pieces.is_empty()).then(|| ParamShare {
            name: spec.name.clone(),
            global_shape: spec.shape.clone(),
            pieces,
        })
    };
    placement.params.iter().filter_map(of_param).collect()
}
