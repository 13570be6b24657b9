//! What this rank's threads reach at best, measured beside the other ranks: the measure of a profile's figures.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use kernels::linear::linear;
use kernels::reduce::copy;

use crate::Result;

/// Operations and bytes a second of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ceilings {
    /// Of a matrix product in the model's dtype.
    pub flops: f64,
    /// Read and written by a copy.
    pub bytes: f64,
}

/// Edge of the product.
const EDGE: usize = 1024;
/// Elements of a copied array (32 MiB in f32), beyond a core's own caches.
const COPY: usize = 1 << 23;
/// Time for each measurement.
const BUDGET: Duration = Duration::from_millis(150);

impl Ceilings {
    /// Measures for about half a second.
    pub fn measure(dtype: DType) -> Result<Self> {
        let x = Tensor::ones((EDGE, EDGE), dtype, &Device::Cpu)?;
        let product = fastest(|| {
            linear(&x, &x, None)?;
            Ok(())
        })?;
        let from = Tensor::ones(COPY, DType::F32, &Device::Cpu)?;
        let to = from.copy()?;
        let copied = fastest(|| Ok(copy(&to, &from)?))?;
        Ok(Self { flops: 2.0 * (EDGE as f64).powi(3) / product, bytes: 2.0 * 4.0 * COPY as f64 / copied })
    }
}

/// Seconds of the fastest call within the budget.
fn fastest(mut operation: impl FnMut() -> Result<()>) -> Result<f64> {
    operation()?;
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    while begin.elapsed() < BUDGET {
        let start = Instant::now();
        operation()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}
