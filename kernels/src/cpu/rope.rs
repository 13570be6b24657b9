//! Rotation of queries and keys.

use candle_core::Tensor;

use crate::Result;
use crate::tensor::arguments::attention::HeadShape;
use crate::tensor::arguments::rope::{Positions, RopeTable, range_of};
use crate::tensor::element::{Elem, Float};
use crate::tensor::host::with_slice_mut;
use crate::tensor::parallel;
use crate::tensor::simd::vectorize;
use crate::tensor::view::copied;

/// Rotates the rows by the angles of their positions.
pub fn rotate_rows<E: Elem>(
    qkv: &Tensor,
    table: &RopeTable,
    shape: HeadShape,
    positions: Positions,
    inverse: bool,
    op: &'static str,
) -> Result<()> {
    let d = shape.head_dim;
    let half = d / 2;
    let (s, b, _) = qkv.dims3()?;
    let positions: Vec<usize> = match positions {
        Positions::Offsets(offsets) => (0..s * b).map(|row| row / b + offsets[row % b]).collect(),
        Positions::Rows(rows) => {
            copied::<u32>(rows, op, "positions")?.iter().map(|&p| p as usize).collect()
        }
    };
    let range = range_of(&positions, table.rows(d)?, op)?;

    let cos = copied::<E::Acc>(&table.cos.narrow(0, range.start, range.len())?, op, "table")?;
    let sin = copied::<E::Acc>(&table.sin.narrow(0, range.start, range.len())?, op, "table")?;
    let sign = if inverse { -E::Acc::ONE } else { E::Acc::ONE };
    let width = shape.width();
    let rotated = (shape.heads_per_group + 1) * d;
    with_slice_mut::<E, _>(qkv, op, |qkv| {
        parallel::blocks(qkv, parallel::rows_per_block(width) * width, |start, part| {
            let mut buffer = E::buffer(rotated);
            for (r, row) in part.chunks_exact_mut(width).enumerate() {
                let position = positions[start / width + r] - range.start;
                let at = position * half..(position + 1) * half;
                let (cos, sin) = (&cos[at.clone()], &sin[at]);
                for group in row.chunks_exact_mut((shape.heads_per_group + 2) * d) {
                    E::update(&mut group[..rotated], &mut buffer, |heads| {
                        rotate_heads(heads, cos, sin, sign)
                    });
                }
            }
        });
        Ok(())
    })
}

fn rotate_heads<T: Float>(heads: &mut [T], cos: &[T], sin: &[T], sign: T) {
    vectorize(
        #[inline(always)]
        || heads.chunks_exact_mut(2 * cos.len()).for_each(|head| rotate(head, cos, sin, sign)),
    );
}

#[inline(always)]
fn rotate<T: Float>(head: &mut [T], cos: &[T], sin: &[T], sign: T) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let (x, y, sin) = (*a, *b, sin * sign);
        *a = x * cos - y * sin;
        *b = y * cos + x * sin;
    }
}
