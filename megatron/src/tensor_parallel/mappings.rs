//! The conjugate operators of tensor parallelism.
//!
//! | forward | without sequence parallelism | with | backward |
//! |---|---|---|---|
//! | [`enter`](TensorParallel::enter) (f) | identity | all-gather over s | [`enter_backward`](TensorParallel::enter_backward): all-reduce / reduce-scatter |
//! | [`exit`](TensorParallel::exit) (g) | all-reduce | reduce-scatter over s | [`exit_backward`](TensorParallel::exit_backward): identity / all-gather |
//!
//! Each operator can be begun before a computation that does not need its result, and finished
//! after it ([`Begun`]). Overlap happens only where the group reports a benefit
//! ([`Communicator::overlaps`](crate::comm::Communicator::overlaps)); otherwise beginning already
//! waits.
//!
//! Source: Shoeybi et al. 2019 §3; Korthikanti et al. 2022 §4.2.2 (g and ḡ).
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use megatron::comm::threads;
//! use megatron::tensor_parallel::TensorParallel;
//! use megatron::tensor_parallel::layout::{Partial, Stream};
//!
//! # fn main() -> megatron::Result<()> {
//! // y = W₂·relu(W₁·x): W₁ is split by rows, W₂ by columns; ranks exchange one sum.
//! let x = Tensor::new(&[[[1f32, 2.0]]], &Device::Cpu)?; // [s, b, h]
//! let w1 = Tensor::new(&[[1f32, 1.0], [1.0, -1.0]], &Device::Cpu)?;
//! let w2 = Tensor::new(&[[1f32, 5.0], [2.0, 5.0]], &Device::Cpu)?;
//! let whole = x.broadcast_matmul(&w1.t()?)?.relu()?.broadcast_matmul(&w2.t()?)?;
//!
//! let ranks = threads::run(2, |group| {
//!     let tp = TensorParallel::new(group, false);
//!     let (rows, columns) = (w1.narrow(0, tp.rank(), 1)?, w2.narrow(1, tp.rank(), 1)?);
//!     let input = tp.enter(&Stream(x.clone()))?;
//!     let hidden = input.0.broadcast_matmul(&rows.t()?)?.relu()?;
//!     let output = tp.exit(Partial(hidden.broadcast_matmul(&columns.t()?)?))?;
//!     Ok(output.0.to_vec3::<f32>()?)
//! })?;
//! assert_eq!(ranks, [whole.to_vec3::<f32>()?, whole.to_vec3::<f32>()?]);
//! # Ok(())
//! # }
//! ```

use candle_core::{Shape, Tensor};
use kernels::ops::reduce::copy;
use kernels::tensor::device::{empty, zeros};

use super::layout::{FeatureSharded, Partial, Replicated, Stream};
use crate::comm::{Group, ReduceOp, Work};
use crate::{Error, Result};

/// An activation in transfer from one layout to another.
#[must_use = "the activation is there after finish()"]
pub struct Begun<L> {
    value: L,
    work: Work,
}

impl<L> Begun<L> {
    /// Waits for the activation.
    ///
    /// # Errors
    /// If a peer was lost, or called another operation.
    pub fn finish(self) -> Result<L> {
        self.work.wait()?;
        Ok(self.value)
    }

    fn map<M>(self, layout: impl FnOnce(L) -> M) -> Begun<M> {
        Begun { value: layout(self.value), work: self.work }
    }
}

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

    /// The ranks that share each layer.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// This rank's index in the group, from 0.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// tp: the number of ranks in the group.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Whether the residual stream is split along the sequence.
    pub fn sequence_parallel(&self) -> bool {
        self.sequence_parallel
    }

    /// Length of the residual stream on this rank for sequences of `s` tokens.
    ///
    /// # Errors
    /// If sequence parallelism cannot split `s` evenly.
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

    /// Position of the residual stream's first row on this rank.
    pub fn stream_offset(&self, stream_length: usize) -> usize {
        if self.sequence_parallel { self.rank() * stream_length } else { 0 }
    }

    /// Enters a tensor-parallel region from the residual stream.
    pub fn enter(&self, x: &Stream) -> Result<Replicated> {
        self.begin_enter(x)?.finish()
    }

    /// As [`enter`](Self::enter), to be finished later.
    pub fn begin_enter(&self, x: &Stream) -> Result<Begun<Replicated>> {
        Ok(self.gather_sequence(&x.0)?.map(Replicated))
    }

    /// Backward of [`enter`](Self::enter).
    pub fn enter_backward(&self, dx: Partial) -> Result<Stream> {
        self.begin_enter_backward(dx)?.finish()
    }

    /// As [`enter_backward`](Self::enter_backward), to be finished later.
    pub fn begin_enter_backward(&self, dx: Partial) -> Result<Begun<Stream>> {
        Ok(self.sum(dx.0)?.map(Stream))
    }

    /// Leaves a tensor-parallel region to the residual stream.
    pub fn exit(&self, y: Partial) -> Result<Stream> {
        self.sum(y.0)?.map(Stream).finish()
    }

    /// Backward of [`exit`](Self::exit).
    pub fn exit_backward(&self, dy: &Stream) -> Result<Replicated> {
        self.begin_exit_backward(dy)?.finish()
    }

    /// As [`exit_backward`](Self::exit_backward), to be finished later.
    pub fn begin_exit_backward(&self, dy: &Stream) -> Result<Begun<Replicated>> {
        Ok(self.gather_sequence(&dy.0)?.map(Replicated))
    }

    /// Gathers features to the residual stream: concatenates the `[s, b, h/tp]` of every rank, of
    /// which this rank keeps its part of the sequence.
    pub fn gather_features(&self, y: &FeatureSharded) -> Result<Stream> {
        let tp = self.size();
        if tp == 1 {
            return Ok(Stream(y.0.clone()));
        }
        let (s, b, width) = y.0.dims3()?;
        let all = empty((tp, s, b, width), y.0.dtype(), y.0.device())?;
        self.group.all_gather(&y.0.contiguous()?, &all)?.wait()?;
        let length = self.stream_length(s)?;
        let own = all.narrow(1, self.stream_offset(length), length)?;
        Ok(Stream(own.permute((1, 2, 0, 3))?.contiguous()?.reshape((length, b, tp * width))?))
    }

    /// Backward of [`gather_features`](Self::gather_features): this rank's features for the whole
    /// sequence. Every rank has the complete gradient of its positions, so nothing is summed.
    pub fn gather_features_backward(&self, dy: &Stream) -> Result<FeatureSharded> {
        let whole = self.gather_sequence(&dy.0)?.finish()?;
        let width = whole.dim(2)? / self.size();
        Ok(FeatureSharded(whole.narrow(2, self.rank() * width, width)?.contiguous()?))
    }

    /// This rank's part of the sequence, taken from a replicated tensor.
    pub fn own_positions(&self, x: &Replicated) -> Result<Stream> {
        let length = self.stream_length(x.0.dim(0)?)?;
        Ok(Stream(x.0.narrow(0, self.stream_offset(length), length)?.contiguous()?))
    }

    /// A copy of this rank's part of a tensor that is the same on every rank: flat, ⌈n / tp⌉ of its
    /// n elements. Zeros follow the last one.
    pub fn own_elements(&self, x: &Tensor) -> Result<Tensor> {
        let (n, dtype, device) = (x.elem_count(), x.dtype(), x.device());
        let len = n.div_ceil(self.size());
        let start = (self.rank() * len).min(n);
        let own = len.min(n - start);
        let part = match own == len {
            true => empty(len, dtype, device)?,
            false => zeros("a part of a tensor", len, dtype, device)?,
        };
        if own > 0 {
            copy(&part.narrow(0, 0, own)?, &x.flatten_all()?.narrow(0, start, own)?)?;
        }
        Ok(part)
    }

    /// The tensor of which every rank has its [`own_elements`](Self::own_elements).
    pub fn gather_elements(&self, part: &Tensor, shape: &Shape) -> Result<Tensor> {
        let all = empty(part.elem_count() * self.size(), part.dtype(), part.device())?;
        self.group.all_gather(part, &all)?.wait()?;
        Ok(all.narrow(0, 0, shape.elem_count())?.reshape(shape)?)
    }

    fn gather_sequence(&self, x: &Tensor) -> Result<Begun<Tensor>> {
        if !self.sequence_parallel {
            return Ok(Begun { value: x.clone(), work: Work::done() });
        }
        let mut shape = x.dims().to_vec();
        shape[0] *= self.size();
        let whole = empty(shape, x.dtype(), x.device())?;
        let work = self.group.all_gather(x, &whole)?;
        self.begun(whole, work)
    }

    fn sum(&self, x: Tensor) -> Result<Begun<Tensor>> {
        if self.size() == 1 {
            return Ok(Begun { value: x, work: Work::done() });
        }
        if !self.sequence_parallel {
            let work = self.group.all_reduce(&x, ReduceOp::Sum)?;
            return self.begun(x, work);
        }
        let mut shape = x.dims().to_vec();
        shape[0] /= self.size();
        let part = empty(shape, x.dtype(), x.device())?;
        let work = self.group.reduce_scatter(&x, &part, ReduceOp::Sum)?;
        self.begun(part, work)
    }

    fn begun(&self, value: Tensor, work: Work) -> Result<Begun<Tensor>> {
        if self.group.overlaps() {
            return Ok(Begun { value, work });
        }
        work.wait()?;
        Ok(Begun { value, work: Work::done() })
    }
}
