//! Rank arithmetic: the coordinates of a rank on tp × cp × ep × dp × pp, and the groups along each
//! axis.
//!
//! The order is Megatron-LM's `tp-cp-ep-dp-pp`, tp fastest: rank = tp + TP·(cp + CP·(dp + DP·pp))
//! and world = TP·CP·DP·PP. Expert parallelism adds no ranks. It regroups the CP·DP ranks with the
//! same dense layers as EP × (CP·DP / EP), ep faster, so ep must divide cp·dp. Ranks with equal
//! (tp, ep, pp) hold the same experts and form a group of [`Axis::ExpertDp`]. With cp = 1 an ep
//! group consists of ep neighbouring replicas.

use std::fmt;

use crate::config::ParallelConfig;
use crate::{Error, Result};

/// A size and its source: a flag, a key of the run file, or the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sourced {
    /// A number of ranks.
    pub value: usize,
    /// E.g. `--tensor-model-parallel-size`; errors print it next to the number.
    pub source: Option<String>,
}

impl Sourced {
    /// A value with its source.
    pub fn new(value: usize, source: impl Into<String>) -> Self {
        Self { value, source: Some(source.into()) }
    }
}

impl From<usize> for Sourced {
    fn from(value: usize) -> Self {
        Self { value, source: None }
    }
}

impl fmt::Display for Sourced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) => write!(f, "{} ({source})", self.value),
            None => write!(f, "{}", self.value),
        }
    }
}

/// The requested sizes. Unless dp is given, it takes what the other axes leave of the world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GridSizes {
    /// Ranks that share each layer.
    pub tp: Sourced,
    /// Ranks that share each sequence.
    pub cp: Sourced,
    /// Ranks that share the experts of each layer.
    pub ep: Sourced,
    /// Replicas; `None`: as many as fit in the world.
    pub dp: Option<Sourced>,
    /// Pipeline stages.
    pub pp: Sourced,
}

/// One axis of the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Ranks that share each layer.
    Tp,
    /// Ranks that share each sequence.
    Cp,
    /// Ranks that share the experts of a layer.
    Ep,
    /// Replicas.
    Dp,
    /// Stages of the pipeline.
    Pp,
    /// Replicas of the same experts: cp × dp without ep.
    ExpertDp,
}

/// The position of a rank among the dense layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coords {
    /// Below the size of [`Axis::Tp`].
    pub tp: usize,
    /// Below the size of [`Axis::Cp`].
    pub cp: usize,
    /// Below the size of [`Axis::Dp`].
    pub dp: usize,
    /// The pipeline stage, below the size of [`Axis::Pp`].
    pub pp: usize,
}

/// The layout of a world of ranks. Methods accept only ranks within the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankGrid {
    tp: usize,
    cp: usize,
    ep: usize,
    dp: usize,
    pp: usize,
}

impl RankGrid {
    /// The grid of tp·cp·dp·pp ranks.
    ///
    /// # Errors
    /// If a size is 0 or ep does not divide cp·dp.
    pub fn new(tp: usize, cp: usize, ep: usize, dp: usize, pp: usize) -> Result<Self> {
        let [tp, cp, ep, dp, pp] = [tp, cp, ep, dp, pp].map(Sourced::from);
        Self::checked(&tp, &cp, &ep, &dp, &pp)
    }

    /// The grid of a run's configuration.
    ///
    /// # Errors
    /// As [`RankGrid::new`].
    pub fn from_config(config: &ParallelConfig) -> Result<Self> {
        Self::checked(
            &Sourced::new(config.tensor_model_parallel_size, "tensor-model-parallel-size"),
            &Sourced::new(config.context_parallel_size, "context-parallel-size"),
            &Sourced::from(1),
            &Sourced::new(config.data_parallel_size, "data-parallel-size"),
            &Sourced::new(config.pipeline_model_parallel_size, "pipeline-model-parallel-size"),
        )
    }

    /// The grid of a world with a given size. Without a given dp, dp is what the other axes leave.
    ///
    /// # Errors
    /// If world ≠ tp·cp·dp·pp, or no dp makes them equal. The message has the equation with every
    /// number and its source.
    pub fn for_world(world: &Sourced, sizes: &GridSizes) -> Result<Self> {
        let GridSizes { tp, cp, ep, dp, pp } = sizes;
        let unit = Self::checked(tp, cp, &Sourced::from(1), &Sourced::from(1), pp)?.world();
        if world.value == 0 || !world.value.is_multiple_of(unit) {
            return Err(Error::config(format!(
                "world size {world} is not a multiple of tp·cp·pp = {tp} · {cp} · {pp} = {unit}; start a multiple of \
                 {unit} ranks or change one of the sizes"
            )));
        }
        let left = world.value / unit;
        let dp = dp.clone().unwrap_or_else(|| Sourced::new(left, "world size / (tp·cp·pp)"));
        if dp.value != left {
            let product = unit.saturating_mul(dp.value);
            return Err(Error::config(format!(
                "world size {world} ≠ tp·cp·dp·pp = {tp} · {cp} · {dp} · {pp} = {product}; start \
                 {product} ranks, set dp to {left}, or leave dp out"
            )));
        }
        Self::checked(tp, cp, ep, &dp, pp)
    }

    fn checked(
        tp: &Sourced,
        cp: &Sourced,
        ep: &Sourced,
        dp: &Sourced,
        pp: &Sourced,
    ) -> Result<Self> {
        for (name, size) in [("tp", tp), ("cp", cp), ("ep", ep), ("dp", dp), ("pp", pp)] {
            if size.value == 0 {
                return Err(Error::config(format!("{name} = {size} must be at least 1")));
            }
        }
        let world =
            [cp, dp, pp].iter().try_fold(tp.value, |product, size| product.checked_mul(size.value));
        if world.is_none() {
            return Err(Error::config(format!(
                "tp·cp·dp·pp = {tp} · {cp} · {dp} · {pp} is larger than any world"
            )));
        }
        let replicas = cp.value * dp.value;
        if !replicas.is_multiple_of(ep.value) {
            return Err(Error::config(format!(
                "cp·dp = {cp} · {dp} = {replicas} is not a multiple of ep = {ep}; expert \
                 parallelism regroups the cp·dp ranks with the same dense layers, so choose a \
                 divisor of {replicas} as ep"
            )));
        }
        Ok(Self { tp: tp.value, cp: cp.value, ep: ep.value, dp: dp.value, pp: pp.value })
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.tp * self.cp * self.dp * self.pp
    }

    /// Number of ranks along an axis, which is the size of its groups.
    pub fn size(&self, axis: Axis) -> usize {
        self.stride_and_size(axis).1
    }

    /// The position of a rank.
    pub fn coords(&self, rank: usize) -> Coords {
        Coords {
            tp: self.index(Axis::Tp, rank),
            cp: self.index(Axis::Cp, rank),
            dp: self.index(Axis::Dp, rank),
            pp: self.index(Axis::Pp, rank),
        }
    }

    /// The rank at a position.
    pub fn rank_of(&self, c: Coords) -> usize {
        assert!(
            c.tp < self.tp && c.cp < self.cp && c.dp < self.dp && c.pp < self.pp,
            "{c:?} is outside {self:?}"
        );
        c.tp + self.tp * (c.cp + self.cp * (c.dp + self.dp * c.pp))
    }

    /// A rank's index along one axis, which is its rank within that axis' group.
    pub fn index(&self, axis: Axis, rank: usize) -> usize {
        assert!(rank < self.world(), "rank {rank} is outside a world of {} ranks", self.world());
        let (stride, size) = self.stride_and_size(axis);
        rank / stride % size
    }

    /// The ranks that differ from `rank` along `axis` only, in order of their index; `rank` is one
    /// of them.
    pub fn group(&self, axis: Axis, rank: usize) -> Vec<usize> {
        self.group_over(&[axis], rank)
    }

    /// Every group of an axis, ordered by lowest rank. Each rank of the world is in exactly one
    /// group.
    pub fn groups(&self, axis: Axis) -> Vec<Vec<usize>> {
        (0..self.world())
            .filter(|&rank| self.index(axis, rank) == 0)
            .map(|rank| self.group(axis, rank))
            .collect()
    }

    /// tp × pp: the ranks that together hold one copy of the model, in order of rank.
    pub fn model_group(&self, rank: usize) -> Vec<usize> {
        self.group_over(&[Axis::Tp, Axis::Pp], rank)
    }

    /// cp × dp: the ranks with the same dense parameters, in order of rank. Gradients are summed
    /// over them.
    pub fn replica_group(&self, rank: usize) -> Vec<usize> {
        self.group_over(&[Axis::Cp, Axis::Dp], rank)
    }

    /// A rank's index within its [`replica_group`](Self::replica_group): cp fastest.
    pub fn replica(&self, rank: usize) -> usize {
        self.index(Axis::Cp, rank) + self.cp * self.index(Axis::Dp, rank)
    }

    /// cp · dp: the number of ranks with the same dense parameters.
    pub fn num_replicas(&self) -> usize {
        self.cp * self.dp
    }

    /// First and last stage of `rank`'s pipeline, which share a tied embedding; `None` without a
    /// pipeline.
    pub fn embedding_group(&self, rank: usize) -> Option<Vec<usize>> {
        let pipeline = self.group(Axis::Pp, rank);
        (self.pp > 1).then(|| vec![pipeline[0], pipeline[self.pp - 1]])
    }

    /// The rank that holds the next stage; the last stage's next is the first.
    pub fn next_stage(&self, rank: usize) -> usize {
        self.group(Axis::Pp, rank)[(self.index(Axis::Pp, rank) + 1) % self.pp]
    }

    /// The rank that holds the previous stage; the first stage's previous is the last.
    pub fn prev_stage(&self, rank: usize) -> usize {
        self.group(Axis::Pp, rank)[(self.index(Axis::Pp, rank) + self.pp - 1) % self.pp]
    }

    /// Whether `rank` holds the first stage of its pipeline.
    pub fn is_first_stage(&self, rank: usize) -> bool {
        self.index(Axis::Pp, rank) == 0
    }

    /// Whether `rank` holds the last stage of its pipeline.
    pub fn is_last_stage(&self, rank: usize) -> bool {
        self.index(Axis::Pp, rank) == self.pp - 1
    }

    /// Distance between neighbours on an axis in ranks, and the number of ranks on it.
    fn stride_and_size(&self, axis: Axis) -> (usize, usize) {
        let Self { tp, cp, ep, dp, pp } = *self;
        match axis {
            Axis::Tp => (1, tp),
            Axis::Cp => (tp, cp),
            Axis::Dp => (tp * cp, dp),
            Axis::Pp => (tp * cp * dp, pp),
            Axis::Ep => (tp, ep),
            Axis::ExpertDp => (tp * ep, cp * dp / ep),
        }
    }

    /// Ranks that differ from `rank` along `axes` only. The axes are given fastest first and do not
    /// overlap (ep and expert dp are made of cp and dp), so the result is in order of rank.
    fn group_over(&self, axes: &[Axis], rank: usize) -> Vec<usize> {
        let origin = axes
            .iter()
            .fold(rank, |r, &axis| r - self.index(axis, rank) * self.stride_and_size(axis).0);
        let mut ranks = vec![origin];
        for &axis in axes {
            let (stride, size) = self.stride_and_size(axis);
            ranks = (0..size).flat_map(|i| ranks.iter().map(move |r| r + i * stride)).collect();
        }
        ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AXES: [Axis; 6] = [Axis::Tp, Axis::Cp, Axis::Ep, Axis::Dp, Axis::Pp, Axis::ExpertDp];

    fn all_small_grids() -> Vec<RankGrid> {
        let mut grids = Vec::new();
        for code in 0..4usize.pow(5) {
            let size = |i: u32| code / 4usize.pow(i) % 4 + 1;
            grids.extend(RankGrid::new(size(0), size(1), size(2), size(3), size(4)));
        }
        assert!(grids.len() > 500);
        grids
    }

    fn message(result: Result<RankGrid>) -> String {
        result.expect_err("must be refused").to_string()
    }

    #[test]
    fn tp_is_fastest_and_pp_slowest() {
        let grid = RankGrid::new(2, 1, 1, 2, 2).unwrap();
        assert_eq!(grid.groups(Axis::Tp), [[0, 1], [2, 3], [4, 5], [6, 7]]);
        assert_eq!(grid.groups(Axis::Dp), [[0, 2], [1, 3], [4, 6], [5, 7]]);
        assert_eq!(grid.groups(Axis::Pp), [[0, 4], [1, 5], [2, 6], [3, 7]]);
        assert_eq!(grid.coords(6), Coords { tp: 0, cp: 0, dp: 1, pp: 1 });
    }

    #[test]
    fn cp_lies_between_tp_and_dp() {
        let grid = RankGrid::new(2, 2, 1, 2, 1).unwrap();
        assert_eq!(grid.groups(Axis::Cp), [[0, 2], [1, 3], [4, 6], [5, 7]]);
        assert_eq!(grid.replica_group(3), [1, 3, 5, 7]);
    }

    #[test]
    fn expert_groups_deal_the_replicas_anew() {
        let grid = RankGrid::new(2, 1, 2, 4, 1).unwrap();
        assert_eq!(grid.groups(Axis::Ep), [[0, 2], [1, 3], [4, 6], [5, 7]]);
        assert_eq!(grid.groups(Axis::ExpertDp), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    }

    #[test]
    fn rank_of_inverts_coords() {
        for grid in all_small_grids() {
            for rank in 0..grid.world() {
                assert_eq!(grid.rank_of(grid.coords(rank)), rank, "{grid:?}");
            }
        }
    }

    #[test]
    fn the_groups_of_an_axis_partition_the_world() {
        for grid in all_small_grids() {
            for axis in AXES {
                let mut seen = vec![0; grid.world()];
                for group in grid.groups(axis) {
                    assert_eq!(group.len(), grid.size(axis), "{grid:?} {axis:?}");
                    for (i, &rank) in group.iter().enumerate() {
                        seen[rank] += 1;
                        assert_eq!(grid.index(axis, rank), i, "{grid:?} {axis:?}");
                        assert_eq!(grid.group(axis, rank), group, "{grid:?} {axis:?}");
                    }
                }
                assert!(seen.iter().all(|&n| n == 1), "{grid:?} {axis:?}");
            }
        }
    }

    #[test]
    fn members_of_an_expert_group_agree_on_tp_and_pp() {
        for grid in all_small_grids() {
            for group in grid.groups(Axis::Ep).into_iter().chain(grid.groups(Axis::ExpertDp)) {
                let first = grid.coords(group[0]);
                assert!(
                    group
                        .iter()
                        .all(|&r| (grid.coords(r).tp, grid.coords(r).pp) == (first.tp, first.pp))
                );
            }
        }
    }

    #[test]
    fn model_and_replica_groups_meet_in_one_rank() {
        for grid in all_small_grids() {
            for rank in 0..grid.world() {
                let (model, replicas) = (grid.model_group(rank), grid.replica_group(rank));
                assert!(model.is_sorted() && replicas.is_sorted());
                assert_eq!(model.len() * replicas.len(), grid.world());
                assert_eq!(
                    model.iter().filter(|r| replicas.contains(r)).collect::<Vec<_>>(),
                    [&rank]
                );
            }
        }
    }

    #[test]
    fn stages_form_a_ring() {
        let grid = RankGrid::new(2, 1, 1, 1, 3).unwrap();
        assert_eq!((grid.next_stage(1), grid.next_stage(5)), (3, 1));
        assert_eq!((grid.prev_stage(1), grid.prev_stage(5)), (5, 3));
        assert!(grid.is_first_stage(1) && !grid.is_last_stage(1) && grid.is_last_stage(4));
        assert_eq!(grid.embedding_group(3), Some(vec![1, 5]));
        assert_eq!(RankGrid::new(2, 1, 1, 1, 1).unwrap().embedding_group(0), None);
    }

    #[test]
    fn dp_is_what_the_world_leaves() {
        let sizes = GridSizes { tp: 2.into(), cp: 1.into(), ep: 1.into(), dp: None, pp: 2.into() };
        let grid = RankGrid::for_world(&8.into(), &sizes).unwrap();
        assert_eq!((grid.size(Axis::Dp), grid.world()), (2, 8));
    }

    #[test]
    fn a_world_that_does_not_divide_is_refused_with_every_number_and_source() {
        let sizes = GridSizes {
            tp: Sourced::new(2, "--tensor-model-parallel-size"),
            cp: 1.into(),
            ep: 1.into(),
            dp: None,
            pp: Sourced::new(3, "run.toml"),
        };
        let text = message(RankGrid::for_world(&Sourced::new(8, "WORLD_SIZE"), &sizes));
        assert!(
            text.contains("8 (WORLD_SIZE)")
                && text.contains("2 (--tensor-model-parallel-size) · 1 · 3 (run.toml) = 6"),
            "{text}"
        );
        let sizes = GridSizes { pp: 1.into(), dp: Some(3.into()), ..sizes };
        let text = message(RankGrid::for_world(&8.into(), &sizes));
        assert!(text.contains("8 ≠ tp·cp·dp·pp") && text.contains("= 6;"), "{text}");
    }

    #[test]
    fn impossible_sizes_are_refused() {
        assert!(message(RankGrid::new(0, 1, 1, 1, 1)).contains("tp = 0"));
        assert!(message(RankGrid::new(1, 1, 3, 4, 1)).contains("multiple of ep = 3"));
        assert!(message(RankGrid::new(usize::MAX, 2, 1, 1, 1)).contains("larger than any world"));
    }
}
