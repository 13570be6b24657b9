//! The layout-independent description of a parameter.

use serde::{Deserialize, Serialize};

use super::Piece;

/// How a parameter is split over tp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Partition {
    /// Every tp rank holds all of it.
    Replicated,
    /// Dimension `dim` consists of `parts` equal sections. Each section is split evenly over tp:
    /// rank r holds the r-th slice of every section, one after the other. `parts` is 1 for plain
    /// splits and 2 for fused gate|up projections.
    Split {
        /// Index of the dimension in the global shape, from 0.
        dim: usize,
        /// Number of sections that are split separately.
        parts: usize,
    },
}

/// How a parameter's initial value is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Init {
    /// All 0: biases.
    Zeros,
    /// All 1: weights of norms.
    Ones,
    /// All `value`.
    Constant {
        /// The value of every element.
        value: f64,
    },
    /// Uniform in `low..high`. Like `Normal`, element i of the global tensor depends on (seed,
    /// name, i) alone.
    Uniform {
        /// Inclusive.
        low: f64,
        /// Exclusive.
        high: f64,
    },
    /// Normal with mean 0; element i of the global tensor depends on (seed, name, i) alone.
    Normal {
        /// Standard deviation.
        std: f64,
    },
}

/// A parameter of the logical model. Shapes are global and unpadded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ParamSpec {
    /// Unique name, e.g. `decoder.layers.3.self_attention.linear_qkv.weight`.
    pub name: String,
    /// Global shape, without padding.
    pub shape: Vec<usize>,
    /// How tp splits it.
    pub partition: Partition,
    /// Size of dimension 0 after padding with zero rows (vocabulary). Equals `shape[0]` without
    /// padding.
    pub padded_dim0: usize,
    /// Distribution of its value at step 0.
    pub init: Init,
    /// Whether weight decay applies.
    pub weight_decay: bool,
    /// Parameters with the same group are one weight that is used in several places (tied
    /// embeddings).
    pub tie_group: Option<String>,
    /// The gradient on each tp rank is only a part of the sum over tp (norms and row-parallel
    /// biases under sequence parallelism).
    pub grad_partial_over_tp: bool,
}

impl ParamSpec {
    /// Shape of the share of one of `tp` ranks, padding included.
    pub fn local_shape(&self, tp: usize) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(rows) = shape.first_mut() {
            *rows = self.padded_dim0;
        }
        if let Partition::Split { dim, .. } = self.partition {
            shape[dim] /= tp;
        }
        shape
    }

    /// Where the share of rank `rank` of `tp` lies in the global tensor. Padding rows belong to no
    /// piece.
    pub fn pieces(&self, rank: usize, tp: usize) -> Vec<Piece> {
        let whole = |offset: Vec<usize>, shape: Vec<usize>, local: usize| {
            let len = shape.iter().product::<usize>();
            Piece { offset, shape, flat: 0..len, local }
        };
        let Partition::Split { dim, parts } = self.partition else {
            return vec![whole(vec![0; self.shape.len()], self.shape.clone(), 0)];
        };
        let padded = if dim == 0 { self.padded_dim0 } else { self.shape[dim] };
        let per_rank = self.local_shape(tp)[dim]; // extent of the share along `dim`
        let per_part = per_rank / parts; // extent of the share's slice of one section
        let inner = self.shape[dim + 1..].iter().product::<usize>();
        // With several sections, the share's slices interleave in local memory, once per index of
        // the dimensions before `dim`. With one section, one box covers all those indices.
        let outer = self.shape[..dim].iter().product::<usize>();
        let num_boxes = if parts == 1 { 1 } else { outer };
        let mut pieces = Vec::new();
        for index in 0..num_boxes {
            for part in 0..parts {
                let start = part * (padded / parts) + rank * per_part;
                let end = (start + per_part).min(self.shape[dim]);
                if start >= end {
                    continue;
                }
                let mut offset = vec![0; self.shape.len()];
                let mut shape = self.shape.clone();
                if parts > 1 {
                    let mut rest = index;
                    for d in (0..dim).rev() {
                        offset[d] = rest % self.shape[d];
                        rest /= self.shape[d];
                        shape[d] = 1;
                    }
                }
                offset[dim] = start;
                shape[dim] = end - start;
                pieces.push(whole(offset, shape, (index * per_rank + part * per_part) * inner));
            }
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(shape: &[usize], partition: Partition, padded_dim0: usize) -> ParamSpec {
        ParamSpec {
            name: "w".into(),
            shape: shape.to_vec(),
            partition,
            padded_dim0,
            init: Init::Zeros,
            weight_decay: true,
            tie_group: None,
            grad_partial_over_tp: false,
        }
    }

    /// One rank's share, element by element: the global index of each local element, or `None` for
    /// padding.
    fn share(spec: &ParamSpec, rank: usize, tp: usize) -> Vec<Option<usize>> {
        let mut local = vec![None; spec.local_shape(tp).iter().product()];
        for piece in spec.pieces(rank, tp) {
            for (flat, at) in piece.flat.clone().zip(piece.local_range()) {
                let mut rest = flat;
                let mut global = 0;
                let mut stride = 1;
                for d in (0..spec.shape.len()).rev() {
                    global += (piece.offset[d] + rest % piece.shape[d]) * stride;
                    rest /= piece.shape[d];
                    stride *= spec.shape[d];
                }
                assert_eq!(local[at].replace(global), None, "local element {at} described twice");
            }
        }
        local
    }

    fn some(indices: &[usize]) -> Vec<Option<usize>> {
        indices.iter().map(|&i| Some(i)).collect()
    }

    #[test]
    fn a_replicated_parameter_is_whole_everywhere() {
        let spec = spec(&[2, 3], Partition::Replicated, 2);
        assert_eq!(share(&spec, 1, 2), some(&[0, 1, 2, 3, 4, 5]));
    }

    #[test]
    fn a_row_split_gives_consecutive_rows() {
        let spec = spec(&[4, 2], Partition::Split { dim: 0, parts: 1 }, 4);
        assert_eq!(share(&spec, 1, 2), some(&[4, 5, 6, 7]));
    }

    #[test]
    fn a_column_split_gives_columns_row_by_row() {
        let spec = spec(&[2, 4], Partition::Split { dim: 1, parts: 1 }, 2);
        assert_eq!(share(&spec, 1, 2), some(&[2, 3, 6, 7]));
    }

    #[test]
    fn a_fused_projection_gives_a_slice_of_each_section() {
        // gate rows 0..4, up rows 4..8
        let spec = spec(&[8, 1], Partition::Split { dim: 0, parts: 2 }, 8);
        assert_eq!(share(&spec, 0, 2), some(&[0, 1, 4, 5]));
        assert_eq!(share(&spec, 1, 2), some(&[2, 3, 6, 7]));
    }

    #[test]
    fn sections_along_a_later_dimension_interleave_row_by_row() {
        let spec = spec(&[2, 8], Partition::Split { dim: 1, parts: 2 }, 2);
        assert_eq!(share(&spec, 1, 2), some(&[2, 3, 6, 7, 10, 11, 14, 15]));
    }

    #[test]
    fn padding_rows_belong_to_no_piece() {
        let spec = spec(&[5, 1], Partition::Split { dim: 0, parts: 1 }, 8);
        assert_eq!(share(&spec, 0, 2), some(&[0, 1, 2, 3]));
        assert_eq!(share(&spec, 1, 2), [Some(4), None, None, None]);
        assert_eq!(share(&spec, 3, 4), [None, None]);
    }

    #[test]
    fn padding_rows_of_a_column_split_belong_to_no_piece() {
        let spec = spec(&[3, 4], Partition::Split { dim: 1, parts: 1 }, 4);
        let mut expected = some(&[2, 3, 6, 7, 10, 11]);
        expected.extend([None, None]);
        assert_eq!(share(&spec, 1, 2), expected);
    }

    #[test]
    fn the_shares_of_all_ranks_hold_every_element_once() {
        for (shape, dim, parts, padded) in
            [(&[12, 3], 0, 1, 12), (&[12, 3], 0, 3, 12), (&[3, 8], 1, 2, 3), (&[5, 2], 0, 1, 8)]
        {
            let spec = spec(shape, Partition::Split { dim, parts }, padded);
            for tp in [1, 2, 4] {
                let mut all: Vec<_> =
                    (0..tp).flat_map(|rank| share(&spec, rank, tp)).flatten().collect();
                all.sort_unstable();
                assert_eq!(
                    all,
                    (0..shape[0] * shape[1]).collect::<Vec<_>>(),
                    "{shape:?} over {tp}"
                );
            }
        }
    }
}
