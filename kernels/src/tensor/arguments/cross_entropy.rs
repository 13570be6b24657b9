//! A rank's part of a vocabulary, and the operands of its rows.

use candle_core::Tensor;

/// This rank's columns.
#[derive(Clone, Copy)]
pub struct Columns {
    pub first: usize,
    /// Number of columns that are not padding.
    pub valid: usize,
}

/// Statistics of all ranks, targets, and the rows' scales.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub max: &'a Tensor,
    pub sum_exp: &'a Tensor,
    pub targets: &'a Tensor,
    /// dL/d(token loss).
    pub row_scale: &'a Tensor,
}
