//! Causal grouped-query attention in tiles with an online softmax.

mod backward;
mod buffers;
mod cached;
mod forward;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod product;

use candle_core::Tensor;

use self::buffers::Rows;
pub use self::cached::cached;
use crate::tensor::arguments::attention::{Geometry, Mask, Scores};
use crate::tensor::element::{Elem, Float};
use crate::tensor::philox::{WordRow, philox4x32, words};
use crate::tensor::view::copied;
use crate::{Error, Result};

/// Queries per tile.
const TILE_Q: usize = 64;

/// Keys per tile of forward; a multiple of 4, so that tiles start on whole Philox blocks.
const TILE_K: usize = 128;

impl Scores<'_> {
    /// The elements of the first keys.
    fn first_keys(&self, op: &'static str) -> Result<Option<Vec<u32>>> {
        self.first_keys.map(|first_keys| copied(first_keys, op, "first keys")).transpose()
    }
}

/// [`Scores`] in the form that CPU kernels read.
#[derive(Clone, Copy)]
struct HostScores<'a> {
    scale: f64,
    alibi: Option<&'a [f64]>,
    window: Option<usize>,
    /// `[b][s]`.
    first_keys: Option<&'a [u32]>,
}

impl<'a> HostScores<'a> {
    /// `first_keys` are those of `scores`, `[b][s]`.
    fn new(
        scores: Scores<'a>,
        first_keys: Option<&'a [u32]>,
        s: usize,
        op: &'static str,
    ) -> Result<Self> {
        for (sample, row) in first_keys.unwrap_or_default().chunks_exact(s.max(1)).enumerate() {
            let sees_nothing = |&(query, &first): &(usize, &u32)| first as usize > query;
            if let Some((query, first)) = row.iter().enumerate().find(sees_nothing) {
                let message = format!(
                    "query {query} of sample {sample} sees nothing: its first key is {first}"
                );
                return Err(Error::shape(op, message));
            }
            if let Some(at) = row.windows(2).position(|pair| pair[1] < pair[0]) {
                let message = format!(
                    "the first keys of sample {sample} fall from {} to {}",
                    row[at],
                    row[at + 1]
                );
                return Err(Error::shape(op, message));
            }
        }
        let Scores { scale, alibi, window, .. } = scores;
        Ok(Self { scale, alibi, window, first_keys })
    }

    /// The first key that a query sees, in sequences of length `s`. Does not decrease along the
    /// queries.
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

/// Adds the slope's term to the scores of `query` with the keys from `first_key` on.
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

/// Rounds probabilities to `E`, before they weight values of `E`.
#[inline(always)]
fn round<E: Elem>(p: &mut [E::Acc]) {
    if size_of::<E>() < size_of::<E::Acc>() {
        p.iter_mut().for_each(|p| *p = E::store(*p).load());
    }
}

/// Arguments of both passes besides tensors.
#[derive(Clone, Copy)]
struct Call<'a> {
    geometry: Geometry,
    scores: HostScores<'a>,
    mask: Option<&'a Mask<'a>>,
}

impl Geometry {
    /// Part `part` of a group in `packed`.
    fn qkv_rows<'a, E>(
        &self,
        packed: &'a [E],
        batch: usize,
        group: usize,
        part: usize,
    ) -> Rows<'a, E> {
        let at = self.qkv_at(batch, group, part);
        Rows { elements: packed, at, stride: self.qkv_stride(), width: self.shape.head_dim }
    }

    /// A head of the output.
    fn out_rows<'a, E>(&self, out: &'a [E], batch: usize, head: usize) -> Rows<'a, E> {
        Rows {
            elements: out,
            at: self.out_at(batch, head),
            stride: self.out_stride(),
            width: self.shape.head_dim,
        }
    }
}

impl Mask<'_> {
    /// The words of a local head; see [`HeadMask`].
    fn head(&self, batch: usize, head: usize) -> HeadMask {
        let ([s0, s1], [k0, k1, tag, _]) = (words(self.samples[batch]), self.key);
        let derived = philox4x32([s0, s1, (self.first_head + head) as u32, tag], [k0, k1]);
        HeadMask { derived, threshold: self.threshold }
    }
}

/// Dropout of one (sample, head): query q's row of words belongs to its keys.
///
/// (key, sample, head) does not fit into a Philox counter together with q and k, so it is hashed
/// into key and counter.
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

/// See [`ops`](crate::tensor::arguments::attention::attention).
pub fn forward<E: Elem>(
    qkv: &Tensor,
    geometry: Geometry,
    scores: Scores,
    mask: Option<&Mask>,
    op: &'static str,
) -> Result<(Tensor, Tensor)> {
    let first_keys = scores.first_keys(op)?;
    let scores = HostScores::new(scores, first_keys.as_deref(), geometry.s, op)?;
    forward::run::<E>(op, qkv, Call { geometry, scores, mask })
}

/// The gradient with respect to `qkv`, from `dout`, `qkv`, `out` and `lse`.
pub fn backward<E: Elem>(
    [dout, qkv, out, lse]: [&Tensor; 4],
    geometry: Geometry,
    scores: Scores,
    mask: Option<&Mask>,
    op: &'static str,
) -> Result<Tensor> {
    let first_keys = scores.first_keys(op)?;
    let scores = HostScores::new(scores, first_keys.as_deref(), geometry.s, op)?;
    backward::run::<E>(op, dout, qkv, out, lse, Call { geometry, scores, mask })
}
