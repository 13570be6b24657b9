//! The weights of a bucket: what this rank keeps of them, and what it lends to layers.

use std::ops::Range;
use std::sync::Mutex;

use candle_core::{Device, Tensor};
use kernels::tensor::device::empty;

use super::store::offset_in;
use super::{LocalPart, ParamStore};
use crate::comm::{Group, Work, lock};
use crate::{Error, Result};

/// The weights of a bucket, in the model's dtype.
///
/// A rank that keeps a shard of them gathers all of them while layers use them (ZeRO-3).
#[derive(Debug)]
pub struct Weights {
    len: usize,
    kept: Range<usize>,
    /// `[kept.len()]`
    values: LocalPart,
    device: Device,
    /// All of them on the device, if they are not kept there.
    gathered: Mutex<Gathered>,
}

#[derive(Default)]
enum Gathered {
    #[default]
    Nothing,
    Coming(Tensor, Work),
    There(Tensor),
}

impl std::fmt::Debug for Gathered {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            Self::Nothing => "Nothing",
            Self::Coming(..) => "Coming",
            Self::There(_) => "There",
        })
    }
}

impl Weights {
    /// Weights of `len` elements, of which this rank keeps the elements `kept` as `values`.
    pub(super) fn new(len: usize, kept: Range<usize>, values: LocalPart, device: Device) -> Self {
        Self { len, kept, values, device, gathered: Mutex::default() }
    }

    /// The elements of the bucket that this rank keeps.
    pub fn kept(&self) -> &Range<usize> {
        &self.kept
    }

    /// Where the elements `part` of the bucket, which are among the kept ones, are in
    /// [`values`](Self::values).
    pub fn place(&self, part: &Range<usize>) -> Range<usize> {
        let start = offset_in(part, &self.kept);
        start..start + part.len()
    }

    /// The elements `part` of the bucket, which are among the kept ones, on the device: a view if
    /// they are kept there.
    ///
    /// # Errors
    /// If they are not among them, or cannot be read.
    pub fn narrow(&self, part: &Range<usize>) -> Result<Tensor> {
        self.values.lend(&self.place(part), &self.device)
    }

    /// What this rank keeps: `kept.len()` elements.
    pub fn values(&self) -> &LocalPart {
        &self.values
    }

    /// All of them, if this rank keeps them where it computes.
    fn all_here(&self) -> Option<&Tensor> {
        self.values.on_device().filter(|_| self.kept.len() == self.len)
    }

    /// Whether layers have to wait for other ranks' shards, or for files.
    fn is_elsewhere(&self) -> bool {
        self.all_here().is_none()
    }

    /// All of them, `[len]`.
    ///
    /// # Errors
    /// If this rank keeps a shard and nobody has gathered the others.
    pub fn whole(&self) -> Result<Tensor> {
        if let Some(all) = self.all_here() {
            return Ok(all.clone());
        }
        match &*lock(&self.gathered) {
            Gathered::There(all) => Ok(all.clone()),
            Gathered::Nothing | Gathered::Coming(..) => Err(Error::config(
                "a layer uses a parameter whose shards were not gathered for it: under ZeRO-3 a layer names every \
                 parameter that it uses in its params()",
            )),
        }
    }

    /// Starts to gather them over the ranks that have the shards, unless they are there.
    fn gather(&self, shards: &Group) -> Result<()> {
        let mut gathered = lock(&self.gathered);
        if self.is_elsewhere() && matches!(*gathered, Gathered::Nothing) {
            let all = empty(self.len, self.values.dtype(), &self.device)?;
            let own = match self.values.on_device() {
                Some(own) => own.clone(),
                None => {
                    let own = all.narrow(0, self.kept.start, self.kept.len())?;
                    self.values.copy_to(&(0..self.kept.len()), &own)?;
                    own
                }
            };
            *gathered = match shards.size() {
                1 => Gathered::There(all),
                _ => {
                    let work = shards.all_gather(&own, &all)?;
                    Gathered::Coming(all, work)
                }
            };
        }
        Ok(())
    }

    /// Has the system read what is in files, without waiting for it.
    fn prefetch(&self) {
        if matches!(*lock(&self.gathered), Gathered::Nothing) {
            self.values.prefetch(0..self.kept.len());
        }
    }

    /// Waits until they are there, if they are on their way.
    fn arrive(&self) -> Result<()> {
        let mut gathered = lock(&self.gathered);
        *gathered = match std::mem::take(&mut *gathered) {
            Gathered::Coming(all, work) => {
                work.wait()?;
                Gathered::There(all)
            }
            other => other,
        };
        Ok(())
    }

    /// Frees what other ranks keep. What is on its way comes first, since all ranks take part.
    fn release(&self) -> Result<()> {
        self.arrive()?;
        *lock(&self.gathered) = Gathered::Nothing;
        Ok(())
    }
}

/// Gathers the weights of units in the order in which a pass uses them: those of the unit in use
/// and, where communication overlaps computation, those of the next one. A unit is the layers'
/// parameters that are used together.
pub struct UnitWindow<'a> {
    store: &'a ParamStore,
    /// Buckets of each unit, in order of use; empty where every rank has all weights.
    units: Vec<Vec<usize>>,
    next: usize,
}

impl<'a> UnitWindow<'a> {
    /// `units` are the parameters that each use needs, in order.
    pub fn new(store: &'a ParamStore, units: impl FnOnce() -> Vec<Vec<super::ParamId>>) -> Self {
        let units = if store.lending.is_some() { units() } else { Vec::new() };
        let buckets = |ids: Vec<super::ParamId>| {
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
    /// Whether weights are freed behind every pass, rather than at the end of the step.
    reshards: bool,
}

impl std::fmt::Debug for Lending {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Lending {{ reshards: {} }}", self.reshards)
    }
}

impl ParamStore {
    /// Gathers weights that are sharded, or kept elsewhere, over `shards` when layers use them. With `reshards` they are freed
    /// behind every pass; without, by [`release_weights`](Self::release_weights).
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
