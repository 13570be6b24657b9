//! The best rates that this rank's threads, or its GPU, reach while the other ranks measure, too. A
//! profile compares its figures with these ceilings.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use kernels::ops::linear::linear;
use kernels::ops::reduce::copy;
use kernels::tensor::device::seconds;

use crate::{Error, Result};

/// Operations and bytes per second of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ceilings {
    /// Floating-point operations per second of a matrix product in the model's dtype.
    pub flops: f64,
    /// Bytes per second that a copy reads and writes.
    pub bytes: f64,
}

/// Edge length of the product's matrices, on a CPU and on a GPU.
const EDGE: [usize; 2] = [1024, 8192];
/// Elements of the copied array. In f32 these are 32 MiB, larger than a core's own caches, and 256
/// MiB, larger than a GPU's.
const COPY: [usize; 2] = [1 << 23, 1 << 26];
/// Time for each measurement.
const BUDGET: Duration = Duration::from_millis(150);

impl Ceilings {
    /// Measures for about half a second.
    pub fn measure(dtype: DType, device: &Device) -> Result<Self> {
        let of = usize::from(device.is_cuda());
        let (edge, elements) = (EDGE[of], COPY[of]);
        let x = Tensor::ones((edge, edge), dtype, device)?;
        let product = fastest(device, || {
            linear(&x, &x, None)?;
            Ok(())
        })?;
        let from = Tensor::ones(elements, DType::F32, device)?;
        let to = from.copy()?;
        let copied = fastest(device, || Ok(copy(&to, &from)?))?;
        Ok(Self {
            flops: 2.0 * (edge as f64).powi(3) / product,
            bytes: 2.0 * 4.0 * elements as f64 / copied,
        })
    }
}

/// Seconds of the fastest call within the budget.
fn fastest(device: &Device, mut operation: impl FnMut() -> Result<()>) -> Result<f64> {
    operation()?;
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    while begin.elapsed() < BUDGET {
        best = best.min(seconds::<Error>(device, &mut operation)?);
    }
    Ok(best)
}
