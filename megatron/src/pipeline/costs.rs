//! The costs of passes, for simulating schedules.

use crate::{Error, Result};

/// The costs of one chunk's passes over one microbatch: time in one unit, memory in another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkCosts {
    /// Time of a forward.
    pub forward: u64,
    /// Time of recomputing the activations from the input, without the output.
    pub recompute: u64,
    /// Time of the input-gradient part of a backward, which the previous stage waits for.
    pub input_gradients: u64,
    /// Time of the weight-gradient part of a backward.
    pub weight_gradients: u64,
    /// Memory of activations between a forward and its backward.
    pub activations: u64,
    /// Memory between input gradients and weight gradients: both operands of each product.
    pub operands: u64,
}

impl ChunkCosts {
    /// Passes that take equal time, and activations as large as the operands of products.
    pub const EVEN: Self = Self {
        forward: 1,
        recompute: 1,
        input_gradients: 1,
        weight_gradients: 1,
        activations: 1,
        operands: 1,
    };

    /// Time of a whole backward.
    pub fn backward(&self) -> u64 {
        self.input_gradients + self.weight_gradients
    }
}

impl std::ops::Add for ChunkCosts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            forward: self.forward + other.forward,
            recompute: self.recompute + other.recompute,
            input_gradients: self.input_gradients + other.input_gradients,
            weight_gradients: self.weight_gradients + other.weight_gradients,
            activations: self.activations + other.activations,
            operands: self.operands + other.operands,
        }
    }
}

/// The costs of every chunk of a pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Costs {
    pp: usize,
    virtual_stages: Vec<ChunkCosts>,
}

impl Costs {
    /// `virtual_stages` holds the costs of chunk c of stage p at index c·pp + p.
    ///
    /// # Errors
    /// If the stages do not all have the same number of chunks.
    pub fn new(pp: usize, virtual_stages: Vec<ChunkCosts>) -> Result<Self> {
        if pp == 0 || virtual_stages.is_empty() || !virtual_stages.len().is_multiple_of(pp) {
            return Err(Error::config(format!(
                "internal error: costs of {} virtual stages were given for {pp} stages",
                virtual_stages.len()
            )));
        }
        Ok(Self { pp, virtual_stages })
    }

    /// The same costs for all of `v` chunks on each of `pp` stages.
    ///
    /// # Errors
    /// If `pp` or `v` is 0.
    pub fn even(pp: usize, v: usize, chunk: ChunkCosts) -> Result<Self> {
        Self::new(pp, vec![chunk; pp * v])
    }

    /// The costs of a stage's chunk. The chunk must exist.
    pub fn of(&self, stage: usize, chunk: usize) -> &ChunkCosts {
        &self.virtual_stages[chunk * self.pp + stage]
    }

    /// Checks that the number of chunks matches a schedule's.
    ///
    /// # Errors
    /// If it does not match.
    pub(super) fn check(&self, pp: usize, v: usize) -> Result<()> {
        if (self.pp, self.virtual_stages.len()) == (pp, pp * v) {
            return Ok(());
        }
        Err(Error::config(format!(
            "internal error: costs of {} stages with {} chunks each were given for a schedule of {pp} with {v} each",
            self.pp,
            self.virtual_stages.len() / self.pp
        )))
    }
}
