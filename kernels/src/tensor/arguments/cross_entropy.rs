//! Which part of a vocabulary a rank has, and what its rows are compared with.

use candle_core::Tensor;

/// This rank's columns.
#[derive(Clone, Copy)]
pub struct Columns {
    pub first: usize,
    /// Those that are no padding.
    pub valid: usize,
}

/// Statistics of all ranks, targets, and the rows' scales.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub max: &'a Tensor,
    pub sum_exp: &'a Tensor,
    pub targets: &'a Tensor,
    /// dL/d(token loss)
    pub row_scale: &'a Tensor,
}
