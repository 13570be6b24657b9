//! The communicators of one rank, split off the world along the axes of its grid.

use super::{Axis, RankGrid};
use crate::comm::threads::solo;
use crate::comm::{Communicator, Group};
use crate::params::Replica;
use crate::{Error, Result};

/// The groups a rank belongs to. Members of a group are ordered by their index on its axis.
#[derive(Clone)]
pub struct ProcessGroups {
    /// The position of every rank.
    pub grid: RankGrid,
    /// This rank in the world.
    pub rank: usize,
    /// All ranks.
    pub world: Group,
    /// Ranks that share each layer.
    pub tp: Group,
    /// Ranks that share each sequence.
    pub cp: Group,
    /// cp × dp: all ranks with this rank's parameters. Gradients are summed and ZeRO shards over
    /// them. Named dp without context parallelism. The dp ranks alone, which read different
    /// samples, need no group ([`Self::dp_rank`]).
    pub replicas: Group,
    /// Stages of this rank's pipeline.
    pub pp: Group,
    /// First and last stage of one pipeline, which share a tied embedding. `None` on other stages
    /// and without a pipeline.
    pub embedding: Option<Group>,
}

impl ProcessGroups {
    /// Splits `world` along the axes of `grid`. Every rank of the world calls this with the same
    /// grid.
    ///
    /// # Errors
    /// If the world has another size than the grid, or splitting fails.
    pub fn new(world: Group, grid: RankGrid) -> Result<Self> {
        if world.size() != grid.world() {
            return Err(Error::config(format!(
                "the world has {} ranks, but tp·cp·dp·pp = {} · {} · {} · {} = {}; start that many ranks or change one \
                 of the sizes",
                world.size(),
                grid.size(Axis::Tp),
                grid.size(Axis::Cp),
                grid.size(Axis::Dp),
                grid.size(Axis::Pp),
                grid.world()
            )));
        }
        let rank = world.rank();
        let axis = |name, axis| split(world.as_ref(), name, Some(grid.group(axis, rank)));
        let tp = required(axis("tp", Axis::Tp)?, "tp")?;
        let cp = required(axis("cp", Axis::Cp)?, "cp")?;
        // This is a group separate from cp even if dp is 1, so that gradient reductions do not
        // delay the exchanges of attention.
        let name = if grid.size(Axis::Cp) == 1 { "dp" } else { "dp-cp" };
        let replicas =
            required(split(world.as_ref(), name, Some(grid.replica_group(rank)))?, name)?;
        let pp = required(axis("pp", Axis::Pp)?, "pp")?;
        let embedding = match grid.embedding_group(rank) {
            None => None,
            Some(ranks) => {
                split(world.as_ref(), "embedding", ranks.contains(&rank).then_some(ranks))?
            }
        };
        Ok(Self { grid, rank, world, tp, cp, replicas, pp, embedding })
    }

    /// This rank's index among the ranks that read different samples.
    pub fn dp_rank(&self) -> usize {
        self.grid.index(Axis::Dp, self.rank)
    }

    /// Number of ranks that read different samples.
    pub fn dp_size(&self) -> usize {
        self.grid.size(Axis::Dp)
    }

    /// Number of `rank`'s groups that contain other ranks.
    pub fn num_shared(grid: &RankGrid, rank: usize) -> usize {
        let axes = [Axis::Tp, Axis::Cp, Axis::Pp].map(|axis| grid.group(axis, rank));
        let embedding = grid.embedding_group(rank).filter(|ranks| ranks.contains(&rank));
        let groups = axes.into_iter().chain([grid.replica_group(rank)]).chain(embedding);
        usize::from(grid.world() > 1) + groups.filter(|ranks| ranks.len() > 1).count()
    }
}

/// The ranks that hold this rank's parameters: cp × dp.
#[derive(Clone)]
pub struct ReplicaGroups {
    /// All of them. Gradients are summed over them.
    pub all: Group,
    /// Those that shard buffers among them: all, without hybrid sharding.
    pub shards: Group,
    /// Those that have the same shards: this rank alone, without hybrid sharding.
    pub copies: Group,
}

impl ReplicaGroups {
    /// One copy of all shards.
    pub fn whole(all: Group) -> Self {
        Self { shards: all.clone(), copies: solo(), all }
    }

    /// `num_copies` copies of consecutive ranks, each of which shards buffers among its ranks.
    /// Collective over `all`.
    ///
    /// # Errors
    /// If `num_copies` does not divide the ranks, or splitting fails.
    pub fn new(all: Group, num_copies: usize) -> Result<Self> {
        if num_copies == 1 {
            return Ok(Self::whole(all));
        }
        let (rank, size) = (all.rank(), all.size());
        if num_copies == 0 || !size.is_multiple_of(num_copies) {
            return Err(Error::config(format!(
                "num_distributed_optimizer_instances = {num_copies} does not divide the {size} replicas (dp · cp)"
            )));
        }
        let Replica { shard, copy, .. } = Replica::new(rank, size, num_copies);
        let part = |name, color| required(all.split(name, Some(color), rank)?, name);
        Ok(Self { shards: part("shards", copy)?, copies: part("copies", shard)?, all })
    }

    /// This rank among them.
    pub fn replica(&self) -> Replica {
        Replica::new(self.all.rank(), self.all.size(), self.copies.size())
    }
}

/// Joins the group of `ranks` (ascending, including this rank), or none. The lowest rank is the
/// color.
fn split(world: &dyn Communicator, name: &str, ranks: Option<Vec<usize>>) -> Result<Option<Group>> {
    let group = world.split(name, ranks.as_ref().map(|ranks| ranks[0]), world.rank())?;
    let joined = group.as_ref().map(|group| group.ranks().to_vec());
    if joined != ranks {
        return Err(Error::comm(format!(
            "rank {} expected ranks {ranks:?} in group {name}, but joined {joined:?}; start all \
             ranks with the same parallel sizes",
            world.rank()
        )));
    }
    Ok(group)
}

fn required(group: Option<Group>, name: &str) -> Result<Group> {
    group.ok_or_else(|| Error::comm(format!("this rank joined no group {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::threads;

    /// The groups of every rank of a grid.
    fn all_groups(grid: RankGrid) -> Vec<ProcessGroups> {
        threads::run(grid.world(), |world| ProcessGroups::new(world, grid)).unwrap()
    }

    #[test]
    fn communicators_have_the_members_and_order_of_the_grid() {
        for (tp, cp, dp, pp) in [
            (1, 1, 1, 1),
            (2, 1, 2, 2),
            (2, 1, 1, 3),
            (1, 1, 3, 1),
            (2, 2, 2, 1),
            (1, 3, 1, 2),
            (1, 2, 3, 1),
        ] {
            let grid = RankGrid::new(tp, cp, 1, dp, pp).unwrap();
            for (rank, groups) in all_groups(grid).iter().enumerate() {
                let expected = [
                    ("tp", &groups.tp, grid.group(Axis::Tp, rank)),
                    ("cp", &groups.cp, grid.group(Axis::Cp, rank)),
                    (
                        if cp == 1 { "dp" } else { "dp-cp" },
                        &groups.replicas,
                        grid.replica_group(rank),
                    ),
                    ("pp", &groups.pp, grid.group(Axis::Pp, rank)),
                ];
                for (name, group, ranks) in expected {
                    assert_eq!(
                        (group.name(), group.ranks()),
                        (name, ranks.as_slice()),
                        "rank {rank} of {grid:?}"
                    );
                    assert_eq!(group.ranks()[group.rank()], rank, "{name} of {grid:?}");
                }
                assert_eq!((groups.rank, groups.world.rank()), (rank, rank));
                assert_eq!(
                    (groups.replicas.rank(), groups.replicas.size()),
                    (grid.replica(rank), grid.num_replicas())
                );
                assert_eq!((groups.dp_rank(), groups.dp_size()), (grid.index(Axis::Dp, rank), dp));
                let all = [&groups.world, &groups.tp, &groups.cp, &groups.replicas, &groups.pp];
                let shared = all
                    .into_iter()
                    .chain(&groups.embedding)
                    .filter(|group| group.size() > 1)
                    .count();
                assert_eq!(
                    ProcessGroups::num_shared(&grid, rank),
                    shared,
                    "rank {rank} of {grid:?}"
                );
            }
        }
    }

    #[test]
    fn only_first_and_last_stages_share_an_embedding() {
        let grid = RankGrid::new(2, 1, 1, 1, 3).unwrap();
        let embedding =
            |groups: &ProcessGroups| groups.embedding.as_ref().map(|group| group.ranks().to_vec());
        let all: Vec<_> = all_groups(grid).iter().map(embedding).collect();
        let (even, odd) = (Some(vec![0, 4]), Some(vec![1, 5]));
        assert_eq!(all, [even.clone(), odd.clone(), None, None, even, odd]);
        assert!(
            all_groups(RankGrid::new(2, 1, 1, 1, 1).unwrap())
                .iter()
                .all(|groups| groups.embedding.is_none())
        );
    }

    #[test]
    fn a_world_of_another_size_is_refused_with_the_equation() {
        let grid = RankGrid::new(2, 1, 1, 1, 2).unwrap();
        let refused = ProcessGroups::new(crate::comm::solo(), grid);
        let text = refused.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(text.contains("has 1 ranks") && text.contains("2 · 1 · 1 · 2 = 4"), "{text}");
    }
}
