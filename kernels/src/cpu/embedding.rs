//! Rows of an embedding, and their gradient.

use candle_core::{Tensor, WithDType};

use crate::Result;
use crate::tensor::element::{Elem, Float};
use crate::tensor::host::with_slice_mut;
use crate::tensor::output;
use crate::tensor::parallel::{self, Shared};
use crate::tensor::simd::vectorize;
use crate::tensor::view::{View, expect_dtype, tensor};

/// Smallest number of columns that one task of the backward pass owns: four cache lines of f32.
const COLUMNS: usize = 64;

/// The local row of an id, if `first_row .. first_row + rows` holds it.
#[inline(always)]
fn local(id: u32, first_row: usize, rows: usize) -> Option<usize> {
    (id as usize).checked_sub(first_row).filter(|&row| row < rows)
}

pub fn forward<E: Elem>(
    ids: &Tensor,
    weight: &Tensor,
    first_row: usize,
    op: &'static str,
) -> Result<Tensor> {
    let (rows, h) = weight.dims2()?;

    let (ids_view, w) = (View::<u32>::new(ids, op, "ids")?, View::<E>::new(weight, op, "weight")?);
    let (all_ids, w): (&[u32], &[E]) = (&ids_view, &w);
    let zero = E::store(E::Acc::ZERO);
    let y = output::blocks(all_ids.len() * h, parallel::rows_per_block(h) * h, |start, y| {
        y.parts(h, |at, y| match local(all_ids[(start + at) / h], first_row, rows) {
            Some(row) => y.copy(&w[row * h..(row + 1) * h]),
            None => y.write(std::iter::repeat(zero)),
        })
    });
    let mut dims = ids.dims().to_vec();
    dims.push(h);
    tensor(y, dims, weight)
}

pub fn backward<E: Elem>(
    dy: &Tensor,
    ids: &Tensor,
    first_row: usize,
    dweight: &Tensor,
    op: &'static str,
) -> Result<()> {
    let (rows, h) = dweight.dims2()?;

    expect_dtype(op, dweight, E::Acc::DTYPE)?;
    let (ids, dys) = (View::<u32>::new(ids, op, "ids")?, View::<E>::new(dy, op, "dy")?);
    let (ids, dys): (&[u32], &[E]) = (&ids, &dys);
    with_slice_mut::<E::Acc, _>(dweight, op, |dw| {
        // Each task owns a range of columns and goes through all tokens in order. So no sum depends
        // on the partition, and frequent tokens burden all tasks alike.
        let tasks = if ids.len() * h < parallel::GRAIN { 1 } else { parallel::threads() };
        let columns = h.div_ceil(tasks).next_multiple_of(COLUMNS);
        let dw = Shared(dw.as_mut_ptr());
        parallel::for_each(h.div_ceil(columns), |task| {
            let own = task * columns..((task + 1) * columns).min(h);
            vectorize(
                #[inline(always)]
                || {
                    for (dy, &id) in dys.chunks_exact(h).zip(ids) {
                        if let Some(row) = local(id, first_row, rows) {
                            // SAFETY: row < rows and own.end ≤ h, so the range lies in dweight
                            // [rows, h]; tasks own disjoint columns, so no two write one element.
                            let dw = unsafe {
                                std::slice::from_raw_parts_mut(
                                    dw.at(row * h + own.start),
                                    own.len(),
                                )
                            };
                            for (dw, dy) in dw.iter_mut().zip(&dy[own.clone()]) {
                                *dw += dy.load();
                            }
                        }
                    }
                },
            );
        });
        Ok(())
    })
}
