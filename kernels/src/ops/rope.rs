//! Rotary position embedding (Su et al. 2021) of packed queries and keys. Rotates halves, as Llama
//! does.

use candle_core::{DType, Tensor};

use crate::tensor::arguments::attention::HeadShape;
use crate::tensor::arguments::rope::{Positions, range_of};
pub use crate::tensor::arguments::rope::{RopeTable, Rotation, rope_frequencies};
use crate::tensor::element::by_elem;
use crate::tensor::trace;
use crate::tensor::view::{expect_dtype, expect_shape};
use crate::{Error, Result, cpu, on_gpu};

/// The operation's name in errors.
const OP: &str = "rope_inplace";

/// Rotates the queries and keys of packed `qkv [s, b, groups·(heads_per_group + 2)·head_dim]` in
/// place; row s has position `position_offset + s`. `inverse` rotates back, which is also the
/// gradient.
///
/// # Errors
/// If shapes or dtypes do not fit, `qkv` is not contiguous, or the table is too short.
pub fn rope_inplace(
    qkv: &Tensor,
    table: &RopeTable,
    shape: HeadShape,
    position_offset: usize,
    inverse: bool,
) -> Result<()> {
    let (_, b) = shape.check(qkv, OP)?;
    rope_at(qkv, table, shape, &vec![position_offset; b], inverse)
}

/// As [`rope_inplace`], but the rows of sample i begin at position `offsets[i]`.
///
/// # Errors
/// As [`rope_inplace`]; also if there is not one offset per sample.
pub fn rope_at(
    qkv: &Tensor,
    table: &RopeTable,
    shape: HeadShape,
    offsets: &[usize],
    inverse: bool,
) -> Result<()> {
    let (_, b) = shape.check(qkv, OP)?;
    if offsets.len() != b {
        return Err(Error::shape(
            OP,
            format!("{} position offsets for {b} samples", offsets.len()),
        ));
    }
    rotate_rows(qkv, table, shape, Positions::Offsets(offsets), inverse)
}

/// As [`rope_inplace`], but `positions`, u32 `[s, b]`, gives the position of every row. The host
/// does not read positions that are on a GPU: there, a position beyond the table counts as the
/// table's last.
///
/// # Errors
/// As [`rope_inplace`]; also if there is not one position per row.
pub fn rope_positions(
    qkv: &Tensor,
    table: &RopeTable,
    shape: HeadShape,
    positions: &Tensor,
    inverse: bool,
) -> Result<()> {
    let (s, b) = shape.check(qkv, OP)?;
    expect_shape(OP, "positions", positions, &[s, b])?;
    expect_dtype(OP, positions, DType::U32)?;
    rotate_rows(qkv, table, shape, Positions::Rows(positions), inverse)
}

impl Rotation<'_> {
    /// Rotates the queries and keys of `qkv` in place; with `inverse`, rotates them back.
    ///
    /// # Errors
    /// As [`rope_inplace`] and [`rope_positions`].
    pub fn turn(&self, qkv: &Tensor, shape: HeadShape, inverse: bool) -> Result<()> {
        match self.positions {
            Some(positions) => rope_positions(qkv, self.table, shape, positions, inverse),
            None => rope_inplace(qkv, self.table, shape, 0, inverse),
        }
    }
}

/// Rotates the rows by the angles of their positions.
fn rotate_rows(
    qkv: &Tensor,
    table: &RopeTable,
    shape: HeadShape,
    positions: Positions,
    inverse: bool,
) -> Result<()> {
    let _span = trace::moves("rope", &[qkv, qkv]);
    let d = shape.head_dim;
    let rows = table.rows(d)?;
    let (s, b, _) = qkv.dims3()?;
    if s * b == 0 {
        return Ok(());
    }
    if let Positions::Offsets(offsets) = positions {
        let ends: Vec<usize> = offsets.iter().flat_map(|first| [*first, first + s - 1]).collect();
        range_of(&ends, rows, OP)?;
    }
    on_gpu!(qkv, rope::rotate(qkv, table, shape, positions, inverse, OP));
    by_elem!(qkv, OP, E => cpu::rope::rotate_rows::<E>(qkv, table, shape, positions, inverse, OP))
}
