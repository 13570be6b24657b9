//! Where one rank's elements lie in a logical tensor: the common language of checkpoints, resharding and ZeRO.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

/// A contiguous run of local elements that lies, in row-major order, in a box of a logical tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// First index of the box in each dimension of the global tensor.
    pub offset: Vec<usize>,
    /// Extent of the box in each dimension.
    pub shape: Vec<usize>,
    /// Which of the box's elements, in row-major order, this piece holds.
    pub flat: Range<usize>,
    /// Index of the first of them in the local data.
    pub local: usize,
}

/// Which tensor of a parameter's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateKind {
    /// The parameter in model dtype.
    Param,
    /// Its fp32 master copy, where the model dtype is 16-bit.
    Master,
    /// Adam's first moment.
    ExpAvg,
    /// Adam's second moment.
    ExpAvgSq,
    /// SGD's momentum.
    Momentum,
}

/// One rank's share of one logical tensor, as written to or filled from a checkpoint.
#[derive(Clone, Debug)]
pub struct ShardRef {
    /// Name of the parameter.
    pub name: String,
    pub kind: StateKind,
    /// Shape of the logical tensor, without padding.
    pub global_shape: Vec<usize>,
    /// Where this share's elements lie in it.
    pub pieces: Vec<Piece>,
    /// The local elements: one-dimensional, contiguous, usually a view of a flat buffer; `Piece::local` indexes it.
    pub data: Tensor,
}
