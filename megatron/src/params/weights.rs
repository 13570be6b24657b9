//! The weights of a bucket: what this rank keeps of them, and what it lends to layers.

use std::sync::Mutex;

use candle_core::{Device, Tensor};
use kernels::tensor::arena::at_the_end;
use kernels::tensor::device::empty;

use super::LocalShard;
use crate::comm::{Group, Work, lock};
use crate::{Error, Result};

/// The weights of a bucket, in the model's dtype.
///
/// A rank that keeps a shard of them gathers all of them while layers use them (ZeRO-3).
#[derive(Debug)]
pub struct Weights {
    len: usize,
    kept: LocalShard,
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
    /// Weights of `len` elements, of which this rank keeps `kept`.
    pub(super) fn new(len: usize, kept: LocalShard, device: Device) -> Self {
        Self { len, kept, device, gathered: Mutex::default() }
    }

    /// The elements that this rank keeps.
    pub fn kept(&self) -> &LocalShard {
        &self.kept
    }

    /// All of them, if this rank keeps them where it computes.
    fn all_here(&self) -> Option<&Tensor> {
        self.kept.values.on_device().filter(|_| self.kept.range.len() == self.len)
    }

    /// Whether layers have to wait for other ranks' shards, or for files.
    pub(super) fn is_elsewhere(&self) -> bool {
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
    pub(super) fn gather(&self, shards: &Group) -> Result<()> {
        let mut gathered = lock(&self.gathered);
        if self.is_elsewhere() && matches!(*gathered, Gathered::Nothing) {
            let LocalShard { range, values } = &self.kept;
            let all = at_the_end(|| empty(self.len, values.dtype(), &self.device))?;
            let own = match values.on_device() {
                Some(own) => own.clone(),
                None => {
                    let own = all.narrow(0, range.start, range.len())?;
                    values.copy_to(&(0..range.len()), &own)?;
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
    pub(super) fn prefetch(&self) {
        if matches!(*lock(&self.gathered), Gathered::Nothing) {
            self.kept.values.prefetch(0..self.kept.range.len());
        }
    }

    /// Waits until they are there, if they are on their way.
    pub(super) fn arrive(&self) -> Result<()> {
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
    pub(super) fn release(&self) -> Result<()> {
        self.arrive()?;
        *lock(&self.gathered) = Gathered::Nothing;
        Ok(())
    }
}
