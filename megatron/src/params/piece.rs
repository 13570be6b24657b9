//! Where one rank's elements lie in a logical tensor: the common language of checkpoints,
//! resharding and ZeRO.

use std::fmt;
use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use kernels::ops::remainders::join_value;
use serde::{Deserialize, Serialize};

use super::{FileBacked, LocalPart, Partition};
use crate::Result;

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

impl Piece {
    /// The local elements this piece describes.
    pub fn local_range(&self) -> Range<usize> {
        self.local..self.local + self.flat.len()
    }
}

/// The parts of `pieces` that lie in `local`, a range of the local elements, with `Piece::local`
/// counted from the start of that range.
///
/// This is how ZeRO's shards of a flat buffer become shards of logical tensors: shift a parameter's
/// pieces to where the parameter lies in the buffer, then clip them to the range that the dp rank
/// owns.
pub fn clip_pieces(pieces: &[Piece], local: Range<usize>) -> Vec<Piece> {
    let clip = |piece: &Piece| {
        let held = piece.local_range();
        let start = held.start.max(local.start);
        let end = held.end.min(local.end);
        (start < end).then(|| {
            let first = piece.flat.start + (start - held.start);
            Piece {
                flat: first..first + (end - start),
                local: start - local.start,
                ..piece.clone()
            }
        })
    };
    pieces.iter().filter_map(clip).collect()
}

/// Selects one tensor of a parameter's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateKind {
    /// The parameter: its fp32 master, where the model's dtype is 16-bit.
    Param,
    /// Adam's first moment.
    ExpAvg,
    /// Adam's second moment.
    ExpAvgSq,
    /// SGD's momentum.
    Momentum,
}

impl fmt::Display for StateKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Param => "param",
            Self::ExpAvg => "exp_avg",
            Self::ExpAvgSq => "exp_avg_sq",
            Self::Momentum => "momentum",
        })
    }
}

/// One rank's share of one logical tensor, as written to or filled from a checkpoint.
#[derive(Clone, Debug)]
pub struct ShardRef {
    /// Name of the parameter.
    pub name: String,
    /// The parameter itself, or one tensor of its optimizer state.
    pub kind: StateKind,
    /// Shape of the logical tensor, without padding.
    pub global_shape: Vec<usize>,
    /// How the parameter is split over tp, if that is known.
    pub partition: Option<Partition>,
    /// Where this share's elements lie in the logical tensor.
    pub pieces: Vec<Piece>,
    /// The local elements; `Piece::local` counts in them.
    pub data: Elements,
}

/// Elements on this rank: one-dimensional contiguous tensors (usually views of flat buffers), or
/// elements in a file.
#[derive(Clone, Debug)]
pub enum Elements {
    /// In memory, of any float dtype.
    Tensor(Tensor),
    /// fp32 values, split as by [`kernels::ops::remainders`]. Without `low` there is nothing to
    /// save. Loading then rounds the values to bf16 exactly as `high` is rounded, so that ranks
    /// with copies of each other's weights agree.
    Halves {
        /// bf16: the values, rounded.
        high: LocalPart,
        /// i16: the low halves of the fp32 values.
        low: Option<LocalPart>,
    },
    /// In a file, which is read and written in parts.
    FileBacked(FileBacked),
}

impl Elements {
    /// The values on the host, as f32. Halves without `low` give the values of `high`.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.to_dtype(DType::F32)?.to_vec1()?),
            Self::Halves { high, low: None } => {
                Ok(high.all_on_host()?.to_dtype(DType::F32)?.to_vec1()?)
            }
            Self::Halves { high, low: Some(low) } => {
                let (high, low) = (high.all_on_host()?, low.all_on_host()?);
                let halves = high.to_vec1()?.into_iter().zip(low.to_vec1()?);
                Ok(halves.map(|(high, low)| join_value(high, low)).collect())
            }
            Self::FileBacked(file_backed) => {
                let values = Tensor::zeros(file_backed.len(), file_backed.dtype(), &Device::Cpu)?;
                file_backed.read(&values)?;
                Ok(values.to_dtype(DType::F32)?.to_vec1()?)
            }
        }
    }
}

impl From<Tensor> for Elements {
    fn from(tensor: Tensor) -> Self {
        Self::Tensor(tensor)
    }
}

impl From<FileBacked> for Elements {
    fn from(file_backed: FileBacked) -> Self {
        Self::FileBacked(file_backed)
    }
}

/// The elements that one rank writes of a parameter, and of each tensor of its optimizer state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamShare {
    /// Name of the parameter.
    pub name: String,
    /// Shape of the logical tensor, without padding.
    pub global_shape: Vec<usize>,
    /// Where the elements lie in the logical tensor, in the order in which they are written.
    /// `Piece::local` counts within this share.
    pub pieces: Vec<Piece>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(flat: Range<usize>, local: usize) -> Piece {
        Piece { offset: vec![2, 0], shape: vec![3, 4], flat, local }
    }

    #[test]
    fn clipping_keeps_the_elements_inside_and_counts_from_the_start_of_the_range() {
        let pieces = [piece(0..5, 10), piece(7..12, 15)];
        assert_eq!(clip_pieces(&pieces, 12..17), [piece(2..5, 0), piece(7..9, 3)]);
    }

    #[test]
    fn clipping_drops_pieces_that_do_not_touch_the_range() {
        let pieces = [piece(0..5, 10), piece(7..12, 15)];
        assert!(clip_pieces(&pieces, 0..10).is_empty());
        assert!(clip_pieces(&pieces, 20..30).is_empty());
    }

    #[test]
    fn clips_of_consecutive_ranges_hold_every_element_once() {
        let pieces = [piece(0..5, 10), piece(7..12, 15)];
        let mut seen = Vec::new();
        for start in (0..24).step_by(3) {
            for clip in clip_pieces(&pieces, start..start + 3) {
                seen.extend(clip.flat.clone().zip(clip.local_range().map(|l| l + start)));
            }
        }
        let expected: Vec<_> = (0..5).zip(10..15).chain((7..12).zip(15..20)).collect();
        assert_eq!(seen, expected);
    }
}
