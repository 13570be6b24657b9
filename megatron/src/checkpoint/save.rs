//! Saving: every rank writes the elements that it owns; rank 0 checks that they are complete and
//! makes the checkpoint appear.
//!
//! A failure on any rank is a failure on all ranks, and changes nothing.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;

use super::folder::Names;
use super::manifest::{FORMAT_VERSION, MANIFEST, Manifest, TensorEntry};
use super::rank_file::{CHUNK_ELEMENTS, RankFile, Share, Written};
use super::shard_file::{self, Content, write_synced};
use super::values::check_shard;
use crate::comm::Group;
use crate::params::ShardRef;
use crate::text::printable;
use crate::{Error, Result};

/// Saves a checkpoint as `dir/iter_…` and updates the pointer in `dir`. Collective over `world`.
///
/// `shards` are the elements that this rank owns: over all ranks, every element of every logical
/// tensor is in exactly one shard. `state` is the trainer's (rank 0's is used); it is returned as
/// `Manifest::state`, floats to within one unit in the last place. `dir` must be the same folder
/// for all ranks.
///
/// A checkpoint of the same iteration is replaced: it is set aside under a hidden name, and removed
/// when the new one is in place. If the run is killed between the two renames, [`super::latest`]
/// still finds it. Temporary folders of killed runs are removed.
///
/// # Errors
/// All ranks fail together: the failing rank returns its own reason, the others which rank failed
/// and why. `dir` is unchanged.
pub fn save(
    dir: &Path,
    iteration: u64,
    shards: &[ShardRef],
    state: &serde_json::Value,
    world: &Group,
) -> Result<()> {
    let names = Names::new(dir, iteration);
    let saved = prepare(&names, shards, world).and_then(|plan| {
        complete(&names, iteration, state, write(plan, shards, &names.temp), world)
    });
    verdict(saved, &names, world)
}

/// Why a save failed.
pub(super) enum Failure {
    /// Every rank knows of the failure.
    Agreed(Error),
    /// The ranks could not agree, because one is lost.
    Lost(Error),
}

/// The result of a save, the same on every rank: after a failure, the temporary folder is removed.
pub(super) fn verdict<T>(
    result: std::result::Result<T, Failure>,
    names: &Names,
    world: &Group,
) -> Result<T> {
    let failure = match result {
        Ok(value) => return Ok(value),
        Err(failure) => failure,
    };
    if world.rank() == 0 {
        names.discard();
    }
    match failure {
        Failure::Agreed(error) => {
            // When a rank returns, the temporary folder is gone. The first error is the cause.
            let _ = world.barrier();
            Err(error)
        }
        Failure::Lost(error) => Err(error),
    }
}

/// Creates the temporary folder, and plans this rank's file in it. Collective over `world`.
pub(super) fn prepare(
    names: &Names,
    shards: &[ShardRef],
    world: &Group,
) -> std::result::Result<RankFile, Failure> {
    let ready = plan(shards, world.rank())
        .and_then(|plan| if world.rank() == 0 { names.prepare().map(|()| plan) } else { Ok(plan) });
    let (plan, _) = agree(world, &names.target, ready.map(|plan| (plan, Vec::new())))?;
    Ok(plan)
}

/// Makes the checkpoint appear after all ranks have `written` their files. Collective over `world`.
pub(super) fn complete(
    names: &Names,
    iteration: u64,
    state: &serde_json::Value,
    written: Result<Written>,
    world: &Group,
) -> std::result::Result<(), Failure> {
    let written = written.and_then(|written| {
        serde_json::to_vec(&written).map_err(|e| Error::checkpoint(&names.target, e.to_string()))
    });
    let ((), written) = agree(world, &names.target, written.map(|json| ((), json)))?;
    let committed =
        if world.rank() == 0 { commit(names, iteration, state, &written) } else { Ok(()) };
    agree(world, &names.target, committed.map(|()| ((), Vec::new())))?;
    Ok(())
}

/// Ends a phase: every rank learns whether all ranks succeeded, and receives their messages.
fn agree<T>(
    world: &Group,
    target: &Path,
    result: Result<(T, Vec<u8>)>,
) -> std::result::Result<(T, Vec<Vec<u8>>), Failure> {
    const SUCCESS: u8 = 0;
    const FAILURE: u8 = 1;
    let message = match &result {
        Ok((_, message)) => [&[SUCCESS], message.as_slice()].concat(),
        Err(error) => [&[FAILURE], error.to_string().as_bytes()].concat(),
    };
    let all = world.all_gather_bytes(&message).map_err(Failure::Lost)?;
    let (value, _) = result.map_err(Failure::Agreed)?;
    let mut messages = Vec::with_capacity(all.len());
    for (rank, message) in all.into_iter().enumerate() {
        match message.split_first() {
            Some((&SUCCESS, message)) => messages.push(message.to_vec()),
            Some((_, why)) => {
                let rank = world.ranks().get(rank).copied().unwrap_or(rank);
                let why = printable(why);
                let message = format!(
                    "was not saved because of rank {rank}: {why}; earlier checkpoints are intact"
                );
                return Err(Failure::Agreed(Error::checkpoint(target, message)));
            }
            None => {
                return Err(Failure::Lost(Error::comm(format!(
                    "rank {rank} sent an empty message"
                ))));
            }
        }
    }
    Ok((value, messages))
}

/// The plan of a rank's file.
fn plan(shards: &[ShardRef], rank: usize) -> Result<RankFile> {
    let share = |shard: &ShardRef| {
        Ok(Share {
            name: shard.name.clone(),
            kind: shard.kind,
            shape: shard.global_shape.clone(),
            partition: shard.partition,
            dtype: check_shard(shard)?,
            pieces: shard.pieces.clone(),
        })
    };
    Ok(RankFile::plan(rank, shards.iter().map(share).collect::<Result<_>>()?))
}

/// Writes this rank's file.
pub(super) fn write(plan: RankFile, shards: &[ShardRef], folder: &Path) -> Result<Written> {
    let content = |(item, &(shard, _)): (usize, &(usize, usize))| Content {
        data: &shards[shard].data,
        range: plan.piece(item).local_range(),
    };
    let contents: Vec<_> = plan.sources.iter().enumerate().map(content).collect();
    let (bytes, checksums) =
        shard_file::write(&folder.join(&plan.file), &plan.items, &contents, CHUNK_ELEMENTS)?;
    Ok(plan.written(bytes, &checksums))
}

/// Assembles the manifest from the ranks' reports, and moves the checkpoint into place.
fn commit(
    names: &Names,
    iteration: u64,
    state: &serde_json::Value,
    written: &[Vec<u8>],
) -> Result<()> {
    let parse = |(rank, json): (usize, &Vec<u8>)| {
        let refuse = |e| {
            Error::checkpoint(&names.target, format!("rank {rank} sent no list of tensors: {e}"))
        };
        serde_json::from_slice::<Written>(json).map_err(refuse)
    };
    let written = written.iter().enumerate().map(parse).collect::<Result<_>>()?;
    finish(names, iteration, state, written)
}

/// Completes the checkpoint in the temporary folder from its `written` files, in rank order, and
/// moves it into place.
///
/// # Errors
/// If the files are incomplete, or a file operation fails. Then only the temporary folder has
/// changed.
pub(super) fn finish(
    names: &Names,
    iteration: u64,
    state: &serde_json::Value,
    written: Vec<Written>,
) -> Result<()> {
    let refuse = |message: String| Error::checkpoint(&names.target, message);
    let mut files = BTreeMap::new();
    // with the first rank that holds a share of it
    let mut tensors: BTreeMap<_, (usize, TensorEntry)> = BTreeMap::new();
    for (rank, written) in written.into_iter().enumerate() {
        files.insert(written.file, written.bytes);
        for tensor in written.tensors {
            match tensors.entry((tensor.name.clone(), tensor.kind)) {
                Entry::Vacant(entry) => {
                    entry.insert((rank, tensor));
                }
                Entry::Occupied(mut entry) => {
                    let (first, known) = entry.get_mut();
                    if (&known.shape, known.dtype) != (&tensor.shape, tensor.dtype) {
                        return Err(refuse(format!(
                            "{} ({}) is {} {:?} on rank {first}, but {} {:?} on rank {rank}",
                            known.name,
                            known.kind,
                            known.dtype,
                            known.shape,
                            tensor.dtype,
                            tensor.shape
                        )));
                    }
                    known.chunks.extend(tensor.chunks);
                }
            }
        }
    }
    let tensors = tensors.into_values().map(|(_, tensor)| tensor).collect();
    let folder = names.target.clone();
    let manifest = Manifest {
        format_version: FORMAT_VERSION,
        iteration,
        state: state.clone(),
        files,
        tensors,
        folder,
    };
    manifest
        .validate()
        .map_err(|why| refuse(format!("the ranks' shards do not form a complete tensor: {why}")))?;
    let bytes = manifest.to_bytes().map_err(|e| refuse(e.to_string()))?;
    write_synced(&names.temp.join(MANIFEST), &bytes)?;
    names.commit()
}
