//! ZeRO-3: weights are gathered for the layers that use them, and freed behind them.

use kernels::tensor::trace::{Kind, Part, timed};

use super::{ParamId, ParamStore};
use crate::comm::Group;
use crate::{Error, Result};

/// Gathers the weights of units in the order in which a pass uses them: those of the unit in use
/// and, where communication overlaps computation, those of the next one. A unit is what ZeRO-3
/// gathers at once: the parameters of a layer, of the input, or of the output.
pub struct UnitWindow<'a> {
    store: &'a ParamStore,
    /// Buckets of each unit, in order of use; empty where every rank has all weights.
    units: Vec<Vec<usize>>,
    next: usize,
}

impl<'a> UnitWindow<'a> {
    /// `units` are the parameters that each use needs, in order.
    pub fn new(store: &'a ParamStore, units: impl FnOnce() -> Vec<Vec<ParamId>>) -> Self {
        let units = if store.lending.is_some() { units() } else { Vec::new() };
        let buckets = |ids: Vec<ParamId>| {
            let mut buckets: Vec<usize> = ids.iter().map(|id| store.param(*id).bucket).collect();
            buckets.sort_unstable();
            buckets.dedup();
            buckets
        };
        Self { store, units: units.into_iter().map(buckets).collect(), next: 0 }
    }

    /// Returns once the weights of the next unit are there. Collective over the ranks that have the
    /// shards.
    ///
    /// # Errors
    /// If a peer fails, or there is no memory.
    pub fn advance(&mut self) -> Result<()> {
        let Some(lending) = &self.store.lending else { return Ok(()) };
        let _span = timed("gather weights", Kind::Phase, Part::Gather);
        let at = self.next;
        self.next += 1;
        let unit = self
            .units
            .get(at)
            .ok_or_else(|| Error::config("internal error: a pass uses more units than it said"))?;
        if at > 0 {
            self.leave(at - 1)?;
        }
        let weights = |bucket: &usize| &self.store.buckets()[*bucket].weights;
        unit.iter().try_for_each(|bucket| weights(bucket).gather(&lending.shards))?;
        self.units.get(at + 1).into_iter().flatten().for_each(|bucket| weights(bucket).prefetch());
        if lending.shards.overlaps()
            && let Some(following) = self.units.get(at + 1)
        {
            following.iter().try_for_each(|bucket| weights(bucket).gather(&lending.shards))?;
        }
        unit.iter().try_for_each(|bucket| weights(bucket).arrive())
    }

    /// Ends the pass.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn finish(self) -> Result<()> {
        if self.next > 0 { self.leave(self.next - 1) } else { Ok(()) }
    }

    /// Frees the weights of unit `at`, except those that the next one uses, too.
    fn leave(&self, at: usize) -> Result<()> {
        let reshards = self.store.lending.as_ref().is_some_and(|lending| lending.reshards);
        let Some(unit) = self.units.get(at).filter(|_| reshards) else { return Ok(()) };
        let following = self.units.get(at + 1);
        let done = unit.iter().filter(|bucket| !following.is_some_and(|f| f.contains(bucket)));
        done.into_iter().try_for_each(|bucket| self.store.buckets()[*bucket].weights.release())
    }
}

/// How sharded weights come to layers.
#[derive(Clone)]
pub(super) struct Lending {
    shards: Group,
    /// Whether a pass frees weights behind every unit, rather than the step at its end.
    reshards: bool,
}

impl std::fmt::Debug for Lending {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Lending {{ reshards: {} }}", self.reshards)
    }
}

impl ParamStore {
    /// From here on, passes gather weights that are sharded, or kept elsewhere, over `shards`. With
    /// `reshards` they free them behind every unit; without, [`release_weights`] does.
    ///
    /// [`release_weights`]: Self::release_weights
    pub fn lend_over(&mut self, shards: Group, reshards: bool) {
        if self.buckets().iter().any(|bucket| bucket.weights.is_elsewhere()) {
            self.lending = Some(Lending { shards, reshards });
        }
    }

    /// Frees what other ranks keep of the weights.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn release_weights(&self) -> Result<()> {
        self.buckets().iter().try_for_each(|bucket| bucket.weights.release())
    }
}
