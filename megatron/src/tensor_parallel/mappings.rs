//! The conjugate operators of tensor parallelism.
//!
//! | forward | without sequence parallelism | with | backward |
//! |---|---|---|---|
//! | [`enter`](TensorParallel::enter) (f) | identity | all-gather over s | [`enter_backward`](TensorParallel::enter_backward): all-reduce / reduce-scatter |
//! | [`exit`](TensorParallel::exit) (g) | all-reduce | reduce-scatter over s | [`exit_backward`](TensorParallel::exit_backward): identity / all-gather |
//!
//! Source: Shoeybi et al. 2019 §3; Korthikanti et al. 2022 §4.2.2 (g and ḡ).

use candle_core::Tensor;

use super::layout::{Partial, Replicated, Stream};
use crate::comm::{Group, ReduceOp};
use crate::{Error, Result};

/// One rank's place on the tp axis.
#[derive(Clone)]
pub struct TensorParallel {
    group: Group,
    sequence_parallel: bool,
}

impl TensorParallel {
    /// `sequence_parallel` has no effect on a group of one.
    pub fn new(group: Group, sequence_parallel: bool) -> Self {
        let sequence_parallel = sequence_parallel && group.size() > 1;
        Self { group, sequence_parallel }
    }

    pub fn group(&self) -> &Group {
        &self.group
    }

    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Whether the residual stream is cut along the sequence.
    pub fn sequence_parallel(&self) -> bool {
        self.sequence_parallel
    }

    /// Length of the residual stream on this rank for sequences of `s` tokens.
    ///
    /// # Errors
    /// If sequence parallelism cannot cut `s` evenly.
    pub fn stream_length(&self, s: usize) -> Result<usize> {
        if !self.sequence_parallel {
            return Ok(s);
        }
        if !s.is_multiple_of(self.size()) {
            return Err(Error::config(format!(
                "sequence parallelism cuts the sequence over tp: {s} tokens do not divide by tp {}",
                self.size()
            )));
        }
        Ok(s / self.size())
    }

    /// First position of the residual stream on this rank.
    pub fn stream_offset(&self, stream_length: usize) -> usize {
        if self.sequence_parallel { self.rank() * stream_length } else { 0 }
    }

    /// From the residual stream into a tensor-parallel region.
    pub fn enter(&self, x: &Stream) -> Result<Replicated> {
        Ok(Replicated(self.gather_sequence(&x.0)?))
    }

    /// Backward of [`enter`](Self::enter).
    pub fn enter_backward(&self, dx: Partial) -> Result<Stream> {
        Ok(Stream(self.sum(dx.0)?))
    }

    /// From a tensor-parallel region back to the residual stream.
    pub fn exit(&self, y: Partial) -> Result<Stream> {
        Ok(Stream(self.sum(y.0)?))
    }

    /// Backward of [`exit`](Self::exit).
    pub fn exit_backward(&self, dy: &Stream) -> Result<Replicated> {
        Ok(Replicated(self.gather_sequence(&dy.0)?))
    }

    fn gather_sequence(&self, x: &Tensor) -> Result<Tensor> {
        if !self.sequence_parallel {
            return Ok(x.clone());
        }
        let mut shape = x.dims().to_vec();
        shape[0] *= self.size();
        let whole = Tensor::zeros(shape, x.dtype(), x.device())?;
        self.group.all_gather(x, &whole)?.wait()?;
        Ok(whole)
    }

    fn sum(&self, x: Tensor) -> Result<Tensor> {
        if self.size() == 1 {
            return Ok(x);
        }
        if !self.sequence_parallel {
            self.group.all_reduce(&x, ReduceOp::Sum)?.wait()?;
            return Ok(x);
        }
        let mut shape = x.dims().to_vec();
        shape[0] /= self.size();
        let part = Tensor::zeros(shape, x.dtype(), x.device())?;
        self.group.reduce_scatter(&x, &part, ReduceOp::Sum)?.wait()?;
        Ok(part)
    }
}
