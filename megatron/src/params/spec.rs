//! Everything about a parameter that is true regardless of layout.

use serde::{Deserialize, Serialize};

use super::Piece;

/// How a parameter is cut over tp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Partition {
    /// Every tp rank holds all of it.
    Replicated,
    /// Dimension `dim` consists of `parts` equal sections, each cut evenly over tp: rank r holds the r-th slice of every
    /// section, one after the other. `parts` is 1 for plain splits and 2 for fused gate|up projections.
    Split { dim: usize, parts: usize },
}

/// How a parameter's first value is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Init {
    Zeros,
    Ones,
    /// Normal with mean 0; element i of the global tensor depends on (seed, name, i) alone.
    Normal {
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
    pub partition: Partition,
    /// Size of dimension 0 after padding with zero rows (vocabulary); equals `shape[0]` where nothing is padded.
    pub padded_dim0: usize,
    pub init: Init,
    /// Whether weight decay applies.
    pub weight_decay: bool,
    /// Parameters with the same group are one weight used in several places (tied embeddings).
    pub tie_group: Option<String>,
    /// The gradient on each tp rank is a part of a sum over tp (norms and row-parallel biases under sequence parallelism).
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

    /// Where the share of rank `rank` of `tp` lies in the global tensor. Padding rows belong to no piece.
    pub fn pieces(&self, rank: usize, tp: usize) -> Vec<Piece> {
        let local = self.local_shape(tp);
        let whole = |offset: Vec<usize>, shape: Vec<usize>, start: usize| {
            let len = shape.iter().product::<usize>();
            Piece { offset, shape, flat: 0..len, local: start }
        };
        let Partition::Split { dim, parts } = self.partition else {
            return vec![whole(vec![0; self.shape.len()], self.shape.clone(), 0)];
        };
        let per_part = local[dim] / parts; // this rank's slice of one section
        let row = local[dim + 1..].iter().product::<usize>();
        let mut pieces = Vec::new();
        for part in 0..parts {
            let padded = if dim == 0 { self.padded_dim0 } else { self.shape[dim] };
            let start = part * (padded / parts) + rank * per_part;
            let end = (start + per_part).min(self.shape[dim]);
            if start >= end {
                continue;
            }
            let mut offset = vec![0; self.shape.len()];
            let mut shape = local.clone();
            offset[dim] = start;
            shape[dim] = end - start;
            // For dim > 0 a section is not contiguous in the local tensor; specs with parts > 1 split dimension 0.
            pieces.push(whole(offset, shape, part * per_part * row));
        }
        pieces
    }
}
