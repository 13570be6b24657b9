//! Attention on a GPU: `cuda/attention_*.cu`.
//!
//! 16-bit tensors use tensor cores in tiles of 64, 96, 128 or 256 columns; f32 tensors use f32
//! multiplications. A head narrower than its tile is padded in shared memory.
//!
//! Hopper has additional kernels, which use its asynchronous products and tensor copies where
//! possible ([`Kernels`]). The environment variable `MEGATRON_ATTENTION=mma` selects the other
//! kernels there, too; `one-pass` computes the gradients of heads of 64 columns in one pass.

mod hopper;

use std::sync::OnceLock;

use candle_core::{DType, Tensor};

use crate::tensor::arguments::attention::{Geometry, Mask, Scores};
use crate::tensor::arguments::rope::Rotation;
use crate::tensor::constants::constant;
use crate::tensor::gpu::items::items;
use crate::tensor::gpu::launch::{blocks, blocks_y};
use crate::tensor::gpu::memory::suffix;
use crate::tensor::gpu::{DevicePointer, Gpu, THREADS};
use crate::{Error, Result};

/// Widest head that the kernels support.
const WIDEST: usize = 256;
/// Positions that a block of `attention_attend` takes, and heads that it processes side by side: as
/// in `cuda/attention_cached.cu`.
const PIECE: usize = 256;
const HEADS: usize = 8;

/// The environment variable that chooses kernels.
const VARIABLE: &str = "MEGATRON_ATTENTION";

/// The kernels for 16-bit tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernels {
    /// The kernels for compute capability 8.0 and later (`mma.sync`), on every GPU.
    Mma,
    /// On Hopper, for heads of 64 or 128 columns without dropout: kernels with `wgmma` and tensor
    /// copies. Otherwise [`Kernels::Mma`].
    Hopper,
    /// As [`Kernels::Hopper`], but gradients of heads of 64 columns are computed in one pass
    /// instead of two. This needs f32 sums in memory, as many as the heads have elements.
    OnePass,
}

impl Kernels {
    /// The kernels that `MEGATRON_ATTENTION` names: `mma`, `hopper` or `one-pass`. If it is not
    /// set, [`Kernels::Hopper`]. Read once.
    ///
    /// # Errors
    /// A message for the user if it names no kernels.
    pub fn chosen() -> std::result::Result<Self, String> {
        static CHOSEN: OnceLock<std::result::Result<Kernels, String>> = OnceLock::new();
        let choose =
            || match std::env::var_os(VARIABLE).unwrap_or_default().to_string_lossy().as_ref() {
                "mma" => Ok(Self::Mma),
                "" | "hopper" => Ok(Self::Hopper),
                "one-pass" => Ok(Self::OnePass),
                other => Err(format!(
                    "{VARIABLE}={other} names no kernels; there are mma, hopper and one-pass"
                )),
            };
        CHOSEN.get_or_init(choose).clone()
    }
}

/// A kernel's arguments for a call: `Attention` of `cuda/include/attention.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Call {
    first_keys: u64,
    slopes: u64,
    samples: u64,
    s: u32,
    b: u32,
    groups: u32,
    heads_per_group: u32,
    head_dim: u32,
    window: u32,
    scale_log2: f32,
    scale: f32,
    tilted: u32,
    aligned: u32,
    key: [u32; 4],
    threshold: u32,
    first_head: u32,
    kept: f32,
    /// 1 if the step is on the device, before the samples, and the key does not include the step.
    step_on_device: u32,
}

/// A call, and the lists that its pointers refer to.
struct Prepared {
    call: Call,
    _lists: [Option<Tensor>; 2],
}

impl Prepared {
    /// `tensors` are those that kernels access by rows of heads.
    fn new(
        op: &'static str,
        like: &Tensor,
        Geometry { s, b, shape }: Geometry,
        scores: Scores,
        mask: Option<&Mask>,
        tensors: &[DevicePointer],
    ) -> Result<(Gpu, Self)> {
        let gpu = Gpu::of(like, op)?;
        if shape.head_dim > WIDEST {
            let message = format!(
                "head dimension {} is more than the {WIDEST} that GPUs have kernels for",
                shape.head_dim
            );
            return Err(Error::shape(op, message));
        }
        let number = |what: &str, n: usize| {
            u32::try_from(n).map_err(|_| {
                Error::shape(op, format!("{what} = {n} is too large for a GPU's kernel"))
            })
        };
        // Separate lists: under a graph, samples are on the device, while the slopes must be found
        // by their values as before.
        let list = |words: Vec<u32>| {
            let n = words.len();
            let list = constant(words, n, like.device())?;
            let at = gpu.input(&list, DType::U32, op, "side")?;
            Ok::<_, Error>((list, at))
        };
        let on_device = mask.and_then(|mask| mask.step_and_samples);
        let on_device =
            on_device.map(|t| gpu.input(t, DType::U32, op, "step and samples")).transpose()?;
        let from_host = mask.filter(|_| on_device.is_none());
        let samples = from_host.map(|mask| {
            list(mask.samples.iter().flat_map(|&s| crate::tensor::philox::words(s)).collect())
        });
        let slope = |&slope: &f64| ((slope * std::f64::consts::LOG2_E) as f32).to_bits();
        let slopes = scores.alibi.map(|slopes| list(slopes.iter().map(slope).collect()));
        let (samples, slopes) = (samples.transpose()?, slopes.transpose()?);
        let first_keys =
            scores.first_keys.map(|t| gpu.input(t, DType::U32, op, "first keys")).transpose()?;
        let at = |list: &Option<(Tensor, DevicePointer)>| {
            list.as_ref().map_or(0, |(_, at)| at.address())
        };
        let element = like.dtype().size_in_bytes();
        let of_16_bytes = |bytes: u64| bytes.is_multiple_of(16);
        let aligned = of_16_bytes((shape.head_dim * element) as u64)
            && tensors.iter().all(|pointer| of_16_bytes(pointer.address()));
        let call = Call {
            first_keys: first_keys.map_or(0, |first_keys| first_keys.address()),
            slopes: at(&slopes),
            // Samples follow the two words of the step.
            samples: on_device.map_or(at(&samples), |both| both.offset(4 * 2).address()),
            s: number("s", s)?,
            b: number("b", b)?,
            groups: number("groups", shape.groups)?,
            heads_per_group: number("heads per group", shape.heads_per_group)?,
            head_dim: number("head dimension", shape.head_dim)?,
            // A window that hides nothing counts as none.
            window: scores
                .window
                .filter(|&window| window < s)
                .map_or(Ok(0), |window| number("window", window))?,
            scale_log2: (scores.scale * std::f64::consts::LOG2_E) as f32,
            scale: scores.scale as f32,
            tilted: u32::from(scores.alibi.is_some() || scores.scale <= 0.0),
            aligned: u32::from(aligned),
            key: mask.map_or([0; 4], |mask| {
                if on_device.is_some() { mask.without_step } else { mask.key }
            }),
            threshold: mask.map_or(0, |mask| mask.threshold),
            first_head: number("first head", mask.map_or(0, |mask| mask.first_head))?,
            kept: mask.map_or(1.0, |mask| mask.scale as f32),
            step_on_device: u32::from(on_device.is_some()),
        };
        Ok((gpu, Self { call, _lists: [samples, slopes].map(|list| list.map(|(list, _)| list)) }))
    }
}

/// A kernel's tile: threads per block, queries and keys per tile, and the number of rows of the
/// tile's columns in shared memory.
struct Tile {
    threads: u32,
    queries: usize,
    keys: usize,
    rows: usize,
}

/// Columns of the tiles for a head. [`Width::shared`] gives the bytes of their rows in shared
/// memory.
struct Width {
    dim: usize,
    /// Bytes per row.
    row: usize,
}

impl Width {
    fn new(head_dim: usize, dtype: DType) -> Self {
        let dims: &[usize] =
            if dtype == DType::F32 { &[64, 128, 256] } else { &[64, 96, 128, 256] };
        let dim = dims.iter().copied().find(|&dim| head_dim <= dim).unwrap_or(WIDEST);
        // 16 bytes of padding, as in cuda/include/tiles.cuh and cuda/attention_f32.cu.
        Self { dim, row: dim * dtype.size_in_bytes() + 16 }
    }

    fn shared(&self, rows: usize) -> u32 {
        (rows * self.row) as u32
    }

    /// Queries and keys of a square f32 tile.
    fn square(&self) -> usize {
        if self.dim <= 128 { 32 } else { 16 }
    }
}

/// Bytes of `tiles` square tiles of weights.
fn weights(square: usize, tiles: usize) -> u32 {
    (tiles * square * (square + 1) * 4) as u32
}

/// As [`crate::tensor::arguments::attention::attention`].
pub(crate) fn forward(
    op: &'static str,
    qkv: &Tensor,
    geometry: Geometry,
    scores: Scores,
    mask: Option<&Mask>,
) -> Result<(Tensor, Tensor)> {
    let Geometry { s, b, shape } = geometry;
    let (dtype, suffix) = (qkv.dtype(), suffix(qkv.dtype(), op)?);
    let gpu = Gpu::of(qkv, op)?;
    let packed = gpu.input(qkv, dtype, op, "qkv")?;
    let (out, outs) = gpu.output((s, b, shape.heads() * shape.head_dim), dtype, op)?;
    let (lse, lses) = gpu.output((b, shape.heads(), s), DType::F32, op)?;
    let (gpu, prepared) = Prepared::new(op, qkv, geometry, scores, mask, &[packed, outs])?;
    if hopper::takes(op, &gpu, &prepared, geometry, dtype)? {
        hopper::forward(op, &gpu, &prepared, geometry, (dtype, suffix), [packed, outs, lses])?;
        return Ok((out, lse));
    }
    let width = Width::new(shape.head_dim, dtype);
    let dropout = if mask.is_some() { "dropout_" } else { "" };
    let (file, name, tile, more) = match dtype {
        DType::F32 => {
            let square = width.square();
            let tile = Tile { threads: THREADS, queries: square, keys: square, rows: 3 * square };
            (
                "attention_f32",
                format!("attention_forward_f32_{}", width.dim),
                tile,
                weights(square, 1),
            )
        }
        _ => {
            let keys = if width.dim == 256 || mask.is_some() { 32 } else { 64 };
            let threads = if width.dim == 256 { 256 } else { 128 };
            let tile = Tile { threads, queries: 128, keys, rows: 128 + 2 * keys };
            (
                "attention_forward",
                format!("attention_forward_{dropout}{suffix}_{}", width.dim),
                tile,
                0,
            )
        }
    };
    let grid = [blocks(op, s, tile.queries)?, blocks_y(op, shape.heads(), 1)?, blocks_y(op, b, 1)?];
    gpu.launch(file, &name, grid, tile.threads, width.shared(tile.rows) + more, |args| {
        // SAFETY: the kernel's structure has these fields and no padding.
        unsafe { args.structure(&prepared.call) }.ptr(packed).ptr(outs).ptr(lses);
    })?;
    Ok((out, lse))
}

/// As [`crate::tensor::arguments::attention::attention_backward`]; shapes must have been checked.
/// Also returns whether the gradients of rotated queries and keys were rotated back.
pub(crate) fn backward(
    op: &'static str,
    [dout, qkv, out, lse]: [&Tensor; 4],
    geometry: Geometry,
    scores: Scores,
    mask: Option<&Mask>,
    rotation: Option<&Rotation>,
) -> Result<(Tensor, bool)> {
    let Geometry { s, b, shape } = geometry;
    let (dtype, suffix) = (qkv.dtype(), suffix(qkv.dtype(), op)?);
    let gpu = Gpu::of(qkv, op)?;
    let packed = gpu.input(qkv, dtype, op, "qkv")?;
    let (douts, outs) = (gpu.input(dout, dtype, op, "dout")?, gpu.input(out, dtype, op, "out")?);
    let lses = gpu.input(lse, DType::F32, op, "lse")?;
    let (dqkv, dpacked) = gpu.output(qkv.dims(), dtype, op)?;
    let (_delta, deltas) = gpu.output((b, shape.heads(), s), DType::F32, op)?;
    let (gpu, prepared) =
        Prepared::new(op, qkv, geometry, scores, mask, &[packed, douts, dpacked])?;

    // Counters of pieces of work, for the Hopper kernels, and of turns. The first kernel clears
    // them.
    let on_hopper = hopper::takes(op, &gpu, &prepared, geometry, dtype)?;
    let one_pass = on_hopper && hopper::takes_one_pass(op, geometry)?;
    let cleared = 2 + if one_pass { hopper::turns(geometry) } else { 0 };
    let (_next, next) = gpu.output(cleared, DType::U32, op)?;
    let cleared = items(op, cleared)?;
    let rows = s * b * shape.heads();
    let lanes = shape.head_dim.div_ceil(16 / dtype.size_in_bytes()).next_power_of_two().min(32);
    let grid = [blocks(op, rows, THREADS as usize / lanes)?, 1, 1];
    gpu.launch(
        "attention_delta",
        &format!("attention_delta_{suffix}"),
        grid,
        THREADS,
        0,
        |args| {
            // SAFETY: the kernel's structure has these fields and no padding.
            unsafe { args.structure(&prepared.call) }
                .ptr(douts)
                .ptr(outs)
                .ptr(deltas)
                .ptr(next)
                .u32(cleared)
                .u32(lanes as u32);
        },
    )?;

    if on_hopper {
        let pointers = [douts, packed, lses, deltas, dpacked, next];
        let rotation = rotation.filter(|rotation| rotation.fits(s, b, shape));
        let turn_back = rotation
            .map(|rotation| hopper::TurnBack::new(op, &gpu, rotation))
            .transpose()?
            .flatten();
        hopper::backward(
            op,
            &gpu,
            &prepared,
            geometry,
            (dtype, suffix),
            pointers,
            turn_back,
            one_pass,
        )?;
        return Ok((dqkv, turn_back.is_some()));
    }
    let width = Width::new(shape.head_dim, dtype);
    let square = width.square();
    let (file, more, of_keys, of_queries) = match (dtype, width.dim) {
        (DType::F32, _) => {
            let tile =
                || Tile { threads: THREADS, queries: square, keys: square, rows: 4 * square };
            ("attention_f32", weights(square, 2), tile(), tile())
        }
        (_, dim) => {
            // Left operands of products stay resident; tiles of right operands are streamed.
            let tile = |queries: usize, keys: usize, stays: usize, comes: usize| Tile {
                threads: 128,
                queries,
                keys,
                rows: 2 * stays + 4 * comes,
            };
            let (of_keys, of_queries) = match dim {
                64 if mask.is_some() => (tile(16, 128, 128, 16), tile(128, 32, 128, 32)),
                64 => (tile(32, 128, 128, 32), tile(128, 32, 128, 32)),
                96 => (tile(64, 64, 64, 64), tile(64, 32, 64, 32)),
                128 => (tile(32, 64, 64, 32), tile(64, 32, 64, 32)),
                _ => (tile(16, 64, 64, 16), tile(64, 16, 64, 16)),
            };
            ("attention_backward", 0, of_keys, of_queries)
        }
    };
    let dropout = if mask.is_some() && dtype != DType::F32 { "dropout_" } else { "" };
    // For wide heads, registers hold either the gradients of keys or those of values: two blocks.
    let halves = if dtype != DType::F32 && width.dim == 256 { 2 } else { 1 };
    let grids = [
        (
            "dkdv",
            &of_keys,
            [
                blocks(op, s, of_keys.keys)?,
                blocks_y(op, shape.groups, 1)?,
                blocks_y(op, halves * b, 1)?,
            ],
        ),
        (
            "dq",
            &of_queries,
            [
                blocks(op, s, of_queries.queries)?,
                blocks_y(op, shape.heads(), 1)?,
                blocks_y(op, b, 1)?,
            ],
        ),
    ];
    for (of, tile, grid) in grids {
        let name = format!("attention_{of}_{dropout}{suffix}_{}", width.dim);
        gpu.launch(file, &name, grid, tile.threads, width.shared(tile.rows) + more, |args| {
            // SAFETY: as above.
            unsafe { args.structure(&prepared.call) }
                .ptr(douts)
                .ptr(packed)
                .ptr(lses)
                .ptr(deltas)
                .ptr(dpacked);
        })?;
    }
    Ok((dqkv, false))
}

/// As [`crate::tensor::arguments::attention::attention_cached`]; arguments must have been checked.
pub(crate) fn cached(
    op: &'static str,
    qkv: &Tensor,
    cache: &Tensor,
    starts: &[usize],
    geometry: Geometry,
    scores: Scores,
) -> Result<Tensor> {
    let Geometry { s: n, b, shape } = geometry;
    let (dtype, suffix) = (qkv.dtype(), suffix(qkv.dtype(), op)?);
    let gpu = Gpu::of(qkv, op)?;
    let packed = gpu.input(qkv, dtype, op, "qkv")?;
    let cached = gpu.inplace(cache, dtype, op, "cache")?;
    let from_the_start = starts.iter().all(|&start| start == 0);
    // The window applies to all positions, not only to the new ones.
    let window = scores.window.filter(|&window| starts.iter().any(|start| start + n > window));
    let (gpu, mut prepared) = Prepared::new(
        op,
        qkv,
        geometry,
        Scores { window: None, ..scores },
        None,
        &[packed, cached],
    )?;
    prepared.call.window = window.unwrap_or(0) as u32;
    let first: Vec<u32> = starts.iter().map(|&start| start as u32).collect();
    // This list is the same for every layer.
    let first = constant(first, b, qkv.device())?;
    let starts_at = gpu.input(&first, DType::U32, op, "starts")?;
    let grid = [blocks(op, n, 1)?, blocks_y(op, b, 1)?, 1];
    gpu.launch(
        "attention_cached",
        &format!("attention_append_{suffix}"),
        grid,
        THREADS,
        0,
        |args| {
            // SAFETY: the kernel's structure has these fields and no padding.
            unsafe { args.structure(&prepared.call) }.ptr(packed).ptr(cached).ptr(starts_at);
        },
    )?;
    if from_the_start {
        // A prompt: there are no tokens before the new ones.
        return forward(op, qkv, geometry, scores, None).map(|(out, _)| out);
    }
    let positions = starts.iter().max().map_or(0, |start| start + n);
    let (heads, pieces) = (shape.heads(), positions.div_ceil(PIECE));
    let (_statistics, statistics) = gpu.output((b, heads, n, pieces, 2), DType::F32, op)?;
    let (_sums, sums) = gpu.output((b, heads, n, pieces, shape.head_dim), DType::F32, op)?;
    let (out, outs) = gpu.output((n, b, heads * shape.head_dim), dtype, op)?;
    let batches = shape.heads_per_group.div_ceil(HEADS);
    let grid =
        [blocks(op, pieces, 1)?, blocks_y(op, n, 1)?, blocks_y(op, b * shape.groups * batches, 1)?];
    gpu.launch("attention_cached", &format!("attention_attend_{suffix}"), grid, 128, 0, |args| {
        // SAFETY: as above.
        unsafe { args.structure(&prepared.call) }
            .ptr(packed)
            .ptr(cached)
            .ptr(starts_at)
            .ptr(statistics)
            .ptr(sums);
    })?;
    let grid = [blocks(op, n, 1)?, blocks_y(op, heads, 1)?, blocks_y(op, b, 1)?];
    gpu.launch("attention_cached", &format!("attention_join_{suffix}"), grid, 128, 0, |args| {
        // SAFETY: as above.
        unsafe { args.structure(&prepared.call) }
            .ptr(statistics)
            .ptr(sums)
            .ptr(outs)
            .u32(pieces as u32);
    })?;
    Ok(out)
}
