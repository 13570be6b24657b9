//! The samples of another source in an order drawn again every epoch, as by Megatron's random
//! sampler.
//!
//! Source: Megatron-LM `legacy/data/data_samplers.py`, `MegatronPretrainingRandomSampler` with
//! `--no-data-sharding`: epoch e reads the samples in the order of `torch.randperm` seeded with e,
//! so that a step reads the same samples on every layout. (Megatron leaves out the last samples of
//! an epoch if they do not fill a microbatch on all replicas, which depends on the layout. Here an
//! epoch has all samples, and a step may span two epochs. The two agree if MBS·dp divides the
//! number of samples.)

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::Tensor;

use super::mt19937::{TORCH_PERMUTATION_LIMIT, torch_permutation};
use super::source::SampleSource;
use crate::{Error, Result};

/// Epochs of another source's samples in random orders.
pub struct Cyclic {
    source: Arc<dyn SampleSource>,
    /// The order of the most recently read epoch; 4 bytes per sample.
    order: Mutex<Option<(u64, Arc<[u32]>)>>,
}

impl Cyclic {
    /// # Errors
    /// `Error::Config` if there are more samples than PyTorch's CPU generator draws from 32 bits.
    pub fn new(source: Arc<dyn SampleSource>) -> Result<Self> {
        let samples = source.num_samples();
        if samples >= TORCH_PERMUTATION_LIMIT {
            return Err(Error::config(format!(
                "dataloader_type cyclic takes fewer than {TORCH_PERMUTATION_LIMIT} samples, but \
                 there are {samples}; use single, which also shuffles"
            )));
        }
        Ok(Self { source, order: Mutex::new(None) })
    }

    fn order(&self, epoch: u64) -> Arc<[u32]> {
        // The value is replaced as a whole, so a panic elsewhere leaves it consistent.
        let mut kept = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some((of, order)) if *of == epoch => order.clone(),
            _ => {
                // `manual_seed` keeps the low 32 bits, and `new` checked that the number of samples
                // fits into 32 bits.
                let order: Arc<[u32]> =
                    torch_permutation(self.source.num_samples() as u32, epoch as u32).into();
                *kept = Some((epoch, order.clone()));
                order
            }
        }
    }
}

impl Cyclic {
    /// The index in the source of this sampler's sample `index`.
    fn origin(&self, index: u64) -> u64 {
        let n = self.source.num_samples();
        self.order(index / n)[(index % n) as usize].into()
    }
}

impl SampleSource for Cyclic {
    fn seq_length(&self) -> usize {
        self.source.seq_length()
    }

    fn num_samples(&self) -> u64 {
        self.source.num_samples()
    }

    fn sample(&self, index: u64, out: &mut [u32]) -> Result<()> {
        self.source.sample(self.origin(index), out)
    }

    fn named(&self, index: u64) -> Result<Vec<(String, Tensor)>> {
        self.source.named(self.origin(index))
    }

    fn loss_mask(&self, index: u64, out: &mut [f32]) -> Result<()> {
        self.source.loss_mask(self.origin(index), out)
    }

    fn path(&self) -> &Path {
        self.source.path()
    }
}
