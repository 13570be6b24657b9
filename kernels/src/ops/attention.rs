//! Causal grouped-query attention in tiles with an online softmax. Backward needs only the
//! log-sum-exp.
//!
//! Dao et al. 2022 (FlashAttention) and Dao 2023 (FlashAttention-2); linear biases: Press et al.
//! 2022 (ALiBi).

use candle_core::Tensor;

pub use super::rope::{
    RopeTable, Rotation, rope_at, rope_frequencies, rope_inplace, rope_positions,
};
pub use crate::tensor::arguments::attention::{AttentionDropout, HeadShape, Scores};
use crate::tensor::arguments::attention::{Geometry, Mask};
use crate::tensor::element::by_elem;
use crate::tensor::trace;
use crate::tensor::view::{expect_apart, expect_dtype, expect_shape};
use crate::{Error, Result, cpu, on_gpu};

/// `out [s, b, heads·head_dim] = softmax(scores) · v` per head, and the log-sum-exp `[b, heads, s]`
/// of the [`Scores`]. A bare scale converts to [`Scores`]. `qkv [s, b, groups·(heads_per_group +
/// 2)·head_dim]` holds the queries, the key and the value of each group in turn.
///
/// 16-bit tensors are computed in f32, and their log-sum-exp is f32. Probabilities are rounded to
/// the tensors' dtype before they weight the values.
///
/// # Errors
/// If shapes or the [`Scores`] do not fit, `qkv` is not contiguous or its dtype is not a float, or
/// the dropout's p is not in [0, 1).
pub fn attention<'a>(
    qkv: &Tensor,
    shape: HeadShape,
    scores: impl Into<Scores<'a>>,
    dropout: Option<&AttentionDropout>,
) -> Result<(Tensor, Tensor)> {
    let _span = trace::span("attention", trace::Kind::Kernel)
        .work(2 * causal_products(qkv, shape), trace::bytes(&[qkv, qkv]));
    const OP: &str = "attention";
    let (s, b) = shape.check(qkv, OP)?;
    let scores = scores.into();
    scores.check(s, b, shape, OP)?;
    let mask = Mask::new(dropout, b, OP)?;
    let geometry = Geometry { s, b, shape };
    on_gpu!(qkv, attention::forward(OP, qkv, geometry, scores, mask.as_ref()));
    by_elem!(qkv, OP, E => cpu::attention::forward::<E>(qkv, geometry, scores, mask.as_ref(), OP))
}

/// The gradient with respect to `qkv`, from `dout [s, b, heads·head_dim]` and the results of
/// [`attention`]. Probabilities and dropout masks are recomputed.
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

/// As [`attention_backward`] of `dout`, `qkv`, `out` and `lse`, but returns the gradient with
/// respect to `qkv` before `rotation` rotated its queries and keys. On GPUs of compute capability
/// 9.0 the same kernels also rotate the gradient back, so that it is rounded only once.
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

/// The gradient, and whether it is already rotated back.
fn gradients<'a>(
    [dout, qkv, out, lse]: [&Tensor; 4],
    shape: HeadShape,
    scores: Scores<'a>,
    dropout: Option<&AttentionDropout<'a>>,
    #[cfg_attr(not(gpu), expect(unused_variables, reason = "kernels of CPUs leave it to another"))]
    rotation: Option<&Rotation>,
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
    on_gpu!(
        qkv,
        attention::backward(OP, [dout, qkv, out, lse], geometry, scores, mask.as_ref(), rotation)
    );
    let tensors = [dout, qkv, out, lse];
    let dqkv = by_elem!(qkv, OP, E => cpu::attention::backward::<E>(tensors, geometry, scores, mask.as_ref(), OP))?;
    Ok((dqkv, false))
}

/// Appends the keys and values of `qkv [n, b, width]` (rotated) to `cache [positions, b,
/// groups·2·head_dim]`. Attends from each new query to all positions up to its own, and returns
/// `[n, b, heads·head_dim]`. The first new token of sample i has position `starts[i]`; the cache's
/// contents from that position on are replaced.
///
/// # Errors
/// If shapes, dtypes or [`Scores`] do not fit, the scores name first keys, the cache is too short,
/// or the dtype of `qkv` is not a float.
pub fn attention_cached<'a>(
    qkv: &Tensor,
    cache: &Tensor,
    starts: &[usize],
    shape: HeadShape,
    scores: impl Into<Scores<'a>>,
) -> Result<Tensor> {
    const OP: &str = "attention_cached";
    let (s, b) = shape.check(qkv, OP)?;
    let positions = cache.dim(0)?;
    expect_shape(OP, "cache", cache, &[positions, b, shape.groups * 2 * shape.head_dim])?;
    expect_dtype(OP, cache, qkv.dtype())?;
    if starts.len() != b
        || starts.iter().any(|start| start.checked_add(s).is_none_or(|end| end > positions))
    {
        let message = format!(
            "{s} tokens from positions {starts:?} on, of {b} samples, in a cache of {positions} positions"
        );
        return Err(Error::shape(OP, message));
    }
    let scores = scores.into();
    scores.check(s, b, shape, OP)?;
    if scores.first_keys.is_some() {
        return Err(Error::shape(
            OP,
            "first keys of a sequence say nothing of what the cache holds",
        ));
    }
    let geometry = Geometry { s, b, shape };
    on_gpu!(qkv, attention::cached(OP, qkv, cache, starts, geometry, scores));
    expect_apart(OP, "cache", cache, &[qkv])?;
    by_elem!(qkv, OP, E => cpu::attention::cached::<E>(qkv, cache, starts, geometry, scores, OP))
}

/// Operations of the causal half of the product of all queries and keys: s² · d for every head and
/// every sample.
fn causal_products(qkv: &Tensor, shape: HeadShape) -> usize {
    let rows = qkv.elem_count() / shape.width().max(1);
    rows * qkv.dims().first().copied().unwrap_or(0) * shape.heads() * shape.head_dim
}

#[cfg(test)]
mod tests;
