//! Conversions from a file's tensors to a parameter and back. They only move elements, so values
//! and dtypes stay the same.
//!
//! As in Megatron-LM, fused QKV rows are grouped per key/value group: (query heads…, key, value).

use megatron::config::ModelConfig;

/// The conversion of tensors to a parameter. Each has an inverse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transform {
    /// The same elements.
    Copy,
    /// A matrix that is stored as `[in, out]` in the file (Conv1D).
    Transpose,
    /// Gate projection and up projection, concatenated by rows.
    GateUp,
    /// Query, key and value projection, regrouped per key/value group.
    QkvFromParts,
    /// The rows of all queries, then of all keys, then of all values, in one tensor.
    QkvFused,
    /// As `QkvFused`, stored as `[in, out]`.
    QkvFusedTransposed,
}

/// The division of a QKV projection's rows.
#[derive(Clone, Copy, Debug)]
pub struct QkvShape {
    /// Key/value heads.
    pub groups: usize,
    /// Rows of the query heads of one group.
    pub query_rows: usize,
    /// Rows of a key or a value.
    pub head_dim: usize,
}

impl QkvShape {
    /// The shape of a model's attention.
    pub fn of(model: &ModelConfig) -> Self {
        let heads_per_group = model.num_attention_heads / model.num_query_groups.max(1);
        Self {
            groups: model.num_query_groups,
            query_rows: heads_per_group * model.head_dim,
            head_dim: model.head_dim,
        }
    }

    /// Rows of q, k and v in a group.
    fn rows(&self) -> [usize; 3] {
        [self.query_rows, self.head_dim, self.head_dim]
    }
}

impl Transform {
    /// The shapes of the tensors that make up a parameter of shape `ours`.
    pub fn their_shapes(self, ours: &[usize], qkv: &QkvShape) -> Vec<Vec<usize>> {
        let with_rows = |rows: usize| [&[rows], &ours[1..]].concat();
        match self {
            Self::Copy | Self::QkvFused => vec![ours.to_vec()],
            Self::Transpose | Self::QkvFusedTransposed => {
                vec![ours.iter().rev().copied().collect()]
            }
            Self::GateUp => vec![with_rows(ours[0] / 2); 2],
            Self::QkvFromParts => qkv.rows().map(|rows| with_rows(qkv.groups * rows)).to_vec(),
        }
    }

    /// Converts the bytes of the tensors `theirs`, with the shapes
    /// [`their_shapes`](Self::their_shapes), to those of a parameter of shape `ours`. Elements have
    /// `size` bytes.
    pub fn to_ours(
        self,
        mut theirs: Vec<Vec<u8>>,
        ours: &[usize],
        size: usize,
        qkv: &QkvShape,
    ) -> Vec<u8> {
        let transposed = |bytes: Vec<u8>| transpose(&bytes, ours[1], ours[0], size);
        match self {
            Self::Copy => theirs.swap_remove(0),
            Self::Transpose => transposed(theirs.swap_remove(0)),
            Self::GateUp => theirs.concat(),
            Self::QkvFromParts => {
                let parts: Vec<&[u8]> = theirs.iter().map(Vec::as_slice).collect();
                group(&parts, qkv, row_bytes(ours, size))
            }
            Self::QkvFused => {
                group(&sections(&theirs[0], qkv, row_bytes(ours, size)), qkv, row_bytes(ours, size))
            }
            Self::QkvFusedTransposed => {
                let rows = transposed(theirs.swap_remove(0));
                group(&sections(&rows, qkv, row_bytes(ours, size)), qkv, row_bytes(ours, size))
            }
        }
    }

    /// The inverse of [`to_ours`](Self::to_ours).
    pub fn to_theirs(
        self,
        bytes: Vec<u8>,
        ours: &[usize],
        size: usize,
        qkv: &QkvShape,
    ) -> Vec<Vec<u8>> {
        match self {
            Self::Copy => vec![bytes],
            Self::Transpose => vec![transpose(&bytes, ours[0], ours[1], size)],
            Self::GateUp => bytes.chunks(bytes.len() / 2).map(<[u8]>::to_vec).collect(),
            Self::QkvFromParts => ungroup(&bytes, qkv, row_bytes(ours, size)).to_vec(),
            Self::QkvFused => vec![ungroup(&bytes, qkv, row_bytes(ours, size)).concat()],
            Self::QkvFusedTransposed => {
                vec![transpose(
                    &ungroup(&bytes, qkv, row_bytes(ours, size)).concat(),
                    ours[0],
                    ours[1],
                    size,
                )]
            }
        }
    }
}

fn row_bytes(shape: &[usize], size: usize) -> usize {
    shape[1..].iter().product::<usize>() * size
}

/// `[rows, columns]` → `[columns, rows]`
fn transpose(bytes: &[u8], rows: usize, columns: usize, size: usize) -> Vec<u8> {
    const TILE: usize = 64;
    let mut out = vec![0; bytes.len()];
    for first_row in (0..rows).step_by(TILE) {
        for first_column in (0..columns).step_by(TILE) {
            for row in first_row..rows.min(first_row + TILE) {
                for column in first_column..columns.min(first_column + TILE) {
                    let (from, to) =
                        ((row * columns + column) * size, (column * rows + row) * size);
                    out[to..to + size].copy_from_slice(&bytes[from..from + size]);
                }
            }
        }
    }
    out
}

/// The rows of q, k and v of one fused tensor.
fn sections<'a>(bytes: &'a [u8], qkv: &QkvShape, row: usize) -> [&'a [u8]; 3] {
    let (q, rest) = bytes.split_at(qkv.groups * qkv.query_rows * row);
    let (k, v) = rest.split_at(qkv.groups * qkv.head_dim * row);
    [q, k, v]
}

fn group(parts: &[&[u8]], qkv: &QkvShape, row: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(parts.iter().map(|part| part.len()).sum());
    for group in 0..qkv.groups {
        for (part, rows) in parts.iter().zip(qkv.rows()) {
            out.extend_from_slice(&part[group * rows * row..(group + 1) * rows * row]);
        }
    }
    out
}

fn ungroup(bytes: &[u8], qkv: &QkvShape, row: usize) -> [Vec<u8>; 3] {
    let mut parts = qkv.rows().map(|rows| Vec::with_capacity(qkv.groups * rows * row));
    let mut rest = bytes;
    for _ in 0..qkv.groups {
        for (part, rows) in parts.iter_mut().zip(qkv.rows()) {
            let (this, after) = rest.split_at(rows * row);
            part.extend_from_slice(this);
            rest = after;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2 groups of 2 query heads of width 1.
    const QKV: QkvShape = QkvShape { groups: 2, query_rows: 2, head_dim: 1 };

    #[test]
    fn rows_are_grouped_as_queries_key_value() {
        let parts = vec![vec![0, 1, 2, 3], vec![10, 11], vec![20, 21]];
        let ours = Transform::QkvFromParts.to_ours(parts, &[8], 1, &QKV);
        assert_eq!(ours, [0, 1, 10, 20, 2, 3, 11, 21]);
        let fused =
            Transform::QkvFused.to_ours(vec![vec![0, 1, 2, 3, 10, 11, 20, 21]], &[8], 1, &QKV);
        assert_eq!(fused, ours);
    }

    #[test]
    fn matrices_are_transposed_element_by_element() {
        let theirs: Vec<u8> = vec![1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0]; // u16 [2, 3]
        let ours = Transform::Transpose.to_ours(vec![theirs], &[3, 2], 2, &QKV);
        assert_eq!(ours, [1, 0, 4, 0, 2, 0, 5, 0, 3, 0, 6, 0]);
    }

    #[test]
    fn every_transform_is_undone_by_its_inverse() {
        use Transform::*;
        for transform in [Copy, Transpose, GateUp, QkvFromParts, QkvFused, QkvFusedTransposed] {
            for size in [2, 4] {
                let ours = [8, 130];
                let bytes: Vec<u8> = (0..8 * 130 * size).map(|i| (i * 7 % 251) as u8).collect();
                let theirs = transform.to_theirs(bytes.clone(), &ours, size, &QKV);
                let lengths: Vec<usize> = theirs.iter().map(Vec::len).collect();
                let shapes = transform.their_shapes(&ours, &QKV);
                assert_eq!(
                    lengths,
                    shapes.iter().map(|s| s.iter().product::<usize>() * size).collect::<Vec<_>>()
                );
                assert!(transform == Copy || theirs.concat() != bytes || transform == GateUp);
                assert_eq!(transform.to_ours(theirs, &ours, size, &QKV), bytes, "{transform:?}");
            }
        }
    }
}
