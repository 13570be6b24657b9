//! Dropout, bias and residual in one pass.

use candle_core::Tensor;

use crate::Result;
use crate::tensor::arguments::dropout::Mask;
use crate::tensor::element::{Elem, Float};
use crate::tensor::output::{self, Uninit};
use crate::tensor::parallel;
use crate::tensor::simd::vectorize;
use crate::tensor::view::{View, rows_of, tensor};

pub fn apply<E: Elem>(
    op: &'static str,
    x: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    mask: Option<&Mask>,
) -> Result<Tensor> {
    let (_, h) = rows_of(x, op)?;
    let scale = E::Acc::of(mask.map_or(1.0, |m| m.scale));
    let mask = mask.filter(|m| m.threshold > 0);
    let bias: Option<Vec<E::Acc>> = match bias {
        Some(bias) => Some(View::<E>::new(bias, op, "bias")?.iter().map(|b| b.load()).collect()),
        None => None,
    };
    let residual = residual.map(|r| View::<E>::new(r, op, "residual")).transpose()?;
    let residual = residual.as_deref();
    let xs = View::<E>::new(x, op, "x")?;
    let xs: &[E] = &xs;
    let y = output::blocks(xs.len(), parallel::rows_per_block(h) * h, |start, y| {
        let masked = if mask.is_some() { h } else { 0 };
        let (mut random, mut factors) = (vec![0; masked], vec![E::Acc::ZERO; masked]);
        y.parts(h, |at, y| {
            let at = start + at;
            let (x, residual) = (&xs[at..at + h], residual.map(|r| &r[at..at + h]));
            let mask = mask.map(|mask| (mask, at / h, scale));
            add_line(x, bias.as_deref(), residual, mask, (&mut random, &mut factors), y)
        })
    });
    tensor(y, x.dims(), x)
}

/// One row. `mask` has the mask, the row's index and 1/(1−p). The scratch has room for a row of
/// words and a row of factors.
fn add_line<'a, E: Elem>(
    x: &[E],
    bias: Option<&[E::Acc]>,
    residual: Option<&[E]>,
    mask: Option<(&Mask, usize, E::Acc)>,
    (random, factors): (&mut [u32], &mut [E::Acc]),
    y: Uninit<'a, E>,
) -> &'a mut [E] {
    vectorize(
        #[inline(always)]
        || {
            let Some((mask, row, scale)) = mask else {
                return match (bias, residual) {
                    (Some(b), Some(r)) => y.each([x, r], [b], |[x, r], [b]| x + b + r),
                    (Some(b), None) => y.each([x], [b], |[x], [b]| x + b),
                    (None, Some(r)) => y.each([x, r], [], |[x, r], []| x + r),
                    (None, None) => y.copy(x),
                };
            };
            mask.fill(row, random);
            for (factor, &word) in factors.iter_mut().zip(&*random) {
                *factor = if word < mask.threshold { E::Acc::ZERO } else { scale };
            }
            // A dropped element is 0 even where it was not finite.
            let keep = |v: E::Acc, factor: E::Acc| {
                if factor > E::Acc::ZERO { v * factor } else { E::Acc::ZERO }
            };
            let factors = &*factors;
            match (bias, residual) {
                (Some(b), Some(r)) => {
                    y.each([x, r], [b, factors], |[x, r], [b, f]| keep(x + b, f) + r)
                }
                (Some(b), None) => y.each([x], [b, factors], |[x], [b, f]| keep(x + b, f)),
                (None, Some(r)) => y.each([x, r], [factors], |[x, r], [f]| keep(x, f) + r),
                (None, None) => y.each([x], [factors], |[x], [f]| keep(x, f)),
            }
        },
    )
}
