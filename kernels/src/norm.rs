//! LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019) over the last dimension.

use candle_core::{Tensor, WithDType};

use crate::float::{Elem, Float, by_elem};
use crate::linear::{ROW_BLOCK, accumulate};
use crate::output;
use crate::simd::{LANES, sum, tree, vectorize};
use crate::view::{View, copied, expect_dtype, expect_elements, expect_shape, rows_of, tensor};
use crate::{Error, Result, par, trace};

/// What backward needs of forward, per row: `[rows]` each, in f32 (f64 for f64 inputs).
#[derive(Clone, Debug)]
pub struct NormStats {
    /// The mean; RMSNorm has none.
    pub mean: Option<Tensor>,
    /// 1 / √(variance + eps), or of the mean square.
    pub rstd: Tensor,
}

/// `y = (x − mean) / √(var + eps) · weight + bias`, with `weight` and `bias` `[h]`.
///
/// # Errors
/// If shapes contradict each other, dtypes differ or are no floats, or an operand is not contiguous.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<(Tensor, NormStats)> {
    let _span = trace::moves("layer_norm", &[x, x]);
    const OP: &str = "layer_norm";
    by_elem!(x, OP, T => forward::<T>(OP, x, weight, Some(bias), eps))
}

/// The gradient of `x`; adds the gradients of weight and bias to `dweight` and `dbias`, `[h]` each and in the dtype of the
/// statistics.
///
/// # Errors
/// As [`layer_norm`].
pub fn layer_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    stats: &NormStats,
    weight: &Tensor,
    dweight: &Tensor,
    dbias: &Tensor,
) -> Result<Tensor> {
    let _span = trace::moves("layer_norm_backward", &[dy, x, x]);
    const OP: &str = "layer_norm_backward";
    if stats.mean.is_none() {
        return Err(Error::shape(OP, "the statistics hold no mean; they are those of rms_norm"));
    }
    by_elem!(x, OP, T => backward::<T>(OP, dy, x, stats, weight, dweight, Some(dbias)))
}

/// `y = x / √(mean(x²) + eps) · weight`, with `weight` `[h]`.
///
/// # Errors
/// As [`layer_norm`].
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, NormStats)> {
    let _span = trace::moves("rms_norm", &[x, x]);
    const OP: &str = "rms_norm";
    by_elem!(x, OP, T => forward::<T>(OP, x, weight, None, eps))
}

/// The gradient of `x`; adds the gradient of weight to `dweight`, `[h]` in the dtype of the statistics.
///
/// # Errors
/// As [`layer_norm`].
pub fn rms_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    stats: &NormStats,
    weight: &Tensor,
    dweight: &Tensor,
) -> Result<Tensor> {
    let _span = trace::moves("rms_norm_backward", &[dy, x, x]);
    const OP: &str = "rms_norm_backward";
    if stats.mean.is_some() {
        return Err(Error::shape(OP, "the statistics hold a mean; they are those of layer_norm"));
    }
    by_elem!(x, OP, T => backward::<T>(OP, dy, x, stats, weight, dweight, None))
}

/// A parameter `[h]`, widened.
fn parameter<E: Elem>(op: &'static str, what: &'static str, t: &Tensor, h: usize) -> Result<Vec<E::Acc>> {
    expect_shape(op, what, t, &[h])?;
    Ok(View::<E>::new(t, op, what)?.iter().map(|v| v.load()).collect())
}

/// LayerNorm where there is a bias, RMSNorm where there is none.
fn forward<E: Elem>(
    op: &'static str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, NormStats)> {
    let (rows, h) = rows_of(x, op)?;
    let weight = parameter::<E>(op, "weight", weight, h)?;
    let bias = bias.map(|bias| parameter::<E>(op, "bias", bias, h)).transpose()?;
    let xs = View::<E>::new(x, op, "x")?;
    let xs: &[E] = &xs;
    let mut stats = vec![[E::Acc::ZERO; 2]; rows];
    let (inv_h, eps) = (E::Acc::of(1.0 / h as f64), E::Acc::of(eps));
    let block = par::rows_per_block(h);
    let y = output::blocks2(rows * h, block * h, &mut stats, block, |i, y, stats| {
        let x = &xs[i * block * h..];
        vectorize(
            #[inline(always)]
            || {
                y.rows(h, |r, y| {
                    let x = &x[r * h..(r + 1) * h];
                    let mean = if bias.is_some() { sum(x, |v| v) * inv_h } else { E::Acc::ZERO };
                    let var = sum(x, |v| (v - mean) * (v - mean)) * inv_h;
                    let rstd = E::Acc::ONE / (var + eps).sqrt();
                    stats[r] = [mean, rstd];
                    let x = x.iter().zip(&weight);
                    match &bias {
                        Some(bias) => {
                            y.write(x.zip(bias).map(|((x, &w), &b)| E::store((x.load() - mean) * rstd * w + b)))
                        }
                        None => y.write(x.map(|(x, &w)| E::store(x.load() * rstd * w))),
                    }
                })
            },
        )
    });
    let column = |c: usize| tensor(stats.iter().map(|s| s[c]).collect::<Vec<E::Acc>>(), rows, x);
    let mean = if bias.is_some() { Some(column(0)?) } else { None };
    Ok((tensor(y, x.dims(), x)?, NormStats { mean, rstd: column(1)? }))
}

fn backward<E: Elem>(
    op: &'static str,
    dy: &Tensor,
    x: &Tensor,
    stats: &NormStats,
    weight: &Tensor,
    dweight: &Tensor,
    dbias: Option<&Tensor>,
) -> Result<Tensor> {
    let (rows, h) = rows_of(x, op)?;
    expect_shape(op, "dy", dy, x.dims())?;
    expect_elements(op, "rstd", &stats.rstd, rows)?;
    for grad in [Some(dweight), dbias].into_iter().flatten() {
        expect_shape(op, "the parameter's gradient", grad, &[h])?;
        expect_dtype(op, grad, E::Acc::DTYPE)?;
    }
    let weight = parameter::<E>(op, "weight", weight, h)?;
    let rstd = copied::<E::Acc>(&stats.rstd, op, "rstd")?;
    let mean = match &stats.mean {
        Some(mean) => {
            expect_elements(op, "mean", mean, rows)?;
            Some(copied::<E::Acc>(mean, op, "mean")?)
        }
        None => None,
    };
    let (xs, dys) = (View::<E>::new(x, op, "x")?, View::<E>::new(dy, op, "dy")?);
    let (xs, dys): (&[E], &[E]) = (&xs, &dys);
    // Per block of rows: partial sums of dweight, then of dbias.
    let width = if mean.is_some() { 2 * h } else { h };
    let mut partials = vec![E::Acc::ZERO; rows.div_ceil(ROW_BLOCK) * width];
    let inv_h = E::Acc::of(1.0 / h as f64);
    let dx = output::blocks2(rows * h, ROW_BLOCK * h, &mut partials, width, |i, dx, partial| {
        let (dweight, dbias) = partial.split_at_mut(h);
        vectorize(
            #[inline(always)]
            || {
                dx.rows(h, |r, dx| {
                    let row = i * ROW_BLOCK + r;
                    let (x, dy) = (&xs[row * h..(row + 1) * h], &dys[row * h..(row + 1) * h]);
                    let (mean, rstd) = (mean.as_ref().map_or(E::Acc::ZERO, |m| m[row]), rstd[row]);
                    for (((dweight, dy), x), _) in dweight.iter_mut().zip(dy).zip(x).zip(&weight) {
                        *dweight += dy.load() * ((x.load() - mean) * rstd);
                    }
                    for (dbias, dy) in dbias.iter_mut().zip(dy) {
                        *dbias += dy.load();
                    }
                    let [along, across] = sums(dy, x, &weight, mean, rstd).map(|sum| sum * inv_h);
                    let across = if dbias.is_empty() { E::Acc::ZERO } else { across };
                    dx.write(dy.iter().zip(x).zip(&weight).map(|((dy, x), &w)| {
                        E::store(rstd * (dy.load() * w - across - (x.load() - mean) * rstd * along))
                    }))
                })
            },
        )
    });
    accumulate(&partials, width, 0, h, dweight, op)?;
    if let Some(dbias) = dbias {
        accumulate(&partials, width, h, h, dbias, op)?;
    }
    tensor(dx, x.dims(), x)
}

/// Σ g·x̂ and Σ g of a row, for g = dy·weight and x̂ = (x − mean)·rstd.
#[inline(always)]
fn sums<E: Elem>(dy: &[E], x: &[E], weight: &[E::Acc], mean: E::Acc, rstd: E::Acc) -> [E::Acc; 2] {
    let (mut along, mut across) = ([E::Acc::ZERO; LANES], [E::Acc::ZERO; LANES]);
    let mut add = |dy: &[E], x: &[E], weight: &[E::Acc]| {
        for l in 0..dy.len() {
            let g = dy[l].load() * weight[l];
            along[l] += g * ((x[l].load() - mean) * rstd);
            across[l] += g;
        }
    };
    let (mut dys, mut xs, mut weights) = (dy.chunks_exact(LANES), x.chunks_exact(LANES), weight.chunks_exact(LANES));
    for ((dy, x), weight) in (&mut dys).zip(&mut xs).zip(&mut weights) {
        add(dy, x, weight);
    }
    add(dys.remainder(), xs.remainder(), weights.remainder());
    [tree(along), tree(across)]
}
