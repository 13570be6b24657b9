//! Causal grouped-query attention in tiles with an online softmax; only the log-sum-exp is kept for backward.
//!
//! Dao et al. 2022 (FlashAttention) and Dao 2023 (FlashAttention-2); linear biases: Press et al. 2022 (ALiBi).

mod backward;
mod buffers;
mod cached;
mod forward;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod product;

use candle_core::{DType, Tensor};

use crate::ops::dropout::{DropoutKey, expect_step_and_samples, threshold};
use crate::tensor::element::{Elem, Float, by_elem};
use crate::tensor::philox::{WordRow, philox4x32, words};
use crate::tensor::trace;
use crate::tensor::view::{copied, expect_dtype, expect_shape};
use crate::{Error, Result, on_gpu};

use self::buffers::Rows;

pub use self::cached::attention_cached;
pub use crate::ops::rope::{RopeTable, Rotation, rope_at, rope_frequencies, rope_inplace, rope_positions};

/// Queries per tile.
const TILE_Q: usize = 64;
/// Keys per tile of forward; a multiple of 4, so that tiles start on whole Philox blocks.
const TILE_K: usize = 128;

/// The heads of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Key/value heads.
    pub groups: usize,
    /// Query heads that share one of them.
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

/// Which keys a query sees, and how the product with one becomes a score: scale · q·k + slope · (position of k − position of q).
///
/// A query sees the keys up to its own position that no field hides. A bare scale converts into it: none is hidden.
#[derive(Clone, Copy, Debug)]
pub struct Scores<'a> {
    pub scale: f64,
    /// A slope for each local query head (ALiBi); `None`: no such term.
    pub alibi: Option<&'a [f64]>,
    /// How many keys a query sees at most, its own included (the sliding window of Beltagy et al. 2020).
    pub window: Option<usize>,
    /// u32 `[b, s]`: the first key that a sample's query sees, such as the first token of its document; no later than the query itself, and
    /// never falling along s. Checked on the CPU; a GPU's is not read by the host.
    pub first_keys: Option<&'a Tensor>,
}

impl From<f64> for Scores<'_> {
    fn from(scale: f64) -> Self {
        Self { scale, alibi: None, window: None, first_keys: None }
    }
}

impl Scores<'_> {
    fn check(&self, s: usize, b: usize, shape: HeadShape, op: &'static str) -> Result<()> {
        if let Some(slopes) = self.alibi.filter(|slopes| slopes.len() != shape.heads()) {
            return Err(Error::shape(op, format!("{} slopes for {} query heads", slopes.len(), shape.heads())));
        }
        if self.window == Some(0) {
            return Err(Error::shape(op, "a window of 0 keys hides even a query's own"));
        }
        let Some(first_keys) = self.first_keys else { return Ok(()) };
        expect_shape(op, "first keys", first_keys, &[b, s])?;
        expect_dtype(op, first_keys, DType::U32)
    }

    /// The elements of the first keys.
    fn first_keys(&self, op: &'static str) -> Result<Option<Vec<u32>>> {
        self.first_keys.map(|first_keys| copied(first_keys, op, "first keys")).transpose()
    }
}

/// [`Scores`] as the CPU's kernels read them.
#[derive(Clone, Copy)]
struct HostScores<'a> {
    scale: f64,
    alibi: Option<&'a [f64]>,
    window: Option<usize>,
    /// `[b][s]`
    first_keys: Option<&'a [u32]>,
}

impl<'a> HostScores<'a> {
    /// `first_keys`: those of `scores`, `[b][s]`.
    fn new(scores: Scores<'a>, first_keys: Option<&'a [u32]>, s: usize, op: &'static str) -> Result<Self> {
        for (sample, row) in first_keys.unwrap_or_default().chunks_exact(s.max(1)).enumerate() {
            let sees_nothing = |&(query, &first): &(usize, &u32)| first as usize > query;
            if let Some((query, first)) = row.iter().enumerate().find(sees_nothing) {
                let message = format!("query {query} of sample {sample} sees nothing: its first key is {first}");
                return Err(Error::shape(op, message));
            }
            if let Some(at) = row.windows(2).position(|pair| pair[1] < pair[0]) {
                let message = format!("the first keys of sample {sample} fall from {} to {}", row[at], row[at + 1]);
                return Err(Error::shape(op, message));
            }
        }
        let Scores { scale, alibi, window, .. } = scores;
        Ok(Self { scale, alibi, window, first_keys })
    }

    /// The first key that a query sees, of sequences of `s`. Does not decrease along the queries.
    #[inline(always)]
    fn first_key(&self, s: usize, sample: usize, query: usize) -> usize {
        let window = self.window.map_or(0, |window| (query + 1).saturating_sub(window));
        self.first_keys.map_or(window, |first| window.max(first[sample * s + query] as usize))
    }

    /// The slope of a local query head.
    fn slope(&self, head: usize) -> Option<f64> {
        self.alibi.map(|slopes| slopes[head])
    }
}

/// Adds a slope's term to the scores of `query` with the keys from `first_key` on.
#[inline(always)]
fn tilt<T: Float>(scores: &mut [T], slope: f64, query: usize, first_key: usize) {
    let slope = T::of(slope);
    // Distances are whole numbers, exact in f32 up to 2²⁴ positions.
    let mut distance = T::of(first_key as f64 - query as f64);
    for score in scores {
        *score += slope * distance;
        distance += T::ONE;
    }
}

/// Rounds probabilities to what `E` holds, as they are before they weigh values of `E`.
#[inline(always)]
fn round<E: Elem>(p: &mut [E::Acc]) {
    if size_of::<E>() < size_of::<E::Acc>() {
        p.iter_mut().for_each(|p| *p = E::store(*p).load());
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
    /// See [`step_and_samples`](crate::ops::dropout::step_and_samples): on a GPU, read instead of the key's step and the samples.
    pub step_and_samples: Option<&'a Tensor>,
}

/// `out [s, b, heads·head_dim] = softmax(scores) · v` per head, and the log-sum-exp `[b, heads, s]` of the
/// [`Scores`], which a bare scale stands for. `qkv [s, b, groups·(heads_per_group + 2)·head_dim]` holds, per group, its queries, its key, its value.
///
/// 16-bit tensors are computed in f32, which is also the log-sum-exp's dtype; probabilities are rounded to the tensors' dtype before
/// they weigh the values.
///
/// # Errors
/// If shapes or the [`Scores`] do not fit, `qkv` is not contiguous or no float, or the dropout's p is not in [0, 1).
pub fn attention<'a>(
    qkv: &Tensor,
    shape: HeadShape,
    scores: impl Into<Scores<'a>>,
    dropout: Option<&AttentionDropout>,
) -> Result<(Tensor, Tensor)> {
    let _span =
        trace::span("attention", trace::Kind::Kernel).work(2 * causal_products(qkv, shape), trace::bytes(&[qkv, qkv]));
    const OP: &str = "attention";
    let (s, b) = shape.check(qkv, OP)?;
    let scores = scores.into();
    scores.check(s, b, shape, OP)?;
    let mask = Mask::new(dropout, b, OP)?;
    let geometry = Geometry { s, b, shape };
    on_gpu!(qkv, attention::forward(OP, qkv, geometry, scores, mask.as_ref()));
    let first_keys = scores.first_keys(OP)?;
    let scores = HostScores::new(scores, first_keys.as_deref(), s, OP)?;
    let call = Call { geometry, scores, mask: mask.as_ref() };
    by_elem!(qkv, OP, E => forward::run::<E>(OP, qkv, call))
}

/// The gradient of `qkv`, of `dout [s, b, heads·head_dim]` and what [`attention`] returned. Probabilities and dropout masks
/// are computed again.
///
/// # Errors
/// As [`attention`].
pub fn attention_backward<'a>(
    dout: &Tensor,
    qkv: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    shape: HeadShape,
    scores: impl Into<Scores<'a>>,
    dropout: Option<&AttentionDropout<'a>>,
) -> Result<Tensor> {
    Ok(gradients([dout, qkv, out, lse], shape, scores.into(), dropout, None)?.0)
}

/// As [`attention_backward`], of `dout`, `qkv`, `out` and `lse`: the gradient of what was `qkv` before `rotation` turned its queries and keys. On GPUs of
/// compute capability 9.0 it comes out of the same kernels, rounded once.
///
/// # Errors
/// As [`attention`] and [`rope_inplace`].
pub fn attention_backward_rotated<'a>(
    tensors: [&Tensor; 4],
    shape: HeadShape,
    scores: impl Into<Scores<'a>>,
    dropout: Option<&AttentionDropout<'a>>,
    rotation: &Rotation,
) -> Result<Tensor> {
    let (dqkv, turned) = gradients(tensors, shape, scores.into(), dropout, Some(rotation))?;
    if !turned {
        rotation.turn(&dqkv, shape, true)?;
    }
    Ok(dqkv)
}

/// The gradient, and whether it was turned back already.
fn gradients<'a>(
    [dout, qkv, out, lse]: [&Tensor; 4],
    shape: HeadShape,
    scores: Scores<'a>,
    dropout: Option<&AttentionDropout<'a>>,
    #[cfg_attr(not(gpu), expect(unused_variables, reason = "kernels of CPUs leave it to another"))] rotation: Option<
        &Rotation,
    >,
) -> Result<(Tensor, bool)> {
    let _span = trace::span("attention_backward", trace::Kind::Kernel)
        .work(5 * causal_products(qkv, shape), trace::bytes(&[qkv, qkv]));
    const OP: &str = "attention_backward";
    let (s, b) = shape.check(qkv, OP)?;
    let wide = [s, b, shape.heads() * shape.head_dim];
    expect_shape(OP, "dout", dout, &wide)?;
    expect_shape(OP, "out", out, &wide)?;
    expect_shape(OP, "lse", lse, &[b, shape.heads(), s])?;
    scores.check(s, b, shape, OP)?;
    let mask = Mask::new(dropout, b, OP)?;
    let geometry = Geometry { s, b, shape };
    on_gpu!(qkv, attention::backward(OP, [dout, qkv, out, lse], geometry, scores, mask.as_ref(), rotation));
    let first_keys = scores.first_keys(OP)?;
    let scores = HostScores::new(scores, first_keys.as_deref(), s, OP)?;
    let call = Call { geometry, scores, mask: mask.as_ref() };
    by_elem!(qkv, OP, E => backward::run::<E>(OP, dout, qkv, out, lse, call)).map(|dqkv| (dqkv, false))
}

/// Operations of the causal half of the product of all queries and keys: s² · d for every head and sample.
fn causal_products(qkv: &Tensor, shape: HeadShape) -> usize {
    let rows = qkv.elem_count() / shape.width().max(1);
    rows * qkv.dims().first().copied().unwrap_or(0) * shape.heads() * shape.head_dim
}

/// What both passes need to know beside tensors.
#[derive(Clone, Copy)]
struct Call<'a> {
    geometry: Geometry,
    scores: HostScores<'a>,
    mask: Option<&'a Mask<'a>>,
}

/// Where things lie in packed tensors.
#[derive(Clone, Copy)]
pub(crate) struct Geometry {
    pub s: usize,
    pub b: usize,
    pub shape: HeadShape,
}

impl Geometry {
    /// Distance between positions in qkv.
    fn qkv_stride(&self) -> usize {
        self.b * self.shape.width()
    }

    /// Distance between positions in the output.
    fn out_stride(&self) -> usize {
        self.b * self.shape.heads() * self.shape.head_dim
    }

    /// Offset in qkv of part `part` (query heads, then key, then value) of a group at position 0.
    fn qkv_at(&self, batch: usize, group: usize, part: usize) -> usize {
        batch * self.shape.width() + (group * (self.shape.heads_per_group + 2) + part) * self.shape.head_dim
    }

    /// Part `part` of a group in `packed`.
    fn qkv_rows<'a, E>(&self, packed: &'a [E], batch: usize, group: usize, part: usize) -> Rows<'a, E> {
        let at = self.qkv_at(batch, group, part);
        Rows { elements: packed, at, stride: self.qkv_stride(), width: self.shape.head_dim }
    }

    /// A head of the output.
    fn out_rows<'a, E>(&self, out: &'a [E], batch: usize, head: usize) -> Rows<'a, E> {
        Rows { elements: out, at: self.out_at(batch, head), stride: self.out_stride(), width: self.shape.head_dim }
    }

    /// Offset in the output of a head at position 0.
    fn out_at(&self, batch: usize, head: usize) -> usize {
        (batch * self.shape.heads() + head) * self.shape.head_dim
    }
}

/// An [`AttentionDropout`] made ready.
pub(crate) struct Mask<'a> {
    pub key: [u32; 4],
    /// [`DropoutKey::without_step`]
    #[cfg(gpu)]
    pub without_step: [u32; 4],
    pub threshold: u32,
    /// 1/(1−p)
    pub scale: f64,
    pub samples: &'a [u64],
    pub first_head: usize,
    #[cfg(gpu)]
    pub step_and_samples: Option<&'a Tensor>,
}

impl<'a> Mask<'a> {
    fn new(dropout: Option<&AttentionDropout<'a>>, batch: usize, op: &'static str) -> Result<Option<Self>> {
        let Some(&AttentionDropout { p, key, samples, first_head, step_and_samples }) = dropout else {
            return Ok(None);
        };
        if samples.len() != batch {
            return Err(Error::shape(op, format!("{} samples for a batch of {batch}", samples.len())));
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

    /// The words of a local head; see [`HeadMask`].
    fn head(&self, batch: usize, head: usize) -> HeadMask {
        let ([s0, s1], [k0, k1, tag, _]) = (words(self.samples[batch]), self.key);
        let derived = philox4x32([s0, s1, (self.first_head + head) as u32, tag], [k0, k1]);
        HeadMask { derived, threshold: self.threshold }
    }
}

/// Dropout of one (sample, head): query q's row of words belongs to its keys.
///
/// (key, sample, head) is more than a Philox counter holds beside q and k, so it is hashed into key and counter.
#[derive(Clone, Copy)]
struct HeadMask {
    derived: [u32; 4],
    threshold: u32,
}

impl HeadMask {
    /// Fills `out` with the words of query `q` and the keys from `first_key`, a multiple of 4, on.
    #[inline(always)]
    fn fill(&self, q: usize, first_key: usize, out: &mut [u32]) {
        let [k0, k1, b, d] = self.derived;
        WordRow { a: q as u32, b, d, key: [k0, k1] }.fill((first_key / 4) as u32, out);
    }
}
