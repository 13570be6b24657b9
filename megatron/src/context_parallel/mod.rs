//! Context parallelism: each of cp ranks holds one of cp equal parts of every sequence and does all
//! per-token work on this part alone. Attention needs all tokens. An exchange before attention
//! gives each rank all tokens of a cp-th of the key/value groups, so that it computes the same as a
//! single process. An exchange after attention restores the parts (Jacobs et al. 2023, "DeepSpeed
//! Ulysses"; Megatron-LM's `--cp-comm-type a2a`).
//!
//! | forward | | backward |
//! |---|---|---|
//! | [`to_heads`](ContextParallel::to_heads) | `[s/cp, b, w]` → `[s, b, w/cp]` | [`to_tokens`](ContextParallel::to_tokens) |
//! | [`to_tokens`](ContextParallel::to_tokens) | `[s, b, w]` → `[s/cp, b, cp·w]` | [`to_heads`](ContextParallel::to_heads) |
//!
//! A rank sends and receives (cp − 1)/cp of its part, however long the sequence. The parts are
//! contiguous. This balances causal attention, because ranks split heads, not queries: each rank
//! computes the whole triangle for its heads.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use megatron::comm::threads;
//! use megatron::context_parallel::ContextParallel;
//!
//! # fn main() -> megatron::Result<()> {
//! // A sequence of 4 tokens of 2 columns (heads of width 1), over cp 2.
//! let whole = Tensor::arange(0f32, 8f32, &Device::Cpu)?.reshape((4, 1, 2))?;
//! let columns = threads::run(2, |group| {
//!     let cp = ContextParallel::new(group);
//!     let tokens = whole.narrow(0, cp.offset(2), 2)?;
//!     // All tokens of this rank's column; attention can be computed now.
//!     let heads = cp.to_heads(tokens.clone())?;
//!     let back = cp.to_tokens(heads.clone())?;
//!     assert_eq!(back.flatten_all()?.to_vec1::<f32>()?, tokens.flatten_all()?.to_vec1::<f32>()?);
//!     Ok(heads.flatten_all()?.to_vec1::<f32>()?)
//! })?;
//! assert_eq!(columns, [[0.0, 2.0, 4.0, 6.0], [1.0, 3.0, 5.0, 7.0]]);
//! # Ok(())
//! # }
//! ```

use candle_core::{DType, Device, Tensor};
use kernels::ops::regroup::swap_leading;
use kernels::tensor::device::empty;

use crate::comm::Group;
use crate::{Error, Result};

/// One rank's place on the cp axis.
#[derive(Clone)]
pub struct ContextParallel {
    group: Group,
}

impl ContextParallel {
    /// `group`: the ranks that share each sequence, ordered by their parts.
    pub fn new(group: Group) -> Self {
        Self { group }
    }

    /// Index of this rank's part of each sequence.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// cp: the number of parts.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Exchanges a small message with every peer, so that the transport connects now and not in the
    /// first step, next to the pipeline's messages. All ranks call it.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn connect(&self, device: &Device) -> Result<()> {
        if self.size() > 1 {
            let numbers = Tensor::zeros(self.size(), DType::F32, device)?;
            self.group.all_to_all(&numbers, &numbers.zeros_like()?)?.wait()?;
        }
        Ok(())
    }

    /// Length of a sequence when each rank holds `part` tokens.
    pub fn whole_length(&self, part: usize) -> usize {
        part * self.size()
    }

    /// First position of this rank's `part` tokens.
    pub fn offset(&self, part: usize) -> usize {
        part * self.rank()
    }

    /// Exchanges tokens for heads: from `[s/cp, b, w]`, all columns of this rank's tokens, to
    /// `[s, b, w/cp]`, this rank's columns of all tokens.
    ///
    /// # Errors
    /// If the columns are not divisible by cp, or a peer fails.
    pub fn to_heads(&self, x: Tensor) -> Result<Tensor> {
        let cp = self.size();
        if cp == 1 {
            return Ok(x);
        }
        let (part, batch, width) = x.dims3()?;
        if !width.is_multiple_of(cp) {
            return Err(Error::config(format!(
                "internal error: {width} columns of attention do not divide by cp {cp}"
            )));
        }
        let by_rank = swap_leading(&x.reshape((part * batch, cp, width / cp))?)?;
        drop(x);
        // The tokens of each rank, in order of rank, are in order of position.
        let all = empty((part * cp, batch, width / cp), by_rank.dtype(), by_rank.device())?;
        self.group.all_to_all(&by_rank, &all)?.wait()?;
        Ok(all)
    }

    /// Exchanges heads for tokens: from `[s, b, w]`, this rank's columns of all tokens, to
    /// `[s/cp, b, cp·w]`, all columns of this rank's tokens.
    ///
    /// # Errors
    /// If the tokens are not divisible by cp, or a peer fails.
    pub fn to_tokens(&self, x: Tensor) -> Result<Tensor> {
        let cp = self.size();
        if cp == 1 {
            return Ok(x);
        }
        let (seq, batch, width) = x.dims3()?;
        if !seq.is_multiple_of(cp) {
            return Err(Error::config(format!(
                "internal error: {seq} tokens of attention do not divide by cp {cp}"
            )));
        }
        let part = seq / cp;
        let by_rank = empty((cp, part * batch, width), x.dtype(), x.device())?;
        self.group.all_to_all(&x, &by_rank)?.wait()?;
        drop(x);
        Ok(swap_leading(&by_rank)?.reshape((part, batch, cp * width))?)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::comm::threads;

    /// `[s, b, w]`, with each element's index as its value.
    fn numbered(s: usize, b: usize, w: usize) -> Tensor {
        Tensor::arange(0f32, (s * b * w) as f32, &Device::Cpu).unwrap().reshape((s, b, w)).unwrap()
    }

    fn values(t: &Tensor) -> Vec<f32> {
        t.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn tokens_are_exchanged_for_columns_and_back() {
        for (cp, part, b, w) in [(1, 3, 2, 4), (2, 3, 2, 4), (3, 1, 1, 2), (4, 2, 3, 1)] {
            let whole = numbered(part * cp, b, w * cp);
            thread::scope(|scope| {
                for group in threads::world(cp) {
                    let whole = &whole;
                    scope.spawn(move || {
                        let cp = ContextParallel::new(group);
                        assert_eq!(
                            (cp.whole_length(part), cp.offset(part)),
                            (part * cp.size(), part * cp.rank())
                        );
                        let mine = whole.narrow(0, cp.offset(part), part).unwrap();
                        let heads = cp.to_heads(mine.clone()).unwrap();
                        let columns =
                            whole.narrow(2, cp.rank() * w, w).unwrap().contiguous().unwrap();
                        assert_eq!(
                            (heads.dims(), values(&heads)),
                            (columns.dims(), values(&columns))
                        );
                        let tokens = cp.to_tokens(heads).unwrap();
                        assert_eq!((tokens.dims(), values(&tokens)), (mine.dims(), values(&mine)));
                    });
                }
            });
        }
    }

    #[test]
    fn what_does_not_divide_is_refused() {
        thread::scope(|scope| {
            for group in threads::world(2) {
                scope.spawn(move || {
                    let cp = ContextParallel::new(group);
                    assert!(
                        cp.to_heads(numbered(2, 1, 3)).is_err()
                            && cp.to_tokens(numbered(3, 1, 2)).is_err()
                    );
                });
            }
        });
    }
}
