//! How a model presents itself to the trainer.

use std::ops::Range;

use crate::Result;
use crate::params::ParamsBuilder;
use crate::pipeline::Chunk;

/// Which ends of the model a chunk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The embedding.
    pub first: bool,
    /// The final normalization, output matrix and loss.
    pub last: bool,
}

/// Builds one rank's share of a model.
pub trait ModelBuilder {
    /// Parameters of every layer, for partitioning.
    fn layer_params(&self) -> Vec<u64>;
    /// Parameters of the embedding and of the head, for partitioning.
    fn end_params(&self) -> (u64, u64);
    /// Whether the output matrix is the token embedding.
    fn tied(&self) -> bool;
    /// Builds the chunk with these layers and declares its parameters in forward order.
    ///
    /// # Errors
    /// If the model cannot be cut this way.
    fn chunk(&self, ends: Ends, layers: Range<usize>, params: &mut ParamsBuilder) -> Result<Chunk>;
}
