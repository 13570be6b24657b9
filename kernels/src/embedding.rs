//! Lookup of rows of a vocabulary-parallel embedding.

use candle_core::{DType, Tensor};

use crate::float::{Float, by_float};
use crate::host::with_slice_mut;
use crate::view::{View, expect_dtype, expect_shape, tensor};
use crate::{Error, Result, par};

fn table_dims(weight: &Tensor, op: &'static str) -> Result<(usize, usize)> {
    match weight.dims() {
        &[rows, h] if h > 0 => Ok((rows, h)),
        dims => Err(Error::shape(op, format!("weight has shape {dims:?} where [rows, h] is needed"))),
    }
}

/// The local row of an id, if `first_row .. first_row + rows` holds it.
#[inline(always)]
fn local(id: u32, first_row: usize, rows: usize) -> Option<usize> {
    (id as usize).checked_sub(first_row).filter(|&row| row < rows)
}

/// `y [.., h]`: rows of `weight [rows, h]` for `ids [..]` (u32, global); ids outside `first_row .. first_row + rows`
/// give zeros.
///
/// # Errors
/// If shapes or dtypes do not fit or an operand is not contiguous.
pub fn embedding(ids: &Tensor, weight: &Tensor, first_row: usize) -> Result<Tensor> {
    const OP: &str = "embedding";
    let (rows, h) = table_dims(weight, OP)?;
    expect_dtype(OP, ids, DType::U32)?;
    by_float!(weight, OP, T => {
        let (ids_view, w) = (View::<u32>::new(ids, OP, "ids")?, View::<T>::new(weight, OP, "weight")?);
        let (all_ids, w): (&[u32], &[T]) = (&ids_view, &w);
        let mut y = vec![T::ZERO; all_ids.len() * h];
        par::blocks(&mut y, par::rows_per_block(h) * h, |start, y| {
            for (y, &id) in y.chunks_exact_mut(h).zip(&all_ids[start / h..]) {
                if let Some(row) = local(id, first_row, rows) {
                    y.copy_from_slice(&w[row * h..(row + 1) * h]);
                }
            }
        });
        let mut dims = ids.dims().to_vec();
        dims.push(h);
        tensor(y, dims, weight)
    })
}

/// Adds the gradient of the weight: row `ids[i]` of `dweight [rows, h]` += `dy[i]`, in the order of i.
///
/// # Errors
/// As [`embedding`].
pub fn embedding_backward(dy: &Tensor, ids: &Tensor, first_row: usize, dweight: &Tensor) -> Result<()> {
    const OP: &str = "embedding_backward";
    let (rows, h) = table_dims(dweight, OP)?;
    expect_dtype(OP, ids, DType::U32)?;
    expect_dtype(OP, dweight, dy.dtype())?;
    let mut dims = ids.dims().to_vec();
    dims.push(h);
    expect_shape(OP, "dy", dy, &dims)?;
    by_float!(dy, OP, T => {
        let (ids, dys) = (View::<u32>::new(ids, OP, "ids")?, View::<T>::new(dy, OP, "dy")?);
        let (ids, dys): (&[u32], &[T]) = (&ids, &dys);
        with_slice_mut::<T, _>(dweight, OP, |dw| {
            // Each task owns a range of rows and walks all tokens in order: no sum depends on the cut.
            let per_task = rows.div_ceil(if ids.len() * h < par::GRAIN { 1 } else { par::threads() });
            par::blocks(dw, per_task * h, |start, dw| {
                let first_row = first_row + start / h;
                let rows = dw.len() / h;
                for (dy, &id) in dys.chunks_exact(h).zip(ids) {
                    if let Some(row) = local(id, first_row, rows) {
                        add(&mut dw[row * h..(row + 1) * h], dy);
                    }
                }
            });
            Ok(())
        })
    })
}

fn add<T: Float>(acc: &mut [T], x: &[T]) {
    for (a, &v) in acc.iter_mut().zip(x) {
        *a += v;
    }
}
