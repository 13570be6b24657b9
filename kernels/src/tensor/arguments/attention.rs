//! Attention heads, and the keys that a query sees: their scores, masks and dropout.

use candle_core::{DType, Tensor};

use super::dropout::{DropoutKey, expect_step_and_samples, threshold};
use crate::tensor::view::{expect_dtype, expect_shape};
use crate::{Error, Result};

/// The heads of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Key/value heads.
    pub groups: usize,
    /// Query heads that share one key/value head.
    pub heads_per_group: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl HeadShape {
    /// Query heads.
    pub fn heads(&self) -> usize {
        self.groups * self.heads_per_group
    }

    /// Width of a row of packed queries, keys and values.
    pub fn width(&self) -> usize {
        self.groups * (self.heads_per_group + 2) * self.head_dim
    }

    /// `(s, b)` of packed `qkv`.
    pub(crate) fn check(&self, qkv: &Tensor, op: &'static str) -> Result<(usize, usize)> {
        match qkv.dims() {
            [s, b, width] if *width == self.width() && *width > 0 => Ok((*s, *b)),
            dims => {
                let Self { groups, heads_per_group, head_dim } = self;
                let message = format!(
                    "qkv has shape {dims:?} where [s, b, {groups}·({heads_per_group} + 2)·{head_dim} = {}] is needed",
                    self.width()
                );
                Err(Error::shape(op, message))
            }
        }
    }
}

/// The keys that a query sees, and the score of each: scale · q·k + slope · (position of k −
/// position of q).
///
/// A query sees the keys up to its own position, except those that a field hides. A bare scale
/// converts to `Scores` that hide no key.
#[derive(Clone, Copy, Debug)]
pub struct Scores<'a> {
    pub scale: f64,
    /// A slope for each local query head (ALiBi); `None`: no such term.
    pub alibi: Option<&'a [f64]>,
    /// Largest number of keys that a query sees, its own included (the sliding window of Beltagy et
    /// al. 2020).
    pub window: Option<usize>,
    /// u32 `[b, s]`: the first key that each query sees, such as the first token of its document.
    /// Not later than the query itself, and never decreasing along s. Checked on the CPU only: the
    /// host does not read a GPU's.
    pub first_keys: Option<&'a Tensor>,
}

impl From<f64> for Scores<'_> {
    fn from(scale: f64) -> Self {
        Self { scale, alibi: None, window: None, first_keys: None }
    }
}

impl Scores<'_> {
    pub(crate) fn check(
        &self,
        s: usize,
        b: usize,
        shape: HeadShape,
        op: &'static str,
    ) -> Result<()> {
        if let Some(slopes) = self.alibi.filter(|slopes| slopes.len() != shape.heads()) {
            return Err(Error::shape(
                op,
                format!("{} slopes for {} query heads", slopes.len(), shape.heads()),
            ));
        }
        if self.window == Some(0) {
            return Err(Error::shape(op, "a window of 0 keys hides even a query's own"));
        }
        let Some(first_keys) = self.first_keys else { return Ok(()) };
        expect_shape(op, "first keys", first_keys, &[b, s])?;
        expect_dtype(op, first_keys, DType::U32)
    }
}

/// Dropout of attention probabilities: after the softmax, scaled by 1/(1−p).
#[derive(Clone, Copy, Debug)]
pub struct AttentionDropout<'a> {
    /// Probability of dropping a weight, in [0, 1).
    pub p: f64,
    pub key: DropoutKey,
    /// Global sample numbers, one per column of the batch.
    pub samples: &'a [u64],
    /// Global index of the first local query head.
    pub first_head: usize,
    /// See [`step_and_samples`](crate::ops::dropout::step_and_samples): a GPU reads this instead of
    /// the key's step and the samples.
    pub step_and_samples: Option<&'a Tensor>,
}

/// Offsets and strides in packed tensors.
#[derive(Clone, Copy)]
pub(crate) struct Geometry {
    pub s: usize,
    pub b: usize,
    pub shape: HeadShape,
}

impl Geometry {
    /// Stride of positions in qkv.
    pub fn qkv_stride(&self) -> usize {
        self.b * self.shape.width()
    }

    /// Stride of positions in the output.
    pub fn out_stride(&self) -> usize {
        self.b * self.shape.heads() * self.shape.head_dim
    }

    /// Offset in qkv of part `part` (query heads, then key, then value) of a group at position 0.
    pub fn qkv_at(&self, batch: usize, group: usize, part: usize) -> usize {
        batch * self.shape.width()
            + (group * (self.shape.heads_per_group + 2) + part) * self.shape.head_dim
    }

    /// Offset in the output of a head at position 0.
    pub fn out_at(&self, batch: usize, head: usize) -> usize {
        (batch * self.shape.heads() + head) * self.shape.head_dim
    }
}

/// An [`AttentionDropout`] prepared for kernels.
pub(crate) struct Mask<'a> {
    pub key: [u32; 4],
    /// [`DropoutKey::without_step`].
    #[cfg(gpu)]
    pub without_step: [u32; 4],
    pub threshold: u32,
    /// 1/(1−p).
    pub scale: f64,
    pub samples: &'a [u64],
    pub first_head: usize,
    #[cfg(gpu)]
    pub step_and_samples: Option<&'a Tensor>,
}

impl<'a> Mask<'a> {
    pub fn new(
        dropout: Option<&AttentionDropout<'a>>,
        batch: usize,
        op: &'static str,
    ) -> Result<Option<Self>> {
        let Some(&AttentionDropout { p, key, samples, first_head, step_and_samples }) = dropout
        else {
            return Ok(None);
        };
        if samples.len() != batch {
            return Err(Error::shape(
                op,
                format!("{} samples for a batch of {batch}", samples.len()),
            ));
        }
        let threshold = threshold(p, op)?;
        expect_step_and_samples(op, step_and_samples, batch)?;
        let mask = Self {
            key: key.derive(),
            #[cfg(gpu)]
            without_step: key.without_step(),
            threshold,
            scale: 1.0 / (1.0 - p),
            samples,
            first_head,
            #[cfg(gpu)]
            step_and_samples,
        };
        Ok(Some(mask).filter(|m| m.threshold > 0))
    }
}
