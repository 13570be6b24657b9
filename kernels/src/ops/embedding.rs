//! Lookup of rows of a vocabulary-parallel embedding.

use candle_core::{DType, Tensor, WithDType};

use crate::tensor::element::{Elem, Float, by_elem};
use crate::tensor::host::with_slice_mut;
use crate::tensor::parallel::Shared;
use crate::tensor::simd::vectorize;
use crate::tensor::view::{View, expect_apart, expect_dtype, expect_shape, tensor};
use crate::tensor::{output, parallel, trace};
use crate::{Error, Result, on_gpu};

/// Columns that one task of the backward pass owns, at least: four cache lines of f32.
const COLUMNS: usize = 64;

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
    let _span = trace::span("embedding", trace::Kind::Kernel);
    const OP: &str = "embedding";
    let (rows, h) = table_dims(weight, OP)?;
    expect_dtype(OP, ids, DType::U32)?;
    on_gpu!(weight, embedding::forward(ids, weight, first_row, OP));
    by_elem!(weight, OP, E => {
        let (ids_view, w) = (View::<u32>::new(ids, OP, "ids")?, View::<E>::new(weight, OP, "weight")?);
        let (all_ids, w): (&[u32], &[E]) = (&ids_view, &w);
        let zero = E::store(<E as Elem>::Acc::ZERO);
        let y = output::blocks(all_ids.len() * h, parallel::rows_per_block(h) * h, |start, y| {
            y.parts(h, |at, y| match local(all_ids[(start + at) / h], first_row, rows) {
                Some(row) => y.copy(&w[row * h..(row + 1) * h]),
                None => y.write(std::iter::repeat(zero)),
            })
        });
        let mut dims = ids.dims().to_vec();
        dims.push(h);
        tensor(y, dims, weight)
    })
}

/// Bytes that the gradient moves if no row is looked up twice: `dy`, and as many elements of `dweight` read and written.
fn bytes_of_backward(dy: &Tensor, dweight: &Tensor) -> usize {
    dy.elem_count() * (dy.dtype().size_in_bytes() + 2 * dweight.dtype().size_in_bytes())
}

/// Adds the gradient of the weight: row `ids[i]` of `dweight [rows, h]` += `dy[i]`, in the order of i. `dweight` is f32 (f64 for
/// f64 `dy`).
///
/// # Errors
/// As [`embedding`].
pub fn embedding_backward(dy: &Tensor, ids: &Tensor, first_row: usize, dweight: &Tensor) -> Result<()> {
    let _span = trace::kernel("embedding_backward", 0, bytes_of_backward(dy, dweight));
    const OP: &str = "embedding_backward";
    let (rows, h) = table_dims(dweight, OP)?;
    expect_dtype(OP, ids, DType::U32)?;
    let mut dims = ids.dims().to_vec();
    dims.push(h);
    expect_shape(OP, "dy", dy, &dims)?;
    on_gpu!(dy, embedding::backward(dy, ids, first_row, dweight, OP));
    expect_apart(OP, "dweight", dweight, &[dy, ids])?;
    by_elem!(dy, OP, E => {
        type Acc = <E as Elem>::Acc;
        expect_dtype(OP, dweight, Acc::DTYPE)?;
        let (ids, dys) = (View::<u32>::new(ids, OP, "ids")?, View::<E>::new(dy, OP, "dy")?);
        let (ids, dys): (&[u32], &[E]) = (&ids, &dys);
        with_slice_mut::<Acc, _>(dweight, OP, |dw| {
            // Each task owns a range of columns and walks all tokens in order: no sum depends on the cut, and tokens that
            // are frequent burden all tasks alike.
            let tasks = if ids.len() * h < parallel::GRAIN { 1 } else { parallel::threads() };
            let columns = h.div_ceil(tasks).next_multiple_of(COLUMNS);
            let dw = Shared(dw.as_mut_ptr());
            parallel::for_each(h.div_ceil(columns), |task| {
                let own = task * columns..((task + 1) * columns).min(h);
                vectorize(#[inline(always)] || for (dy, &id) in dys.chunks_exact(h).zip(ids) {
                    if let Some(row) = local(id, first_row, rows) {
                        // SAFETY: row < rows and own.end ≤ h, so the range lies in dweight [rows, h]; tasks own other
                        // columns, so no two write one element.
                        let dw = unsafe { std::slice::from_raw_parts_mut(dw.at(row * h + own.start), own.len()) };
                        for (dw, dy) in dw.iter_mut().zip(&dy[own.clone()]) {
                            *dw += dy.load();
                        }
                    }
                });
            });
            Ok(())
        })
    })
}
