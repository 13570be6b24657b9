//! Dropout fused with bias and residual on a GPU: `cuda/dropout.cu`.

use candle_core::{DType, Tensor};

use crate::Result;
use crate::tensor::arguments::dropout::Mask;
use crate::tensor::gpu::items::{Divider, in_vectors, items, variant, vector};
use crate::tensor::gpu::launch::blocks;
use crate::tensor::gpu::memory::suffix;
use crate::tensor::gpu::{DevicePointer, Gpu, THREADS};
use crate::tensor::view::rows_of;

/// Number of samples that fit into a launch.
const SAMPLES: usize = 64;

/// `Mask` of `cuda/dropout.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Samples {
    key: [u32; 4],
    threshold: u32,
    scale: f32,
    first: u64,
    seq_len: u64,
    samples: [u64; SAMPLES],
    first_sample: u32,
    num_samples: u32,
    /// Step and samples on the device, or 0.
    step_and_samples: u64,
}

impl Samples {
    fn none() -> Self {
        Self {
            key: [0; 4],
            threshold: 0,
            scale: 1.0,
            first: 0,
            seq_len: 0,
            samples: [0; SAMPLES],
            first_sample: 0,
            num_samples: 0,
            step_and_samples: 0,
        }
    }

    /// All samples; kernels read them on the device.
    fn on_device(mask: &Mask, at: DevicePointer) -> Self {
        Self {
            key: mask.without_step,
            num_samples: mask.tokens.samples.len() as u32,
            step_and_samples: at.address(),
            ..Self::new(mask, 0)
        }
    }

    /// The samples from index `first_sample` on, as many as fit.
    fn new(mask: &Mask, first_sample: usize) -> Self {
        let mut samples = [0; SAMPLES];
        let rest = &mask.tokens.samples[first_sample..];
        let now = rest.len().min(SAMPLES);
        samples[..now].copy_from_slice(&rest[..now]);
        Self {
            key: mask.key,
            threshold: mask.threshold,
            scale: mask.scale as f32,
            first: mask.tokens.seq_offset as u64,
            seq_len: mask.tokens.seq_len as u64,
            samples,
            first_sample: first_sample as u32,
            num_samples: now as u32,
            step_and_samples: 0,
        }
    }
}

/// `residual + dropout(x + bias)`; the shapes fit.
pub fn apply(
    x: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    mask: Option<&Mask>,
    op: &'static str,
) -> Result<Tensor> {
    let (gpu, dtype, suffix) = (Gpu::of(x, op)?, x.dtype(), suffix(x.dtype(), op)?);
    let shape = rows_of(x, op)?;
    let xs = gpu.input(x, dtype, op, "x")?;
    let bs = bias.map(|bias| gpu.input(bias, dtype, op, "bias")).transpose()?;
    let rs = residual.map(|r| gpu.input(r, dtype, op, "residual")).transpose()?;
    let (y, ys) = gpu.output(x.dims(), dtype, op)?;
    launch_add(&gpu, [xs, ys], [bs, rs], shape, mask, (dtype, suffix), op)?;
    Ok(y)
}

/// From `x` into `y`, which may be `x`, for `rows` rows of `h` elements; adds those of `[bias,
/// residual]` that are given.
pub fn launch_add(
    gpu: &Gpu,
    [xs, ys]: [DevicePointer; 2],
    [bs, rs]: [Option<DevicePointer>; 2],
    (rows, h): (usize, usize),
    mask: Option<&Mask>,
    (dtype, suffix): (DType, &str),
    op: &'static str,
) -> Result<()> {
    let vectors = in_vectors(h, dtype, &[Some(xs), bs, rs, Some(ys)]);
    let per_row = h.div_ceil(if vectors { vector(dtype) } else { 4 });
    let count = items(op, rows * per_row)?;
    let batch = mask.map_or(1, |mask| mask.tokens.samples.len().max(1));
    let (per_row, by_batch, width) =
        (Divider::new(op, per_row)?, Divider::new(op, batch)?, items(op, h)?);
    let kernel = format!("bias_dropout_add{}_{suffix}", variant(vectors));
    let grid = [blocks(op, count as usize, THREADS as usize)?, 1, 1];
    let launch = |samples: Samples| {
        gpu.launch("dropout", &kernel, grid, THREADS, 0, |args| {
            args.ptr(xs).optional(bs).optional(rs).ptr(ys).u32(count);
            if !vectors {
                args.u32(width);
            }
            // SAFETY: both have C layout, equal to the kernel's; neither has padding.
            unsafe { args.structure(&per_row).structure(&by_batch).structure(&samples) };
        })
    };
    let mask = mask.filter(|mask| mask.threshold > 0);
    let on_device = mask.and_then(|mask| mask.tokens.step_and_samples);
    let on_device =
        on_device.map(|t| gpu.input(t, DType::U32, op, "step and samples")).transpose()?;
    match (mask, on_device) {
        (None, _) => launch(Samples::none())?,
        (Some(mask), Some(at)) => launch(Samples::on_device(mask, at))?,
        (Some(mask), None) => {
            for first in (0..batch).step_by(SAMPLES) {
                launch(Samples::new(mask, first))?;
            }
        }
    }
    Ok(())
}
