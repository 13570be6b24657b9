//! Lookup of rows in a vocabulary-parallel embedding.

use candle_core::{DType, Tensor};

use crate::tensor::element::by_elem;
use crate::tensor::trace;
use crate::tensor::view::{expect_apart, expect_dtype, expect_shape};
use crate::{Error, Result, cpu, on_gpu};

fn table_dims(weight: &Tensor, op: &'static str) -> Result<(usize, usize)> {
    match weight.dims() {
        &[rows, h] if h > 0 => Ok((rows, h)),
        dims => {
            Err(Error::shape(op, format!("weight has shape {dims:?} where [rows, h] is needed")))
        }
    }
}

/// `y [.., h]`: rows of `weight [rows, h]` for `ids [..]` (u32, global); ids outside `first_row ..
/// first_row + rows` give zeros.
///
/// # Errors
/// If shapes or dtypes do not fit or an operand is not contiguous.
pub fn embedding(ids: &Tensor, weight: &Tensor, first_row: usize) -> Result<Tensor> {
    let _span = trace::span("embedding", trace::Kind::Kernel);
    const OP: &str = "embedding";
    table_dims(weight, OP)?;
    expect_dtype(OP, ids, DType::U32)?;
    on_gpu!(weight, embedding::forward(ids, weight, first_row, OP));
    by_elem!(weight, OP, E => cpu::embedding::forward::<E>(ids, weight, first_row, OP))
}

/// Bytes that the gradient moves if no row is looked up twice: it reads `dy`, and reads and writes
/// as many elements of `dweight`.
fn bytes_of_backward(dy: &Tensor, dweight: &Tensor) -> usize {
    dy.elem_count() * (dy.dtype().size_in_bytes() + 2 * dweight.dtype().size_in_bytes())
}

/// Adds the gradient of the weight: row `ids[i]` of `dweight [rows, h]` += `dy[i]`, in the order of
/// i. `dweight` is f32 (f64 for f64 `dy`).
///
/// # Errors
/// As [`embedding`].
pub fn embedding_backward(
    dy: &Tensor,
    ids: &Tensor,
    first_row: usize,
    dweight: &Tensor,
) -> Result<()> {
    let _span = trace::kernel("embedding_backward", 0, bytes_of_backward(dy, dweight));
    const OP: &str = "embedding_backward";
    let (_, h) = table_dims(dweight, OP)?;
    expect_dtype(OP, ids, DType::U32)?;
    let mut dims = ids.dims().to_vec();
    dims.push(h);
    expect_shape(OP, "dy", dy, &dims)?;
    on_gpu!(dy, embedding::backward(dy, ids, first_row, dweight, OP));
    expect_apart(OP, "dweight", dweight, &[dy, ids])?;
    by_elem!(dy, OP, E => cpu::embedding::backward::<E>(dy, ids, first_row, dweight, OP))
}
