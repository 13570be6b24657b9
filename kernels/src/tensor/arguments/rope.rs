//! Angles of rotary position embedding, and the positions of rows.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

#[cfg(gpu)]
use super::attention::HeadShape;
use crate::{Error, Result};

/// Cosines and sines of the angles position · base^(−2i/head_dim): `[positions, head_dim / 2]`
/// each.
#[derive(Clone, Debug)]
pub struct RopeTable {
    pub cos: Tensor,
    pub sin: Tensor,
}

impl RopeTable {
    /// The table for activations of `dtype`: f64 for f64, else f32. For f32, frequencies and angles
    /// are rounded to f32 as Megatron and Hugging Face do, so that weights trained there see the
    /// same angles.
    ///
    /// # Errors
    /// If `head_dim` is odd or the dtype is not a float.
    pub fn new(
        positions: usize,
        head_dim: usize,
        base: f64,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        if !head_dim.is_multiple_of(2) {
            let message = format!("head_dim {head_dim} is odd; rotation needs pairs");
            return Err(Error::shape("rope_table", message));
        }
        Self::with_frequencies(positions, &rope_frequencies(head_dim, base), dtype, device)
    }

    /// As [`RopeTable::new`], for angles position · frequency. Scaled frequencies stretch the
    /// context.
    ///
    /// # Errors
    /// If the dtype is not a float.
    pub fn with_frequencies(
        positions: usize,
        frequencies: &[f64],
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        const OP: &str = "rope_table";
        type Narrow = fn(f64) -> f64;
        let (narrow, dtype): (Narrow, _) = match dtype {
            DType::F32 | DType::BF16 | DType::F16 => (|v| f64::from(v as f32), DType::F32),
            DType::F64 => (|v| v, DType::F64),
            dtype => return Err(Error::DType { op: OP, dtype }),
        };
        let half = frequencies.len();
        let frequencies: Vec<f64> = frequencies.iter().map(|&f| narrow(f)).collect();
        let angles = (0..positions).flat_map(|p| frequencies.iter().map(move |f| (p, f)));
        let (sin, cos): (Vec<f64>, Vec<f64>) =
            angles.map(|(p, f)| narrow(p as f64 * f).sin_cos()).unzip();
        let table = |values: Vec<f64>| -> Result<Tensor> {
            Ok(Tensor::from_vec(values, (positions, half), &Device::Cpu)?
                .to_dtype(dtype)?
                .to_device(device)?)
        };
        Ok(Self { cos: table(cos)?, sin: table(sin)? })
    }

    /// Number of positions in the table, for heads of `head_dim` columns.
    pub(crate) fn rows(&self, head_dim: usize) -> Result<usize> {
        let half = head_dim / 2;
        match (self.cos.dims(), self.sin.dims()) {
            ([rows, h], [rows2, h2]) if rows == rows2 && h == h2 && 2 * h == head_dim => Ok(*rows),
            (cos, sin) => {
                let message = format!(
                    "the table has shapes {cos:?} and {sin:?} where [positions, {half}] is needed"
                );
                Err(Error::shape("rope_inplace", message))
            }
        }
    }
}

/// base^(−2i/head_dim) for each pair i of a head.
pub fn rope_frequencies(head_dim: usize, base: f64) -> Vec<f64> {
    (0..head_dim / 2).map(|i| 1.0 / base.powf(2.0 * i as f64 / head_dim as f64)).collect()
}

/// The rotation of the queries and keys of packed `qkv [s, b, …]` before they are multiplied.
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    pub table: &'a RopeTable,
    /// The position of every row, u32 `[s, b]`; if none, row s has position s.
    pub positions: Option<&'a Tensor>,
}

impl Rotation<'_> {
    /// Whether table and positions fit `[s, b]` rows, so that the rotation cannot fail.
    #[cfg(gpu)]
    pub(crate) fn fits(&self, s: usize, b: usize, shape: HeadShape) -> bool {
        let Ok(rows) = self.table.rows(shape.head_dim) else { return false };
        match self.positions {
            Some(positions) => {
                rows > 0 && positions.dims() == [s, b] && positions.dtype() == DType::U32
            }
            None => rows >= s,
        }
    }
}

/// The positions of `[s, b]` rows in their sequences.
#[derive(Clone, Copy)]
pub enum Positions<'a> {
    /// The rows of sample i begin at the i-th offset and are consecutive.
    Offsets(&'a [usize]),
    /// Row by row: u32 `[s, b]`.
    Rows(&'a Tensor),
}

/// The range from the first to the last of some positions, which must be within a table of `rows`.
pub(crate) fn range_of(positions: &[usize], rows: usize, op: &'static str) -> Result<Range<usize>> {
    let (first, last) =
        positions.iter().fold((usize::MAX, 0), |(first, last), &p| (first.min(p), last.max(p)));
    if last >= rows {
        return Err(Error::shape(
            op,
            format!("positions {first} to {last} exceed the table's {rows}"),
        ));
    }
    Ok(first..last + 1)
}
