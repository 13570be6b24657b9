//! LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019) over the last dimension.

use candle_core::Tensor;

use crate::float::{Float, by_float};
use crate::linear::{ROW_BLOCK, accumulate};
use crate::simd::{sum, sum2, vectorize};
use crate::view::{View, copied, expect_dtype, expect_elements, expect_shape, rows_of, tensor};
use crate::{Error, Result, par};

/// What backward needs of forward, per row and in the dtype of the input: `[rows]` each.
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
/// If shapes contradict each other, dtypes differ or are neither f32 nor f64, or an operand is not contiguous.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<(Tensor, NormStats)> {
    const OP: &str = "layer_norm";
    by_float!(x, OP, T => forward::<T>(OP, x, weight, Some(bias), eps))
}

/// The gradient of `x`; adds the gradients of weight and bias to `dweight` and `dbias`, `[h]` each.
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
    const OP: &str = "layer_norm_backward";
    if stats.mean.is_none() {
        return Err(Error::shape(OP, "the statistics hold no mean; they are those of rms_norm"));
    }
    by_float!(x, OP, T => backward::<T>(OP, dy, x, stats, weight, dweight, Some(dbias)))
}

/// `y = x / √(mean(x²) + eps) · weight`, with `weight` `[h]`.
///
/// # Errors
/// As [`layer_norm`].
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, NormStats)> {
    const OP: &str = "rms_norm";
    by_float!(x, OP, T => forward::<T>(OP, x, weight, None, eps))
}

/// The gradient of `x`; adds the gradient of weight to `dweight`, `[h]`.
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
    const OP: &str = "rms_norm_backward";
    if stats.mean.is_some() {
        return Err(Error::shape(OP, "the statistics hold a mean; they are those of layer_norm"));
    }
    by_float!(x, OP, T => backward::<T>(OP, dy, x, stats, weight, dweight, None))
}

/// LayerNorm where there is a bias, RMSNorm where there is none.
fn forward<T: Float>(
    op: &'static str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, NormStats)> {
    let (rows, h) = rows_of(x, op)?;
    expect_shape(op, "weight", weight, &[h])?;
    let weight = copied::<T>(weight, op, "weight")?;
    let bias = match bias {
        Some(bias) => {
            expect_shape(op, "bias", bias, &[h])?;
            Some(copied::<T>(bias, op, "bias")?)
        }
        None => None,
    };
    let xs = View::<T>::new(x, op, "x")?;
    let xs: &[T] = &xs;
    let mut y = vec![T::ZERO; rows * h];
    let mut stats = vec![[T::ZERO; 2]; rows];
    let (inv_h, eps) = (T::of(1.0 / h as f64), T::of(eps));
    let block = par::rows_per_block(h);
    par::blocks2(&mut y, block * h, &mut stats, block, |i, y, stats| {
        let x = &xs[i * block * h..];
        vectorize(
            #[inline(always)]
            || {
                for ((y, x), stats) in y.chunks_exact_mut(h).zip(x.chunks_exact(h)).zip(stats) {
                    let mean = if bias.is_some() { sum(x, |v| v) * inv_h } else { T::ZERO };
                    let var = sum(x, |v| (v - mean) * (v - mean)) * inv_h;
                    let rstd = T::ONE / (var + eps).sqrt();
                    *stats = [mean, rstd];
                    match &bias {
                        Some(bias) => {
                            for (((y, &x), &w), &b) in y.iter_mut().zip(x).zip(&weight).zip(bias) {
                                *y = (x - mean) * rstd * w + b;
                            }
                        }
                        None => {
                            for ((y, &x), &w) in y.iter_mut().zip(x).zip(&weight) {
                                *y = x * rstd * w;
                            }
                        }
                    }
                }
            },
        );
    });
    let column = |c: usize| tensor(stats.iter().map(|s| s[c]).collect::<Vec<T>>(), rows, x);
    let mean = if bias.is_some() { Some(column(0)?) } else { None };
    Ok((tensor(y, x.dims(), x)?, NormStats { mean, rstd: column(1)? }))
}

fn backward<T: Float>(
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
    expect_shape(op, "weight", weight, &[h])?;
    expect_elements(op, "rstd", &stats.rstd, rows)?;
    for grad in [Some(dweight), dbias].into_iter().flatten() {
        expect_shape(op, "the parameter's gradient", grad, &[h])?;
        expect_dtype(op, grad, T::DTYPE)?;
    }
    let weight = copied::<T>(weight, op, "weight")?;
    let rstd = copied::<T>(&stats.rstd, op, "rstd")?;
    let mean = match &stats.mean {
        Some(mean) => {
            expect_elements(op, "mean", mean, rows)?;
            Some(copied::<T>(mean, op, "mean")?)
        }
        None => None,
    };
    let (xs, dys) = (View::<T>::new(x, op, "x")?, View::<T>::new(dy, op, "dy")?);
    let (xs, dys): (&[T], &[T]) = (&xs, &dys);
    let mut dx = vec![T::ZERO; rows * h];
    // Per block of rows: partial sums of dweight, then of dbias.
    let width = if mean.is_some() { 2 * h } else { h };
    let mut partials = vec![T::ZERO; rows.div_ceil(ROW_BLOCK) * width];
    let inv_h = T::of(1.0 / h as f64);
    par::blocks2(&mut dx, ROW_BLOCK * h, &mut partials, width, |i, dx, partial| {
        let first = i * ROW_BLOCK;
        let (dweight, dbias) = partial.split_at_mut(h);
        vectorize(
            #[inline(always)]
            || {
                let inputs = xs[first * h..].chunks_exact(h).zip(dys[first * h..].chunks_exact(h));
                for (r, (dx, (x, dy))) in dx.chunks_exact_mut(h).zip(inputs).enumerate() {
                    let rstd = rstd[first + r];
                    let mean = mean.as_ref().map_or(T::ZERO, |m| m[first + r]);
                    for ((((dx, &dy), &x), &w), dweight) in dx.iter_mut().zip(dy).zip(x).zip(&weight).zip(&mut *dweight)
                    {
                        *dx = dy * w;
                        *dweight += dy * ((x - mean) * rstd);
                    }
                    for (dbias, &dy) in dbias.iter_mut().zip(dy) {
                        *dbias += dy;
                    }
                    let along = sum2(dx, x, |g, x| g * ((x - mean) * rstd)) * inv_h;
                    let across = if dbias.is_empty() { T::ZERO } else { sum(dx, |g| g) * inv_h };
                    for (dx, &x) in dx.iter_mut().zip(x) {
                        *dx = rstd * (*dx - across - (x - mean) * rstd * along);
                    }
                }
            },
        );
    });
    accumulate(&partials, width, 0, h, dweight, op)?;
    if let Some(dbias) = dbias {
        accumulate(&partials, width, h, h, dbias, op)?;
    }
    tensor(dx, x.dims(), x)
}
