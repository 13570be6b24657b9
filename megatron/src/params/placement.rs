//! Where the elements of a flat buffer are among the ranks that hold the same parameters.
//!
//! The stages of ZeRO (Rajbhandari et al. 2020) are values of [`Placements`]. Hybrid sharding
//! (FSDP's HSDP, Megatron's distributed-optimizer instances) is the same over two axes: ranks of
//! one copy shard a buffer, and the copies replicate each other.

use std::ops::Range;

/// Whether each rank has a whole buffer, or one shard of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Every rank has all elements.
    Replicated,
    /// Every rank has one of as many equal, contiguous parts as there are ranks.
    Sharded,
}

/// The placement of each kind of buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placements {
    /// Weights in the model's dtype, between their uses.
    pub weights: Placement,
    /// Main gradients, once they are reduced.
    pub gradients: Placement,
    /// Master weights and optimizer state. They follow the updates: a rank updates what it has.
    pub optimizer: Placement,
}

impl Placements {
    /// Nothing is sharded: ZeRO's stage 0.
    pub const REPLICATED: Self = Self {
        weights: Placement::Replicated,
        gradients: Placement::Replicated,
        optimizer: Placement::Replicated,
    };

    /// ZeRO's stage `stage`. Stages above 3 are 3. One rank shards nothing: with `one` all stages
    /// are 0.
    pub fn of_zero_stage(stage: u8, one: bool) -> Self {
        use Placement::{Replicated, Sharded};
        let [weights, gradients, optimizer] = match stage {
            _ if one => [Replicated; 3],
            0 => [Replicated, Replicated, Replicated],
            1 => [Replicated, Replicated, Sharded],
            2 => [Replicated, Sharded, Sharded],
            _ => [Sharded, Sharded, Sharded],
        };
        Self { weights, gradients, optimizer }
    }
}

/// One rank's place among those that hold the same parameters.
///
/// ```
/// use megatron::params::{Placement, Replica};
///
/// // Rank 3 of 4, in two copies of two shards each.
/// let replica = Replica::new(3, 4, 2);
/// assert_eq!((replica.copy, replica.shard), (1, 1));
/// assert_eq!(replica.range(400, Placement::Sharded), 200..400);
/// assert_eq!(replica.written(400), 300..400);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    /// Which shard this rank has, from 0.
    pub shard: usize,
    /// Ranks that shard a buffer.
    pub num_shards: usize,
    /// Which copy this rank is in, from 0.
    pub copy: usize,
    /// Copies of all shards: 1 without hybrid sharding.
    pub num_copies: usize,
}

impl Replica {
    /// Rank `rank` of `size`, in `num_copies` copies of consecutive ranks; `num_copies` divides
    /// `size`.
    pub fn new(rank: usize, size: usize, num_copies: usize) -> Self {
        let num_shards = size / num_copies;
        Self { shard: rank % num_shards, num_shards, copy: rank / num_shards, num_copies }
    }

    /// Ranks that hold the same parameters.
    pub fn count(&self) -> usize {
        self.num_shards * self.num_copies
    }

    /// The elements of a buffer of `len` elements that this rank has.
    pub fn range(&self, len: usize, placement: Placement) -> Range<usize> {
        match placement {
            Placement::Replicated => 0..len,
            Placement::Sharded => part(len, self.shard, self.num_shards),
        }
    }

    /// The elements of a buffer of `len` elements that this rank writes to a checkpoint: all ranks
    /// write as much, and each only of its shard, whatever the placement.
    pub fn written(&self, len: usize) -> Range<usize> {
        part(len, self.shard * self.num_copies + self.copy, self.count())
    }
}

/// Part `index` of `count` equal parts of `0..len`.
fn part(len: usize, index: usize, count: usize) -> Range<usize> {
    let each = len / count;
    index * each..(index + 1) * each
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_written_once_by_a_rank_that_has_it() {
        for (size, copies) in [(1, 1), (4, 1), (4, 2), (6, 3), (6, 6)] {
            let mut written = vec![0; 720];
            for rank in 0..size {
                let replica = Replica::new(rank, size, copies);
                let (own, wrote) = (replica.range(720, Placement::Sharded), replica.written(720));
                assert!(own.start <= wrote.start && wrote.end <= own.end, "rank {rank} of {size}");
                written[wrote].iter_mut().for_each(|times| *times += 1);
            }
            assert!(written.iter().all(|times| *times == 1), "{size} ranks in {copies} copies");
        }
    }
}
