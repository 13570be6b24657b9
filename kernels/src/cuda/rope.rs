//! Rotary position embedding on a GPU: `cuda/rope.cu`.

use candle_core::{DType, Tensor};

use crate::Result;
use crate::tensor::arguments::attention::HeadShape;
use crate::tensor::arguments::rope::{Positions, RopeTable};
use crate::tensor::constants::constant;
use crate::tensor::gpu::items::{Divider, in_vectors, items, variant, vector};
use crate::tensor::gpu::launch::blocks;
use crate::tensor::gpu::memory::suffix;
use crate::tensor::gpu::{Gpu, THREADS};

/// `Heads` of `cuda/rope.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Heads {
    per_row: Divider,
    parts: Divider,
    heads: Divider,
    batch: Divider,
    head_dim: u32,
    width: u32,
    last: u32,
}

/// Rotates `qkv [s, b, width]`; shapes must have been checked, and positions lie within the table.
pub fn rotate(
    qkv: &Tensor,
    table: &RopeTable,
    shape: HeadShape,
    positions: Positions,
    inverse: bool,
    op: &'static str,
) -> Result<()> {
    let (gpu, dtype, suffix) = (Gpu::of(qkv, op)?, qkv.dtype(), suffix(qkv.dtype(), op)?);
    let (s, b, _) = qkv.dims3()?;
    let qkvs = gpu.inplace(qkv, dtype, op, "qkv")?;
    let cos = gpu.input(&table.cos, DType::F32, op, "table")?;
    let sin = gpu.input(&table.sin, DType::F32, op, "table")?;
    let half = shape.head_dim / 2;
    if half == 0 || s * b == 0 {
        return Ok(());
    }
    // A common offset is an argument of the launch; other positions are passed as a list.
    let (offset, list) = match positions {
        Positions::Rows(rows) => (0, Some(rows.clone())),
        Positions::Offsets([first, rest @ ..]) if rest.iter().all(|o| o == first) => (*first, None),
        Positions::Offsets(offsets) => {
            let list: Vec<u32> =
                (0..s * b).map(|row| (row / b + offsets[row % b]) as u32).collect();
            (0, Some(constant(list, s * b, qkv.device())?))
        }
    };
    let listed =
        list.as_ref().map(|list| gpu.input(list, DType::U32, op, "positions")).transpose()?;
    let vectors = in_vectors(half, dtype, &[Some(qkvs), Some(cos), Some(sin)]);
    let parts = if vectors { half / vector(dtype) } else { half };
    let per_row = shape.groups * (shape.heads_per_group + 1) * parts;
    let count = items(op, s * b * per_row)?;
    let heads = Heads {
        per_row: Divider::new(op, per_row)?,
        parts: Divider::new(op, parts)?,
        heads: Divider::new(op, shape.heads_per_group + 1)?,
        batch: Divider::new(op, b)?,
        head_dim: items(op, shape.head_dim)?,
        width: items(op, shape.width())?,
        last: items(op, table.cos.dim(0)?.saturating_sub(1))?,
    };
    let (offset, sign) = (items(op, offset)?, if inverse { -1.0 } else { 1.0 });
    let grid = [blocks(op, count as usize, THREADS as usize)?, 1, 1];
    gpu.launch("rope", &format!("rope{}_{suffix}", variant(vectors)), grid, THREADS, 0, |args| {
        args.ptr(qkvs).ptr(cos).ptr(sin).optional(listed).u32(offset).u32(count).f32(sign);
        // SAFETY: C layout, equal to the kernel's; no padding.
        unsafe { args.structure(&heads) };
    })
}
