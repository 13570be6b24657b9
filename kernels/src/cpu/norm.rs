//! LayerNorm and RMSNorm, row by row.

use candle_core::{Tensor, WithDType};

use super::columns::{ROW_BLOCK, accumulate};
use crate::Result;
use crate::cpu::lanes::{sum, tree};
use crate::tensor::arguments::norm::{Backward, NormStats};
use crate::tensor::element::{Elem, Float};
use crate::tensor::output::{self, Uninit};
use crate::tensor::parallel;
use crate::tensor::simd::{LANES, prefetch_ahead, vectorize};
use crate::tensor::view::{View, copied, expect_dtype, rows_of, tensor};

/// A parameter, widened.
fn parameter<E: Elem>(op: &'static str, what: &'static str, t: &Tensor) -> Result<Vec<E::Acc>> {
    Ok(View::<E>::new(t, op, what)?.iter().map(|v| v.load()).collect())
}

/// LayerNorm if there is a bias, else RMSNorm.
pub fn forward<E: Elem>(
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
    let y =
        output::blocks2(rows * h, block * h, &mut stats, block, |i, y: Uninit<'_, E>, stats| {
            let mut stats = stats.iter_mut();
            y.parts(h, |at, y| {
                let x = &xs[i * block * h + at..][..h];
                prefetch_ahead(x);
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

/// Writes a row; returns its mean and 1/√….
fn forward_line<'a, E: Elem>(
    x: &[E],
    weight: &[E::Acc],
    bias: Option<&[E::Acc]>,
    (inv_h, eps): (E::Acc, E::Acc),
    y: Uninit<'a, E>,
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

pub fn backward<E: Elem>(op: &'static str, of: &Backward) -> Result<Tensor> {
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
    // For each block of rows: partial sums of dweight, then of dbias.
    let width = if mean.is_some() { 2 * h } else { h };
    let mut partials = vec![E::Acc::ZERO; rows.div_ceil(ROW_BLOCK) * width];
    let inv_h = E::Acc::of(1.0 / h as f64);
    let dx = output::blocks2(rows * h, ROW_BLOCK * h, &mut partials, width, |i, dx, partial| {
        let (dweight, dbias) = partial.split_at_mut(h);
        dx.parts(h, |at, dx| {
            let at = i * ROW_BLOCK * h + at;
            [Some(xs), Some(dys), residual]
                .into_iter()
                .flatten()
                .for_each(|t| prefetch_ahead(&t[at..at + h]));
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

/// Inputs of a row's gradients. With x̂ = (x − mean)·rstd and g = dy·weight, dx = rstd·(g − mean(g)
/// − x̂·mean(g·x̂)); RMSNorm has no mean(g).
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
        dx: Uninit<'a, E>,
    ) -> &'a mut [E] {
        vectorize(
            #[inline(always)]
            || {
                let &Self { x, dy, weight, mean, rstd, inv_h } = self;
                let [along, across] = self.sums(dweight, dbias).map(|sum| sum * inv_h);
                let across = if dbias.is_empty() { E::Acc::ZERO } else { across };
                let dx_of = |dy: E::Acc, x: E::Acc, w: E::Acc| {
                    rstd * (dy * w - across - (x - mean) * rstd * along)
                };
                match residual {
                    Some(r) => dx.each([r, dy, x], [weight], |[r, dy, x], [w]| dx_of(dy, x, w) + r),
                    None => dx.each([dy, x], [weight], |[dy, x], [w]| dx_of(dy, x, w)),
                }
            },
        )
    }

    /// Σ g·x̂ and Σ g. The same pass over the row adds to `dweight` and, unless that is empty, to
    /// `dbias`.
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
