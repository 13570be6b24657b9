//! LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019) over the last dimension.

use candle_core::{Tensor, WithDType};

use crate::ops::linear::{ROW_BLOCK, accumulate};
use crate::tensor::element::{Elem, Float, by_elem};
use crate::tensor::output::{self, Unwritten};
use crate::tensor::simd::{LANES, ask_ahead_of, sum, tree, vectorize};
use crate::tensor::view::{View, copied, expect_dtype, expect_elements, expect_shape, rows_of, tensor};
use crate::tensor::{parallel, trace};
use crate::{Error, Result, on_gpu};

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
    expect_parameters(OP, x, [Some(weight), Some(bias)])?;
    on_gpu!(x, norm::forward(x, weight, Some(bias), eps, OP));
    by_elem!(x, OP, T => forward::<T>(OP, x, weight, Some(bias), eps))
}

/// The gradient of `x`, plus `residual` where there is one (the gradient that reaches `x` by the way around the layer); adds the
/// gradients of weight and bias to `dweight` and `dbias`, `[h]` each and in the dtype of the statistics.
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
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let _span = moves_of_backward("layer_norm_backward", dy, x, residual);
    const OP: &str = "layer_norm_backward";
    if stats.mean.is_none() {
        return Err(Error::shape(OP, "the statistics hold no mean; they are those of rms_norm"));
    }
    let of = Backward { dy, x, stats, weight, dweight, dbias: Some(dbias), residual };
    of.check(OP)?;
    on_gpu!(x, norm::backward(&of, OP));
    by_elem!(x, OP, T => backward::<T>(OP, &of))
}

/// `y = x / √(mean(x²) + eps) · weight`, with `weight` `[h]`.
///
/// # Errors
/// As [`layer_norm`].
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, NormStats)> {
    let _span = trace::moves("rms_norm", &[x, x]);
    const OP: &str = "rms_norm";
    expect_parameters(OP, x, [Some(weight), None])?;
    on_gpu!(x, norm::forward(x, weight, None, eps, OP));
    by_elem!(x, OP, T => forward::<T>(OP, x, weight, None, eps))
}

/// The gradient of `x`, plus `residual` where there is one; adds the gradient of weight to `dweight`, `[h]` in the dtype of the
/// statistics.
///
/// # Errors
/// As [`layer_norm`].
pub fn rms_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    stats: &NormStats,
    weight: &Tensor,
    dweight: &Tensor,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let _span = moves_of_backward("rms_norm_backward", dy, x, residual);
    const OP: &str = "rms_norm_backward";
    if stats.mean.is_some() {
        return Err(Error::shape(OP, "the statistics hold a mean; they are those of layer_norm"));
    }
    let of = Backward { dy, x, stats, weight, dweight, dbias: None, residual };
    of.check(OP)?;
    on_gpu!(x, norm::backward(&of, OP));
    by_elem!(x, OP, T => backward::<T>(OP, &of))
}

fn moves_of_backward(name: &'static str, dy: &Tensor, x: &Tensor, residual: Option<&Tensor>) -> trace::Span {
    match residual {
        Some(residual) => trace::moves(name, &[dy, x, x, residual]),
        None => trace::moves(name, &[dy, x, x]),
    }
}

/// # Errors
/// If weight and bias are not `[h]`, with the width of `x`.
fn expect_parameters(op: &'static str, x: &Tensor, parameters: [Option<&Tensor>; 2]) -> Result<()> {
    let (_, h) = rows_of(x, op)?;
    for (what, t) in ["weight", "bias"].into_iter().zip(parameters) {
        t.map_or(Ok(()), |t| expect_shape(op, what, t, &[h]))?;
    }
    Ok(())
}

/// A parameter, widened.
fn parameter<E: Elem>(op: &'static str, what: &'static str, t: &Tensor) -> Result<Vec<E::Acc>> {
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
    let weight = parameter::<E>(op, "weight", weight)?;
    let bias = bias.map(|bias| parameter::<E>(op, "bias", bias)).transpose()?;
    let xs = View::<E>::new(x, op, "x")?;
    let xs: &[E] = &xs;
    let mut stats = vec![[E::Acc::ZERO; 2]; rows];
    let (inv_h, eps) = (E::Acc::of(1.0 / h as f64), E::Acc::of(eps));
    let block = parallel::rows_per_block(h);
    let y = output::blocks2(rows * h, block * h, &mut stats, block, |i, y: Unwritten<'_, E>, stats| {
        let mut stats = stats.iter_mut();
        y.parts(h, |at, y| {
            let x = &xs[i * block * h + at..][..h];
            ask_ahead_of(x);
            let (y, row) = forward_line(x, &weight, bias.as_deref(), (inv_h, eps), y);
            if let Some(stats) = stats.next() {
                *stats = row;
            }
            y
        })
    });
    let column = |c: usize| tensor(stats.iter().map(|s| s[c]).collect::<Vec<E::Acc>>(), rows, x);
    let mean = if bias.is_some() { Some(column(0)?) } else { None };
    Ok((tensor(y, x.dims(), x)?, NormStats { mean, rstd: column(1)? }))
}

/// A row, and its mean and 1/√…
fn forward_line<'a, E: Elem>(
    x: &[E],
    weight: &[E::Acc],
    bias: Option<&[E::Acc]>,
    (inv_h, eps): (E::Acc, E::Acc),
    y: Unwritten<'a, E>,
) -> (&'a mut [E], [E::Acc; 2]) {
    vectorize(
        #[inline(always)]
        || {
            let mean = if bias.is_some() { sum(x, |v| v) * inv_h } else { E::Acc::ZERO };
            let var = sum(x, |v| (v - mean) * (v - mean)) * inv_h;
            let rstd = E::Acc::ONE / (var + eps).sqrt();
            let y = match bias {
                Some(bias) => y.each([x], [weight, bias], |[x], [w, b]| (x - mean) * rstd * w + b),
                None => y.each([x], [weight], |[x], [w]| x * rstd * w),
            };
            (y, [mean, rstd])
        },
    )
}

/// What backward reads and adds to.
pub(crate) struct Backward<'a> {
    pub dy: &'a Tensor,
    pub x: &'a Tensor,
    pub stats: &'a NormStats,
    pub weight: &'a Tensor,
    pub dweight: &'a Tensor,
    pub dbias: Option<&'a Tensor>,
    /// Added to the gradient of `x`.
    pub residual: Option<&'a Tensor>,
}

impl Backward<'_> {
    /// # Errors
    /// If shapes do not fit.
    fn check(&self, op: &'static str) -> Result<()> {
        let (rows, h) = rows_of(self.x, op)?;
        expect_parameters(op, self.x, [Some(self.weight), None])?;
        for (what, t) in [("dy", Some(self.dy)), ("residual", self.residual)] {
            t.map_or(Ok(()), |t| expect_shape(op, what, t, self.x.dims()))?;
        }
        for (what, t) in [("rstd", Some(&self.stats.rstd)), ("mean", self.stats.mean.as_ref())] {
            t.map_or(Ok(()), |t| expect_elements(op, what, t, rows))?;
        }
        for grad in [Some(self.dweight), self.dbias].into_iter().flatten() {
            expect_shape(op, "the parameter's gradient", grad, &[h])?;
        }
        Ok(())
    }
}

fn backward<E: Elem>(op: &'static str, of: &Backward) -> Result<Tensor> {
    let &Backward { dy, x, stats, weight, dweight, dbias, residual } = of;
    let (rows, h) = rows_of(x, op)?;
    for grad in [Some(dweight), dbias].into_iter().flatten() {
        expect_dtype(op, grad, E::Acc::DTYPE)?;
    }
    let weight = parameter::<E>(op, "weight", weight)?;
    let rstd = copied::<E::Acc>(&stats.rstd, op, "rstd")?;
    let mean = stats.mean.as_ref().map(|mean| copied::<E::Acc>(mean, op, "mean")).transpose()?;
    let (xs, dys) = (View::<E>::new(x, op, "x")?, View::<E>::new(dy, op, "dy")?);
    let (xs, dys): (&[E], &[E]) = (&xs, &dys);
    let residual = residual.map(|r| View::<E>::new(r, op, "residual")).transpose()?;
    let residual = residual.as_deref();
    // Per block of rows: partial sums of dweight, then of dbias.
    let width = if mean.is_some() { 2 * h } else { h };
    let mut partials = vec![E::Acc::ZERO; rows.div_ceil(ROW_BLOCK) * width];
    let inv_h = E::Acc::of(1.0 / h as f64);
    let dx = output::blocks2(rows * h, ROW_BLOCK * h, &mut partials, width, |i, dx, partial| {
        let (dweight, dbias) = partial.split_at_mut(h);
        dx.parts(h, |at, dx| {
            let at = i * ROW_BLOCK * h + at;
            [Some(xs), Some(dys), residual].into_iter().flatten().for_each(|t| ask_ahead_of(&t[at..at + h]));
            let row = Row {
                x: &xs[at..at + h],
                dy: &dys[at..at + h],
                weight: &weight,
                mean: mean.as_ref().map_or(E::Acc::ZERO, |m| m[at / h]),
                rstd: rstd[at / h],
                inv_h,
            };
            row.backward(dweight, dbias, residual.map(|r| &r[at..at + h]), dx)
        })
    });
    accumulate(&partials, width, 0, h, dweight, op)?;
    if let Some(dbias) = dbias {
        accumulate(&partials, width, h, h, dbias, op)?;
    }
    tensor(dx, x.dims(), x)
}

/// What a row's gradients are made of: with x̂ = (x − mean)·rstd and g = dy·weight,
/// dx = rstd·(g − mean(g) − x̂·mean(g·x̂)), RMSNorm without mean(g).
struct Row<'a, E: Elem> {
    x: &'a [E],
    dy: &'a [E],
    weight: &'a [E::Acc],
    mean: E::Acc,
    rstd: E::Acc,
    inv_h: E::Acc,
}

impl<E: Elem> Row<'_, E> {
    /// Adds to `dweight`, and to `dbias` unless that is empty; writes `dx`, plus `residual`.
    fn backward<'a>(
        &self,
        dweight: &mut [E::Acc],
        dbias: &mut [E::Acc],
        residual: Option<&[E]>,
        dx: Unwritten<'a, E>,
    ) -> &'a mut [E] {
        vectorize(
            #[inline(always)]
            || {
                let &Self { x, dy, weight, mean, rstd, inv_h } = self;
                let [along, across] = self.sums(dweight, dbias).map(|sum| sum * inv_h);
                let across = if dbias.is_empty() { E::Acc::ZERO } else { across };
                let dx_of = |dy: E::Acc, x: E::Acc, w: E::Acc| rstd * (dy * w - across - (x - mean) * rstd * along);
                match residual {
                    Some(r) => dx.each([r, dy, x], [weight], |[r, dy, x], [w]| dx_of(dy, x, w) + r),
                    None => dx.each([dy, x], [weight], |[dy, x], [w]| dx_of(dy, x, w)),
                }
            },
        )
    }

    /// Σ g·x̂ and Σ g, in one reading of the row with what it adds to `dweight` and, unless that is empty, to `dbias`.
    #[inline(always)]
    fn sums(&self, dweight: &mut [E::Acc], dbias: &mut [E::Acc]) -> [E::Acc; 2] {
        let (mut along, mut across) = ([E::Acc::ZERO; LANES], [E::Acc::ZERO; LANES]);
        let mut add = |l: usize, x: E, dy: E, weight: E::Acc, dweight: &mut E::Acc| {
            let dy = dy.load();
            let (normal, g) = ((x.load() - self.mean) * self.rstd, dy * weight);
            *dweight += dy * normal;
            along[l] += g * normal;
            across[l] += g;
        };
        let (x, rest_x) = self.x.as_chunks::<LANES>();
        let (dy, rest_dy) = self.dy.as_chunks::<LANES>();
        let (weight, rest_weight) = self.weight.as_chunks::<LANES>();
        let (dweight, rest_dweight) = dweight.as_chunks_mut::<LANES>();
        for (((x, dy), weight), dweight) in x.iter().zip(dy).zip(weight).zip(dweight) {
            for l in 0..LANES {
                add(l, x[l], dy[l], weight[l], &mut dweight[l]);
            }
        }
        let rest = rest_x.iter().zip(rest_dy).zip(rest_weight).zip(rest_dweight).enumerate();
        for (l, (((&x, &dy), &weight), dweight)) in rest {
            add(l, x, dy, weight, dweight);
        }
        for (dbias, dy) in dbias.iter_mut().zip(self.dy) {
            *dbias += dy.load();
        }
        [tree(along), tree(across)]
    }
}
