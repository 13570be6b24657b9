//! Launches of the kernels for Hopper: `cuda/attention_*_sm90a.cu`.

use candle_core::{DType, Tensor};

use super::{Kernels, Prepared};
use crate::cuda::reduce::zero;
use crate::tensor::arguments::attention::Geometry;
use crate::tensor::arguments::rope::Rotation;
use crate::tensor::gpu::items::items;
use crate::tensor::gpu::launch::blocks;
use crate::tensor::gpu::tensor_map::Boxes;
use crate::tensor::gpu::{DevicePointer, Gpu};
use crate::{Error, Result};

fn chosen(op: &'static str) -> Result<Kernels> {
    Kernels::chosen().map_err(|message| Error::gpu(op, message))
}

/// Whether the Hopper kernels can compute a call.
pub(super) fn takes(
    op: &'static str,
    gpu: &Gpu,
    prepared: &Prepared,
    geometry: Geometry,
    dtype: DType,
) -> Result<bool> {
    Ok(chosen(op)? != Kernels::Mma
        && gpu.properties()?.capability == (9, 0)
        && matches!(dtype, DType::BF16 | DType::F16)
        && matches!(geometry.shape.head_dim, 64 | 128)
        && geometry.s * geometry.b > 0
        && prepared.call.aligned == 1
        && prepared.call.threshold == 0)
}

/// Whether the Hopper kernels compute gradients in one pass.
pub(super) fn takes_one_pass(op: &'static str, geometry: Geometry) -> Result<bool> {
    Ok(chosen(op)? == Kernels::OnePass && geometry.shape.head_dim == 64)
}

/// Number of query tiles of all heads. Each tile has its own turn counter.
pub(super) fn turns(Geometry { s, b, shape }: Geometry) -> usize {
    s.div_ceil(ROWS) * shape.heads() * b
}

/// Rows of a warpgroup of the Hopper kernels, and of a tile of backward.
const ROWS: usize = 64;
/// Keys per tile of forward.
const KEYS: usize = 128;

/// Threads of a block: `consumers` warpgroups that compute, and one producer warpgroup that issues
/// copies.
fn threads_of(consumers: usize) -> u32 {
    128 * (1 + consumers as u32)
}

/// `Block` of `cuda/attention_forward_sm90a.cu`.
struct ForwardBlock {
    /// Warpgroups that compute.
    consumers: usize,
    /// Key tiles that are in shared memory at once, and the same number of value tiles.
    stages: usize,
    /// Rows of the boxes that tensor copies fetch.
    boxes: usize,
}

impl ForwardBlock {
    /// For heads of 64 or 128 columns.
    fn new(head_dim: usize) -> Self {
        match head_dim {
            64 => Self { consumers: 3, stages: 4, boxes: 64 },
            _ => Self { consumers: 2, stages: 2, boxes: 128 },
        }
    }
}

/// A packed tensor `[s, b, parts · d]` in boxes of `rows` positions.
fn boxes(
    base: DevicePointer,
    dtype: DType,
    Geometry { s, b, shape }: Geometry,
    parts: usize,
    rows: usize,
) -> Boxes {
    let (d, element) = (shape.head_dim, dtype.size_in_bytes());
    let strides = [1, parts, b * parts].map(|columns| columns * d * element);
    Boxes { base, dtype, dims: [d, parts, b, s], strides, rows: rows as u32 }
}

/// Bytes of `Shared` of `cuda/include/backward_sm90a.cuh`.
fn backward_shared(consumers: usize, d: usize, element: usize) -> u32 {
    const STAGES: usize = 4;
    // For narrow heads, resident tiles are double-buffered over two pieces of work.
    let stays = if d == 64 { 2 } else { 1 };
    // Resident and streamed tiles, each of two kinds; three numbers for each query of a tile;
    // barriers; and the indices of the pieces of work.
    let tiles = 2 * (stays * consumers + STAGES);
    let statistics = (stays * consumers).max(STAGES) * 3 * ROWS * 4;
    (tiles * ROWS * d * element + statistics + 2 * (stays + STAGES) * 8 + stays * 4) as u32
}

/// `Rotation` of `cuda/include/backward_sm90a.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct TurnBack {
    cosines: u64,
    sines: u64,
    positions: u64,
    last: u32,
    unused: u32,
}

impl TurnBack {
    /// From a rotation that fits. None if the tables are not aligned for reading pairs of elements.
    pub fn new(
        op: &'static str,
        gpu: &Gpu,
        Rotation { table, positions }: &Rotation,
    ) -> Result<Option<Self>> {
        let positions = positions
            .map(|positions| gpu.input(positions, DType::U32, op, "positions"))
            .transpose()?;
        let cosines = gpu.input(&table.cos, DType::F32, op, "table")?.address();
        let sines = gpu.input(&table.sin, DType::F32, op, "table")?.address();
        let last = items(op, table.cos.dim(0)?.saturating_sub(1))?;
        let turn_back = Self {
            cosines,
            sines,
            positions: positions.map_or(0, |at| at.address()),
            last,
            unused: 0,
        };
        Ok((cosines % 8 == 0 && sines % 8 == 0).then_some(turn_back))
    }
}

/// One kernel of backward.
struct Pass {
    file: &'static str,
    /// Warpgroups that compute.
    consumers: usize,
    order: Order,
    /// Bytes of shared memory per block.
    shared: u32,
    /// Location of the accumulated gradients of queries, if they are accumulated in global memory.
    sums: Option<DevicePointer>,
}

impl Pass {
    /// `cuda/attention_dkdv_sm90a.cu` and `cuda/attention_dq_sm90a.cu`.
    fn two(
        op: &'static str,
        gpu: &Gpu,
        Geometry { s, b, shape }: Geometry,
        element: usize,
    ) -> Result<Vec<Self>> {
        let d = shape.head_dim;
        let of_head = 2 * s * d * element;
        // Tiles of keys iterate over the queries of their group and the gradients of its outputs;
        // tiles of queries iterate over the group's keys and values.
        let kernels = [
            ("attention_dkdv_sm90a", 2, shape.groups, of_head * shape.heads_per_group),
            (
                "attention_dq_sm90a",
                if d == 64 { 3 } else { 2 },
                shape.heads(),
                of_head / shape.heads_per_group,
            ),
        ];
        let pass = |(file, consumers, heads, bytes)| {
            let order = Order::new(op, gpu, s.div_ceil(consumers * ROWS), heads * b, bytes, 4)?;
            Ok(Self {
                file,
                consumers,
                order,
                shared: backward_shared(consumers, d, element),
                sums: None,
            })
        };
        kernels.into_iter().map(pass).collect()
    }

    /// `cuda/attention_backward_sm90a.cu`, and its accumulators.
    fn one(
        op: &'static str,
        gpu: &Gpu,
        geometry: Geometry,
        element: usize,
    ) -> Result<(Self, Tensor)> {
        const SLANTS: usize = 4;
        const TURNS: usize = 4;
        // Warpgroups that compute gradients of scores; another warpgroup multiplies them.
        const OF_KEYS: usize = 2;
        let Geometry { s, b, shape } = geometry;
        let (d, tile) = (shape.head_dim, ROWS * shape.head_dim);
        let (sums, at) = gpu.output((turns(geometry), tile), DType::F32, op)?;
        // Queries, gradients of outputs, and sums in f32. Sections are smaller than elsewhere,
        // because sums that leave L2 have to come back.
        let bytes = (2 * element + 4) * s * d * shape.heads_per_group;
        let order = Order::new(op, gpu, s.div_ceil(OF_KEYS * ROWS), shape.groups * b, bytes, 3)?;
        // In addition to the kernel for keys alone: gradients of scores, rows on their way to
        // memory, and barriers.
        let more = (2 * SLANTS + 1) * tile * element + (2 * SLANTS + 3 * TURNS) * 8;
        let shared = backward_shared(OF_KEYS, d, element) + more as u32;
        let pass = Self {
            file: "attention_backward_sm90a",
            consumers: OF_KEYS + 1,
            order,
            shared,
            sums: Some(at),
        };
        Ok((pass, sums))
    }
}

/// Gradients of queries, keys and values, in one pass or two.
pub(super) fn backward(
    op: &'static str,
    gpu: &Gpu,
    prepared: &Prepared,
    geometry: Geometry,
    (dtype, suffix): (DType, &str),
    [douts, packed, lses, deltas, dpacked, next]: [DevicePointer; 6],
    turn_back: Option<TurnBack>,
    one_pass: bool,
) -> Result<()> {
    // Zeros mean no rotation.
    let turn_back = turn_back.unwrap_or_default();
    let shape = geometry.shape;
    let element = dtype.size_in_bytes();
    let qkv =
        boxes(packed, dtype, geometry, shape.groups * (shape.heads_per_group + 2), ROWS).map(op)?;
    let dout = boxes(douts, dtype, geometry, shape.heads(), ROWS).map(op)?;
    let (passes, _sums) = if one_pass {
        let (pass, sums) = Pass::one(op, gpu, geometry, element)?;
        (vec![pass], Some(sums))
    } else {
        (Pass::two(op, gpu, geometry, element)?, None)
    };
    for Pass { file, consumers, order, shared, sums } in passes {
        let name = format!("{file}_{suffix}_{}", shape.head_dim);
        gpu.launch(file, &name, order.grid, threads_of(consumers), shared, |args| {
            // SAFETY: the kernel's structures have these fields and no padding.
            unsafe { args.structure(&qkv).structure(&dout).structure(&prepared.call) }
                .ptr(lses)
                .ptr(deltas)
                .ptr(dpacked)
                .ptr(next)
                .u32(order.section);
            // SAFETY: as above.
            unsafe { args.structure(&turn_back) };
            if let Some(sums) = sums {
                args.ptr(sums);
            }
        })?;
    }
    Ok(())
}

/// The order in which persistent blocks take tiles: `Place` of `cuda/include/warpgroups.cuh`.
struct Order {
    grid: [u32; 3],
    section: u32,
}

impl Order {
    /// For `tiles` tiles of each of `all` heads or groups; the tiles of one read `bytes` in common.
    /// If there are enough, a section has at least `pieces` tiles per multiprocessor.
    fn new(
        op: &'static str,
        gpu: &Gpu,
        tiles: usize,
        all: usize,
        bytes: usize,
        pieces: usize,
    ) -> Result<Self> {
        let properties = gpu.properties()?;
        let blocks = blocks(op, tiles * all, 1)?.min(properties.multiprocessors);
        // The data that a section reads should fill half of L2, and its short tiles should fill the
        // time of its long ones on all multiprocessors. Sections have equal sizes, because a last
        // one of a few long tiles would leave most multiprocessors idle.
        let cached = properties.l2 as usize / 2 / bytes.max(1);
        let balanced = (pieces * properties.multiprocessors as usize).div_ceil(tiles.max(1));
        let sections = (all / cached.max(balanced).max(1)).max(1);
        Ok(Self { grid: [blocks, 1, 1], section: all.div_ceil(sections).max(1) as u32 })
    }
}

/// `cuda/attention_forward_sm90a.cu`.
pub(super) fn forward(
    op: &'static str,
    gpu: &Gpu,
    prepared: &Prepared,
    geometry: Geometry,
    (dtype, suffix): (DType, &str),
    [packed, outs, lses]: [DevicePointer; 3],
) -> Result<()> {
    let Geometry { s, b, shape } = geometry;
    let (d, element) = (shape.head_dim, dtype.size_in_bytes());
    let parts = shape.groups * (shape.heads_per_group + 2);
    let block = ForwardBlock::new(d);
    let map = boxes(packed, dtype, geometry, parts, block.boxes).map(op)?;
    let queries = block.consumers * ROWS;
    let order = Order::new(
        op,
        gpu,
        s.div_ceil(queries),
        b * shape.heads(),
        2 * s * d * element / shape.heads_per_group,
        4,
    )?;
    // Tiles of queries and outputs, some of keys and of values, two barriers of the queries and
    // four per stage, and the index of the piece of work.
    let rows = 2 * queries + 2 * block.stages * KEYS;
    let shared = rows * d * element + (2 + 4 * block.stages) * 8 + 4;
    // The index of the next piece of work.
    let (counter, next) = gpu.output(1, DType::U32, op)?;
    zero(&counter, op)?;
    let name = format!("attention_forward_sm90a_{suffix}_{d}");
    gpu.launch(
        "attention_forward_sm90a",
        &name,
        order.grid,
        threads_of(block.consumers),
        shared as u32,
        |args| {
            // SAFETY: the kernel's structures have these fields and no padding.
            unsafe { args.structure(&map).structure(&prepared.call) }
                .ptr(outs)
                .ptr(lses)
                .ptr(next)
                .u32(order.section);
        },
    )
}
