//! Rotary position embedding (Su et al. 2021) of packed queries and keys, rotating halves as Llama does.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use crate::ops::attention::HeadShape;
use crate::tensor::element::{Elem, Float, by_elem};
use crate::tensor::host::with_slice_mut;
use crate::tensor::simd::vectorize;
use crate::tensor::view::{copied, expect_dtype, expect_shape};
use crate::tensor::{parallel, trace};
use crate::{Error, Result, on_gpu};

/// Name in errors.
const OP: &str = "rope_inplace";

/// Cosines and sines of the angles position · base^(−2i/head_dim): `[positions, head_dim / 2]` each.
#[derive(Clone, Debug)]
pub struct RopeTable {
    pub cos: Tensor,
    pub sin: Tensor,
}

impl RopeTable {
    /// The table for activations of `dtype`: f64 for f64, else f32. For f32, frequencies and angles are rounded to f32 as Megatron
    /// and Hugging Face do, so that weights trained there see the same angles.
    ///
    /// # Errors
    /// If `head_dim` is odd or the dtype is no float.
    pub fn new(positions: usize, head_dim: usize, base: f64, dtype: DType, device: &Device) -> Result<Self> {
        if !head_dim.is_multiple_of(2) {
            let message = format!("head_dim {head_dim} is odd; rotation needs pairs");
            return Err(Error::shape("rope_table", message));
        }
        Self::with_frequencies(positions, &rope_frequencies(head_dim, base), dtype, device)
    }

    /// As [`RopeTable::new`], for angles position · frequency: scaled frequencies stretch the context.
    ///
    /// # Errors
    /// If the dtype is no float.
    pub fn with_frequencies(positions: usize, frequencies: &[f64], dtype: DType, device: &Device) -> Result<Self> {
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
        let (sin, cos): (Vec<f64>, Vec<f64>) = angles.map(|(p, f)| narrow(p as f64 * f).sin_cos()).unzip();
        let table = |values: Vec<f64>| -> Result<Tensor> {
            Ok(Tensor::from_vec(values, (positions, half), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
        };
        Ok(Self { cos: table(cos)?, sin: table(sin)? })
    }

    /// Positions that it has, for heads of `head_dim` columns.
    fn rows(&self, head_dim: usize) -> Result<usize> {
        let half = head_dim / 2;
        match (self.cos.dims(), self.sin.dims()) {
            ([rows, h], [rows2, h2]) if rows == rows2 && h == h2 && 2 * h == head_dim => Ok(*rows),
            (cos, sin) => {
                let message = format!("the table has shapes {cos:?} and {sin:?} where [positions, {half}] is needed");
                Err(Error::shape(OP, message))
            }
        }
    }
}

/// base^(−2i/head_dim) for each pair i of a head.
pub fn rope_frequencies(head_dim: usize, base: f64) -> Vec<f64> {
    (0..head_dim / 2).map(|i| 1.0 / base.powf(2.0 * i as f64 / head_dim as f64)).collect()
}

/// Rotates the queries and keys of packed `qkv [s, b, groups·(heads_per_group + 2)·head_dim]` in place; row s has position
/// `position_offset + s`. `inverse` rotates back, which is also the gradient.
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

/// As [`rope_inplace`], where sample i's rows begin at position `offsets[i]`.
///
/// # Errors
/// As [`rope_inplace`]; also if there is not one offset a sample.
pub fn rope_at(qkv: &Tensor, table: &RopeTable, shape: HeadShape, offsets: &[usize], inverse: bool) -> Result<()> {
    let (_, b) = shape.check(qkv, OP)?;
    if offsets.len() != b {
        return Err(Error::shape(OP, format!("{} position offsets for {b} samples", offsets.len())));
    }
    rotate_rows(qkv, table, shape, Positions::Offsets(offsets), inverse)
}

/// As [`rope_inplace`], where `positions`, u32 `[s, b]`, gives the position of every row. A GPU's are not read by the host: there a position
/// beyond the table counts as its last.
///
/// # Errors
/// As [`rope_inplace`]; also if there is not one position a row.
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

/// How the queries and keys of packed `qkv [s, b, …]` are rotated before they meet.
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    pub table: &'a RopeTable,
    /// Of every row, u32 `[s, b]`; without them row s has position s.
    pub positions: Option<&'a Tensor>,
}

impl Rotation<'_> {
    /// Rotates them in place; `inverse`: back.
    ///
    /// # Errors
    /// As [`rope_inplace`] and [`rope_positions`].
    pub fn turn(&self, qkv: &Tensor, shape: HeadShape, inverse: bool) -> Result<()> {
        match self.positions {
            Some(positions) => rope_positions(qkv, self.table, shape, positions, inverse),
            None => rope_inplace(qkv, self.table, shape, 0, inverse),
        }
    }

    /// Whether table and positions are those of `[s, b]` rows, so that turning them is no error.
    #[cfg(gpu)]
    pub(crate) fn fits(&self, s: usize, b: usize, shape: HeadShape) -> bool {
        let Ok(rows) = self.table.rows(shape.head_dim) else { return false };
        match self.positions {
            Some(positions) => rows > 0 && positions.dims() == [s, b] && positions.dtype() == DType::U32,
            None => rows >= s,
        }
    }
}

/// Where the rows of `[s, b]` are in their sequences.
#[derive(Clone, Copy)]
pub(crate) enum Positions<'a> {
    /// Sample i's begin at the i-th, and follow each other.
    Offsets(&'a [usize]),
    /// Row by row: u32 `[s, b]`.
    Rows(&'a Tensor),
}

/// Rotates the rows to their positions.
fn rotate_rows(qkv: &Tensor, table: &RopeTable, shape: HeadShape, positions: Positions, inverse: bool) -> Result<()> {
    let _span = trace::moves("rope", &[qkv, qkv]);
    let d = shape.head_dim;
    let half = d / 2;
    let rows = table.rows(d)?;
    let (s, b, _) = qkv.dims3()?;
    if s * b == 0 {
        return Ok(());
    }
    if let Positions::Offsets(offsets) = positions {
        let ends: Vec<usize> = offsets.iter().flat_map(|first| [*first, first + s - 1]).collect();
        range_of(&ends, rows)?;
    }
    on_gpu!(qkv, rope::rotate(qkv, table, shape, positions, inverse, OP));
    let positions: Vec<usize> = match positions {
        Positions::Offsets(offsets) => (0..s * b).map(|row| row / b + offsets[row % b]).collect(),
        Positions::Rows(rows) => copied::<u32>(rows, OP, "positions")?.iter().map(|&p| p as usize).collect(),
    };
    let range = range_of(&positions, rows)?;
    by_elem!(qkv, OP, E => {
        type Acc = <E as Elem>::Acc;
        let cos = copied::<Acc>(&table.cos.narrow(0, range.start, range.len())?, OP, "table")?;
        let sin = copied::<Acc>(&table.sin.narrow(0, range.start, range.len())?, OP, "table")?;
        let sign = if inverse { -Acc::ONE } else { Acc::ONE };
        let width = shape.width();
        let rotated = (shape.heads_per_group + 1) * d;
        with_slice_mut::<E, _>(qkv, OP, |qkv| {
            parallel::blocks(qkv, parallel::rows_per_block(width) * width, |start, part| {
                let mut buffer = E::buffer(rotated);
                for (r, row) in part.chunks_exact_mut(width).enumerate() {
                    let position = positions[start / width + r] - range.start;
                    let at = position * half..(position + 1) * half;
                    let (cos, sin) = (&cos[at.clone()], &sin[at]);
                    for group in row.chunks_exact_mut((shape.heads_per_group + 2) * d) {
                        E::update(&mut group[..rotated], &mut buffer, |heads| rotate_heads(heads, cos, sin, sign));
                    }
                }
            });
            Ok(())
        })
    })
}

/// From the first to the last of some positions, which have to be in a table of `rows`.
fn range_of(positions: &[usize], rows: usize) -> Result<Range<usize>> {
    let (first, last) = positions.iter().fold((usize::MAX, 0), |(first, last), &p| (first.min(p), last.max(p)));
    if last >= rows {
        return Err(Error::shape(OP, format!("positions {first} to {last} exceed the table's {rows}")));
    }
    Ok(first..last + 1)
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
